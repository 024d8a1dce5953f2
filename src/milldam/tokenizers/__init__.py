"""Text in, tokens out: any tokenizer file, the fastest encoder that gives the same ids, any document size.

loading           a folder, file or Hub name -> one tokenizer.json, and which tokens begin and end a document
conversion        vocab/merges, vocab.txt, sentencepiece and tiktoken files -> tokenizer.json
encoders          gigatoken, HF tokenizers: Arrow strings -> flat ids and offsets
proof             is the fast encoder identical here?
long_texts        a long document -> pieces that encode to the same ids as the whole
document_encoder  batches of text -> batches of tokens, with the special tokens in place
"""
