"""Question answering on long documents: examples -> windows -> a feature store -> batches -> answers.

settings            what can be set
examples            SQuAD files and flat records -> examples, streamed
template            what goes around the texts of a window
windows             examples -> windows, with the tokens of their answers
job                 all of it as a job: planned, resumable, in a memory budget
store               the table that it makes, opened by windows and examples
batches             windows, documents step by step, lanes that are never idle; which segments of a document
answering           logits -> the characters of answers
evaluation          answers -> EM and F1
compat              the functions that users of MemXLNet know

>>> import milldam
>>> features = milldam.qa.prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased/")
>>> steps = next(milldam.qa.DocumentSamples(features).batches(8, seed=0))
>>> steps[0]["input_ids"].shape
(8, 384)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from milldam.qa.answering import Prediction, answers, stretches
    from milldam.qa.batches import DocumentSamples, Selection, WindowSamples, lanes
    from milldam.qa.evaluation import Scores, evaluate
    from milldam.qa.job import prepare
    from milldam.qa.store import FeatureStore

__all__ = [
    "DocumentSamples", "FeatureStore", "Prediction", "Scores", "Selection", "WindowSamples", "answers", "evaluate",
    "lanes", "prepare", "stretches",
]  # fmt: skip

# Loaded on first use: reading features needs only numpy, and not what made them.
_HOMES = {
    "answering": "Prediction answers stretches",
    "batches": "DocumentSamples Selection WindowSamples lanes",
    "evaluation": "Scores evaluate",
    "job": "prepare",
    "store": "FeatureStore",
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(f"milldam.qa.{module}"), name)
    raise AttributeError(f"module 'milldam.qa' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
