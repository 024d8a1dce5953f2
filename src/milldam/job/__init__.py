"""The job of `milldam tokenize` and `milldam preprocess`, from its configuration to a finished store.

stages              the job, stage by stage: the map of all that follows
in_shares           the same job in shares, by several machines
preparing           what a job has to know before it works; what can be wrong is found here
simulating          the same for a listing of files that need not be there
estimating, needs   what it will take: documents, tokens, disk, time
counting            which documents a slice of a data set is
deduplicating       the stages of dedup
resolving           fingerprints of all units -> what to drop; hashes of a finished run -> the index
arranging           splits and limits that are exact in tokens
rejects             unreadable records of all units -> rejects.jsonl
finishing           the manifest, then rows, summary and report
npy                 the same job, to one .npy file
tokenizer_training  a sample of the data sets -> a tokenizer
"""
