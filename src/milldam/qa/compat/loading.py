"""Cached features -> windows and batches that come with the texts of their examples."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from milldam.errors import ConfigError
from milldam.qa.spans import stretches
from milldam.stores.features.reader import FeatureStore

if TYPE_CHECKING:
    from milldam.loader.batches import Batches
    from milldam.loader.samples import Samples

_TEXTS = ("example_id", "question", "context", "chosen_answer_text")


class SquadDataset(FeatureStore):
    """A feature store whose windows come with the texts of their example.

    `dataset[i]` has, besides a window's own fields, `question`, `context`, `chosen_answer_text` and
    `chosen_answer_char_span` (begin and end in the context): those of the document, "" and [-1, -1] where it has no
    answer; `has_answer` says whether this window holds it. Tensors where torch is installed, else numpy arrays. The
    context between the `offset_mapping` of the answer's first and last token is the answer, with the marks that the
    tokenizer drops.
    """

    def __getitem__(self, number: int) -> dict[str, Any]:
        window = super().__getitem__(number)
        numbers = np.array([range(len(self))[number]])
        texts = _texts(self, self.rows(numbers, ("example",))["example"])
        window |= {name: texts[name][0] for name in _TEXTS}
        window["chosen_answer_char_span"] = texts["chosen_answer_char_span"][0].tolist()
        window["offset_mapping"] = stretches(self, numbers)[0]
        window |= {name: np.array(window[name]) for name in ("start_positions", "end_positions")}
        return dict(_converter()(window))

    def get_document_segments(self, example_id: str) -> list[int]:
        """The numbers of a document's windows, in order; none where there is no such document."""
        try:
            first, count = self.windows_of([self.find(example_id)])
        except KeyError:
            return []
        return list(range(int(first[0]), int(first[0] + count[0])))

    def get_all_documents(self) -> list[str]:
        """The ids of all documents, in order."""
        return [str(self.example(number)["id"]) for number in range(self.examples)]


def _texts(store: FeatureStore, examples: Any) -> dict[str, Any]:
    """Texts of some examples: lists by name, and where the answers are, (examples, 2)."""
    found = [store.example(number) for number in examples.tolist()]
    texts = {name: [one["id" if name == "example_id" else name] for one in found] for name in _TEXTS}
    spans = [one["chosen_answer_char_span"] or (-1, -1) for one in found]
    return texts | {"chosen_answer_char_span": np.array(spans, np.int64).reshape(-1, 2)}


def create_dataloader(
    dataset: FeatureStore,
    batch_size: int,
    shuffle: bool = True,
    num_workers: int = 0,
    use_time_step_major: bool = True,
    max_segments: int | None = None,
    segment_selection_strategy: str = "answer_centered",
    epoch_seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> FeatureLoader:
    """Batches of a cached dataset: a list over time steps, each a dict; or, not time-step-major, a dict of windows.

    max_segments   at most so many segments of a document, chosen by segment_selection_strategy: answer_centered,
                   random_continuous or first_n; None: all
    epoch_seed     decides the order and what is chosen at random; every loop is another epoch
    num_workers    more than 0: a thread makes batches ahead; a process would cost more than it saves
    """
    from milldam.qa.batches import COLUMNS, DocumentSamples, WindowSamples
    from milldam.qa.selection import Selection

    if num_workers < 0:
        raise ConfigError(f"num_workers: {num_workers}; use 0 or more.")
    columns = (*COLUMNS, "offset_mapping")
    samples: Samples[Any, Any]
    if use_time_step_major:
        strategy: Any = segment_selection_strategy
        selection = None
        if max_segments is not None:
            selection = Selection(strategy=strategy, max_segments=max_segments, seed=epoch_seed)
        samples = DocumentSamples(dataset, selection=selection, columns=columns)
    elif max_segments is not None:
        raise ConfigError("max_segments: only documents have segments to choose from; set use_time_step_major=True.")
    else:
        samples = WindowSamples(dataset, columns=columns)
    options = {"batch_size": batch_size, "shuffle": shuffle, "seed": epoch_seed, "prefetch": 2 * num_workers}
    return FeatureLoader(dataset, samples, options | {"rank": rank, "world_size": world_size})


class FeatureLoader:
    """Iterate for an epoch, as with torch's DataLoader: every loop begins a new one, in another order when shuffled.

    Tensors where torch is installed, else numpy arrays. Beside the columns, a batch or step has `document_mask` and the
    texts of `SquadDataset`: `example_id` (and `example_ids`, the same), `question`, `context`, `chosen_answer_text` as
    lists and `chosen_answer_char_span` (rows, 2); those of the row's document, also where it has ended and
    `document_mask` is False. `state_dict()` says where it stands.
    """

    def __init__(self, dataset: FeatureStore, samples: Samples[Any, Any], options: dict[str, Any]) -> None:
        self.dataset = dataset
        self._samples, self._options = samples, options
        self._batches = self._at(0)
        self._next_epoch = 0
        # Whether the next loop takes the batches as they stand; whether a state was loaded for it; whether that state
        # is the end of the epoch that was set.
        self._waits, self._loaded, self._through = True, False, False

    def _new(self) -> Batches[Any]:
        return self._samples.batches(**self._options)

    def _at(self, epoch: int) -> Batches[Any]:
        """Batches from the begin of an epoch on."""
        batches = self._new()
        batches.load_state_dict(batches.state_dict() | {"samples_seen": epoch * len(self._samples)})
        return batches

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        through, self._through, self._loaded = self._through, False, False
        if through:
            return iter(())
        if not self._waits:
            # A new one each time: a loop that was left early, or that still runs, changes nothing.
            self._batches = self._at(self._next_epoch)
        self._waits = False
        self._next_epoch = self._batches.epoch + 1
        return self._loop(self._batches)

    def _loop(self, batches: Batches[Any]) -> Iterator[Any]:
        convert = _converter()
        for batch in batches:
            yield convert(self._with_texts(batch))

    def _with_texts(self, batch: Any) -> Any:
        if isinstance(batch, dict):
            mask = np.ones(len(batch["window"]), np.bool_)
            return self._completed({**batch, "document_mask": mask}, _texts(self.dataset, batch["example"]))
        texts = _texts(self.dataset, batch.examples)
        return [self._completed(step, texts) for step in batch]

    def _completed(self, step: dict[str, Any], texts: dict[str, Any]) -> dict[str, Any]:
        there = step["document_mask"]
        step["offset_mapping"][there] = stretches(self.dataset, step["window"][there])
        kept = {name: column for name, column in step.items() if name != "example"}
        return kept | texts | {"example_ids": texts["example_id"]}

    def set_epoch(self, epoch: int) -> None:
        """The next loop brings epoch `epoch`; if a state was just loaded that stands in it or at its end, its rest."""
        if epoch < 0:
            raise ConfigError(f"epoch: {epoch}; use 0 or more.")
        begin, seen = epoch * len(self._samples), self._batches.samples_seen
        if self._loaded and begin < seen <= begin + len(self._samples):
            self._through = seen == begin + len(self._samples)
            return
        self._stand(self._at(epoch), loaded=False)

    def state_dict(self) -> dict[str, Any]:
        """Where it stands: in the loop that was begun last, or where the next one begins if that was set since."""
        return self._batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next loop goes on from there."""
        batches = self._new()
        batches.load_state_dict(state)
        self._stand(batches, loaded=True)

    def _stand(self, batches: Batches[Any], *, loaded: bool) -> None:
        self._batches, self._waits, self._loaded, self._through = batches, True, loaded, False


def _converter() -> Callable[[Any], Any]:
    if importlib.util.find_spec("torch") is None:
        return lambda batch: batch
    from milldam.qa.batches import to_tensors

    return to_tensors
