"""Input -> units -> batches of text.

listing       paths, folders, globs and addresses -> input files
units         input files -> units of a fixed size in bytes, from the input alone
opening       a path, address or standard input -> bytes
compression   bytes -> decompressed as they flow
records       bytes -> blocks of whole records
batch         what a reader yields: Arrow strings, and rejects aside
arrays        Arrow strings built, checked and cut without a Python object per document
lines, jsonl, giant, tables, table_text   one reader a format
reading       a unit -> batches, by its format
columns       which field holds the text
"""
