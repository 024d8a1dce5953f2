"""Input -> units -> batches of text.

data_sets     an HF data set, or a split of one -> paths to list, rows to take
splits        how a split is asked for, and which files belong to it
listing       paths, folders, globs and addresses -> input files
units         input files -> units of a fixed size in bytes, from the input alone
opening       a path, address or standard input -> bytes
compression   bytes -> decompressed as they flow
records       bytes -> blocks of whole records
batch         what a reader yields: Arrow strings, and rejects aside
decoding      bytes -> text, by the rule for what is no UTF-8
arrays        Arrow strings built, checked and cut without a Python object per document
json_items    a JSON array, or values over several lines -> JSON lines
json_stream   JSON of any size -> its values, read in parts or passed over
giant, giant_row               a JSON line, a CSV record of any size -> its text in parts
parquet_pages, arrow_messages  what can only be unpacked whole, and what that takes
lines, jsonl, tables, table_text   one reader a format
reading       a unit -> batches, by its format
columns       which field holds the text
no_text       why there is none in a file
"""
