"""What milldam makes: stores of tokens, tables, stores of features.

kinds     what there is, and how a folder tells which one it is
tokens    shards of token ids, readable by Megatron-LM and nanoGPT
table     shards of rows, Arrow or Parquet
features  windows for question answering
"""
