"""Evaluation sets are kept out of training data: their passages are found in documents, exactly, and with evidence.

passages -> index of seeds -> matches in documents (first pass) -> verdicts on all of them together -> what is removed
"""
