"""The memory of a process tree: who belongs to it, what is kept of it, and how it is drawn."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milldam.errors import ConfigError, InputError, MismatchError
from milldam.memory import Usage
from milldam.report.timeline import read_timeline
from milldam.watching import Watched, Watcher, watch
from milldam.watching.history import MAX_PROCESSES, POINTS, History, growth_of
from milldam.watching.picture import BANDS, draw
from milldam.watching.record import Recorder
from milldam.watching.tree import Reading, name_of

MB = 10**6


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def reading(pid: int, anonymous: int, file: int = 0, name: str = "job") -> Reading:
    return Reading(pid, name, anonymous, file, anonymous + file)


# ---- whole commands ----


def test_a_command_is_measured(tmp_path: Path) -> None:
    """What a command allocates shows in the peak, beside its exit code, the record and the picture."""
    watched = watch(
        python("x = bytearray(60_000_000); import time; time.sleep(0.3); exit(3)"), every=0.05, out=tmp_path
    )
    assert watched.exit_code == 3
    assert 60 * MB < watched.peak.anonymous < 85 * MB
    assert watched.largest_resident > 60 * MB
    assert watched.mean.anonymous <= watched.peak.anonymous
    assert {path.name for path in tmp_path.iterdir()} == {"memory.csv", "memory.svg", "memory.json"}


def test_a_small_command_does_not_count_with_our_own_memory() -> None:
    """A child begins with our pages: what the kernel counts of it then is not the command's."""
    assert watch(["true"]).largest_resident < 8 * MB


def test_children_and_their_children_count() -> None:
    """A command's memory is that of all it started, each under its own name."""
    inner = "x = bytearray(30_000_000); import time; time.sleep(0.5)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    watched = watch(python(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {outer!r}])"), every=0.05)
    assert watched.peak.anonymous > 30 * MB
    large = [process for process in watched.processes if process.peak > 30 * MB]
    assert [process.name.split()[-1] for process in large] == ["-c"]
    assert len({process.pid for process in watched.processes}) >= 3


def test_a_process_that_leaves_its_parents_is_followed(tmp_path: Path) -> None:
    """Forked twice, in a session of its own: it is still seen, and its end is taken note of."""
    mark = tmp_path / "pid"
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        f"        open({str(mark)!r}, 'w').write(str(os.getpid())); x = bytearray(50_000_000); time.sleep(0.4)\n"
        "    os._exit(0)\n"
        "os.wait(); time.sleep(0.7)\n"
    )
    watched = watch(python(code), every=0.05)
    daemon = int(mark.read_text())
    (found,) = [process for process in watched.processes if process.pid == daemon]
    assert found.peak > 50 * MB
    assert watched.still_running == ()
    with pytest.raises(ProcessLookupError):
        os.kill(daemon, 0)


def test_what_the_command_leaves_running_is_named_and_left_alone() -> None:
    """The watch ends with the command, not with what it left behind."""
    code = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid)"
    watched = watch(python(code), every=0.05)
    (left,) = watched.still_running
    os.kill(left, 9)
    os.waitpid(left, 0)


def test_other_children_of_the_caller_do_not_count() -> None:
    """What the caller ran before is none of the command's business, nor is its end."""
    other = subprocess.Popen(python("x = bytearray(80_000_000); import time; time.sleep(60)"))
    try:
        time.sleep(0.3)
        watched = watch(python("import time; time.sleep(0.2)"), every=0.05)
        assert watched.peak.anonymous < 40 * MB
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_command_can_be_watched_from_a_thread() -> None:
    """Where signals can't be handled, the rest still works."""
    found: list[Watched] = []
    thread = threading.Thread(target=lambda: found.append(watch(python("pass"), every=0.05)))
    thread.start()
    thread.join()
    assert found[0].exit_code == 0


def test_this_process_can_be_watched(tmp_path: Path) -> None:
    """As a context manager, of this process and what it starts, without a command."""
    with Watcher(every=0.02, out=tmp_path) as watcher:
        data = bytearray(40 * MB)
        time.sleep(0.1)
        del data
    watched = watcher.watched()
    assert watched.exit_code is None
    assert watched.processes[0].pid == os.getpid()
    assert watched.peak.anonymous > watched.processes[0].final
    assert (tmp_path / "memory.svg").exists()


def test_pages_that_processes_share_are_counted_once_besides() -> None:
    """Forked workers seem to hold their parent's memory again; with each page once they do not."""
    code = "import os, time; x = bytearray(60_000_000); os.fork(); os.fork(); time.sleep(1.5); os._exit(0)"
    watched = watch(python(code), every=0.05)
    assert watched.peak.anonymous > 230 * MB
    assert watched.counted_once is not None
    assert watched.counted_once.anonymous < 100 * MB


def test_what_can_not_be_run_is_said() -> None:
    """A command that is not there, or none, is an error in a sentence."""
    with pytest.raises(InputError, match="no-such-program: command not found"):
        watch(["no-such-program"])
    with pytest.raises(InputError, match="can't be run"):
        watch([str(Path(__file__))])
    with pytest.raises(ConfigError, match="no command"):
        watch([])
    with pytest.raises(ConfigError, match="above 0"):
        watch(["true"], every=0)


def test_without_proc_psutil_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere than on Linux, all resident memory counts as anonymous."""
    monkeypatch.setattr("milldam.watching.tree._HAS_PROC", False)
    watched = watch(python("x = bytearray(40_000_000); import time; time.sleep(0.3)"), every=0.05)
    assert watched.peak.anonymous > 40 * MB
    assert watched.processes[0].name.startswith("python")


# ---- what is kept ----


def test_a_day_of_samples_is_held_in_bounded_memory() -> None:
    """430,000 samples become at most so many moments, the peak among them, and the mean is that of the time."""
    history = History(limit=150 * MB)
    for k in range(24 * 3600 * 5 // 10):
        high = 200 * MB if k == 1234 else 100 * MB
        history.add(k * 2.0, [reading(1, high, 10 * MB), reading(2, MB)])
    moments = history.moments()
    assert POINTS // 2 - 1 <= len(moments) <= POINTS
    assert max(moment.anonymous for moment in moments) == history.peak.anonymous == 201 * MB
    assert all(sum(moment.amounts) == moment.anonymous for moment in moments)
    assert history.mean().anonymous == pytest.approx(101 * MB, rel=0.01)
    assert history.seconds_over_limit == 2.0


def test_ten_thousand_brief_processes_are_counted() -> None:
    """Of very many processes the large ones are kept, the others counted by name."""
    history = History()
    for k in range(10_000):
        history.add(k * 0.1, [reading(1, 50 * MB, name="make"), reading(k + 2, MB + k % 7, name="cc1")])
    kept = history.processes()
    assert len(kept) <= MAX_PROCESSES
    assert kept[0].name == "make"
    assert len(kept) + history.others.count == 10_001
    assert history.others.names == {"cc1": history.others.count}


def test_a_number_used_again_is_another_process() -> None:
    """The kernel gives a process number away again."""
    history = History()
    history.add(0.0, [reading(7, MB, name="old")])
    history.add(1.0, [])
    history.add(2.0, [reading(7, 2 * MB, name="new")])
    assert [(one.name, one.first_seen) for one in history.processes()] == [("new", 2.0), ("old", 0.0)]


@given(st.lists(st.tuples(st.floats(0.001, 50), st.integers(0, 10**12)), min_size=1, max_size=300))
def test_no_peak_is_lost(steps: list[tuple[float, int]]) -> None:
    """However samples fall in time, the curve has their peak and covers no more than their time."""
    history, clock = History(), 0.0
    for passed, amount in steps:
        clock += passed
        history.add(clock, [reading(1, amount)])
    moments = history.moments()
    assert max(moment.anonymous for moment in moments) == max(amount for _, amount in steps)
    assert [moment.seconds for moment in moments] == sorted(moment.seconds for moment in moments)
    assert len(moments) <= POINTS


@given(st.floats(-1e6, 1e6), st.lists(st.integers(0, 99), max_size=15, unique=True))
def test_growth_is_found_below_spikes(slope: float, spikes: list[int]) -> None:
    """A steady slope is found whatever a seventh of the points are."""
    points = [(float(k), 1e9 + slope * k + (5e9 if k in spikes else 0.0)) for k in range(100)]
    growth = growth_of(points)
    assert growth is not None
    assert growth / 60 == pytest.approx(slope, abs=abs(slope) * 0.35 + 1)


def test_a_leak_is_told_from_a_start() -> None:
    """Memory that is filled and then kept is no leak; memory that rises to the end may be one."""
    leaking, filled = History(), History()
    for k in range(600):
        leaking.add(k * 0.2, [reading(1, 100 * MB + k * MB // 2)])
        filled.add(k * 0.2, [reading(1, min(k, 100) * 4 * MB)])
    assert leaking.grows_to_the_end()
    assert leaking.growth() == pytest.approx(150 * MB, rel=0.05)
    assert not filled.grows_to_the_end()


def test_over_too_short_a_time_there_is_no_growth() -> None:
    """Nobody can tell from a few samples."""
    assert growth_of([(0.0, 1.0), (9.0, 2.0)]) is None
    assert growth_of([(k / 100, float(k)) for k in range(100)]) is None
    assert growth_of([(k / 10, float(k)) for k in range(299)]) is None
    assert growth_of([(k / 10, float(k)) for k in range(302)]) == pytest.approx(600)


def test_what_was_given_back_is_no_growth() -> None:
    """A process that grew for a while and fell back has no rate; one that only ends falls, too, and keeps its own."""
    rising = [(k * 0.2, 1e8 + k * 1e7) for k in range(500)]
    assert growth_of(rising) == pytest.approx(3e9)
    assert growth_of([*rising, *((100 + k * 0.2, 1e7) for k in range(50))]) is None
    assert growth_of([*rising, (100.0, 1e7), (100.2, 1e6)]) == pytest.approx(3e9)


# ---- the record ----


def test_the_record_has_a_row_a_process(tmp_path: Path) -> None:
    """Names may hold commas and quotes; the report's reader understands the file, too."""
    recorder = Recorder(tmp_path / "memory.csv")
    recorder.add(0.0, 100.0, [reading(1, 5, 6, 'a, "b"'), reading(2, 7)])
    recorder.add(0.2, 100.2, [reading(1, 50, 6)])
    recorder.close()
    with (tmp_path / "memory.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["pid"], row["anonymous_bytes"], row["name"]) for row in rows] == [
        ("1", "5", 'a, "b"'), ("2", "7", "job"), ("1", "50", "job"),
    ]  # fmt: skip
    timeline = read_timeline(tmp_path / "memory.csv")
    assert timeline is not None
    assert [point.anonymous for point in timeline.points] == [12, 50]


def test_the_record_of_a_day_is_small_and_has_its_peak(tmp_path: Path) -> None:
    """After five minutes samples are thinned out, the highest of each stretch stays."""
    recorder = Recorder(tmp_path / "memory.csv")
    for k in range(24 * 3600):
        recorder.add(float(k), float(k), [reading(1, 10**9 if k == 54_321 else MB)])
    recorder.close()
    lines = (tmp_path / "memory.csv").read_text().splitlines()
    assert len(lines) < 10_000
    assert any(f",{10**9}," in line for line in lines)


def test_only_an_earlier_watch_is_written_over(tmp_path: Path) -> None:
    """The memory.csv of a run is not touched."""
    (tmp_path / "memory.csv").write_text("time,stage,pid,anonymous_bytes,file_bytes\n1,a,1,1,1\n")
    with pytest.raises(MismatchError, match="not written by"):
        watch(["true"], out=tmp_path)
    (tmp_path / "memory.csv").unlink()
    for _ in range(2):
        assert watch(["true"], out=tmp_path).exit_code == 0


# ---- names and the picture ----


@pytest.mark.parametrize(
    ("words", "kernel_name", "name"),
    [
        (["/usr/bin/python3", "-u", "a/train.py"], "python3", "python3 train.py"),
        (["python", "-m", "http.server"], "python", "python -m http.server"),
        (["python", "-c", "from multiprocessing.spawn import x"], "python", "python (multiprocessing)"),
        (["gzip", "file"], "gzip", "gzip"),
        ([], "python", "python"),
        (["bash", "evil\n\x1b[2J.sh"], "bash", "bash evil??[2J.sh"),
    ],
)
def test_a_process_is_named_by_what_it_runs(words: list[str], kernel_name: str, name: str) -> None:
    """Programs by their name, interpreters with their script; nothing that steers a terminal."""
    assert name_of(words, kernel_name) == name


def picture_of(history: History, command: str = "job") -> ET.Element:
    watcher = Watcher()
    watcher.history = history
    watched = replace(watcher.watched(), command=(command,), limit=300 * MB)
    return ET.fromstring(draw(watched))


def test_the_picture_is_sound_and_escapes_names() -> None:
    """A parser reads it, bands and legend agree, and a hostile name stays text."""
    history = History()
    for k in range(50):
        history.add(k * 0.2, [reading(1, 100 * MB, MB, "<script>x</script>"), reading(2, k * MB)])
    root = picture_of(history, '"><script>')
    names = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert "script" not in names
    stacked = [one for one in root.iter() if one.tag.endswith("polygon") and one.get("class", "").startswith("b")]
    assert len(stacked) == 2
    assert "limit 300 MB" in "".join(root.itertext())


def test_a_title_has_of_long_paths_the_last_part() -> None:
    """The picture's title is the command in one line, not the folders it lies in."""
    words = ("/opt/venv/bin/python", "/home/anna/jobs/train.py", "--data=/mnt/x/web.jsonl", "a/b", "line 1\nline 2")
    watched = replace(Watcher().watched(), command=words)
    assert watched.title == "python …/train.py --data=…/web.jsonl a/b line 1 line 2"
    assert watched.title in "".join(ET.fromstring(draw(watched)).itertext())
    assert Watcher().watched().title == "this process"


def test_many_processes_are_drawn_in_few_bands() -> None:
    """Processes of one name are one band; what is small is drawn as others."""
    history = History()
    for k in range(20):
        workers = [reading(10 + n, 10 * MB, name="worker") for n in range(30)]
        history.add(k * 0.2, [*workers, *(reading(100 + n, MB, name=f"tool{n}") for n in range(20))])
    text = "".join(picture_of(history).itertext())
    stacked = [one for one in picture_of(history).iter() if one.get("class", "").startswith("b") and one.get("points")]
    assert len(stacked) == BANDS
    assert "worker × 30" in text
    assert "others" in text


def test_an_empty_watch_is_drawn() -> None:
    """A command that ended before anybody looked still gets its picture."""
    assert picture_of(History()).tag.endswith("svg")
    single = History()
    assert single.add(0.0, [reading(1, 5)]) == Usage(5, 0)
    assert picture_of(single).tag.endswith("svg")
