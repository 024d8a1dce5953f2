"""Language by py3langid: a model of 5 MB that comes with the package, no network.

It walks over the bytes in Python, at 1 to 2 MB/s, so it is shown the first `LANGUAGE_BYTES` of a document only: 1.5 ms
a document. The model takes a second to load and 81 MB, once for each process.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, Final

import pyarrow as pa

from milldam.errors import ConfigError, did_you_mean
from milldam.rules import LanguageRules

LANGUAGE_BYTES: Final = 2048
OTHER_LANGUAGE, UNSURE = "other_language", "language_unsure"


class LanguageFilter:
    """Tells a text in one of the languages to keep from others."""

    def __init__(self, rules: LanguageRules) -> None:
        self._rules = rules
        self._identifier = _load_identifier()
        known = set(self._identifier.labels)
        for language in rules.keep:
            if language not in known:
                hint = did_you_mean(language, known)
                raise ConfigError(f'filters.language: "{language}" is not a language that py3langid knows.{hint}')

    def fault(self, text: pa.LargeStringScalar) -> str | None:
        """Why a document is dropped, or None."""
        data = bytes(text.as_buffer()[:LANGUAGE_BYTES])
        # A character may be cut off at the end; the identifier leaves that out.
        language, score = self._identifier.classify(data)
        if language not in self._rules.keep:
            return OTHER_LANGUAGE
        return None if score >= self._rules.min_score else UNSURE


@cache
def _load_identifier() -> Any:
    """With scores from 0 to 1."""
    try:
        langid = importlib.import_module("py3langid.langid")
        return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
    except (ImportError, AttributeError) as error:
        raise ConfigError('filters.language needs py3langid 0.4 or newer: pip install "milldam[language]"') from error


def unload_model() -> None:
    """Give its memory back; it is loaded again when it is needed."""
    _load_identifier.cache_clear()
