"""Runs a command under a hard memory limit and reports what it really used.

In: a command, and a limit for it and all its children. Out (on stderr, and as JSON on demand): the
peaks of its memory, its wall time, its exit status, and whether the kernel's out-of-memory killer
acted. The limit is a memory cgroup of its own (v1 or v2; Linux, root), swap included, and page
cache counts in it, as in a container. The cgroup and any process left in it are removed at the end.

Three peaks, sampled every 50 ms, so a shorter spike can be missed:

- tree: RssAnon + RssShmem summed over the processes; a page shared by two counts twice.
- cgroup: the kernel's count of anonymous and shared memory; each page once.
- charged: the kernel's own high-water mark of all that counts against the limit, page cache
  included; never misses a spike, and rises to the limit for anything that reads large files.

    python benchmarks/memory.py --limit 600MB -- milldam tokenize big.jsonl -o out --memory 512MB
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from sizes import megabytes, parse_size

SAMPLE_SECONDS = 0.05
REMOVE_ATTEMPTS = 100

# A shell enters the cgroup and becomes the command: no page of it is charged anywhere else.
ENTER_AND_EXEC = 'echo $$ > "$0" && exec "$@"'


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a version of cgroups keeps what we set and read."""

    version: int
    limits: tuple[str, ...]
    """Files that take the limit, in the order they must be written."""
    anonymous_key: str
    shared_key: str
    charged_peak: str
    oom_events: str


V1 = Layout(
    version=1,
    # memsw is memory plus swap, and must not be below the memory limit: second.
    limits=("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    anonymous_key="total_rss",
    shared_key="total_shmem",
    charged_peak="memory.max_usage_in_bytes",
    oom_events="memory.oom_control",
)
V2 = Layout(
    version=2,
    limits=("memory.max",),
    anonymous_key="anon",
    shared_key="shmem",
    charged_peak="memory.peak",
    oom_events="memory.events",
)


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A memory cgroup of our own; what it says of itself."""

    folder: Path
    layout: Layout

    @property
    def entrance(self) -> Path:
        """Who writes its process id here moves in."""
        return self.folder / "cgroup.procs"

    def limit(self, limit_bytes: int) -> None:
        """From now on the kernel kills rather than give more than this."""
        for name in self.layout.limits:
            if (self.folder / name).exists():
                (self.folder / name).write_text(str(limit_bytes))
        swap = self.folder / "memory.swap.max"
        if swap.exists():
            swap.write_text("0")

    def processes(self) -> list[int]:
        """The ids of all processes in it: the command and whatever it started."""
        return [int(line) for line in self.entrance.read_text().split()]

    def anonymous_bytes(self) -> int:
        """Anonymous and shared memory, each page once."""
        stat = read_counters(self.folder / "memory.stat")
        return stat[self.layout.anonymous_key] + stat.get(self.layout.shared_key, 0)

    def charged_peak_bytes(self) -> int | None:
        """The most ever charged; v2 tells since Linux 5.19."""
        path = self.folder / self.layout.charged_peak
        return int(path.read_text()) if path.exists() else None

    def oom_kills(self) -> int:
        """How many processes the out-of-memory killer ended in it."""
        return read_counters(self.folder / self.layout.oom_events).get("oom_kill", 0)

    def remove(self) -> None:
        """Ends what still runs in it, then takes it away."""
        for _ in range(REMOVE_ATTEMPTS):
            for process in self.processes():
                kill_if_there(process)
            try:
                self.folder.rmdir()
            except OSError:
                # A killed process leaves its cgroup a moment later.
                time.sleep(SAMPLE_SECONDS)
            else:
                return
        raise SystemExit(f"{self.folder}: could not be removed; remove it with rmdir")


@dataclass(slots=True)
class Report:
    """What a run used; written as it is with --json."""

    command: list[str]
    limit_bytes: int | None
    cgroup_version: int
    tree_peak_bytes: int = 0
    cgroup_peak_bytes: int = 0
    charged_peak_bytes: int | None = None
    wall_seconds: float = 0.0
    exit_status: int = 0
    """As a shell gives it: 128 + the signal for a command that a signal ended."""
    oom_kills: int = 0
    samples: int = 0


def read_counters(path: Path) -> dict[str, int]:
    """The `name number` lines of a cgroup file."""
    pairs = (line.split() for line in path.read_text().splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs}


def kill_if_there(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def memory_root() -> tuple[Path, Layout]:
    """The mounted hierarchy that has the memory controller: it is in one of the two, never both."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    for _, folder, kind, options, *_ in mounts:
        if kind == "cgroup" and "memory" in options.split(","):
            return Path(folder), V1
    for _, folder, kind, *_ in mounts:
        controllers = Path(folder) / "cgroup.subtree_control"
        if kind == "cgroup2" and controllers.exists() and "memory" in controllers.read_text():
            return Path(folder), V2
    raise SystemExit(
        "no memory cgroups here: neither a v1 memory hierarchy nor a v2 root that hands on the "
        "memory controller (echo +memory > /sys/fs/cgroup/cgroup.subtree_control)"
    )


def create_cgroup() -> Cgroup:
    root, layout = memory_root()
    cgroup = Cgroup(root / f"milldam-benchmark-{os.getpid()}", layout)
    try:
        cgroup.folder.mkdir()
    except OSError as error:
        raise SystemExit(f"{cgroup.folder}: {error.strerror}; run as root on Linux") from error
    return cgroup


def resident_bytes(process: int) -> int:
    """RssAnon + RssShmem of one process; 0 when it has just ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    wanted = (line.split() for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
    return sum(int(kilobytes) * 1024 for _, kilobytes, _ in wanted)


def sample(cgroup: Cgroup, report: Report) -> None:
    tree_bytes = sum(resident_bytes(process) for process in cgroup.processes())
    report.tree_peak_bytes = max(report.tree_peak_bytes, tree_bytes)
    report.cgroup_peak_bytes = max(report.cgroup_peak_bytes, cgroup.anonymous_bytes())
    report.samples += 1


def watch(process: subprocess.Popen[bytes], cgroup: Cgroup, report: Report) -> None:
    """Samples until the command ends; its children, if any outlive it, are not waited for."""
    started = time.perf_counter()
    while process.returncode is None:
        sample(cgroup, report)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SAMPLE_SECONDS)
    report.wall_seconds = time.perf_counter() - started
    status = process.returncode
    report.exit_status = status if status >= 0 else 128 - status
    report.oom_kills = cgroup.oom_kills()
    report.charged_peak_bytes = cgroup.charged_peak_bytes()


def measure(command: list[str], limit_bytes: int | None) -> Report:
    """Runs the command in a cgroup of its own and says what it used."""
    cgroup = create_cgroup()
    try:
        if limit_bytes is not None:
            cgroup.limit(limit_bytes)
        report = Report(command, limit_bytes, cgroup.layout.version)
        shell = ["/bin/sh", "-c", ENTER_AND_EXEC, str(cgroup.entrance), *command]
        with subprocess.Popen(shell) as process:
            try:
                watch(process, cgroup, report)
            except BaseException:
                process.kill()
                raise
        return report
    finally:
        cgroup.remove()


def lines_of(report: Report) -> list[str]:
    limit = "none" if report.limit_bytes is None else megabytes(report.limit_bytes)
    charged = report.charged_peak_bytes
    return [
        f"limit     {limit} (cgroup v{report.cgroup_version})",
        f"tree      {megabytes(report.tree_peak_bytes)} peak, RssAnon + RssShmem",
        f"cgroup    {megabytes(report.cgroup_peak_bytes)} peak, anonymous + shared",
        f"charged   {'unknown' if charged is None else megabytes(charged)} peak, with page cache",
        f"wall      {report.wall_seconds:.2f} s, {report.samples} samples",
        f"exit      {report.exit_status}",
        f"OOM kills {report.oom_kills}",
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=parse_size, help="hard limit, e.g. 600MB; none without it")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("command", nargs="+", help="what to run, after --")
    return parser.parse_args()


def end_on_terminate() -> None:
    """SIGTERM unwinds the stack as Ctrl-C does, so that the cgroup is removed."""

    def leave(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def main() -> None:
    arguments = parse_arguments()
    end_on_terminate()
    report = measure(arguments.command, arguments.limit)
    print("\n".join(lines_of(report)), file=sys.stderr)
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(report), indent=2) + "\n")
    raise SystemExit(report.exit_status)


if __name__ == "__main__":
    main()
