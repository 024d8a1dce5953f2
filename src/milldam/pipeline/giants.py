"""A text file larger than a document may be: judged by its first MiB, encoded and written as its parts come.

Holds a batch of it. What only its end decides, its length, takes back what was written.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from milldam.pipeline.documents import EMPTY, HEAD_BYTES, Documents
from milldam.pipeline.judging import Facts, Judge
from milldam.pipeline.unit_output import UnitOutput
from milldam.sources.arrays import whole_characters
from milldam.text.arrays import Verdicts, byte_count, character_counts
from milldam.tokenizers.document_encoder import NO_WHITE_SPACE, DocumentEncoder, NoWhiteSpaceError


@dataclass(slots=True)
class _Giant:
    """A document that comes in parts."""

    row: int
    waiting: list[pa.LargeStringArray] = field(default_factory=list)
    """Parts that are not encoded yet."""
    head: bytes = b""
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
        self.characters += int(character_counts(texts)[0])

    def head_text(self) -> pa.LargeStringArray:
        return pa.array([self.head[: whole_characters(self.head)].decode()], pa.large_string())

    def facts_so_far(self) -> Facts:
        assert self.facts is not None
        size, characters = np.array([self.text_bytes]), np.array([self.characters])
        return replace(self.facts, text_bytes=size, characters=characters)


class Giants:
    """The documents of a unit that come in parts, one after the other."""

    def __init__(self, judge: Judge, encoder: DocumentEncoder, output: UnitOutput, seconds: dict[str, float]) -> None:
        """`seconds`: by stage; what is spent here is added."""
        self._judge, self._encoder, self._output, self._seconds = judge, encoder, output, seconds
        self._giant: _Giant | None = None

    @property
    def inside(self) -> bool:
        """Whether the document is not at its end."""
        return self._giant is not None

    def add(self, documents: Documents) -> None:
        """The next part."""
        if self._giant is None:
            self._giant = _Giant(documents.first_row)
        giant = self._giant
        if self._judge.seen is not None:
            self._judge.seen.feed(documents.bytes)
        giant.add(documents.texts)
        if not giant.judged and (len(giant.head) >= HEAD_BYTES or documents.last):
            self._judge_head(giant)
        if documents.last:
            self._giant = None
            self._end(giant, documents.verdicts)
        elif giant.judged and giant.reason is None:
            self._encode(giant)

    def _judge_head(self, giant: _Giant) -> None:
        started = time.perf_counter()
        head, verdicts = giant.head_text(), Verdicts(1)
        giant.dropped_before = {stage: counts.copy() for stage, counts in self._judge.dropped.items()}
        if giant.text_bytes:
            self._judge.judge_head(head, verdicts, giant.row)
        giant.judged, giant.reason = True, verdicts.reason(0)
        giant.facts = self._judge.facts(head, np.array([giant.row]))
        if giant.reason is not None:
            giant.waiting.clear()
        self._seconds["filter"] += time.perf_counter() - started

    def _encode(self, giant: _Giant, *, last: bool = False) -> str | None:
        """Encode and write what waits; `last`: the document ends there. Why it is dropped, if it is."""
        started = time.perf_counter()
        reason = None
        for number, texts in enumerate(giant.waiting, start=1):
            final = last and number == len(giant.waiting)
            try:
                for tokens in self._encoder.encode(texts, open=not final):
                    reason = self._output.add_piece(tokens, giant.facts_so_far())
            except NoWhiteSpaceError:
                giant.reason = reason = NO_WHITE_SPACE
                self._encoder.dropped[NO_WHITE_SPACE] += 1
                self._take_back()
                break
        giant.waiting.clear()
        self._seconds["encode"] += time.perf_counter() - started
        return reason

    def _end(self, giant: _Giant, verdicts: Verdicts) -> None:
        seen = self._judge.seen is not None and self._judge.seen.finish(giant.row)
        if verdicts.reason(0) is not None or giant.text_bytes == 0:
            giant.reason = verdicts.reason(0) or EMPTY
            self._judge.dropped = giant.dropped_before
            self._judge.drop("clean", giant.reason)
        elif seen:
            from milldam.dedup.drops import SEEN_BEFORE

            giant.reason, self._judge.dropped = SEEN_BEFORE, giant.dropped_before
            self._judge.drop("dedup", SEEN_BEFORE)
        elif giant.reason is None:
            giant.reason = self._judge.judge_characters(giant.characters)
        if giant.reason is None:
            giant.reason = self._encode(giant, last=True)
        else:
            self._take_back()
        if giant.reason is not None:
            truncated = giant.text_bytes > HEAD_BYTES
            self._output.drop(giant.head_text()[0].as_py(), giant.reason, giant.row, truncated=truncated)

    def _take_back(self) -> None:
        """Forget what was encoded and written of the document that is open."""
        self._encoder.cancel()
        self._output.take_back()
