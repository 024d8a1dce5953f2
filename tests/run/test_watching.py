"""The memory of a command's process tree: who belongs to it, and how the command ended."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from milldam.errors import ConfigError, InputError
from milldam.report.timeline import Timeline, read_timeline
from milldam.run.monitor import name_of
from milldam.run.watching import Ended, watch

MB = 10**6


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def watched(tmp_path: Path, code: str) -> tuple[Ended, Timeline]:
    """Some Python, run and sampled twenty times a second."""
    ended = watch(python(code), tmp_path / "memory.csv", every=0.05)
    timeline = read_timeline(tmp_path / "memory.csv")
    assert timeline is not None
    return ended, timeline


def until_seen(tmp_path: Path, least: int) -> str:
    """Code of a command: wait until a sample of it shows so many bytes, however busy the machine is."""
    return f"""
import os, time

def seen():
    rows = [line.split(",") for line in open({str(tmp_path / "memory.csv")!r}) if line.endswith("\\n")]
    return any(row[2] == str(os.getpid()) and int(row[3]) > {least} for row in rows[1:])

while not seen():
    time.sleep(0.02)
"""


def test_a_command_is_measured(tmp_path: Path) -> None:
    """What a command allocates shows in the peak, beside its exit code."""
    ended, timeline = watched(tmp_path, f"x = bytearray(60_000_000)\n{until_seen(tmp_path, 60 * MB)}\nexit(3)")
    assert ended.exit_code == 3
    assert 60 * MB < timeline.peak.anonymous < 85 * MB
    assert ended.largest_resident > 60 * MB
    assert timeline.mean[0] <= timeline.peak.anonymous


def test_a_small_command_does_not_count_with_our_own_memory(tmp_path: Path) -> None:
    """A child begins with our pages: what the kernel counts of it then is not the command's."""
    assert watch(["true"], tmp_path / "memory.csv").largest_resident < 8 * MB


def test_children_and_their_children_count(tmp_path: Path) -> None:
    """A command's memory is that of all it started, each under its own name."""
    inner = f"x = bytearray(30_000_000)\n{until_seen(tmp_path, 30 * MB)}"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    _, timeline = watched(tmp_path, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {outer!r}])")
    assert timeline.peak.anonymous > 30 * MB
    large = [process for process in timeline.processes if process.peak > 30 * MB]
    assert [process.name.split()[-1] for process in large] == ["-c"]
    assert len({process.pid for process in timeline.processes}) >= 3


def test_a_process_that_leaves_its_parents_is_followed(tmp_path: Path) -> None:
    """Forked twice, in a session of its own: it is still seen, and its end is taken note of."""
    mark = tmp_path / "pid"
    seen = until_seen(tmp_path, 50 * MB) + f"open({str(mark)!r} + '.end', 'w')"
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        f"        open({str(mark)!r}, 'w').write(str(os.getpid())); x = bytearray(50_000_000); exec({seen!r})\n"
        "    os._exit(0)\n"
        f"os.wait()\nwhile not os.path.exists({str(mark)!r} + '.end'): time.sleep(0.02)\n"
        "time.sleep(0.2)\n"
    )
    ended, timeline = watched(tmp_path, code)
    (found,) = [process for process in timeline.processes if process.pid == mark.read_text()]
    assert found.peak > 50 * MB
    assert ended.still_running == ()
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_what_the_command_leaves_running_is_named_and_left_alone(tmp_path: Path) -> None:
    """The watch ends with the command, not with what it left behind."""
    ended, _ = watched(tmp_path, "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid)")
    (left,) = ended.still_running
    os.kill(left, 9)
    os.waitpid(left, 0)


def test_other_children_of_the_caller_do_not_count(tmp_path: Path) -> None:
    """What the caller ran before is none of the command's business, nor is its end."""
    other = subprocess.Popen(python("x = bytearray(80_000_000); import time; time.sleep(60)"))
    try:
        time.sleep(0.3)
        _, timeline = watched(tmp_path, "import time; time.sleep(0.2)")
        assert timeline.peak.anonymous < 40 * MB
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_command_can_be_watched_from_a_thread(tmp_path: Path) -> None:
    """Where signals can't be handled, the rest still works."""
    found: list[Ended] = []
    thread = threading.Thread(target=lambda: found.append(watch(python("pass"), tmp_path / "memory.csv")))
    thread.start()
    thread.join()
    assert found[0].exit_code == 0


def test_pages_that_processes_share_are_counted_once_besides(tmp_path: Path) -> None:
    """Forked workers seem to hold their parent's memory again; with each page once they do not."""
    code = "import os, time; x = bytearray(60_000_000); os.fork(); os.fork(); time.sleep(1.5); os._exit(0)"
    ended, timeline = watched(tmp_path, code)
    assert timeline.peak.anonymous > 230 * MB
    assert ended.counted_once is not None and ended.counted_once.anonymous < 100 * MB


def test_what_can_not_be_run_is_said(tmp_path: Path) -> None:
    """A command that is not there, or none, is an error in a sentence."""
    csv = tmp_path / "memory.csv"
    with pytest.raises(InputError, match="no-such-program: command not found"):
        watch(["no-such-program"], csv)
    with pytest.raises(InputError, match="can't be run"):
        watch([str(Path(__file__))], csv)
    with pytest.raises(ConfigError, match="no command"):
        watch([], csv)
    with pytest.raises(ConfigError, match="above 0"):
        watch(["true"], csv, every=0)


def test_without_proc_psutil_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere than on Linux, all resident memory counts as anonymous."""
    monkeypatch.setattr("milldam.run.monitor._HAS_PROC", False)
    _, timeline = watched(tmp_path, f"x = bytearray(40_000_000)\n{until_seen(tmp_path, 40 * MB)}")
    assert timeline.peak.anonymous > 40 * MB


@pytest.mark.parametrize(
    ("words", "kernel_name", "name"),
    [
        (["/usr/bin/python3", "-u", "a/train.py"], "python3", "python3 train.py"),
        (["python", "-m", "http.server"], "python", "python -m http.server"),
        (["python", "-c", "from multiprocessing.spawn import x"], "python", "python (multiprocessing)"),
        (["/usr/bin/python3", "/usr/bin/milldam", "demo"], "milldam", "milldam"),
        (["gzip", "file"], "gzip", "gzip"),
        ([], "python", "python"),
        (["bash", "evil\n\x1b[2J.sh"], "bash", "bash evil??[2J.sh"),
    ],
)
def test_a_process_is_named_by_what_it_runs(words: list[str], kernel_name: str, name: str) -> None:
    """Programs by their name, interpreters with their script; nothing that steers a terminal."""
    assert name_of(words, kernel_name) == name
