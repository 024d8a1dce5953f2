"""The data set card, README.md: the figures of a store, and how to open it.

One marked section is ours and is replaced by each push; what people write around it is kept, byte by byte. The YAML
header is ours too until someone edits it: the mark carries its hash. The card tells no path of the machine that made
the store.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from milldam.files import hash_bytes
from milldam.hub.contents import Contents
from milldam.memory import format_size
from milldam.stores.kinds import FEATURES, TABLE, TOKENS

NAME = "README.md"
END = "<!-- milldam: end -->"
_SECTION = re.compile(r"<!-- milldam: begin (?P<header>[0-9a-f]*) -->.*?<!-- milldam: end -->", re.DOTALL)
_BEGIN = re.compile(r"<!-- milldam: begin [0-9a-f]* -->")
_HEADER = re.compile(r"\A---[ \t]*\r?\n.*?^---[ \t]*\r?$\n?", re.DOTALL | re.MULTILINE)
_LISTED_SHARDS = 200
"""A header names so many files of a table in order; of more it has a pattern."""
_SIZES = ("1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")
_LOCAL = re.compile(r"^(/|~|\\\\|[A-Za-z]:[\\/]|file:)")


@dataclass(frozen=True, slots=True)
class Card:
    text: str
    note: str | None = None
    """What the user should know about it."""


def make_card(contents: Contents, repo: str, existing: str | None) -> Card:
    """The card for a store, made out of the one that the repository has."""
    header = _header(contents, repo)
    section = f"<!-- milldam: begin {hash_bytes(header.encode())} -->\n{_body(contents, repo)}\n{END}"
    if existing is None:
        return Card(f"{header}\n# {repo.split('/')[1]}\n\n{section}\n")
    old = _SECTION.search(existing)
    if old is None and _BEGIN.search(existing):
        return Card(existing, "The card's section of milldam has lost its end mark, so the card was left as it is.")
    had = _HEADER.match(existing)
    text = existing if old is None else existing[: old.start()] + section + existing[old.end() :]
    if had is None:
        text = f"{header}\n{text}"
    elif old is not None and hash_bytes(had.group().encode()) == old["header"]:
        text = header + text[had.end() :]
    return Card(text if old is not None else f"{text.rstrip()}\n\n{section}\n")


# ---- the header ----


def _header(contents: Contents, repo: str) -> str:
    import yaml

    name = repo.split("/")[1]
    fields: dict[str, Any] = {"pretty_name": name, "tags": ["milldam", _TAGS[contents.kind.name]]}
    fields["size_categories"] = [size_category(_rows(contents))]
    if contents.kind is FEATURES:
        fields["task_categories"] = ["question-answering"]
    if contents.kind is TABLE:
        fields["configs"] = [{"config_name": "default", "data_files": [{"split": "train", "path": _paths(contents)}]}]
    else:
        # Its files are arrays without a header, which the Hub's viewer can't show; the JSON beside them are no rows.
        fields["viewer"] = False
    return f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)}---\n"


_TAGS = {"tokens": "tokenized", "features": "question-answering", "table": "arrow"}


def _paths(contents: Contents) -> str | list[str]:
    names = [file.name for file in contents.files]
    return names if 0 < len(names) <= _LISTED_SHARDS else "rows-*.arrow"


def _rows(contents: Contents) -> int:
    manifest = contents.manifest
    if contents.kind is TOKENS:
        return int(manifest.documents)
    return int(manifest.windows if contents.kind is FEATURES else manifest.rows)


def size_category(rows: int) -> str:
    """The Hub's word for a number of rows.

    >>> size_category(12), size_category(1_000), size_category(3_000_000)
    ('n<1K', '1K<n<10K', '1M<n<10M')
    """
    if rows < 1000:
        return "n<1K"
    power = len(str(rows)) - 4
    return f"{_SIZES[power]}<n<{_SIZES[power + 1]}" if power + 1 < len(_SIZES) else "n>1T"


# ---- the section ----


def _body(contents: Contents, repo: str) -> str:
    facts, use = _PARTS[contents.kind.name](contents, repo)
    manifest = contents.manifest
    parts = [
        f"Made with milldam: {contents.kind.phrase}, pushed with `milldam push`. This section is written anew by each "
        "push; what is outside of it is kept.",
        _table(("", ""), facts),
    ]
    if contents.kind is TOKENS and manifest.splits:
        parts.append(_table(("split", "documents", "tokens", "shards", "size"), _splits(manifest)))
    dropped = _dropped(contents)
    if dropped:
        parts.append("Left out, by reason:\n\n" + _table(("reason", "count"), dropped))
    parts.append("## How to open it\n\n" + use)
    settings = getattr(manifest, "settings", None)
    if settings:
        told = json.dumps(without_paths(settings), indent=1, ensure_ascii=False)
        parts.append(f"## Settings\n\n<details>\n\n```json\n{told.replace('```', '` ` `')}\n```\n\n</details>")
    return "\n\n".join(parts)


def _tokens(contents: Contents, repo: str) -> tuple[list[tuple[Any, ...]], str]:
    manifest = contents.manifest
    sizes = [shard.bin["bytes"] for shard in manifest.shards]
    facts: list[tuple[Any, ...]] = [
        ("documents", f"{manifest.documents:,}"),
        ("tokens", f"{manifest.tokens:,}"),
        ("text", format_size(manifest.text_bytes)),
        ("dtype", manifest.dtype),
        ("vocabulary", f"{manifest.vocab_size:,}"),
        ("tokenizer", _tokenizer_name(manifest.tokenizer)),
        ("shards", _shards(sizes)),
        ("encoded by", manifest.engine),
        *_origin(manifest),
    ]
    name = repo.split("/")[1]
    first = manifest.shards[0].name if manifest.shards else "train"
    return facts, _TOKENS_USE.format(repo=repo, name=name, first=first, dtype=manifest.dtype)


_TOKENS_USE = """With milldam, memory-mapped after the pull:

```sh
milldam pull {repo} -o {name}
milldam verify {name}
```

```python
import milldam

store = milldam.open("{name}")          # or, without a pull: milldam.open("hf://datasets/{repo}")
store[0]                                # the tokens of the first document
```

A shard's `.bin` is tokens end to end without a header, as nanoGPT reads it:

```python
import numpy as np

tokens = np.memmap("{name}/{first}.bin", dtype=np.{dtype}, mode="r")
```

`.bin` and `.idx` together are what Megatron-LM reads: `IndexedDataset("{name}/{first}")`. For all shards in one file:
`milldam export {name} --to nanogpt -o {name}.bin`, or `--to megatron`."""


def _features(contents: Contents, repo: str) -> tuple[list[tuple[Any, ...]], str]:
    manifest = contents.manifest
    facts: list[tuple[Any, ...]] = [
        ("examples", f"{manifest.examples:,}"),
        ("windows", f"{manifest.windows:,}"),
        ("tokens of a window", f"{manifest.form.max_seq_length:,}"),
        ("dtype", manifest.form.token_dtype),
        ("tokenizer", _tokenizer_name(manifest.tokenizer)),
        ("shards", _shards([sum(one["bytes"] for one in shard.files.values()) for shard in manifest.shards])),
        *_origin(manifest),
    ]
    return facts, _FEATURES_USE.format(repo=repo, name=repo.split("/")[1])


_FEATURES_USE = """```sh
milldam pull {repo} -o {name}
milldam verify {name}
```

```python
import milldam

features = milldam.qa.FeatureStore("{name}")
```"""


def _rows_of_a_table(contents: Contents, repo: str) -> tuple[list[tuple[Any, ...]], str]:
    manifest = contents.manifest
    facts: list[tuple[Any, ...]] = [
        ("rows", f"{manifest.rows:,}"),
        ("columns", ", ".join(f"{name} ({kind})" for name, kind in manifest.schema.columns.items())),
        ("shards", _shards([file.bytes or 0 for file in contents.files])),
        *_origin(manifest),
    ]
    return facts, _TABLE_USE.format(repo=repo, name=repo.split("/")[1])


_TABLE_USE = """```python
import milldam

table = milldam.pull("{repo}", "{name}")       # memory-mapped; table.to_hf() is a datasets.Dataset
```

```python
import datasets

rows = datasets.load_dataset("{repo}", split="train")
```"""

_PARTS = {"tokens": _tokens, "features": _features, "table": _rows_of_a_table}


def _tokenizer_name(tokenizer: Mapping[str, Any]) -> str:
    name = tokenizer.get("name")
    return "none" if name is None else str(without_paths(str(name)))


def _shards(sizes: list[int]) -> str:
    if not sizes:
        return "none"
    return f"{len(sizes):,}, {format_size(min(sizes))} to {format_size(max(sizes))}, {format_size(sum(sizes))} in all"


def _origin(manifest: Any) -> list[tuple[Any, ...]]:
    """The input by number, size and fingerprint alone: where it lay is the maker's business."""
    found = getattr(manifest, "input", None) or {}
    facts: list[tuple[Any, ...]] = []
    if isinstance(found.get("files"), int) and isinstance(found.get("bytes"), int):
        facts.append(("input", f"{found['files']:,} files, {format_size(found['bytes'])}"))
    if found.get("fingerprint"):
        facts.append(("fingerprint of the input", f"`{found['fingerprint']}`"))
    return [*facts, ("fingerprint of the store", f"`{manifest.fingerprint}`")]


def _splits(manifest: Any) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for split in manifest.splits:
        shards = [shard for shard in manifest.shards if shard.split == split]
        documents, tokens = sum(one.documents for one in shards), sum(one.tokens for one in shards)
        size = format_size(sum(one.bin["bytes"] for one in shards))
        rows.append((split, f"{documents:,}", f"{tokens:,}", f"{len(shards):,}", size))
    return rows


def _dropped(contents: Contents) -> list[tuple[Any, ...]]:
    manifest = contents.manifest
    if contents.kind is TOKENS:
        lost = [*manifest.tally.rejected.items(), *manifest.tally.reasons.items()]
    else:
        lost = list(manifest.counts.get(_LEFT_OUT[contents.kind.name], {}).items())
    return [(reason, f"{count:,}") for reason, count in lost]


_LEFT_OUT = {"features": "dropped", "table": "rejected"}


def _table(head: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(_cell(str(cell)) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    """On one line, and no markup but code."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def without_paths(value: Any) -> Any:
    """The same value with absolute paths cut to their last part.

    >>> without_paths({"clean": {"function": "/home/anna/clean.py:fix"}, "eos": "</s>"})
    {'clean': {'function': '.../clean.py:fix'}, 'eos': '</s>'}
    """
    if _is_local(value):
        return ".../" + re.split(r"[\\/]", value.rstrip("\\/"))[-1]
    if isinstance(value, Mapping):
        return {without_paths(key): without_paths(one) for key, one in value.items()}
    return [without_paths(one) for one in value] if isinstance(value, list | tuple) else value


def local_paths(value: Any) -> list[str]:
    """The absolute paths in a manifest, in order: what a push would make known."""
    if isinstance(value, Mapping):
        return [path for item in value.items() for one in item for path in local_paths(one)]
    if isinstance(value, list | tuple):
        return [path for one in value for path in local_paths(one)]
    return [value] if _is_local(value) else []


def _is_local(value: Any) -> bool:
    """An absolute path; a separator such as "/" is none."""
    return isinstance(value, str) and len(value) > 3 and _LOCAL.match(value) is not None
