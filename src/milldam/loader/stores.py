"""A store as training sees it: documents by number, and windows, rows and streams of its tokens."""

from __future__ import annotations

from typing import Any

from milldam.errors import ConfigError
from milldam.loader.stream import TokenFile, TokenStream
from milldam.loader.views import Trainable
from milldam.store import reader

INDEX_FOLDER = "rows"


class Store(reader.Store, Trainable):
    """Documents of tokens, by number, and what training needs of them.

    store[i], len(store), for document in store        documents, as views into the mapped files
    store.windows(seq_len), .packed(seq_len), .streams(batch_size, seq_len)
    store.split(train=0.9, val=...)                    disjoint parts by tokens
    """

    def stream(self) -> TokenStream:
        if self.split_name is None and len(self.splits) > 1:
            raise ConfigError(
                f"{self.path}: has the splits {', '.join(self.splits)}; say which one is meant, such as "
                f'split="{self.splits[0]}".'
            )
        files = tuple(self._file(shard.name, shard.tokens) for shard in self.shards)
        return TokenStream(
            name=str(self.path) if self.split_name is None else f"{self.path} ({self.split_name})",
            files=files,
            dtype=self.dtype,
            first=0,
            stop=self.tokens,
            fingerprint=self.fingerprint if self.split_name is None else f"{self.fingerprint} {self.split_name}",
            cache=self.path / INDEX_FOLDER,
            pad_id=self.manifest.tokenizer.get("eos") or 0,
        )

    def _file(self, name: str, tokens: int) -> TokenFile:
        return TokenFile(self.path / f"{name}.bin", tokens, index=self.path / f"{name}.idx")

    def named_part(self, name: str) -> Store:
        return Store(self.path, split=name)

    def split(self, name: str | None = None, /, **parts: Any) -> Any:
        """A split of the store by its name, or disjoint parts by exact tokens.

        >>> store.split("val")                                # doctest: +SKIP
        >>> store.split(train=0.9, val=...)["train"]          # doctest: +SKIP
        """
        return super().split(**parts) if name is None else self.named_part(name)
