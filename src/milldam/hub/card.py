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

from milldam.hub.client import TOKENIZER, Contents
from milldam.memory import format_size
from milldam.stores.kinds import TABLE, TOKENS

CARD = "README.md"
_BEGIN, _END = "<!-- milldam: begin -->", "<!-- milldam: end -->"
_SECTION = re.compile(f"{_BEGIN}.*?{_END}", re.DOTALL)
_LISTED_SHARDS = 200
"""A header names so many files of a table in order; of more it has a pattern."""
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
    # The header: what the Hub shows and searches, and for a table, how `datasets` reads it.
    data, manifest, kind = card.data, contents.manifest, contents.kind
    tag = "question-answering" if getattr(manifest, "qa", None) else {TOKENS: "tokenized", TABLE: "arrow"}[kind]
    data.pretty_name = data.pretty_name or repo.split("/")[1]
    data.tags = list(dict.fromkeys([*(data.get("tags") or ()), "milldam", tag]))
    if kind is TABLE:
        names = [name for name in contents.files if name != TOKENIZER]
        paths = names if 0 < len(names) <= _LISTED_SHARDS else "rows-*.arrow"
        data.configs = [{"config_name": "default", "data_files": [{"split": "train", "path": paths}]}]
    else:
        # Its files are arrays without a header, which the Hub's viewer can't show; the JSON beside them are no rows.
        data.viewer = False
    return str(card), None


def _body(contents: Contents, repo: str) -> str:
    import jinja2

    manifest, settings = contents.manifest, without_paths(contents.manifest.settings)
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "cell": lambda text: " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;"),
        "n": lambda number: f"{number:,}",
        "size": format_size,
        "without_paths": without_paths,
    }
    template = environment.from_string((Path(__file__).parent / "card.md.jinja").read_text(encoding="utf-8"))
    return template.render(
        kind=contents.kind.name,
        phrase=contents.kind.phrase,
        manifest=manifest,
        repo=repo,
        name=repo.split("/")[1],
        sizes=[record["bytes"] for record in contents.files.values() if "bytes" in record],
        settings=json.dumps(settings, indent=1, ensure_ascii=False).replace("```", "` ` `") if settings else "",
    ).rstrip()


def without_paths(value: Any) -> Any:
    """The same value with absolute paths cut to their last part; a separator such as "/" is none.

    >>> without_paths({"clean": {"function": "/home/anna/clean.py:fix"}, "eos": "</s>"})
    {'clean': {'function': '.../clean.py:fix'}, 'eos': '</s>'}
    """
    if isinstance(value, str):
        return ".../" + re.split(r"[\\/]", value.rstrip("\\/"))[-1] if len(value) > 3 and _LOCAL.match(value) else value
    if isinstance(value, Mapping):
        return {without_paths(key): without_paths(one) for key, one in value.items()}
    return [without_paths(one) for one in value] if isinstance(value, list | tuple) else value
