"""Text between reading and encoding: cleaning, verdicts on documents, users' functions."""
