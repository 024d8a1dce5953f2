"""What crosses rooms: imports point one way, the light parts stay light, and the documentation tells the truth."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.jobs import TOKENIZER, write_lines

import milldam

PROJECT = Path(__file__).parents[2]
PACKAGE = Path(milldam.__file__).parent

# ---- imports point one way ----


def modules() -> dict[str, Path]:
    """Every module of the package by name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@functools.cache
def imports_of(name: str, *, deferred: bool) -> set[str]:
    """The modules of ours that one imports; `deferred`: inside functions too. What is for types only is left out."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if deferred else _at_module_level(tree)
    typed = {id(node) for guard in ast.walk(tree) if _is_type_checking(guard) for node in ast.walk(guard)}
    found: set[str] = set()
    for node in nodes:
        if id(node) not in typed:
            found |= _names(node)
    return found


def _at_module_level(tree: ast.Module) -> Iterator[ast.AST]:
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _names(node: ast.AST) -> set[str]:
    """`from milldam.a import b` is milldam.a.b when that is a module, else milldam.a."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names if alias.name.split(".")[0] == "milldam"}
    if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "milldam":
        full = ((f"{node.module}.{alias.name}", node.module) for alias in node.names)
        return {inner if inner in MODULES else outer for inner, outer in full}
    return set()


def room(name: str) -> str:
    """The room a module is in: its name below the package."""
    return name.split(".")[1] if "." in name else ""


def offences(rooms: set[str], allowed: set[str] | None = None, forbidden: set[str] | None = None) -> list[str]:
    """Imports of some rooms that are not allowed, or forbidden, as `module -> module`."""
    found = []
    for name in MODULES:
        if room(name) not in rooms:
            continue
        for imported in sorted(imports_of(name, deferred=True)):
            if imported == "milldam" and names_imported(name, "milldam") == {"__version__"}:
                continue
            outside = allowed is not None and room(imported) not in allowed | {room(name)}
            if outside or (forbidden is not None and room(imported) in forbidden):
                found.append(f"{name} -> {imported}")
    return found


GROUND = {
    "errors": set(), "files": {"errors"}, "checked": {"errors"},
    "input_files": {"checked", "errors", "files", "stores"},
    "choices": set(), "rules": {"choices", "errors", "memory"},
    "memory": {"errors"}, "prefetch": set(), "markup": set(), "native": {"errors"},
    "text": {"errors", "native", "rules"},
}  # fmt: skip
"""What everybody may use, and what it may use itself."""
STAGES = {"sources", "dedup", "decontamination", "tokenizers", "filters", "packing"}
ABOVE = {
    # The settings.
    "config",
    # What makes any job resumable, and the job of text to tokens.
    "run", "pipeline",
    # Other jobs.
    "mapping", "qa", "feeding",
    # What tells of it, and who asks for it.
    "__main__", "api", "cli", "report", "torch",
    # What goes to other tools and places, and comes from there.
    "hub",
}  # fmt: skip


def test_the_guard_reads_imports() -> None:
    """The rules below would hold of nothing: there are modules, and their imports are found."""
    assert len(MODULES) > 80
    assert "milldam.errors" in imports_of("milldam.files", deferred=False)
    assert "milldam.stores.tokens.reader" in imports_of("milldam.cli.stats", deferred=True)
    assert "milldam.stores.tokens.reader" not in imports_of("milldam.cli.stats", deferred=False)


def test_every_room_has_its_floor() -> None:
    """A new room must be given its place among the others, so that the rules below hold for it."""
    known = {*GROUND, *STAGES, *ABOVE, "chat", "stores", "loader", "remote", "formats", ""}
    assert {room(name) for name in MODULES} == known


@pytest.mark.parametrize("name", sorted(GROUND))
def test_the_ground_floor_knows_nothing_of_text(name: str) -> None:
    """Errors, files, memory, verdicts and user functions import next to nothing of ours."""
    assert offences({name}, allowed=GROUND[name]) == []


STORES_KNOW = {"checked", "errors", "files", "input_files", "markup", "memory"}


def test_the_store_knows_nothing_of_how_it_is_made() -> None:
    """Whoever reads or writes a store needs neither text nor a run."""
    assert offences({"stores"}, allowed=STORES_KNOW) == []


def test_the_loader_knows_the_store_and_how_rows_are_packed() -> None:
    """A training node needs numpy and the store: no text, no tokenizer, no run."""
    assert offences({"loader"}, allowed={*GROUND, "stores", "packing", "remote", "formats"}) == []
    assert offences({"remote"}, allowed={"errors", "files", "input_files", "memory", "stores"}) == []


@pytest.mark.parametrize("name", sorted(STAGES))
def test_stages_do_not_know_each_other_nor_what_is_above(name: str) -> None:
    """Stages are neighbours on the flow, not in the code: what they share is on the ground floor.

    Rows are made from a store as training reads it; tokenizers know of it what they hand over.
    """
    store = {"packing": {"stores", "loader"}, "sources": {"stores"}, "tokenizers": {"stores"}}.get(name, set())
    assert offences({name}, allowed={*GROUND, *store}) == []


def test_conversations_are_read_and_rendered_without_a_job() -> None:
    """Rows come from sources, templates from beside tokenizers; neither settings nor a run are known."""
    assert offences({"chat"}, allowed={*GROUND, "sources", "tokenizers"}) == []


def test_tokenizers_know_of_the_store_only_what_they_hand_over() -> None:
    """Of the store, tokenizers use the type of their result and the format's types."""
    used = {one for name in MODULES if room(name) == "tokenizers" for one in imports_of(name, deferred=True)}
    assert {one for one in used if room(one) == "stores"} <= {
        "milldam.stores.tokens.format",
        "milldam.stores.tokens.writer",
    }
    for name in (name for name in MODULES if room(name) == "tokenizers"):
        assert names_imported(name, "milldam.stores.tokens.writer") <= {"Tokens"}, name


EXECUTORS = {
    "tasks",
    "pools",
    "fork",
    "ray_cluster",
}


def test_executors_get_callables_and_know_nothing_else() -> None:
    """An executor could run anything."""
    known = {f"milldam.run.{name}" for name in EXECUTORS} | {"milldam", "milldam.errors", "milldam.memory"}
    used = {one for name in EXECUTORS for one in imports_of(f"milldam.run.{name}", deferred=True)}
    assert used <= known


WORKER = {"chat_encoding", "documents", "first_pass", "tokenizing", "rejects"}
WORKER |= {"near_examples", "judging", "unit_output"}


def test_what_runs_in_a_worker_knows_no_job() -> None:
    """A unit is worked on by what it is given: no configuration, no plan of a job, no report."""
    own = {f"milldam.pipeline.{name}" for name in WORKER}
    used = {one for name in own for one in imports_of(name, deferred=True)}
    assert {one for one in used if room(one) == "pipeline"} <= own
    assert [
        one for one in used if room(one) in ("config", "report", "api", "cli") or one == "milldam.run.session"
    ] == []


def test_a_class_has_one_job() -> None:
    """Twenty methods are enough for any: what has more is divided."""
    large = []
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.body)
                large += [f"{name}.{node.name}: {methods}"] if methods > 20 else []
    assert large == []


def test_the_settings_know_of_the_rooms_their_rules_alone() -> None:
    """A configuration is made of the rules of each room, and of nothing that does the work."""
    used = imports_of("milldam.config.settings", deferred=True)
    assert used <= {"milldam.choices", "milldam.errors", "milldam.memory", "milldam.rules"}


def names_imported(name: str, origin: str) -> set[str]:
    """What a module imports from another."""
    nodes = ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8")))
    found = (node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == origin)
    return {alias.name for node in found for alias in node.names}


def test_settings_are_checked_without_a_look_at_data() -> None:
    """From YAML, options or arguments to settings; files are read where users ask, by the command line and the library.

    Other jobs have settings of their own: they use the types of fields and the check, nothing else.
    """
    assert offences({"config"}, allowed={"choices", "errors", "files", "memory", "rules"}) == []
    reading = {name for name in MODULES if room(name) == "config"} - {
        "milldam.config", "milldam.config.settings", "milldam.config.checking",
    }  # fmt: skip
    others = [name for name in MODULES if room(name) not in ("config", "cli", "api")]
    assert [name for name in others if imports_of(name, deferred=True) & reading] == []


def test_the_report_reads_what_a_run_left() -> None:
    """A report is made from the store and its run folder, without what made them; only the job and its command ask."""
    assert offences({"report"}, allowed={"errors", "files", "markup", "memory", "stores"}) == []
    others = {room(name) for name in MODULES} - {"report", "cli", "pipeline"}
    assert offences(others, forbidden={"report"}) == []


def test_formats_read_stores_as_training_does() -> None:
    """A store is exported, and a file of another tool opened, without what makes stores: only the jobs know a run."""
    jobs = {f"milldam.formats{name}" for name in ("", ".importing", ".exporting")}
    known = {"checked", "choices", "errors", "files", "input_files", "loader", "memory", "stores"}
    found = offences({"formats"}, allowed=known)
    assert sorted(one for one in found if one.split(" -> ")[0] not in jobs | {"milldam.formats"}) == [
        "milldam.formats.columns -> milldam.sources.compression",
        "milldam.formats.columns -> milldam.sources.tables",
        "milldam.formats.columns -> milldam.sources.units",
    ]
    assert offences({"loader"}, forbidden={"run"}) == []
    used = {one for name in MODULES if room(name) == "loader" for one in imports_of(name, deferred=True)}
    assert {one for one in used if room(one) == "formats"} <= {
        f"milldam.formats.{name}" for name in ("foreign", "npy", "megatron")
    }


def test_nothing_but_the_command_line_imports_the_command_line() -> None:
    """The library never prints or exits by way of its commands."""
    assert offences({room(name) for name in MODULES} - {"__main__", "cli"}, forbidden={"cli"}) == []


def test_the_library_neither_prints_nor_exits() -> None:
    """Only `cli` prints; only it and the worker process exit."""
    found = []
    for name, path in MODULES.items():
        if room(name) == "cli":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called == "print" or (called in ("sys.exit", "exit") and name != "milldam.run.fork"):
                found.append(f"{name}: {called}")
    assert found == []


def test_messages_outside_the_command_line_name_settings_not_options() -> None:
    """A setting in a message is a `Setting`, which the command line spells; whole commands may be quoted."""
    option = re.compile(r"(?<![\w-])(--[a-z][a-z-]+|-o)(?![\w-])")
    command = re.compile(r"milldam [a-z-]+ |ray start|sbatch|zstd |--parsable|--requeue")
    scripts = {"loader.opening", "config.loading", "hub.card", "dedup.index", "native.build"}
    found = []
    for name, path in MODULES.items():
        if room(name) == "cli" or name.removeprefix("milldam.") in scripts:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if id(node) not in said and option.search(text) and not command.search(text):
                found.append(f"{name}: {text}")
    assert found == []


def test_there_are_no_import_cycles() -> None:
    """At module level, imports form no ring."""
    level = {name: imports_of(name, deferred=False) & set(MODULES) - {name} for name in MODULES}
    done: set[str] = set()
    while ready := {name for name, needed in level.items() if name not in done and needed <= done}:
        done |= ready
    assert sorted(set(MODULES) - done) == []


# ---- public names, and what they cost ----


def test_public_names_are_the_sorted_all() -> None:
    """What a user may use is what `__all__` says, in order, and nothing else."""
    assert milldam.__all__ == sorted(milldam.__all__)
    assert dir(milldam) == sorted(milldam.__all__)
    for name in milldam.__all__:
        assert getattr(milldam, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        milldam.nope  # noqa: B018


@pytest.mark.parametrize("name", sorted(MODULES))
def test_names_in_all_exist(name: str) -> None:
    """No module offers what it does not have, and each says what it is for."""
    module = importlib.import_module(name)
    assert all(hasattr(module, one) for one in getattr(module, "__all__", []))
    assert module.__doc__, f"{name} has no docstring"


HEAVY = {
    "torch", "datasets", "ray", "transformers", "pyarrow", "tokenizers", "gigatoken", "awkward", "numpy",
    "pydantic", "pydantic_core", "yaml", "huggingface_hub", "py3langid", "pandas", "sentencepiece",
}  # fmt: skip


def loaded_after(code: str, *arguments: object) -> set[str]:
    """Top-level packages that some code loads in a fresh interpreter."""
    report = "; import sys; print(*{name.split('.')[0] for name in sys.modules}, file=sys.stderr)"
    command = [sys.executable, "-c", code + report, *(str(one) for one in arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_import_milldam_loads_nothing_heavy() -> None:
    """`import milldam` costs next to nothing."""
    assert loaded_after("import milldam") & HEAVY == set()


LIGHT = {"psutil", "filelock", "fsspec", "rich", "xxhash"}
"""What takes a while too, though less: no help needs it."""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    """Asking for help does not load what the work needs."""
    code = "import sys; from milldam.cli import main; main(sys.argv[1:], standalone_mode=False)"
    assert loaded_after(code, *arguments) & (HEAVY | LIGHT) == set()


def test_help_of_no_command_loads_anything_heavy() -> None:
    """Nor does the help of any command."""
    code = "from milldam.cli import main; [main([name, '--help'], standalone_mode=False) for name in main.commands]"
    assert loaded_after(code) & (HEAVY | LIGHT) == set()


def test_the_rules_of_the_rooms_load_nothing_heavy() -> None:
    """What may be set is known without what does it."""
    assert loaded_after("import milldam.rules") & HEAVY == set()


def test_reading_a_store_needs_numpy_alone(tmp_path: Path) -> None:
    """A training node opens and reads a store without pyarrow or a tokenizer."""
    lines = write_lines(tmp_path / "c.jsonl", ["one", "two"])
    milldam.tokenize(lines, tmp_path / "s", tokenizer=TOKENIZER, workers=1)
    code = (
        "import sys, milldam; store = milldam.open(sys.argv[1]);"
        "assert [len(document) for document in store] and len(store[0]) and repr(store) and store._repr_html_();"
        "assert sum(map(len, store.shard_tokens())) == store.tokens"
    )
    loaded = loaded_after(code, tmp_path / "s")
    assert loaded & HEAVY == {"numpy"}
    assert loaded & {"psutil", "filelock", "fsspec", "click", "rich"} == set()


# ---- documentation ----


_MAPPED = re.compile(r"^ *([a-z_]+(?:, [a-z_]+)*)  +\S", re.MULTILINE)


@pytest.mark.parametrize("name", [name for name, path in MODULES.items() if path.name == "__init__.py" and "." in name])
def test_the_map_of_a_room_names_modules_that_are_there(name: str) -> None:
    """What the docstring of a package lists, a word and what it is, are its modules."""
    text = ast.get_docstring(ast.parse(MODULES[name].read_text(encoding="utf-8"))) or ""
    named = {word for words in _MAPPED.findall(text) for word in words.split(", ")}
    assert sorted(word for word in named if f"{name}.{word}" not in MODULES) == []


def test_the_reference_is_that_of_the_code() -> None:
    """docs/cli.md has every command and option, docs/config.md every key: `python site/reference.py` writes them."""
    for page, text in runpy.run_path(str(PROJECT / "site/reference.py"))["pages"]().items():
        assert page.read_text(encoding="utf-8") == text, page.name


def test_every_exit_code_is_documented() -> None:
    """The codes of the exception tree are in docs/cli.md."""
    from milldam import errors

    text = (PROJECT / "docs" / "cli.md").read_text(encoding="utf-8")
    codes = {one.exit_code for one in vars(errors).values() if isinstance(one, type) and hasattr(one, "exit_code")}
    assert [code for code in codes | {130} if not re.search(rf"^\| {code} \|", text, flags=re.MULTILINE)] == []


def test_links_in_the_documentation_lead_somewhere() -> None:
    """A relative link in the README or docs names a file that is there."""
    broken: list[str] = []
    for page in [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *(PROJECT / "docs").rglob("*.md")]:
        text = page.read_text(encoding="utf-8") if page.exists() else ""
        targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
        broken += [f"{page.name}: {target}" for target in targets if not (page.parent / target).exists()]
    assert broken == []


def test_the_file_tree_for_contributors_is_the_one_there_is() -> None:
    """Every file that the tree in CONTRIBUTING.md names exists, and no room is left out."""
    text = (PROJECT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = text.split("src/milldam/\n", 1)[1].split("```", 1)[0]
    named = {line.split()[0].rstrip("/") for line in tree.splitlines() if line.strip()}
    rooms = {path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    rooms -= {"__pycache__", "__init__.py"}
    below = {path.name for path in PACKAGE.rglob("*") if path.suffix == ".py"} | rooms
    assert sorted(named - below) == [], "named, but not there"
    assert sorted(rooms - named) == [], "there, but not named"


def test_the_first_commands_of_the_readme_work_in_a_clone() -> None:
    """They are targets of the Makefile, and installations of what lies here: milldam is in no registry yet."""
    block = (PROJECT / "README.md").read_text(encoding="utf-8").split("```sh elsewhere\n")[1].partition("```")[0]
    commands = [re.sub(r"\s*#.*", "", line) for line in block.splitlines()]
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    for command in commands:
        target = re.fullmatch(r"make ([a-z-]+)", command)
        assert re.fullmatch(r'pip install "?\.(\[[a-z,]+\])?"?', command) or (
            target and re.search(rf"^{target[1]}:", makefile, re.MULTILINE)
        ), command


def test_the_readme_is_short() -> None:
    """150 lines are enough to begin with."""
    assert len((PROJECT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


# ---- tests ----


def test_tests_started_in_the_background_can_interrupt_what_they_start() -> None:
    """A shell's background jobs ignore Ctrl-C and hand that on: tests set the signals that they need."""
    code = "import signal, tests.conftest; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    ignoring = f'trap "" INT; exec "{sys.executable}" -c "{code}"'
    subprocess.run(["sh", "-c", ignoring], check=True, cwd=PROJECT)


@pytest.mark.parametrize("failing", ["docs", "test", "nothing"])
def test_ci_fails_when_the_site_or_a_test_fails(failing: str, tmp_path: Path) -> None:
    """CI builds the site as well as running the tests; its last line is the tests', also where others come later."""
    make = tmp_path / "make"
    make.write_text(
        f'#!/bin/sh\nfor target; do echo "made $target"; test $target != {failing} || exit 2; done\n'
        'echo "7 passed, 1 skipped in 1.25s"; echo "make: done"\n'
    )
    make.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run([PROJECT / ".ci/run"], env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert "made docs" in done.stdout
    assert (done.returncode == 0) == (failing == "nothing")
    if failing == "nothing":
        assert "made test" in done.stdout and done.stdout.splitlines()[-1] == "7 passed, 1 skipped in 1.25s"
