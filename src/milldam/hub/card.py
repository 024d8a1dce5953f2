"""The dataset card, README.md: the figures of a store, and how to open it. Its text is in card.md.jinja.

One marked section is ours and is replaced by each push; what people write around it is kept, byte by byte. Of the YAML
header, the keys that describe the files are ours. The card tells no path of the machine that made the store.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from milldam.hub.contents import Contents
from milldam.memory import format_size
from milldam.stores.kinds import FEATURES, TABLE, TOKENS

CARD = "README.md"
_BEGIN, _END = "<!-- milldam: begin -->", "<!-- milldam: end -->"
_SECTION = re.compile(f"{_BEGIN}.*?{_END}", re.DOTALL)
_LISTED_SHARDS = 200
"""A header names so many files of a table in order; of more it has a pattern."""
_SIZES = ("1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")
_LOCAL = re.compile(r"^(/|~|\\\\|[A-Za-z]:[\\/]|file:)")


def make_card(contents: Contents, repo: str, existing: str | None) -> tuple[str, str | None]:
    """The card for a store, made out of the one that the repository has, and what the user should know about it."""
    from huggingface_hub import DatasetCard

    old = None if existing is None else _SECTION.search(existing)
    if existing is not None and old is None and _BEGIN in existing:
        return existing, "The card's section of milldam has lost its end mark, so the card was left as it is."
    text = f"# {repo.split('/')[1]}\n" if existing is None else existing
    section = f"{_BEGIN}\n{_body(contents, repo)}\n{_END}"
    text = text.rstrip() + f"\n\n{section}\n" if old is None else text[: old.start()] + section + text[old.end() :]
    card = DatasetCard(text if text.startswith("---") else f"---\n\n---\n\n{text}")
    _describe(contents, repo, card.data)
    return str(card), None


def _describe(contents: Contents, repo: str, data: Any) -> None:
    """The header: what the Hub shows and searches, and for a table, how `datasets` reads it."""
    manifest, kind = contents.manifest, contents.kind
    rows = {TOKENS: "documents", FEATURES: "windows", TABLE: "rows"}[kind]
    tag = {TOKENS: "tokenized", FEATURES: "question-answering", TABLE: "arrow"}[kind]
    data.pretty_name = data.pretty_name or repo.split("/")[1]
    data.tags = list(dict.fromkeys([*(data.get("tags") or ()), "milldam", tag]))
    data.size_categories = [size_category(getattr(manifest, rows))]
    if kind is FEATURES:
        data.task_categories = data.task_categories or ["question-answering"]
    if kind is TABLE:
        names = [file.name for file in contents.files]
        paths = names if 0 < len(names) <= _LISTED_SHARDS else "rows-*.arrow"
        data.configs = [{"config_name": "default", "data_files": [{"split": "train", "path": paths}]}]
    else:
        # Its files are arrays without a header, which the Hub's viewer can't show; the JSON beside them are no rows.
        data.viewer = False


def size_category(rows: int) -> str:
    """The Hub's word for a number of rows.

    >>> size_category(12), size_category(1_000), size_category(3_000_000)
    ('n<1K', '1K<n<10K', '1M<n<10M')
    """
    if rows < 1000:
        return "n<1K"
    power = len(str(rows)) - 4
    return f"{_SIZES[power]}<n<{_SIZES[power + 1]}" if power + 1 < len(_SIZES) else "n>1T"


def _body(contents: Contents, repo: str) -> str:
    import jinja2

    manifest, kind = contents.manifest, contents.kind
    facts, left_out, splits = _FACTS[kind.name](manifest)
    sizes = [file.bytes for file in contents.files if file.bytes is not None]
    facts.append(("files", f"{len(sizes):,}, {format_size(sum(sizes))} in all"))
    # The input by number, size and fingerprint alone: where it lay is the maker's business.
    read = getattr(manifest, "input", None) or {}
    if isinstance(read.get("files"), int) and isinstance(read.get("bytes"), int):
        facts.append(("input", f"{read['files']:,} files, {format_size(read['bytes'])}"))
    if read.get("fingerprint"):
        facts.append(("fingerprint of the input", f"`{read['fingerprint']}`"))
    facts.append(("fingerprint of the store", f"`{manifest.fingerprint}`"))
    settings = json.dumps(without_paths(manifest.settings), indent=1, ensure_ascii=False) if manifest.settings else ""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["cell"] = lambda text: " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")
    template = environment.from_string((Path(__file__).parent / "card.md.jinja").read_text(encoding="utf-8"))
    return template.render(
        kind=kind,
        manifest=manifest,
        repo=repo,
        name=repo.split("/")[1],
        first=manifest.shards[0].name if kind is TOKENS and manifest.shards else "train",
        facts=facts,
        splits=splits,
        left_out=[(reason, f"{count:,}") for reason, count in left_out],
        settings=settings.replace("```", "` ` `"),
    ).rstrip()


_Rows = list[tuple[str, ...]]
_Facts = tuple[_Rows, list[tuple[str, int]], _Rows]
"""Figures, what was left out by reason, and a row for each split."""


def _facts_of_tokens(manifest: Any) -> _Facts:
    facts: _Rows = [
        ("documents", f"{manifest.documents:,}"),
        ("tokens", f"{manifest.tokens:,}"),
        ("text", format_size(manifest.text_bytes)),
        ("dtype", manifest.dtype),
        ("vocabulary", f"{manifest.vocab_size:,}"),
        ("tokenizer", _tokenizer_name(manifest)),
        ("encoded by", manifest.encoder),
    ]
    splits: _Rows = []
    for split in manifest.splits:
        shards = [shard for shard in manifest.shards if shard.split == split]
        documents, tokens = sum(shard.documents for shard in shards), sum(shard.tokens for shard in shards)
        size = format_size(sum(shard.bin["bytes"] for shard in shards))
        splits.append((split, f"{documents:,}", f"{tokens:,}", f"{len(shards):,}", size))
    return facts, [*manifest.tally.rejected.items(), *manifest.tally.reasons.items()], splits


def _facts_of_features(manifest: Any) -> _Facts:
    facts: _Rows = [
        ("examples", f"{manifest.examples:,}"),
        ("windows", f"{manifest.windows:,}"),
        ("tokens of a window", f"{manifest.form.max_seq_length:,}"),
        ("dtype", manifest.form.token_dtype),
        ("tokenizer", _tokenizer_name(manifest)),
    ]
    return facts, list(manifest.counts.get("dropped", {}).items()), []


def _facts_of_table(manifest: Any) -> _Facts:
    columns = ", ".join(f"{name} ({type})" for name, type in manifest.schema.columns.items())
    return (
        [("rows", f"{manifest.rows:,}"), ("columns", columns)],
        list(manifest.counts.get("rejected", {}).items()),
        [],
    )


_FACTS = {"tokens": _facts_of_tokens, "features": _facts_of_features, "table": _facts_of_table}


def _tokenizer_name(manifest: Any) -> str:
    name = manifest.tokenizer.get("name")
    return "none" if name is None else str(without_paths(str(name)))


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
