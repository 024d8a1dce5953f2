"""What the documentation site has beyond the files of docs/: pages made from the code, and files of the project.

    index.md                the README
    reference/python.md     every public name, for mkdocstrings
    project/...             whatever pages link to outside of docs/: Markdown as it is, other files as code

A hook of mkdocs (mkdocs.yml); pages in docs/ read well on their own, with links that hold in the repository.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

PROJECT = Path(__file__).parents[1]
DOCS = PROJECT / "docs"
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s#:]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^( *```)(\w+) +(\S+)$", re.MULTILINE)
FOREIGN = "https://unpkg.com/iframe-worker/shim"
WORKER = "assets/javascripts/iframe-worker.js"
FIRST = ("tokenize", "preprocess", "open", "Store", "Samples", "Streams", "Batches", "mix", "Feed", "map", "Table")
"""Names that the Python reference has first; the others follow by the alphabet."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sh": "sh", ".toml": "toml"}


def on_config(config: Any) -> Any:
    """Sections that list a folder: its pages, by name."""
    config["nav"] = [_listed(entry) for entry in config["nav"]]
    return config


def _listed(entry: dict[str, Any]) -> dict[str, Any]:
    ((title, value),) = entry.items()
    if not (isinstance(value, str) and value.endswith("/")):
        return entry
    pages = sorted((DOCS / value).glob("*.md"), key=lambda page: (page.name != "README.md", page.name))
    return {title: list(dict.fromkeys([f"{value}README.md", *(f"{value}{page.name}" for page in pages)]))}


def on_files(files: Files, config: Any) -> Files:
    made = {
        "index.md": (PROJECT / "README.md").read_text(encoding="utf-8"),
        "decisions/README.md": decisions(),
        "reference/python.md": names(),
    }
    sources = {"index.md": Path("README.md")}
    sources |= {file.src_uri: Path("docs") / file.src_uri for file in files if file.src_uri.endswith(".md")}
    waiting = list(sources.values())
    while waiting:
        source = waiting.pop()
        for outside in _outside(source):
            uri = _place(outside)
            if uri not in made:
                made[uri] = _shown(outside)
                if outside.suffix == ".md":
                    waiting.append(outside)
    made[WORKER] = (PROJECT / "site/iframe-worker.js").read_text(encoding="utf-8")
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """What the theme would fetch from elsewhere, for the search, is the site's own."""
    return output.replace(FOREIGN, posixpath.relpath(WORKER, posixpath.dirname(page.file.dest_uri) or "."))


def on_post_template(output_content: str, **_: Any) -> str:
    return output_content.replace(FOREIGN, WORKER)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are in the repository lead to pages of the site; a file's name behind a fence is its title."""
    source = _source_of(page.file.src_uri)
    if source is not None:
        markdown = LINK.sub(lambda found: _relinked(found, source, page.file.src_uri), markdown)
    return FENCE.sub(_titled, markdown)


def _titled(found: re.Match[str]) -> str:
    begin, language, more = found.groups()
    return f'{begin}{language} title="{more}"' if "." in more else f"{begin}{language}"


# ---- files of the project outside of docs/ ----


def _source_of(uri: str) -> Path | None:
    """The file of the project that a page shows; None: it is made from the code."""
    if uri == "index.md":
        return Path("README.md")
    if uri.startswith("reference/"):
        return None
    if not uri.startswith("project/"):
        return Path("docs") / uri
    plain = Path(uri.removeprefix("project/"))
    return plain if (PROJECT / plain).exists() else None


def _targets(source: Path) -> Iterator[tuple[re.Match[str], Path]]:
    for found in LINK.finditer((PROJECT / source).read_text(encoding="utf-8")):
        yield found, Path(posixpath.normpath(posixpath.join(source.parent.as_posix(), found[2])))


def _outside(source: Path) -> Iterator[Path]:
    for _, target in _targets(source):
        if (PROJECT / target).exists() and target.parts[0] != "docs" and target != Path("README.md"):
            yield target


def _place(target: Path) -> str:
    if target == Path("README.md"):
        return "index.md"
    if target.parts[0] == "docs":
        inner = target.relative_to("docs")
        return (inner / "README.md" if (PROJECT / target).is_dir() else inner).as_posix()
    named = target.as_posix()
    return f"project/{named}" if target.suffix == ".md" else f"project/{named}.md"


def _relinked(found: re.Match[str], source: Path, uri: str) -> str:
    target = Path(posixpath.normpath(posixpath.join(source.parent.as_posix(), found[2])))
    if not (PROJECT / target).exists():
        return found[0]
    return f"{found[1]}({posixpath.relpath(_place(target), posixpath.dirname(uri) or '.')}{found[3] or ''})"


def _shown(path: Path) -> str:
    """A file as a page: Markdown as it is, a folder as a list, other text as code."""
    here = PROJECT / path
    if here.is_dir():
        inner = sorted(one.name for one in here.iterdir() if not one.name.startswith(("_", ".")))
        return f"# {path}/\n\n" + "".join(f"- `{name}`\n" for name in inner)
    text = here.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    if path.suffix == ".ipynb":
        return _notebook(json.loads(text))
    return f"# {path}\n\n```{LANGUAGES.get(path.suffix, 'text')}\n{text}\n```\n"


def _notebook(notebook: dict[str, Any]) -> str:
    """A notebook as it was saved: text, code, and what the code has shown."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            parts.append(data.get("text/html") or f"```text\n{data['text/plain'].rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def decisions() -> str:
    pages = sorted((DOCS / "decisions").glob("0*.md"))
    titles = (page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for page in pages)
    listed = "".join(f"- [{title}]({page.name})\n" for title, page in zip(titles, pages, strict=True))
    return f"# Decisions\n\nWhy milldam is built as it is, a page for each choice.\n\n{listed}"


# ---- reference, from the code ----


def names() -> str:
    """Every public name, in the order in which they are used."""
    import milldam
    from milldam import qa

    parts = [
        "# Python\n\nWhat `import milldam` offers; `milldam.torch` and `milldam.qa` are modules of their own.\n",
        "## milldam\n",
    ]
    ordered = dict.fromkeys((*FIRST, *milldam.__all__))
    parts += [f"::: {_home(milldam, name)}\n" for name in ordered if name not in ("__version__", "qa")]
    parts += ["## milldam.qa\n", *(f"::: {_home(qa, name)}\n" for name in qa.__all__)]
    parts += ["## milldam.torch\n", "::: milldam.torch\n"]
    return "\n".join(parts)


def _home(module: Any, name: str) -> str:
    """Where a name is defined, which mkdocstrings reads without importing."""
    found = getattr(module, name)
    home = getattr(found, "__module__", None)
    return f"{home}.{name}" if home and home.startswith("milldam") else f"{module.__name__}.{name}"
