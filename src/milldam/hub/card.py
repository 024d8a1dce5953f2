"""The dataset card, README.md: the figures of a store, and how to open it.

One marked section is ours and is replaced by each push; what people write around it is kept, byte by byte. The YAML
header is ours too until someone edits it: the mark carries its hash. The card tells no path of the machine that made
the store.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
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

    told = _TELLERS[contents.kind.name](contents.manifest)
    fields: dict[str, Any] = {"pretty_name": repo.split("/")[1], "tags": ["milldam", told.tag]}
    fields["size_categories"] = [size_category(told.rows)]
    if contents.kind is FEATURES:
        fields["task_categories"] = ["question-answering"]
    if contents.kind is TABLE:
        names = [file.name for file in contents.files]
        paths = names if 0 < len(names) <= _LISTED_SHARDS else "rows-*.arrow"
        fields["configs"] = [{"config_name": "default", "data_files": [{"split": "train", "path": paths}]}]
    else:
        # Its files are arrays without a header, which the Hub's viewer can't show; the JSON beside them are no rows.
        fields["viewer"] = False
    return f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)}---\n"


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
    manifest = contents.manifest
    told = _TELLERS[contents.kind.name](manifest)
    parts = [
        f"Made with milldam: {contents.kind.phrase}, pushed with `milldam push`. This section is rewritten by each "
        "push; what is outside of it is kept.",
        _table(("", ""), [*told.facts, ("shards", _shards(told.sizes)), *told.more, *_origin(manifest)]),
    ]
    if contents.kind is TOKENS and manifest.splits:
        parts.append(_table(("split", "documents", "tokens", "shards", "size"), _splits(manifest)))
    if told.left_out:
        left_out = [(reason, f"{count:,}") for reason, count in told.left_out]
        parts.append("Left out, by reason:\n\n" + _table(("reason", "count"), left_out))
    parts.append("## How to open it\n\n" + told.use.format(repo=repo, name=repo.split("/")[1]))
    if manifest.settings:
        shown = json.dumps(without_paths(manifest.settings), indent=1, ensure_ascii=False)
        parts.append(f"## Settings\n\n<details>\n\n```json\n{shown.replace('```', '` ` `')}\n```\n\n</details>")
    return "\n\n".join(parts)


@dataclass(frozen=True, slots=True)
class _Told:
    """What is told of one kind of store."""

    rows: int
    tag: str
    facts: list[tuple[str, str]]
    sizes: list[int]
    """Bytes of the shards."""
    left_out: list[tuple[str, int]]
    use: str
    more: tuple[tuple[str, str], ...] = ()


def _tokens(manifest: Any) -> _Told:
    facts = [
        ("documents", f"{manifest.documents:,}"),
        ("tokens", f"{manifest.tokens:,}"),
        ("text", format_size(manifest.text_bytes)),
        ("dtype", manifest.dtype),
        ("vocabulary", f"{manifest.vocab_size:,}"),
        ("tokenizer", _tokenizer_name(manifest.tokenizer)),
    ]
    left_out = [*manifest.tally.rejected.items(), *manifest.tally.reasons.items()]
    first = manifest.shards[0].name if manifest.shards else "train"
    use = _TOKENS_USE.replace("FIRST", first).replace("DTYPE", manifest.dtype)
    sizes = [shard.bin["bytes"] for shard in manifest.shards]
    return _Told(manifest.documents, "tokenized", facts, sizes, left_out, use, (("encoded by", manifest.encoder),))


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

tokens = np.memmap("{name}/FIRST.bin", dtype=np.DTYPE, mode="r")
```

`.bin` and `.idx` together are what Megatron-LM reads: `IndexedDataset("{name}/FIRST")`. For all shards in one file:
`milldam export {name} --to nanogpt -o {name}.bin`, or `--to megatron`."""


def _features(manifest: Any) -> _Told:
    facts = [
        ("examples", f"{manifest.examples:,}"),
        ("windows", f"{manifest.windows:,}"),
        ("tokens of a window", f"{manifest.form.max_seq_length:,}"),
        ("dtype", manifest.form.token_dtype),
        ("tokenizer", _tokenizer_name(manifest.tokenizer)),
    ]
    sizes = [sum(one["bytes"] for one in shard.files.values()) for shard in manifest.shards]
    left_out = list(manifest.counts.get("dropped", {}).items())
    return _Told(manifest.windows, "question-answering", facts, sizes, left_out, _FEATURES_USE)


_FEATURES_USE = """```sh
milldam pull {repo} -o {name}
milldam verify {name}
```

```python
import milldam

features = milldam.open("{name}")
```"""


def _rows_of_a_table(manifest: Any) -> _Told:
    columns = ", ".join(f"{name} ({kind})" for name, kind in manifest.schema.columns.items())
    facts = [("rows", f"{manifest.rows:,}"), ("columns", columns)]
    left_out = list(manifest.counts.get("rejected", {}).items())
    return _Told(manifest.rows, "arrow", facts, [shard.bytes for shard in manifest.shards], left_out, _TABLE_USE)


_TABLE_USE = """```python
import milldam

table = milldam.pull("{repo}", "{name}")       # memory-mapped; table.to_hf() is a datasets.Dataset
```

```python
import datasets

rows = datasets.load_dataset("{repo}", split="train")
```"""

_TELLERS: dict[str, Callable[[Any], _Told]] = {
    "tokens": _tokens,
    "features": _features,
    "table": _rows_of_a_table,
}


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
