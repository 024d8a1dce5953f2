"""A batch of texts -> a reason to drop, per document."""
