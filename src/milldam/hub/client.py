"""Calls of huggingface_hub: tried again where that helps, errors in a few words, and the token in none of them.

The token is never asked for here: huggingface_hub finds it (HF_TOKEN, `hf auth login`) and sends it. We look at it
for one thing, to take it out of whatever text might repeat it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from milldam.errors import ConfigError, InputError, MilldamError, ResourceError

log = logging.getLogger("milldam")

WAITS = (1.0, 2.0, 4.0)
"""Seconds before a push or pull is tried again, on top of what huggingface_hub tries by itself."""
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


def tried(what: str, function: Callable[[], T], *, progress: bool) -> T:
    """The function's result; tried again after `WAITS` where that may help. Errors become ours: "Can't `what`: ...".

    `progress`: let huggingface_hub show its progress bars.
    """
    with contextlib.nullcontext() if progress else _without_bars():
        for pause in (*WAITS, None):
            try:
                return function()
            except MilldamError:
                raise
            except Exception as error:
                explained, reason, transient = _explain(what, error)
                if pause is None or not transient:
                    raise explained from None
                log.warning("Can't %s (%s); trying again in %.0f s.", what, reason, pause)
                time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if were_shown:
            enable_progress_bars()


def _explain(what: str, error: BaseException) -> tuple[MilldamError, str, bool]:
    """An error of huggingface_hub, also when it is wrapped in others: in our words, on one line, and whether trying
    again may help."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    answers = ((one, getattr(getattr(one, "response", None), "status_code", None)) for one in chain)
    answer, status = next(((one, code) for one, code in answers if isinstance(code, int)), (None, 0))
    if answer is not None:
        reason = getattr(answer, "server_message", None) or str(answer)
    else:
        # What is wrapped says more than what wraps it.
        reason = ": ".join(dict.fromkeys(str(one) or type(one).__name__ for one in chain[:3]))
    reason = without_token(" ".join(reason.split()))[:300]
    network = not status and any(map(_is_network, chain))
    transient = network or status in _TRANSIENT
    if any(isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT) for one in chain):
        full = f"Can't {what}: the disk is full.\nFree some space and run the same command again."
        return ResourceError(full), reason, False
    if type(chain[0]).__name__ == "OfflineModeIsEnabled":
        offline = f"Can't {what}: HF_HUB_OFFLINE is set, so the Hub is not asked. Unset it."
        return ConfigError(offline), reason, False
    if network:
        text = f"the Hub does not answer ({reason}).\n{_UNREACHABLE}"
    else:
        advice = _ADVICE.get(status, _ADVICE[500] if status >= 500 else "")
        text = f"{f'it answers {status}' if status else 'huggingface_hub says'}: {reason}\n{advice}".rstrip()
    return InputError(f"Can't {what}: {text}"), reason, transient


def without_token(text: str) -> str:
    """The text with the token, and whatever looks like one, taken out."""
    from huggingface_hub import get_token

    token = get_token()
    return _LIKE_A_TOKEN.sub("***", text.replace(token, "***") if token else text)


def _is_network(error: BaseException) -> bool:
    return isinstance(error, ConnectionError | TimeoutError) or type(error).__module__.split(".")[0] in _NETWORK


_UNREACHABLE = (
    "Check the network (and HF_ENDPOINT, if it is set) and run the same command again; it resumes from there."
)
_CHANGING = "Someone else is changing this repository. Run the same command again; it resumes from there."
_ADVICE = {
    401: "The token is missing, wrong or expired. Make one at https://huggingface.co/settings/tokens,"
    " then `hf auth login` or set HF_TOKEN.",
    403: "The token may not do that. Use one that may write, and a name that is yours or your organisation's.",
    404: "Check the name and the revision. A private repository is not found without a token that may read it.",
    409: _CHANGING,
    412: _CHANGING,
    413: "The Hub does not take so much at once.",
    429: "Too many requests. Wait some minutes and run the same command again; it resumes from there.",
    500: "The Hub has a problem. Run the same command later; it resumes from there.",
}
