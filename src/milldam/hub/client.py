"""Calls of huggingface_hub: errors in a few words, and the token in none of them.

The token is never asked for here: huggingface_hub finds it (HF_TOKEN, `hf auth login`) and sends it. We look at it
for one thing, to take it out of whatever text might repeat it.
"""

from __future__ import annotations

import contextlib
import errno
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError, InputError, MilldamError, ResourceError

SHARD_FILES = f"*-{'[0-9a-f]' * 32}.*"
"""Pattern of the names of files that are named after their bytes."""
_REPO_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LIKE_A_TOKEN = re.compile(r"hf_\w{6,}|(?<=[Bb]earer )\S+")
_NETWORK = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
"""Packages whose errors mean the network; which of them is used depends on the version of huggingface_hub."""
_ADVICE = {
    401: "The token is missing, wrong or expired. Make one at https://huggingface.co/settings/tokens,"
    " then `hf auth login` or set HF_TOKEN.",
    403: "The token may not do that. Use one that may write, and a name that is yours or your organisation's.",
    404: "Check the name and the revision. A private repository is not found without a token that may read it.",
    409: "Someone else is changing this repository. Run the same command again; it resumes from there.",
    412: "Someone else is changing this repository. Run the same command again; it resumes from there.",
    429: "Too many requests. Wait some minutes and run the same command again; it resumes from there.",
}
_LATER = "Run the same command again later; it resumes from there."


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


def files_at(api: Any, repo: str, commit: str) -> dict[str, Any]:
    """The files of a commit by path, as huggingface_hub tells of them: `size`, `blob_id`."""
    listed = api.list_repo_tree(repo, recursive=True, repo_type="dataset", revision=commit)
    return {one.path: one for one in listed if hasattr(one, "blob_id")}


def read_file(api: Any, repo: str, commit: str | None, name: str) -> bytes:
    """The bytes of a small file of a commit: a manifest, a card."""
    with tempfile.TemporaryDirectory(prefix="milldam-hub-") as folder:
        return Path(
            api.hf_hub_download(repo, name, repo_type="dataset", revision=commit, local_dir=folder)
        ).read_bytes()


@contextlib.contextmanager
def explained(what: str, *, progress: bool = True) -> Iterator[None]:
    """Errors of huggingface_hub become ours: "Can't `what`: ...". `progress`: let it show its progress bars."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    hidden = not progress and not are_progress_bars_disabled()
    if hidden:
        disable_progress_bars()
    try:
        yield
    except MilldamError:
        raise
    except Exception as error:
        raise _explain(f"Can't {what}", error) from None
    finally:
        if hidden:
            enable_progress_bars()


def _explain(head: str, error: BaseException | None) -> MilldamError:
    """An error of huggingface_hub, also when it is wrapped in others, in our words."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    if any(isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT) for one in chain):
        return ResourceError(f"{head}: the disk is full.\nFree some space and run the same command again.")
    for one in chain:
        status = getattr(getattr(one, "response", None), "status_code", None)
        if isinstance(status, int):
            reason = _line(getattr(one, "server_message", None) or str(one))
            return InputError(f"{head}: it answers {status}: {reason}\n{_ADVICE.get(status, _LATER)}")
    # What is wrapped says more than what wraps it.
    reason = _line(": ".join(dict.fromkeys(str(one) or type(one).__name__ for one in chain[:3])))
    packages = {type(one).__module__.split(".")[0] for one in chain}
    if packages & set(_NETWORK) or any(isinstance(one, ConnectionError | TimeoutError) for one in chain):
        return InputError(
            f"{head}: the Hub does not answer ({reason}).\nCheck the network (and HF_ENDPOINT, HF_HUB_OFFLINE, if they "
            "are set) and run the same command again; it resumes from there."
        )
    return InputError(f"{head}: huggingface_hub says: {reason}")


def _line(text: str) -> str:
    """On one line, not too long, without the token and whatever looks like one."""
    from huggingface_hub import get_token

    line, token = " ".join(text.split()), get_token()
    return _LIKE_A_TOKEN.sub("***", line.replace(token, "***") if token else line)[:300]
