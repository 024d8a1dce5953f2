"""The settings of a job: what the user chose, and which of it changes the result.

One `Config` serves `milldam preprocess` (from a YAML file, by loading.py) and `milldam tokenize` (from options).
`Config.settings` holds exactly what a result depends on besides the input: it goes into the manifest, and a folder
made from other settings is never taken for this job's. Memory, workers and executor are not in it.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from annotated_types import Ge, Le, MinLen

from milldam.choices import Documents, Encoder, Executor, InputFormat, InvalidUtf8, SpecialText
from milldam.errors import ConfigError, Setting, did_you_mean
from milldam.memory import parse_size
from milldam.rules import (
    SETTINGS,
    AtLeastOne,
    ChatRules,
    CleanRules,
    DedupRules,
    EvaluationSet,
    FilterRules,
    NearRules,
    PackingRules,
    Size,
    SizeRange,
)

TRAIN, VAL = "train", "val"
TOKENS_SUFFIX = "_tokens"
SMALLEST_SHARD_SIZE = 10**5
MOST_VALUES = 1024
"""Of a signature for near-duplicates: what making one takes grows with the square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
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

    __pydantic_config__: ClassVar[dict[str, Any]] = SETTINGS

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
class TrainingRules:
    """How `milldam train-tokenizer` makes the tokenizer."""

    vocab_size: AtLeastOne = 32_000
    """Tokens in the vocabulary, special ones included."""
    model: Literal["bpe", "unigram"] = "bpe"
    """Byte-level BPE, or unigram."""
    special_tokens: tuple[str, ...] = ("<|endoftext|>",)
    """Tokens that never come from text; the first one ends documents."""
    sample: Size = "100MB"
    """Approximate amount of text to train on, a seeded sample of the documents."""

    __pydantic_config__: ClassVar[dict[str, Any]] = SETTINGS


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerRules:
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

    __pydantic_config__: ClassVar[dict[str, Any]] = SETTINGS


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
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
    """Bytes that are not UTF-8, and halves of surrogate pairs: drop them, reject the record, replace them with U+FFFD,
    or stop."""
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
    memory: Size | None = None
    """Limit for the whole process tree, such as 512MB. Default: half of what is free. Does not change the result."""
    workers: AtLeastOne | None = None
    """Cores to use. Default: all. Does not change the result."""
    executor: Executor = "local"
    """Where to run: this machine, or a Ray cluster whose machines all see `out`. Does not change the result."""
    address: str | None = None
    """Address of the Ray cluster, such as 10.0.0.1:6379. Default: the one running here, else a new one is started."""
    overwrite: bool = False
    """Replace a result that was made with other settings or input."""
    storage_options: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    """Options for the file systems behind addresses, by protocol, such as {s3: {endpoint_url: "http://minio:9000"}}.
    Passed to fsspec; never written to the store. Does not change the result."""

    __pydantic_config__: ClassVar[dict[str, Any]] = SETTINGS

    def __post_init__(self) -> None:
        _check(self)

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


def _data_sets(given: str | DataSet | tuple[str | DataSet, ...]) -> tuple[DataSet, ...]:
    several = given if isinstance(given, tuple) else (given,)
    return tuple(DataSet(path=one) if isinstance(one, str) else one for one in several)


def _set_settings(one: DataSet) -> dict[str, Any]:
    """Not the path: data that moves to another folder is still the same data."""
    given = {field.name: getattr(one, field.name) for field in fields(one)}
    del given["path"]
    return given | {"documents": one.documents if one.separator is None else "separator"}


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


# ---- what contradicts each other, seen without looking at any data ----


def _check(config: Config) -> None:
    if not _data_sets(config.datasets) or any(not one.paths for one in config.sources):
        raise ConfigError(Setting("datasets"), ": no input. Name a file, folder or glob, or - for standard input.")
    _check_paths(config)
    _check_splits(config)
    _check_limit(config)
    _check_rules(config)
    if config.chat is not None:
        _check_chat(config, config.chat)
    for protocol in config.storage_options:
        from fsspec import available_protocols

        if protocol not in available_protocols():
            said = (
                f": fsspec knows no such protocol.{did_you_mean(protocol, available_protocols())} Use s3, gs, hf, ..."
            )
            raise ConfigError(Setting(f"storage_options.{protocol}"), said)
    if config.executor == "local" and config.address is not None:
        raise ConfigError(Setting("address"), ": goes with ", Setting("executor", "ray"), ".")
    if config.packing_rules is not None and config.seq_len is None:
        raise ConfigError(Setting("packing"), ": needs ", Setting("seq_len"), ", the number of tokens in a row.")


def _check_paths(config: Config) -> None:
    paths = [path for one in config.sources for path in one.paths]
    seen_here_alone = [path for path in paths if path == "-" or path.startswith("memory://")]
    if config.executor == "ray" and seen_here_alone:
        said = f": ray can't read {seen_here_alone[0]}, which only this process sees. Save it to a file."
        raise ConfigError(Setting("executor"), said)
    if "-" not in paths:
        return
    if len(paths) > 1:
        raise ConfigError(Setting("datasets"), ": standard input (-) can't be combined with other inputs.")
    (one,) = config.sources
    twice = {
        "decontaminate": bool(config.evaluation_sets),
        "dedup": config.dedup_rules is not None,
        "datasets.0.weight": one.weight > 1,
        "datasets.0.max_documents": one.max_documents is not None,
        "datasets.0.split": one.split is not None,
    }
    for path in (path for path, needed in twice.items() if needed):
        said = ": reads the input twice, and standard input (-) can be read only once. Save it to a file."
        raise ConfigError(Setting(path), said)


def _check_limit(config: Config) -> None:
    """A limit counts what is written, in the order of the plan; it can't tell what comes behind it."""
    if config.limit is None:
        return
    if config.validation_sets:
        raise ConfigError(Setting("limit"), ": would count validation too. Use max_documents of the datasets instead.")
    if config.dedup_rules is not None and config.dedup_rules.index is not None:
        said = ": leaves documents out that dedup.index would know as seen. Use max_documents of the datasets instead."
        raise ConfigError(Setting("limit"), said)


def _check_index(config: Config, rules: DedupRules) -> None:
    """It is asked while documents are tokenized: what needs a pass before that needs another method."""
    if rules.index is None:
        raise ConfigError(Setting("dedup.method"), ": index: name the folder of the index as dedup.index.")
    if rules.near is not None:
        said = ": which documents are alike is found in a pass of its own, and dedup.method: index has none. Use exact."
        raise ConfigError(Setting("dedup.near"), said)
    if config.evaluation_sets:
        said = ": is decided in a pass of its own, and dedup.method: index has none. Use exact, with the same index."
        raise ConfigError(Setting("decontaminate"), said)


def _check_rules(config: Config) -> None:
    if config.index_rules is not None:
        _check_index(config, config.index_rules)
    near = config.dedup_rules.near if config.dedup_rules is not None else None
    if near is not None and near.bands * near.rows > MOST_VALUES:
        said = f": {near.bands} bands x {near.rows} rows are more than {MOST_VALUES:,} values."
        raise ConfigError(Setting("dedup.near"), said)
    for kind in ("characters", "tokens"):
        least, most = getattr(config.filters, f"min_{kind}"), getattr(config.filters, f"max_{kind}")
        if least is not None and most is not None and least > most:
            said = f": {least:,} is more than max_{kind} {most:,}: nothing would be left."
            raise ConfigError(Setting(f"filters.min_{kind}"), said)


def _check_chat(config: Config, chat: ChatRules) -> None:
    if config.counts_tokens:
        exact = next(iter(config.split_tokens), None)
        name = f"splits.{exact}{TOKENS_SUFFIX}" if exact is not None else "datasets.0.max_tokens"
        said = ": would cut a conversation to make the number exact. Use shares, or max_documents."
        raise ConfigError(Setting(name), said)
    if config.tokenizer_rules.special_text == "plain":
        said = ": plain would take the template's special tokens for text. Leave it out."
        raise ConfigError(Setting("tokenizer.special_text"), said)
    if config.packing_rules is not None and config.packing_rules.write:
        said = ": rows that are written do not say what is trained on. Leave it out: conversations are packed when the "
        raise ConfigError(Setting("packing.write"), f"{said}store is read.")
    if not chat.train_on:
        raise ConfigError(Setting("chat.train_on"), ": no role is named. Nothing would be trained on.")
    if chat.date is not None:
        try:
            date.fromisoformat(chat.date)
        except ValueError:
            raise ConfigError(Setting("chat.date"), f": {chat.date!r} is not a date such as 2026-01-31.") from None


def _check_splits(config: Config) -> None:
    def refuse(name: str, said: str) -> NoReturn:
        raise ConfigError(Setting(f"splits.{name}" if name else "splits"), f": {said}")

    for written, given in config.splits.items():
        name = written.removesuffix(TOKENS_SUFFIX)
        if name == TRAIN:
            refuse(written, "train is what the other splits leave; name only those.")
        if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) is None:
            refuse(written, "can't be the name of a split: use letters and digits.")
        if name == VAL and config.validation_sets:
            refuse(written, "val is made from the datasets under validation; give this split another name.")
        if written != name and given < 1:
            refuse(written, "a number of tokens must be at least 1.")
        if written == name and not 0 < given < 1:
            refuse(written, f"{given} is not a share; it must be between 0 and 1, or use {name}{TOKENS_SUFFIX}.")
    if config.split_shares and config.split_tokens:
        refuse("", "give all of them as shares, or all in tokens.")
    if sum(config.split_shares.values()) >= 1:
        refuse("", "the shares leave nothing for train.")
