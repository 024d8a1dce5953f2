"""`NAME.npy`: all tokens of the input in one 1-D file for `np.load(mmap_mode="r")`, written as a stream.

The tokens are made as a store in a work folder beside it, `.NAME.npy.milldam-npy` (so that it resumes like one), and
joined. The folder stays, without the tokens: it says what the file was made from. Beside the file lies `NAME.npy.json`,
which tells readers of tokenizer and input. Disk: twice the file while it is joined.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from milldam.config.settings import Config
from milldam.errors import ConfigError, MismatchError, Setting
from milldam.files import NewFile, json_bytes, write_file
from milldam.formats.flat import npy_header, token_blocks
from milldam.formats.foreign import read_sidecar, sidecar_path
from milldam.loader.stores import Store
from milldam.pipeline.finishing import TextSummary, complete
from milldam.pipeline.job import TokenJob
from milldam.run import engine
from milldam.run.engine import Options, Session
from milldam.run.summary import Observer
from milldam.stores.kinds import TOKENS
from milldam.stores.tokens.manifest import Manifest
from milldam.stores.verify import has_every_file


def npy_path(inputs: Sequence[str], out: Path | None) -> Path:
    """The path of the file: by default beside the one text file it is made from."""
    if out is not None:
        return out
    if len(inputs) != 1 or not inputs[0].endswith(".txt"):
        raise ConfigError(Setting("out"), ": say where the file goes; only beside one .txt file it need not be said.")
    return Path(inputs[0]).with_suffix(".npy")


def work_folder(npy: Path) -> Path:
    return npy.with_name(f".{npy.name}.milldam-npy")


def tokenize_to_npy(config: Config, observer: Observer | None = None) -> TextSummary:
    """Do the job, or what is left of it; a file that is up to date is left alone. `config.out` names the file."""
    npy = Path(config.out)
    work = work_folder(npy)
    if npy.suffix != ".npy":
        raise ConfigError(Setting("out"), f": {npy}: the output is a file that ends in .npy.")
    if npy.exists() and not work.exists() and not config.overwrite:
        raise MismatchError(
            f"{npy} exists, and no {work.name} beside it says what it was made from. Replace it with ",
            Setting("overwrite", True),
            ".",
        )
    made = dataclasses.replace(config, out=str(work))
    summary = engine.run(_NpyJob(made, npy), Options.of(made, name=npy), observer)
    if not _is_joined(work, npy):
        store, manifest = Store(work), Manifest.read(work)
        with NewFile(npy) as new:
            new.write(npy_header(store.dtype, store.tokens))
            for block in token_blocks(store.stream()):
                new.write(block.data)
            new.commit()
        facts = dataclasses.asdict(manifest) | {"format_version": TOKENS.version, "fingerprint": manifest.fingerprint}
        counts = {name: manifest.totals[name] for name in ("documents", "tokens")}
        write_file(sidecar_path(npy), json_bytes({"format": "milldam npy", **facts, **counts}))
    for name, _ in Manifest.read(work).files():
        (work / name).unlink(missing_ok=True)
    return dataclasses.replace(summary, out=str(npy), output_bytes=npy.stat().st_size)


def _is_joined(work: Path, npy: Path) -> bool:
    """Whether the file has the tokens of the store that was made in the work folder."""
    facts, manifest = read_sidecar(npy), Manifest.read(work)
    if facts is None or not npy.exists() or facts["fingerprint"] != manifest.fingerprint:
        return False
    dtype, tokens = np.dtype(manifest.dtype), manifest.totals["tokens"]
    return bool(npy.stat().st_size == len(npy_header(dtype, tokens)) + tokens * dtype.itemsize)


class _NpyJob(TokenJob):
    """Its folder has the manifest alone when the tokens lie in the file."""

    def __init__(self, config: Config, npy: Path) -> None:
        super().__init__(config, report=False)
        self._npy = npy

    def up_to_date(self, run: Session) -> TextSummary | None:
        if not (_is_joined(run.folder.out, self._npy) or has_every_file(run.folder.out, TOKENS)):
            return None
        return complete(self._config, run.folder, report=False)
