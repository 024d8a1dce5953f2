"""Exact match and F1 of answers, as the official scripts of SQuAD v1.1 and v2 compute them.

Answers are compared in lower case, without ASCII punctuation, English articles and superfluous white space, in every
language. F1 is over the words of both, with repeats. The best of the gold answers counts; a question without a gold
answer wants an empty one. A question without a prediction counts, with 0 (as in v1.1's script; that of v2 fails).

Gold answers come from files, records or a feature store, one question after the other. Holds ids, gold answers,
predictions and scores, but no contexts.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from milldam.errors import ConfigError, InputError
from milldam.qa.examples import Example, described
from milldam.qa.records import Piece, flat_records, list_files, read_records
from milldam.qa.store import FeatureStore
from milldam.sources.batch import Reading, Reject, TextRules
from milldam.sources.units import whole
from milldam.stores.kinds import TABLE, store_kind

if TYPE_CHECKING:
    from milldam.qa.answering import Predictions

References: TypeAlias = "str | Path | FeatureStore | Mapping[str, Any] | Iterable[Mapping[str, Any] | Example]"
"""A file, folder or dataset; a feature store or its path; SQuAD's object; flat records."""
Predicted: TypeAlias = "Mapping[str, str] | str | Path | Predictions"
"""{id: text}, the path of such a JSON file, or what `answers` returns."""
NullOdds: TypeAlias = "Mapping[str, float] | str | Path"
Version = Literal["1.1", "2.0"]
OFFICIAL_THRESHOLD = 1.0
"""On null odds: the default of v2's script."""
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WHOLE = "References must be complete: repair it."


# ---- one answer against another ----


def normalized(text: str) -> str:
    """The part of an answer that is compared.

    >>> normalized("The  Eiffel-Tower!")
    'eiffeltower'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def f1(predicted: str, gold: str, version: Version = "2.0") -> float:
    """The harmonic mean of precision and recall over words.

    >>> round(f1("the tall tower", "a tower"), 3)
    0.667
    """
    ours, theirs = normalized(predicted).split(), normalized(gold).split()
    if version == "2.0" and not (ours and theirs):
        return float(ours == theirs)
    shared = sum((Counter(ours) & Counter(theirs)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(ours), shared / len(theirs)
    return 2 * precision * recall / (precision + recall)


# ---- scores ----


@dataclass(frozen=True, slots=True)
class Group:
    """Scores of some questions, in percent; 0 if there are none."""

    total: int
    exact: float
    f1: float


@dataclass(frozen=True, slots=True)
class Best:
    """The best that any threshold on the null odds gives."""

    exact: float
    exact_threshold: float
    f1: float
    f1_threshold: float


@dataclass(frozen=True, slots=True)
class Scores:
    """How good predictions are.

    >>> scores = milldam.qa.evaluate("dev-v2.0.json", "predictions.json")
    >>> scores.exact, scores.f1, scores.total
    (100.0, 100.0, 12)
    """

    version: Version
    """The rules that counted: v2's if there are questions without an answer."""
    groups: dict[str, Group]
    """all, answerable, unanswerable."""
    missing: tuple[str, ...] = ()
    """Questions without a prediction: 0 each."""
    unknown: int = 0
    """Predictions for questions that are not in the references; they don't count."""
    best: Best | None = None
    """With null odds."""
    left_out: int = 0
    """If the references are a feature store, the examples that it rejected or dropped: not in the scores."""

    @property
    def total(self) -> int:
        return self.groups["all"].total

    @property
    def exact(self) -> float:
        return self.groups["all"].exact

    @property
    def f1(self) -> float:
        return self.groups["all"].f1

    def as_dict(self) -> dict[str, Any]:
        """By the names of the official scripts, with `missing`, `unknown` and `left_out` besides."""
        scores: dict[str, Any] = {"exact": self.exact, "f1": self.f1, "total": self.total}
        for prefix, name in (("HasAns", "answerable"), ("NoAns", "unanswerable")):
            group = self.groups[name]
            if group.total:
                scores |= {f"{prefix}_exact": group.exact, f"{prefix}_f1": group.f1, f"{prefix}_total": group.total}
        if self.best is not None:
            scores |= {"best_exact": self.best.exact, "best_exact_thresh": self.best.exact_threshold}
            scores |= {"best_f1": self.best.f1, "best_f1_thresh": self.best.f1_threshold}
        return scores | {"missing": len(self.missing), "unknown": self.unknown, "left_out": self.left_out}


def evaluate(
    references: References,
    predictions: Predicted,
    null_odds: NullOdds | None = None,
    *,
    threshold: float | None = OFFICIAL_THRESHOLD,
    version: Version | None = None,
    split: str = "validation",
) -> Scores:
    """Score predictions as the official scripts do.

    references   a SQuAD JSON file, flat records (jsonl, parquet, a dataset; or a list of dicts), or a feature store
    predictions  {id: text}, a JSON file of that, or what `answers` returns
    null_odds    {id: number} or a JSON file of that: the higher, the more the model thinks that there is no answer
    threshold    with null odds, count a prediction as empty if its odds are above this: 1.0 as in v2's script;
                 None: keep all as predicted
    version      whose rules; None: v2 if a question has no answer, else v1.1 (they differ only for empty texts)
    split        split of the references, if they are a folder or dataset

    A question that comes twice counts once, with its last answers. A feature store has only examples with windows:
    `left_out` says how many others there were. To count them, score against the original file.

    >>> milldam.qa.evaluate("dev-v2.0.json", "predictions.json", "null_odds.json").f1
    100.0
    """
    if threshold not in (None, OFFICIAL_THRESHOLD) and null_odds is None:
        raise ConfigError("threshold: it applies to null odds; give null_odds as well.")
    if isinstance(references, str | Path) and store_kind(references) is TABLE:
        references = FeatureStore(Path(references))
    left_out = 0
    if isinstance(references, FeatureStore):
        counts = references.manifest.counts
        left_out = sum(sum(counts.get(name, {}).values()) for name in ("dropped", "rejected"))
    gold = dict(_gold(record, where) for record, where in _records(references, split))
    if not gold:
        raise InputError(f"{_named(references)}: no questions in it.")
    if isinstance(predictions, Mapping | str | Path):
        texts = _checked(predictions, str, "a text", "{question id: answer}")
    else:
        texts = predictions.texts()
    chosen = version or ("2.0" if not all(gold.values()) else "1.1")
    exact, overlap = _by_question(gold, texts, chosen)
    best = None
    if null_odds is not None:
        odds = _checked(null_odds, (int, float), "a number", "{question id: number}")
        answered = [id for id in gold if id in texts]
        without = [id for id in answered if id not in odds]
        if without:
            raise InputError(
                f"{_named(null_odds)}: no null odds for {len(without):,} of {len(answered):,} predictions, such as "
                f'"{without[0]}". Make both files in one run.'
            )
        best = Best(*_best_of(exact, gold, texts, odds), *_best_of(overlap, gold, texts, odds))
        for id in answered:
            if threshold is not None and odds[id] > threshold:
                exact[id] = overlap[id] = float(not gold[id])
    answerable, unanswerable = [id for id in gold if gold[id]], [id for id in gold if not gold[id]]
    members = {"all": [*gold], "answerable": answerable, "unanswerable": unanswerable}
    groups = {name: Group(len(ids), _percent(exact, ids), _percent(overlap, ids)) for name, ids in members.items()}
    missing = tuple(id for id in gold if id not in texts)
    return Scores(chosen, groups, missing, sum(id not in gold for id in texts), best, left_out)


def _by_question(
    gold: dict[str, tuple[str, ...]], texts: dict[str, str], version: Version
) -> tuple[dict[str, float], dict[str, float]]:
    """Exact match and F1; 0 without a prediction."""
    exact, overlap = dict.fromkeys(gold, 0.0), dict.fromkeys(gold, 0.0)
    for id, golds in gold.items():
        if id in texts:
            # v2 leaves out answers of which nothing remains to compare.
            wanted = (golds if version == "1.1" else [one for one in golds if normalized(one)]) or [""]
            exact[id] = max(float(normalized(texts[id]) == normalized(one)) for one in wanted)
            overlap[id] = max(f1(texts[id], one, version) for one in wanted)
    return exact, overlap


def _percent(scores: dict[str, float], ids: list[str]) -> float:
    return 100.0 * sum(scores[id] for id in ids) / len(ids) if ids else 0.0


def _best_of(
    scores: dict[str, float], gold: dict[str, tuple[str, ...]], texts: dict[str, str], odds: Mapping[str, float]
) -> tuple[float, float]:
    """The best score over all thresholds, and the lowest threshold that gives it.

    Starts with a threshold so low that every answer is empty, then lets one answer after the other through.
    """
    now = best = float(sum(not golds for golds in gold.values()))
    best_threshold = 0.0
    for id in sorted((id for id in odds if id in texts and id in gold), key=odds.__getitem__):
        if gold[id]:
            now += scores[id]
        elif texts[id]:
            now -= 1
        if now > best:
            best, best_threshold = now, odds[id]
    return 100.0 * best / len(gold), best_threshold


# ---- references and predictions ----


def _records(references: References, split: str) -> Iterator[tuple[Any, str]]:
    """(flat record, where it is). A record that can't be used is an error: scores over some of the questions would look
    like scores over all."""
    if isinstance(references, FeatureStore):
        yield from ((references.example(number), str(references.path)) for number in range(references.examples))
        return
    if not isinstance(references, str | Path):
        if isinstance(references, Mapping):
            references = [record for article in references.get("data", ()) for _, record in flat_records(article)]
        yield from ((record, _named(references)) for record in references)
        return

    def stop(reject: Reject) -> None:
        raise InputError(f"{reject.place}: {reject.detail}. {_WHOLE}")

    for file in list_files([str(references)], split):
        reading = Reading(TextRules(only_file=True), stop)
        for record, place, path in read_records(Piece(whole(file)), reading, ("id", "answers")):
            for where, one in flat_records(record, path):
                yield one, f"{place.place}{where and f': {where}'}"


def _gold(record: Any, where: str) -> tuple[str, tuple[str, ...]]:
    """A question's id and the texts of its answers: SQuAD's are a list of objects, those of the flat form one object of
    lists."""
    if isinstance(record, Example):
        return record.id, tuple(answer.text for answer in record.answers)
    wanted = f'Wanted are "id" and "answers" with their "text". {_WHOLE}'
    try:
        id, answers = record["id"], record["answers"]
    except (KeyError, TypeError, IndexError) as error:
        raise InputError(f"{where}: a question without {error}. {wanted}") from None
    try:
        texts = answers["text"] if isinstance(answers, Mapping) else [one["text"] for one in answers or ()]
    except (KeyError, TypeError):
        texts = None
    if id is None or not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"{where}: an id or answers that can't be used. {wanted}")
    return str(id), tuple(texts)


def _checked(source: Any, kind: Any, called: str, form: str) -> dict[str, Any]:
    """A mapping by question, or the JSON file of one."""
    values = source
    if not isinstance(source, Mapping):
        try:
            values = json.loads(Path(source).read_bytes())
        except OSError as error:
            raise InputError(f"{source}: can't be read ({error.strerror}).") from None
        except ValueError as error:
            raise InputError(f"{source}: not JSON ({error}).") from None
    if not isinstance(values, Mapping):
        raise InputError(f"{_named(source)}: a JSON object {form} is needed; found {described(values)}.")
    for id, value in values.items():
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InputError(f'{_named(source)}: "{id}" has {described(value)} where {called} is needed, as in {form}.')
    return dict(values)


def _named(source: Any) -> str:
    """A source's name in messages."""
    return str(source) if isinstance(source, str | Path) else f"the {type(source).__name__} that was passed"
