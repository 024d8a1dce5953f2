"""What the tests of whole jobs share: small corpora, the command line, and the bytes of a store."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from click.testing import CliRunner, Result

import milldam

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

DEMO = Path(milldam.__file__).parent / "demo_data"
TOKENIZER = DEMO / "tokenizer.json"
EOS_TEXT = "<|endoftext|>"
MILLDAM = str(Path(sys.executable).with_name("milldam"))

# Each breaks a line in its own way; the reason is what the store's rejects must say.
BROKEN_LINES = {
    b'{"text": "cut off': "bad_json",
    b'{"title": "no text here"}': "no_field",
    b'{"text": null}': "no_text",
    b'{"text": "caf\xe9"}': "not_utf8",
}


@dataclass(slots=True)
class Corpus:
    """A JSON Lines file, and what must come out of it."""

    path: Path
    texts: list[str] = field(default_factory=list)
    """The documents that can be read, in order."""
    broken: list[tuple[int, str]] = field(default_factory=list)
    """(line, reason) of the lines that can't."""


def demo_texts() -> list[str]:
    with (DEMO / "corpus.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def make_texts(size: int, seed: int = 0) -> Iterator[str]:
    """Documents of about `size` bytes in all, in many scripts, no two of them equal."""
    rng = random.Random(seed)
    sources = demo_texts()
    made = 0
    while made < size:
        source = rng.choice(sources)
        start = rng.randrange(len(source))
        text = f"{rng.randrange(10**6)} {source[start : start + rng.randrange(20, 1500)]}"
        made += len(text.encode())
        yield text


def write_corpus(path: Path, size: int, *, seed: int = 0, broken_every: int = 0) -> Corpus:
    """A corpus of about `size` bytes; every so many lines one is broken."""
    corpus = Corpus(path)
    kinds = list(BROKEN_LINES.items())
    number = 0
    with path.open("wb") as file:
        for text in make_texts(size, seed):
            number += 1
            if broken_every and number % broken_every == 0:
                line, reason = kinds[len(corpus.broken) % len(kinds)]
                corpus.broken.append((number, reason))
                file.write(line + b"\n")
                number += 1
            corpus.texts.append(text)
            file.write(json.dumps({"id": number, "text": text}, ensure_ascii=False).encode() + b"\n")
    return corpus


def write_lines(path: Path, texts: list[str]) -> Path:
    """The texts as JSON Lines."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def expected_ids(texts: list[str], *, eos: int | None = 0) -> list[list[int]]:
    """The ids that HF tokenizers gives with the demo tokenizer, closed by EOS unless they end with it already."""
    tokenizer = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    if eos is None:
        return encoded
    return [ids if ids[-1:] == [eos] else [*ids, eos] for ids in encoded]


def documents(store: Path | milldam.Store) -> list[list[int]]:
    """All documents of a store as lists of ids."""
    opened = store if isinstance(store, milldam.Store) else milldam.open(store)
    return [document.tolist() for document in opened]


def set_aside(store: Path | milldam.Store, what: str = "rejects") -> list[dict[str, Any]]:
    """The lines of a store's rejects, dropped or contamination; none when there is no such file."""
    opened = milldam.open(store) if isinstance(store, Path) else store
    path = opened.audit.get(what)
    if path is None:
        return []
    data = path.read_bytes()
    return [json.loads(line) for line in (zstd.decompress(data) if path.suffix == ".zst" else data).splitlines()]


def store_bytes(out: Path) -> dict[str, bytes]:
    """Every file of a store and its rows, but for the run folder."""
    files = (path for path in out.rglob("*") if path.is_file() and path.relative_to(out).parts[0] != "run")
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(files)}


def leftovers(folder: Path) -> list[str]:
    """Files that only a run at work may have."""
    found = (path for path in folder.rglob("*") if path.suffix in (".tmp", ".new") or path.name.startswith("."))
    return sorted(str(path.relative_to(folder)) for path in found)


def invoke(*arguments: object, input: bytes | None = None) -> Result:
    """The command line in this process: quick, for what needs no process of its own."""
    from milldam.cli import main

    before = signal.getsignal(signal.SIGTERM)
    try:
        return CliRunner().invoke(main, [str(one) for one in arguments], input=input)
    finally:
        signal.signal(signal.SIGTERM, before)


def run_here(*arguments: object, code: int = 0) -> Result:
    """The command line in this process; its exit code must be `code`."""
    done = invoke(*arguments)
    assert done.exit_code == code, f"exit {done.exit_code}\n{done.output}"
    return done


def run_milldam(*arguments: object, code: int | None = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command line as a process; its exit code must be `code`."""
    command = [MILLDAM, *(str(one) for one in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)
    assert code is None or done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@contextmanager
def started(*arguments: object, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A run in a process group of its own, ended at the latest when the block is left."""
    command = [MILLDAM, *(str(one) for one in arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | options
    process = subprocess.Popen(command, text=True, start_new_session=True, **options)
    try:
        yield process
    finally:
        kill_group(process)


def kill_group(process: subprocess.Popen[str]) -> None:
    """SIGKILL for a run and all its workers, as when the machine fails."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None and not stream.closed:
            stream.close()


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str] | None = None) -> bool:
    """Wait for the condition; False when the process ended before it came true."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if condition():
            return True
        if process is not None and process.poll() is not None:
            return bool(condition())
        time.sleep(0.005)
    raise AssertionError("nothing happened within a minute")


def recorded(out: Path) -> int:
    """Finished parts of a run."""
    path = out / "run" / "records.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of its own in a folder; skips the test where that is not allowed."""
    folder.mkdir(exist_ok=True)
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("mounting a small file system needs root")
    made = subprocess.run([mount, "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
