"""The feature store: windows as fixed-shape columns, texts once, and the manifest that makes a folder a store.

format      the columns and files of a shard
manifest    milldam-qa.json, written last
writer      features -> a shard
reader      windows, documents and examples by number; needs numpy alone
verify      is the store whole?
"""

from __future__ import annotations

from milldam.qa.feature_store.format import FeatureForm
from milldam.qa.feature_store.manifest import FeatureManifest, FeatureShard, template_facts
from milldam.qa.feature_store.reader import FeatureStore
from milldam.qa.feature_store.verify import verify
from milldam.qa.feature_store.writer import FeatureShardWriter

__all__ = [
    "FeatureForm",
    "FeatureManifest",
    "FeatureShard",
    "FeatureShardWriter",
    "FeatureStore",
    "template_facts",
    "verify",
]
