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
from milldam.qa.examples import list_files, read_questions
from milldam.qa.store import FeatureStore
from milldam.sources.batch import Reading, Reject, TextRules
from milldam.sources.units import whole
from milldam.stores.kinds import TABLE, store_kind

if TYPE_CHECKING:
    from milldam.qa.answering import Predictions

References: TypeAlias = "str | Path | FeatureStore | Iterable[Mapping[str, Any]]"
"""A file, folder or dataset; a feature store or its path; flat records."""
Predicted: TypeAlias = "Mapping[str, str] | str | Path | Predictions"
"""{id: text}, the path of such a JSON file, or what `answers` returns."""
Version = Literal["1.1", "2.0"]
OFFICIAL_THRESHOLD = 1.0
"""On null odds: the default of v2's script."""
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WHOLE = "References must be complete: repair it."


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


@dataclass(frozen=True, slots=True)
class Scores:
    """How good predictions are, in percent.

    >>> scores = milldam.qa.evaluate("dev-v2.0.json", "predictions.json")
    >>> scores.exact, scores.f1, scores.total
    (100.0, 100.0, 12)
    """

    exact: float
    f1: float
    total: int
    details: dict[str, float]
    """By the names of v2's script: HasAns_exact, HasAns_f1, HasAns_total, NoAns_..., and with null odds best_exact,
    best_exact_thresh, best_f1 and best_f1_thresh, the best that any threshold gives."""
    version: Version
    """The rules that counted: v2's if there are questions without an answer."""
    missing: tuple[str, ...]
    """Questions without a prediction: 0 each."""
    unknown: int
    """Predictions for questions that are not in the references; they don't count."""
    left_out: int
    """If the references are a feature store, the examples that it rejected or dropped: not in the scores."""

    def as_dict(self) -> dict[str, Any]:
        """By the names of the official scripts, with `missing`, `unknown` and `left_out` besides."""
        scores = {"exact": self.exact, "f1": self.f1, "total": self.total, **self.details}
        return scores | {"missing": len(self.missing), "unknown": self.unknown, "left_out": self.left_out}


def evaluate(
    references: References,
    predictions: Predicted,
    null_odds: Mapping[str, float] | str | Path | None = None,
    *,
    threshold: float | None = OFFICIAL_THRESHOLD,
    split: str = "validation",
) -> Scores:
    """Score predictions as the official scripts do.

    references   a SQuAD JSON file, flat records (jsonl, parquet, a dataset; or a list of dicts), or a feature store
    predictions  {id: text}, a JSON file of that, or what `answers` returns
    null_odds    {id: number} or a JSON file of that: the higher, the more the model thinks that there is no answer
    threshold    with null odds, count a prediction as empty if its odds are above this: 1.0 as in v2's script;
                 None: keep all as predicted
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
    gold = dict(_gold(record, where) for record, where in _questions(references, split))
    if not gold:
        raise InputError(f"{_named(references)}: no questions in it.")
    if isinstance(predictions, Mapping | str | Path):
        texts = _checked(predictions, str, "{question id: answer text}")
    else:
        texts = predictions.texts()
    # They differ only for empty texts.
    rules: Version = "1.1" if all(gold.values()) else "2.0"
    exact, overlap = dict.fromkeys(gold, 0.0), dict.fromkeys(gold, 0.0)
    for id, golds in gold.items():
        if id in texts:
            # v2 leaves out answers of which nothing remains to compare.
            wanted = (golds if rules == "1.1" else [one for one in golds if normalized(one)]) or [""]
            exact[id] = max(float(normalized(texts[id]) == normalized(one)) for one in wanted)
            overlap[id] = max(f1(texts[id], one, rules) for one in wanted)
    best: dict[str, float] = {}
    if null_odds is not None:
        odds = _checked(null_odds, (int, float), "{question id: number}")
        answered = [id for id in gold if id in texts]
        without = [id for id in answered if id not in odds]
        if without:
            raise InputError(
                f"{_named(null_odds)}: no null odds for {len(without):,} of {len(answered):,} predictions, such as "
                f'"{without[0]}". Make both files in one run.'
            )
        for name, scores in (("exact", exact), ("f1", overlap)):
            best[f"best_{name}"], best[f"best_{name}_thresh"] = _best_of(scores, gold, texts, odds)
        for id in answered:
            if threshold is not None and odds[id] > threshold:
                exact[id] = overlap[id] = float(not gold[id])
    details: dict[str, float] = {}
    for group, ids in (("HasAns", [id for id in gold if gold[id]]), ("NoAns", [id for id in gold if not gold[id]])):
        if ids:
            details |= {f"{group}_exact": _percent(exact, ids), f"{group}_f1": _percent(overlap, ids)}
            details[f"{group}_total"] = len(ids)
    missing, unknown = tuple(id for id in gold if id not in texts), sum(id not in gold for id in texts)
    everything = _percent(exact, gold), _percent(overlap, gold), len(gold)
    return Scores(*everything, details | best, rules, missing, unknown, left_out)


def _percent(scores: dict[str, float], ids: Iterable[str]) -> float:
    values = [scores[id] for id in ids]
    return 100.0 * sum(values) / len(values)


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


def _questions(references: References, split: str) -> Iterator[tuple[Any, str]]:
    """(flat record, where it is). A record that can't be used is an error: scores over some of the questions would look
    like scores over all."""
    if isinstance(references, FeatureStore):
        yield from ((references.example(number), str(references.path)) for number in range(references.examples))
        return
    if not isinstance(references, str | Path):
        yield from ((record, _named(references)) for record in references)
        return

    def stop(reject: Reject) -> None:
        raise InputError(f"{reject.place}: {reject.detail}. {_WHOLE}")

    for file in list_files([str(references)], split):
        for record, place in read_questions(whole(file), Reading(TextRules(only_file=True), stop)):
            yield record, ": ".join(filter(None, (place.place, place.detail)))


def _gold(record: Any, where: str) -> tuple[str, tuple[str, ...]]:
    """A question's id and the texts of its answers: SQuAD's are a list of objects, those of the flat form one object of
    lists."""
    try:
        id, answers = record["id"], record["answers"]
        texts = answers["text"] if isinstance(answers, Mapping) else [one["text"] for one in answers or ()]
    except (KeyError, TypeError, IndexError):
        id = texts = None
    if id is None or not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        wanted = f'wanted are "id" and "answers" with their "text". {_WHOLE}'
        raise InputError(f"{where}: a question without an id or answers that can be used; {wanted}")
    return str(id), tuple(texts)


def _checked(source: Any, kind: Any, form: str) -> dict[str, Any]:
    """A mapping by question, or the JSON file of one."""
    values = source
    if not isinstance(source, Mapping):
        try:
            values = json.loads(Path(source).read_bytes())
        except (OSError, ValueError) as error:
            raise InputError(f"{source}: can't be read as JSON ({error}).") from None
    wrong = [id for id, value in values.items() if not isinstance(value, kind)] if isinstance(values, Mapping) else [""]
    if wrong:
        at = f', and "{wrong[0]}" has none' if wrong[0] else ""
        raise InputError(f"{_named(source)}: a JSON object {form} is needed{at}.")
    return dict(values)


def _named(source: Any) -> str:
    """A source's name in messages."""
    return str(source) if isinstance(source, str | Path) else f"the {type(source).__name__} that was passed"
