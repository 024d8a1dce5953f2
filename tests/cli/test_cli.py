"""The command line: help, exit codes, few lines on error, and results that scripts can read."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.kit.jobs import (
    MILLDAM,
    TOKENIZER,
    documents,
    expected_ids,
    invoke,
    recorded,
    run_milldam,
    started,
    wait_until,
    write_corpus,
    write_lines,
)
from tests.kit.token_stores import shard_file

import milldam
from milldam.cli import main
from milldam.cli.status import read_status
from milldam.memory import format_size
from milldam.run.folder import RunFolder
from milldam.run.units import Identity
from milldam.sources.units import Slice, Unit
from milldam.stores.kinds import TOKENS

TEXTS = ["The mill stands.", "x", "Die Mühle steht am Bach. " * 20, "水車"]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A few documents as JSON Lines."""
    return write_lines(tmp_path / "corpus.jsonl", TEXTS)


@pytest.fixture
def store(tmp_path: Path, lines: Path) -> Path:
    """A small finished store."""
    milldam.tokenize(lines, tmp_path / "s", tokenizer=TOKENIZER, workers=1)
    return tmp_path / "s"


def job(lines: Path, out: Path, *options: object) -> list[object]:
    return ["tokenize", lines, "-o", out, "--tokenizer", TOKENIZER, "--memory", "4GB", "--workers", 1, *options]


# ---- help ----


@pytest.mark.parametrize("command", sorted(main.commands))
def test_every_command_explains_itself(command: str) -> None:
    """Each command is in the overview and has a help of its own, with an example; -h is --help."""
    assert f"\n  {command} " in invoke("--help").stdout
    shown = invoke(command, "-h")
    assert shown.exit_code == 0 and shown.stdout.startswith("Usage: ") and command in shown.stdout
    assert re.search(rf"^  milldam {command}\b", shown.stdout, flags=re.MULTILINE)
    assert shown.stdout == invoke(command, "--help").stdout


def test_version_is_that_of_the_package() -> None:
    """`--version` says what is installed."""
    assert invoke("--version").stdout.strip() == f"milldam, version {milldam.__version__}"


# ---- exit codes and errors ----


def test_an_error_is_a_few_lines_and_a_traceback_with_debug(tmp_path: Path) -> None:
    """What, where, what to do; all the rest on request."""
    plain = run_milldam("verify", tmp_path / "missing", code=3)
    assert plain.stderr == f"milldam: {tmp_path / 'missing'}: no such folder.\n"
    traced = run_milldam("--debug", "verify", tmp_path / "missing", code=None)
    assert traced.returncode != 0
    assert "Traceback (most recent call last)" in traced.stderr and "StoreError" in traced.stderr


def test_a_bug_is_called_a_bug(monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
    """An exception that nobody foresaw is one line that says so, with the way to the traceback."""

    def fail(path: Path) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("milldam.api.open", fail)
    result = invoke("stats", store)
    assert result.exit_code == 1
    assert "unexpected ZeroDivisionError: oops" in result.stderr and "--debug" in result.stderr
    assert "Traceback" not in result.stderr


def in_terminal(*arguments: object, columns: int = 200, stdout: int | None = None) -> tuple[int, bytes]:
    """Exit code and all that a terminal gets to see. `stdout`: where results go instead."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    command = [MILLDAM, *(str(one) for one in arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm-256color"}
    out = theirs if stdout is None else stdout
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    while True:
        try:
            block = os.read(ours, 65536)
        except OSError:  # how a terminal says that nobody writes any more
            break
        if not block:
            break
        seen += block
    os.close(ours)
    return process.wait(), seen


def test_a_hostile_record_does_not_steer_the_terminal_through_an_error(tmp_path: Path) -> None:
    """Names of fields come from the input: their escape sequences are not passed on."""
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "fine"}\n{"\\u001b]0;owned\\u0007": 1, "\\u001b[31m": 2}\n')
    code, seen = in_terminal(*job(path, tmp_path / "s", "--strict"))
    assert code == 3 and b"no_field" in seen
    assert b"\x1b]0;" not in seen and b"\x1b[31m" not in seen


# ---- output ----


def test_results_on_standard_output_the_rest_on_standard_error(tmp_path: Path, lines: Path) -> None:
    """The plan is told first, on standard error; the summary is the result."""
    done = invoke(*job(lines, tmp_path / "s"))
    assert done.exit_code == 0
    assert re.search(r"^Memory: 4 GB \(given\) = 1 worker x .* GB", done.stderr)
    assert "in 1 unit of about 64 MB" in done.stderr and "Encoder: gigatoken" in done.stderr
    assert f"{tmp_path / 's'}: 4 documents, " in done.stdout
    characters, size = sum(map(len, TEXTS)), sum(len(text.encode()) for text in TEXTS)
    assert f"{size} B of text in " in done.stdout
    kept = (path for path in (tmp_path / "s").iterdir() if path.is_file())
    assert f"{format_size(sum(path.stat().st_size for path in kept))} on disk" in done.stdout
    assert re.search(r"^Memory: peak [\d.]+ MB of 4 GB \(\d+%\); file-backed", done.stdout, re.MULTILINE)
    assert done.stdout.splitlines()[-1].startswith(f"{tmp_path / 's'}: 4 documents, ")  # the headline
    done = invoke(*job(lines, tmp_path / "t"), "--verbose")
    assert f"{characters} characters, " in done.stdout and "── document 0: " in done.stdout
    done = invoke(*job(lines, tmp_path / "t.npy"), "--format", "npy", "-v")
    assert done.exit_code == 0 and f"{characters} characters, " in done.stdout
    for stage in ("prepare", "tokenize", "finish"):
        assert re.search(rf"^  {stage}(  +[\d.]+ MB){{3}}$", done.stdout, re.MULTILINE), stage


def test_quiet_is_silent(tmp_path: Path, lines: Path) -> None:
    """With --quiet nothing is said, done or already done; errors still are."""
    done = run_milldam(*job(lines, tmp_path / "s"), "--quiet")
    assert (done.stdout, done.stderr) == ("", "")
    again = invoke(*job(lines, tmp_path / "s"), "--quiet")
    assert (again.exit_code, again.output) == (0, "")
    wrong = invoke(*job(tmp_path / "x.jsonl", tmp_path / "t"), "-q")
    assert wrong.exit_code == 3 and "no such file" in wrong.stderr


def test_summary_as_json(tmp_path: Path, lines: Path) -> None:
    """--json prints one object with the figures of the store, up to date or not."""
    made = json.loads(invoke(*job(lines, tmp_path / "s", "--json")).stdout)
    opened = milldam.open(tmp_path / "s")
    assert (made["counts"]["documents"], made["counts"]["tokens"], made["up_to_date"]) == (4, opened.tokens, False)
    assert made["out"] == str(tmp_path / "s")
    assert made["memory"]["peak"] <= made["memory"]["budget"] == 4 * 10**9
    assert set(made["work"]) == {"read", "filter", "encode", "write", "commit"}
    assert set(made["stages"]) >= {"prepare", "tokenize"}
    facts = made["facts"]
    flow = {one["stage"]: (one["documents_in"], one["documents_out"], one["dropped"]) for one in facts["flow"]}
    assert list(flow) == ["read", "clean", "dedup", "decontaminate", "sample", "filter", "encode", "arrange"]
    assert set(map(str, flow.values())) == {"(4, 4, {})"}
    assert facts["splits"] == {"train": {"documents": 4, "tokens": opened.tokens}}
    assert (made["job"], made["counts"]["read"], made["dropped"], "report" in facts) == ("tokenize", 4, {}, False)
    again = json.loads(invoke(*job(lines, tmp_path / "s", "--json")).stdout)
    assert (again["up_to_date"], again["counts"]["tokens"]) == (True, opened.tokens)


def test_a_terminal_gets_a_live_display(tmp_path: Path, lines: Path) -> None:
    """On a terminal the plan, a changing line and the summary are shown."""
    code, seen = in_terminal(*job(lines, tmp_path / "s"))
    assert code == 0
    assert b"Memory: 4 GB" in seen and b"4 documents, " in seen and b"\x1b[" in seen


# ---- verify, stats, inspect ----


def test_verify_says_whole_or_what_is_wrong(store: Path) -> None:
    """Exit code 0 for a whole store, 1 for a damaged one with the file named, as text and as JSON."""
    whole, as_json = invoke("verify", store), invoke("verify", store, "--json")
    assert whole.exit_code == 0 and "whole. 1 shard, 4 documents" in whole.stdout
    assert as_json.exit_code == 0 and json.loads(as_json.stdout)["ok"] is True
    path = shard_file(store, 0, "bin")
    path.write_bytes(bytes(path.stat().st_size))
    damaged = run_milldam("verify", store, code=1)
    assert damaged.stdout == "" and str(path) in damaged.stderr and "1 problem." in damaged.stderr
    as_json = invoke("verify", store, "--json")
    found = json.loads(as_json.stdout)
    assert as_json.exit_code == 1 and found["ok"] is False and len(found["problems"]) == 1


def test_stats_are_right(tmp_path: Path) -> None:
    """Every figure equals one counted by hand from the documents."""
    corpus = write_corpus(tmp_path / "c.jsonl", 300_000, broken_every=100)
    milldam.tokenize(corpus.path, tmp_path / "s", tokenizer=TOKENIZER, workers=1, shard_size="100KB")
    found = json.loads(invoke("stats", tmp_path / "s", "--json").stdout)
    lengths = np.sort([len(ids) for ids in expected_ids(corpus.texts)])
    characters, size = sum(map(len, corpus.texts)), sum(len(text.encode()) for text in corpus.texts)
    assert found["documents"] == len(lengths)
    assert found["tokens"] == lengths.sum()
    assert (found["characters"], found["text_bytes"]) == (characters, size)
    assert found["characters_per_token"] == pytest.approx(characters / lengths.sum(), abs=1e-4)
    assert found["bytes_per_token"] == pytest.approx(size / lengths.sum(), abs=1e-4)
    assert found["shards"] == len(milldam.open(tmp_path / "s").manifest.shards) >= 3
    assert found["splits"] == {"train": len(lengths)}
    assert (found["eos"], found["bos"], found["dtype"]) == ("<|endoftext|>", None, "uint16")
    assert sum(found["rejected"].values()) == len(corpus.broken) and found["dropped"] == {}
    assert found["read"] == len(lengths) + len(corpus.broken)
    shown = found["tokens_per_document"]
    assert (shown["shortest"], shown["longest"]) == (lengths[0], lengths[-1])
    assert shown["mean"] == pytest.approx(lengths.mean(), abs=0.1)
    for name, share in (("10 %", 0.1), ("median", 0.5), ("90 %", 0.9), ("99 %", 0.99)):
        assert shown[name] == np.quantile(lengths, share, method="inverted_cdf")


def test_inspect_shows_documents_token_by_token(store: Path) -> None:
    """Documents are decoded, tokens set apart, boundaries named; ids on request."""
    ids = documents(store)
    shown = invoke("inspect", store, "--documents", 1).stdout
    assert f"document 0: {len(ids[0])} tokens" in shown and "document 1" not in shown
    assert shown.count("▕") == len(ids[0]) and shown.endswith("▕<|endoftext|>▕\n")
    with_ids = invoke("inspect", store, "--documents", 1, "--ids").stdout
    assert re.findall(r"\[(\d+)\]", with_ids) == [str(one) for one in ids[0]]


def test_inspect_counts_from_the_end_and_cuts_long_documents(store: Path) -> None:
    """--start may be negative; of a long document so many tokens are shown, and how many more there are."""
    assert "document 3: " in invoke("inspect", store, "--start", -1).stdout
    shown = invoke("inspect", store, "--start", 2, "--documents", 1, "--tokens", 5).stdout
    assert f"... {len(documents(store)[2]) - 5} more tokens" in shown


def test_inspect_keeps_the_bytes_of_a_character_together(tmp_path: Path) -> None:
    """A character that several tokens share is shown once, with their ids; the sign for a lost one stays itself."""
    text = "naïve 水車 🦆🦆 \ufffd\ufffdx"
    written = milldam.tokenize(write_lines(tmp_path / "c.jsonl", [text]), tmp_path / "s", tokenizer=TOKENIZER)
    assert any("\ufffd" in written.decode([token]) for token in written[0][:6])
    shown = invoke("inspect", tmp_path / "s").stdout.splitlines()[1]
    assert shown.replace("▕", "") == f"{text}<|endoftext|>" and shown.count("🦆▕") == 2
    with_ids = invoke("inspect", tmp_path / "s", "--ids").stdout
    assert [int(id) for ids in re.findall(r"\[([\d ]+)\]", with_ids) for id in ids.split()] == written[0].tolist()
    # A character that the last token shown only begins is shown whole.
    for tokens in range(1, len(written[0])):
        assert shown.startswith(invoke("inspect", tmp_path / "s", "--tokens", tokens).stdout.splitlines()[1][:-1])


def test_inspect_shows_a_split(tmp_path: Path) -> None:
    """Its documents are numbered from 0; a split that is not there is an error that names those that are."""
    settings = {"datasets": str(write_lines(tmp_path / "a.jsonl", ["train text"])), "tokenizer": str(TOKENIZER)}
    validation = write_lines(tmp_path / "v.jsonl", ["val text"])
    milldam.preprocess(settings | {"validation": str(validation), "out": str(tmp_path / "s")})
    shown = invoke("inspect", tmp_path / "s", "--split", "val").stdout.replace("▕", "")
    assert "document 0: " in shown and "val text" in shown and "train" not in shown
    missing = invoke("inspect", tmp_path / "s", "--split", "vall")
    assert missing.exit_code == 2 and "train, val" in missing.stderr


@pytest.mark.parametrize("options", [[], ["--ids"]])
def test_inspect_does_not_let_a_document_steer_the_terminal(tmp_path: Path, options: list[str]) -> None:
    """Control characters of a document are shown as pictures: none reaches the terminal."""
    hostile = "a\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\x00\x7f[bold]b"
    lines = write_lines(tmp_path / "c.jsonl", [hostile])
    store = milldam.tokenize(lines, tmp_path / "s", tokenizer=TOKENIZER, workers=1)
    assert store.decode(store[0][:-1]) == hostile
    shown = invoke("inspect", tmp_path / "s", *options).stdout
    assert not set(shown) & (set(map(chr, [*range(32), *range(127, 160)])) - {"\n"})
    if not options:
        assert "␛" in shown and "[bold]b" in shown.replace("▕", "")


# ---- status ----


@pytest.fixture
def slow_job(tmp_path: Path) -> Callable[[Path], list[object]]:
    """A job that takes a few seconds in two workers."""
    corpus = write_corpus(tmp_path / "slow.jsonl", 3_000_000)
    options = ["--encoder", "huggingface", "--workers", 2, "--memory", "1GB", "--shard-size", "200KB"]
    return lambda out: ["tokenize", corpus.path, "-o", out, "--tokenizer", TOKENIZER, *options]


@pytest.mark.slow
def test_status_of_a_run_that_works_was_ended_and_is_finished(
    tmp_path: Path, slow_job: Callable[[Path], list[object]]
) -> None:
    """From another terminal: at work with its process and units, then ended with what is safe, then finished."""
    out = tmp_path / "s"
    states = set()
    with started(*slow_job(out)) as process:
        assert wait_until(lambda: (out / "run" / "plan.json").exists(), process)
        while recorded(out) < 2:
            states.add(read_status(out)["state"])
        # Held still, so that it is not done before it has been looked at twice.
        process.send_signal(signal.SIGSTOP)
        found = json.loads(run_milldam("status", out, "--json").stdout)
        assert (found["state"], found["pid"]) == ("working", process.pid) and found["units"] >= 10
        assert found["safe"]["units_done"] >= 1 and found["safe"]["tokens"] > 0
        shown = run_milldam("status", out).stdout
        assert f"{out}: working, process {process.pid} on " in shown and "stage tokenize" in shown
        assert process.poll() is None, "the run ended before it was looked at"
        process.send_signal(signal.SIGCONT)
    assert states == {"working"}
    ended = run_milldam("status", out).stdout
    assert f"{out}: ended before it was done (" in ended and "milldam tokenize" in ended
    assert json.loads(run_milldam("status", out, "--json").stdout)["state"] == "ended"
    run_milldam(*slow_job(out))
    tokens = milldam.open(out).tokens
    assert f"{out}: finished; {found['units']} units, " in run_milldam("status", out).stdout
    assert json.loads(run_milldam("status", out, "--json").stdout)["safe"]["tokens"] == tokens


def begin(run: RunFolder) -> None:
    """A plan of one unit, as a run writes it before it works."""
    identity = Identity({}, run.inputs.write([]))
    units = [Unit(0, (Slice("a.txt", "txt", None),))]
    run.start(identity, units)


def test_a_run_that_has_not_reported_yet_is_not_stuck(tmp_path: Path) -> None:
    """Between its plan and its first report a run is working."""
    with RunFolder(tmp_path / "s", TOKENS) as run:
        begin(run)
        assert read_status(tmp_path / "s")["state"] == "working"


# ---- completion and demo ----


@pytest.mark.parametrize(("words", "word"), [("milldam tok", "tokenize"), ("milldam tokenize --sep", "--separator")])
def test_completion_knows_commands_and_options(words: str, word: str) -> None:
    """What the scripts ask for is answered with what begins like that."""
    asked = {"_MILLDAM_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run([MILLDAM], env=os.environ | asked, capture_output=True, text=True)
    assert done.stdout == f"plain,{word}\n"


def test_demo_runs_from_text_to_batches(tmp_path: Path) -> None:
    """The demo makes, checks and shows a store, feeds batches from it and its text, and names its report."""
    shown = run_milldam("demo", "--out", tmp_path / "demo", cwd=tmp_path).stdout
    steps = ("preprocess", "verify", "stats", "inspect", "feed", "feed")
    assert re.findall(r"^\$ milldam ([\w-]+) ", shown, flags=re.MULTILINE) == list(steps)
    assert "x (4, 64)" in shown and "whole." in shown
    assert "in groups of units" in shown and re.search(r"^Made: .* 1 of 1 unit", shown, flags=re.MULTILINE)
    assert "Read 105 records: 104 kept, 1 dropped, 0 rejected\n  filter: too_few_characters 1\n" in shown
    assert len(milldam.open(tmp_path / "demo")) == 104
    report = Path(shown.splitlines()[-1])
    assert report == tmp_path / "demo" / "run" / "report.html" and report.stat().st_size > 1000


def test_python_runs_the_package_as_the_command() -> None:
    """`python -m milldam` takes what `milldam` takes."""
    done = subprocess.run([sys.executable, "-m", "milldam", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"milldam, version {milldam.__version__}\n")


MAIN = "from milldam.cli import main; main()"
ENDING = f"import atexit, sys; atexit.register(print, 'the end'); {MAIN}"
THREAD = "import threading, time; threading.Thread(target=time.sleep, args=(0.2,)).start();"


@pytest.mark.parametrize("thread", ["", THREAD])
def test_a_command_that_ends_at_once_has_said_everything(thread: str) -> None:
    """To a pipe too, and what was to be done at the end is done, whether or not a thread is waited for."""
    done = subprocess.run([sys.executable, "-c", thread + ENDING, "schema"], capture_output=True, text=True)
    schema, _, last = done.stdout.rstrip("\n").rpartition("\n")
    assert (done.returncode, done.stderr, last) == (0, "", "the end")
    assert "datasets" in json.loads(schema)["properties"]


def test_a_reader_that_has_gone_is_no_error() -> None:
    """As `head` does."""
    shell = f"set -o pipefail; {shlex.quote(sys.executable)} -c {shlex.quote(MAIN)} --help | head -n 1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert "Traceback" not in done.stderr and done.stdout.startswith("Usage")
