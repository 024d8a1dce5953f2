"""Which files make a store, here and there; and calls of huggingface_hub, whose errors are told in a few words.

A store is what its manifest names, which may come from anywhere: names that leave the folder are refused. The token is
never asked for: huggingface_hub finds it (HF_TOKEN, `hf auth login`) and sends it; it is in none of our texts.
"""

from __future__ import annotations

import contextlib
import errno
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from milldam.errors import ConfigError, InputError, MilldamError, ResourceError, StoreError
from milldam.stores.kinds import KINDS, Kind

TOKENIZER = "tokenizer.json"
"""The only file of a store that is not named after its bytes."""
SHARD_FILES = f"*-{'[0-9a-f]' * 32}.*"
"""Pattern of the names of files that are named after their bytes."""
_REPO_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LIKE_A_TOKEN = re.compile(r"hf_\w{6,}|(?<=[Bb]earer )\S+")
_ADVICE = {
    401: "The token is missing, wrong or expired. Make one at https://huggingface.co/settings/tokens,"
    " then `hf auth login` or set HF_TOKEN.",
    403: "The token may not do that. Use one that may write, and a name that is yours or your organisation's.",
    404: "Check the name and the revision. A private repository is not found without a token that may read it.",
    412: "Someone else is changing this repository. Run the same command again; it resumes from there.",
}
_LATER = "Check the network (and HF_ENDPOINT, HF_HUB_OFFLINE) and run the same command again; it resumes from there."


@dataclass(frozen=True, slots=True)
class _ManifestAlone:
    """A place with nothing but a manifest."""

    name: str
    data: bytes
    folder = None

    def manifest(self, name: str) -> bytes:
        return self.data


@dataclass(frozen=True, slots=True)
class Contents:
    kind: Kind
    manifest: Any
    """That of the kind."""
    manifest_bytes: bytes
    files: dict[str, dict[str, Any]]
    """All but the manifest, in its order: `xxh3` and `bytes`; of the tokenizer, `xxh3` alone."""

    @classmethod
    def of(cls, names: set[str], read: Callable[[str], bytes], where: str) -> Contents:
        """The files of a store in a place with these names. The files themselves are not looked at."""
        kinds = [kind for kind in KINDS if kind.manifest in names]
        if len(kinds) != 1:
            found, known = (", ".join(kind.manifest for kind in some) for some in (kinds, KINDS))
            raise StoreError(f"{where}: not a store: of {known}, a store has one; found {found or 'none'}.")
        data = read(kinds[0].manifest)
        manifest = kinds[0].read(cast("Any", _ManifestAlone(where, data)))
        tokenizer = (manifest.tokenizer or {}).get("xxh3")
        own = {TOKENIZER: {"xxh3": tokenizer}} if tokenizer else {}
        return cls(kinds[0], manifest, data, own | dict(manifest.files()))

    @property
    def names(self) -> set[str]:
        return {*self.files, self.kind.manifest}

    def problem(self, name: str, size: int | None) -> str | None:
        """Why a file of this size (None: there is none) can't be the one of this name."""
        expected = self.files[name].get("bytes")
        if size is None:
            return f"{name}: missing"
        return None if expected in (None, size) else f"{name}: {size:,} bytes where the manifest says {expected:,}"


def size_of(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


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
        raise ConfigError('The Hub needs the package huggingface_hub: pip install "milldam[hf]"') from None
    from milldam import __version__

    return HfApi(library_name="milldam", library_version=__version__)


def sizes_at(api: Any, repo: str, commit: str) -> dict[str, int]:
    """The files of a commit by path."""
    listed = api.list_repo_tree(repo, recursive=True, repo_type="dataset", revision=commit)
    return {one.path: one.size for one in listed if hasattr(one, "blob_id")}


def read_file(api: Any, repo: str, commit: str | None, name: str) -> bytes:
    """The bytes of a small file of a commit: a manifest, a card."""
    with tempfile.TemporaryDirectory(prefix="milldam-hub-") as folder:
        path = api.hf_hub_download(repo, name, repo_type="dataset", revision=commit, local_dir=folder)
        return Path(path).read_bytes()


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
    """An error of huggingface_hub, also when it is wrapped in others, in our words, without the token."""
    from huggingface_hub import get_token

    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    if any(isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT) for one in chain):
        return ResourceError(f"{head}: the disk is full.\nFree some space and run the same command again.")
    statuses = (getattr(getattr(one, "response", None), "status_code", None) for one in chain)
    status = next((one for one in statuses if isinstance(one, int)), None)
    # What is wrapped says more than what wraps it.
    text, token = ": ".join(dict.fromkeys(str(one) or type(one).__name__ for one in chain[:3])), get_token()
    text = _LIKE_A_TOKEN.sub("***", text.replace(token, "***") if token else text)
    said = "huggingface_hub says" if status is None else f"it answers {status}"
    return InputError(f"{head}: {said}: {' '.join(text.split())[:300]}\n{_ADVICE.get(status or 0, _LATER)}")
