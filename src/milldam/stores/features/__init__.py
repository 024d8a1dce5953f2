"""The feature store: windows as fixed-shape columns, texts once, and the manifest that makes a folder a store.

format      the columns and files of a shard
manifest    milldam-qa.json, written last
writer      features -> a shard
reader      windows, documents and examples by number; needs numpy alone
verify      what is special to it when it is verified
"""

from __future__ import annotations

from milldam.stores.features.format import FeatureForm
from milldam.stores.features.manifest import FeatureManifest, FeatureShard, template_facts
from milldam.stores.features.reader import FeatureStore
from milldam.stores.features.writer import FeatureShardWriter

__all__ = [
    "FeatureForm",
    "FeatureManifest",
    "FeatureShard",
    "FeatureShardWriter",
    "FeatureStore",
    "template_facts",
]
