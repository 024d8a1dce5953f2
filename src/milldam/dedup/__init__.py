"""Fingerprints of documents -> which of them to drop: exact, across runs, near.

A document is named by (unit, row): the unit's number in the plan and its position among the documents of the unit.
Plan order is the order of (unit, row); of equal documents the first in plan order is kept.

    fingerprints    texts -> 128-bit hashes -> a file a unit
    exact           hash files -> drop files, in bounded memory
    index           the hashes of finished runs; the documents of a unit that it holds
    minhash         texts -> shingles -> signatures
    candidates      signatures -> pairs of documents that may be alike
    preferred       a field or the length of documents -> which of those that are alike stays
    sketches        texts -> sets of shingles, by which pairs are verified
    near            pairs -> those that are alike -> drop files
    drops           drop files -> verdicts over a batch
    keys            numbers of 64 bits on disk, sorted in bounded memory
"""
