"""Logits of windows -> n-best answers of examples, with the score of having none.

Per window the `n_best` best starts and ends inside the context, every pair of them that is an answer (the end not
before the start, not too long), and of these the best; over the windows of an example the best of all, each span of
the context once. Ties go to what comes first in the context, then to the earlier window: the result depends on the
logits alone.

A token stands for the characters of its offsets and, beside them, for what the tokenizer dropped: normalization removes
accents, vowel signs and invisible characters (joiners, soft hyphens, control characters). Offsets end before them, and
an answer cut out by offsets would lack them. Here such a character belongs to the token before it, or to the one after
it if white space or nothing comes before it. No token gains white space, or a character that another token has.

Holds some hundred windows and the answers of one example, whatever the size; logits may be arrays, memory maps or
tensors. Needs only numpy.
"""

from __future__ import annotations

import itertools
import json
import math
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError, InputError
from milldam.files import NewFile

if TYPE_CHECKING:
    from milldam.qa.store import FeatureStore

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Spans = npt.NDArray[np.int32]
"""(tokens, 2): begin and end, in characters of the context."""
LogitRows: TypeAlias = Any
"""(windows, L): an array, a memory map or a tensor."""

_SCORES_AT_ONCE = 1 << 17


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
    n_best: list[dict[str, Any]]
    """The best first, as transformers has them: text (empty: no answer), probability among them, score, which is
    start_logit + end_logit. No answer is among them, unless null_threshold is None."""
    span: tuple[int, int] | None
    """Where `text` lies in the context, in characters."""

    @property
    def null_odds(self) -> float:
        """By how much no answer is better than the best one; the prediction is empty above null_threshold."""
        return self.null_score - (self.score or 0.0)


Ranking: TypeAlias = "tuple[tuple[float, float], Ints, Floats]"
"""Answers found in windows of one example: start and end logit of no answer; (answers, 2) spans of the context, in
characters; (answers, 2) start and end logits."""


def answers(
    store: FeatureStore,
    start_logits: LogitRows,
    end_logits: LogitRows,
    *,
    windows: npt.ArrayLike | None = None,
    n_best: int = 20,
    max_answer_length: int = 30,
    null_threshold: float | None = 0.0,
) -> Predictions:
    """The answers for some logits, example by example in the order of the store; computed as you iterate.

    start_logits       (windows, L)
    windows            the numbers of the rows' windows; None: all of the store, in order
    max_answer_length  in tokens
    null_threshold     the answer is empty if "no answer" scores more than this above the best; None: never (SQuAD v1.1)

    >>> features = milldam.qa.prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased/")
    >>> start, end = np.zeros((2, len(features), 384))          # of a model that has learned nothing
    >>> milldam.qa.answers(features, start, end).write_predictions("predictions.json")
    12
    """
    for name, value in (("n_best", n_best), ("max_answer_length", max_answer_length)):
        if value < 1:
            raise ConfigError(f"answers: {name}: {value}; use 1 or more.")
    numbers = np.arange(len(store)) if windows is None else np.asarray(windows, np.int64).reshape(-1)
    shape = len(numbers), store.form.max_seq_length
    for name, logits in (("start_logits", start_logits), ("end_logits", end_logits)):
        if tuple(logits.shape) != shape:
            raise InputError(f"answers: {name} are {tuple(logits.shape)}; for these windows, {shape} are needed.")
    order = np.argsort(numbers, kind="stable")
    return Predictions(store, start_logits, end_logits, numbers, order, n_best, max_answer_length, null_threshold)


@dataclass(frozen=True, slots=True)
class Predictions:
    """Iterate to get a `Prediction` for every example."""

    store: FeatureStore
    start: LogitRows
    end: LogitRows
    windows: Ints
    """The window of each row."""
    order: Ints
    """The rows in the order of their windows."""
    n_best: int
    max_answer_length: int
    null_threshold: float | None

    def __iter__(self) -> Iterator[Prediction]:
        held: tuple[int, Ranking] | None = None
        size = max(1, _SCORES_AT_ONCE // max(self.n_best**2, 384))
        parts = (self.order[first : first + size] for first in range(0, len(self.order), size))
        for example, ranking in itertools.chain.from_iterable(map(self._rankings, parts)):
            if held is not None and held[0] == example:  # of another part
                (null, spans, logits), (other, more_spans, more_logits) = held[1], ranking
                spans, logits = np.concatenate((spans, more_spans)), np.concatenate((logits, more_logits))
                ranking = min(null, other, key=sum), *_best(spans, logits, self.n_best)
            elif held is not None:
                yield self._prediction(*held)
            held = example, ranking
        if held is not None:
            yield self._prediction(*held)

    def _rankings(self, part: Ints) -> Iterator[tuple[int, Ranking]]:
        """(example, what these of its windows hold). Takes the best pairs of start and end in each window."""
        # start, end: (windows, L)
        numbers, start, end = self.windows[part], _floats(self.start[part]), _floats(self.end[part])
        columns = self.store.rows(numbers, ("context_begin", "context_tokens", "cls_index", "example"))
        characters = stretches(self.store, numbers)
        count, length = start.shape
        begin, cls, row = columns["context_begin"][:, None], columns["cls_index"], np.arange(count)
        # (windows, L): what does not belong to the context
        outside = (np.arange(length) < begin) | (np.arange(length) >= begin + columns["context_tokens"][:, None])
        unread = outside.copy()
        unread[row, cls] = False  # the score of no answer
        # -inf is what can't be, and right; a NaN would win or lose every comparison in silence.
        bad = ~(((start < np.inf) & (end < np.inf)) | unread).all(axis=1)
        if bad.any():
            raise InputError(f"answers: window {int(numbers[bad.argmax()]):,} has logits that are NaN or infinite.")
        n, rows = min(self.n_best, length), row[:, None]
        starts = _highest(np.where(outside, -np.inf, start), n)
        ends = _highest(np.where(outside, -np.inf, end), n)
        # (windows, n, n): pairs that are answers
        apart = ends[:, None, :] - starts[:, :, None]
        begins, stops = characters[rows, starts, 0], characters[rows, ends, 1]
        valid = (apart >= 0) & (apart < self.max_answer_length) & (stops[:, None, :] > begins[:, :, None])
        valid &= ~outside[rows, starts][:, :, None] & ~outside[rows, ends][:, None, :]
        scores = start[rows, starts][:, :, None] + end[rows, ends][:, None, :]
        flat = np.where(valid, scores, -np.inf).reshape(count, n * n)
        chosen = _highest(flat, min(self.n_best, n * n))
        there = flat[rows, chosen] > -np.inf
        first, last = starts[rows, chosen // n], ends[rows, chosen % n]
        spans = np.stack((characters[rows, first, 0], characters[rows, last, 1]), axis=2).astype(np.int64)
        logits = np.stack((start[rows, first], end[rows, last]), axis=2)
        null = np.stack((start[row, cls], end[row, cls]), axis=1)
        examples = columns["example"]
        borders = [0, *(np.flatnonzero(examples[1:] != examples[:-1]) + 1).tolist(), count]
        for one, other in itertools.pairwise(borders):
            inside = there[one:other]
            low = null[one + int(null[one:other].sum(axis=1).argmin())]
            best = _best(spans[one:other][inside], logits[one:other][inside], self.n_best)
            yield int(examples[one]), ((float(low[0]), float(low[1])), *best)

    def _prediction(self, number: int, ranking: Ranking) -> Prediction:
        null, spans, logits = ranking
        example, threshold = self.store.example(number), self.null_threshold
        context, null_score = example["context"], sum(null)
        best = float(logits[0].sum()) if len(spans) else None
        ranked = [
            (context[first:stop], start, end)
            for (first, stop), (start, end) in zip(spans.tolist(), logits.tolist(), strict=True)
        ]
        if threshold is not None or not ranked:
            # No answer is one of the n best, or comes after them.
            place = sum(start + end >= null_score for _, start, end in ranked)
            ranked.insert(place, ("", *null))
            ranked = ranked[: max(self.n_best, place + 1)]
        shares = _softmax([start + end for _, start, end in ranked])
        n_best = [
            {"text": text, "probability": share, "score": start + end, "start_logit": start, "end_logit": end}
            for (text, start, end), share in zip(ranked, shares, strict=True)
        ]
        if best is None or (threshold is not None and null_score - best > threshold):
            return Prediction(str(example["id"]), "", best, null_score, n_best, None)
        first, stop = spans[0].tolist()
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
        wanted: list[tuple[str | Path | None, Callable[[Prediction], Any]]] = [
            (path, lambda prediction: prediction.text),
            (n_best, lambda prediction: prediction.n_best),
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


def _best(spans: Ints, logits: Floats, most: int) -> tuple[Ints, Floats]:
    """The best, best first, each span once; of equals the first in the context, then the first row."""
    scores = logits.sum(axis=1)
    order = np.lexsort((-scores, spans[:, 1], spans[:, 0]))
    ordered = spans[order]
    order = order[np.r_[True, (ordered[1:] != ordered[:-1]).any(axis=1)]] if len(order) else order
    order = order[np.argsort(-scores[order], kind="stable")][:most]
    return spans[order], logits[order]


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


# ---- what tokens stand for ----


def stretches(store: FeatureStore, windows: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """(windows, L, 2): begin and end of what the tokens stand for; (-1, -1) on what is no token of the context.

    >>> features = milldam.qa.prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased/")
    >>> context = features.example(0)["context"]
    >>> found = milldam.qa.stretches(features, [0])[0]
    >>> begin, end = found[found[:, 0] >= 0][1]
    >>> context[begin:end]
    'city'
    """
    numbers = np.asarray(windows, np.int64)
    around = np.unique(np.concatenate((numbers - 1, numbers, numbers + 1)).clip(0, len(store) - 1))
    rows = store.rows(around, ("offsets", "context_begin", "context_tokens", "example"))
    offsets, examples = rows["offsets"], rows["example"].tolist()
    parts = [slice(at, at + count) for at, count in zip(rows["context_begin"], rows["context_tokens"], strict=True)]
    places = np.searchsorted(around, numbers)
    made: npt.NDArray[np.int32] = offsets[places]
    for example, group in itertools.groupby(enumerate(places.tolist()), lambda pair: examples[pair[1]]):
        context = store.example(example)["context"]
        for row, place in group:
            beside = [at for at in (place - 1, place + 1) if 0 <= at < len(around) and examples[at] == example]
            near = np.concatenate([np.empty((0, 2), np.int32), *(offsets[at, parts[at]] for at in beside)])
            made[row, parts[place]] = _widened(made[row, parts[place]], near, context)
    return made


def _may_be_dropped(character: str) -> bool:
    """Marks, what can't be seen, modifiers as of half-width kana, and what stands for a letter that was lost.

    But not the byte order mark, which is the file's and no word's; nor letters, digits and punctuation, which a
    tokenizer drops when it does not know them.
    """
    kind = unicodedata.category(character)
    fitting = kind[0] in "MC" or kind in ("Lm", "Sk") or character == "\ufffd"
    return fitting and character != "\ufeff" and not character.isspace()


def _widened(tokens: Spans, near: Spans, context: str) -> Spans:
    """Tokens of a window that reach into the gaps beside them; `near`: those of the windows beside it.

    All tokens of a character reach as far, and an empty one moves along.
    """
    before = near[:, 1][near[:, 1] <= tokens[:1, 0].max(initial=0)].max(initial=0)
    # Behind a document's last window there are no tokens, or, with max_segments, none that a window has.
    behind = near[:, 0][near[:, 0] >= tokens[:, 1].max(initial=0)].min(initial=len(context))
    dropped = "".join(filter(_may_be_dropped, set(context[before:behind])))
    if not dropped:
        return tokens
    stops, begins = np.maximum.accumulate(np.r_[before, tokens[:, 1]]), np.r_[tokens[:, 0], behind]
    earlier: dict[int, int] = {}
    later: dict[int, int] = {}
    for stop, begin in np.stack((stops, begins), axis=1)[begins > stops].tolist():
        gap = context[stop:begin]
        rest = gap.rstrip(dropped)
        later[stop] = begin - len(gap.lstrip(dropped))
        if rest[-1:].isspace() or (stop == 0 and not rest):
            earlier[begin] = stop + len(rest)
    made = [
        (earlier.get(begin, begin), later.get(end, end) if end > begin else earlier.get(end, end))
        for begin, end in tokens.tolist()
    ]
    return np.array(made, np.int32).reshape(-1, 2)
