"""Names and arguments of the streaming SQuAD processors that people have, on top of `prepare` and the feature store.

    configure_memory_tokens(tokenizer, memory_num_tokens=16)
    process_and_cache_dataset(dataset_name=..., split=..., cache_dir=..., tokenizer=tokenizer)     -> number of windows
    dataset = create_dataset_from_cache(...)                                                       -> a SquadDataset
    for steps in create_dataloader(dataset, batch_size=8): ...                                     -> time steps

A cache folder is named by everything that changes features (data, split, settings, tokenizer): with other arguments,
other features are made or missed, never old ones returned. `doc_stride` is the overlap of two windows, as in fast
tokenizers. There is one way to work, streamed and lazy, so `use_streaming`, `use_lazy_loading` and
`streaming_chunk_size` change nothing. `max_memory_gb` bounds what preparing takes.
"""

from __future__ import annotations

import glob
import importlib.util
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from milldam.errors import ConfigError, MismatchError, StoreError
from milldam.files import NewFile, hash_bytes, write_file
from milldam.qa.memory_tokens import READ, WRITE, add_memory_tokens
from milldam.qa.token_stretches import stretches
from milldam.qa.windows import VERSION
from milldam.stores.features.manifest import NAME
from milldam.stores.features.reader import FeatureStore

if TYPE_CHECKING:
    from milldam.loader.batches import Batches
    from milldam.loader.samples import Samples
    from milldam.qa.examples import Example

log = logging.getLogger("milldam")

_TOKENIZER_FACTS = ("padding_side", "pad_token", "cls_token")
_MEMORY_IDS = {"mem_read_ids": READ, "mem_write_ids": WRITE}
_TEXTS = ("example_id", "question", "context", "chosen_answer_text")


# ---- tokenizers ----


def configure_memory_tokens(tokenizer: Any, memory_num_tokens: int) -> dict[str, list[int]]:
    """Add [MEM_READ_i] and [MEM_WRITE_i] to a tokenizer of transformers or tokenizers.

    Gives their ids: {"mem_read_ids": [...], "mem_write_ids": [...]}.

    What is processed with the tokenizer afterwards has them in every window. The model's embeddings must have room:
    `model.resize_token_embeddings(len(tokenizer))`.
    """
    if memory_num_tokens < 0:
        raise ConfigError(f"memory_num_tokens: {memory_num_tokens}; use 0 or more.")
    backend = _backend(tokenizer)
    there = _memory_count(backend)
    if there > memory_num_tokens:
        raise ConfigError(
            f"memory_num_tokens: {memory_num_tokens}; the tokenizer has {there} memory tokens already. Load it anew."
        )
    names = {kind: [name.format(i) for i in range(memory_num_tokens)] for kind, name in _MEMORY_IDS.items()}
    if backend is tokenizer:
        add_memory_tokens(tokenizer, memory_num_tokens)
    else:
        from tokenizers import AddedToken

        # By its own method, so that the wrapper knows of them too.
        added = [AddedToken(name, normalized=False, special=True) for name in itertools.chain(*names.values())]
        tokenizer.add_tokens(added, special_tokens=True)
    backend = _backend(tokenizer)
    return {kind: [int(backend.token_to_id(name)) for name in named] for kind, named in names.items()}


def _backend(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` in it."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "token_to_id") or not hasattr(backend, "to_str"):
        raise ConfigError(
            f"tokenizer: {type(tokenizer).__name__} has no offsets. Give a fast tokenizer of transformers, a "
            "tokenizers.Tokenizer, or the path of one."
        )
    return backend


def _memory_count(backend: Any) -> int:
    count = 0
    while None not in (backend.token_to_id(READ.format(count)), backend.token_to_id(WRITE.format(count))):
        count += 1
    return count


@dataclass(frozen=True, slots=True)
class _Tokenizer:
    """A tokenizer as it is put on disk for the workers."""

    json: str
    facts: dict[str, str]
    """What it says of padding and CLS."""
    memory_tokens: int
    spec: str | None = None
    """Where it lies already."""

    @classmethod
    def of(cls, given: Any) -> _Tokenizer:
        if given is None:
            raise ConfigError("tokenizer: none given. Windows can't be made, nor found again, without it.")
        if isinstance(given, str | Path):
            return cls._of_path(str(given))
        facts = {name: getattr(given, name, None) for name in _TOKENIZER_FACTS}
        return cls._of_json(_backend(given).to_str(), facts)

    @classmethod
    def _of_path(cls, spec: str) -> _Tokenizer:
        from milldam.qa.tokenizer import facts_beside
        from milldam.tokenizers.loading import load_tokenizer

        # Loaded first: what lies beside a name on the Hub may come with it.
        text = load_tokenizer(spec).json
        return replace(cls._of_json(text, facts_beside(spec)), spec=spec)

    @classmethod
    def _of_json(cls, text: str, facts: Mapping[str, Any]) -> _Tokenizer:
        import tokenizers

        # Whoever calls a tokenizer of transformers leaves truncation and padding in it: they are not part of it.
        tokenizer = tokenizers.Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        found = {name: facts.get(name) for name in _TOKENIZER_FACTS}
        named = {name: one.get("content") if isinstance(one, dict) else one for name, one in found.items()}
        kept = {name: str(one) for name, one in named.items() if one is not None}
        return cls(tokenizer.to_str(), kept, _memory_count(tokenizer))

    @property
    def hash(self) -> str:
        return hash_bytes(json.dumps([self.json, self.facts]).encode("utf-8", "surrogatepass"))

    def saved(self, cache: Path) -> Path | str:
        """Where workers find it."""
        if self.spec is not None:
            return self.spec
        folder = cache / "tokenizers" / self.hash[:16]
        if not (folder / "tokenizer.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_file(folder / "tokenizer_config.json", json.dumps(self.facts).encode())
            write_file(folder / "tokenizer.json", self.json.encode("utf-8", "surrogatepass"))
        return folder


# ---- what is cached, and where ----


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Everything that decides features."""

    dataset: str
    split: str
    input: str
    """Names, sizes and versions of the files; of a data set on the Hub, its name."""
    max_examples: int | None
    max_seq_length: int
    doc_stride: int
    max_n_segs: int | None
    tokenizer: str

    def folder(self, cache: Path) -> Path:
        settings = {name: value for name, value in asdict(self).items() if name != "dataset"} | {"version": VERSION}
        return cache / f"{self._stem}-{hash_bytes(json.dumps(settings, sort_keys=True).encode())[:16]}"

    @property
    def _stem(self) -> str:
        name = re.sub(r"[^\w.-]+", "_", Path(self.dataset).name or "data")
        split = re.sub(r"[^\w-]+", "_", self.split)
        return f"{name[:60]}-{split}"

    def missing(self, cache: Path) -> StoreError:
        others = sorted(path.name for path in cache.glob(f"{self._stem}-*") if path.is_dir())
        there = f"\nMade with other arguments, or from other data: {', '.join(others[:5])}" if others else ""
        return StoreError(
            f"{cache}: no features of {self.dataset} ({self.split}) with max_seq_length={self.max_seq_length}, "
            f"doc_stride={self.doc_stride}, max_examples={self.max_examples}, max_n_segs={self.max_n_segs} and this "
            f"tokenizer. Call process_and_cache_dataset with the same arguments first.{there}"
        )


def _identity(dataset: str, split: str) -> str:
    """Changes when the data does; a data set on the Hub is known by its name."""
    from milldam.input_files import InputState, is_address
    from milldam.qa.records import list_files

    if not (Path(dataset).exists() or glob.has_magic(dataset) or is_address(dataset)):
        return dataset
    state = InputState()
    for file in list_files([dataset], split):
        state.add(file.path, file.size, file.version)
    return json.dumps(state.as_json(), sort_keys=True)


def _wanted(dataset: str, split: str, tokenizer: _Tokenizer, settings: Mapping[str, Any]) -> _Wanted:
    return _Wanted(str(dataset), split, _identity(str(dataset), split), tokenizer=tokenizer.hash, **settings)


# ---- the verbs ----


def process_and_cache_dataset(
    dataset_name: str | Path,
    split: str = "train",
    cache_dir: str | Path = "./.cache",
    max_examples: int | None = None,
    max_seq_length: int = 384,
    doc_stride: int = 128,
    streaming_chunk_size: int = 1000,
    tokenizer: Any = None,
    max_n_segs: int | None = None,
    use_streaming: bool = True,
    max_memory_gb: float = 8.0,
    workers: int | None = None,
) -> int:
    """Make the windows of a data set, unless they are there; how many there are.

    dataset_name   a file, folder, glob or address (SQuAD's JSON; HF's flat form as jsonl, parquet, a data set on disk),
                   or a name on the Hub
    tokenizer      a fast tokenizer of transformers, a tokenizers.Tokenizer, or the path of one

    Interrupted, it goes on where it was when it is called again.
    """
    processor = StreamingSquadProcessor(tokenizer, max_seq_length, doc_stride, streaming_chunk_size, max_memory_gb)
    processor.workers = workers
    return processor.process_dataset_streaming(dataset_name, split, max_examples, _Cache(cache_dir), max_n_segs)


def create_dataset_from_cache(
    dataset_name: str | Path,
    split: str = "train",
    cache_dir: str | Path = "./.cache",
    max_examples: int | None = None,
    max_seq_length: int = 384,
    doc_stride: int = 128,
    max_n_segs: int | None = None,
    tokenizer: Any = None,
    use_lazy_loading: bool = True,
    streaming_chunk_size: int = 1000,
) -> SquadDataset:
    """Open what `process_and_cache_dataset` made with the same arguments; nothing is loaded."""
    settings = {"max_examples": max_examples, "max_seq_length": max_seq_length}
    settings |= {"doc_stride": doc_stride, "max_n_segs": max_n_segs}
    wanted = _wanted(str(dataset_name), split, _Tokenizer.of(tokenizer), settings)
    cache = Path(cache_dir)
    if not (wanted.folder(cache) / NAME).exists():
        raise wanted.missing(cache)
    return SquadDataset(wanted.folder(cache))


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
        return [str(self._text(number)["id"]) for number in range(self.examples)]


def _texts(store: FeatureStore, examples: Any) -> dict[str, Any]:
    """Texts of some examples: lists by name, and where the answers are, (examples, 2)."""
    found = [store.example(number) for number in examples.tolist()]
    texts = {name: [one["id" if name == "example_id" else name] for one in found] for name in _TEXTS}
    spans = [one["chosen_answer_char_span"] or (-1, -1) for one in found]
    return texts | {"chosen_answer_char_span": np.array(spans, np.int64).reshape(-1, 2)}


@dataclass(frozen=True, slots=True)
class _Cache:
    cache_dir: str | Path


class StreamingSquadProcessor:
    """Examples to windows, with a method to override: `process_example`.

    >>> class Lower(StreamingSquadProcessor):                                                     # doctest: +SKIP
    ...     def process_example(self, example):
    ...         return example | {"question": example["question"].lower()}
    >>> processor = Lower(tokenizer)                                                              # doctest: +SKIP
    >>> processor.process_dataset_streaming("train-v2.0.json", "train", cache_manager=None)       # doctest: +SKIP
    131823
    >>> dataset = processor.dataset                                                               # doctest: +SKIP

    Where it is overridden, what it gives is written beside the features first, as JSON lines: it can be looked at, the
    workers need not know the class, and the features are named by it, so that a changed method makes new ones.
    """

    workers: int | None = None

    def __init__(
        self,
        tokenizer: Any,
        max_seq_length: int = 384,
        doc_stride: int = 128,
        streaming_chunk_size: int = 1000,
        max_memory_gb: float = 8.0,
    ) -> None:
        if streaming_chunk_size < 1:
            raise ConfigError(f"streaming_chunk_size: {streaming_chunk_size}; use 1 or more.")
        if not max_memory_gb > 0:
            raise ConfigError(f"max_memory_gb: {max_memory_gb}; use more than 0.")
        self.tokenizer, self.max_seq_length, self.doc_stride = tokenizer, max_seq_length, doc_stride
        self.max_memory_gb = max_memory_gb
        self._dataset: SquadDataset | None = None

    def process_example(self, example: dict[str, Any]) -> dict[str, Any] | None:
        """An example in HF's flat form, as it is to be used; None: not at all."""
        return example

    @property
    def dataset(self) -> SquadDataset:
        """What was processed last."""
        if self._dataset is None:
            raise StoreError("Nothing was processed yet: call process_dataset_streaming first.")
        return self._dataset

    def process_dataset_streaming(
        self,
        dataset_name: str | Path,
        split: str = "train",
        max_examples: int | None = None,
        cache_manager: Any = None,
        max_n_segs: int | None = None,
    ) -> int:
        """Make the windows of a data set, unless they are there; how many there are.

        `cache_manager`: anything with a `cache_dir`; None: ./.cache
        """
        from milldam.qa.job import prepare

        cache = _cache_folder(cache_manager)
        tokenizer = _Tokenizer.of(self.tokenizer)
        dataset = str(dataset_name)
        if type(self).process_example is not StreamingSquadProcessor.process_example:
            dataset = str(_processed(self.process_example, dataset, split, max_examples, cache))
        settings = {"max_examples": max_examples, "max_seq_length": self.max_seq_length}
        settings |= {"doc_stride": self.doc_stride, "max_n_segs": max_n_segs}
        folder = _wanted(dataset, split, tokenizer, settings).folder(cache)
        try:
            made = prepare(
                dataset,
                folder,
                tokenizer=tokenizer.saved(cache),
                split=split,
                max_examples=max_examples,
                max_seq_length=self.max_seq_length,
                overlap=self.doc_stride,
                memory_tokens=tokenizer.memory_tokens,
                max_segments=max_n_segs,
                memory=f"{round(1000 * self.max_memory_gb)}MB",
                workers=self.workers,
            )
        except MismatchError as error:
            raise _without_options(error, folder) from None
        self._dataset = SquadDataset(made.path)
        return len(self._dataset)


def _without_options(error: MismatchError, folder: Path) -> MismatchError:
    """What `prepare` says of a folder, with a way out that is there without a command line."""
    told = [line for line in str(error).splitlines() if "--overwrite" not in line]
    return MismatchError("\n".join([*told, f"Remove the folder {folder.name} in cache_dir ({folder.parent})."]))


def _cache_folder(manager: Any) -> Path:
    if manager is None:
        return Path("./.cache")
    found = getattr(manager, "cache_dir", None)
    if not isinstance(found, str | Path):
        raise ConfigError(f"cache_manager: {type(manager).__name__} has no cache_dir, where features would go.")
    return Path(found)


def _processed(
    process: Callable[[dict[str, Any]], dict[str, Any] | None],
    dataset: str,
    split: str,
    max_examples: int | None,
    cache: Path,
) -> Path:
    """Examples as a method makes them, in a file that is named by its content; one example is held at a time."""
    from milldam.qa.sources import examples_of

    cache.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w-]+", "_", Path(dataset).stem or "data")[:60]
    left_out = count = 0

    def leave_out(reject: Any) -> None:
        nonlocal left_out
        left_out += 1

    with NewFile(cache / f"{name}-{split}.processed.jsonl") as new:
        for example in examples_of(dataset, split=split, on_reject=leave_out):
            made = process(_flat(example))
            if made is None:
                continue
            new.write(json.dumps(made).encode() + b"\n")
            count += 1
            if count == max_examples:
                break
        content = new.commit()["xxh3"]
    if left_out:
        log.warning("%s: %d records are no examples and were left out", dataset, left_out)
    path = new.path.with_name(f"{name}-{content[:16]}.jsonl")
    if path.exists():
        # The older one has the date that the features know it by.
        new.path.unlink()
        return path
    return new.path.rename(path)


def _flat(example: Example) -> dict[str, Any]:
    answers = {
        "text": [answer.text for answer in example.answers],
        "answer_start": [answer.start for answer in example.answers],
    }
    texts = {"id": example.id, "title": example.title, "context": example.context, "question": example.question}
    return texts | {"answers": answers}


# ---- loading ----


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
    """Batches of a cached data set: a list over time steps, each a dict; or, not time-step-major, a dict of windows.

    max_segments   at most so many segments of a document, chosen by segment_selection_strategy: answer_centered,
                   random_continuous or first_n; None: all
    epoch_seed     decides the order and what is chosen at random; every loop is another epoch
    num_workers    more than 0: a thread makes batches ahead; a process would cost more than it saves
    """
    from milldam.qa.batches import DocumentSamples, WindowSamples
    from milldam.qa.selection import Selection
    from milldam.qa.window_rows import COLUMNS

    if num_workers < 0:
        raise ConfigError(f"num_workers: {num_workers}; use 0 or more.")
    columns = (*COLUMNS, "offset_mapping")
    samples: Samples
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

    def __init__(self, dataset: FeatureStore, samples: Samples, options: dict[str, Any]) -> None:
        self.dataset = dataset
        self._samples, self._options = samples, options
        self._batches = self._at(0)
        self._next_epoch = 0
        # Whether the next loop takes the batches as they stand; whether a state was loaded for it; whether that state
        # is the end of the epoch that was set.
        self._waits, self._loaded, self._through = True, False, False

    def _new(self) -> Batches:
        return self._samples.batches(**self._options)

    def _at(self, epoch: int) -> Batches:
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

    def _loop(self, batches: Batches) -> Iterator[Any]:
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

    def _stand(self, batches: Batches, *, loaded: bool) -> None:
        self._batches, self._waits, self._loaded, self._through = batches, True, loaded, False


def _converter() -> Callable[[Any], Any]:
    if importlib.util.find_spec("torch") is None:
        return lambda batch: batch
    from milldam.qa.torch_batches import to_tensors

    return to_tensors
