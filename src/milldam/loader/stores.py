"""A store as training sees it: documents by number, and windows, rows and streams of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import overload

from milldam.errors import ConfigError
from milldam.loader.stream import TokenFile, TokenStream
from milldam.loader.views import Part, Trainable
from milldam.stores.place import Place
from milldam.stores.tokens import reader
from milldam.stores.tokens.manifest import Shard


class Store(reader.Store, Trainable):
    """A token store: its documents by number, and the ways to train on them.

    store[i], len(store), for document in store        documents, as views into the mapped files
    store.windows(seq_len), .packed(seq_len), .streams(batch_size, seq_len), .conversations(), .pairs()
    store.split(train=0.9, val=...)                    disjoint parts by tokens

    >>> store = milldam.Store("corpus.milldam")
    >>> len(store), store.tokens, store[0][:4]
    (91, 23862, array([  33, 1655,  547, 1745], dtype=uint16))
    >>> store.decode(store[0][:8])
    'A tide mill works on a clock that'
    """

    def stream(self) -> TokenStream:
        require_choice(self.name, self.split_name, self.splits)
        # The only split is the whole store, named or not: a state of the one goes on with the other.
        part = self.split_name if len(self.splits) > 1 else None
        files = tuple(token_file(self.place, shard) for shard in self.shards)
        return TokenStream(
            name=self.name if part is None else f"{self.name} ({part})",
            files=files,
            dtype=self.dtype,
            first=0,
            stop=self.tokens,
            fingerprint=self.fingerprint if part is None else f"{self.fingerprint} {part}",
            cache=self.place.rows,
            pad_id=self.manifest.tokenizer.get("eos") or 0,
            tokenizer=self.manifest.tokenizer.get("xxh3"),
            pairs=self.manifest.chat is not None and self.manifest.chat["pairs"],
            origin=self.place.origin,
        )

    def named_part(self, name: str) -> Store:
        require_opened_for(self.name, self.split_name, name)
        return Store(self.place, split=name)

    @overload
    def split(self, name: str, /) -> Store: ...
    @overload
    def split(self, /, **parts: float | EllipsisType) -> dict[str, Part]: ...
    def split(self, name: str | None = None, /, **parts: float | EllipsisType) -> Store | dict[str, Part]:
        """A split of the store by its name, or disjoint parts by exact tokens.

        >>> store.split("train")
        Store('corpus.milldam', split train: ...)
        >>> store.split(train=0.9, val=...)["train"]
        Part(corpus.milldam, train: tokens 0 to 21,475)
        """
        part = self if name is None else self.named_part(name)
        return super(Store, part).split(**parts) if parts or name is None else part


def token_file(place: Place, shard: Shard) -> TokenFile:
    """The files of a shard, where they lie or will lie on this machine."""
    paths = {ending: place.local(f"{shard.name}.{ending}", file) for ending, file in shard.files.items()}
    spans, labels = paths.get("spans"), paths.get("labels")
    return TokenFile(paths["bin"], shard.tokens, index=paths["idx"], spans=spans, labels=labels)


def require_choice(name: str, chosen: str | None, splits: Sequence[str]) -> None:
    """Refuse data of several splits of which none is chosen."""
    if chosen is None and len(splits) > 1:
        raise ConfigError(
            f'{name}: has the splits {", ".join(splits)}; say which one is meant, such as split="{splits[0]}".'
        )


def require_opened_for(name: str, opened: str | None, asked: str) -> None:
    """Refuse a split of data that was opened for another one."""
    if opened not in (None, asked):
        raise ConfigError(f'{name}: was opened for its split "{opened}", and "{asked}" is asked for. Open it again.')
