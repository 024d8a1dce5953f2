"""`milldam watch`: a command runs as if nobody watched, and then the table comes."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.kit.jobs import run_milldam

WATCH = [sys.executable, "-c", "from milldam.cli.watch import watch; watch()"]


def run(folder: Path, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*WATCH, *words], cwd=folder, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload]


def python(code: str) -> list[str]:
    return ["--", sys.executable, "-c", code]


def test_input_output_and_exit_code_are_the_commands(tmp_path: Path) -> None:
    """Standard input and output pass through untouched; the table goes to standard error."""
    done = run(tmp_path, *python("import sys; print(sys.stdin.read()[::-1], end=''); exit(7)"), input="abc")
    assert (done.returncode, done.stdout) == (7, "cba")
    assert "exit code 7" in done.stderr
    assert "anonymous    peak" in done.stderr
    assert re.search(r"\d  python3? -c +\S", done.stderr)
    assert {path.name for path in (tmp_path / "milldam-watch").iterdir()} == {"memory.csv", "memory.svg", "memory.json"}


def test_options_behind_the_command_are_its_own(tmp_path: Path) -> None:
    """Without `--`, too, what follows the command's name is not ours."""
    done = run(tmp_path, "-o", "out", "echo", "-o", "--limit", "--json")
    assert done.stdout == "-o --limit --json\n"


def test_the_limit_is_compared(tmp_path: Path) -> None:
    """How far the peak was from the limit, and how long above it."""
    hog = "x = bytearray(40_000_000); import time; time.sleep(0.5)"
    done = run(tmp_path, "--limit", "20MB", "--every", "50ms", *python(hog))
    assert "limit 20 MB: peak 2" in done.stderr
    assert "over it for" in done.stderr
    assert (
        "never over it"
        in run(tmp_path, "--limit", "2GB", "--every", "50ms", *python("import time; time.sleep(0.5)")).stderr
    )


@pytest.mark.parametrize(("out", "code", "said"), [("{file}", 2, "can't be made"), ("/proc/w", 4, "takes no files")])
def test_a_place_that_can_not_be_written_is_said(tmp_path: Path, out: str, code: int, said: str) -> None:
    """A file in place of the folder, or a file system that takes none, is the user's to change."""
    (tmp_path / "figures.csv").write_text("a,b\n")
    found = run_milldam("watch", "-o", out.format(file=tmp_path / "figures.csv"), "true", code=code)
    assert said in found.stderr and "bug" not in found.stderr


def test_only_an_earlier_watch_is_written_over(tmp_path: Path) -> None:
    """The memory.csv of a run is not touched."""
    (tmp_path / "memory.csv").write_text("time,stage,pid,anonymous_bytes,file_bytes,name\n1,a,1,1,1,job\n")
    assert "not written by" in run_milldam("watch", "-o", tmp_path, "true", code=2).stderr
    (tmp_path / "memory.csv").unlink()
    for _ in range(2):
        assert run_milldam("watch", "-o", tmp_path, "true").returncode == 0


def test_figures_as_json(tmp_path: Path) -> None:
    """With --json the last line of standard error is an object, the same as in the folder."""
    done = run(tmp_path, "--json", "-o", "out", *python("import sys; print('mine', file=sys.stderr)"))
    own, figures = done.stderr.splitlines()
    assert own == "mine"
    assert json.loads(figures) == json.loads((tmp_path / "out" / "memory.json").read_text())
    assert json.loads(figures)["processes"][0]["peak"] > 0


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    """Exit codes are those of a shell: 127 not found, 126 not executable."""
    done = run(tmp_path, "--", "no-such-program", "x")
    assert done.returncode == 127
    assert done.stderr == "milldam: no-such-program: command not found. Is it installed, and its folder in PATH?\n"
    (tmp_path / "plain").write_text("not a program")
    assert run(tmp_path, "--", "./plain").returncode == 126


@pytest.mark.parametrize("every", ["0", "fast", "-1s"])
def test_a_wrong_time_is_refused(tmp_path: Path, every: str) -> None:
    """Before anything runs."""
    done = run(tmp_path, "--every", every, "--", "touch", "made")
    assert done.returncode == 2
    assert not (tmp_path / "made").exists()


PATIENT = (
    "import signal, sys, time\n"
    "seen = []\n"
    "signal.signal(signal.SIGINT, lambda *_: seen.append(1))\n"
    "signal.signal(signal.SIGTERM, lambda *_: seen.append(15))\n"
    "print('ready', flush=True)\n"
    "end = time.time() + 20\n"
    "while not seen and time.time() < end: time.sleep(0.02)\n"
    "time.sleep(0.3); print(seen, flush=True); sys.exit(5)\n"
)


def test_signals_are_passed_on(tmp_path: Path) -> None:
    """A signal sent to the watcher reaches the command, which decides; then the table comes."""
    process = subprocess.Popen(
        [*WATCH, *python(PATIENT)], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (5, "[15]\n")
    assert "exit code 5" in err


def test_ctrl_c_at_a_terminal_reaches_the_command_once(tmp_path: Path) -> None:
    """The terminal sends it to both; we add none, and the table still comes."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(WATCH[0], [*WATCH, *python(PATIENT)])
    shown = _read_until(terminal, b"ready")
    os.write(terminal, b"\x03")
    shown += _read_until(terminal, b"Wrote memory.csv")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 5
    assert b"[1]" in shown
    assert b"anonymous    peak" in shown


def _read_until(terminal: int, wanted: bytes) -> bytes:
    shown, end = b"", time.monotonic() + 30
    while wanted not in shown and time.monotonic() < end:
        try:
            shown += os.read(terminal, 4096)
        except OSError:
            break
    assert wanted in shown, shown
    return shown


def test_a_signal_that_ends_the_command_gives_the_shells_code(tmp_path: Path) -> None:
    """128 and the number of the signal; what was recorded is there."""
    done = run(tmp_path, *python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    assert done.returncode == 137
    assert "signal 9" in done.stderr


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    """Under nohup the command ignores a hang-up as it would by itself."""
    code = "import signal; print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, signal.getsignal(signal.SIGTERM))"
    command = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *WATCH, *python(code)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True 0\n" or done.stdout == "True Handlers.SIG_DFL\n"


def test_a_terminal_that_knows_ascii_alone_gets_the_table(tmp_path: Path) -> None:
    """Nothing that is shown needs UTF-8."""
    done = run(tmp_path, *python("pass"), env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert done.returncode == 0, done.stderr
    assert "peak" in done.stderr
