"""The job of `milldam tokenize` and `milldam preprocess`, from its configuration to a finished store.

stages              the job, stage by stage: the map of all that follows
in_shares           the same job, as tasks of a job array on several machines
preparing           what a job has to know before it works; what can be wrong is found here
estimating, needs   what it will take: documents, tokens, disk, time
counting            which documents a slice of a dataset is
deduplicating       the stages of dedup
resolving           fingerprints of all units -> what to drop; hashes of a finished run -> the index
index_lookup        the index that documents are compared with in one pass
arranging           splits and limits that are exact in tokens
rejects             unreadable records of all units -> rejects.jsonl
receipt             the same request again, answered without a look at all this
finishing           the manifest, then rows, summary and report
npy                 the same job, to one .npy file
tokenizer_training  a sample of the datasets -> a tokenizer

What a worker does with one unit:

assignments     what a worker is given
documents       a unit -> its cleaned documents, numbered: both passes begin with it
fingerprinting  the first pass, only with dedup: hashes and signatures
text_cache      cleaned texts, kept by the first pass for the second
tokenizing      the second pass: read, clean, drop, filter, encode, write
splitting       which split a document belongs to, by its text
shelf           the shards of one part of a unit, one a split
aside           what a part sets aside: rejected records, dropped documents
"""
