"""A finished store -> `run/report.html`, a page that tells how the run went and what came out of it.

The page stands alone: one file, no script, no font, image or address from elsewhere; it opens from the disk. Text
from the data is escaped and its invisible characters are shown. Making it takes memory that does not grow with the
store: lengths and the memory timeline are streamed, and a handful of documents are decoded. The decoding loads the
store's tokenizer, which is the largest part.
"""

from __future__ import annotations

import logging
from pathlib import Path

from milldam.errors import ResourceError
from milldam.files import explain_os_errors, write_file
from milldam.report.facts import gather
from milldam.report.page import render

NAME = "report.html"
log = logging.getLogger("milldam")

__all__ = ["NAME", "write_report"]


def write_report(out: Path) -> Path:
    """Make the page of a finished store anew; its path. Equal files give equal bytes.

    Where nothing can be written, the page that the run made stays.
    """
    page = render(gather(out))
    path = out / "run" / NAME
    try:
        with explain_os_errors(path):
            path.parent.mkdir(exist_ok=True)
        write_file(path, page.encode())
    except ResourceError as error:
        if not path.exists():
            raise
        log.warning("The report is the one that the run made: %s", error)
    return path
