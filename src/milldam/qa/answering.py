"""Logits of windows -> n-best answers of examples, with the score of having none.

Per window the `n_best` best begins and ends inside the context, every pair of them that is an answer (the end not
before the begin, not too long), and of these the best; over the windows of an example the best of all, each stretch of
the context once. Ties go to what comes first in the context, then to the earlier window: the result depends on the
logits alone, not on how they were cut into chunks.

Holds some hundred windows and the answers of one example, whatever the size; logits may be arrays, memory maps, tensors
or chunks of these. Needs numpy alone.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError, InputError
from milldam.files import NewFile
from milldam.qa.spans import stretches

if TYPE_CHECKING:
    from milldam.qa.store import FeatureStore

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


LogitRows: TypeAlias = Any
"""(windows, L): an array, a memory map or a tensor."""


class Logits:
    """Logits as they were given -> (numbers of windows, start, end), windows ascending."""

    def __init__(self, start: Any, end: Any, windows: Ints | None, count: int) -> None:
        self._windows, self._expected = windows, count if windows is None else len(windows)
        self._rows: Ints | None = None
        """In which order to take the rows of an array, where it is not theirs."""
        ascending = windows is None or bool((windows[1:] >= windows[:-1]).all())
        if hasattr(start, "shape"):
            self._check_shapes(tuple(start.shape), getattr(end, "shape", None))
            start, end = [start], [end]
            self._rows = None if windows is None or ascending else np.argsort(windows, kind="stable")
        elif not ascending:
            raise InputError("answers: chunks must come in the order of the store; `windows` is not ascending.")
        self._start, self._end = start, end

    def _check_shapes(self, start: tuple[int, ...], end: Any) -> None:
        if end is None or tuple(end) != start:
            raise InputError(f"answers: start_logits are {start}, end_logits {end}.")
        if len(start) != 2 or start[0] != self._expected:
            raise InputError(
                f"answers: logits of {start}; there are {self._expected:,} windows, so (windows, L) begins with "
                "that. Give `windows` when the logits are of some windows only."
            )

    def chunks(self, size: int) -> Iterator[tuple[Ints, Floats, Floats]]:
        row = 0
        for start, end in self._start if self._end is None else zip(self._start, self._end, strict=True):
            if row + len(start) > self._expected or len(start) != len(end):
                raise InputError(
                    f"answers: a chunk of {len(start):,} start and {len(end):,} end logits from row {row:,} on; "
                    f"there are {self._expected:,} windows."
                )
            for first in range(0, len(start), size):
                stop = min(first + size, len(start))
                part: Any = slice(first, stop) if self._rows is None else self._rows[first:stop]
                rows = np.arange(row + first, row + stop) if self._rows is None else part
                numbers = rows if self._windows is None else self._windows[rows]
                yield numbers, _floats(start[part]), _floats(end[part])
            row += len(start)
        if row != self._expected:
            raise InputError(f"answers: logits of {row:,} windows; there are {self._expected:,}.")


def _floats(logits: Any) -> Floats:
    """Of an array, or of a tensor: on any device, with a gradient, in bfloat16, which numpy has not."""
    if hasattr(logits, "detach"):
        logits = logits.detach().cpu().double().numpy()
    return np.asarray(logits, np.float64)


_COLUMNS = ("context_begin", "context_tokens", "cls_index", "example")
_NUMBERS_AT_ONCE = 1 << 17
"""Scores that are looked at together."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of the n best answers of an example."""

    text: str
    """Empty: no answer."""
    probability: float
    """Among the n best."""
    score: float
    """The logit of its first token plus that of its last."""
    start_logit: float
    end_logit: float
    start: int | None = None
    """The stretch of the context, in characters; None: no answer."""
    stop: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """As the n-best files of transformers have it."""
        return {name: getattr(self, name) for name in ("text", "probability", "score", "start_logit", "end_logit")}


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a model answers to one example.

    >>> features = milldam.qa.prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased/")
    >>> start, end = np.zeros((2, len(features), 384))          # of a model that has learned nothing
    >>> prediction = next(iter(milldam.qa.answers(features, start, end)))
    >>> prediction.id, prediction.text, prediction.null_score
    ('q0', 'the', 0.0)
    """

    id: str
    text: str
    """Empty: the model says that there is no answer."""
    score: float | None
    """Of the best answer that is not empty; None: the windows hold no text to answer with."""
    null_score: float
    """Of no answer: the logits at CLS, the smallest over the windows."""
    n_best: tuple[Candidate, ...]
    """The best first; with no answer among them, unless null_threshold is None."""
    span: tuple[int, int] | None
    """Where `text` lies in the context, in characters."""

    @property
    def null_odds(self) -> float:
        """By how much no answer is better than the best one; the prediction is empty above null_threshold."""
        return self.null_score - (self.score or 0.0)


@dataclass(frozen=True, slots=True)
class _Rules:
    n_best: int
    max_answer_length: int
    null_threshold: float | None

    def __post_init__(self) -> None:
        for name in ("n_best", "max_answer_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"answers: {name}: {getattr(self, name)}; use 1 or more.")


def answers(
    store: FeatureStore,
    start_logits: LogitRows | Iterable[LogitRows] | Iterable[tuple[LogitRows, LogitRows]],
    end_logits: LogitRows | Iterable[LogitRows] | None = None,
    *,
    windows: npt.ArrayLike | None = None,
    n_best: int = 20,
    max_answer_length: int = 30,
    null_threshold: float | None = 0.0,
) -> Predictions:
    """The answers for some logits, example by example in the order of the store; computed as you iterate.

    start_logits       (windows, L), or an iterable of such chunks in the order of the store
    end_logits         the same; None: the chunks are pairs of start and end
    windows            the numbers of the rows' windows; None: all of the store
    max_answer_length  in tokens
    null_threshold     the answer is empty if "no answer" scores more than this above the best; None: never (SQuAD v1.1)

    >>> features = milldam.qa.prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased/")
    >>> start, end = np.zeros((2, len(features), 384))          # of a model that has learned nothing
    >>> milldam.qa.answers(features, start, end).write_predictions("predictions.json")
    12
    """
    rules = _Rules(n_best, max_answer_length, null_threshold)
    numbers = None if windows is None else np.asarray(windows, np.int64).reshape(-1)
    return Predictions(store, Logits(start_logits, end_logits, numbers, len(store)), rules)


class Predictions:
    """Iterate to get a `Prediction` for every example; again, when the logits were given as arrays.

    >>> features = milldam.qa.prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased/")
    >>> start, end = np.zeros((2, len(features), 384))          # of a model that has learned nothing
    >>> len(list(milldam.qa.answers(features, start, end))) == features.examples
    True
    """

    def __init__(self, store: FeatureStore, logits: Logits, rules: _Rules) -> None:
        self._store, self._logits, self._rules = store, logits, rules

    def __iter__(self) -> Iterator[Prediction]:
        for example, found in _by_example(self._found(), self._rules.n_best):
            yield _prediction(self._store.example(example), found, self._rules)

    def _found(self) -> Iterator[_Found]:
        size = max(1, _NUMBERS_AT_ONCE // max(self._rules.n_best**2, 384))
        for numbers, start, end in self._logits.chunks(size):
            columns = {**self._store.rows(numbers, _COLUMNS), "stretches": stretches(self._store, numbers)}
            yield from _of_windows(_Chunk(numbers, start, end, columns), self._rules)

    def texts(self) -> dict[str, str]:
        """The answer to every question: what `evaluate` takes."""
        return {prediction.id: prediction.text for prediction in self}

    def write_predictions(
        self, path: str | Path, *, n_best: str | Path | None = None, null_odds: str | Path | None = None
    ) -> int:
        """Write {id: text}, as SQuAD's scripts read it; their number. The n-best answers and null odds on request.

        In one pass, in constant memory. A file appears when it is whole.
        """
        wanted: list[tuple[str | Path | None, Callable[[Prediction], Any]]] = [
            (path, lambda prediction: prediction.text),
            (n_best, lambda prediction: [one.as_dict() for one in prediction.n_best]),
            (null_odds, lambda prediction: prediction.null_odds),
        ]
        with ExitStack() as stack:
            files = [(stack.enter_context(NewFile(Path(where))), value) for where, value in wanted if where]
            count = 0
            for prediction in self:
                for file, value in files:
                    text = json.dumps({prediction.id: value(prediction)}, ensure_ascii=False)[1:-1]
                    file.write(f"{',' if count else '{'}\n{text}".encode("utf-8", "backslashreplace"))
                count += 1
            for file, _ in files:
                file.write(b"\n}\n" if count else b"{}\n")
                file.commit()
        return count


# ---- windows ----


@dataclass(frozen=True, slots=True)
class _Chunk:
    numbers: Ints
    start: Floats
    """(windows, L)"""
    end: Floats
    columns: dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class _Found:
    """Answers found in windows of one example: a row each."""

    example: int
    null: tuple[float, float]
    """Start and end logit of no answer."""
    spans: Ints
    """(answers, 2): characters of the context."""
    logits: Floats
    """(answers, 2): start and end."""

    @property
    def scores(self) -> Floats:
        scores: Floats = self.logits.sum(axis=1)
        return scores

    def best(self, most: int) -> _Found:
        """The best, best first, each stretch once; of equals the first in the context, then the first found."""
        order = np.lexsort((-self.scores, self.spans[:, 1], self.spans[:, 0]))
        spans = self.spans[order]
        order = order[np.r_[True, (spans[1:] != spans[:-1]).any(axis=1)]] if len(order) else order
        order = order[np.argsort(-self.scores[order], kind="stable")][:most]
        return _Found(self.example, self.null, self.spans[order], self.logits[order])


def _of_windows(chunk: _Chunk, rules: _Rules) -> Iterator[_Found]:
    """What the windows of each example in a chunk hold."""
    _check(chunk)
    spans, logits, valid = _pairs(chunk, rules)
    rows = np.arange(len(chunk.numbers))
    cls = chunk.columns["cls_index"]
    null = np.stack((chunk.start[rows, cls], chunk.end[rows, cls]), axis=1)
    examples = chunk.columns["example"]
    borders = [0, *(np.flatnonzero(examples[1:] != examples[:-1]) + 1).tolist(), len(rows)]
    for first, stop in itertools.pairwise(borders):
        if first < stop:
            inside = valid[first:stop]
            low = null[first + int(null[first:stop].sum(axis=1).argmin())]
            yield _Found(
                int(examples[first]), (low[0], low[1]), spans[first:stop][inside], logits[first:stop][inside]
            ).best(rules.n_best)


def _check(chunk: _Chunk) -> None:
    length = chunk.columns["stretches"].shape[1]
    if chunk.start.shape[1] != length:
        raise InputError(f"answers: logits for {chunk.start.shape[1]:,} tokens; the windows have {length:,}.")
    # -inf is what can't be, and right; a NaN would win or lose every comparison in silence.
    fine = (chunk.start < np.inf) & (chunk.end < np.inf)
    unread = _outside(chunk)
    unread[np.arange(len(unread)), chunk.columns["cls_index"]] = False  # the score of no answer
    bad = ~(fine | unread).all(axis=1)
    if bad.any():
        raise InputError(f"answers: window {int(chunk.numbers[bad.argmax()]):,} has logits that are NaN or infinite.")


def _outside(chunk: _Chunk) -> npt.NDArray[np.bool_]:
    """(windows, L): what is not of the context."""
    begin = chunk.columns["context_begin"][:, None]
    places = np.arange(chunk.start.shape[1])
    outside: npt.NDArray[np.bool_] = (places < begin) | (places >= begin + chunk.columns["context_tokens"][:, None])
    return outside


def _pairs(chunk: _Chunk, rules: _Rules) -> tuple[Ints, Floats, npt.NDArray[np.bool_]]:
    """The best pairs of begin and end in each window: spans and logits (windows, n, 2), and which are answers."""
    count, length = chunk.start.shape
    outside = _outside(chunk)
    n = min(rules.n_best, length)
    rows = np.arange(count)[:, None]
    starts = _highest(np.where(outside, -np.inf, chunk.start), n)
    ends = _highest(np.where(outside, -np.inf, chunk.end), n)
    characters = chunk.columns["stretches"]
    begins, stops = characters[rows, starts, 0], characters[rows, ends, 1]
    apart = ends[:, None, :] - starts[:, :, None]
    valid = (apart >= 0) & (apart < rules.max_answer_length) & (stops[:, None, :] > begins[:, :, None])
    valid &= ~outside[rows, starts][:, :, None] & ~outside[rows, ends][:, None, :]
    scores = chunk.start[rows, starts][:, :, None] + chunk.end[rows, ends][:, None, :]
    flat = np.where(valid, scores, -np.inf).reshape(count, n * n)
    chosen = _highest(flat, min(rules.n_best, n * n))
    first, last = starts[rows, chosen // n], ends[rows, chosen % n]
    spans = np.stack((characters[rows, first, 0], characters[rows, last, 1]), axis=2).astype(np.int64)
    logits = np.stack((chunk.start[rows, first], chunk.end[rows, last]), axis=2)
    return spans, logits, flat[rows, chosen] > -np.inf


def _highest(values: Floats, n: int) -> Ints:
    """(rows, n): the places of the n highest of each row, ascending; of equals the first ones.

    >>> _highest(np.array([[1.0, 3.0, 1.0, 2.0]]), 3).tolist()
    [[0, 1, 3]]
    """
    width = values.shape[1]
    if n == width:
        return np.broadcast_to(np.arange(width), values.shape).copy()
    least = np.partition(values, width - n, axis=1)[:, width - n, None]
    above, equal = values > least, values == least
    wanted = above | (equal & (equal.cumsum(axis=1) <= n - above.sum(axis=1, keepdims=True)))
    return np.nonzero(wanted)[1].reshape(len(values), n)


# ---- examples ----


def _by_example(found: Iterator[_Found], most: int) -> Iterator[tuple[int, _Found]]:
    """Windows of one example that came in several chunks, together."""
    held: _Found | None = None
    for one in found:
        if held is None or held.example != one.example:
            if held is not None:
                yield held.example, held
            held = one
        else:
            spans = np.concatenate((held.spans, one.spans))
            null = min(held.null, one.null, key=sum)
            held = _Found(held.example, null, spans, np.concatenate((held.logits, one.logits))).best(most)
    if held is not None:
        yield held.example, held


def _prediction(example: dict[str, Any], found: _Found, rules: _Rules) -> Prediction:
    null_score, best = float(sum(found.null)), float(found.scores[0]) if len(found.spans) else None
    ranked = _ranked(example["context"], found, rules)
    empty = best is None or (rules.null_threshold is not None and null_score - best > rules.null_threshold)
    span = None if empty else (int(found.spans[0, 0]), int(found.spans[0, 1]))
    text = "" if span is None else example["context"][span[0] : span[1]]
    return Prediction(str(example["id"]), text, best, null_score, ranked, span)


def _ranked(context: str, found: _Found, rules: _Rules) -> tuple[Candidate, ...]:
    """The n best, no answer among them where there can be none; it comes last when it is not one of them."""
    rows: list[tuple[float, float, int | None, int | None]] = [
        (*logits, *span) for logits, span in zip(found.logits.tolist(), found.spans.tolist(), strict=True)
    ]
    if rules.null_threshold is not None or not rows:
        null = sum(found.null)
        place = sum(row[0] + row[1] >= null for row in rows)
        rows = [*rows[:place], (float(found.null[0]), float(found.null[1]), None, None), *rows[place:]]
        rows = rows[: rules.n_best] if place < rules.n_best else [*rows[: rules.n_best], rows[place]]
    shares = _softmax([row[0] + row[1] for row in rows])
    return tuple(
        Candidate("" if first is None else context[first:stop], share, start + end, start, end, first, stop)
        for (start, end, first, stop), share in zip(rows, shares, strict=True)
    )


def _softmax(scores: list[float]) -> list[float]:
    highest = max(scores)
    if highest == -math.inf:
        return [1 / len(scores)] * len(scores)
    powers = [math.exp(score - highest) for score in scores]
    total = sum(powers)
    return [power / total for power in powers]
