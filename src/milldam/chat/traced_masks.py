"""What is trained on in all conversations that a trace stands for: what masks.py finds for one, found for all of them.

With `{% generation %}` it is what stands in these blocks. Without, stretches are found as for one conversation, as long
as headers and ends lie within literals; and the proof needs no other words, since a trace tells which words are where:
those of a trained message stand in its own stretch alone, and no others do. What is not sure raises NotProvenError.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from milldam.chat.masks import REASONING, Masks, NotProvenError, block_of
from milldam.chat.template import Message, Position, joined
from milldam.chat.tracing import Span, Trace, Words, starts


def find_traced(
    masks: Masks, trace: Trace, messages: Sequence[Message], prompt_messages: int
) -> tuple[list[Span], list[int]]:
    """The spans; and of each that was derived, the number of words in it, which must not be white space."""
    text = _Text(trace)
    if masks.rule.everything:
        return [((0, 0), text.end)], []
    wanted = masks.wanted(messages, prompt_messages)
    if masks.tagged(messages, wanted):
        return masks.by_tags(messages, wanted, trace), []
    found = []
    for number in wanted:
        header, is_last = masks.header(str(messages[number]["role"]), {}), number == len(messages) - 1
        block = text.behind(header.text, block_of(trace, number, messages), is_first=number == 0)
        if not masks.rule.turn_end:
            found.append(text.without(header.last_tail if is_last else header.tail, block))
        else:
            found.append(text.to_the_end(header.text.strip(), block) if is_last else block)
    if any(one[1] > other[0] for one, other in itertools.pairwise(found)):
        raise NotProvenError("turns are not in order")
    return joined(found), _proven_by(trace, wanted, found)


def _proven_by(trace: Trace, wanted: list[int], found: list[Span]) -> list[int]:
    """Words of trained messages stand in their stretches, one at least, and no others do."""
    owners = [one.path[1] if one.path[0] == "messages" else None for one in trace.words]
    inside: list[int] = []
    for number, ((_, first), (_, last)) in zip(wanted, found, strict=True):
        texts = [at for at in range(first, last) if _is_reworded(trace.words[at])]
        if any(owner != number for owner in owners[first:last]) or not texts:
            raise NotProvenError("words of several messages, or none, are in a stretch")
        inside.append(texts[0])
    count = sum(last - first for (_, first), (_, last) in found)
    if count != sum(owner in set(wanted) for owner in owners):
        raise NotProvenError("what is trained on is also written outside its own turn")
    return inside


def _is_reworded(words: Words) -> bool:
    """Whether masks.py would replace them by another text in its proof."""
    said, name = words.path[2], words.path[-1]
    in_call = said == "tool_calls" and name in ("arguments", "name")
    return words.made[:1] != ("json",) and (in_call or (said in ("content", *REASONING) and name in (said, "text")))


class _Text:
    """The literals of a trace end to end, and where words are between them."""

    def __init__(self, trace: Trace) -> None:
        self._literals = "".join(trace.literals)
        # A place behind all words, and one in front of them.
        self._starts = [*starts(trace.literals), len(self._literals)]
        self.end: Position = len(self._literals), len(trace.words)

    def behind(self, header: str, block: Span, *, is_first: bool) -> Span:
        """A block without its header, which must lie in front of all words."""
        (begin, words), end = block
        stop = min(self._starts[words], end[0])
        at = self._literals.find(header, begin, stop) if block[0] == (0, 0) or is_first else begin
        if at < 0 or not self._literals.startswith(header, at, stop):
            raise NotProvenError("a header is not where it can be told")
        return (at + len(header), words), end

    def without(self, tail: str, span: Span) -> Span:
        """A span without what ends it, which must lie behind all words."""
        (begin, _), (end, words) = span
        start = max(begin, self._starts[words - 1] if words else 0)
        if not self._literals.endswith(tail, start, end):
            raise NotProvenError("a turn's end is not where it can be told")
        return span[0], (end - len(tail), words)

    def to_the_end(self, header: str, span: Span) -> Span:
        """A span that goes on to the end, if no words and no turn are behind it."""
        end, words = span[1]
        if words != self.end[1] or (header and header in self._literals[end:]):
            raise NotProvenError("there is something after the last turn")
        return span[0], self.end
