"""Documents -> rows of a fixed length, with their boundaries kept.

rules        the settings
pieces       document lengths -> pieces that fit a row -> rows of them end to end (wrapped)
best_fit     pieces by best fit decreasing -> rows, padded
rows         what comes of it: the figures alone, or the rows on disk
row_shards   rows of pieces -> shards of a store
boundaries   position ids and cu_seqlens of written rows
"""
