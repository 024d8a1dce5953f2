"""Logits of windows -> n-best answers of examples, with the score of having none.

Per window the `n_best` best starts and ends inside the context, every pair of them that is an answer (the end not
before the start, not too long), and of these the best; over the windows of an example the best of all, each span of
the context once. Ties go to what comes first in the context, then to the earlier window: the result depends on the
logits alone, not on how they were cut into chunks.

Holds some hundred windows and the answers of one example, whatever the size; logits may be arrays, memory maps, tensors
or chunks of these. Needs only numpy.
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
Bools = npt.NDArray[np.bool_]
LogitRows: TypeAlias = Any
"""(windows, L): an array, a memory map or a tensor."""

_SCORES_AT_ONCE = 1 << 17


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
    """The span of the context, in characters; None: no answer."""
    stop: int | None = None


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
    """The best first; no answer is among them, unless null_threshold is None."""
    span: tuple[int, int] | None
    """Where `text` lies in the context, in characters."""

    @property
    def null_odds(self) -> float:
        """By how much no answer is better than the best one; the prediction is empty above null_threshold."""
        return self.null_score - (self.score or 0.0)


def answers(
    store: FeatureStore,
    start_logits: LogitRows | Iterable[tuple[LogitRows, LogitRows]],
    end_logits: LogitRows | None = None,
    *,
    windows: npt.ArrayLike | None = None,
    n_best: int = 20,
    max_answer_length: int = 30,
    null_threshold: float | None = 0.0,
) -> Predictions:
    """The answers for some logits, example by example in the order of the store; computed as you iterate.

    start_logits       (windows, L); or, alone, an iterable of pairs of start and end in the order of the store
    windows            the numbers of the rows' windows; None: all of the store
    max_answer_length  in tokens
    null_threshold     the answer is empty if "no answer" scores more than this above the best; None: never (SQuAD v1.1)

    >>> features = milldam.qa.prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased/")
    >>> start, end = np.zeros((2, len(features), 384))          # of a model that has learned nothing
    >>> milldam.qa.answers(features, start, end).write_predictions("predictions.json")
    12
    """
    return Predictions(store, start_logits, end_logits, windows, n_best, max_answer_length, null_threshold)


class Predictions:
    """Iterate to get a `Prediction` for every example; again, if the logits are arrays.

    >>> features = milldam.qa.prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased/")
    >>> start, end = np.zeros((2, len(features), 384))          # of a model that has learned nothing
    >>> len(list(milldam.qa.answers(features, start, end))) == features.examples
    True
    """

    def __init__(
        self,
        store: FeatureStore,
        start: Any,
        end: Any,
        windows: npt.ArrayLike | None,
        n_best: int,
        max_answer_length: int,
        null_threshold: float | None,
    ) -> None:
        for name, value in (("n_best", n_best), ("max_answer_length", max_answer_length)):
            if value < 1:
                raise ConfigError(f"answers: {name}: {value}; use 1 or more.")
        self._store, self._n_best, self._longest, self._threshold = store, n_best, max_answer_length, null_threshold
        numbers = np.arange(len(store)) if windows is None else np.asarray(windows, np.int64).reshape(-1)
        ascending = (numbers[1:] >= numbers[:-1]).all()
        self._numbers, self._chunks = numbers, start
        self._order: Ints | None = None
        """In which order to take the rows of arrays, if it is not theirs."""
        if end is None and not hasattr(start, "shape"):
            if not ascending:
                raise InputError("answers: chunks must come in the order of the store; `windows` is not ascending.")
            return
        if tuple(getattr(end, "shape", ())) != tuple(start.shape):
            ends = None if end is None else tuple(end.shape)
            raise InputError(f"answers: start_logits are {tuple(start.shape)}, end_logits {ends}.")
        if len(start.shape) != 2 or start.shape[0] != len(numbers):
            raise InputError(
                f"answers: logits of {tuple(start.shape)}; there are {len(numbers):,} windows, so (windows, L) begins "
                "with that. Give `windows` if the logits are of some windows only."
            )
        self._chunks = [(start, end)]
        if not ascending:
            self._order = np.argsort(numbers, kind="stable")
            self._numbers = numbers[self._order]

    def __iter__(self) -> Iterator[Prediction]:
        held: _Ranking | None = None
        for ranking in self._rankings():
            if held is not None and held.example == ranking.example:  # of another chunk
                ranking = held.joined(ranking).best(self._n_best)
            elif held is not None:
                yield self._prediction(held)
            held = ranking
        if held is not None:
            yield self._prediction(held)

    def _rankings(self) -> Iterator[_Ranking]:
        """What the windows of each example in a chunk hold."""
        size, row, count = max(1, _SCORES_AT_ONCE // max(self._n_best**2, 384)), 0, len(self._numbers)
        columns = ("context_begin", "context_tokens", "cls_index", "example")
        for start, end in self._chunks:
            if row + len(start) > count or len(start) != len(end):
                raise InputError(
                    f"answers: a chunk of {len(start):,} start and {len(end):,} end logits from row {row:,} on; "
                    f"there are {count:,} windows."
                )
            for first in range(0, len(start), size):
                stop = min(first + size, len(start))
                part: Any = slice(first, stop) if self._order is None else self._order[first:stop]
                numbers = self._numbers[row + first : row + stop]
                rows = self._store.rows(numbers, columns) | {"stretches": stretches(self._store, numbers)}
                yield from self._of_windows(numbers, _floats(start[part]), _floats(end[part]), rows)
            row += len(start)
        if row != count:
            raise InputError(f"answers: logits of {row:,} windows; there are {count:,}.")

    def _of_windows(self, numbers: Ints, start: Floats, end: Floats, columns: dict[str, Any]) -> Iterator[_Ranking]:
        """`start`, `end`: (windows, L)."""
        length = columns["stretches"].shape[1]
        if start.shape[1] != length:
            raise InputError(f"answers: logits for {start.shape[1]:,} tokens; the windows have {length:,}.")
        begin, rows, cls = columns["context_begin"][:, None], np.arange(len(numbers)), columns["cls_index"]
        # (windows, L): what does not belong to the context
        outside = (np.arange(length) < begin) | (np.arange(length) >= begin + columns["context_tokens"][:, None])
        unread = outside.copy()
        unread[rows, cls] = False  # the score of no answer
        # -inf is what can't be, and right; a NaN would win or lose every comparison in silence.
        bad = ~(((start < np.inf) & (end < np.inf)) | unread).all(axis=1)
        if bad.any():
            raise InputError(f"answers: window {int(numbers[bad.argmax()]):,} has logits that are NaN or infinite.")
        spans, logits, valid = self._pairs(start, end, columns["stretches"], outside)
        null = np.stack((start[rows, cls], end[rows, cls]), axis=1)
        examples = columns["example"]
        borders = [0, *(np.flatnonzero(examples[1:] != examples[:-1]) + 1).tolist(), len(rows)]
        for first, stop in itertools.pairwise(borders):
            inside = valid[first:stop]
            low = null[first + int(null[first:stop].sum(axis=1).argmin())]
            ranking = _Ranking(
                int(examples[first]),
                (float(low[0]), float(low[1])),
                spans[first:stop][inside],
                logits[first:stop][inside],
            )
            yield ranking.best(self._n_best)

    def _pairs(self, start: Floats, end: Floats, characters: Any, outside: Bools) -> tuple[Ints, Floats, Bools]:
        """The best pairs of start and end in each window: spans and logits (windows, n, 2), and which are answers."""
        count, length = start.shape
        n = min(self._n_best, length)
        rows = np.arange(count)[:, None]
        starts = _highest(np.where(outside, -np.inf, start), n)
        ends = _highest(np.where(outside, -np.inf, end), n)
        begins, stops = characters[rows, starts, 0], characters[rows, ends, 1]
        apart = ends[:, None, :] - starts[:, :, None]
        valid = (apart >= 0) & (apart < self._longest) & (stops[:, None, :] > begins[:, :, None])
        valid &= ~outside[rows, starts][:, :, None] & ~outside[rows, ends][:, None, :]
        scores = start[rows, starts][:, :, None] + end[rows, ends][:, None, :]
        flat = np.where(valid, scores, -np.inf).reshape(count, n * n)
        chosen = _highest(flat, min(self._n_best, n * n))
        first, last = starts[rows, chosen // n], ends[rows, chosen % n]
        spans = np.stack((characters[rows, first, 0], characters[rows, last, 1]), axis=2).astype(np.int64)
        return spans, np.stack((start[rows, first], end[rows, last]), axis=2), flat[rows, chosen] > -np.inf

    def _prediction(self, ranking: _Ranking) -> Prediction:
        example, threshold, null = self._store.example(ranking.example), self._threshold, ranking.null
        context, null_score = example["context"], sum(null)
        best = float(ranking.logits[0].sum()) if len(ranking.spans) else None
        ranked: list[tuple[float, float, int | None, int | None]] = [
            (*logits, *span) for logits, span in zip(ranking.logits.tolist(), ranking.spans.tolist(), strict=True)
        ]
        if threshold is not None or not ranked:
            # No answer is one of the n best, or comes after them.
            place = sum(start + end >= null_score for start, end, _, _ in ranked)
            ranked.insert(place, (*null, None, None))
            ranked = ranked[: self._n_best] if place < self._n_best else ranked[: self._n_best + 1]
        shares = _softmax([start + end for start, end, _, _ in ranked])
        n_best = tuple(
            Candidate("" if first is None else context[first:stop], share, start + end, start, end, first, stop)
            for (start, end, first, stop), share in zip(ranked, shares, strict=True)
        )
        if best is None or (threshold is not None and null_score - best > threshold):
            return Prediction(str(example["id"]), "", best, null_score, n_best, None)
        first, stop = ranking.spans[0].tolist()
        return Prediction(str(example["id"]), context[first:stop], best, null_score, n_best, (first, stop))

    def texts(self) -> dict[str, str]:
        """The answer to every question: what `evaluate` takes."""
        return {prediction.id: prediction.text for prediction in self}

    def write_predictions(
        self, path: str | Path, *, n_best: str | Path | None = None, null_odds: str | Path | None = None
    ) -> int:
        """Write {id: text}, as SQuAD's scripts read it; how many. `n_best` and `null_odds`: files to write as well, in
        the form of transformers.

        In one pass, in constant memory. A file appears when it is complete.
        """
        fields = ("text", "probability", "score", "start_logit", "end_logit")
        wanted: list[tuple[str | Path | None, Callable[[Prediction], Any]]] = [
            (path, lambda prediction: prediction.text),
            (n_best, lambda prediction: [{name: getattr(one, name) for name in fields} for one in prediction.n_best]),
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


@dataclass(frozen=True, slots=True)
class _Ranking:
    """Answers found in windows of one example: a row each."""

    example: int
    null: tuple[float, float]
    """Start and end logit of no answer."""
    spans: Ints
    """(answers, 2): characters of the context."""
    logits: Floats
    """(answers, 2): start and end."""

    def joined(self, other: _Ranking) -> _Ranking:
        spans, logits = np.concatenate((self.spans, other.spans)), np.concatenate((self.logits, other.logits))
        return _Ranking(self.example, min(self.null, other.null, key=sum), spans, logits)

    def best(self, most: int) -> _Ranking:
        """The best, best first, each span once; of equals the first in the context, then the first ranking."""
        scores = self.logits.sum(axis=1)
        order = np.lexsort((-scores, self.spans[:, 1], self.spans[:, 0]))
        spans = self.spans[order]
        order = order[np.r_[True, (spans[1:] != spans[:-1]).any(axis=1)]] if len(order) else order
        order = order[np.argsort(-scores[order], kind="stable")][:most]
        return _Ranking(self.example, self.null, self.spans[order], self.logits[order])


def _floats(logits: Any) -> Floats:
    """Of an array, or of a tensor: on any device, with a gradient, in bfloat16, which numpy lacks."""
    if hasattr(logits, "detach"):
        logits = logits.detach().cpu().double().numpy()
    return np.asarray(logits, np.float64)


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


def _softmax(scores: list[float]) -> list[float]:
    highest = max(scores)
    if highest == -math.inf:
        return [1 / len(scores)] * len(scores)
    powers = [math.exp(score - highest) for score in scores]
    total = sum(powers)
    return [power / total for power in powers]
