"""Exact match and F1 of answers, as the official scripts of SQuAD v1.1 and v2 compute them, and by kind of answer.

Answers are compared in lower case, without ASCII punctuation, English articles and superfluous white space, in every
language. F1 is over the words of both, with repeats. The best of the gold answers counts; a question without a gold
answer wants an empty one. A question without a prediction counts, with 0 (so does v1.1's script; that of v2 fails).

Gold answers come from files, records or a feature store: questions are read one after the other, of each its id and
answers alone. Held are ids, gold answers, predictions and scores; contexts are not.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from milldam.errors import ConfigError, InputError
from milldam.qa.examples import Example, described
from milldam.stores.kinds import TABLE, store_kind

if TYPE_CHECKING:
    from milldam.qa.answering import Predictions
    from milldam.qa.store import FeatureStore

References: TypeAlias = "str | Path | FeatureStore | Mapping[str, Any] | Iterable[Mapping[str, Any] | Example]"
"""A file, folder or dataset; a feature store or its path; SQuAD's object; flat records."""
Predicted: TypeAlias = "Mapping[str, str] | str | Path | Predictions"
"""{id: text}, the path of such a JSON file, or what `answers` gives."""
NullOdds: TypeAlias = "Mapping[str, float] | str | Path"
Gold = tuple[str, ...]
"""The texts of a question's answers."""
_NEEDED = ("id", "answers")
_WHOLE = "References must be whole: mend it."


def gold_answers(references: References, split: str) -> tuple[dict[str, Gold], int]:
    """The answers to every question, by its id; and how many examples a feature store was made without."""
    left_out = 0
    if isinstance(references, str | Path) and store_kind(references) is TABLE:
        from milldam.qa.store import FeatureStore

        references = FeatureStore(Path(references))
    if hasattr(references, "manifest"):
        counts = references.manifest.counts
        left_out = sum(sum(counts.get(name, {}).values()) for name in ("dropped", "rejected"))
    found = dict(_gold(record, where) for record, where in _records(references, split))
    if not found:
        raise InputError(f"{named(references)}: no questions in it.")
    return found, left_out


def _records(references: References, split: str) -> Iterator[tuple[Any, str]]:
    """(flat record, where it was found)."""
    name = named(references)
    if isinstance(references, str | Path):
        yield from _of_files(str(references), split)
    elif hasattr(references, "example") and hasattr(references, "examples"):
        yield from ((references.example(number), name) for number in range(references.examples))
    elif isinstance(references, Mapping):
        yield from ((record, name) for record in _of_squad(references, name))
    else:
        yield from ((record, name) for record in references)


def _of_files(given: str, split: str) -> Iterator[tuple[Any, str]]:
    """One that can't be used ends it: scores over some of the questions would look like scores over all."""
    from milldam.qa.records import Piece, flat_records, list_files, read_records
    from milldam.sources.batch import Reading, Reject, TextRules
    from milldam.sources.units import whole

    def stop(reject: Reject) -> None:
        raise InputError(f"{reject.place}: {reject.detail}. {_WHOLE}")

    for file in list_files([given], split):
        for found in read_records(Piece(whole(file)), Reading(TextRules(only_file=True), stop), _NEEDED):
            where = f"{found.place.place}{found.where and f': {found.where}'}"
            yield from ((one, f"{where}{inside}") for inside, one in flat_records(found.value))


def _of_squad(document: Mapping[str, Any], name: str) -> Iterator[Any]:
    from milldam.qa.records import flat_records

    if not isinstance(document.get("data"), list):
        raise InputError(f'{name}: no list "data" in it, as SQuAD files have.')
    for article in document["data"]:
        yield from (record for _, record in flat_records(article))


def _gold(record: Any, where: str) -> tuple[str, Gold]:
    """SQuAD's answers are a list of objects, those of the flat form one object of lists; an `Example` has its own."""
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
    found = source if isinstance(source, Mapping) else _read_json(Path(source))
    if not isinstance(found, Mapping):
        raise InputError(f"{named(source)}: a JSON object {form} is needed; found {described(found)}.")
    for id, value in found.items():
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InputError(f'{named(source)}: "{id}" has {described(value)} where {called} is needed, as in {form}.')
    return dict(found)


def named(source: Any) -> str:
    """What messages call it."""
    return str(source) if isinstance(source, str | Path) else f"the {type(source).__name__} that was given"


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror}).") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}).") from None


Version = Literal["1.1", "2.0"]
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ORDINALS = re.compile(r"(?<=\d)(?:st|nd|rd|th|s)\b", re.IGNORECASE)
_SHORT_WORDS = 3
KINDS = ("number", "short", "long")
OFFICIAL_THRESHOLD = 1.0
"""On null odds, where v2's script is told no other."""


# ---- one answer against another ----


def normalized(text: str) -> str:
    """What is compared of an answer.

    >>> normalized("The  Eiffel-Tower!")
    'eiffeltower'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(predicted: str, gold: str) -> float:
    return float(normalized(predicted) == normalized(gold))


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


def kind_of(answer: str) -> str:
    """number: digits without other letters than those of 10th and 1990s; short: up to 3 words; else long.

    >>> kind_of("$1,500"), kind_of("the 1990s"), kind_of("in the 10th and 11th centuries")
    ('number', 'short', 'long')
    """
    rest = _ORDINALS.sub("", answer)
    if any(one.isdigit() for one in answer) and not any(one.isalpha() for one in rest):
        return "number"
    return "short" if len(answer.split()) <= _SHORT_WORDS else "long"


# ---- what comes out ----


@dataclass(frozen=True, slots=True)
class Group:
    """Scores of some questions, in percent; 0 where there are none."""

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
    """Whose rules counted: v2 when there are questions without an answer."""
    groups: dict[str, Group]
    """all, answerable, unanswerable; of the answerable by their first answer: number, short (up to 3 words), long."""
    missing: tuple[str, ...] = ()
    """Questions without a prediction: 0 each."""
    unknown: int = 0
    """Predictions for questions that are not in the references; they don't count."""
    best: Best | None = None
    """With null odds."""
    left_out: int = 0
    """Examples that the references, a feature store, rejected or dropped when it was made: not in the scores."""

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
        """By the names of the official scripts, with `by_type`, `missing`, `unknown` and `left_out` besides."""
        found: dict[str, Any] = {"exact": self.exact, "f1": self.f1, "total": self.total}
        for prefix, name in (("HasAns", "answerable"), ("NoAns", "unanswerable")):
            group = self.groups[name]
            if group.total:
                found |= {f"{prefix}_exact": group.exact, f"{prefix}_f1": group.f1, f"{prefix}_total": group.total}
        if self.best is not None:
            found |= {"best_exact": self.best.exact, "best_exact_thresh": self.best.exact_threshold}
            found |= {"best_f1": self.best.f1, "best_f1_thresh": self.best.f1_threshold}
        by_type = {name: asdict(self.groups[name]) for name in KINDS}
        counts = {"missing": len(self.missing), "unknown": self.unknown, "left_out": self.left_out}
        return found | {"by_type": by_type} | counts


# ---- references against predictions ----


@dataclass(slots=True)
class _Tally:
    """Scores by question."""

    exact: dict[str, float] = field(default_factory=dict)
    f1: dict[str, float] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    """The kind of each question's first answer; unanswerable: it has none."""

    def answerable(self, id: str) -> bool:
        return self.kinds[id] != "unanswerable"

    def groups(self) -> dict[str, Group]:
        members: dict[str, list[str]] = {name: [] for name in ("all", "answerable", "unanswerable", *KINDS)}
        for id, kind in self.kinds.items():
            members["all"].append(id)
            members[kind].append(id)
            if kind != "unanswerable":
                members["answerable"].append(id)
        return {
            name: Group(len(ids), _percent(self.exact, ids), _percent(self.f1, ids)) for name, ids in members.items()
        }


def _percent(scores: dict[str, float], ids: list[str]) -> float:
    return 100.0 * sum(scores[id] for id in ids) / len(ids) if ids else 0.0


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
    predictions  {id: text}, a JSON file of that, or what `answers` gives
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
    questions, left_out = gold_answers(references, split)
    if isinstance(predictions, Mapping | str | Path):
        texts = _checked(predictions, str, "a text", "{question id: answer}")
    else:
        texts = predictions.texts()
    odds = None if null_odds is None else _checked(null_odds, (int, float), "a number", "{question id: number}")
    chosen = version or ("2.0" if not all(questions.values()) else "1.1")
    tally = _scored(questions, texts, chosen)
    missing = tuple(id for id in questions if id not in texts)
    best = None
    if odds is not None:
        _require_odds(odds, [id for id in questions if id in texts], null_odds)
        best = Best(*_best_of(tally, tally.exact, texts, odds), *_best_of(tally, tally.f1, texts, odds))
        for id in () if threshold is None else (id for id in questions if id in texts and odds[id] > threshold):
            tally.exact[id] = tally.f1[id] = float(not tally.answerable(id))
    unknown = sum(id not in questions for id in texts)
    return Scores(chosen, tally.groups(), missing, unknown, best, left_out)


def _scored(questions: dict[str, Gold], texts: dict[str, str], version: Version) -> _Tally:
    tally = _Tally()
    for id, gold in questions.items():
        tally.kinds[id] = kind_of(gold[0]) if gold else "unanswerable"
        # v2 leaves out answers of which nothing is left to compare.
        wanted = gold if version == "1.1" else [one for one in gold if normalized(one)]
        predicted = texts.get(id)
        tally.exact[id] = tally.f1[id] = 0.0
        if predicted is not None:
            tally.exact[id] = max(exact_match(predicted, one) for one in wanted or [""])
            tally.f1[id] = max(f1(predicted, one, version) for one in wanted or [""])
    return tally


def _require_odds(odds: Mapping[str, float], ids: list[str], source: Any) -> None:
    without = [id for id in ids if id not in odds]
    if without:
        raise InputError(
            f'{named(source)}: no null odds for {len(without):,} of {len(ids):,} predictions, such as "{without[0]}". '
            "Make both files in one run."
        )


def _best_of(
    tally: _Tally, scores: dict[str, float], texts: dict[str, str], odds: Mapping[str, float]
) -> tuple[float, float]:
    """The best score over all thresholds, and the lowest threshold that gives it.

    From a threshold so low that every answer is empty, one answer after the other is let through.
    """
    now = best = float(sum(not tally.answerable(id) for id in tally.kinds))
    best_threshold = 0.0
    for id in sorted((id for id in odds if id in texts and id in tally.kinds), key=odds.__getitem__):
        if tally.answerable(id):
            now += scores[id]
        elif texts[id]:
            now -= 1
        if now > best:
            best, best_threshold = now, odds[id]
    return 100.0 * best / len(tally.kinds), best_threshold
