"""Settings as they were given: plain values, and where each of them comes from, for messages about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from milldam.errors import ConfigError, Setting

KeyPath = tuple[str | int, ...]
Message = tuple[str | Setting, ...]
OVERRIDES = "overrides"
"""`--set` on the command line, `overrides=` in Python."""
MOST_PROBLEMS = 10


def dotted(path: KeyPath) -> str:
    """A path as people write it: datasets.0.path"""
    return ".".join(str(part) for part in path)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a key and its value stand."""

    source: str
    """The file, or `OVERRIDES`, or "" for an option or an argument."""
    key_line: int | None = None
    value_line: int | None = None
    text: str | None = None
    """A scalar as it was written, when it had no quotes."""


@dataclass(slots=True)
class Given:
    """What was given: plain values with their places; and what is wrong with them so far.

    Values without a place are options or arguments: what is said of one names it by a `Setting`.
    """

    source: str = ""
    data: Any = field(default_factory=dict)
    places: dict[KeyPath, Place] = field(default_factory=dict)
    origins: dict[KeyPath, KeyPath] = field(default_factory=dict)
    """For keys that were moved: where they stood in the file."""
    problems: list[tuple[int, Message]] = field(default_factory=list)
    """With their lines."""

    def put(self, name: str, value: Any) -> None:
        """Put an option over what the file says."""
        self.forget_places((name,))
        self.data[name] = value
        self.places[name,] = Place("")

    def forget_places(self, path: KeyPath) -> None:
        for old in [old for old in self.places if old[: len(path)] == path]:
            del self.places[old]

    def text_of(self, path: KeyPath) -> str | None:
        place = self.places.get(self._original(path))
        return place.text if place else None

    def add_problem(self, path: KeyPath, *message: str | Setting, at_key: bool = False) -> None:
        line, _ = self._found(path, at_key=at_key)
        self.problems.append((line or 0, self.located(path, *message, at_key=at_key)))

    def located(self, path: KeyPath, *message: str | Setting, at_key: bool = False) -> Message:
        """The message with place and key in front: `config.yaml:12: dedup.treshold: no such key.`"""
        line, place = self._found(path, at_key=at_key)
        name = dotted(self._original(path))
        if place.source:
            where: str | Setting = f"{place.source}:{line}: " if line else f"{place.source}: "
            if place.source == OVERRIDES:
                return (Setting(OVERRIDES), f" {name}: ", *message)
            return (where, f"{name}: " if name else "", *message)
        return (Setting(name), ": ", *message) if name else message

    def raise_problems(self) -> None:
        """Tell all of them, in the order of the file."""
        if not self.problems:
            return
        shown = [message for _, message in sorted(self.problems, key=lambda problem: problem[0])[:MOST_PROBLEMS]]
        more = len(self.problems) - len(shown)
        shown += [(f"... and {more} more.",)] if more else []
        raise ConfigError(*(part for number, one in enumerate(shown) for part in (("\n", *one) if number else one)))

    def _found(self, path: KeyPath, *, at_key: bool) -> tuple[int | None, Place]:
        """The place of a key, or else of the block that it is in; with the line."""
        original = known = self._original(path)
        while known and known not in self.places:
            known = known[:-1]
        place = self.places.get(known, Place(self.source))
        return place.key_line if at_key or known != original else place.value_line, place

    def _original(self, path: KeyPath) -> KeyPath:
        """The path under which the author wrote it."""
        if path in self.places:
            return path
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]] + path[length:]
        return path
