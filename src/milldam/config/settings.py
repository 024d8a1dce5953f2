"""The settings of `milldam preprocess` (from a YAML file) and `milldam tokenize` (from options).

`Config.settings` holds exactly what a result depends on besides the input: it goes into the manifest, and a folder
made with other settings is never taken for this job's. Memory, workers and executor are not in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MinLen

from milldam.choices import Documents, Encoder, InputFormat, InvalidUtf8, SpecialText
from milldam.errors import ConfigError, Setting, did_you_mean
from milldam.memory import parse_size
from milldam.rules import (
    AtLeastOne,
    ChatRules,
    CleanRules,
    DedupRules,
    EvaluationSet,
    FilterRules,
    NearRules,
    PackingRules,
    RunSettings,
    Settings,
    Size,
    SizeRange,
)

TRAIN, VAL = "train", "val"
TOKENS_SUFFIX = "_tokens"
SMALLEST_SHARD_SIZE = 10**5
MOST_VALUES = 1024
"""Of a signature for near-duplicates: what making one takes grows with the square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet(Settings):
    """One source of documents."""

    path: str | tuple[str, ...]
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
        return (self.path,) if isinstance(self.path, str) else tuple(self.path)

    @property
    def name(self) -> str:
        """What people know it by: not the folders above it, which say nothing of the data.

        >>> DataSet(path="/data/books/*.jsonl").name, DataSet(path=("a.txt", "b.txt"), split="train[:10%]").name
        ('books/*.jsonl', 'a.txt and 1 more, train[:10%]')
        """
        parts = [part for part in re.split(r"[\\/]+", self.paths[0]) if part]
        shown = "/".join(parts[-2:] if parts and "*" in parts[-1] else parts[-1:])
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        named = ", ".join(filter(None, (shown + more, self.subset, self.split)))
        # A path need not be UTF-8.
        return named.encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRules(Settings):
    """How `milldam train-tokenizer` makes the tokenizer."""

    vocab_size: AtLeastOne = 32_000
    """Tokens in the vocabulary, special ones included."""
    model: Literal["bpe", "unigram"] = "bpe"
    """Byte-level BPE, or unigram."""
    special_tokens: tuple[str, ...] = ("<|endoftext|>",)
    """Tokens that never come from text; the first one ends documents."""
    sample: Size = "100MB"
    """Approximate amount of text to train on, a seeded sample of the documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerRules(Settings):
    """The tokenizer, and which tokens begin and end a document."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(RunSettings):
    """Raw datasets to a ready store. Only `datasets`, `tokenizer` and `out` are required."""

    datasets: str | DataSet | tuple[str | DataSet, ...]
    """What to read: a path, or a list of paths and datasets."""
    tokenizer: str | TokenizerRules
    """Folder, file or Hub name of the tokenizer, or a block of keys."""
    out: str
    """Folder for the store."""
    validation: str | DataSet | tuple[str | DataSet, ...] = ()
    """Datasets that become the split val: cleaned, but neither filtered nor deduplicated. Dedup drops training
    documents that equal one of theirs."""
    chat: ChatRules | None = None
    """Records are conversations: how to render them, and what to train on."""
    clean: Literal["off", "default"] | CleanRules = "default"
    """How to clean texts."""
    invalid_utf8: InvalidUtf8 = "drop"
    """Bytes that are not UTF-8, and halves of surrogate pairs: drop them, reject the record, or replace them with
    U+FFFD."""
    max_document_bytes: Size = "32MiB"
    """Larger records are rejected. Only a .txt file that is one document may be of any size."""
    strict: bool = False
    """Stop at the first record that can't be read."""
    dedup: Literal["off", "exact", "near", "bloom"] | DedupRules = "exact"
    """Which duplicates to drop; near means exact and near."""
    decontaminate: str | EvaluationSet | tuple[str | EvaluationSet, ...] = ()
    """Evaluation sets whose items are kept out: documents that contain one are dropped, or only reported."""
    filters: FilterRules = field(default_factory=FilterRules)
    """Which documents to drop for their length, quality or language."""
    write_dropped: bool = False
    """Write every dropped document with its reason, and what it duplicates, to dropped-HASH.jsonl.zst in the store."""
    splits: dict[str, float] = field(default_factory=dict)
    """Splits besides train: shares of the documents, such as {val: 0.001}, or exact numbers of tokens, such as
    {val_tokens: 500_000}; the hash of the text decides."""
    packing: Literal["none", "wrapped", "best_fit"] | PackingRules = "none"
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
        for setting, *problem in _contradictions(self):
            raise ConfigError(Setting(str(setting)), *problem)

    # ---- short forms, spelled out ----

    @property
    def sources(self) -> tuple[DataSet, ...]:
        """Every dataset in plan order: validation first, so that its documents are the ones that stay."""
        return self.validation_sets + _data_sets(self.datasets)

    @property
    def validation_sets(self) -> tuple[DataSet, ...]:
        return _data_sets(self.validation)

    @property
    def tokenizer_rules(self) -> TokenizerRules:
        rules = TokenizerRules(path=self.tokenizer) if isinstance(self.tokenizer, str) else self.tokenizer
        if self.chat is None:
            return rules
        # A template writes what begins and ends a conversation.
        bos, eos = ("none" if token == "auto" else token for token in (rules.bos, rules.eos))
        return replace(rules, bos=bos, eos=eos)

    @property
    def clean_rules(self) -> CleanRules | None:
        if self.clean == "off":
            return None
        return self.clean if isinstance(self.clean, CleanRules) else CleanRules()

    @property
    def evaluation_sets(self) -> tuple[EvaluationSet, ...]:
        several = self.decontaminate if isinstance(self.decontaminate, tuple) else (self.decontaminate,)
        return tuple(EvaluationSet(path=one) if isinstance(one, str) else one for one in several)

    @property
    def dedup_rules(self) -> DedupRules | None:
        """None: there is no first pass. Decontamination needs one that may drop no duplicates."""
        nothing = DedupRules(method="off") if self.evaluation_sets else None
        if isinstance(self.dedup, DedupRules):
            return self.dedup if self.dedup.method not in ("off", "index") or self.dedup.near else nothing
        if self.dedup == "off":
            return nothing
        near = NearRules() if self.dedup == "near" else None
        return DedupRules(method="bloom" if self.dedup == "bloom" else "exact", near=near)

    @property
    def index_rules(self) -> DedupRules | None:
        """Where documents are compared with an index alone, in the pass that tokenizes them."""
        return self.dedup if isinstance(self.dedup, DedupRules) and self.dedup.method == "index" else None

    @property
    def packing_rules(self) -> PackingRules | None:
        if self.packing == "none":
            return None
        return self.packing if isinstance(self.packing, PackingRules) else PackingRules(strategy=self.packing)

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

        Packing is not in it: rows are made from a store, whenever they are wanted.
        """
        tokenizer, dedup = self.tokenizer_rules, self.index_rules or self.dedup_rules
        largest = parse_size(self.max_document_bytes)
        # Not the path: what moves is still the same.
        evaluation = [asdict(one) | {"path": "", "columns": list(one.column_names)} for one in self.evaluation_sets]
        return {
            "special_text": tokenizer.special_text,
            "datasets": [_set_settings(one) for one in _data_sets(self.datasets)],
            "validation": [_set_settings(one) for one in self.validation_sets],
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


def _data_sets(several: str | DataSet | tuple[str | DataSet, ...]) -> tuple[DataSet, ...]:
    several = several if isinstance(several, tuple) else (several,)
    return tuple(DataSet(path=one) if isinstance(one, str) else one for one in several)


def _set_settings(one: DataSet) -> dict[str, Any]:
    """Without the path: data that moves to another folder is still the same data."""
    found = {field.name: getattr(one, field.name) for field in fields(one) if field.name != "path"}
    return found | {"documents": one.documents if one.separator is None else "separator"}


_BLOCKS: dict[tuple[str, str], dict[str, Any]] = {
    ("dedup", "exact"): {},
    ("dedup", "bloom"): {"method": "bloom"},
    ("dedup", "near"): {"near": {}},
    ("packing", "wrapped"): {"strategy": "wrapped"},
    ("packing", "best_fit"): {"strategy": "best_fit"},
    ("clean", "default"): {},
}


def spelled_out(name: str, value: Any) -> Any:
    """The block that a word stands for, so that keys can be put into it; anything else as it is.

    >>> spelled_out("dedup", "near"), spelled_out("tokenizer", "gpt2/"), spelled_out("dedup", "off")
    ({'near': {}}, {'path': 'gpt2/'}, 'off')
    """
    if not isinstance(value, str):
        return value
    if name in ("tokenizer", "datasets", "validation"):
        return {"path": value}
    return dict(_BLOCKS.get((name, value), {})) if (name, value) in _BLOCKS else value


def text_columns(settings: dict[str, Any]) -> dict[str, str | None]:
    """The text column of every dataset, by its place in the configuration, out of settings that are settled.

    >>> text_columns({"datasets": [{"text_column": "body"}, {"text_column": None}], "validation": []})
    {'datasets.0': 'body', 'datasets.1': None}
    """
    several = ((kind, settings.get(kind)) for kind in ("datasets", "validation"))
    return {
        f"{kind}.{number}": one.get("text_column")
        for kind, sets in several
        for number, one in enumerate(sets if isinstance(sets, list) else [])
        if isinstance(one, dict)
    }


# ---- contradictions, found without a look at the data ----


def _contradictions(config: Config) -> Iterator[tuple[str | Setting, ...]]:
    """(setting, message) of each."""
    if not _data_sets(config.datasets) or any(not one.paths for one in config.sources):
        yield "datasets", ": no input. Name a file, folder or glob, or - for standard input."
    yield from _of_paths(config)
    yield from _of_splits(config)
    dedup, index = config.dedup_rules, config.index_rules
    if config.limit is not None and config.validation_sets:
        yield "limit", ": would count validation too. Use max_documents of the datasets instead."
    if config.limit is not None and dedup is not None and dedup.index is not None:
        yield "limit", ": dedup.index would record documents that are left out. Use max_documents of the datasets."
    if index is not None and index.index is None:
        yield "dedup.method", ": index: name the folder of the index as dedup.index."
    if index is not None and index.near is not None:
        yield "dedup.near", ": needs a pass of its own, which dedup.method: index does not have. Use exact."
    if index is not None and config.evaluation_sets:
        text = ": needs a pass of its own, which dedup.method: index does not have. Use exact, with the same index."
        yield "decontaminate", text
    near = dedup.near if dedup is not None else None
    if near is not None and near.bands * near.rows > MOST_VALUES:
        yield "dedup.near", f": {near.bands} bands x {near.rows} rows are more than {MOST_VALUES:,} values."
    for kind in ("characters", "tokens"):
        least, most = getattr(config.filters, f"min_{kind}"), getattr(config.filters, f"max_{kind}")
        if least is not None and most is not None and least > most:
            yield f"filters.min_{kind}", f": {least:,} is more than max_{kind} {most:,}: nothing would be left."
    if config.chat is not None:
        yield from _of_chat(config, config.chat)
    for protocol in config.storage_options:
        from fsspec import available_protocols

        if protocol not in available_protocols():
            hint = did_you_mean(protocol, available_protocols())
            yield f"storage_options.{protocol}", f": fsspec knows no such protocol.{hint} Use s3, gs, hf, ..."
    if config.executor == "local" and config.address is not None:
        yield "address", ": goes with ", Setting("executor", "ray"), "."
    if config.packing_rules is not None and config.seq_len is None:
        yield "packing", ": needs ", Setting("seq_len"), ", the number of tokens in a row."


def _of_paths(config: Config) -> Iterator[tuple[str, str]]:
    paths = [path for one in config.sources for path in one.paths]
    local = [path for path in paths if path == "-" or path.startswith("memory://")]
    if config.executor == "ray" and local:
        yield "executor", f": ray can't read {local[0]}, which only this process sees. Save it to a file."
    if "-" not in paths:
        return
    if len(paths) > 1:
        yield "datasets", ": standard input (-) can't be combined with other inputs."
    one = config.sources[0]
    twice = {
        "decontaminate": bool(config.evaluation_sets),
        "dedup": config.dedup_rules is not None,
        "datasets.0.weight": one.weight > 1,
        "datasets.0.max_documents": one.max_documents is not None,
        "datasets.0.split": one.split is not None,
    }
    for setting in (name for name, needed in twice.items() if needed):
        yield setting, ": reads the input twice, and standard input (-) can be read only once. Save it to a file."


def _of_chat(config: Config, chat: ChatRules) -> Iterator[tuple[str, str]]:
    if config.counts_tokens:
        exact = next(iter(config.split_tokens), None)
        name = f"splits.{exact}{TOKENS_SUFFIX}" if exact is not None else "datasets.0.max_tokens"
        yield name, ": would cut a conversation to make the number exact. Use shares, or max_documents."
    if config.tokenizer_rules.special_text == "plain":
        yield "tokenizer.special_text", ": plain would take the template's special tokens for text. Leave it out."
    if config.packing_rules is not None and config.packing_rules.write:
        text = ": written rows have no loss mask. Leave it out: conversations are packed when the store is read."
        yield "packing.write", text
    if not chat.train_on:
        yield "chat.train_on", ": names no role. Nothing would be trained on."
    if chat.date is not None:
        try:
            date.fromisoformat(chat.date)
        except ValueError:
            yield "chat.date", f": {chat.date!r} is not a date such as 2026-01-31."


def _of_splits(config: Config) -> Iterator[tuple[str, str]]:
    for key, number in config.splits.items():
        name = key.removesuffix(TOKENS_SUFFIX)
        if name == TRAIN:
            yield f"splits.{key}", ": train is what the other splits leave; name only those."
        if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) is None:
            yield f"splits.{key}", ": can't be the name of a split: use letters and digits."
        if name == VAL and config.validation_sets:
            yield f"splits.{key}", ": val is made from the datasets under validation; give this split another name."
        if key != name and number < 1:
            yield f"splits.{key}", ": a number of tokens must be at least 1."
        if key == name and not 0 < number < 1:
            text = f": {number} is not a share; it must be between 0 and 1, or use {name}{TOKENS_SUFFIX}."
            yield f"splits.{key}", text
    if config.split_shares and config.split_tokens:
        yield "splits", ": give all of them as shares, or all in tokens."
    if sum(config.split_shares.values()) >= 1:
        yield "splits", ": the shares leave nothing for train."
