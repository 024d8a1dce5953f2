"""The second pass, for one unit: read, drop, filter, encode, write. Runs in a worker; holds one batch.

A unit gives one shard per split; a stream that can't be cut beforehand gives several parts, each closed at the first
batch after `shard_size` bytes of text. The tokens of a document in pieces go through a temporary file.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from milldam.config.settings import Config
from milldam.errors import InputError
from milldam.memory import held_bytes, release
from milldam.pipeline.documents import SetRules, kept_batches, print_path, read_documents
from milldam.pipeline.judging import Judge, preload_rules
from milldam.pipeline.unit_output import STAGED, UnitSink
from milldam.run.budget import BATCHES_BYTES
from milldam.run.engine import Assigned, Make, Progress
from milldam.run.folder import RUN_FOLDER
from milldam.run.records import Record
from milldam.sources.batch import Batch
from milldam.sources.units import Unit, is_as_listed
from milldam.text.arrays import Verdicts
from milldam.tokenizers.document_encoder import EMPTY, NO_WHITE_SPACE, DocumentEncoder, NoWhiteSpaceError
from milldam.tokenizers.encoders import Encoder, Ranges
from milldam.tokenizers.loading import SpecialTokens

if TYPE_CHECKING:
    from milldam.chat.token_spans import TokenSpans
    from milldam.dedup.index import SeenBefore
    from milldam.dedup.near import Place

Step = Callable[[Batch], Batch]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeLoad:
    """The settings of every worker; it pickles."""

    out: Path
    config: Config
    sets: tuple[SetRules, ...]
    drops: Path | None = None
    """Folder of the drop files; None: there was no first pass."""
    seen: dict[str, Path] = field(default_factory=dict)
    """Runs of the index by id, in the order in which they are numbered, and their hash files."""
    shown: tuple[Place, ...] = ()
    """Documents whose texts are set aside beside the drop sets, to be looked at."""
    encoder: str
    differing: Ranges
    """Characters whose texts are encoded by HF tokenizers."""
    special: SpecialTokens
    dtype: str
    shard_size: int
    share_bytes: int
    """Anonymous memory that this worker may use, but for what unpacking the input takes."""
    threads: int
    only_as_listed: bool = False
    """Refuse what was made of a unit whose input is no longer what was planned."""

    @property
    def splits(self) -> tuple[str, ...]:
        """Their names by number."""
        whole = dict.fromkeys(one.split for one in self.sets if one.split is not None)
        return (STAGED,) if self.config.counts_tokens else ("train", *self.config.split_shares, *whole)

    def open_index(self) -> SeenBefore | None:
        """The index whose documents are dropped without a first pass; None: there is none."""
        rules = self.config.index_rules
        if rules is None:
            return None
        from milldam.dedup.index import SeenBefore

        return SeenBefore(tuple(self.seen.values()), normalize=rules.normalize)

    def load(self) -> Make:
        text = (self.out / "tokenizer.json").read_text(encoding="utf-8")
        encoder = Encoder(
            self.encoder,
            text,
            plain_specials=self.config.tokenizer_rules.special_text == "plain",
            threads=self.threads,
            differing=self.differing,
        )
        finder = None
        preload_rules(self.config.filters, self.config.clean_rules)
        self.open_index()  # what it imports is there before workers are forked
        if any(one.chat is not None for one in self.sets):
            from milldam.chat.token_spans import TokenSpans

            finder = TokenSpans(text)
        release()
        taken = held_bytes() + BATCHES_BYTES
        encoder.room = lambda: self.share_bytes - taken
        return functools.partial(self._make, encoder, finder)

    def _make(
        self, encoder: Encoder, finder: TokenSpans | None, assigned: Assigned, progress: Progress
    ) -> Iterator[Record]:
        unit, limit, prints = assigned.unit, assigned.facts["documents"], assigned.facts["prints"]
        rules, folder = self.sets[unit.dataset], self.out / RUN_FOLDER
        sides = 1 if rules.chat is None else rules.chat.sides
        judge = Judge(self, rules, unit)
        steps = self._steps(judge, encoder, finder, unit, progress)
        skip = 0 if assigned.begun is None else assigned.begun.facts["batches"]
        kept = None if prints is None else print_path(folder / "prints", "texts", prints)
        if kept is not None and kept.exists():
            batches = kept_batches(kept, skip)
        else:
            rows = assigned.facts["rows"]
            # With cores to spare, reading goes on in a thread while the encoder, which holds no lock, encodes.
            reading: dict[str, Any] = {"rows": rows, "skip_batches": skip}
            batches = read_documents(unit, rules, self.config.clean_rules, ahead=self.threads > 1, **reading)
        with UnitSink(self, assigned, judge.explain) as sink:
            read = 0
            progress.lap()
            for batch in batches:
                progress.lap("read")
                if sink.is_full and len(batch.texts):
                    yield self._commit(sink, unit, progress, last=False)
                sink.begin(batch)
                for name, step in steps:
                    batch = step(batch)
                    progress.lap(name)
                if limit is not None:  # what lies behind it counts as not read
                    batch = batch.only(np.arange(len(batch.rows)) < (limit - sink.documents) // sides)
                counts = sink.add(batch)
                progress.lap("write")
                before, read = read, read + batch.bytes_read
                progress.add(**counts, input_bytes=unit.input_bytes(read) - unit.input_bytes(before))
                if limit is not None and sink.documents + sides > limit:
                    break
            yield self._commit(sink, unit, progress, last=True)
        # Not while a repetition of the unit may want them.
        if kept is not None and rules.weight <= 1:
            kept.unlink(missing_ok=True)

    def _steps(
        self, judge: Judge, encoder: Encoder, finder: TokenSpans | None, unit: Unit, progress: Progress
    ) -> list[tuple[str, Step]]:
        """The steps of each batch, and what the time of each is booked as."""
        rules, steps = self.sets[unit.dataset], list[tuple[str, Step]]()
        if self.drops is not None and any(number == unit.index for number, _ in self.shown):
            from milldam.pipeline.near_examples import set_aside

            steps.append(("filter", functools.partial(set_aside, self.drops, unit.index, self.shown, rules)))
        steps.append(("filter", judge.judge_texts))
        if rules.chat is None:
            documents = DocumentEncoder(encoder, self.special, self.dtype)
            encode = functools.partial(
                self._encode, documents, lambda size: progress.add(input_bytes=unit.input_bytes(size))
            )
            encoding: list[Step] = [encode, judge.judge_tokens, judge.describe]
        else:
            from milldam.pipeline.chat_encoding import ChatEncoder

            assert finder is not None
            documents = DocumentEncoder(encoder, SpecialTokens(None, None), self.dtype)
            chat = ChatEncoder(rules.chat, documents, finder, self.special)
            encoding = [chat.encode, judge.judge_tokens, chat.finish, judge.describe]
        return steps + [("encode", step) for step in encoding]

    def _encode(self, encoder: DocumentEncoder, count_read: Callable[[int], None], batch: Batch) -> Batch:
        """Texts to ids, with the special tokens of documents; what gives no token, or can't be cut, is dropped."""
        verdicts = Verdicts(len(batch.texts))
        if batch.pieces is not None and len(batch.texts):
            batch.ids, uncut = self._encode_pieces(encoder, count_read, batch)
            batch.lengths, batch.counts["not_judged"] = np.array([len(batch.ids)]), int(len(batch.ids) > 0)
        else:
            batch.ids, batch.lengths = encoder.encode(batch.texts)
            uncut = encoder.uncut
        batch.counts["exact_documents"], encoder.exact_documents = encoder.exact_documents, 0
        empty = batch.lengths == 0
        if empty.any():
            verdicts.drop(np.isin(np.arange(len(empty)), uncut), NO_WHITE_SPACE)
            verdicts.drop(empty, EMPTY)
        return batch.narrow(verdicts, "encode")

    def _encode_pieces(
        self, encoder: DocumentEncoder, count_read: Callable[[int], None], batch: Batch
    ) -> tuple[Any, list[int]]:
        """The ids of a document in pieces, in a file that is mapped; and [0] where it could not be cut."""
        text_bytes = characters = 0

        def texts() -> Iterator[bytes]:
            nonlocal text_bytes, characters
            for piece, size in batch.pieces or ():
                text = piece.encode()
                text_bytes, characters = text_bytes + len(text), characters + len(piece)
                yield text
                count_read(size)

        with tempfile.TemporaryFile(dir=self.out / RUN_FOLDER) as file:
            try:
                for ids in encoder.encode_pieces(texts()):
                    file.write(ids.data)
            except NoWhiteSpaceError:
                return np.empty(0, encoder.dtype), [0]
            batch.text_size = text_bytes, characters
            return np.memmap(file, encoder.dtype, "r") if file.tell() else np.empty(0, encoder.dtype), []

    def _commit(self, sink: UnitSink, unit: Unit, progress: Progress, *, last: bool) -> Record:
        for slice in unit.slices if self.only_as_listed else ():
            if not is_as_listed(slice.path, slice.state):
                raise InputError(
                    f"{slice.path}: changed or gone while it was read, so that what was read of it is not used. "
                    "Open the data again to train on the input as it is now."
                )
        progress.lap("write")
        record = sink.commit(last=last)
        # Apart from writing: most of it is waiting for the disk.
        progress.lap("commit")
        return record
