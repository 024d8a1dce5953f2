"""Text in, tokens out: any tokenizer file, the fastest engine that gives the same ids, any document size.

loading      a folder, file or Hub name -> one tokenizer.json
conversion   vocab/merges, vocab.txt, sentencepiece and tiktoken files -> tokenizer.json
special      which token begins and ends a document
engines      gigatoken, HF tokenizers: Arrow strings -> flat ids and offsets
proof        is the fast engine identical here?
cutting      a giant document -> pieces that encode to the same ids as the whole
encoder      batches of text -> batches of tokens, with the special tokens in place
"""
