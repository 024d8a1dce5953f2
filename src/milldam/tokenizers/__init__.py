"""Text in, tokens out: any tokenizer file, the fastest encoder that gives the same ids, any document size.

loading           a folder, file or Hub name -> one tokenizer.json, and which tokens begin and end a document
encoders          gigatoken, HF tokenizers: Arrow strings -> flat ids and offsets
document_encoder  batches of text -> ids, special tokens in place; long documents in proven pieces
proof, sweep      is the fast encoder identical here, and on which characters is it not?
training          a sample of text -> a tokenizer
"""
