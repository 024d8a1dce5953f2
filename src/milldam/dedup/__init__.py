"""Fingerprints of documents -> which of them to drop: exact, across runs, near, by a Bloom filter.

A document is named by (unit, row): the unit's number in the plan and its position among the documents of the unit.
Plan order is the order of (unit, row); of equal documents the first in plan order is kept.

    fingerprints    texts -> 128-bit hashes -> a file a unit
    exact           hash files -> drop files, in bounded memory
    bloom           the same in one pass and a fixed amount of memory, with a stated rate of false positives
    index           the hashes of finished runs
    drops           drop files -> verdicts over a batch
"""
