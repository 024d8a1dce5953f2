"""A question, its context, and the answers in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """A stretch of the context, by characters."""

    text: str
    start: int
    """Where the data says that it begins."""

    @property
    def stop(self) -> int:
        return self.start + len(self.text)


@dataclass(frozen=True, slots=True)
class Example:
    """One question."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...] = ()
    """None: the question can't be answered from the context."""
    title: str = ""

    @property
    def size_bytes(self) -> int:
        """Of all its texts; raises UnicodeEncodeError where one of them has half a character."""
        texts = (self.id, self.title, self.question, self.context, *(answer.text for answer in self.answers))
        return sum(len(text.encode()) for text in texts)
