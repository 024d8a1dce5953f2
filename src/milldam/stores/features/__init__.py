"""The feature store: windows as fixed-shape columns, texts once, and the manifest that makes a folder a store.

format      the columns and files of a shard
manifest    milldam-qa.json, written last
writer      features -> a shard
reader      windows, documents and examples by number; needs numpy alone
verify      what is special to it when it is verified
"""
