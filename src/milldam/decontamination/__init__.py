"""Evaluation sets are kept out of training data: their passages are found in documents, exactly, and with evidence.

passages -> index of seeds -> matches in documents (first pass) -> one decision on all of them -> what is dropped
"""
