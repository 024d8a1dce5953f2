"""Conversations -> texts with the stretches that are trained on. Needs jinja2 (extra `chat`)."""
