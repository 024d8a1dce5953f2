"""Input -> units -> texts, or rows.

data_sets     an HF dataset, or a split of one -> paths to list, rows to take
units         paths, folders, globs and addresses -> input files -> units of a fixed size in bytes
reading       a unit -> texts or rows, by the format of its files:
    plain_text    .txt: a file, a line, a paragraph or a stretch between separators each
    jsonl         .jsonl, .json
    csv_records   .csv, .tsv
    tables        .parquet, .arrow
batch         what a reader gets and gives: rules, batches of text, rejects, where rows come from
rows          what rows are and weigh
compression   a path, address or standard input -> bytes, decompressed as they flow
records       bytes -> blocks of whole records, and the rejects of what can't be read
decoding      bytes -> text, by the rule for what is no UTF-8
arrays        Arrow strings built, checked and cut without a Python object per document
json_items    a JSON array, or values over several lines -> JSON lines
columns       which field holds the text, and why there is none in a file
"""
