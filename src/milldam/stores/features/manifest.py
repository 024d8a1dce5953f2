"""The manifest `milldam-qa.json`: written last, and what makes a folder a feature store.

As that of a token store, it holds nothing that differs between two runs of the same job. It may come from anywhere, so
whatever a reader takes for granted later (names, sizes, the shape of rows) is checked when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from milldam.checked import checked
from milldam.errors import StoreError
from milldam.files import hash_bytes, stays_in_folder
from milldam.stores.features.format import CONTEXTS_INDEX, FeatureForm
from milldam.stores.kinds import FEATURES, FileRecord, InputFacts, TokenizerFacts
from milldam.stores.place import Folder, Place

NAME = FEATURES.manifest
_FACTS = ("tokenizer", "memory", "template", "settings", "input", "counts")


@dataclass(frozen=True, slots=True)
class FeatureShard:
    """Some examples with their windows: a file a column, and their texts."""

    name: str
    windows: int
    examples: int
    files: dict[str, FileRecord]
    """File name -> `bytes` and `xxh3`, in the order of the form's files."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def size(self, file: str) -> int:
        """Bytes of the file whose name ends so."""
        return int(self.files[f"{self.name}.{file}"]["bytes"])


class MemoryIds(TypedDict):
    read: list[int]
    write: list[int]


@dataclass(frozen=True, slots=True)
class FeatureManifest:
    form: FeatureForm
    tokenizer: TokenizerFacts
    """Name, `xxh3` of `tokenizer.json` (memory tokens included), `vocab_size`, special tokens."""
    memory: MemoryIds
    """Ids of the memory tokens, in order: `read` and `write`."""
    template: dict[str, Any]
    """What `template_facts` makes of the template."""
    settings: dict[str, Any]
    """Every setting that changes the features."""
    input: InputFacts
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

    @property
    def totals(self) -> dict[str, int]:
        return {"windows": self.windows, "examples": self.examples}

    def files(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for shard in self.shards:
            yield from shard.files.items()

    def write(self, folder: Path) -> None:
        told: dict[str, Any] = {"totals": self.totals, "fingerprint": self.fingerprint, "form": self.form.as_dict()}
        told |= {"columns": [column.as_dict() for column in self.form.columns]}
        told |= {name: getattr(self, name) for name in _FACTS}
        FEATURES.write(folder, told | {"shards": [shard.as_dict() for shard in self.shards]})

    @classmethod
    def read(cls, folder: Path) -> FeatureManifest:
        return read(Folder(folder))


def read(place: Place) -> FeatureManifest:
    path, value = f"{place.name}/{NAME}", FEATURES.value(place)
    manifest = checked(FeatureManifest, value, path)
    for problem in _problems(manifest, value.get("columns")):
        raise StoreError(f"{path}: {problem}")
    return manifest


def files_in(path: Path) -> Iterator[tuple[str, int]]:
    """Names and sizes of the files of a manifest that lies here."""
    return ((name, file["bytes"]) for name, file in read(Folder(path.parent, path)).files())


def _problems(manifest: FeatureManifest, columns: Any) -> Iterator[str]:
    """What is wrong with a manifest whose fields are of the right types."""
    if manifest.form.max_seq_length < 1:
        yield "damaged: form.max_seq_length is 0."
    if columns != [column.as_dict() for column in manifest.form.columns]:
        yield "its columns are not those of a feature store of this version."
    for shard in manifest.shards:
        yield from _shard_problems(shard, manifest.form)
    yield from _memory_problems(manifest.memory, manifest.template)


def template_facts(template: Any) -> dict[str, Any]:
    """A `Template` as a manifest has it: lists in place of tuples."""
    facts: dict[str, Any] = json.loads(json.dumps(asdict(template)))
    return facts


def _shard_problems(shard: FeatureShard, form: FeatureForm) -> Iterator[str]:
    """It names files of this folder alone, and their sizes are those of its windows and examples."""
    name = shard.name
    if not stays_in_folder(name):
        yield f'the shard name "{name}" leaves the folder; refused.'
    if set(shard.files) != {f"{name}.{file}" for file in form.files}:
        yield f"shard {name} has other files than a shard of windows."
    for file, size in form.sizes(shard.windows, shard.examples).items():
        if shard.size(file) != size:
            yield f"{name}.{file} has {shard.size(file):,} bytes where its rows take {size:,}."
    if shard.size(CONTEXTS_INDEX) < 8 or shard.size(CONTEXTS_INDEX) % 8:
        yield f"{name}.{CONTEXTS_INDEX} has {shard.size(CONTEXTS_INDEX):,} bytes, which is not an index."


def _memory_problems(memory: MemoryIds, template: dict[str, Any]) -> Iterator[str]:
    """Where memory tokens are in a window follows from the template."""
    if len(memory["read"]) != len(memory["write"]):
        yield "it has not as many memory tokens to read as to write."
    parts = [template.get(part) for part in ("before", "after")]
    if memory["read"] and not all(isinstance(part, dict) and isinstance(part.get("ids"), list) for part in parts):
        yield "damaged: it has memory tokens, and template does not say where they are."
