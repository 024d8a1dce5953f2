"""Calls of huggingface_hub: tried again where that helps, errors in a few words, and the token in none of them. What a
repository has at one commit.

The token is never asked for here: huggingface_hub finds it (HF_TOKEN, `hf auth login`) and sends it. We look at it
for one thing, to take it out of whatever text might repeat it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from milldam.errors import ConfigError, InputError, MilldamError, ResourceError

log = logging.getLogger("milldam")

WAITS = (1.0, 2.0, 4.0)
"""Seconds before a call is tried again, on top of what huggingface_hub tries by itself."""
BEAT_SECONDS = 0.25
REPO_TYPE = "dataset"
_TRANSIENT = {408, 409, 412, 425, 429, 500, 502, 503, 504}
_REPO_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LIKE_A_TOKEN = re.compile(r"hf_\w{6,}|(?<=[Bb]earer )\S+")
_NETWORK = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
"""Packages whose errors mean the network; which of them is used depends on the version of huggingface_hub."""

T = TypeVar("T")


def repo_name(repo: str) -> str:
    """`user/name`, also out of `hf://datasets/user/name`.

    >>> repo_name("hf://datasets/user/corpus")
    'user/corpus'
    """
    name = repo.removeprefix("hf://").removeprefix("datasets/").strip("/")
    if not _REPO_NAME.fullmatch(name) or "--" in name or ".." in name or name.endswith(".git") or len(name) > 96:
        raise ConfigError(f'"{repo}" is not the name of a dataset on the Hub. It is USER/NAME, such as anna/corpus.')
    return name


def hub_api() -> Any:
    """An `HfApi`, where huggingface_hub is installed."""
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise ConfigError(
            'The Hub needs the package huggingface_hub, which is not installed here: pip install "milldam[hf]"'
        ) from None
    from milldam import __version__

    return HfApi(library_name="milldam", library_version=__version__)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of huggingface_hub: a job has its own, and the library does not print."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if were_shown:
            enable_progress_bars()


def has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def without_token(text: str) -> str:
    """The text with the token, and whatever looks like one, taken out."""
    from huggingface_hub import get_token

    token = get_token()
    if token:
        text = text.replace(token, "***")
    return _LIKE_A_TOKEN.sub("***", text)


def tried(
    what: str,
    repo: str,
    function: Callable[[], T],
    *,
    passing: tuple[type[Exception], ...] = (),
    warn: Callable[[str], None] = log.info,
) -> T:
    """The function's result; tried again after `WAITS` where that may help, which `warn` is told.

    Errors become ours, told as "can't `what` `repo`"; those of the types `passing` are let through.
    """
    for pause in (*WAITS, None):
        try:
            return function()
        except MilldamError:
            raise
        except Exception as error:
            # huggingface_hub tells "no answer" as "no such entry here".
            if isinstance(error, passing) and type(error).__name__ != "LocalEntryNotFoundError":
                raise
            ours, said, transient = _explained(f"Can't {what} {repo}", error)
            if pause is None or not transient:
                raise ours from None
            warn(f"Can't {what} {repo} ({said}); trying again in {pause:.0f} s.")
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def awaited(call: Callable[[], T], beat: Callable[[], None]) -> T:
    """The result of a call that waits for the network. It is made in a thread: meanwhile `beat` is called now and then.

    An interrupt is not held up; the thread ends with the process, or when the network has answered.
    """
    done: Future[T] = Future()

    def work() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    while not wait([done], BEAT_SECONDS).done:
        beat()
    return done.result()


def _explained(head: str, error: BaseException) -> tuple[MilldamError, str, bool]:
    """An error of huggingface_hub, also when it is wrapped in others: in our words, on one line, and whether trying
    again may help."""
    chain = list(_chain(error))
    answers = ((one, getattr(getattr(one, "response", None), "status_code", None)) for one in chain)
    answer, status = next(((one, found) for one, found in answers if isinstance(found, int)), (None, 0))
    if answer is not None:
        said = _line(getattr(answer, "server_message", None) or str(answer))
    else:
        # What is wrapped says more than what wraps it.
        said = _line(": ".join(dict.fromkeys(str(one) or type(one).__name__ for one in chain[:3])))
    network = not status and any(map(_is_network, chain))
    transient = network or status in _TRANSIENT
    if any(isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT) for one in chain):
        full = ResourceError(f"{head}: the disk is full.\nFree some space and run the same command again.")
        return full, said, transient
    if type(error).__name__ == "OfflineModeIsEnabled":
        return ConfigError(f"{head}: HF_HUB_OFFLINE is set, so the Hub is not asked. Unset it."), said, transient
    if network:
        told = f"the Hub does not answer ({said}).\n{_UNREACHABLE}"
    else:
        advice = _ADVICE.get(status, _ADVICE[500] if status >= 500 else "")
        told = f"{f'it answers {status}' if status else 'huggingface_hub says'}: {said}\n{advice}".rstrip()
    return InputError(f"{head}: {told}"), said, transient


def _is_network(error: BaseException) -> bool:
    return isinstance(error, ConnectionError | TimeoutError) or type(error).__module__.split(".")[0] in _NETWORK


def _line(text: str) -> str:
    """On one line, not too long, without the token."""
    return without_token(" ".join(text.split()))[:300]


_UNREACHABLE = (
    "Check the network (and HF_ENDPOINT, if it is set) and run the same command again; it resumes from there."
)
_ADVICE = {
    401: "The token is missing, wrong or expired. Make one at https://huggingface.co/settings/tokens,"
    " then `hf auth login` or set HF_TOKEN.",
    403: "The token may not do that. Use one that may write, and a name that is yours or your organisation's.",
    404: "Check the name and the revision. A private repository is not found without a token that may read it.",
    409: "Someone else is changing this repository. Run the same command again; it resumes from there.",
    412: "Someone else is changing this repository. Run the same command again; it resumes from there.",
    413: "The Hub does not take so much at once.",
    429: "Too many requests. Wait some minutes and run the same command again; it resumes from there.",
    500: "The Hub has a problem. Run the same command later; it resumes from there.",
}


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


# ---- what a repository has ----


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the repository."""

    size: int
    sha256: str | None
    """None for a small file, which git has itself."""
    blob: str
    """Git's own id: for a small file, the sha1 of its bytes."""


@dataclass(frozen=True, slots=True)
class Tree:
    commit: str
    entries: dict[str, Entry]
    """By path."""


def read_tree(api: Any, repo: str, revision: str | None, *, passing: tuple[type[Exception], ...] = ()) -> Tree:
    """The files of a revision, all of one commit."""
    info = tried("look at", repo, lambda: api.repo_info(repo, repo_type=REPO_TYPE, revision=revision), passing=passing)
    listed = tried(
        "list the files of",
        repo,
        lambda: list(api.list_repo_tree(repo, recursive=True, repo_type=REPO_TYPE, revision=info.sha)),
    )
    return Tree(info.sha, {one.path: _entry(one) for one in listed if hasattr(one, "blob_id")})


def _entry(file: Any) -> Entry:
    return Entry(int(file.size), None if file.lfs is None else str(file.lfs.sha256), str(file.blob_id))


def read_entries(api: Any, repo: str, commit: str, names: list[str]) -> dict[str, Entry]:
    """Some files of a commit, those that are there; one call, however many the repository has."""
    found = api.get_paths_info(repo, names, repo_type=REPO_TYPE, revision=commit)
    return {one.path: _entry(one) for one in found if hasattr(one, "blob_id")}


def read_small(api: Any, repo: str, tree: Tree, name: str) -> bytes:
    """The bytes of a small file of a commit: a manifest, a card."""
    with tempfile.TemporaryDirectory(prefix="milldam-hub-") as folder:
        options = {"repo_type": REPO_TYPE, "revision": tree.commit, "local_dir": folder}
        path = tried(f"fetch {name} from", repo, lambda: api.hf_hub_download(repo, name, **options))
        return Path(path).read_bytes()


def same_bytes(data: bytes, entry: Entry | None) -> bool:
    """Whether a file there has these bytes."""
    if entry is None or len(data) != entry.size:
        return False
    if entry.sha256 is not None:
        return hashlib.sha256(data).hexdigest() == entry.sha256
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest() == entry.blob
