"""Documents -> rows of a fixed length, with their boundaries kept.

best_fit   document lengths -> pieces -> rows: by best fit decreasing, padded; or end to end (wrapped)
rows       what comes of it: the figures alone, or the rows on disk as shards of a store, with their boundaries
"""
