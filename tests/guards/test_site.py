"""The documentation site: it builds without a warning, every inner link leads somewhere, and a browser shows it."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from tests.kit.browser import chromium

PROJECT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := given.get(name))}
        self.links += [value for name in ("href", "src") if (value := given.get(name)) is not None]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built anew; any warning is an error."""
    pytest.importorskip("mkdocstrings", reason="pip install milldam[docs]")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_inner_link_leads_somewhere(site: Path) -> None:
    """To a file of the site and, where it names one, to an anchor in it; nothing is loaded from elsewhere."""
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            inside = target in pages and unquote(parts.fragment) not in pages[target].anchors
            if not target.exists() or inside:
                broken.append(f"{path.relative_to(site)}: {link}")
    assert len(pages) > 60 and not broken


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    """Pages open from the disk: scripts, styles and pictures are the site's own, the search index too."""
    loaded = re.compile(r'<(?:script|img|link)[^>]+(?:src|href)="(https?:[^"]+)"')
    found = {link for path in site.rglob("*.html") for link in loaded.findall(path.read_text(encoding="utf-8"))}
    assert not found and list((site / "search").glob("search_index.js*"))


def test_the_search_works_without_a_network(site: Path, tmp_path: Path) -> None:
    """On pages that are opened from the disk."""
    dom = chromium(tmp_path, site / "index.html", "--dump-dom", "--virtual-time-budget=20000", query="?q=best fit")
    found = re.findall(r'<a href="([^"]+)" class="md-search-result__link"', dom)
    assert any("training.html" in link or "preprocessing.html" in link for link in found), found
