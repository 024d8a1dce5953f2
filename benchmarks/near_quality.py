"""How right near-dedup is: a corpus with planted edits, the true similarities, and a verdict on what was removed.

In: real texts, and the numbers of those documents that somebody kept. Out: a `Verdict`, by brute force. Two documents
are compared on milldam's own shingles, exactly (an inverted index, no signatures, no sampling), so every figure is a
fact about the corpus and not an estimate.

- `wrong`: removed although the similarity to every document that stays is below 0.7. Must be 0.
- `recall`: of the documents that are 0.85 or more like an earlier one that stays, the share that was removed.
- `precision`: of the removed ones, the share that is at least the threshold like one that stays.

What is planted (`KINDS`): deletions, insertions, changed words, shuffled paragraphs, from faint to heavy; boilerplate
around different texts; chains of 40 documents, each 90 % like the one before it; templates with thousands of copies,
some alike enough and some just not; excerpts; short documents, code, one repeated word. Memory: 20,000 documents take
about 1 GB.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import milldam
from milldam.dedup.sketches import Sketcher
from milldam.sources.compression import read_blocks

LONGEST = 12_000
"""Characters of a document: a few giant ones would take all the time and show nothing more."""
CHAIN_DOCUMENTS, CHAIN_WORDS = 40, 400
CHAIN_STEP = CHAIN_WORDS // 19
"""(400 - 21) / (400 + 21) = 0.90, and 39 steps are more than two documents."""
BOILERPLATE_WORDS, CORE_WORDS = 300, 70
TEMPLATE_WORDS = 240
_NAMES = [
    a + b + c for a in ("Al", "Ber", "Cor", "Da", "El") for b in ("ri", "lo", "ma", "ven") for c in ("n", "s", "ck")
]
_BATCH = 256
ROUNDED_BY = 0.001
"""Similarities are told in thousandths, rounded down."""

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Document:
    kind: str
    text: str


# ---- the corpus ----


def plant(texts: Sequence[str], count: int, seed: int = 0) -> list[Document]:
    """A corpus of `count` documents, in an order that is random but for half of the chains.

    `texts` must be real, and about half as many as are asked for; the same arguments give the same corpus.
    """
    rng = Random(seed)
    texts = [text[:LONGEST] for text in texts if text.strip()]
    rng.shuffle(texts)
    sizes = {kind: max(1, int(count * share)) for kind, (share, _) in KINDS.items()}
    fresh, spare = texts[: sizes["fresh"]], texts[sizes["fresh"] :] or texts
    made = [
        Document(kind, text)
        for kind, (_, make) in KINDS.items()
        for text in (fresh if make is None else make(Planting(rng, fresh, spare), sizes[kind]))
    ]
    made = made[:count]
    places = sorted(rng.sample(range(len(made)), sum(one.kind == "chain in order" for one in made)))
    chains = iter([one for one in made if one.kind == "chain in order"])
    others = [one for one in made if one.kind != "chain in order"]
    rng.shuffle(others)
    free, rest = set(places), iter(others)
    return [next(chains) if place in free else next(rest) for place in range(len(made))]


@dataclass(frozen=True, slots=True)
class Planting:
    """What the kinds draw from."""

    rng: Random
    fresh: list[str]
    """In the corpus as they are: what edits are made of."""
    spare: list[str]
    """Not in it."""

    def words(self, count: int) -> list[str]:
        """Running words of spare texts."""
        found: list[str] = []
        while len(found) < count:
            found += self.rng.choice(self.spare).split()
        return found[:count]


def _edited(edit: Callable[[Random, list[str], float], list[str]]) -> Callable[[Planting, int], list[str]]:
    """Texts of the corpus with a share of their words edited, 0.2 % to 20 %."""

    def make(given: Planting, count: int) -> list[str]:
        found = []
        for _ in range(count):
            text = given.rng.choice(given.fresh)
            # Scripts without spaces are edited by characters, else by words.
            space = " " if text.count(" ") * 12 > len(text) else ""
            pieces = text.split(" ") if space else list(text)
            found.append(space.join(edit(given.rng, pieces, 10 ** given.rng.uniform(-2.7, -0.7))))
        return found

    return make


def _delete(rng: Random, words: list[str], share: float) -> list[str]:
    """Half of the time scattered words, else one stretch."""
    if rng.random() < 0.5:
        return [word for word in words if rng.random() >= share]
    start, gone = rng.randrange(len(words) + 1), int(len(words) * share * 3)
    return words[:start] + words[start + gone :]


def _insert(rng: Random, words: list[str], share: float) -> list[str]:
    if rng.random() < 0.5:
        return [one for word in words for one in ([word, rng.choice(_NAMES)] if rng.random() < share else [word])]
    start = rng.randrange(len(words) + 1)
    new = [f"{rng.choice(_NAMES)}{rng.randrange(10**6)}" for _ in range(int(len(words) * share * 3))]
    return words[:start] + new + words[start:]


def _change(rng: Random, words: list[str], share: float) -> list[str]:
    return [rng.choice(_NAMES) if rng.random() < share else word for word in words]


def _shuffle(rng: Random, words: list[str], share: float) -> list[str]:
    """Paragraphs of 20 to 200 words in another order."""
    size = max(20, int(200 * (1 - 5 * share)))
    paragraphs = [words[start : start + size] for start in range(0, len(words), size)]
    rng.shuffle(paragraphs)
    return [word for paragraph in paragraphs for word in paragraph]


def _boilerplate(given: Planting, count: int) -> list[str]:
    """The same header and footer around different texts, of a similarity around 0.65 to 0.85."""
    found: list[str] = []
    while len(found) < count:
        around = given.words(BOILERPLATE_WORDS)
        half = given.rng.randrange(BOILERPLATE_WORDS)
        for _ in range(min(400, count - len(found))):
            start = given.rng.choice(given.spare).split()[: int(CORE_WORDS * given.rng.uniform(0.3, 1.5))]
            found.append(" ".join(around[:half] + start + around[half:]))
    return found


def _chains(given: Planting, count: int) -> list[str]:
    """A window that slides over a long text: each like the one before it, the first and the last quite unlike."""
    found: list[str] = []
    while len(found) < count:
        words = given.words(CHAIN_WORDS + CHAIN_STEP * CHAIN_DOCUMENTS)
        starts = range(0, CHAIN_STEP * CHAIN_DOCUMENTS, CHAIN_STEP)
        found += [" ".join(words[start : start + CHAIN_WORDS]) for start in starts]
    return found[:count]


def _templates(blanks: int) -> Callable[[Planting, int], list[str]]:
    """Copies of one form with so many blanks filled in, each of which changes five of 236 shingles."""

    def make(given: Planting, count: int) -> list[str]:
        words = given.words(TEMPLATE_WORDS)
        places = range(TEMPLATE_WORDS // (2 * blanks), TEMPLATE_WORDS, TEMPLATE_WORDS // blanks)
        found = []
        for number in range(count):
            filled = list(words)
            for place in places:
                filled[place] = f"{given.rng.choice(_NAMES)}{number}"
            found.append(" ".join(filled))
        return found

    return make


def _excerpts(given: Planting, count: int) -> list[str]:
    """30 to 95 % of a text."""
    found = []
    for _ in range(count):
        text = given.rng.choice(given.fresh)
        size = int(len(text) * given.rng.uniform(0.3, 0.95))
        start = given.rng.randrange(len(text) - size + 1)
        found.append(text[start : start + size])
    return found


def _short(given: Planting, count: int) -> list[str]:
    """One to twelve words, many of them alike but for one."""
    heads = [given.words(given.rng.randint(1, 11)) for _ in range(max(1, count // 4))]
    return [" ".join([*given.rng.choice(heads), given.rng.choice(_NAMES)]) for _ in range(count)]


def _repeated(given: Planting, count: int) -> list[str]:
    return [" ".join([given.rng.choice(_NAMES).lower()] * given.rng.randint(1, 400)) for _ in range(count)]


def _code(given: Planting, count: int) -> list[str]:
    """Functions under the same licence, with other names and bodies."""
    licence = "# " + "\n# ".join(" ".join(given.words(60)[k : k + 10]) for k in range(0, 60, 10))
    found = []
    for number in range(count):
        name = f"{given.rng.choice(_NAMES).lower()}_{number % 97}"
        lines = [
            f"    {word.lower()} = {name}({given.rng.choice('abc')}, {given.rng.randrange(50)})"
            for word in re.findall(r"[A-Za-z]{3,}", " ".join(given.words(given.rng.randint(5, 60))))
        ]
        found.append(f"{licence}\n\ndef {name}(a, b, c=0):\n" + "\n".join(lines) + "\n    return a\n")
    return found


def _copies(given: Planting, count: int) -> list[str]:
    return [given.rng.choice(given.fresh) for _ in range(count)]


KINDS: dict[str, tuple[float, Callable[[Planting, int], list[str]] | None]] = {
    "fresh": (0.40, None),
    "deletions": (0.07, _edited(_delete)),
    "insertions": (0.06, _edited(_insert)),
    "changed words": (0.06, _edited(_change)),
    "shuffled": (0.04, _edited(_shuffle)),
    "boilerplate": (0.07, _boilerplate),
    "chain in order": (0.02, _chains),
    "chain shuffled": (0.02, _chains),
    "template, alike": (0.11, _templates(3)),  # 0.88
    "template, at the threshold": (0.02, _templates(5)),  # 0.81
    "template, unlike": (0.03, _templates(7)),  # 0.74
    "excerpts": (0.03, _excerpts),
    "short": (0.03, _short),
    "repeated word": (0.01, _repeated),
    "code": (0.02, _code),
    "copies": (0.01, _copies),
}
"""Kind -> its share of the corpus, and what makes its texts."""


# ---- the truth ----


class Truth:
    """The shingles of a corpus, and from them similarities without error."""

    def __init__(self, texts: Sequence[str], ngram: int = 5) -> None:
        sets = []
        for start in range(0, len(texts), _BATCH):
            for found, counts in Sketcher(ngram).sketches(pa.array(texts[start : start + _BATCH], pa.large_string())):
                sets += np.split(found, np.cumsum(counts)[:-1])
        self.sizes: Int64s = np.array([len(one) for one in sets], np.int64)
        self._ends = np.cumsum(self.sizes)
        # Numbers instead of hashes, so that a list of documents is found by its place.
        names, self._terms = np.unique(np.concatenate(sets), return_inverse=True)
        self._names = len(names)

    def of(self, number: int) -> Int64s:
        found: Int64s = self._terms[self._ends[number] - self.sizes[number] : self._ends[number]]
        return found

    def similarity(self, one: int, other: int) -> float:
        shared = len(np.intersect1d(self.of(one), self.of(other), assume_unique=True))
        return shared / max(1, int(self.sizes[one] + self.sizes[other]) - shared)

    def best(self, kept: Mask) -> tuple[Floats, Floats]:
        """For each document its greatest similarity to another kept one: to any, and to an earlier one."""
        numbers = np.flatnonzero(kept)
        owners = np.repeat(np.arange(len(self.sizes)), self.sizes)
        chosen = kept[owners]
        order = np.argsort(self._terms[chosen], kind="stable")
        lists = np.searchsorted(numbers, owners[chosen][order])
        starts = np.concatenate(([0], np.cumsum(np.bincount(self._terms[chosen], minlength=self._names))))
        any_, earlier = np.zeros(len(self.sizes)), np.zeros(len(self.sizes))
        for number in range(len(self.sizes)):
            terms = self.of(number)
            if len(terms):
                found = self._similarities(number, _gathered(lists, starts, terms), numbers)
                any_[number] = found.max(initial=0)
                earlier[number] = found[: np.searchsorted(numbers, number)].max(initial=0)
        return any_, earlier

    def _similarities(self, number: int, hits: Int64s, numbers: Int64s) -> Floats:
        shared = np.bincount(hits, minlength=len(numbers))
        found: Floats = shared / (self.sizes[numbers] + self.sizes[number] - shared)
        found[numbers == number] = 0
        return found


def _gathered(lists: Int64s, starts: Int64s, terms: Int64s) -> Int64s:
    """The lists of some terms, end to end."""
    first, sizes = starts[terms], starts[terms + 1] - starts[terms]
    before = np.cumsum(sizes) - sizes
    found: Int64s = lists[np.repeat(first - before, sizes) + np.arange(int(sizes.sum()))]
    return found


# ---- the verdict ----


@dataclass(frozen=True, slots=True)
class Verdict:
    documents: int
    kept: int
    wrong: int
    """Removed although nothing that stays is 0.7 like it."""
    below: int
    """Removed although nothing that stays is as like it as the threshold asks."""
    found: int
    missed: int
    """Of those 0.85 and more like an earlier one that stays."""
    left: int
    """Kept although an earlier one that stays is as like it as the threshold asks."""
    wrong_numbers: list[int] = field(default_factory=list)
    missed_numbers: list[int] = field(default_factory=list)

    @property
    def recall(self) -> float:
        return self.found / max(1, self.found + self.missed)

    @property
    def precision(self) -> float:
        removed = self.documents - self.kept
        return (removed - self.below) / max(1, removed)

    def figures(self) -> dict[str, Any]:
        return {
            "documents": self.documents,
            "kept": self.kept,
            "removed": self.documents - self.kept,
            "wrong": self.wrong,
            "below threshold": self.below,
            "left at the threshold": self.left,
            "recall": round(self.recall, 4),
            "precision": round(self.precision, 4),
        }


def judge(truth: Truth, kept: Mask, *, threshold: float = 0.8, lenient: float = 0.7, clear: float = 0.85) -> Verdict:
    """What is to be said of keeping these documents. Those without a word are left out: they are like nothing."""
    counted = truth.sizes > 0
    any_, earlier = truth.best(kept)
    wrong = counted & ~kept & (any_ < lenient)
    missed = kept & (earlier >= clear)
    return Verdict(
        documents=int(counted.sum()),
        kept=int((kept & counted).sum()),
        wrong=int(wrong.sum()),
        below=int((counted & ~kept & (any_ < threshold)).sum()),
        found=int((~kept & (any_ >= clear)).sum()),
        missed=int(missed.sum()),
        left=int((kept & (earlier >= threshold)).sum()),
        wrong_numbers=np.flatnonzero(wrong).tolist(),
        missed_numbers=np.flatnonzero(missed).tolist(),
    )


# ---- milldam's removals ----


@dataclass(frozen=True, slots=True)
class Removals:
    """What a run of milldam with `write_dropped` made of a corpus."""

    kept: Mask
    named: list[tuple[int, int, float]]
    """Of each near-duplicate its number, the number of what it is said to be like, and how much."""

    def false_names(self, truth: Truth) -> list[int]:
        """Those that name a document that is gone, or a similarity that is not so."""
        return [
            number
            for number, of, similarity in self.named
            if not self.kept[of] or not 0 <= truth.similarity(number, of) - similarity < ROUNDED_BY
        ]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Planted documents, and the folder in which they lie."""

    folder: Path
    documents: list[Document]
    parts: int

    @classmethod
    def write(cls, folder: Path, documents: list[Document], parts: int) -> Corpus:
        """As JSON lines in so many files."""
        folder.mkdir()
        corpus = cls(folder, documents, parts)
        for part in range(parts):
            some = range(part * corpus._part_size, min(len(documents), (part + 1) * corpus._part_size))
            records = ({"id": number, "text": documents[number].text} for number in some)
            lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            (folder / f"part-{part:03d}.jsonl").write_text("".join(lines), encoding="utf-8")
        return corpus

    @property
    def _part_size(self) -> int:
        return -(-len(self.documents) // self.parts)

    @property
    def text_bytes(self) -> int:
        return sum(len(one.text.encode()) for one in self.documents)

    def truth(self) -> Truth:
        return Truth([one.text for one in self.documents])

    def removals(self, out: Path) -> Removals:
        """From the store's dropped documents; a drop whose text is not that of its document is an error."""
        units = [json.loads(line) for line in (out / "run" / "units.jsonl").read_bytes().splitlines()]
        # Rows are counted on in a unit of several files.
        before = {unit["index"]: self._before(unit["slices"][0]["path"]) for unit in units}
        kept, named = np.ones(len(self.documents), bool), []
        dropped = milldam.open(out).audit.get("dropped")
        assert dropped is not None
        with dropped.open("rb") as file:
            lines = b"".join(read_blocks(file, "zst")).splitlines()
        for drop in map(json.loads, lines):
            number, of = before[drop["unit"]] + drop["row"], drop["duplicate_of"]
            if self.documents[number].text.strip() != drop["text"]:
                raise ValueError(f"document {number} is not the one that was dropped: {drop['text'][:80]}")
            kept[number] = False
            if "similarity" in of:
                named.append((number, before[of["unit"]] + of["row"], of["similarity"]))
        return Removals(kept, named)

    def _before(self, path: str) -> int:
        return int(Path(path).stem.partition("-")[2]) * self._part_size
