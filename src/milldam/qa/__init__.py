"""Question answering on long documents: examples -> windows -> a feature store -> batches -> answers.

records, examples         SQuAD files and flat records -> examples, streamed
settings                  what can be set
template                  what goes around the texts of a window
spans, windows            examples -> windows, with the tokens of their answers
job                       all of it as a job: planned, resumable, in a memory budget
store                     the table that it makes, opened by windows and examples
batches, lanes            windows, documents step by step, lanes that are never idle; which segments of a document
answering                 logits -> the characters of answers
evaluation                answers -> EM and F1
compat                    the functions that users of MemXLNet know

>>> import milldam
>>> features = milldam.qa.prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased/")
>>> steps = next(milldam.qa.DocumentSamples(features).batches(8, seed=0))
>>> steps[0]["input_ids"].shape
(8, 384)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from milldam.qa.answering import Prediction, Predictions, answers
    from milldam.qa.batches import DocumentSamples, Selection, TimeSteps, WindowSamples
    from milldam.qa.evaluation import Scores, evaluate
    from milldam.qa.examples import Answer, Example, examples_of
    from milldam.qa.job import prepare
    from milldam.qa.lanes import Lanes
    from milldam.qa.spans import stretches
    from milldam.qa.store import FeatureStore

# Loaded on first use: reading features needs only numpy, and not what made them.
_NAMES = {
    "answering": ("Prediction", "Predictions", "answers"),
    "batches": ("DocumentSamples", "Selection", "TimeSteps", "WindowSamples"),
    "evaluation": ("Scores", "evaluate"),
    "examples": ("Answer", "Example", "examples_of"),
    "job": ("prepare",),
    "lanes": ("Lanes",),
    "spans": ("stretches",),
    "store": ("FeatureStore",),
}
_HOMES = {name: f"milldam.qa.{home}" for home, names in _NAMES.items() for name in names}
__all__ = [
    "Answer",
    "DocumentSamples",
    "Example",
    "FeatureStore",
    "Lanes",
    "Prediction",
    "Predictions",
    "Scores",
    "Selection",
    "TimeSteps",
    "WindowSamples",
    "answers",
    "evaluate",
    "examples_of",
    "prepare",
    "stretches",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'milldam.qa' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
