"""What milldam makes: token stores, tables, feature stores.

kinds        the registry: how a folder tells its kind, how it is opened and verified; what all manifests share,
             and how one is replaced while others read it
place        where a store lies: a folder, or an address
verify       is a store whole? sizes and hashes, then what is special to its kind
tokens       shards of token ids, readable by Megatron-LM and nanoGPT
table        shards of rows, in Arrow
features     windows for question answering
"""
