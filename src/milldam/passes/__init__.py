"""What a worker does with one unit of a job: the first pass (fingerprints, only with dedup) and the second (tokens).

assignments     what a worker is given
documents       a unit -> its cleaned documents, numbered: both passes begin with it
fingerprinting  the first pass: hashes and signatures
text_cache      cleaned texts, kept by the first pass for the second
pipeline        the second pass: read, clean, drop, filter, encode, write
splitting       which split a document belongs to, by its text
shelf           the shards of one part of a unit, one a split
aside           what a part sets aside: rejected records, dropped documents
"""
