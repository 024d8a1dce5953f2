"""Token stores: shards of flat tokens, their indexes, and the manifest that makes a folder a store."""
