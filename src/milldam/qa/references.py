"""What scores are made of: the gold answers of files, records or a feature store; predictions and null odds.

Questions are read one after the other, of each its id and answers alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from milldam.errors import InputError
from milldam.qa.sources import Example
from milldam.stores.kinds import FEATURES, store_kind

if TYPE_CHECKING:
    from milldam.qa.answering import Predictions
    from milldam.stores.features import FeatureStore

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
    if isinstance(references, str | Path) and store_kind(references) is FEATURES:
        from milldam.stores.features import FeatureStore

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
    from milldam.qa.records import flat_records, list_files, read_records

    for file in list_files([given], split):
        for found in read_records(file, columns=_NEEDED, needed=_NEEDED):
            if found.error is not None:
                raise InputError(f"{file.path}: {found.where}: {found.error.detail}. {_WHOLE}")
            yield from ((one, f"{file.path}: {where}") for where, one in flat_records(found.where, found.value))


def _of_squad(document: Mapping[str, Any], name: str) -> Iterator[Any]:
    from milldam.qa.records import flat_records

    if not isinstance(document.get("data"), list):
        raise InputError(f'{name}: no list "data" in it, as SQuAD files have.')
    for article in document["data"]:
        yield from (record for _, record in flat_records("", article))


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


def read_predictions(predictions: Predicted) -> dict[str, str]:
    """{id: text}"""
    if not isinstance(predictions, Mapping | str | Path):
        return predictions.texts()
    return _checked(predictions, str, "a text", "{question id: answer}")


def read_null_odds(odds: NullOdds) -> dict[str, float]:
    return _checked(odds, (int, float), "a number", "{question id: number}")


def _checked(source: Any, kind: Any, called: str, form: str) -> dict[str, Any]:
    found = source if isinstance(source, Mapping) else _read_json(Path(source))
    if not isinstance(found, Mapping):
        raise InputError(f"{named(source)}: a JSON object {form} is needed; found {_called(found)}.")
    for id, value in found.items():
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InputError(f'{named(source)}: "{id}" has {_called(value)} where {called} is needed, as in {form}.')
    return dict(found)


def _called(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", type(None): "null", bool: "true or false"}
    return names.get(type(value), "a number")


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
