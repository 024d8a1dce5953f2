"""The main job from text to store, through the library and the command line: right ids, equal bytes, plain refusals."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.kit.jobs import (
    EOS_TEXT,
    MILLDAM,
    TOKENIZER,
    Corpus,
    demo_texts,
    documents,
    expected_ids,
    invoke,
    make_texts,
    run_here,
    run_milldam,
    set_aside,
    store_bytes,
    write_corpus,
    write_lines,
)
from tests.kit.quick import first_quick
from tests.kit.token_stores import shard_file

import milldam
from milldam.errors import InputError, ResourceError
from milldam.stores.tokens.reader import Store
from milldam.stores.verify import verify

TEXTS = ["The mill stands.", "Die Mühle steht.", "水車は回る。", "x", "a longer one " * 40]


def tokenize(inputs: Any, out: Path, **options: Any) -> Store:
    """The library's verb with the demo tokenizer, in this process."""
    return milldam.tokenize(inputs, out, **({"tokenizer": TOKENIZER, "workers": 1} | options))


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A few documents as JSON Lines."""
    return write_lines(tmp_path / "corpus.jsonl", TEXTS)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Enough for many units of 100 KB, with broken lines in most of them."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", 1_500_000, broken_every=60)


@pytest.fixture(scope="module")
def reference(corpus: Corpus) -> Path:
    """The store that every other way of doing the same job must equal byte for byte."""
    out = corpus.path.with_name("reference")
    tokenize(corpus.path, out, shard_size="100KB")
    return out


# ---- the right ids ----


@pytest.mark.parametrize("encoder", ["gigatoken", "huggingface"])
def test_ids_are_those_of_hf_tokenizers_with_eos(tmp_path: Path, encoder: str) -> None:
    """Document for document the ids are those of HF tokenizers, closed by EOS."""
    texts = demo_texts()
    store = tokenize(write_lines(tmp_path / "c.jsonl", texts), tmp_path / "s", encoder=encoder)
    assert documents(store) == expected_ids(texts)
    assert (store.vocab_size, store.dtype) == (milldam.open(tmp_path / "s").tokenizer.get_vocab_size(), np.uint16)


def test_a_larger_corpus_comes_out_in_order_without_its_broken_lines(corpus: Corpus, reference: Path) -> None:
    """Over many units all readable documents are there once, in order; the rest is counted by reason."""
    store = milldam.open(reference)
    assert len(store.manifest.shards) > 10
    assert documents(store) == expected_ids(corpus.texts)
    assert store.manifest.tally.rejected == Counter(reason for _, reason in corpus.broken)
    assert list(verify(reference)) == []
    assert store.manifest.totals["characters"] == sum(map(len, corpus.texts))
    assert store.manifest.totals["text_bytes"] == sum(len(text.encode()) for text in corpus.texts)


def test_rejects_have_the_line_in_the_whole_file(corpus: Corpus, reference: Path) -> None:
    """Every broken record is listed in order, with its file, its line, its reason and its text."""
    rejects = set_aside(reference)
    assert [(reject["line"], reject["reason"]) for reject in rejects] == corpus.broken
    raw = corpus.path.read_bytes().split(b"\n")
    for reject in rejects:
        assert reject["file"] == str(corpus.path)
        assert reject["record"] == raw[reject["line"] - 1].decode("utf-8", "backslashreplace")
        assert "origin" not in reject


def test_a_script_without_main_guard_may_use_workers(corpus: Corpus, reference: Path, tmp_path: Path) -> None:
    """Workers are started so that a plain script that calls milldam is not run again in each of them."""
    script = tmp_path / "script.py"
    script.write_text(
        "import milldam\nprint('once')\n"
        f"milldam.tokenize({str(corpus.path)!r}, 's', tokenizer={str(TOKENIZER)!r}, workers=2, shard_size='100KB')\n"
    )
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "once\n"), done.stderr
    assert store_bytes(tmp_path / "s") == store_bytes(reference)


def test_special_tokens_of_every_policy(tmp_path: Path, lines: Path) -> None:
    """EOS may be left out or named, BOS asked for; what the tokenizer does not have is refused."""
    plain = expected_ids(TEXTS, eos=None)
    assert documents(tokenize(lines, tmp_path / "a", eos="none")) == plain
    assert documents(tokenize(lines, tmp_path / "b", eos=EOS_TEXT)) == [[*ids, 0] for ids in plain]
    assert documents(tokenize(lines, tmp_path / "c", bos=EOS_TEXT)) == [[0, *ids, 0] for ids in plain]
    refused = invoke("tokenize", lines, "-o", tmp_path / "d", "--tokenizer", TOKENIZER, "--eos", "<|endoftxt|>")
    assert refused.exit_code == 2
    assert '--eos "<|endoftxt|>": the tokenizer has no such token. Did you mean "<|endoftext|>"?' in refused.stderr


@pytest.mark.parametrize("encoder", ["gigatoken", "huggingface"])
def test_the_text_of_a_special_token_is_special_or_plain(tmp_path: Path, encoder: str) -> None:
    """A literal <|endoftext|> in a document is the token by default, and ordinary text on request."""
    texts = [f"before {EOS_TEXT} after", EOS_TEXT, "plain"]
    lines = write_lines(tmp_path / "c.jsonl", texts)
    special = documents(tokenize(lines, tmp_path / "a", special_text="special", encoder=encoder))
    assert special == expected_ids(texts)
    assert special[0].count(0) == 2 and special[1] == [0]
    store = tokenize(lines, tmp_path / "b", special_text="plain", encoder=encoder)
    assert [document.tolist().count(0) for document in store] == [1, 1, 1]
    assert [store.decode(document[:-1]) for document in store] == texts


# ---- limit ----


@pytest.mark.parametrize("limit", [1, 2, 77, 500, 10**6])
def test_limit_is_exact_and_a_prefix(corpus: Corpus, reference: Path, tmp_path: Path, limit: int) -> None:
    """`--limit N` gives the first N documents of the whole, over units, or all when there are fewer."""
    limited = tokenize(corpus.path, tmp_path / "s", shard_size="100KB", limit=limit, workers=None)
    assert documents(limited) == documents(reference)[:limit]
    assert list(verify(tmp_path / "s")) == []


# ---- made already ----


def _job(inputs: Path, out: Path, *options: object) -> list[object]:
    return ["tokenize", inputs, "-o", out, "--tokenizer", TOKENIZER, "--memory", "4GB", "--workers", 1, *options]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--eos", "none"], "eos: "),
        (["--special-text", "plain"], 'special_text: "plain" (made with "special")'),
        (["--text-column", "title"], 'datasets.0.text_column: "title" (made with "text")'),
        (["--limit", 2], "limit: 2 (made with null)"),
        (["--shard-size", "1MB"], "shard_size: 1000000 (made with 64000000)"),
        (["--invalid-utf8", "drop"], 'invalid_utf8: "drop" (made with "reject")'),
    ],
)
def test_other_settings_are_refused_by_name_until_overwritten(
    tmp_path: Path, options: list[object], named: str
) -> None:
    """A store made from other settings is never taken for this job's; --overwrite replaces it."""
    lines = tmp_path / "c.jsonl"
    lines.write_text("".join(json.dumps({"text": text, "title": f"t {text}"}) + "\n" for text in TEXTS))
    tokenize(lines, tmp_path / "s")
    before = store_bytes(tmp_path / "s")
    refused = invoke(*_job(lines, tmp_path / "s", *options))
    assert refused.exit_code == 2
    assert named in refused.stderr and "--overwrite" in refused.stderr
    assert len(refused.stderr.splitlines()) <= 5
    assert store_bytes(tmp_path / "s") == before
    assert invoke(*_job(lines, tmp_path / "s", *options, "--overwrite")).exit_code == 0
    assert invoke(*_job(lines, tmp_path / "fresh", *options)).exit_code == 0
    assert store_bytes(tmp_path / "s") == store_bytes(tmp_path / "fresh")


def test_input_that_moved_is_the_same_input(corpus: Corpus, reference: Path, tmp_path: Path) -> None:
    """Data in another folder is still the same data: a finished store is up to date, an unfinished one goes on."""
    for folder in ("one", "two", "three"):
        (tmp_path / folder).mkdir()
    path, out = tmp_path / "one" / "corpus.jsonl", tmp_path / "s"
    shutil.copy2(corpus.path, path)
    tokenize(path, out, shard_size="100KB")
    path = path.rename(tmp_path / "two" / "corpus.jsonl")
    assert "is up to date" in invoke(*_job(path, out, "--shard-size", "100KB")).stdout
    unfinish(out, (3, "bin"), (7, "idx"))
    path = path.rename(tmp_path / "three" / "corpus.jsonl")
    tokenize(path, out, shard_size="100KB")
    shards = [name for name in store_bytes(reference) if name.endswith((".bin", ".idx"))]
    assert [name for name in shards if (out / name).read_bytes() != (reference / name).read_bytes()] == []
    assert list(verify(out)) == []


def unfinish(out: Path, *files: tuple[int, str]) -> None:
    """Take the manifest and some files of shards away, as if the run had been killed before them."""
    for path in [shard_file(out, *one) for one in files]:
        path.unlink()
    (out / "milldam.json").unlink()


def test_a_refused_overwrite_keeps_the_old_store(tmp_path: Path, lines: Path) -> None:
    """What can be refused is refused before anything is replaced."""
    tokenize(lines, tmp_path / "s")
    before = store_bytes(tmp_path / "s")
    with pytest.raises(ResourceError, match="too small"):
        tokenize(lines, tmp_path / "s", limit=2, memory="1MB", overwrite=True)
    with pytest.raises(InputError):
        tokenize(lines, tmp_path / "s", limit=2, text_column="nope", overwrite=True)
    assert store_bytes(tmp_path / "s") == before


# ---- streams and standard input ----

_COMPRESS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("compression", ["gz", pytest.param("bz2", marks=pytest.mark.slow)])
def test_a_compressed_stream_gives_several_bounded_shards(tmp_path: Path, compression: str) -> None:
    """A stream that can't be cut beforehand is cut as it flows, into the documents of the plain file."""
    texts = list(make_texts(4_500_000))
    plain = write_lines(tmp_path / "c.jsonl", texts)
    packed = tmp_path / f"c.jsonl.{compression}"
    packed.write_bytes(_COMPRESS[compression](plain.read_bytes(), 1))
    store = tokenize(packed, tmp_path / "s", shard_size="100KB")
    names = [shard.name for shard in store.manifest.shards]
    assert len(names) >= 4
    assert max(shard.text_bytes for shard in store.manifest.shards) < 100_000 + 2 * (1 << 20)
    assert documents(store) == documents(tokenize(plain, tmp_path / "plain"))


def pipe_in(data: bytes, out: Path, *options: object, code: int = 0) -> str:
    """Standard input through a real pipe; what was said on standard error."""
    job = ["tokenize", "-", "-o", out, "--tokenizer", TOKENIZER, "--memory", "1GB", *options]
    done = subprocess.run([MILLDAM, *map(str, job)], input=data, capture_output=True, timeout=60)
    assert done.returncode == code, done.stderr.decode()
    return done.stderr.decode()


@pytest.mark.slow
def test_standard_input_gives_the_documents_of_the_file(tmp_path: Path) -> None:
    """A pipe of several megabytes gives what the file gives; the finished store is not compared with another pipe."""
    texts = list(make_texts(2_500_000))
    data = write_lines(tmp_path / "c.jsonl", texts).read_bytes()
    pipe_in(data, tmp_path / "s", "--input-format", "jsonl", "--shard-size", "100KB")
    assert documents(tmp_path / "s") == expected_ids(texts)
    assert "can't be compared" in pipe_in(
        data, tmp_path / "s", "--input-format", "jsonl", "--shard-size", "100KB", code=2
    )
    lines = ("--input-format", "txt", "--documents", "line")
    pipe_in(b"one\ntwo\n\nthree", tmp_path / "s", *lines, "--overwrite")
    assert documents(tmp_path / "s") == expected_ids(["one", "two", "three"])


# ---- plain text ----


@pytest.mark.parametrize("ending", first_quick(["jsonl", "arrow"], 1))
def test_a_giant_record_is_kept_within_the_budget(tmp_path: Path, ending: str) -> None:
    """A text of some twenty megabytes between two small ones."""
    path, texts = tmp_path / f"a.{ending}", ["before", "so many words, one after the other\n" * 600_000, "after"]
    if ending == "jsonl":
        write_lines(path, texts)
    else:
        table = pa.table({"text": texts})
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    job = ["tokenize", path, "-o", tmp_path / "s", "--tokenizer", TOKENIZER, "--memory", "200MB", "--workers", 1]
    summary = json.loads(run_milldam(*job, "--json").stdout)
    assert summary["memory"]["peak"] < summary["memory"]["budget"]
    store = milldam.open(tmp_path / "s")
    assert [store.decode(document).removesuffix(EOS_TEXT) for document in store] == texts


# ---- what can't be read ----


def test_invalid_utf8_is_rejected_dropped_replaced_or_stops(tmp_path: Path) -> None:
    """No policy is silent."""
    path = tmp_path / "c.txt"
    path.write_bytes(b"good\ncaf\xe9\nend\n")
    rejected = tokenize(path, tmp_path / "a", documents="line")
    assert documents(rejected) == expected_ids(["good", "end"])
    assert rejected.manifest.tally.rejected == {"not_utf8": 1}
    (reject,) = set_aside(rejected)
    assert (reject["line"], reject["reason"], reject["record"]) == (2, "not_utf8", r"caf\xe9")
    replaced = tokenize(path, tmp_path / "b", documents="line", invalid_utf8="replace")
    assert documents(replaced) == expected_ids(["good", "caf\ufffd", "end"])
    assert "rejects" not in replaced.audit
    dropped = tokenize(path, tmp_path / "d", documents="line", invalid_utf8="drop")
    assert documents(dropped) == expected_ids(["good", "caf", "end"])
    stopped = invoke(*_job(path, tmp_path / "c", "--documents", "line", "--strict"))
    assert stopped.exit_code == 3
    assert f"{path}:2: not_utf8" in stopped.stderr


def test_when_nothing_is_left_the_reasons_are_said(tmp_path: Path) -> None:
    """A run without a document fails with what became of them, each time it is tried, and leaves no store."""
    path, out = tmp_path / "c.jsonl", tmp_path / "s"
    path.write_bytes(b'{"text": ""}\nnot json\n{"text": null}\nnor this\n')
    for _ in range(2):
        failed = invoke(*_job(path, out))
        assert failed.exit_code == 3
        lines = failed.stderr.rstrip().splitlines()[-4:]
        assert lines[:3] == [
            "milldam: No documents left: 4 records read, all dropped:",
            "  read: bad_json 2, no_text 1",
            "  clean: empty 1",
        ]
        why = "Expecting value: line 1 column 1 (char 0)"
        (rejects,) = out.glob("rejects-*.jsonl")
        assert lines[3] == f"The first is of {path}: {why}. All rejected records are in {rejects}."
    assert not (out / "milldam.json").exists()
    found = [json.loads(line) for line in rejects.read_text().splitlines()]
    assert [(reject["file"], reject["line"]) for reject in found] == [(str(path), line) for line in (2, 3, 4)]


def test_strict_says_where_in_the_file_it_stopped(corpus: Corpus, tmp_path: Path) -> None:
    """In a unit that begins in the middle of a file the line leads to the record, from the byte it is counted from."""
    text = corpus.path.read_bytes().split(b"\n")
    good = [line for line in text if line.startswith(b'{"id"')]
    good.insert(len(good) - 5, b"{broken")
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"\n".join(good))
    with pytest.raises(InputError) as caught:
        tokenize(path, tmp_path / "s", strict=True, shard_size="100KB")
    said = re.search(r":(\d+)(?: \(counted from byte ([\d,]+)\))?: bad_json", str(caught.value))
    assert said is not None, str(caught.value)
    rest = path.read_bytes()[int((said[2] or "0").replace(",", "")) :]
    assert rest.split(b"\n")[int(said[1]) - 1] == b"{broken"


def fail(*arguments: object, code: int) -> str:
    """What a refused command says: a few lines, no traceback."""
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.stderr and "bug in milldam" not in result.stderr
    assert 1 <= len(result.stderr.strip().splitlines()) <= 6
    return result.stderr


# ---- where it may not go ----


def test_somebody_elses_folder_is_left_alone(tmp_path: Path, lines: Path) -> None:
    """A folder with other files is neither filled nor cleared, --overwrite or not."""
    (tmp_path / "project" / "run").mkdir(parents=True)
    (tmp_path / "project" / "run" / "notes.txt").write_text("mine")
    for options in ([], ["--overwrite"]):
        assert "left alone" in fail(*_job(lines, tmp_path / "project", *options), code=2)
    assert (tmp_path / "project" / "run" / "notes.txt").read_text() == "mine"
    assert [path.name for path in (tmp_path / "project").iterdir()] == ["run"]


def test_a_store_inside_its_own_input_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`milldam tokenize . -o out` does not read what it writes, and is up to date the second time."""
    write_lines(tmp_path / "a.jsonl", TEXTS)
    monkeypatch.chdir(tmp_path)
    for said in ("5 documents", "is up to date: 5 documents"):
        assert said in run_here("tokenize", ".", "-o", "out", "--tokenizer", TOKENIZER, "--workers", 1).stdout


def test_a_file_name_that_is_no_utf8(tmp_path: Path) -> None:
    """Old archives have such names; their text is as good as any, and so are their rejects."""
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl"))
    try:
        path.write_bytes(b'{"text": "one"}\nbroken\n')
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    result = invoke(*_job(path, tmp_path / "s"))
    assert result.exit_code == 0, result.output
    assert documents(tmp_path / "s") == expected_ids(["one"])
    assert invoke(*_job(path, tmp_path / "s")).exit_code == 0


# ---- the library ----


def test_the_library_prints_nothing(tmp_path: Path, lines: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A library that prints is a nuisance: results are returned, warnings go to logging."""
    tokenize(lines, tmp_path / "s")
    assert capfd.readouterr() == ("", "")


# ---- one .npy file ----


NPY = ["--format", "npy", "--tokenizer", TOKENIZER, "--memory", "4GB", "--workers", 1]


def npy(*options: object, code: int = 0) -> str:
    """`milldam tokenize --format npy`; all that it said."""
    result = invoke("tokenize", *options, *NPY)
    assert result.exit_code == code, result.output
    return result.stdout + result.stderr


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A plain text of some hundred kilobytes."""
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(make_texts(300_000)), newline="")
    return path


def test_npy_goes_beside_the_text(tmp_path: Path, text: Path) -> None:
    """`FILE.txt` becomes `FILE.npy`, to be mapped, with all tokens of the store in one row."""
    npy(text)
    store = tokenize(text, tmp_path / "s")
    tokens = np.load(tmp_path / "corpus.npy", mmap_mode="r")
    assert (tokens.ndim, tokens.dtype) == (1, store.dtype)
    assert np.array_equal(tokens, np.concatenate(list(store.shard_tokens())))
    assert sorted(map(str, tmp_path.glob("[a-z]*"))) == [
        str(tmp_path / name) for name in ("corpus.npy", "corpus.npy.json", "corpus.txt", "s")
    ]


def test_npy_of_changed_text_is_made_again_and_of_other_settings_refused(tmp_path: Path, text: Path) -> None:
    """A stale file is never taken for a fresh one."""
    npy(text)
    text.write_text("other")
    npy(text)
    assert np.load(tmp_path / "corpus.npy").tolist() == expected_ids(["other"])[0]
    before = (tmp_path / "corpus.npy").read_bytes()
    said = npy(text, "--limit", 1, code=2)
    assert "corpus.npy was made with other settings" in said and "limit: 1" in said and "--overwrite" in said
    assert (tmp_path / "corpus.npy").read_bytes() == before
    assert "is up to date" in npy(text)


# ---- what is not read ----


def test_files_that_are_left_out_are_told_with_the_way_to_read_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the plan on the command line, in the log of the library."""
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in" / "a.jsonl", ["The mill stands."])
    (tmp_path / "in" / "README.md").write_text("# Mills")
    told = "1 file of no known format (.md 1). To read text among them, name it with"
    result = invoke("tokenize", str(tmp_path / "in"), "-o", str(tmp_path / "a"), "--tokenizer", str(TOKENIZER))
    assert f"Not read: {told} --input-format txt." in result.stderr
    milldam.tokenize(tmp_path / "in", tmp_path / "b", tokenizer=TOKENIZER)
    assert f'not read: {told} input_format="txt".' in caplog.text


@pytest.mark.parametrize("encoder", first_quick(["gigatoken", "huggingface"], 1))
def test_a_text_file_larger_than_a_document_is_encoded_in_pieces(tmp_path: Path, encoder: str) -> None:
    """As one document with the ids of its whole, cleaned; neither filtered nor compared, which is told."""
    texts = ["before", "  " + " \n ".join(make_texts(2_300_000)) + "\t\n", "after"]
    for folder in ("in", "again"):
        (tmp_path / folder).mkdir()
        for name, text in zip("abc", texts, strict=True):
            (tmp_path / folder / f"{name}.txt").write_text(text, newline="")
    common: dict[str, Any] = {"tokenizer": {"path": str(TOKENIZER), "encoder": encoder}, "clean": {"whitespace": True}}
    whole = milldam.preprocess(common | {"datasets": str(tmp_path / "in"), "out": str(tmp_path / "whole")})
    settings: dict[str, Any] = {
        "datasets": [str(tmp_path / "in"), str(tmp_path / "again")],
        "out": str(tmp_path / "s"),
        "max_document_bytes": "1MB",
        "filters": {"max_characters": 1000},
        "splits": {"val": 0.1},
    }
    store = milldam.preprocess(common | settings)
    found = [one.tolist() for split in store.splits for one in milldam.open(tmp_path / "s", split=split)]
    assert [ids for ids in found if len(ids) > 1000] == 2 * [one.tolist() for one in whole if len(one) > 1000]
    told = json.loads((tmp_path / "s" / "run" / "summary.json").read_bytes())
    assert "2 text files larger than max_document_bytes: neither filtered nor compared" in told["warnings"][0]
    assert store.manifest.tally.reasons == {"duplicate": 2}
    assert store.manifest.totals["characters"] - whole.manifest.totals["characters"] == whole.manifest.totals[
        "characters"
    ] - len("beforeafter")
