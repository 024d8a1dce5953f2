"""The report: its pieces are right, hostile text stays text, and a real browser shows the page."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tests.kit.browser import chromium
from tests.kit.damage import edit_manifest
from tests.kit.jobs import TOKENIZER, demo_texts, write_lines

import milldam
from milldam.files import write_sealed
from milldam.report import write_report
from milldam.stores.tokens.manifest import Manifest, Shard, Tally
from milldam.stores.tokens.writer import ShardWriter, Tokens

MB = 10**6
SECTIONS = ("memory", "throughput", "flow", "lengths", "splits", "samples", "configuration", "versions")
ALL_SECTIONS = {*SECTIONS, "packing", "duplicates", "sources"}

# Each of these would change the title or the body if it ran.
HOSTILE = (
    "<script>document.title='owned';document.body.dataset.owned='1'</script>",
    "</title></style></svg></p><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\"><svg onload=\"document.title='owned'\">",
    "<a href=\"javascript:document.title='owned'\">here</a><iframe srcdoc='<script>1</script>'></iframe>",
    '" onmouseover="document.title=\'owned\'" style="position:fixed',
    "--><style>body{display:none}</style><base href=http://127.0.0.1:9/><meta http-equiv=refresh content=0>",
    "nul\0 rtl\u202edesrever\u202c wide\u200bspace tag\U000e0041 line\u2028end bom\ufeff esc\x1b[31m",
)


# ---- stores to report on ----


def write_shard(folder: Path, name: str, split: str, ids: Iterable[list[int]]) -> Shard:
    with ShardWriter(folder, split, "uint16") as writer:
        for document in ids:
            tokens = Tokens(np.array(document, np.uint16), np.array([len(document)], np.int64))
            writer.append(tokens, 4 * len(document), 4 * len(document))
        return writer.commit()


def write_manifest(folder: Path, shards: list[Shard], **changed: Any) -> None:
    values: dict[str, Any] = {
        "dtype": "uint16",
        "vocab_size": 4096,
        "tokenizer": {"name": "demo", "xxh3": "", "eos_token": "<|endoftext|>", "bos_token": None},
        "encoder": "gigatoken 0.10.1",
        "settings": {"eos": "<|endoftext|>", "datasets": [{"weight": 1.0, "split": None}], "seed": 0},
        "input": {"files": 3, "bytes": 1_234_567, "fingerprint": "ab12"},
        "sources": (),
    }
    Manifest(shards=tuple(shards), **(values | changed)).write(folder)


def make_store(folder: Path, texts: dict[str, list[str]], **changed: Any) -> Path:
    """A finished store of some texts by split, with the demo tokenizer and nothing in its run folder."""
    folder.mkdir(parents=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    shutil.copy(TOKENIZER, folder / "tokenizer.json")
    shards = []
    for split, some in texts.items():
        ids = [encoding.ids for encoding in tokenizer.encode_batch(some, add_special_tokens=False)]
        shards.append(write_shard(folder, f"{split}-00000", split, ids))
    write_manifest(folder, shards, **changed)
    return folder


def write_run(out: Path, summary: dict[str, Any], rows: Iterable[tuple[object, ...]] = ()) -> None:
    """`rows` of memory.csv: time, stage, process, anonymous and file-backed bytes."""
    (out / "run").mkdir(exist_ok=True)
    write_sealed(out / "run" / "summary.json", {"job": "preprocess", **summary})
    lines = [("time", "stage", "pid", "anonymous_bytes", "file_bytes"), *rows]
    (out / "run" / "memory.csv").write_text("".join(",".join(map(str, line)) + "\n" for line in lines))


STAGES = ("prepare", 3), ("read and clean", 40), ("dedup", 22), ("encode", 95), ("pack", 14), ("finish", 2)


def near_pair(dropped: str | None, kept: str | None, similarity: float = 0.8) -> dict[str, Any]:
    """A near-duplicate and what it is like, as a run tells of them."""
    sides = {
        name: {"file": f"/data/{name}.jsonl", "line": 1_234, "text": text, "start": 0, "cut": False}
        for name, text in (("dropped", dropped), ("kept", kept))
    }
    return {"similarity": similarity, **sides}


def full_summary() -> dict[str, Any]:
    """Everything that a run can tell."""
    sizes = {"1": 931_000, "2": 61_002, "3": 20_118, "4": 9_902, "5": 4_100, "6": 1_990, "9": 310, "80": 12}
    memory = {"start": 38 * MB, "peak": 402 * MB, "final": 50 * MB, "peak_file_backed": 300 * MB, "budget": 512 * MB}
    by_stage = {name: {"start": 40 * MB, "peak": (90 + 60 * k) * MB, "final": 1} for k, (name, _) in enumerate(STAGES)}
    dedup = {"documents": 1_249_312, "distinct": 1_035_303, "dropped": 214_009, "clusters": sizes}
    near = {"documents": 1_035_303, "distinct": 968_401, "dropped": 66_902, "clusters": {"2": 30_100, "3": 9_000}}
    near["worst"] = [near_pair("one two <b>three</b> four", "one two five four"), near_pair(None, "alone", 0.9)]
    near["worst"].append(near_pair("日本語です", "日本人です", 0.85))
    near["largest"] = [{"dropped": 20_700, "worst": near_pair("日本語です", "日本人です", 0.85)}]
    near["warnings"] = ["20,701 documents (2 % of the corpus) are copies of one text or template."]
    rows = {"strategy": "best_fit", "seq_len": 2048, "rows": 310_441, "tokens": 634_201_120, "padding": 1_582_048}
    rows |= {"tail": 0, "cut_documents": 10_223, "efficiency": 0.99751}
    config = {"datasets": ["data/*.jsonl.zst"], "tokenizer": "gpt2/", "memory": "512MB"}
    work = {"read": 88.1, "clean": 40.2, "encode": 301.8, "write": 12.4}
    return {
        "seconds": 176.4,
        "workers": 4,
        "work": work,
        "stages": {name: float(seconds) for name, seconds in STAGES},
        "memory": memory | {"stages": by_stage},
        "facts": {"dedup": dedup, "near": near, "packing": {"train": rows}, "config": config},
        "machine": {"system": "Linux", "cores": 16},
        "versions": {"python": "3.11.9", "numpy": "2.1.0", "tokenizers": "0.20.3"},
    }


def two_sources() -> tuple[Tally, ...]:
    """What became of the records of two datasets."""
    filtered = {"too_short": 61_404, "repeated_lines": 22_911, "symbol_ratio": 9_760, "stop_words": 3_106}
    duplicates = {"duplicate": 214_009, "near_duplicate": 66_902}
    books = Tally("books", 1_150_000, {"bad_json": 688}, {"dedup": duplicates, "filter": filtered}, 771_220, 600_000)
    return books, Tally("web/*.jsonl", 100_000, documents=100_000, tokens=200_000)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that has everything a report can show."""
    texts = demo_texts()
    folder = tmp_path_factory.mktemp("full") / "corpus.milldam"
    out = make_store(folder, {"train": texts, "val": texts[1::4]}, sources=two_sources())
    times = (one for one, (_, seconds) in enumerate(STAGES) for _ in range(seconds))
    rows = [(1_700_000_000 + k, STAGES[n][0], 7, (90 + 60 * n + k % 9) * MB, k * MB) for k, n in enumerate(times)]
    write_run(out, full_summary(), rows)
    return out


# ---- what a page must not have ----


class Page(HTMLParser):
    """The elements, attributes and visible text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside not in ("style", "title"):
            self.words.append(data)

    @property
    def ids(self) -> set[str]:
        return {value for name, value in self.attributes if name == "id"}

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


ACTIVE = re.compile("script|iframe|img|object|embed|link|base|form|input|video|audio|foreignobject")


def check_harmless(page: Page) -> None:
    """No element that runs or loads, no handler, no address but places on the page."""
    assert [tag for tag in page.tags if ACTIVE.fullmatch(tag)] == []
    assert [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "srcdoc", "action")] == []
    addresses = [value for name, value in page.attributes if name in ("href", "xlink:href")]
    assert addresses and all(value.startswith("#") for value in addresses)
    assert [value for name, value in page.attributes if name == "style" and "url" in value] == []


def read_page(out: Path) -> Page:
    return Page(write_report(out).read_text(encoding="utf-8"))


# ---- the page ----


def test_a_full_run_gives_every_section(full: Path) -> None:
    """What the run told is on the page, and nothing that runs or loads."""
    page = read_page(full)
    check_harmless(page)
    assert page.ids == ALL_SECTIONS
    for shown in (
        "1,249,312",
        "near_duplicate 66,902",
        "871,220 of 1,250,000 records are in the store; 378,092 were dropped, 688 rejected",
        "books 1,150,000 688 378,092 771,220 600,000",
        "web/*.jsonl 100,000 0 0 100,000 200,000",
        "402 MB",
        "512 MB budget",
        "best fit",
        "99.75",
        "gpt2/",
        "3.11.9",
    ):
        assert shown in page.text, shown


def test_near_duplicates_are_shown_side_by_side_with_their_differences_marked(full: Path) -> None:
    """In words, or in characters where there are no spaces; a text that was not read again is said to be missing."""
    markup = write_report(full).read_text(encoding="utf-8")
    assert "one two <mark>&lt;b&gt;three&lt;/b&gt; </mark>four" in markup and "one two <mark>five </mark>four" in markup
    assert "日本<mark>語</mark>です" in markup and "日本<mark>人</mark>です" in markup
    text = read_page(full).text
    for shown in (
        "removed, 0.800 alike: dropped.jsonl, line 1,234",
        "stays: kept.jsonl, line 1,234",
        "kept.jsonl, line 1,234 20,700 2 % 0.850 日本人です",
        "20,701 documents (2 % of the corpus) are copies of one text or template.",
        "not read again",
    ):
        assert shown in text, shown


def test_a_store_alone_gives_a_page(tmp_path: Path) -> None:
    """Without summary or timeline there is a page of what the store itself tells, and no empty section."""
    counted = Tally("a.jsonl", 5, {"no_text": 2}, {"clean": {"empty": 1}}, 2, 9)
    out = make_store(tmp_path / "s", {"train": ["one document", "another"]}, sources=(counted,))
    page = read_page(out)
    assert page.ids == set(SECTIONS)
    assert "of 5 read 1 dropped, 2 rejected" in page.text and "no_text 2" in page.text and "another" in page.text
    assert "2 of 5 records are in the store; 1 were dropped, 2 rejected" in page.text


def test_the_time_of_a_resumed_run_is_that_of_all_its_sessions(tmp_path: Path) -> None:
    """The summary knows the last session only; rates must not be taken from that."""
    out = make_store(tmp_path / "s", {"train": ["one"]})
    rows = [(t, "a", 1, 5, 5) for t in range(101)] + [(7000 + t, "a", 2, 5, 5) for t in range(51)]
    write_run(out, {"seconds": 50.0}, rows)
    assert "Time 2 min 30 s 2 sessions" in read_page(out).text


@pytest.mark.parametrize("damage", [("402000000", "402000001"), ("{", ""), ("", "x" * 5000), ("}", "")])
def test_a_damaged_summary_costs_only_itself(full: Path, tmp_path: Path, damage: tuple[str, str]) -> None:
    """What is not as it was written is not believed; the page is made without it."""
    out = shutil.copytree(full, tmp_path / "s")
    path = out / "run" / "summary.json"
    path.write_text(path.read_text().replace(*damage, 1))
    (out / "run" / "memory.csv").write_text("broken\n1,2,3\nnan,a,1,2,3\n" + "x" * 5000 + "\n")
    page = read_page(out)
    assert set(SECTIONS) <= page.ids and "packing" not in page.ids and "left no record of its time" in page.text


# ---- hostile text ----


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    """Markup in documents, names and settings is shown, not obeyed."""
    evil = "".join(HOSTILE)
    out = make_store(
        tmp_path / "s",
        {"train": list(HOSTILE), "val": [evil]},
        sources=tuple(Tally(one, 9, {one: 1}, {"filter": {one: k + 1}}) for k, one in enumerate(HOSTILE)),
        encoder=evil,
        settings={evil: [evil, {"a": evil}]},
        tokenizer={"name": evil},
        input={"files": 1, "bytes": 1, "fingerprint": evil},
    )
    # The split of a shard is a name from the manifest too.
    edit_manifest(out, lambda manifest: manifest["shards"][1].update(split=HOSTILE[2]))
    summary = full_summary()
    summary["facts"]["packing"] = {evil: summary["facts"]["packing"]["train"] | {"strategy": evil}}
    summary["facts"]["config"] = {evil: evil}
    summary |= {"machine": {evil: evil}, "versions": {evil: evil}}
    summary["work"] = summary["stages"] = {evil: 4.0}
    summary["memory"]["stages"] = {evil: {"start": 1, "peak": 2, "final": 1}}
    stages = [re.sub(r"[,\n\u2028]", " ", one) for one in HOSTILE]
    write_run(out, summary, [(1_700_000_000 + 30 * k, stage, 1, MB, MB) for k, stage in enumerate(stages)])
    page = read_page(out)
    check_harmless(page)
    assert page.ids == ALL_SECTIONS
    assert "<script>document.title" in page.text


# ---- memory over time ----


def memory_svg(folder: Path, rows: Iterable[tuple[object, ...]], **summary: Any) -> str:
    """The chart of a timeline, as markup."""
    out = make_store(folder / "s", {"train": ["one"]})
    write_run(out, summary, rows)
    page = write_report(out).read_text(encoding="utf-8")
    return page[page.index('aria-label="Memory over time"') : page.rindex("</svg>")]


def test_the_time_between_two_sessions_is_left_out(tmp_path: Path) -> None:
    """A run that was ended and resumed an hour later took the time of its two sessions."""
    rows = [(t, "a", 1, 5, 5) for t in range(10)] + [(3600 + t, "a", 2, 5, 5) for t in range(5)]
    drawn = memory_svg(tmp_path, rows)
    assert "<title>a: 13 s</title>" in drawn and drawn.count("resumed") == 1


def test_rows_of_a_later_command_are_not_shown(tmp_path: Path) -> None:
    """What was written after the run was finished belongs to another."""
    mine = [(100 + t, "mine", 2, 5 * MB, 5) for t in range(5)]
    drawn = memory_svg(tmp_path, mine + [(200 + t, "later", 3, 77 * MB, 5) for t in range(5)], finished=109)
    assert set(re.findall("<title>(.*?)</title>", drawn)) == {"mine: 4 s"}
    assert "peak 5 MB" in drawn and "resumed" not in drawn


# ---- lengths ----


def test_lengths_are_those_counted_one_by_one(tmp_path: Path) -> None:
    """Bars, quantiles and the longest are those of the plain list, by split."""
    rng = random.Random(0)
    lengths = [0, 1, 1, 65_535, 65_536, 200_000, *(rng.randrange(3000) for _ in range(60))]
    shards = [
        write_shard(tmp_path, split, split, [[1] * n for n in some])
        for split, some in (("train", lengths), ("val", [4, 70_000]))
    ]
    write_manifest(tmp_path, shards)
    train, val = read_page(tmp_path).text.partition("Tokens Share")[2].split("Tokens Share", 1)
    bars = re.findall(r"([\d,]+) to ([\d,]+) ([\d,]+) [\d<>. ]+ %", train)
    for low, high, count in ([int(number.replace(",", "")) for number in bar] for bar in bars):
        assert count == sum(low <= n <= high for n in lengths)
    assert sum(int(bar[2]) for bar in bars) == len([n for n in lengths if n > 1])
    figures = train[train.index("longest") :].split()
    assert figures[3] == f"{sorted(lengths)[len(lengths) // 2 - 1]:,}" and "200,000" in figures
    assert "over 65,535" in val and "over 65,535" not in train.split("longest")[0]


# ---- in a real browser ----


OVERFLOWING = """<body><iframe src="{}" style="width:400px;height:9000px;border:0"></iframe><script>
onload = () => {{
  const all = [...document.querySelector("iframe").contentDocument.querySelectorAll("body, body *:not(pre)")];
  const wide = all.filter(one => one.scrollWidth > one.clientWidth + 1 && one.clientWidth);
  document.title = "looked at " + (all.length > 100) + " too wide: " + wide.map(one => one.outerHTML.slice(0, 60));
}}
</script>"""


def test_a_report_says_what_was_done_and_marks_what_it_shows_a_part_of(tmp_path: Path) -> None:
    """Excerpts and highlighting are explained, idle stages are not listed, near-dedup is not called exact."""
    rng = random.Random(0)
    known = ["river", "water", "dam", "mill", "stone", "wheel", "flow", "bank", "reed"]
    words = [rng.choices(known, k=500) for _ in range(4)]
    texts = [" ".join(one) for one in [*words, [*words[0][:400], "changed", *words[0][401:]]]]
    evaluation = write_lines(tmp_path / "evaluation.jsonl", [" ".join(words[2][100:140])])
    lines = write_lines(tmp_path / "a.jsonl", texts)
    config = {"datasets": str(lines), "tokenizer": str(TOKENIZER), "out": str(tmp_path / "out"), "memory": "4GB"}
    milldam.preprocess(config | {"dedup": "near", "decontaminate": str(evaluation)})
    page = write_report(tmp_path / "out").read_text(encoding="utf-8")
    stages = re.findall(r"<li><b>(\w+)</b>", page)
    assert stages == ["read", "dedup", "decontaminate"]
    assert "method: near, after exact" in page and "Exact duplicates" not in page
    assert page.count("<mark>Highlighted</mark>: ") == 2
    assert f"… <mark>{' '.join(words[2][100:140])}</mark> …" in page
    assert re.search(r"excerpt from character [\d,]+</span></figcaption><p dir=\"auto\">… ", page)


@pytest.mark.slow
def test_nothing_is_clipped_where_the_page_is_narrow(tmp_path: Path, full: Path) -> None:
    """At 400 pixels no element is wider than its place, so nothing is cut off or has to be scrolled to."""
    frame = tmp_path / "frame.html"
    frame.write_text(OVERFLOWING.format(write_report(full).resolve().as_uri()))
    dom = chromium(tmp_path, frame, "--dump-dom", "--allow-file-access-from-files", "--window-size=600,900")
    assert "<title>looked at true too wide: </title>" in dom
