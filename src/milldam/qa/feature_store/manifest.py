"""The manifest `milldam-qa.json`: written last, and what makes a folder a feature store.

As that of a token store, it holds nothing that differs between two runs of the same job. It may come from anywhere, so
whatever a reader takes for granted later (names, sizes, the shape of rows) is checked when it is read.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from milldam.errors import StoreError
from milldam.files import hash_bytes, json_bytes, stays_in_folder, write_file
from milldam.manifests import QA_MANIFEST, STORE_MANIFEST, TABLE_MANIFEST
from milldam.qa.feature_store.format import CONTEXTS_INDEX, TOKEN_DTYPES, FeatureForm

NAME = QA_MANIFEST
FORMAT = "milldam features"
FORMAT_VERSION = 1
_FACTS = ("tokenizer", "memory", "template", "settings", "input", "counts")


@dataclass(frozen=True, slots=True)
class FeatureShard:
    """Some examples with their windows: a file a column, and their texts."""

    name: str
    windows: int
    examples: int
    files: dict[str, dict[str, Any]]
    """File name -> `bytes` and `xxh3`, in the order of the form's files."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> FeatureShard:
        return cls(value["name"], value["windows"], value["examples"], value["files"])

    def size(self, file: str) -> int:
        """Bytes of the file whose name ends so."""
        return int(self.files[f"{self.name}.{file}"]["bytes"])


@dataclass(frozen=True, slots=True)
class FeatureManifest:
    form: FeatureForm
    tokenizer: dict[str, Any]
    """Name, `xxh3` of `tokenizer.json` (memory tokens included), `vocab_size`, special tokens."""
    memory: dict[str, list[int]]
    """Ids of the memory tokens, in order: `read` and `write`."""
    template: dict[str, Any]
    """What `template_facts` makes of the template."""
    settings: dict[str, Any]
    """Every setting that changes the features."""
    input: dict[str, Any]
    """Number, size and fingerprint of the input files."""
    shards: tuple[FeatureShard, ...]
    counts: dict[str, Any] = field(default_factory=dict)
    """`examples` (read), `repaired`, `unrepairable`, `dropped` (reason -> examples), `windows_with_answers`, ..."""

    @property
    def windows(self) -> int:
        return sum(shard.windows for shard in self.shards)

    @property
    def examples(self) -> int:
        """Examples with windows: those that the store has."""
        return sum(shard.examples for shard in self.shards)

    @property
    def fingerprint(self) -> str:
        """Names the content: equal fingerprints mean equal windows and texts in equal order, of an equal form."""
        hashes = (record["xxh3"] for shard in self.shards for _, record in sorted(shard.files.items()))
        return hash_bytes((json.dumps(self.form.as_dict()) + "".join(hashes)).encode())

    def write(self, folder: Path) -> None:
        head = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "totals": {"windows": self.windows, "examples": self.examples},
            "fingerprint": self.fingerprint,
            "form": self.form.as_dict(),
            "columns": [column.as_dict() for column in self.form.columns],
        }
        facts = {name: getattr(self, name) for name in _FACTS}
        value = head | facts | {"shards": [shard.as_dict() for shard in self.shards]}
        write_file(folder / NAME, json_bytes(value))

    @classmethod
    def read(cls, folder: Path) -> FeatureManifest:
        path = folder / NAME
        try:
            value = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise StoreError(_not_a_store(folder)) from None
        except (OSError, ValueError) as error:
            raise StoreError(f"{path}: can't be read ({error}).") from None
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise StoreError(f"{path}: not the manifest of a feature store.")
        if value.get("format_version") != FORMAT_VERSION:
            raise StoreError(
                f"{path}: feature format {value.get('format_version')}; this milldam reads format {FORMAT_VERSION}. "
                "Upgrade milldam, or make the store again."
            )
        try:
            return cls._parse(value)
        except _DamageError as error:
            raise StoreError(f"{path}: {error}") from None
        except (KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"{path}: damaged manifest ({error}).") from None

    @classmethod
    def _parse(cls, value: dict[str, Any]) -> FeatureManifest:
        form = FeatureForm(**value["form"])
        _check_form(form, value["columns"])
        shards = tuple(FeatureShard.from_dict(shard) for shard in value["shards"])
        for shard in shards:
            _check_shard(shard, form)
        facts = {name: value[name] for name in _FACTS}
        _check_memory(facts["memory"], facts["template"])
        return cls(form=form, shards=shards, **facts)


def template_facts(template: Any) -> dict[str, Any]:
    """A `Template` as a manifest has it: lists in place of tuples."""
    facts: dict[str, Any] = json.loads(json.dumps(asdict(template)))
    return facts


class _DamageError(Exception):
    """What is wrong with a manifest, as a sentence."""


def _check_form(form: FeatureForm, columns: Any) -> None:
    if form.token_dtype not in TOKEN_DTYPES:
        raise _DamageError(f"tokens of {form.token_dtype}; a feature store has {' or '.join(TOKEN_DTYPES)}.")
    if not _is_count(form.max_seq_length) or form.max_seq_length < 1:
        raise _DamageError(f"windows of {form.max_seq_length} tokens.")
    if columns != [column.as_dict() for column in form.columns]:
        raise _DamageError("its columns are not those of a feature store of this version.")


def _check_shard(shard: FeatureShard, form: FeatureForm) -> None:
    """It names files of this folder alone, and their sizes are those of its windows and examples."""
    name = shard.name
    if not stays_in_folder(name):
        raise _DamageError(f'the shard name "{name}" leaves the folder; refused.')
    if set(shard.files) != {f"{name}.{file}" for file in form.files}:
        raise _DamageError(f"shard {name} has other files than a shard of windows.")
    numbers = (shard.windows, shard.examples, *(record["bytes"] for record in shard.files.values()))
    if not all(_is_count(number) for number in numbers):
        raise _DamageError(f"shard {name} has sizes that are no counts.")
    for file, size in form.sizes(shard.windows, shard.examples).items():
        if shard.size(file) != size:
            raise _DamageError(f"{name}.{file} has {shard.size(file):,} bytes where its rows take {size:,}.")
    if shard.size(CONTEXTS_INDEX) < 8 or shard.size(CONTEXTS_INDEX) % 8:
        raise _DamageError(f"{name}.{CONTEXTS_INDEX} has {shard.size(CONTEXTS_INDEX):,} bytes, which is no index.")


def _check_memory(memory: dict[str, list[int]], template: dict[str, Any]) -> None:
    """Where memory tokens are in a window follows from the template."""
    if len(memory["read"]) != len(memory["write"]):
        raise _DamageError("it has not as many memory tokens to read as to write.")
    if memory["read"] and not all(isinstance(template[part]["ids"], list) for part in ("before", "after")):
        raise _DamageError("it has memory tokens and does not say where they are.")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _not_a_store(folder: Path) -> str:
    if not folder.exists():
        return f"{folder}: no such folder."
    if (folder / STORE_MANIFEST).exists():
        return f"{folder}: a store of tokens, not of question-answering features. `milldam.open` opens it."
    if (folder / TABLE_MANIFEST).exists():
        return f"{folder}: a table that milldam.map made, not question-answering features. `milldam.Table` opens it."
    if (folder / "run").exists():
        return f"{folder}: unfinished: a run was interrupted here. Run the same command again to go on."
    return f"{folder}: not a feature store (no {NAME} in it). `milldam qa` makes one."
