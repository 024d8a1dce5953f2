"""The second pass, for one unit: read, drop, filter, encode, write. Runs in a worker; holds one batch.

A unit gives one shard per split; a stream that can't be cut beforehand gives several parts, each closed at the first
batch after `shard_size` bytes of text. A text file larger than a document may be is encoded and written piece by piece:
it is neither filtered nor compared with others, and counted as `not_judged`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from milldam.errors import InputError
from milldam.memory import allowance, release, usage
from milldam.pipeline.documents import HEAD_BYTES, Reading, SetRules, open_reader, print_paths
from milldam.pipeline.judging import Judge, Selection, Step, drop_cleaned, preload_rules
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


@dataclass(frozen=True, slots=True)
class TokenizeLoad:
    """What every worker needs to know; it pickles."""

    out: Path
    sets: tuple[SetRules, ...]
    selection: Selection
    encoder: str
    differing: Ranges
    """Characters whose texts are encoded by HF tokenizers."""
    plain_specials: bool
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
        if self.selection.staged:
            return (STAGED,)
        whole = dict.fromkeys(one.split for one in self.sets if one.split is not None)
        return ("train", *self.selection.shares, *whole)

    def load(self) -> Make:
        tokenizer_json = (self.out / "tokenizer.json").read_text(encoding="utf-8")
        encoder = Encoder(
            self.encoder,
            tokenizer_json,
            plain_specials=self.plain_specials,
            threads=self.threads,
            differing=self.differing,
        )
        preload_rules(self.selection.filters, self.selection.clean)
        if self.selection.seen is not None:
            self.selection.seen.open()  # what it imports is there before workers are forked
        finder: TokenSpans | None = None
        if any(one.chat is not None for one in self.sets):
            from milldam.pipeline.chat_encoding import load_finder

            finder = load_finder(tokenizer_json)
        release()
        taken = usage().anonymous + BATCHES_BYTES
        encoder.stay_within(lambda: allowance(self.share_bytes) - taken)
        return UnitTokenizer(self, encoder, finder).make


class UnitTokenizer:
    """A worker's state: the encoder, loaded once."""

    def __init__(self, load: TokenizeLoad, encoder: Encoder, finder: TokenSpans | None) -> None:
        self._load, self._encoder, self._finder = load, encoder, finder

    def make(self, assigned: Assigned, progress: Progress) -> Iterator[Record]:
        load, unit, limit = self._load, assigned.unit, assigned.facts["documents"]
        rules = load.sets[unit.dataset]
        sides = 1 if rules.chat is None else rules.chat.sides
        judge = Judge(load.selection, rules, load.splits, unit)
        special = load.special if rules.chat is None else SpecialTokens(None, None)
        encoder = DocumentEncoder(self._encoder, special, load.dtype)
        steps = self._steps(judge, encoder, rules, unit)
        kept, reader = self._open(assigned, rules)
        with UnitSink(load, assigned, judge.explain) as sink:
            pieces, read = _Pieces(judge, encoder, sink), 0
            progress.lap()
            for batch in reader:
                progress.lap("read")
                if sink.is_full and len(batch.texts) and not pieces.inside:
                    yield self._commit(sink, unit, progress, last=False)
                sink.begin(batch)
                if batch.part:
                    told = pieces.add(batch)
                    progress.lap("encode")
                else:
                    for name, step in steps:
                        batch = step(batch)
                        progress.lap(name)
                    if limit is not None:  # what lies behind it counts as not read
                        batch = batch.only(np.arange(len(batch.rows)) < (limit - sink.documents) // sides)
                    told = sink.add(batch)
                    progress.lap("write")
                before, read = read, read + batch.bytes_read
                progress.add(**told, input_bytes=unit.input_bytes(read) - unit.input_bytes(before))
                if limit is not None and sink.documents + sides > limit:
                    break
            yield self._commit(sink, unit, progress, last=True)
        # Not while a repetition of the unit may want them.
        if kept is not None and rules.weight <= 1:
            kept.unlink(missing_ok=True)

    def _steps(self, judge: Judge, encoder: DocumentEncoder, rules: SetRules, unit: Unit) -> list[tuple[str, Step]]:
        """What each batch goes through, and what its time is booked as."""
        steps: list[tuple[str, Step]] = [("filter", step) for step in judge.steps_on_texts()]
        selection = self._load.selection
        if selection.drops is not None and any(number == unit.index for number, _ in selection.shown):
            from milldam.pipeline.near_examples import ShownTexts

            shown = ShownTexts(selection.drops, unit.index, selection.shown, rules)
            steps.insert(0, ("filter", shown.look))
        if rules.chat is None:
            return [*steps, *(("encode", step) for step in (Encode(encoder), judge.judge_tokens, judge.describe))]
        from milldam.pipeline.chat_encoding import ChatEncoder

        assert self._finder is not None
        chat = ChatEncoder(rules.chat, encoder, self._finder, self._load.special)
        encoding = (chat.encode, judge.judge_tokens, chat.finish, judge.describe)
        return [*steps, *(("encode", step) for step in encoding)]

    def _open(self, assigned: Assigned, rules: SetRules) -> tuple[Path | None, Iterator[Batch]]:
        """Where the first pass may have kept the batches of the unit, and its batches."""
        load, begun, facts, kept = self._load, assigned.begun, assigned.facts, None
        reading = Reading(
            assigned.unit,
            rules,
            load.selection.clean,
            rows=facts["rows"],
            skip_batches=0 if begun is None else begun.facts["batches"],
            spool=str(load.out / RUN_FOLDER),
            # With cores to spare, reading goes on in a thread while the encoder, which holds no lock, encodes.
            ahead=load.threads > 1,
        )
        if facts["prints"] is not None:
            from milldam.pipeline.first_pass import PRINTS

            kept = print_paths(load.out / RUN_FOLDER / PRINTS, facts["prints"])[2]
        return kept, open_reader(reading, kept)

    def _commit(self, sink: UnitSink, unit: Unit, progress: Progress, *, last: bool) -> Record:
        for slice in unit.slices if self._load.only_as_listed else ():
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


class Encode:
    """Texts to ids, with the special tokens of documents; what gives no token, and what can't be cut, is dropped."""

    def __init__(self, encoder: DocumentEncoder) -> None:
        self._encoder = encoder

    def __call__(self, batch: Batch) -> Batch:
        encoder, texts = self._encoder, batch.texts
        batch.ids, batch.lengths = ids_of(encoder, texts)
        batch.counts["exact_documents"], encoder.exact_documents = encoder.exact_documents, 0
        empty = batch.lengths == 0
        if not empty.any():
            return batch
        verdicts = Verdicts(len(texts))
        verdicts.drop(np.isin(np.arange(len(texts)), encoder.uncut), NO_WHITE_SPACE)
        verdicts.drop(empty, EMPTY)
        return batch.narrow(verdicts, "encode")


def ids_of(encoder: DocumentEncoder, texts: Any) -> tuple[Any, Any]:
    """The ids of some texts, end to end, and how many each has."""
    found, lengths = [np.empty(0, encoder.dtype)], np.zeros(len(texts), np.int64)
    for tokens in encoder.encode(texts):
        lengths[tokens.positions] = tokens.lengths
        found.append(tokens.flat)
    encoder.dropped.clear()  # counted by who narrows the batch
    return found[1] if len(found) == 2 else np.concatenate(found), lengths


class _Pieces:
    """A document that comes in pieces, encoded and written as they come. Holds a piece."""

    def __init__(self, judge: Judge, encoder: DocumentEncoder, sink: UnitSink) -> None:
        self._judge, self._encoder, self._sink = judge, encoder, sink
        self.inside = False
        """Whether the document is not at its end."""
        self._head = ""
        self._lost: tuple[str, str] | None = None
        """Stage and reason, where it is dropped."""
        self._facts: Any = None
        self._tokens = 0

    def add(self, batch: Batch) -> dict[str, int]:
        """The next piece; what is counted of the document with its last one. The first one decides on its split, and
        whether it is in a sample."""
        judge, sink, row = self._judge, self._sink, batch.first_row
        if not self.inside:
            self._head, self._facts, self._lost = batch.texts[0].as_py()[:HEAD_BYTES], None, None
            self._tokens = 0
            judged = judge.sample(drop_cleaned(batch))
            if judged.dropped:
                self._lost = judged.dropped[0][:2]
            else:
                sink.begin_document(int(judge.describe(batch).splits[0]))
        self.inside = batch.open
        if self._lost is None:
            self._encode(batch)
        if batch.open:
            return {}
        if self._lost is None and not self._tokens:
            self._lost = "encode", EMPTY
            sink.take_back()
        if self._lost is not None:
            sink.drop(*self._lost, row, self._head)
            return {}
        sink.counts["exact_documents"] += self._encoder.exact_documents
        self._encoder.exact_documents = 0
        return sink.end_document(self._facts)

    def _encode(self, batch: Batch) -> None:
        facts = self._judge.describe(batch).facts
        assert facts is not None
        if self._facts is not None:
            facts["key"] = self._facts["key"]
            for name in ("text_bytes", "characters"):
                facts[name] += self._facts[name]
        self._facts = facts
        try:
            for tokens in self._encoder.encode(batch.texts, open=batch.open):
                self._sink.add_piece(tokens)
                self._tokens += len(tokens.flat)
        except NoWhiteSpaceError:
            self._lost = "encode", NO_WHITE_SPACE
            self._encoder.cancel()
            self._sink.take_back()
