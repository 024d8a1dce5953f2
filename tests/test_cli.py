"""The command line: help, exit codes, few lines on error, and results that scripts can read."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import milldam
from jobs import (
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
from milldam.cli import main
from milldam.cli.status import read_status
from milldam.run import Identity, Run
from milldam.sources.units import Slice, Unit

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


COMMANDS = (
    "completion", "dedup-index", "demo", "export", "feed", "import", "inspect", "map", "migrate", "plan", "preprocess",
    "pull", "push", "qa", "qa-eval", "report", "run-units", "schema", "slurm", "stats", "status", "tokenize",
    "train-tokenizer", "verify", "watch",
)  # fmt: skip


def test_these_are_the_commands() -> None:
    """No command comes or goes unnoticed."""
    assert sorted(main.commands) == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    """Each command is in the overview and has a help of its own; -h is --help."""
    assert f"\n  {command} " in invoke("--help").stdout
    shown = invoke(command, "-h")
    assert shown.exit_code == 0 and shown.stdout.startswith("Usage: ") and command in shown.stdout
    assert shown.stdout == invoke(command, "--help").stdout


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"demo"}))
def test_help_of_a_command_has_an_example(command: str) -> None:
    """The help of a command shows how it is used, in a line that can be copied."""
    assert re.search(rf"^  milldam {command}\b", invoke(command, "-h").stdout, flags=re.MULTILINE)


def test_help_of_the_main_commands_shows_the_whole_job() -> None:
    """From raw data to a store in one line."""
    assert "milldam tokenize corpus.jsonl.zst -o corpus.milldam --tokenizer gpt2/" in invoke("tokenize", "-h").stdout
    assert "milldam preprocess config.yaml --set dedup=near --memory 2GB" in invoke("preprocess", "-h").stdout


def test_version_is_that_of_the_package() -> None:
    """`--version` says what is installed."""
    assert invoke("--version").stdout.strip() == f"milldam, version {milldam.__version__}"


# ---- exit codes and errors ----


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["tokenise"], 2),
        (["tokenize"], 2),
        (["tokenize", "x.jsonl"], 2),
        (["tokenize", "x.jsonl", "--no-such-option"], 2),
        (["tokenize", "x.jsonl", "-o", "s", "--tokenizer", "t", "--limit", "many"], 2),
        (["tokenize", "missing.jsonl", "-o", "s", "--tokenizer", str(TOKENIZER)], 3),
        (["tokenize", "missing.jsonl", "-o", "s", "--tokenizer", str(TOKENIZER), "--memory", "x"], 2),
        (["verify", "missing"], 3),
        (["verify"], 2),
        (["stats", "missing"], 3),
        (["inspect", "missing"], 3),
        (["feed", "missing", "--seq-len", "8", "--batch-size", "2"], 3),
        (["feed", "missing", "--seq-len", "8"], 2),
        (["status", "missing"], 2),
        (["status", "."], 3),
        (["completion", "tcsh"], 2),
        (["preprocess"], 2),
        (["preprocess", "missing.yaml"], 2),
        (["preprocess", "missing.yaml", "--workers", "many"], 2),
        (["plan", "missing.yaml"], 2),
        (["train-tokenizer", "missing.yaml"], 2),
        (["migrate", "missing.yaml"], 2),
        (["schema", "more"], 2),
        (["report", "missing"], 3),
        (["report", "."], 3),
        (["dedup-index", "missing"], 2),
    ],
)
def test_exit_codes_say_whose_fault_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int
) -> None:
    """2 is the command, 3 the input; the message is short, on standard error, and no traceback."""
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert 1 <= len(result.stderr.splitlines()) <= 6
    assert "Traceback" not in result.stderr and "bug in milldam" not in result.stderr


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--workers", 0], "workers: must be at least 1"),
        (["--memory", "lots"], "lots"),
        (["--memory", ""], "memory"),
        (["--set", "sed=1"], "sed"),
        (["--set", "seed"], "seed"),
    ],
)
def test_a_wrong_option_of_preprocess_is_refused(
    tmp_path: Path, lines: Path, options: list[object], named: str
) -> None:
    """An option is checked as its key in the file is, never left out because of what it says."""
    (tmp_path / "c.yaml").write_text(f"datasets: {lines}\ntokenizer: {TOKENIZER}\nout: {tmp_path / 's'}\n")
    refused = invoke("preprocess", tmp_path / "c.yaml", *options)
    assert refused.exit_code == 2, refused.output
    assert named in refused.stderr and "Traceback" not in refused.stderr
    assert not (tmp_path / "s").exists()


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

    monkeypatch.setattr("milldam.store.open_store", fail)
    result = invoke("stats", store)
    assert result.exit_code == 1
    assert "unexpected ZeroDivisionError: oops" in result.stderr and "--debug" in result.stderr
    assert "Traceback" not in result.stderr


def in_terminal(*arguments: object) -> tuple[int, bytes]:
    """Exit code and all that a terminal gets to see."""
    ours, theirs = pty.openpty()
    command = [MILLDAM, *(str(one) for one in arguments)]
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "200"}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment)
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
    assert re.search(r"^Memory: 4 GB \(given\) = 1 workers x .* GB", done.stderr)
    assert "in 1 units of about 16 MB" in done.stderr and "Engine: gigatoken" in done.stderr
    assert f"{tmp_path / 's'}: 4 documents, " in done.stdout
    for word in ("start:", "peak:", "final:", "of 4 GB", "peak by stage: prepare "):
        assert word in done.stdout


def test_quiet_is_silent(tmp_path: Path, lines: Path) -> None:
    """With --quiet nothing is said, done or already done; errors still are."""
    for _ in range(2):
        done = run_milldam(*job(lines, tmp_path / "s"), "--quiet")
        assert (done.stdout, done.stderr) == ("", "")
    assert "no such file" in run_milldam(*job(tmp_path / "x.jsonl", tmp_path / "t"), "-q", code=3).stderr


def test_summary_as_json(tmp_path: Path, lines: Path) -> None:
    """--json prints one object with the figures of the store, up to date or not."""
    made = json.loads(invoke(*job(lines, tmp_path / "s", "--json")).stdout)
    opened = milldam.open(tmp_path / "s")
    assert (made["documents"], made["tokens"], made["up_to_date"]) == (4, opened.tokens, False)
    assert made["out"] == str(tmp_path / "s")
    assert made["memory"]["peak"] <= made["memory"]["budget"] == 4 * 10**9
    assert set(made["stages"]) == {"read", "filter", "encode", "write"}
    assert set(made["wall"]) >= {"prepare", "tokenize"}
    flow = {stage["stage"]: (stage["documents_in"], stage["documents_out"], stage["dropped"]) for stage in made["flow"]}
    assert list(flow) == ["read", "clean", "dedup", "sample", "filter", "encode", "arrange"]
    assert set(map(str, flow.values())) == {"(4, 4, {})"}
    assert made["splits"] == {"train": {"documents": 4, "tokens": opened.tokens}}
    assert (made["read"], made["dropped"], made["report"]) == (4, {}, None)
    again = json.loads(invoke(*job(lines, tmp_path / "s", "--json")).stdout)
    assert (again["up_to_date"], again["tokens"]) == (True, opened.tokens)


def test_dropped_documents_are_in_the_summary(tmp_path: Path) -> None:
    """Reasons and numbers, and where the records are."""
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "good"}\nbroken\n{"text": ""}\n')
    shown = invoke(*job(path, tmp_path / "s")).stdout
    assert "\nDropped: 2 of 3\n  read: bad_json 1\n  clean: empty 1\n" in shown
    assert f"Rejected records are in {tmp_path / 's' / 'rejects.jsonl'}" in shown
    assert "Dropped" not in invoke(*job(write_lines(path, TEXTS), tmp_path / "t")).stdout


def test_a_terminal_gets_a_live_display(tmp_path: Path, lines: Path) -> None:
    """On a terminal the plan, a changing line and the summary are shown."""
    code, seen = in_terminal(*job(lines, tmp_path / "s"))
    assert code == 0
    assert b"Memory: 4 GB" in seen and b"4 documents, " in seen and b"\x1b[" in seen


# ---- verify, stats, inspect ----


def test_verify_says_whole_or_what_is_wrong(store: Path) -> None:
    """Exit code 0 for a whole store, 1 for a damaged one with the file named, as text and as JSON."""
    assert "whole. 1 shards, 4 documents" in run_milldam("verify", store).stdout
    assert json.loads(run_milldam("verify", store, "--json").stdout)["ok"] is True
    path = store / "train-00000.bin"
    path.write_bytes(bytes(path.stat().st_size))
    damaged = run_milldam("verify", store, code=1)
    assert damaged.stdout == "" and str(path) in damaged.stderr and "1 problems" in damaged.stderr
    found = json.loads(run_milldam("verify", store, "--json", code=1).stdout)
    assert found["ok"] is False and len(found["problems"]) == 1


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
    assert sum(found["dropped"].values()) == len(corpus.broken)
    shown = found["tokens_per_document"]
    assert (shown["shortest"], shown["longest"]) == (lengths[0], lengths[-1])
    assert shown["mean"] == pytest.approx(lengths.mean(), abs=0.1)
    for name, share in (("10 %", 0.1), ("median", 0.5), ("90 %", 0.9), ("99 %", 0.99)):
        assert shown[name] == np.quantile(lengths, share, method="inverted_cdf")


def test_stats_for_people(store: Path) -> None:
    """Without --json the same figures in lines."""
    shown = invoke("stats", store).stdout
    assert re.search(r"^documents: +4$", shown, flags=re.MULTILINE) and "  median:" in shown


def test_inspect_shows_documents_token_by_token(store: Path) -> None:
    """Documents are decoded, tokens set apart, boundaries named; ids on request."""
    ids = documents(store)
    shown = invoke("inspect", store, "--documents", 1).stdout
    assert f"document 0: {len(ids[0])} tokens" in shown and "document 1" not in shown
    assert shown.count("|") == len(ids[0]) + "<|endoftext|>".count("|")
    with_ids = invoke("inspect", store, "--documents", 1, "--ids").stdout
    assert re.findall(r"\[(\d+)\]", with_ids) == [str(one) for one in ids[0]]


def test_inspect_counts_from_the_end_and_cuts_long_documents(store: Path) -> None:
    """--start may be negative; of a long document so many tokens are shown, and how many more there are."""
    assert "document 3: " in invoke("inspect", store, "--start", -1).stdout
    shown = invoke("inspect", store, "--start", 2, "--documents", 1, "--tokens", 5).stdout
    assert f"... {len(documents(store)[2]) - 5} tokens more" in shown


def test_inspect_as_json(store: Path) -> None:
    """One object a document, with all its ids and its text."""
    rows = [json.loads(line) for line in invoke("inspect", store, "--json", "--documents", 9).stdout.splitlines()]
    assert [row["tokens"] for row in rows] == documents(store)
    assert [row["text"] for row in rows] == [f"{text}<|endoftext|>" for text in TEXTS]


@pytest.mark.parametrize("options", [[], ["--ids"], ["--json"]])
def test_inspect_does_not_let_a_document_steer_the_terminal(tmp_path: Path, options: list[str]) -> None:
    """Control characters of a document are shown as pictures: none reaches the terminal."""
    hostile = "a\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\x00\x7f[bold]b"
    lines = write_lines(tmp_path / "c.jsonl", [hostile])
    store = milldam.tokenize(lines, tmp_path / "s", tokenizer=TOKENIZER, workers=1)
    assert store.decode(store[0][:-1]) == hostile
    shown = invoke("inspect", tmp_path / "s", *options).stdout
    assert not set(shown) & (set(map(chr, [*range(32), *range(127, 160)])) - {"\n"})
    if not options:
        assert "␛" in shown and "[bold]b" in shown.replace("|", "")


# ---- status ----


@pytest.fixture
def slow_job(tmp_path: Path) -> Callable[[Path], list[object]]:
    """A job that takes a few seconds in two workers."""
    corpus = write_corpus(tmp_path / "slow.jsonl", 3_000_000)
    options = ["--engine", "huggingface", "--workers", 2, "--memory", "1GB", "--shard-size", "200KB"]
    return lambda out: ["tokenize", corpus.path, "-o", out, "--tokenizer", TOKENIZER, *options]


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
    assert f"{out}: ended before it was done (" in ended and "Run the same command again to go on." in ended
    assert json.loads(run_milldam("status", out, "--json").stdout)["state"] == "ended"
    run_milldam(*slow_job(out))
    tokens = milldam.open(out).tokens
    assert f"{out}: finished; {found['units']} units, " in run_milldam("status", out).stdout
    assert json.loads(run_milldam("status", out, "--json").stdout)["safe"]["tokens"] == tokens


def begin(run: Run) -> None:
    """A plan of one unit, as a run writes it before it works."""
    identity = Identity({}, run.write_inputs([]))
    run.stage([Unit(0, (Slice("a.txt", "txt", None),))])
    run.start(identity, {})


def test_a_run_that_has_not_reported_yet_is_not_stuck(tmp_path: Path) -> None:
    """Between its plan and its first report a run is working."""
    with Run(tmp_path / "s") as run:
        begin(run)
        assert read_status(tmp_path / "s")["state"] == "working"


def test_a_resumed_run_is_not_stuck_because_of_an_old_report(tmp_path: Path) -> None:
    """What a run that was killed yesterday last said does not make today's run stuck."""
    with Run(tmp_path / "s") as run:
        begin(run)
        (tmp_path / "s" / "run" / "status.json").write_text(json.dumps({"time": time.time() - 86_400, "workers": {}}))
    with Run(tmp_path / "s") as run:
        run.resume()
        assert read_status(tmp_path / "s")["state"] == "working"


def test_status_can_read_torn_records(tmp_path: Path) -> None:
    """After a crash the last record may be cut off: the rest is still told."""
    with Run(tmp_path / "s") as run:
        begin(run)
    (tmp_path / "s" / "run" / "records.jsonl").write_text('{"unit": 0, "par')
    assert read_status(tmp_path / "s")["state"] == "ended"


# ---- completion and demo ----


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_valid_and_ours(tmp_path: Path, shell: str) -> None:
    """Each script is one that its shell can read, and asks milldam for the words."""
    script = invoke("completion", shell).stdout
    assert "_MILLDAM_COMPLETE" in script and f"{shell}_complete" in script
    if shutil.which(shell) is not None:
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)


@pytest.mark.parametrize(("words", "word"), [("milldam tok", "tokenize"), ("milldam tokenize --sep", "--separator")])
def test_completion_knows_commands_and_options(words: str, word: str) -> None:
    """What the scripts ask for is answered with what begins like that."""
    asked = {"_MILLDAM_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run([MILLDAM], env=os.environ | asked, capture_output=True, text=True)
    assert done.stdout == f"plain,{word}\n"


def test_demo_runs_from_text_to_batches(tmp_path: Path) -> None:
    """The demo makes, checks and shows a store, feeds batches from it, and names its report; kept where asked."""
    shown = run_milldam("demo", "--out", tmp_path / "demo", cwd=tmp_path).stdout
    steps = ("preprocess", "verify", "stats", "inspect", "feed", "report")
    assert re.findall(r"^\$ milldam ([\w-]+) ", shown, flags=re.MULTILINE) == list(steps)
    assert "batch 2: x (4, 64)" in shown and "whole." in shown
    assert re.search(r"^batch 3: .*, the same as without a break$", shown, flags=re.MULTILINE)
    assert '"samples_seen": 12' in shown and re.search(r"^Rate: .* tokens/s", shown, flags=re.MULTILINE)
    assert "104 documents" in shown and "Dropped: 1 of 105\n  filter: too_few_characters 1\n" in shown
    assert len(milldam.open(tmp_path / "demo")) == 104
    assert shown.rstrip().endswith(str(tmp_path / "demo" / "run" / "report.html"))
    assert (tmp_path / "demo" / "run" / "report.html").stat().st_size > 1000
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    """Without --out the demo cleans up after itself."""
    run_milldam("demo", cwd=tmp_path, env=os.environ | {"TMPDIR": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []
