"""Examples -> what a worker takes to make windows of them, so that one that is too heavy is known when it is read.

A context is encoded whole. What that takes follows from its bytes and its tokens, and these from samples: 16 stretches
of a long context, which are encoded. Bounds of what was measured on seven kinds of text with three tokenizers
(docs/log.md). Short examples are in what every worker takes.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from milldam.qa.examples import Example
from milldam.qa.settings import QARules
from milldam.qa.template import Template

LONG_EXAMPLE = 256_000
"""An example of more bytes is a batch by itself, and weighed."""
_FOR_A_BYTE, _FOR_A_TOKEN = 100, 560
_USUAL_DENSITY = 0.3
"""Tokens a byte, where the text is not known."""
_SAMPLES, _SAMPLE_CHARACTERS = 16, 4096


class Scale:
    """`row_bytes`: of a window."""

    def __init__(self, tokenizer_json: str, rules: QARules, template: Template, row_bytes: int) -> None:
        self._json, self._rules, self._template, self._row_bytes = tokenizer_json, rules, template, row_bytes
        self._known = "", 0.0

    def weigh(self, size: int, example: Example | None = None) -> int:
        """Bytes that an example of so many takes beside what every worker does; None: it could not be read."""
        if size <= LONG_EXAMPLE:
            return 0
        tokens = size * (_USUAL_DENSITY if example is None else self._density(example.context))
        question = 0 if example is None else self._tokens([example.question])
        step = max(1, self._rules.step(self._rules.max_seq_length - self._template.taken - question))
        windows = min(tokens / step, self._rules.max_segments or tokens)
        return round(size * _FOR_A_BYTE + tokens * _FOR_A_TOKEN + 2 * windows * self._row_bytes)

    def _density(self, context: str) -> float:
        """Tokens a byte. The questions on a context follow each other: it is looked at once."""
        if self._known[0] != context:
            between = max(_SAMPLE_CHARACTERS, len(context) // _SAMPLES)
            samples = [context[at : at + _SAMPLE_CHARACTERS] for at in range(0, len(context), between)]
            self._known = context, self._tokens(samples) / sum(len(sample.encode()) for sample in samples)
        return self._known[1]

    def _tokens(self, texts: list[str]) -> int:
        return sum(len(found.ids) for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))

    @cached_property
    def _tokenizer(self) -> Any:
        """Loaded when the first long example comes."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self._json)
