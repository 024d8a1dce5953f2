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
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from milldam.filters.judging import Filters, character_faults
from milldam.filters.rules import FilterRules
from milldam.memory import allowance, release, usage
from milldam.pipeline.documents import EMPTY, HEAD_BYTES, REPORT_SECONDS, Assignment, Documents, Reading, SetRules
from milldam.pipeline.rejects import DROPPED, REJECTS, DroppedFile, RejectFile
from milldam.pipeline.shelf import STAGED, Facts, Shelf
from milldam.pipeline.splitting import Chooser, below, split_numbers
from milldam.pipeline.text_cache import open_reader, print_paths
from milldam.run.folder import RUN_FOLDER
from milldam.run.planning import BATCHES_BYTES
from milldam.run.records import Record
from milldam.run.tasks import PART, PROGRESS, Report
from milldam.sources.arrays import whole_characters
from milldam.sources.units import Unit
from milldam.stores.tokens import ShardWriter
from milldam.stores.tokens.manifest import READ, STAGES
from milldam.stores.tokens.writer import Tokens
from milldam.text.arrays import byte_count, text_offsets
from milldam.text.cleaning import Cleaner
from milldam.text.rules import CleanRules
from milldam.text.verdicts import Verdicts
from milldam.tokenizers.document_encoder import DocumentEncoder, bare_form
from milldam.tokenizers.encoders import HUGGINGFACE, FrugalEncoder, GrowingEncoder, make_encoder
from milldam.tokenizers.special import SpecialTokens

if TYPE_CHECKING:
    from milldam.chat.reading import ChatRecipe, Sides
    from milldam.chat.token_spans import TokenSpans
    from milldam.decontamination.removing import Removals
    from milldam.dedup.drops import DropSet
    from milldam.pipeline.chat_encoding import ChatEncoder

NOT_SAMPLED = "not_sampled"
_COUNTED = ("special_tokens_in_content",)
"""Of what is known of conversations before any is dropped."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What is done to the documents of every data set between reading and writing."""

    clean: CleanRules | None = None
    drops: Path | None = None
    """Folder of the drop sets; None: no dedup."""
    removals: Path | None = None
    """What decontamination removes; None: nothing is looked for."""
    seen_by: tuple[str, ...] = ()
    """Ids of the runs of the index, in the order in which drop sets number them."""
    filters: FilterRules = field(default_factory=FilterRules)
    shares: dict[str, float] = field(default_factory=dict)
    """Splits beside train."""
    staged: bool = False
    """Splits are settled later, by tokens."""
    seed: int = 0
    write_dropped: bool = False


@dataclass(frozen=True, slots=True)
class TokenizeTask:
    """What every worker needs to know; it pickles."""

    out: Path
    sets: tuple[SetRules, ...]
    selection: Selection
    encoder: str
    plain_specials: bool
    special: SpecialTokens
    dtype: str
    shard_size: int
    share_bytes: int
    """Anonymous memory that this worker may use, but for what unpacking the input takes."""
    threads: int

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
        from milldam.pipeline.fingerprinting import PRINTS

        return print_paths(self.out / RUN_FOLDER / PRINTS, assignment.prints)[2]

    def start(self) -> UnitTokenizer:
        return UnitTokenizer(self)


class UnitTokenizer:
    """A worker's state: the encoder, loaded once."""

    def __init__(self, task: TokenizeTask) -> None:
        self._task = task
        tokenizer_json = (task.out / "tokenizer.json").read_text(encoding="utf-8")
        encoder = self._make(task.encoder, tokenizer_json)
        # Always by HF tokenizers: it is needed for giant documents alone, and knows every kind.
        self._bare = cache(partial(bare_form, tokenizer_json, partial(self._make, HUGGINGFACE)))
        preload_rules(task.selection.filters, task.selection.clean)
        self._finder: TokenSpans | None = None
        if any(one.chat is not None for one in task.sets):
            self._finder = _load_chat(tokenizer_json)
        release()
        taken = usage().anonymous + BATCHES_BYTES
        self._encoder = FrugalEncoder(encoder, lambda: allowance(task.share_bytes) - taken)

    def _make(self, encoder: str, tokenizer_json: str) -> GrowingEncoder:
        plain = self._task.plain_specials
        return make_encoder(encoder, tokenizer_json, plain_specials=plain, threads=self._task.threads)

    def __call__(self, assignment: Assignment, report: Report) -> None:
        recipe = self._task.sets[assignment.unit.dataset].chat
        special = self._task.special if recipe is None else SpecialTokens(None, None)
        encoder = DocumentEncoder(self._encoder, special, self._task.dtype, bare=self._bare)
        judge = _Judge(self._task, assignment.unit)
        chat = None if recipe is None else self._chat_encoder(recipe, encoder)
        with _UnitWork(self._task, assignment, judge, encoder, report, chat) as work:
            work.run()
        texts = self._task.texts_of(assignment)
        # Not while a repetition of the unit may want them.
        if texts is not None and self._task.sets[assignment.unit.dataset].weight <= 1:
            texts.unlink(missing_ok=True)

    def _chat_encoder(self, recipe: ChatRecipe, encoder: DocumentEncoder) -> ChatEncoder:
        from milldam.pipeline.chat_encoding import ChatEncoder

        assert self._finder is not None
        return ChatEncoder(recipe, encoder, self._finder, self._task.special)


def _load_chat(tokenizer_json: str) -> TokenSpans:
    """What conversations need, where workers forked later share it."""
    from milldam.chat.token_spans import TokenSpans
    from milldam.pipeline.chat_encoding import HuggingFace

    huggingface = HuggingFace(tokenizer_json)
    finder = TokenSpans(tokenizer_json, huggingface)
    if finder.needs_huggingface:
        huggingface.load()
    return finder


def preload_rules(filters: FilterRules, clean: CleanRules | None) -> None:
    """Load what rules keep in their modules, a language model or users' code, where workers forked later share it."""
    Filters(filters)
    if clean is not None:
        Cleaner(clean)


class _Judge:
    """Decides on the documents of a unit by their texts: duplicates, samples, filters, splits."""

    def __init__(self, task: TokenizeTask, unit: Unit) -> None:
        selection, rules = task.selection, task.sets[unit.dataset]
        self._whole_split = None if rules.split is None or selection.staged else task.splits.index(rules.split)
        # A data set that is a split of its own is used whole.
        self._rules = selection.filters if rules.split is None else FilterRules()
        self._filters = Filters(self._rules)
        self._drops: DropSet | None = None
        if selection.drops is not None:
            from milldam.dedup.drops import DropSet

            self._drops = DropSet.load(selection.drops, unit.origin)
        self.removals: Removals | None = None
        if selection.removals is not None:
            from milldam.decontamination.removing import Removals

            self.removals = Removals(selection.removals, unit.origin)
        self._share = rules.share(unit.copy)
        self._chooser = Chooser(selection.seed, HEAD_BYTES)
        self._shares, self._staged = selection.shares, selection.staged
        self._seen_by = selection.seen_by
        self.dropped: dict[str, Counter[str]] = {stage: Counter() for stage in STAGES}

    def judge(
        self, texts: pa.LargeStringArray, verdicts: Verdicts, first_row: int, characters: Any = None
    ) -> pa.LargeStringArray:
        """The texts to go on with. `characters`: the length to judge by, where `texts` is the head of a longer one, of
        which what is cut out is gone already."""
        self._book("clean", verdicts, Counter())
        before = verdicts.counts()
        if self._drops is not None:
            self._drops.apply(first_row, verdicts)
            self._book("dedup", verdicts, before)
            before = verdicts.counts()
        # By the text as it was read: so the first pass chose.
        sampled = below(self._chooser.sample_keys(texts), self._share) if self._share < 1 else None
        if self.removals is not None:
            self.removals.drop(first_row, verdicts)
            texts = texts if characters is not None else self.removals.cut(texts, first_row, verdicts)
            self._book("decontaminate", verdicts, before)
            before = verdicts.counts()
        if sampled is not None:
            verdicts.drop(~sampled, NOT_SAMPLED)
            self._book("sample", verdicts, before)
            before = verdicts.counts()
        keep = verdicts.keep
        if self._rules.on_text and keep.any():
            filtered = Verdicts(int(np.count_nonzero(keep)))
            self._filters.judge(texts.filter(pa.array(keep)), filtered, characters)
            verdicts.merge(filtered, keep)
            self._book("filter", verdicts, before)
        return texts

    def judge_characters(self, characters: int) -> str | None:
        """A reason to drop a document whose length is known only now."""
        faults = character_faults(np.array([characters]), self._rules)
        reason = next((reason for mask, reason in faults if mask[0]), None)
        if reason is not None:
            self.drop("filter", reason)
        return reason

    def judge_tokens(self, lengths: Any) -> Verdicts:
        verdicts = Verdicts(len(lengths))
        self._filters.judge_tokens(lengths, verdicts)
        self.dropped["encode"] += verdicts.counts()
        return verdicts

    def drop(self, stage: str, reason: str) -> None:
        self.dropped[stage][reason] += 1

    def _book(self, stage: str, verdicts: Verdicts, before: Counter[str]) -> None:
        self.dropped[stage] += verdicts.counts() - before

    def facts(self, texts: pa.LargeStringArray, rows: Any, grouped: pa.LargeStringArray | None = None) -> Facts:
        """`grouped`: what decides on splits, where it is not the texts."""
        sizes = np.diff(text_offsets(texts))
        characters = np.asarray(pc.utf8_length(texts), dtype=np.int64)
        keyed = self._staged or (self._shares and self._whole_split is None)
        by = texts if grouped is None else grouped
        keys = self._chooser.split_keys(by) if keyed else np.zeros(len(texts), dtype=np.uint64)
        return Facts(self._split_numbers(keys), keys, sizes, characters, rows)

    def _split_numbers(self, keys: Any) -> Any:
        if self._whole_split is not None:
            return np.full(len(keys), self._whole_split)
        return split_numbers(keys, self._shares) if self._shares and not self._staged else np.zeros(len(keys), np.int64)

    def explain(self, row: int, reason: str) -> dict[str, Any]:
        """What a dropped document duplicates, where that is why."""
        if self._drops is None:
            return {}
        from milldam.dedup.drops import DUPLICATES

        of = self._drops.of(row) if reason in DUPLICATES else None
        if of is None:
            return {}
        if of.indexed_run is not None:
            return {"duplicate_of": {"run": self._seen_by[of.indexed_run]}}
        return {"duplicate_of": {"unit": of.unit, "row": of.row} if of.unit is not None else None}


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


@dataclass(slots=True)
class _Giant:
    """A document that comes in parts."""

    row: int
    waiting: list[pa.LargeStringArray] = field(default_factory=list)
    """Parts that are not encoded yet."""
    head: bytes = b""
    bytes_read: int = 0
    """Of its parts, with what is cut out of them."""
    text_bytes: int = 0
    characters: int = 0
    judged: bool = False
    reason: str | None = None
    """Why it is dropped."""
    dropped_before: dict[str, Counter[str]] = field(default_factory=dict)
    """What was dropped before it was judged."""
    facts: Facts | None = None

    def add(self, texts: pa.LargeStringArray) -> None:
        if self.reason is None:
            self.waiting.append(texts)
        if len(self.head) < HEAD_BYTES:
            self.head += bytes(texts[0].as_buffer())[: HEAD_BYTES - len(self.head)]
        self.text_bytes += byte_count(texts)
        self.characters += pc.utf8_length(texts)[0].as_py()

    def head_text(self) -> pa.LargeStringArray:
        return pa.array([self.head[: whole_characters(self.head)].decode()], pa.large_string())


class _UnitWork:
    """One unit on its way through the stages."""

    def __init__(
        self,
        task: TokenizeTask,
        assignment: Assignment,
        judge: _Judge,
        encoder: DocumentEncoder,
        report: Report,
        chat: ChatEncoder | None = None,
    ) -> None:
        self._task, self._given, self._judge, self._chat = task, assignment, judge, chat
        recipe = task.sets[assignment.unit.dataset].chat
        self._sides = 1 if recipe is None else recipe.sides
        """Documents a record."""
        self._group_by_prompt = recipe is not None and recipe.group_by_prompt
        self._chat_counts: Counter[str] = Counter()
        self._encoder, self._report = encoder, report
        self._part = assignment.parts
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
        self._giant: _Giant | None = None
        self._pieces: ShardWriter | None = None
        self._piece_tokens = 0
        self._documents = self._read = self._bytes_read = 0
        self._counts: Counter[str] = Counter()
        self._seconds = {"filter": 0.0, "encode": 0.0, "write": 0.0, "commit": 0.0}
        self._reported = time.monotonic()
        self._open_part()

    def _open_part(self) -> None:
        name, folder = f"{self._given.key}-{self._part:05d}", self._task.out / RUN_FOLDER
        self._shelf = Shelf(self._task.out, name, self._task.splits, self._task.dtype)
        self._rejects = RejectFile(folder / f"{REJECTS}{name}.jsonl")
        dropped = folder / f"{DROPPED}{name}.jsonl.zst"
        self._dropped = DroppedFile(dropped) if self._task.selection.write_dropped else None

    def __enter__(self) -> _UnitWork:
        return self

    def __exit__(self, *error: Any) -> None:
        self._shelf.__exit__(*error)
        self._rejects.discard()
        if self._dropped is not None:
            self._dropped.discard()

    def run(self) -> None:
        for documents in self._reader:
            for reject in documents.rejects:
                self._rejects.add(reject)
            inside = self._giant is not None
            if not inside and len(documents.texts) and self._shelf.text_bytes >= self._task.shard_size:
                self._commit(last=False)
            self._work_on(documents)
            if self._enough():
                break
        self._counts["input_bytes"] = self._given.unit.size
        self._commit(last=True)

    def _work_on(self, documents: Documents) -> None:
        if documents.cancel:
            self._cancel_giant()
        elif documents.part:
            self._work_on_part(documents)
        elif len(documents.texts):
            self._work_on_whole(documents)
        self._bytes_read += documents.bytes_read
        self._counts["input_bytes"] = self._given.unit.input_bytes(self._bytes_read)
        if time.monotonic() - self._reported > REPORT_SECONDS:
            self._send_progress()

    # ---- documents that are whole ----

    def _work_on_whole(self, documents: Documents) -> None:
        started = time.perf_counter()
        texts, verdicts = documents.texts, documents.verdicts
        self._read += len(texts)
        self._chat_counts += Counter({name: documents.counts.get(name, 0) for name in _COUNTED})
        texts = self._judge.judge(texts, verdicts, documents.first_row)
        keep = verdicts.keep
        if not keep.all():
            if self._dropped is not None:
                self._set_aside(texts, verdicts, documents.first_row + np.arange(len(texts)))
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

    def _set_aside(self, texts: pa.LargeStringArray, verdicts: Verdicts, rows: Any) -> None:
        """Write the dropped ones of some texts out."""
        for position in np.flatnonzero(~verdicts.keep).tolist():
            self._drop_document(texts[position].as_py(), str(verdicts.reason(position)), int(rows[position]))

    def _drop_document(self, text: str, reason: str, row: int, *, truncated: bool = False) -> None:
        if self._dropped is not None:
            unit = self._given.unit
            place = {"file": unit.slices[0].path, "unit": unit.index, "row": row}
            cut = {"text_truncated": True} if truncated else {}
            self._dropped.add({"reason": reason, **self._judge.explain(row, reason), **place, "text": text, **cut})

    def _within_limit(self, texts: pa.LargeStringArray) -> Iterator[pa.LargeStringArray]:
        """As many documents as may still be taken; those that turn out empty make room for others."""
        while len(texts) and not self._enough():
            limit = self._given.documents
            taken = len(texts) if limit is None else (limit - self._documents) // self._sides
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
        if not keep.all() and self._dropped is not None:
            self._set_aside(texts, verdicts, rows)
        both = np.repeat(keep, sides.count)
        tokens = self._chat.finished(encoded.tokens.only(both))
        facts = self._judge.facts(texts, rows, grouped).of_sides(sides.texts(texts), sides.count)
        facts = facts.at(np.flatnonzero(both))
        assert tokens.spans is not None
        self._chat_counts += encoded.counts + Counter(
            conversations=len(tokens.lengths),
            turns=int(sides.turns[both].sum()),
            trained_tokens=tokens.spans.trained_tokens,
        )
        encoded_at = time.perf_counter()
        self._seconds["encode"] += encoded_at - started
        if len(tokens.lengths):
            self._shelf.add(tokens, facts)
        self._book(len(tokens.lengths), len(tokens.flat), facts)
        self._seconds["write"] += time.perf_counter() - encoded_at

    def _take(self, tokens: Tokens, facts: Facts, texts: pa.LargeStringArray) -> None:
        assert tokens.positions is not None
        facts = facts.at(tokens.positions)
        if tokens.open or self._pieces is not None:
            reason = self._take_piece(tokens, facts)
            if reason is not None:
                self._drop_document(texts[int(tokens.positions[0])].as_py(), reason, int(facts.rows[0]))
            return
        verdicts = self._judge.judge_tokens(tokens.lengths)
        if not verdicts.keep.all():
            if self._dropped is not None:
                self._set_aside(texts.take(pa.array(tokens.positions)), verdicts, facts.rows)
            tokens, facts = tokens.only(verdicts.keep), facts.at(np.flatnonzero(verdicts.keep))
        self._shelf.add(tokens, facts)
        self._book(len(tokens.lengths), len(tokens.flat), facts)

    def _book(self, documents: int, tokens: int, facts: Facts) -> None:
        self._documents += documents
        text_bytes, characters = int(facts.text_bytes.sum()), int(facts.characters.sum())
        self._counts += Counter(tokens=tokens, text_bytes=text_bytes, characters=characters)

    def _take_piece(self, tokens: Tokens, facts: Facts) -> str | None:
        """A piece of a document whose tokens come in several; at its end, why it is dropped if it is."""
        if self._pieces is None:
            self._pieces, self._piece_tokens = self._shelf.writer(int(facts.splits[0])), 0
            self._pieces.mark()
        writer = self._pieces
        self._piece_tokens += len(tokens.flat)
        if tokens.open:
            writer.append(tokens)
            return None
        self._pieces = None
        reason = self._judge.judge_tokens(np.array([self._piece_tokens])).reason(0)
        if reason is not None:
            writer.cancel()
            return reason
        writer.append(tokens)
        writer.count_text(int(facts.text_bytes[0]), int(facts.characters[0]))
        self._shelf.note(facts)
        self._book(1, self._piece_tokens, facts)
        return None

    # ---- a document that comes in parts ----

    def _work_on_part(self, documents: Documents) -> None:
        if self._giant is None:
            self._giant = _Giant(documents.first_row)
            self._read += 1
        giant = self._giant
        giant.add(self._without_removed(documents.texts, giant))
        if not giant.judged and (len(giant.head) >= HEAD_BYTES or documents.last):
            self._judge_giant(giant)
        if documents.last:
            self._end_giant(giant, documents.verdicts)
        elif giant.judged and giant.reason is None:
            self._encode_parts(giant, len(giant.waiting))

    def _without_removed(self, texts: pa.LargeStringArray, giant: _Giant) -> pa.LargeStringArray:
        """A part without the stretches that are cut out of its document."""
        if self._judge.removals is None:
            return texts
        data, before = bytes(texts[0].as_buffer()), giant.bytes_read
        giant.bytes_read += len(data)
        left = self._judge.removals.part(giant.row, data, before)
        return texts if len(left) == len(data) else pa.array([left.decode()], pa.large_string())

    def _judge_giant(self, giant: _Giant) -> None:
        started = time.perf_counter()
        head, verdicts = giant.head_text(), Verdicts(1)
        giant.dropped_before = {stage: counts.copy() for stage, counts in self._judge.dropped.items()}
        if giant.text_bytes:
            self._judge.judge(head, verdicts, giant.row, self._judge_any_length())
        giant.judged, giant.reason = True, verdicts.reason(0)
        giant.facts = self._judge.facts(head, np.array([giant.row]))
        if giant.reason is not None:
            giant.waiting.clear()
        self._seconds["filter"] += time.perf_counter() - started

    def _judge_any_length(self) -> Any:
        """A number of characters that no rule minds: the real one is known at the end."""
        rules = self._task.selection.filters
        return np.array([rules.min_characters or rules.max_characters or 0])

    def _encode_parts(self, giant: _Giant, parts: int, *, last: bool = False) -> str | None:
        """Encode and write what waits; `last`: the document ends there. Why it is dropped, if it is."""
        started = time.perf_counter()
        reason = None
        for number in range(parts):
            texts, final = giant.waiting[number], last and number == parts - 1
            for tokens in self._encoder.encode(texts, open=not final):
                reason = self._take_piece(tokens, self._giant_facts(giant))
        del giant.waiting[:parts]
        self._seconds["encode"] += time.perf_counter() - started
        return reason

    def _giant_facts(self, giant: _Giant) -> Facts:
        assert giant.facts is not None
        size, characters = np.array([giant.text_bytes]), np.array([giant.characters])
        return replace(giant.facts, text_bytes=size, characters=characters)

    def _end_giant(self, giant: _Giant, verdicts: Verdicts) -> None:
        self._giant = None
        if verdicts.reason(0) is not None or giant.text_bytes == 0:
            giant.reason = verdicts.reason(0) or EMPTY
            self._judge.dropped = giant.dropped_before
            self._judge.drop("clean", giant.reason)
        elif giant.reason is None:
            giant.reason = self._judge.judge_characters(giant.characters)
        if giant.reason is None:
            giant.reason = self._encode_parts(giant, len(giant.waiting), last=True)
        else:
            self._take_back()
        if giant.reason is not None:
            truncated = giant.text_bytes > HEAD_BYTES
            self._drop_document(giant.head_text()[0].as_py(), giant.reason, giant.row, truncated=truncated)

    def _take_back(self) -> None:
        """Forget what was encoded and written of the document that is open."""
        self._encoder.cancel()
        if self._pieces is not None:
            self._pieces.cancel()
            self._pieces = None

    def _cancel_giant(self) -> None:
        if self._giant is not None:
            if self._giant.judged:
                self._judge.dropped = self._giant.dropped_before
            self._giant = None
            self._read -= 1
            self._take_back()

    # ---- records ----

    def _enough(self) -> bool:
        return self._given.documents is not None and self._documents + self._sides > self._given.documents

    def _commit(self, *, last: bool) -> None:
        started = time.perf_counter()
        shards = [asdict(shard) for shard in self._shelf.commit()]
        aside = self._rejects.commit() | (self._dropped.commit() if self._dropped is not None else {})
        # Apart from writing: most of it is waiting for the disk.
        self._seconds["commit"] += time.perf_counter() - started
        outputs, staged = self._shelf.files(shards)
        files = {f"{RUN_FOLDER}/{name}": file for name, file in aside.items()} | staged
        self._send_progress()
        self._report(PART, replace(self._record(shards, last=last), outputs=outputs, files=files))
        self._part, self._read = self._part + 1, 0
        self._judge.dropped = {stage: Counter() for stage in STAGES}
        self._encoder.dropped.clear()
        self._chat_counts.clear()
        self._open_part()

    def _record(self, shards: list[dict[str, Any]], *, last: bool) -> Record:
        dropped = self._judge.dropped | {READ: self._rejects.counts}
        dropped["encode"] += self._encoder.dropped
        facts = {
            "shards": shards,
            "read": self._read,
            "dropped": {stage: dict(counts) for stage, counts in dropped.items() if counts},
            "batches": self._reader.batches - (not last),
            "dataset": self._given.unit.dataset,
            "inexact_cuts": self._encoder.take_inexact_cuts(),
        }
        if self._chat is not None:
            facts |= {"chat": dict(self._chat_counts), "sides": self._sides}
        counts = {name: sum(shard[name] for shard in shards) for name in ("documents", "tokens", "text_bytes")}
        return Record(self._given.key, self._part, last, counts=counts, facts=facts)

    def _send_progress(self) -> None:
        self._reported = time.monotonic()
        counts = dict(self._counts) | {"documents": self._documents}
        seconds = self._reader.seconds | self._seconds
        self._report(PROGRESS, {"counts": counts, "seconds": seconds, "anonymous_bytes": usage().anonymous})
