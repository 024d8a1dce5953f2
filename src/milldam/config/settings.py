"""The settings of `milldam preprocess` (from a YAML file) and `milldam tokenize` (from options).

`Config.settings` holds exactly what a result depends on besides the input: it goes into the manifest, and a folder
made with other settings is never taken for this job's. Memory, workers and executor are not in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le, MinLen

from milldam.choices import Documents, Encoder, InputFormat, InvalidUtf8, SpecialText
from milldam.errors import ConfigError, Setting
from milldam.memory import parse_size
from milldam.rules import (
    AtLeastOne,
    ChatRules,
    CleanRules,
    DedupRules,
    EvaluationSet,
    FilterRules,
    PackingRules,
    RunSettings,
    Settings,
    Short,
    Size,
    SizeRange,
    Texts,
)

TRAIN, VAL = "train", "val"
TOKENS_SUFFIX = "_tokens"
SMALLEST_SHARD_SIZE = 10**5
MOST_VALUES = 1024
"""Of a signature for near-duplicates: what making one takes grows with the square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet(Settings):
    """One source of documents."""

    words: ClassVar = None
    path: Texts
    """File, folder, glob or address; a dataset saved by HF `save_to_disk`; or the name of one on the Hub."""
    split: str | None = None
    """Split of an HF dataset, with an optional slice of its documents: train, train[:100_000], train[10%:20%]."""
    subset: str | None = None
    """Configuration of a dataset on the Hub."""
    text_column: str | None = None
    """Field with the text; dots for nested fields. Default: the obvious one."""
    documents: Documents = "file"
    """In .txt files: what one document is."""
    separator: Annotated[str, MinLen(1)] | None = None
    """In .txt files: text between two documents."""
    input_format: InputFormat | None = None
    """Format of the files, if their names do not say."""
    weight: Annotated[float, Ge(1e-9), Le(1000)] = 1.0
    """How often to take each document: 2 takes it twice, 0.25 takes a seeded quarter of the documents, 1.5 takes all
    once and a seeded half again. At most 1000."""
    max_documents: AtLeastOne | None = None
    """Take only the first documents, at most this many."""
    max_tokens: AtLeastOne | None = None
    """Keep only the first documents, with exactly this many tokens together; the last one is cut."""

    @property
    def paths(self) -> tuple[str, ...]:
        return self.path

    @property
    def name(self) -> str:
        """The end of its path: not the folders above it, which say nothing of the data.

        >>> DataSet(path=("/data/books/*.jsonl",)).name, DataSet(path=("a.txt", "b.txt"), split="train[:10%]").name
        ('books/*.jsonl', 'a.txt and 1 more, train[:10%]')
        """
        parts = [part for part in re.split(r"[\\/]+", self.path[0]) if part]
        shown = "/".join(parts[-2:] if parts and "*" in parts[-1] else parts[-1:])
        more = f" and {len(self.path) - 1} more" if len(self.path) > 1 else ""
        # A path need not be UTF-8.
        named = ", ".join(filter(None, (shown + more, self.subset, self.split)))
        return named.encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRules(Settings):
    """How `milldam train-tokenizer` makes the tokenizer: byte-level BPE."""

    vocab_size: AtLeastOne = 32_000
    """Tokens in the vocabulary, special ones included."""
    special_tokens: Texts = ("<|endoftext|>",)
    """Tokens that never come from text; the first one ends documents."""
    sample: Size = "100MB"
    """Approximate amount of text to train on, a seeded sample of the documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerRules(Settings):
    """The tokenizer, and which tokens begin and end a document."""

    words: ClassVar = None
    path: str
    """Folder, file or Hub name; where `milldam train-tokenizer` saves one."""
    bos: str = "none"
    """Token before each document: none, auto or its text."""
    eos: str = "auto"
    """Token after each document: auto, none or its text."""
    special_text: SpecialText = "special"
    """How to encode the text of a special token in a document: as that token, like HF, or as plain text."""
    encoder: Encoder = "auto"
    """Encoder to use; auto uses gigatoken if it gives the same ids as HF tokenizers. Does not change the result."""
    train: TrainingRules | None = None
    """For `milldam train-tokenizer`."""


DataSets = Annotated[tuple[Annotated[DataSet, Short()], ...], Short()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(RunSettings):
    """Raw datasets to a ready store. Only `datasets`, `tokenizer` and `out` are required."""

    datasets: DataSets
    """What to read: a path, or a list of paths and datasets."""
    tokenizer: Annotated[TokenizerRules, Short()]
    """Folder, file or Hub name of the tokenizer, or a block of keys."""
    out: str
    """Folder for the store."""
    validation: DataSets = ()
    """Datasets that become the split val: cleaned, but neither filtered nor deduplicated. Dedup drops training
    documents that equal one of theirs."""
    chat: ChatRules | None = None
    """Records are conversations: how to render them, and what to train on."""
    clean: Literal["off"] | Annotated[CleanRules, Short()] = field(default_factory=CleanRules)
    """How to clean texts."""
    invalid_utf8: InvalidUtf8 = "drop"
    """Bytes that are not UTF-8, and halves of surrogate pairs: drop them, reject the record, or replace them with
    U+FFFD."""
    max_document_bytes: Size = "32MiB"
    """Larger records are rejected. Only a .txt file that is one document may be of any size."""
    strict: bool = False
    """Stop at the first record that can't be read."""
    dedup: Annotated[DedupRules, Short()] = field(default_factory=DedupRules)
    """Which duplicates to drop; near means exact and near."""
    decontaminate: Annotated[tuple[Annotated[EvaluationSet, Short()], ...], Short()] = ()
    """Evaluation sets whose items are kept out: documents that contain one are dropped, or only reported."""
    filters: Annotated[FilterRules, Short()] = field(default_factory=FilterRules)
    """Which documents to drop for their length, quality or language."""
    write_dropped: bool = False
    """Write every dropped document with its reason, and what it duplicates, to dropped-HASH.jsonl.zst in the store."""
    splits: dict[str, float] = field(default_factory=dict)
    """Splits besides train: shares of the documents, such as {val: 0.001}, or exact numbers of tokens, such as
    {val_tokens: 500_000}; the hash of the text decides."""
    packing: Literal["none"] | Annotated[PackingRules, Short()] = "none"
    """How to fill rows of seq_len tokens."""
    seq_len: AtLeastOne | None = None
    """Tokens in a row; needed for packing."""
    seed: int = 0
    """Decides which documents are in splits, weights and samples."""
    limit: AtLeastOne | None = None
    """Stop after exactly this many documents; uses one process."""
    shard_size: Annotated[str | int, SizeRange(SMALLEST_SHARD_SIZE)] | None = None
    """Input per shard, such as 256MB. Default: 64MB, of conversations 16MB."""
    storage_options: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    """Options for the file systems behind addresses, by protocol, such as {s3: {endpoint_url: "http://minio:9000"}}.
    Passed to fsspec; never written to the store. Does not change the result."""

    def __post_init__(self) -> None:
        for is_wrong, setting, problem in _contradictions(self):
            if is_wrong:
                raise ConfigError(Setting(setting), problem)

    @property
    def sources(self) -> tuple[DataSet, ...]:
        """Every dataset in plan order: validation first, so that its documents are the ones that stay."""
        return self.validation + self.datasets

    @property
    def tokenizer_rules(self) -> TokenizerRules:
        if self.chat is None:
            return self.tokenizer
        # A template writes what begins and ends a conversation.
        bos, eos = ("none" if token == "auto" else token for token in (self.tokenizer.bos, self.tokenizer.eos))
        return replace(self.tokenizer, bos=bos, eos=eos)

    @property
    def clean_rules(self) -> CleanRules | None:
        return None if self.clean == "off" else self.clean

    @property
    def dedup_rules(self) -> DedupRules | None:
        """None: there is no first pass. Decontamination needs one that may drop no duplicates."""
        if self.dedup.near is not None or self.dedup.method not in ("off", "index"):
            return self.dedup
        return DedupRules(method="off") if self.decontaminate else None

    @property
    def index_rules(self) -> DedupRules | None:
        """Where documents are compared with an index alone, in the pass that tokenizes them."""
        return self.dedup if self.dedup.method == "index" else None

    @property
    def packing_rules(self) -> PackingRules | None:
        return None if self.packing == "none" else self.packing

    @property
    def split_shares(self) -> dict[str, float]:
        """Splits that are shares of the documents, by name."""
        return {name: share for name, share in sorted(self.splits.items()) if not name.endswith(TOKENS_SUFFIX)}

    @property
    def split_tokens(self) -> dict[str, int]:
        """Splits of an exact number of tokens, by name."""
        exact = ((name, number) for name, number in sorted(self.splits.items()) if name.endswith(TOKENS_SUFFIX))
        return {name.removesuffix(TOKENS_SUFFIX): int(number) for name, number in exact}

    @property
    def counts_tokens(self) -> bool:
        """Whether splits or limits are exact in tokens."""
        return bool(self.split_tokens) or any(one.max_tokens is not None for one in self.sources)

    @property
    def shard_bytes(self) -> int | None:
        return None if self.shard_size is None else parse_size(self.shard_size)

    def settings(self) -> dict[str, Any]:
        """Everything that changes the store, by name, but for what has to be found out: see preparing.py.

        Paths are not in it, since data that moves is still the same data; nor is packing, which is made from a store.
        """
        dedup, largest = self.index_rules or self.dedup_rules, parse_size(self.max_document_bytes)
        sets: dict[str, list[dict[str, Any]]] = {"datasets": [], "validation": []}
        for name, several in (("datasets", self.datasets), ("validation", self.validation)):
            for one in several:
                sets[name].append(asdict(one) | {"documents": one.documents if one.separator is None else "separator"})
                del sets[name][-1]["path"]
        evaluation = [asdict(one) | {"path": "", "columns": list(one.column_names)} for one in self.decontaminate]
        return {
            "special_text": self.tokenizer.special_text,
            **sets,
            "clean": self.clean_rules and asdict(self.clean_rules),
            "invalid_utf8": self.invalid_utf8,
            **({} if largest == 32 << 20 else {"max_document_bytes": largest}),
            "dedup": dedup and asdict(dedup) | {"index": dedup.index is not None},
            "filters": {name: value for name, value in asdict(self.filters).items() if value is not None},
            "write_dropped": self.write_dropped,
            "splits": self.splits,
            "seed": self.seed,
            "limit": self.limit,
            **({"decontaminate": evaluation} if evaluation else {}),
            **({} if self.chat is None else {"chat": asdict(self.chat)}),
        }


def text_columns(settings: dict[str, Any]) -> dict[str, str | None]:
    """The text column of every dataset, by its place in the configuration, out of settings that are settled.

    >>> text_columns({"datasets": [{"text_column": "body"}, {"text_column": None}], "validation": []})
    {'datasets.0': 'body', 'datasets.1': None}
    """
    several = {kind: settings.get(kind) for kind in ("datasets", "validation")}
    return {
        f"{kind}.{number}": one.get("text_column")
        for kind, sets in several.items()
        for number, one in enumerate(sets if isinstance(sets, list) else [])
        if isinstance(one, dict)
    }


def _contradictions(config: Config) -> Iterator[tuple[bool, str, str]]:
    """Whether settings contradict each other, the one to change, and why: found without a look at the data."""
    sources, dedup, near, chat = config.sources, config.dedup, config.dedup.near, config.chat
    paths = [path for one in sources for path in one.paths]
    local = [path for path in paths if path == "-" or path.startswith("memory://")]
    yield not config.datasets or not all(one.paths for one in sources), "datasets", ": no input. Name a file or folder."
    yield bool(config.executor == "ray" and local), "executor", f": ray can't read {local}: save it to a file."
    yield config.executor == "local" and config.address is not None, "address", ": is for the executor ray."
    if "-" in paths:
        yield len(paths) > 1, "datasets", ": standard input (-) can't be combined with other inputs."
        one = sources[0]
        limits = one.weight > 1 or one.max_documents is not None or one.split is not None
        for is_set, setting in ((config.dedup_rules is not None, "dedup"), (limits, "datasets.0")):
            yield is_set, setting, ": reads the input twice, and standard input only once. Save it to a file."
    for key, number in config.splits.items():
        name, split = key.removesuffix(TOKENS_SUFFIX), f"splits.{key}"
        yield name == TRAIN, split, ": train is what the other splits leave; name only those."
        yield re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) is None, split, ": use letters and digits."
        yield name == VAL and bool(config.validation), split, ": val is made from the datasets under validation."
        yield key != name and number < 1, split, ": a number of tokens must be at least 1."
        text = f": {number} is not a share; it must be between 0 and 1, or use {name}{TOKENS_SUFFIX}."
        yield key == name and not 0 < number < 1, split, text
    mixed = bool(config.split_shares and config.split_tokens)
    yield mixed, "splits", ": give all of them as shares, or all in tokens."
    yield sum(config.split_shares.values()) >= 1, "splits", ": the shares leave nothing for train."
    if config.limit is not None:
        instead = " Use max_documents of the datasets instead."
        yield bool(config.validation), "limit", f": would count validation too.{instead}"
        is_kept = config.dedup_rules is not None and dedup.index is not None
        yield is_kept, "limit", f": dedup.index would record documents that are left out.{instead}"
    if dedup.method == "index":
        alone = ": needs a pass of its own, which dedup.method: index does not have. Use exact, with the same index."
        yield dedup.index is None, "dedup.method", ": index: name the folder of the index as dedup.index."
        yield near is not None, "dedup.near", alone
        yield bool(config.decontaminate), "decontaminate", alone
    values = 0 if near is None else near.bands * near.rows
    yield values > MOST_VALUES, "dedup.near", f": bands x rows are {values:,}; {MOST_VALUES:,} are the most."
    if chat is not None:
        exact = [f"splits.{name}{TOKENS_SUFFIX}" for name in config.split_tokens] or ["datasets.0.max_tokens"]
        yield config.counts_tokens, exact[0], ": would cut a conversation. Use shares, or max_documents."
        text = ": plain would take the template's special tokens for text. Leave it out."
        yield config.tokenizer.special_text == "plain", "tokenizer.special_text", text
        text = ": written rows have no loss mask. Leave it out: conversations are packed when the store is read."
        yield config.packing_rules is not None and config.packing_rules.write, "packing.write", text
        yield not chat.train_on, "chat.train_on", ": names no role. Nothing would be trained on."
        if chat.date is not None:
            try:
                date.fromisoformat(chat.date)
            except ValueError:
                yield True, "chat.date", f": {chat.date!r} is not a date such as 2026-01-31."
    yield config.packing != "none" and config.seq_len is None, "packing", ": needs seq_len, the tokens in a row."
