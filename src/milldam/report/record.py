"""What the run was told to do, with what, and where."""

from __future__ import annotations

from typing import Any

import yaml

from milldam.markup import escape
from milldam.memory import format_size
from milldam.report.facts import Facts, as_dict
from milldam.report.layout import Section, facts_table, paragraphs
from milldam.stores.kinds import TOKENS

_SHOWN_CHARACTERS = 20_000


def configuration(facts: Facts) -> Section:
    """The configuration as given, and the settings that decide the result."""
    settings = f"<pre>{_yaml(facts.manifest.settings)}</pre>"
    config = as_dict(facts.told.get("config"))
    body = settings
    if config:
        body = (
            f"<pre>{_yaml(config)}</pre><details><summary>Settings that decide the result</summary>{settings}</details>"
        )
    about = paragraphs("Equal settings and equal input give the same store, byte for byte.")
    return Section("configuration", "Configuration", about, body)


def _yaml(value: dict[str, Any]) -> str:
    if not value:
        return "(none)"
    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=False, width=100)
    return escape(text[:_SHOWN_CHARACTERS].rstrip()) + ("\n…" if len(text) > _SHOWN_CHARACTERS else "")


def versions(facts: Facts) -> Section:
    manifest = facts.manifest
    told = {name: str(value) for name, value in as_dict(facts.summary.get("versions")).items()}
    body = f"<div><h3>Versions</h3>{facts_table([*told.items(), ('engine', manifest.engine)])}</div>"
    machine = as_dict(facts.summary.get("machine"))
    if machine:
        body += f"<div><h3>Machine</h3>{facts_table(machine.items())}</div>"
    store = [
        ("tokenizer", manifest.tokenizer.get("name", "")),
        ("vocabulary", f"{manifest.vocab_size:,}"),
        ("token type", manifest.dtype),
        ("input", _input(manifest.input)),
        ("store format", TOKENS.version),
        ("fingerprint", manifest.fingerprint),
    ]
    if manifest.inexact_cuts:
        store.append(("inexact cuts", f"{manifest.inexact_cuts:,}"))
    if manifest.damaged_files:
        store.append(("damaged input files", f"{manifest.damaged_files:,}"))
    body = f'<div class="pair">{body}</div><h3>Store</h3>{facts_table(store)}'
    about = paragraphs("The fingerprint names the content: equal ones mean equal tokens in equal order.")
    return Section("versions", "Versions and machine", about, body)


def _input(told: dict[str, Any]) -> str:
    files, size = told.get("files"), told.get("bytes")
    known = [f"{files:,} files"] if isinstance(files, int) else []
    known += [format_size(size)] if isinstance(size, int) else []
    return ", ".join([*known, f"fingerprint {told.get('fingerprint', '')}"])
