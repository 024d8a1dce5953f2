"""Input -> units -> texts, or rows.

data_sets     an HF dataset, or a split of one -> paths to list, rows to take
splits        how a split is asked for, and which files belong to it
listing       paths, folders, globs and addresses -> input files
units         input files -> units of a fixed size in bytes, from the input alone
reading       a unit -> texts or rows, by the format of its files:
    plain_text    .txt: a file, a line, a paragraph or a stretch between separators each
    jsonl         .jsonl, .json; giant_line: a line of any size -> its text in parts
    csv_records, csv_rows    .csv, .tsv; giant_record: a record of any size -> its fields in parts
    tables, table_rows       .parquet, .arrow; unpacking: what can only be unpacked whole, and what that takes
batch         what a reader is told and gives: rules, batches of text, rejects
rows, places  what rows are and weigh; which file and row they are from
large_rows    a row that comes in parts, put together where there is room
opening       a path, address or standard input -> bytes
compression   bytes -> decompressed as they flow
records       bytes -> blocks of whole records
decoding      bytes -> text, by the rule for what is no UTF-8
arrays        Arrow strings built, checked and cut without a Python object per document
json_items    a JSON array, or values over several lines -> JSON lines
json_stream   JSON of any size -> its values, read in parts or passed over
columns       which field holds the text
values        a field beside it, as a number for each document
no_text       why there is none in a file
"""
