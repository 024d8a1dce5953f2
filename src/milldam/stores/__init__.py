"""The results of milldam: token stores and tables.

kinds    what tells a folder's kind; how manifests are written, read, and replaced while others read the store
place    where a store lies: a folder, or an address
verify   is a store whole? sizes and hashes, then what is special to its kind
tokens   shards of token ids, readable by Megatron-LM and nanoGPT
table    shards of rows, in Arrow
"""
