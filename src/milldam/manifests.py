"""The names of manifests: what tells a folder that milldam made, and its kind. Each is written last."""

from __future__ import annotations

STORE_MANIFEST = "milldam.json"
TABLE_MANIFEST = "milldam-table.json"
QA_MANIFEST = "milldam-qa.json"
MANIFESTS = (STORE_MANIFEST, TABLE_MANIFEST, QA_MANIFEST)
