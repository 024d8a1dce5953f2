"""The order of the stages in the second pass, for one unit: read, clean, drop, filter, encode, filter, write.

Runs in a worker. Holds one batch. A unit gives one shard per split; a stream that can't be cut beforehand gives
several, each closed at the first batch after `shard_size` bytes of text. What is committed is reported at once, and
never made again. A document larger than a batch flows in parts: what its first MiB decides is known before any of it
is written, and what only its end decides takes back what was written.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from milldam.errors import InputError
from milldam.memory import allowance, release, usage
from milldam.pipeline.documents import (
    Assignment,
    Documents,
    Reading,
    SetRules,
    open_reader,
    print_paths,
)
from milldam.pipeline.judging import Facts, Judge, Selection, no_drops, preload_rules
from milldam.pipeline.unit_output import STAGED, Committed, UnitOutput
from milldam.run.engine import Assigned, Make, Telling
from milldam.run.folder import RUN_FOLDER
from milldam.run.pools import BATCHES_BYTES
from milldam.run.records import Record
from milldam.sources.units import Unit, is_as_listed
from milldam.stores.tokens.manifest import READ
from milldam.stores.tokens.writer import Tokens
from milldam.tokenizers.document_encoder import NO_WHITE_SPACE, DocumentEncoder
from milldam.tokenizers.encoders import Encoder, Ranges
from milldam.tokenizers.loading import SpecialTokens

if TYPE_CHECKING:
    from milldam.chat.reading import ChatRecipe, Sides
    from milldam.chat.token_spans import TokenSpans
    from milldam.pipeline.chat_encoding import ChatEncoder
    from milldam.pipeline.giants import Giants
    from milldam.pipeline.near_examples import ShownTexts


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

    def texts_of(self, assignment: Assignment) -> Path | None:
        """Where the first pass may have kept the texts of a unit."""
        if assignment.prints is None:
            return None
        from milldam.pipeline.first_pass import PRINTS

        return print_paths(self.out / RUN_FOLDER / PRINTS, assignment.prints)[2]

    def shown_of(self, unit: Unit) -> ShownTexts | None:
        """What sets texts of a unit aside; None: nothing does."""
        folder = self.selection.drops
        if folder is None or all(number != unit.index for number, _ in self.selection.shown):
            return None
        from milldam.pipeline.near_examples import ShownTexts

        return ShownTexts(folder, unit.index, self.selection.shown, self.sets[unit.dataset])

    def load(self) -> Make:
        return UnitTokenizer(self)


class UnitTokenizer:
    """A worker's state: the encoder, loaded once."""

    def __init__(self, task: TokenizeLoad) -> None:
        self._task = task
        tokenizer_json = (task.out / "tokenizer.json").read_text(encoding="utf-8")
        self._encoder = Encoder(
            task.encoder,
            tokenizer_json,
            plain_specials=task.plain_specials,
            threads=task.threads,
            differing=task.differing,
        )
        preload_rules(task.selection.filters, task.selection.clean)
        if task.selection.seen is not None:
            task.selection.seen.open()  # what it imports is there before workers are forked
        self._finder: TokenSpans | None = None
        if any(one.chat is not None for one in task.sets):
            self._finder = _load_chat(tokenizer_json)
        release()
        taken = usage().anonymous + BATCHES_BYTES
        self._encoder.stay_within(lambda: allowance(task.share_bytes) - taken)

    def __call__(self, assigned: Assigned, telling: Telling) -> Iterator[Record]:
        begun, facts = assigned.begun, assigned.facts
        batches = 0 if begun is None else begun.facts["batches"]
        assignment = Assignment(assigned.unit, assigned.key, assigned.next_part, batches, **facts)
        rules = self._task.sets[assignment.unit.dataset]
        recipe = rules.chat
        special = self._task.special if recipe is None else SpecialTokens(None, None)
        encoder = DocumentEncoder(self._encoder, special, self._task.dtype)
        judge = Judge(self._task.selection, rules, self._task.splits, assignment.unit)
        chat = None if recipe is None else self._chat_encoder(recipe, encoder)
        with UnitOutput(self._task, assignment, judge) as output:
            for record in _UnitWork(self._task, assignment, _Stages(judge, encoder, output, chat), telling).run():
                if self._task.only_as_listed:
                    _require_as_listed(assigned.unit)
                yield record
        texts = self._task.texts_of(assignment)
        # Not while a repetition of the unit may want them.
        if texts is not None and rules.weight <= 1:
            texts.unlink(missing_ok=True)

    def _chat_encoder(self, recipe: ChatRecipe, encoder: DocumentEncoder) -> ChatEncoder:
        from milldam.pipeline.chat_encoding import ChatEncoder

        assert self._finder is not None
        return ChatEncoder(recipe, encoder, self._finder, self._task.special)


def _require_as_listed(unit: Unit) -> None:
    for slice in unit.slices:
        if not is_as_listed(slice.path, slice.state):
            raise InputError(
                f"{slice.path}: changed or gone while it was read, so that what was read of it is not used. "
                "Open the data again to train on the input as it is now."
            )


def _load_chat(tokenizer_json: str) -> TokenSpans:
    """What conversations need, where workers forked later share it."""
    from milldam.chat.token_spans import TokenSpans
    from milldam.pipeline.chat_encoding import HuggingFace

    huggingface = HuggingFace(tokenizer_json)
    finder = TokenSpans(tokenizer_json, huggingface)
    if finder.needs_huggingface:
        huggingface.load()
    return finder


@dataclass(slots=True)
class _Records:
    """What comes with the texts of conversations that are not encoded yet."""

    sides: Sides
    grouped: pa.LargeStringArray | None

    @classmethod
    def of(cls, documents: Documents, keep: Any, *, group_by_prompt: bool) -> _Records | None:
        if documents.sides is None:
            return None
        prompts = documents.prompts if group_by_prompt else None
        grouped = None if prompts is None else prompts.filter(pa.array(keep))
        return cls(documents.sides.only(keep), grouped)

    def take(self, records: int) -> tuple[Sides, pa.LargeStringArray | None]:
        """What is beside the first ones, which are encoded now."""
        first = np.arange(len(self.sides.cuts)) < records
        taken = self.sides.only(first), None if self.grouped is None else self.grouped[:records]
        self.sides, self.grouped = self.sides.only(~first), None if self.grouped is None else self.grouped[records:]
        return taken


class _Stages(NamedTuple):
    """What documents go through on their way from the reader to the disk."""

    judge: Judge
    encoder: DocumentEncoder
    output: UnitOutput
    chat: ChatEncoder | None


class _UnitWork:
    """One unit on its way through the stages."""

    def __init__(self, task: TokenizeLoad, assignment: Assignment, stages: _Stages, telling: Telling) -> None:
        self._task, self._given, self._telling = task, assignment, telling
        self._judge, self._encoder, self._output, self._chat = stages
        recipe = task.sets[assignment.unit.dataset].chat
        self._sides = 1 if recipe is None else recipe.sides
        """Documents a record."""
        self._group_by_prompt = recipe is not None and recipe.group_by_prompt
        self._chat_counts: Counter[str] = Counter()
        reading = Reading(
            assignment.unit,
            task.sets[assignment.unit.dataset],
            task.selection.clean,
            rows=assignment.rows,
            skip_batches=assignment.batches,
            spool=str(task.out / RUN_FOLDER),
            # With cores to spare, reading goes on in a thread while the encoder, which holds no lock, encodes.
            ahead=task.threads > 1,
        )
        self._reader = open_reader(reading, task.texts_of(assignment))
        self._shown = task.shown_of(assignment.unit)
        self._read = self._bytes_read = self._input_bytes = 0
        self._giants: Giants | None = None
        self._told = dict.fromkeys(("tokens", "text_bytes", "characters", "documents", "input_bytes"), 0)
        self._seconds = {"filter": 0.0, "encode": 0.0, "write": 0.0, "commit": 0.0}

    def run(self) -> Iterator[Record]:
        for documents in self._reader:
            self._output.marks = documents.marks
            for reject in documents.rejects:
                self._output.reject(reject)
            if self._shown is not None:
                self._shown.look(documents)
            full = self._output.text_bytes >= self._task.shard_size
            if full and len(documents.texts) and not self._inside_giant:
                yield self._commit(last=False)
            if documents.part:
                self._work_on_part(documents)
            elif len(documents.texts):
                self._work_on_whole(documents)
            self._bytes_read += documents.bytes_read
            self._input_bytes = self._given.unit.input_bytes(self._bytes_read)
            self._send_progress()
            if self._enough():
                break
        self._input_bytes = self._given.unit.size
        yield self._commit(last=True)

    @property
    def _inside_giant(self) -> bool:
        return self._giants is not None and self._giants.inside

    def _work_on_part(self, documents: Documents) -> None:
        if self._giants is None:
            # Most units have none.
            from milldam.pipeline.giants import Giants

            self._giants = Giants(self._judge, self._encoder, self._output, self._seconds)
        self._read += not self._giants.inside
        self._giants.add(documents)

    def _work_on_whole(self, documents: Documents) -> None:
        started = time.perf_counter()
        texts, verdicts = documents.texts, documents.verdicts
        self._read += len(texts)
        self._chat_counts += Counter(special_tokens_in_content=documents.with_special_tokens)
        self._judge.judge(documents)
        keep = verdicts.keep
        if not keep.all():
            self._output.set_aside(texts, verdicts, documents.first_row + np.arange(len(texts)))
            texts = texts.filter(pa.array(keep))
        self._seconds["filter"] += time.perf_counter() - started
        rows = documents.first_row + np.flatnonzero(keep)
        records = _Records.of(documents, keep, group_by_prompt=self._group_by_prompt)
        for some in self._within_limit(texts):
            if records is None:
                self._encode(some, rows[: len(some)])
            else:
                self._encode_conversations(some, rows[: len(some)], *records.take(len(some)))
            rows = rows[len(some) :]
        # What lies behind the limit counts as not read.
        self._read -= len(rows)

    def _within_limit(self, texts: pa.LargeStringArray) -> Iterator[pa.LargeStringArray]:
        """As many documents as may still be taken; those that turn out empty make room for others."""
        while len(texts) and not self._enough():
            limit = self._given.documents
            taken = len(texts) if limit is None else (limit - self._output.documents) // self._sides
            yield texts[:taken]
            texts = texts[taken:]

    def _encode(self, texts: pa.LargeStringArray, rows: Any) -> None:
        started = time.perf_counter()
        facts = self._judge.facts(texts, rows)
        for tokens in self._encoder.encode(texts):
            encoded = time.perf_counter()
            self._seconds["encode"] += encoded - started
            self._take(tokens, facts, texts)
            started = time.perf_counter()
            self._seconds["write"] += started - encoded
        for position in self._encoder.uncut:
            self._output.drop(texts[position].as_py(), NO_WHITE_SPACE, int(facts.rows[position]))
        self._seconds["encode"] += time.perf_counter() - started

    def _encode_conversations(
        self, texts: pa.LargeStringArray, rows: Any, sides: Sides, grouped: pa.LargeStringArray | None
    ) -> None:
        assert self._chat is not None
        started = time.perf_counter()
        encoded = self._chat.encode(texts, sides)
        verdicts, keep = encoded.verdicts, encoded.verdicts.keep
        self._judge.dropped["encode"] += verdicts.counts()
        longest = encoded.tokens.lengths.reshape(-1, sides.count).max(axis=1, initial=0)
        verdicts.merge(self._judge.judge_tokens(longest[keep]), keep)
        keep = verdicts.keep
        self._output.set_aside(texts, verdicts, rows)
        both = np.repeat(keep, sides.count)
        tokens = self._chat.finished(encoded.tokens.only(both))
        facts = self._judge.facts(texts, rows, grouped).of_sides(sides.texts(texts), sides.count)
        facts = facts.at(np.flatnonzero(both))
        assert tokens.spans is not None
        self._chat_counts += encoded.counts + sides.turn_counts(both)
        self._chat_counts += Counter(conversations=len(tokens.lengths), trained_tokens=tokens.spans.trained_tokens)
        encoded_at = time.perf_counter()
        self._seconds["encode"] += encoded_at - started
        self._output.add(tokens, facts)
        self._seconds["write"] += time.perf_counter() - encoded_at

    def _take(self, tokens: Tokens, facts: Facts, texts: pa.LargeStringArray) -> None:
        assert tokens.positions is not None
        facts = facts.at(tokens.positions)
        if tokens.open or self._output.in_pieces:
            reason = self._output.add_piece(tokens, facts)
            if reason is not None:
                self._output.drop(texts[int(tokens.positions[0])].as_py(), reason, int(facts.rows[0]))
            return
        verdicts = self._judge.judge_tokens(tokens.lengths)
        if not verdicts.keep.all():
            self._output.set_aside(texts.take(pa.array(tokens.positions)), verdicts, facts.rows)
            tokens, facts = tokens.only(verdicts.keep), facts.at(np.flatnonzero(verdicts.keep))
        self._output.add(tokens, facts)

    def _enough(self) -> bool:
        return self._given.documents is not None and self._output.documents + self._sides > self._given.documents

    def _commit(self, *, last: bool) -> Record:
        started = time.perf_counter()
        part, committed = self._output.part, self._output.commit()
        # Apart from writing: most of it is waiting for the disk.
        self._seconds["commit"] += time.perf_counter() - started
        self._send_progress()
        record = self._record(part, committed, last=last)
        self._read = 0
        self._judge.dropped = no_drops()
        self._encoder.dropped.clear()
        self._chat_counts.clear()
        return record

    def _record(self, part: int, committed: Committed, *, last: bool) -> Record:
        shards, dropped = committed.shards, self._judge.dropped | {READ: committed.rejected}
        dropped["encode"] += self._encoder.dropped
        facts = {
            "shards": shards,
            "read": self._read,
            "dropped": {stage: dict(counts) for stage, counts in dropped.items() if counts},
            "batches": self._reader.batches - (not last),
            "dataset": self._given.unit.dataset,
        }
        if self._encoder.exact_documents:
            facts["exact_documents"], self._encoder.exact_documents = self._encoder.exact_documents, 0
        if self._chat is not None:
            facts |= {"chat": dict(self._chat_counts), "sides": self._sides}
        counts = {name: sum(shard[name] for shard in shards) for name in ("documents", "tokens", "text_bytes")}
        made = {"outputs": committed.outputs, "files": committed.files}
        return Record(self._given.key, part, last, counts=counts, facts=facts, **made)

    def _send_progress(self) -> None:
        counts = dict(self._output.counts) | {"documents": self._output.documents, "input_bytes": self._input_bytes}
        self._telling.add(**{name: count - self._told[name] for name, count in counts.items()})
        self._told.update(counts)
        self._telling.seconds.update(self._reader.seconds | self._seconds)
