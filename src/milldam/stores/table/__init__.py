"""Results of `milldam.map`: Arrow shards with a manifest, opened memory-mapped.

manifest   `milldam-table.json`: schema, shards in order, what they were made from
writer     batches of rows -> a shard
reader     `Table`: rows, columns, batches, `to_arrow`, `to_hf`
"""
