"""The job of `milldam tokenize` and `milldam preprocess`, from its configuration to a finished store.

job                 the job, stage by stage: the map of all that follows
preparing           what a job has to know before it works; what can be wrong is found here
fitting             how many workers the budget holds, and whether the disk holds the result
counting            which documents a slice of a dataset is
deduplicating       the stages between the passes: fingerprints of all units -> what to drop
index_lookup        the index that documents are compared with in one pass
decontaminating     the passages of evaluation sets; a finished store compared with them
arranging           splits and limits that are exact in tokens
finishing           the manifest, then rows, summary and report
starting            before anything is loaded: what is asked for, and whether it is there already
npy                 the same job, to one .npy file
tokenizer_training  a sample of the datasets -> a tokenizer

What a worker does with one unit:

documents       a unit -> its cleaned documents, numbered: both passes begin with it; kept for the second one
first_pass      only with dedup: hashes, signatures, matches; shingles of documents in pairs
tokenizing      the second pass: read, drop, filter, encode, write; chat_encoding
judging         what decides on a document by its text: duplicates, samples, filters, splits
unit_output     what a part of a unit leaves: shards, rejected records, dropped documents
rejects         rejected records and dropped documents of all units, gathered
near_examples   texts of near-duplicates, to look at
"""
