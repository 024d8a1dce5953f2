"""Near-duplicates: what a shingle is, what a signature promises, which documents are dropped."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import chain, combinations, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.dedup.test_drops import read_drops

from milldam.dedup import near, shingles, sketches
from milldam.dedup.candidates import WINDOW, NearWork, bucket_pairs
from milldam.dedup.drops import EXACT, NEAR, DropWriter, drop_file_name, place_of
from milldam.dedup.keys import KeyLayout, SortedKeys
from milldam.dedup.minhash import NO_WORDS, MinHasher, SignatureFiles, signature_file_name, unit_name
from milldam.dedup.near import NearResolved, drop, resolve_near
from milldam.dedup.ranking import preference_file_name
from milldam.dedup.shingles import shingle
from milldam.dedup.sketches import Sketcher, SketchFiles, SketchWriter, sketch_paths
from milldam.errors import InputError, ResourceError
from milldam.rules import NearRules

RULES = NearRules(ngram=5, bands=32, rows=8, threshold=0.8)
MEMORY, DROPS = 32 << 20, drop_file_name(NEAR, 0)
Drops = dict[tuple[int, int], tuple[int, int]]
"""(unit, row) of a dropped document -> that of the one that is kept."""


def array(*texts: str) -> pa.LargeStringArray:
    return pa.array(texts, pa.large_string())


def sets(texts: list[str], ngram: int = 2) -> list[set[int]]:
    """The shingles of each text."""
    found = shingle(pa.array(texts, pa.large_string()), ngram)
    return [set(found.flat[a:b].tolist()) for a, b in zip(found.offsets[:-1], found.offsets[1:], strict=True)]


def write_units(folder: Path, units: list[list[str]], rules: NearRules = RULES) -> None:
    folder.mkdir(exist_ok=True)
    hasher, sketcher = MinHasher(rules), Sketcher(rules.ngram)
    for unit, texts in enumerate(units):
        documents = pa.array(texts, pa.large_string())
        (folder / signature_file_name(unit)).write_bytes(hasher.signatures(documents).tobytes())
        with SketchWriter(*sketch_paths(folder, unit_name(unit))) as new:
            row = 0
            for values, counts in sketcher.sketches(documents):
                new.add(np.arange(row, row + len(counts)), values, counts)
                row += len(counts)
            new.commit()
        lengths = [len(text.encode()) for text in texts]
        keys = [10**6 - length if rules.prefer == "longest" else length for length in lengths]
        np.array(keys, np.uint64).tofile(folder / preference_file_name(unit))


def resolve(
    folder: Path, *, exempt_below: int = 0, memory: int = MEMORY, rules: NearRules = RULES, threads: int = 1
) -> tuple[NearResolved, Drops]:
    """All steps; what is in the folder stays, to be resolved again."""
    work = NearWork(
        folder=folder, rules=rules, exempt_below=exempt_below, memory_bytes=memory, mark_all=True, threads=threads
    )
    resolved = resolve_near(work)
    drops = {place: of for place, (of, _) in read_drops(folder / DROPS).items()}
    assert len(drops) == resolved.dropped
    return resolved, drops


class Writer:
    """Makes up documents of random words, and variants at a known similarity."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)

    def words(self, count: int) -> list[str]:
        return [f"w{number}" for number in self._random.integers(0, 20_000, count).tolist()]

    def text(self, count: int = 200) -> str:
        return " ".join(self.words(count))

    def pair(self, replaced: int, every: int) -> tuple[str, str]:
        """Two texts that differ in single words, one in `every` n-grams: Jaccard (every - 5) / (every + 5)."""
        one = self.words(every * replaced + 4)
        other = list(one)
        for k in range(replaced):
            other[k * every + 4] = f"x{self._random.integers(0, 10**9)}"
        return " ".join(one), " ".join(other)


# ---- shingles ----


def test_words_are_the_same_whatever_stands_between_them() -> None:
    """Case, white space, punctuation, curly quotes and non-breaking spaces make no difference."""
    plain, *others = sets(["he said no way", "He said: NO way!", "\n he\tsaid (no)  way.", "“He said” – no\u00a0way…"])
    assert len(plain) == 3
    assert all(other == plain for other in others)


def test_order_and_borders_of_words_matter() -> None:
    """The same letters in other words, or the same words in another order, are other shingles."""
    one, *others = sets(["ab cd", "cd ab", "abc d", "a bcd", "abcd"])
    assert all(not one & other for other in others)


def test_words_of_any_length_are_told_apart_by_any_byte() -> None:
    """A change of one letter at any place gives another shingle, in short words and in those of several blocks."""
    for length in (1, 7, 8, 9, 16, 17, 63, 64, 65, 200):
        words = ["a" * length] + ["a" * k + "b" + "a" * (length - k - 1) for k in range(length)]
        found = [tuple(sorted(one)) for one in sets(words)]
        assert len(set(found)) == len(words)
        assert len({tuple(sorted(one)) for one in sets(["a" * length, "a" * (length + 1)])}) == 2


def test_ngrams_stay_within_their_document() -> None:
    """A document has the same shingles alone and among others, also where no space is between them."""
    texts = ["one two three", "", "four", "five six seven eight", "...", "é", "seven eight nine"]
    assert sets(texts) == [sets([text])[0] for text in texts]
    assert [len(found) for found in sets(texts)] == [2, 0, 1, 3, 0, 1, 2]


def test_fewer_words_than_an_ngram_are_one_shingle() -> None:
    """Of all the document's words; without words there is none."""
    found = sets(["a b", "a b c", "b a", "a", "", "?!"], ngram=5)
    assert [len(one) for one in found] == [1, 1, 1, 1, 0, 0]
    assert len(set.union(*found)) == 4


@pytest.mark.parametrize(
    "text", ["我们今天去公园散步", "ひらがなとカタカナ", "한국어문장입니다", "ภาษาไทยไม่มี", "ភាសាខ្មែរ", "😀😃😄😁"]
)
def test_scripts_without_spaces_have_a_word_a_character(text: str) -> None:
    """So that a changed character changes `ngram` shingles, not all of them."""
    assert shingle(array(text), 1).offsets.tolist() == [0, len(text)]
    assert shingle(array(f"abc{text}def"), 1).offsets.tolist() == [0, len(text) + 2]


def test_other_scripts_keep_their_words_whole_in_lower_case() -> None:
    """Greek, Cyrillic, Arabic and accented Latin words are runs, as ASCII ones are."""
    one, other = sets(
        ["Привет МИР Ελλάδα ÉCOLE naïve مرحبا بالعالم", "привет мир ελλάδα école NAÏVE مرحبا بالعالم"], ngram=1
    )
    assert one == other
    assert len(one) == 7


def reference_words(text: str) -> list[str]:
    """What a word is, the slow way, for text of ASCII and Han."""
    return re.findall(r"[a-z0-9]+|[\u4e00-\u9fff]", text.lower())


@given(st.lists(st.text("abZ09 .,-漢字", max_size=40), max_size=8), st.integers(1, 6))
def test_shingles_are_those_of_a_plain_loop(texts: list[str], ngram: int) -> None:
    """Equal n-grams of words have equal hashes, others have not, in every document."""
    found = shingle(pa.array(texts, pa.large_string()), ngram)
    names: dict[int, tuple[str, ...]] = {}
    expected = []
    for text in texts:
        words = reference_words(text)
        count = max(len(words) - ngram + 1, min(len(words), 1))
        expected += [tuple(words[k : k + ngram]) for k in range(count)]
    assert len(found.flat) == len(expected)
    for value, gram in zip(found.flat.tolist(), expected, strict=True):
        assert names.setdefault(value, gram) == gram
    assert len(set(names.values())) == len(names)


# ---- signatures ----


def test_a_signature_does_not_depend_on_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, among others, in other slices, in a slice of an array: the same row."""
    writer = Writer()
    texts = ["", *(writer.text(count) for count in (1, 3, 10, 40, 100, 700, 2000)), "...", "汉字" * 300]
    hasher = MinHasher(RULES)
    together = hasher.signatures(pa.array(texts, pa.large_string()))
    assert (together == np.concatenate([hasher.signatures(array(text)) for text in texts])).all()
    assert (together[3:7] == hasher.signatures(pa.array(texts, pa.large_string())[3:7])).all()
    monkeypatch.setattr(shingles, "SLICE_DOCUMENTS", 3)
    monkeypatch.setattr(shingles, "SLICE_BYTES", 1000)
    assert (together == hasher.signatures(pa.array(texts, pa.large_string()))).all()


def test_documents_without_words_are_marked() -> None:
    """And only they hold the mark, in any place."""
    rows = MinHasher(RULES).signatures(array("", "one", " ?! \n", *(f"tiny{k}" for k in range(2000))))
    assert (rows == NO_WORDS).all(axis=1).nonzero()[0].tolist() == [0, 2]
    assert (rows == NO_WORDS).any(axis=1).sum() == 2
    assert MinHasher(RULES).signatures(array()).shape == (0, 256)


def test_tiny_documents_are_told_apart() -> None:
    """Documents of one shingle agree no more than chance has it, though all their bins borrow from one."""
    rows = MinHasher(RULES).signatures(pa.array([f"word{k}" for k in range(300)], pa.large_string()))
    equal = [(rows[i] == rows[j]).mean() for i, j in combinations(range(300), 2)]
    assert np.mean(equal) == pytest.approx(1 / 254, abs=0.001)
    assert max(equal) < 0.1


@pytest.mark.parametrize(("replaced", "every"), [(2, 45), (8, 45), (3, 15), (20, 15), (10, 24)])
def test_the_estimate_is_the_similarity(replaced: int, every: int) -> None:
    """On average without bias; its spread is near that of as many permutations."""
    writer, hasher = Writer(), MinHasher(RULES)
    pairs = [writer.pair(replaced, every) for _ in range(300)]
    one, other = (hasher.signatures(pa.array(side, pa.large_string())) for side in zip(*pairs, strict=True))
    true = (every - 5) / (every + 5)
    estimates = (one == other).mean(axis=1)
    assert estimates.mean() == pytest.approx(true + (1 - true) / 254, abs=0.007)
    assert estimates.std() < 1.3 * (true * (1 - true) / 256) ** 0.5


def test_signature_files_read_as_one_table(tmp_path: Path) -> None:
    """Rows come back by position over all units, in any order, empty units included."""
    units = [["a b c", "d e f"], [], ["", "g h i", "j k l"]]
    write_units(tmp_path, units)
    files = SignatureFiles(tmp_path, 256)
    everything = MinHasher(RULES).signatures(pa.array([text for unit in units for text in unit], pa.large_string()))
    assert files.documents == 5
    assert (np.concatenate([rows for _, rows in files.blocks(2)]) == everything).all()
    assert [base for base, _ in files.blocks(2)] == [0, 2, 4]
    order = np.array([4, 0, 3, 3, 1])
    shifted = np.roll(order, 1)
    expected = (everything[order] == everything[shifted]).sum(axis=1)
    assert (files.agreements(order, shifted) == expected).all()
    assert [part.tolist() for part in files.named(order)] == [[2, 0, 2, 2, 0], [2, 0, 1, 1, 1]]


def test_signatures_of_another_size_are_refused(tmp_path: Path) -> None:
    """With the file's name and what to do."""
    write_units(tmp_path, [["a b c"]], NearRules(bands=3, rows=5))
    with pytest.raises(InputError, match=r"signatures-0000000\.bin.*256 values"):
        resolve(tmp_path)


# ---- which documents are dropped ----


def planted(seed: int, count: int = 150) -> tuple[list[str], set[int]]:
    """Documents in random order: pairs at 0.8 and at 0.5, and unrelated ones. And the second of each pair at 0.8."""
    writer, random = Writer(seed), np.random.default_rng(seed)
    near = [writer.pair(int(replaced), 45) for replaced in random.integers(2, 23, count)]
    half = [writer.pair(int(replaced), 15) for replaced in random.integers(6, 60, count)]
    alone = [writer.text(int(size)) for size in random.integers(100, 1000, count)]
    texts = [text for pair in near + half for text in pair] + alone
    order = random.permutation(len(texts))
    place = np.argsort(order)
    return [texts[k] for k in order], {int(max(place[2 * k], place[2 * k + 1])) for k in range(count)}


def test_planted_pairs_are_found_and_no_others(tmp_path: Path) -> None:
    """Pairs at Jaccard 0.8 among half-similar and unrelated documents: recall and precision of at least 0.95."""
    found = right = total = 0
    for seed in range(2):
        texts, expected = planted(seed)
        write_units(tmp_path, [texts])
        _, drops = resolve(tmp_path)
        rows = {row for _, row in drops}
        found, right, total = found + len(rows), right + len(rows & expected), total + len(expected)
    assert right / total >= 0.95
    assert right / found >= 0.95


def test_pairs_below_the_threshold_are_left_alone(tmp_path: Path) -> None:
    """At 0.64, well below the threshold, nothing is dropped, though signatures of many agree in a band."""
    writer = Writer(5)
    write_units(tmp_path, [[text for _ in range(200) for text in writer.pair(10, 23)]])
    resolved, _ = resolve(tmp_path)
    assert resolved.dropped == 0


def jaccard(one: str, other: str) -> float:
    a, b = sets([one, other], 5)
    return len(a & b) / len(a | b) if a | b else 0.0


def test_real_near_duplicates_are_found(shared_data: Path, tmp_path: Path) -> None:
    """In the groups of the data beside the project: what is alike is dropped, what is not is kept."""
    path = shared_data / "messy/near_dups.jsonl"
    if not path.exists():
        pytest.skip(f"no {path}")
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    write_units(tmp_path, [texts])
    _, drops = resolve(tmp_path)
    alike = [(i, j) for g in range(0, len(texts), 3) for i, j in combinations(range(g, g + 3), 2)]
    alike = [(i, j) for i, j in alike if jaccard(texts[i], texts[j]) >= 0.8]
    missed = [(i, j) for i, j in alike if (0, j) not in drops]
    assert len(alike) > 50
    assert len(missed) <= 0.05 * len(alike)
    assert all(jaccard(texts[row], texts[of]) >= 0.8 for (_, row), (_, of) in drops.items())


def test_the_first_of_a_cluster_is_kept(tmp_path: Path) -> None:
    """Over units, in plan order; each dropped document names it; clusters are counted by size."""
    writer = Writer()
    a, b, c = writer.text(), writer.text(), writer.text()
    write_units(tmp_path, [[c, a], [], [b, a + " more", "", b], [writer.text(), a + " again", ""]])
    resolved, drops = resolve(tmp_path)
    assert drops == {(2, 1): (0, 1), (2, 3): (2, 0), (3, 1): (0, 1)}
    assert (resolved.documents, resolved.clusters, resolved.cluster_sizes) == (9, 2, {2: 1, 3: 1})


def chain_of(count: int, words: int = 400, moved: int = 20) -> list[str]:
    """Documents of random words, each a window over one long text that has moved a little on."""
    everything = Writer(1).words(words + count * moved)
    return [" ".join(everything[k * moved : k * moved + words]) for k in range(count)]


def test_a_chain_keeps_what_is_unlike_all_that_stay(tmp_path: Path) -> None:
    """Forty documents, each 0.9 like the one before: a third stays, and each dropped one is like one that does."""
    texts = chain_of(40)
    assert 0.9 < jaccard(texts[0], texts[1]) < 0.91 and jaccard(texts[0], texts[39]) == 0
    write_units(tmp_path, [texts[:13], texts[13:]])
    _, drops = resolve(tmp_path)
    names = [(0, row) for row in range(13)] + [(1, row) for row in range(27)]
    text_of = dict(zip(names, texts, strict=True))
    assert [name for name in names if name not in drops] == names[::3]
    for dropped, kept in drops.items():
        assert kept not in drops
        assert jaccard(text_of[dropped], text_of[kept]) >= 0.8


@pytest.mark.parametrize("prefer", ["first", "longest", "shortest"])
def test_what_stays_is_what_a_plain_loop_keeps(tmp_path: Path, prefer: str) -> None:
    """In the order of preference, a document is dropped when one that stays is like it; its drop tells how much."""
    random = np.random.default_rng(11)
    texts = chain_of(25)
    for _ in range(40):
        words = Writer(int(random.integers(10**6))).words(int(random.integers(20, 300)))
        for _ in range(int(random.integers(1, 9))):
            copy = [*words, *(f"y{k}" for k in random.integers(0, 10**6, int(random.integers(0, 40))))]
            copy[int(random.integers(len(copy)))] = f"x{random.integers(10**6)}"
            texts.append(" ".join(copy))
    texts = [texts[k] for k in random.permutation(len(texts))]
    rules = NearRules(prefer=prefer)  # type: ignore[arg-type]
    write_units(tmp_path, [texts], rules)
    _, drops = resolve(tmp_path, rules=rules)
    shingle_sets = sets(texts, 5)
    sign = {"first": 0, "longest": -1, "shortest": 1}[prefer]
    stays: list[int] = []
    for row in sorted(range(len(texts)), key=lambda row: (sign * len(texts[row].encode()), row)):
        alike = (len(shingle_sets[row] & shingle_sets[k]) / len(shingle_sets[row] | shingle_sets[k]) for k in stays)
        if not any(similarity >= 0.8 for similarity in alike):
            stays.append(row)
    assert {row for _, row in drops} == set(range(len(texts))) - set(stays)
    for (_, row), ((_, of), similarity) in read_drops(tmp_path / DROPS).items():
        assert similarity == int(jaccard(texts[row], texts[of]) * 1000 + 1e-9)


def test_thousands_of_like_documents_cost_pairs_by_their_number(tmp_path: Path) -> None:
    """A template with other words at its end, over and over: some pairs a document, and the first one stays."""
    writer = Writer(3)
    base = writer.words(300)
    texts = [" ".join([*base, *writer.words(20)]) for _ in range(3000)]
    write_units(tmp_path, [texts])
    resolved, drops = resolve(tmp_path)
    assert resolved.candidates < 40 * len(texts)
    assert resolved.dropped == len(texts) - 1 and set(drops.values()) == {(0, 0)}


def test_what_the_first_of_a_bucket_hides_is_found(tmp_path: Path) -> None:
    """Documents like one that is dropped, and like each other: the first of them stays, the others do not."""
    texts = chain_of(3, moved=35)  # the first like the second, the second like the third, the first unlike the third
    third = texts[2].split()
    texts += [" ".join([*third[:k], f"z{k}", *third[k + 1 :]]) for k in range(100, 300)]
    write_units(tmp_path, [texts])
    assert set(resolve(tmp_path)[1].items()) == {((0, row), (0, 0 if row == 1 else 2)) for row in [1, *range(3, 203)]}


def test_exempt_units_are_kept_whole_and_count(tmp_path: Path) -> None:
    """What is like a document of theirs is dropped elsewhere only."""
    text = Writer().text()
    write_units(tmp_path, [[text, text + " a"], [text + " b"], [text + " c"]])
    assert resolve(tmp_path, exempt_below=2)[1] == {(2, 0): (0, 0)}
    assert set(resolve(tmp_path, exempt_below=0)[1]) == {(0, 1), (1, 0), (2, 0)}


def test_exact_duplicates_take_no_part(tmp_path: Path) -> None:
    """What is dropped already is neither dropped again nor the one that is kept."""
    text = Writer().text()
    write_units(tmp_path, [["", text], [text, text + " a", text + " b"]])
    with DropWriter(tmp_path / drop_file_name(EXACT, 0)) as writer:
        writer.add(place_of(np.array([0, 1]), np.array([1, 1])), np.array([0, 0]))
        writer.commit()
    resolved, drops = resolve(tmp_path)
    assert drops == {(1, 2): (1, 0)}
    assert resolved.cluster_sizes == {2: 1}


def test_empty_documents_are_never_near_duplicates(tmp_path: Path) -> None:
    """However many there are; a folder of nothing gives an empty drop file."""
    write_units(tmp_path, [["", "...", "", "?"]])
    assert resolve(tmp_path) == (NearResolved(4, 0, 0, 0, 0), {})
    empty = tmp_path / "empty"
    empty.mkdir()
    assert resolve(empty) == (NearResolved(0, 0, 0, 0, 0), {})


def test_chinese_near_duplicates_are_found(tmp_path: Path) -> None:
    """Without a space in them: one character in a hundred is another."""
    random = np.random.default_rng(3)
    texts = []
    for _ in range(30):
        characters = random.integers(0x4E00, 0x6000, 500)
        texts.append("".join(map(chr, characters)))
        characters[50::100] += 0x2000
        texts.append("".join(map(chr, characters)))
    write_units(tmp_path, [texts])
    assert set(resolve(tmp_path)[1].items()) == {((0, 2 * k + 1), (0, 2 * k)) for k in range(30)}


@pytest.mark.slow
def test_the_result_depends_on_the_documents_alone(tmp_path: Path) -> None:
    """Not on memory or the cut into units, with clusters of many sizes and one huge bucket."""
    writer, random = Writer(9), np.random.default_rng(9)
    texts, _ = planted(9, 40)
    base = writer.words(300)
    texts += [" ".join([*base, f"v{k}"]) for k in range(3000)]
    texts = [texts[k] for k in random.permutation(len(texts))]
    write_units(tmp_path / "one", [texts])
    cuts = [0, 7, 7, 100, 1200, len(texts)]
    write_units(tmp_path / "cut", [texts[a:b] for a, b in pairwise(cuts)])
    expected, drops = resolve(tmp_path / "one")
    stored = (tmp_path / "one" / DROPS).read_bytes()
    for memory in (1, 10**6, 10**9):
        assert resolve(tmp_path / "one", memory=memory)[0] == expected
        assert (tmp_path / "one" / DROPS).read_bytes() == stored
    resolved, other = resolve(tmp_path / "cut", memory=1)
    places = {(unit, row): cuts[unit] + row for unit in range(5) for row in range(cuts[unit + 1] - cuts[unit])}
    assert replace(resolved, shown=expected.shown) == expected
    shown = [(places[one.dropped], places[one.kept], one.similarity) for one in resolved.shown.pairs]
    assert shown == [(one.dropped[1], one.kept[1], one.similarity) for one in expected.shown.pairs]
    assert {(0, places[a]): (0, places[b]) for a, b in other.items()} == drops
    assert expected.cluster_sizes[2048] == 1


@pytest.mark.parametrize("prefer", ["first", "longest"])
def test_threads_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefer: str) -> None:
    """Drops, figures and what is shown, where rounds find more than the pairs of buckets do."""
    texts = chain_of(3, moved=35) + planted(3, 30)[0]
    third = texts[2].split()
    texts += [" ".join([*third[:k], f"z{k}", *third[k + 1 :]]) for k in range(100, 300)]
    rules = NearRules(prefer=prefer)  # type: ignore[arg-type]
    write_units(tmp_path, [texts[:50], texts[50:60], texts[60:]], rules)
    expected = resolve(tmp_path, rules=rules)
    assert expected[0].shown.pairs and expected[0].shown.clusters
    monkeypatch.setattr(near, "_EDGES_A_THREAD", 1)
    for threads, memory in ((1, MEMORY), (3, MEMORY), (4, 1)):
        assert resolve(tmp_path, rules=rules, threads=threads, memory=memory) == expected


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """Not even what a killed attempt had left: the folder holds signatures and drops."""
    write_units(tmp_path, [["a b c d e f g", "a b c d e f g"]])
    (tmp_path / "near-work").mkdir()
    (tmp_path / "near-work/band-0").write_bytes(b"rubbish.")
    assert resolve(tmp_path)[1] == {(0, 1): (0, 0)}
    kept = (DROPS, "preferences-0000000.bin", "signatures-0000000.bin")
    sketched = ("sketches-0000000.bin", "sketches-0000000.rows")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted((*kept, *sketched))


# ---- the parts: keys on disk, buckets, decisions ----


@given(st.lists(st.lists(st.integers(0, 40) | st.integers(0, 2**64 - 1), max_size=30), max_size=6), st.integers(1, 20))
def test_keys_come_back_in_order(tmp_path: Path, parts: list[list[int]], block: int) -> None:
    """All of them, in blocks that hold no more than asked for unless they are all equal."""
    keys = SortedKeys(tmp_path / "keys", 7)
    for part in parts:
        keys.add(np.array(part, dtype=np.uint64))
    blocks = list(keys.blocks(block))
    keys.remove()
    assert [int(key) for found in blocks for key in found] == sorted(key for part in parts for key in part)
    assert all(len(found) <= block or len(set(found.tolist())) == 1 for found in blocks)
    assert not (tmp_path / "keys").exists()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 40), st.integers(0, 3))
def test_a_bucket_pairs_neighbours_and_a_leader(tmp_path: Path, buckets: list[int], cut: int, leader: int) -> None:
    """Wherever the sorted keys are cut into blocks; so that pairs grow with a bucket, not with its square."""
    layout = KeyLayout(len(buckets))
    keys = SortedKeys(tmp_path / "keys", 7)
    keys.add(layout.of_hashes(np.array(buckets, np.uint64) << np.uint64(60), np.arange(len(buckets))))
    found = set()
    for first, second in chain.from_iterable(bucket_pairs(keys.blocks(cut), layout, leader=leader)):
        found |= set(zip(first.tolist(), second.tolist(), strict=True))
    keys.remove()
    expected = set()
    for bucket in set(buckets):
        members = [k for k, one in enumerate(buckets) if one == bucket]
        for place, one in enumerate(members):
            expected |= {(other, one) for other in members[max(0, place - WINDOW) : place]}
            expected |= {(members[leader], one)} if place > leader else set()
    assert found == expected


@pytest.mark.parametrize("documents", [1, 2, 1000, 2**30 + 1, 2**32])
def test_keys_hold_any_number_of_documents(documents: int) -> None:
    """Positions and pairs come back from their keys, up to the last position; more documents are refused."""
    layout, positions = KeyLayout(documents), np.unique(np.array([0, documents // 3, documents - 1]))
    hashes = np.array([0, 2**63 + 12345, 2**64 - 1], dtype=np.uint64)[: len(positions)]
    assert layout.hashes(layout.of_hashes(hashes, positions))[1].tolist() == positions.tolist()
    first, second = layout.pairs(layout.of_pairs(positions, positions[::-1]))
    assert (first.tolist(), second.tolist()) == (positions.tolist(), positions[::-1].tolist())
    with pytest.raises(ResourceError, match="at most 4,294,967,296 documents"):
        KeyLayout(2**32 + 1)


@pytest.mark.parametrize(
    "text", ["one é " * 120_000, "漢字かな" * 60_000, " ".join(f"w{k * k}" for k in range(70_000))]
)
def test_a_text_of_several_stretches_has_the_sketch_of_its_shingles(text: str) -> None:
    """The smallest hashes of all of it, between other texts."""
    found = np.concatenate([values for values, _ in Sketcher(3).sketches(array("a b c", text, "d e f"))])
    expected = [
        np.unique(shingle(array(one), 3).flat >> np.uint64(32))[: sketches.MOST] for one in ("a b c", text, "d e f")
    ]
    assert found.tolist() == np.concatenate(expected).tolist()


@given(
    st.integers(1, 30).flatmap(
        lambda n: st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda e: e[0] != e[1]))
    )
)
def test_decisions_are_those_of_a_plain_loop(edges: list[tuple[int, int]]) -> None:
    """A document is dropped when one before it stays and is like it, however long the chains are."""
    sorted_edges = sorted({(max(edge), min(edge)) for edge in edges})
    expected: set[int] = set()
    for document in range(30):
        if any(second == document and first not in expected for second, first in sorted_edges):
            expected.add(document)
    second, first = np.ascontiguousarray(np.array(sorted_edges, np.int64).reshape(-1, 2).T)
    dropped = np.zeros(30, np.bool_)
    drop(first, second, dropped)
    assert np.flatnonzero(dropped).tolist() == sorted(expected)


# ---- sketches ----


def similarity(folder: Path, one: str, other: str) -> float:
    write_units(folder, [[one], [other]])
    files = SketchFiles(folder, SignatureFiles(folder, 256))
    ((common, union),) = files.compare(np.array([0]), np.array([1]), 1)
    return float(common[0] / union[0])


def test_similarity_is_exact_and_of_giants_an_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to `MOST` shingles; above, of the smallest hashes of both, within some standard deviations."""
    writer = Writer(4)
    one, other = writer.pair(100, 45)
    assert similarity(tmp_path, one, other) == jaccard(one, other)
    monkeypatch.setattr(sketches, "MOST", 1000)
    for short, long in ((one, other), (one, other + writer.text(9000)), (other[:2000], one)):
        assert similarity(tmp_path, short, long) == pytest.approx(jaccard(short, long), abs=0.05)
