"""Results of `milldam.map` and `milldam qa`: Arrow shards with a manifest, opened memory-mapped."""
