"""Input -> units -> texts, or rows.

data_sets     an HF dataset, or a split of one (splits) -> paths to list, rows to take
units         paths, folders, globs and addresses -> input files -> units of a fixed size in bytes
columns       which field holds the text, and why there is none in a file
reading       a unit -> batches of text, by the format of its files: plain_text, jsonl, csv_records, tables
rows          the same files -> rows, and where they come from
batch         what a reader gets and gives: rules, batches of text, rejects
compression   a path, address or standard input (streams) -> bytes, decompressed as they flow
records       bytes -> blocks of whole records
arrays        bytes -> text, by the rule for what is no UTF-8; Arrow strings checked and cut
"""
