"""Push and pull, against a stand-in for the Hub on this machine: round trips, kills, refusals, a token nobody sees."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow as pa
import pytest
import yaml
from click.testing import CliRunner
from huggingface_hub import constants
from tests.kit.damage import edit_manifest
from tests.kit.hub_server import WRITER, HubServer, hub_server
from tests.kit.jobs import run_here, write_lines
from tests.kit.token_stores import shard_file, write_store

import milldam
from milldam.cli import main
from milldam.errors import ConfigError, InputError, MilldamError, MismatchError, StoreError
from milldam.files import hash_bytes, hash_file
from milldam.hub import pull, push
from milldam.loader.stores import Store
from milldam.stores.kinds import KINDS, write_audit
from milldam.stores.tokens.manifest import Manifest, Tally
from milldam.stores.verify import verify as verify_store

# huggingface_hub hands files to its HTTP library in a way that this one deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = "anna/corpus"
MANIFEST = "milldam.json"
CARD = "README.md"
BESIDE = {"notes.txt", ".hidden", ".milldam-pull.json"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """The stand-in, with a token that may write."""
    monkeypatch.setenv("MILLDAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", WRITER)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub_server() as server:
        api = functools.partial(huggingface_hub.HfApi, endpoint=server.url)
        monkeypatch.setattr(huggingface_hub, "HfApi", api)
        yield server


def token_store(folder: Path, shards: list[list[int]], splits: list[str] | None = None) -> Path:
    """A store with a tokenizer, and with what a run leaves beside it."""
    store = write_store(folder, shards, splits=splits)
    (folder / "tokenizer.json").write_bytes(b'{"a": "tokenizer"}')
    tokenizer = {"name": "/home/anna/secret/gpt2", "xxh3": hash_file(folder / "tokenizer.json"), "eos": 0}
    manifest = dataclasses.replace(
        store.manifest,
        tokenizer=tokenizer,
        settings={"clean": {"function": "/home/anna/clean.py:fix"}, "seed": 0},
        input={"files": 3, "bytes": 1234, "fingerprint": "f" * 32},
        sources=(Tally("a.jsonl", 5, {"bad_json": 2}, {"filter": {"too_short": 1}}),),
    )
    audit = write_audit(folder, "rejects", [b"/home/anna/private"])
    dataclasses.replace(manifest, audit=audit).write(folder)
    (folder / "run").mkdir(exist_ok=True)
    for name in ("run/plan.json", "notes.txt", ".hidden"):
        (folder / name).write_text("/home/anna/private")
    return folder


def table_store(folder: Path) -> Path:
    rows = folder.with_name(f"{folder.name}-rows")
    rows.mkdir()
    for number in range(3):
        write_lines(rows / f"{number}.jsonl", [f"row {number}"])
    milldam.map(rows, lambda batch: batch, folder)
    shutil.rmtree(folder / "run")
    return folder


def tokens(folder: Path) -> Path:
    return token_store(folder, [[5, 6], [7], [80_000]], ["train", "train", "val"])


MAKERS: dict[str, Callable[[Path], Path]] = {"tokens": tokens, "table": table_store}


def stored(folder: Path) -> dict[str, bytes]:
    """The files of a store, without what may lie beside them."""
    files = (path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith("rejects-"))
    return {path.name: path.read_bytes() for path in files if path.name not in BESIDE}


def pulled(repo: str, out: Path, *options: str) -> dict[str, Any]:
    """What `milldam pull --json` tells."""
    told: dict[str, Any] = json.loads(run_here("pull", repo, "-o", out, "--json", *options).stdout)
    return told


def without_card(contents: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in sorted(contents.items()) if name != CARD}


# ---- there and back ----


@pytest.mark.parametrize("kind", MAKERS)
def test_a_store_goes_there_and_comes_back_byte_by_byte(hub: HubServer, tmp_path: Path, kind: str) -> None:
    """Of every kind: the repository has the store and a card, nothing else; what is pulled is whole and opens."""
    hub.page_size = 3
    folder = MAKERS[kind](tmp_path / "made")
    summary = push(folder, REPO)
    assert summary.facts["private"] and summary.facts["kind"] == kind and summary.counts["sent"] == len(stored(folder))
    assert without_card(hub.contents(REPO)) == stored(folder)
    opened = pull(REPO, tmp_path / "back")
    assert stored(tmp_path / "back") == stored(folder)
    assert list(verify_store(tmp_path / "back")) == []
    assert len(opened) > 0 and not (tmp_path / "back" / ".cache").exists()
    assert push(folder, REPO).up_to_date
    assert pulled(REPO, tmp_path / "back")["up_to_date"]


def test_a_dry_run_changes_nothing(hub: HubServer, tmp_path: Path) -> None:
    """It says what would be sent, for a repository that is there and for one that is not, and only reads."""
    folder = tokens(tmp_path / "made")
    before = set(stored(folder))
    assert push(folder, REPO, dry_run=True).counts["sent"] == 8 and hub.repos == {}
    push(folder, REPO)
    shutil.rmtree(folder)
    changed = token_store(folder, [[5, 6], [8]])
    hub.requests.clear()
    told = push(changed, REPO, dry_run=True)
    assert told.counts["sent"] == 3 and set(told.facts["removed"]) == before - set(stored(changed))
    assert hub.count("^(POST|PUT)") == 0


# ---- who may see it ----


def test_private_unless_public_is_asked_for(hub: HubServer, tmp_path: Path) -> None:
    """And what is there already keeps the visibility it has: a push that expects another is refused."""
    folder = tokens(tmp_path / "made")
    push(folder, REPO)
    push(folder, "anna/open", public=True)
    assert hub.repos[REPO].private and not hub.repos["anna/open"].private
    edit_manifest(folder, lambda value: value.update(encoder="another"))
    before = len(hub.repos["anna/open"].commits)
    with pytest.raises(ConfigError, match="is public: everybody could read"):
        push(folder, "anna/open")
    with pytest.raises(ConfigError, match="is private"):
        push(folder, REPO, public=True)
    assert hub.repos[REPO].private and not hub.repos["anna/open"].private
    assert len(hub.repos["anna/open"].commits) == before


def test_nothing_but_the_store_and_its_card_is_pushed(hub: HubServer, tmp_path: Path) -> None:
    """No run folder, no rejects, nothing that lies beside it, and no path of this machine in the card."""
    folder = tokens(tmp_path / "made")
    push(folder, REPO)
    assert set(hub.contents(REPO)) == set(stored(folder)) | {CARD}
    text = hub.contents(REPO)[CARD].decode()
    assert "/home/anna" not in text and ".../clean.py:fix" in text


# ---- killed ----


def start(hub: HubServer, command: str, *arguments: str | Path) -> subprocess.Popen[str]:
    """`milldam push` or `pull` in a process of its own."""
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": WRITER, "HF_HUB_DISABLE_XET": "1"}
    words = [sys.executable, "-m", "milldam", command, *map(str, arguments)]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def kill_at(hub: HubServer, pattern: str, command: str, *arguments: str | Path, **options: Any) -> None:
    """SIGKILL while the command waits for the server, which stalls at a request."""
    stall = threading.Event()
    mishap = hub.mishap(pattern, None, stall=stall, **options)
    process = start(hub, command, *arguments)
    assert mishap.reached.wait(60), process.communicate(timeout=60)[0]
    process.kill()
    process.communicate()
    stall.set()


def test_a_push_killed_anywhere_goes_on(hub: HubServer, tmp_path: Path) -> None:
    """Killed while files are sent, nothing is there; before the last commit, no store. Nothing is sent twice, and
    nothing is written to the store or beside it."""
    folder = tokens(tmp_path / "made" / "store")
    before = {path: path.stat().st_mtime_ns for path in (folder.parent, *folder.parent.rglob("*"))}
    kill_at(hub, "PUT /lfs/p", "push", folder, REPO, after=3)
    assert hub.contents(REPO) == {}
    hub.requests.clear()
    kill_at(hub, "POST .*/commit/", "push", folder, REPO, after=1)
    assert hub.count("PUT /lfs/put/") <= 4
    assert set(hub.contents(REPO)) == set(stored(folder)) - {MANIFEST, "tokenizer.json"}
    hub.requests.clear()
    push(folder, REPO)
    assert hub.count("PUT /lfs") == 0 and without_card(hub.contents(REPO)) == stored(folder)
    assert {path: path.stat().st_mtime_ns for path in (folder.parent, *folder.parent.rglob("*"))} == before


def test_a_pull_killed_anywhere_goes_on(hub: HubServer, tmp_path: Path) -> None:
    """Killed in the middle of a file: no manifest, and the half file has no name; run again, whole files are kept."""
    folder = tokens(tmp_path / "made")
    push(folder, REPO)
    out = tmp_path / "back"
    kill_at(hub, "GET /cdn/.*val-.*bin", "pull", REPO, "-o", out, partial=True)
    assert not (out / MANIFEST).exists() and not any(out.rglob("val-*.bin"))
    whole = sum(path.suffix in (".bin", ".idx", ".json") for path in out.iterdir()) - 1
    push(tokens(tmp_path / "other"), "anna/other")
    with pytest.raises(MismatchError, match="holds another store"):
        pull("anna/other", out)
    told = pulled(REPO, out)["counts"]
    assert told["kept"] == whole and told["fetched"] == 8 - whole
    assert stored(out) == stored(folder)
    assert sorted(path.name for path in out.iterdir()) == sorted([*stored(folder), ".milldam-pull.json"])


# ---- changed ----


def test_a_changed_store_replaces_the_one_before(hub: HubServer, tmp_path: Path) -> None:
    """What is no longer in the manifest is removed; in no commit do an old manifest and new shards meet."""
    old = tokens(tmp_path / "old")
    push(old, REPO)
    pull(REPO, tmp_path / "back")
    new = token_store(tmp_path / "new", [[3], [7], [4]])
    summary = push(new, REPO)
    assert set(summary.facts["removed"]) == set(stored(old)) - set(stored(new)) and summary.counts["removed"] == 6
    assert without_card(hub.contents(REPO)) == stored(new)
    for files in hub.repos[REPO].commits.values():
        if MANIFEST in files:
            named = json.loads(files[MANIFEST])["shards"]
            assert all(hash_bytes(files[f"{one['name']}.bin"]) == one["bin"]["xxh3"] for one in named)
    again = pulled(REPO, tmp_path / "back")["counts"]
    # The tokenizer alone: the index of a shard of the same lengths has another name, as its tokens differ.
    assert again["removed"] == 6 and again["kept"] == 1
    assert stored(tmp_path / "back") == stored(new)


def test_a_store_that_is_read_while_it_is_pulled_again_stays(hub: HubServer, tmp_path: Path) -> None:
    """Killed in the update, the old store is whole; updated, its readers keep what they opened, until they close it."""
    out = tmp_path / "back"
    push(tokens(tmp_path / "old"), REPO)
    opened = pull(REPO, out)
    push(token_store(tmp_path / "new", [[3], [7], [4]]), REPO)
    kill_at(hub, "GET /cdn/.*train-.*idx", "pull", REPO, "-o", out)
    assert list(verify_store(out)) == [] and (out / MANIFEST).read_bytes() == stored(tmp_path / "old")[MANIFEST]
    assert pulled(REPO, out)["counts"]["removed"] == 0
    assert isinstance(opened, Store) and len(opened[3]) == 80_000
    assert list(verify_store(out)) == [] and (out / MANIFEST).read_bytes() == stored(tmp_path / "new")[MANIFEST]
    del opened
    push(token_store(tmp_path / "third", [[3]]), REPO)
    pull(REPO, out)
    assert {path.name for path in out.glob("*.bin")} == {path.name for path in (tmp_path / "third").glob("*.bin")}


def test_another_change_meanwhile_is_seen(hub: HubServer, tmp_path: Path) -> None:
    """Someone removes a file before the last commit: that is refused, and the next push sends the file again."""
    folder = tokens(tmp_path / "made")
    name = shard_file(folder, 0, "bin").name
    hub.mishap("POST .*/commit/", after=1, first=lambda: hub.remove(REPO, name))
    with pytest.raises(InputError, match=r"(?s)412.*Someone else is changing"):
        push(folder, REPO)
    hub.requests.clear()
    push(folder, REPO)
    assert without_card(hub.contents(REPO)) == stored(folder)
    assert all(MANIFEST not in files or name in files for files in hub.repos[REPO].commits.values())


# ---- the card ----


def test_the_card_tells_the_figures(hub: HubServer, tmp_path: Path) -> None:
    """Counts, splits, tokenizer, drops, how to open it; a header that keeps the viewer off files it can't show."""
    push(tokens(tmp_path / "made"), REPO)
    text = hub.contents(REPO)[CARD].decode()
    header = yaml.safe_load(text.split("---\n")[1])
    assert header["viewer"] is False and "milldam" in header["tags"]
    for told in (
        "| tokens | 80,018 |",
        "| val | 1 | 80,000 | 1 |",
        "| bad_json | 2 |",
        "| too_short | 1 |",
        "uint16",
        "IndexedDataset",
    ):
        assert told in text
    push(table_store(tmp_path / "table"), "anna/table")
    header = yaml.safe_load(hub.contents("anna/table")[CARD].decode().split("---\n")[1])
    names = header["configs"][0]["data_files"][0]["path"]
    tables = (pa.ipc.open_stream(hub.contents("anna/table")[name]).read_all() for name in names)
    assert pa.concat_tables(tables)["text"].to_pylist() == ["row 0", "row 1", "row 2"]


def test_what_people_wrote_in_the_card_is_kept(hub: HubServer, tmp_path: Path) -> None:
    """Only the marked section is replaced; the header too, until someone edits it."""
    push(tokens(tmp_path / "made"), REPO)
    first = hub.contents(REPO)[CARD].decode()
    new = token_store(tmp_path / "new", [[1], *[[2] * 600] * 2])

    def pushed_over(text: str) -> str:
        hub.add_repo(REPO, files={CARD: text.encode()})
        notes = push(new, REPO).warnings
        made = hub.contents(REPO)[CARD].decode()
        assert push(new, REPO).up_to_date and hub.contents(REPO)[CARD].decode() == made
        assert ("| tokens | 2,401 |" in made) != any("end mark" in note for note in notes)
        return made

    edited = first.replace("# corpus", "# Anna's corpus\n\nWith care.") + "\nThe end.\n"
    made = pushed_over(edited)
    assert "With care." in made and made.endswith("\nThe end.\n") and made.count("milldam: begin") == 1
    made = pushed_over(edited.replace("viewer: false", "viewer: false\nlicense: mit"))
    assert "license: mit" in made.split("---\n")[1]
    made = pushed_over("# My own card\n")
    assert "# My own card\n" in made and yaml.safe_load(made.split("---\n")[1])
    broken = first.replace("<!-- milldam: end -->", "")
    assert pushed_over(broken) == broken


# ---- the token, and trouble ----


def everything_told(folder: Path, *texts: str) -> str:
    """Whatever was printed or written by a push or pull."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size < 10**5)
    return "\n".join([*texts, *(path.read_bytes().decode("utf-8", errors="replace") for path in files)])


@pytest.mark.parametrize("status", [400, 401, 412, 429, 500, None])
@pytest.mark.parametrize("at", ["GET /api/datasets", "POST .*/commit/"])
def test_trouble_is_told_without_the_token(
    hub: HubServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    at: str,
) -> None:
    """Whatever the server answers, even the token itself: a few lines that say what to do, and no token anywhere."""
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    caplog.set_level(logging.DEBUG, "milldam")
    hub.add_repo(REPO)
    hub.mishap(at, status, times=99)
    folder = tokens(tmp_path / "made")
    result = CliRunner().invoke(main, ["--debug", "push", str(folder), REPO])
    assert isinstance(result.exception, MilldamError) and str(result.exception).count("\n") <= 2
    assert "anna/corpus" in str(result.exception)
    assert WRITER not in everything_told(tmp_path, result.output, str(result.exception), caplog.text)


def test_without_a_token_nothing_is_tried(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a private repository can't be pulled, which is told as not found."""
    push(tokens(tmp_path / "made"), REPO)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: None)
    hub.requests.clear()
    with pytest.raises(ConfigError, match=r"(?s)No token.*hf auth login"):
        push(tmp_path / "made", "anna/second")
    assert hub.requests == []
    with pytest.raises(InputError, match="401"):
        pull(REPO, tmp_path / "back")
    assert not (tmp_path / "back").exists()


# ---- damage ----


def test_a_damaged_store_is_not_pushed(hub: HubServer, tmp_path: Path) -> None:
    """A file of another size, with other bytes, or missing: nothing of its commit is sent."""
    folder = tokens(tmp_path / "made")
    path = shard_file(folder, 0, "bin")
    good = path.read_bytes()
    path.write_bytes(bytes(len(good)))
    with pytest.raises(StoreError, match=r"train-\w+\.bin: its bytes are not those of the manifest"):
        push(folder, REPO)
    path.write_bytes(good + b"x")
    with pytest.raises(StoreError, match="bytes where the manifest says"):
        push(folder, REPO)
    path.unlink()
    with pytest.raises(StoreError, match="missing"):
        push(folder, REPO)
    assert hub.contents(REPO) == {}
    with pytest.raises(StoreError, match="not a store"):
        push(tmp_path, REPO)


def test_a_damaged_repository_is_not_pulled(hub: HubServer, tmp_path: Path) -> None:
    """A missing file, one of another size, one with other bytes: told, and no manifest is written."""
    push(tokens(tmp_path / "made"), REPO)
    good = hub.contents(REPO)
    name = shard_file(tmp_path / "made", 0, "bin").name
    for files, said in (
        ({key: data for key, data in good.items() if key != name}, "missing"),
        (good | {name: good[name] + b"x"}, "bytes where the manifest says"),
        (good | {name: bytes(len(good[name]))}, "not what its manifest says"),
    ):
        hub.add_repo(REPO, files=files)
        with pytest.raises(StoreError, match=said):
            pull(REPO, tmp_path / "back")
        assert not (tmp_path / "back" / MANIFEST).exists() and not (tmp_path / "back" / name).exists()
    hub.add_repo(REPO, files=good)
    assert list(verify_store(pull(REPO, tmp_path / "back").path)) == []


@pytest.mark.parametrize("name", ["../train-00000", "/etc/train", "a/b", "..", ".hidden"])
def test_a_manifest_that_leaves_the_folder_is_refused(hub: HubServer, tmp_path: Path, name: str) -> None:
    """A manifest from the Hub must not make us write elsewhere, nor over hidden files."""
    folder = tokens(tmp_path / "made")
    edit_manifest(folder, lambda value: value["shards"][0].update(name=name))
    hub.add_repo(REPO, files={MANIFEST: (folder / MANIFEST).read_bytes()})
    with pytest.raises(StoreError, match="leaves the folder; refused"):
        pull(REPO, tmp_path / "deep" / "back")
    assert not (tmp_path / "deep" / "back").exists()


def test_what_is_no_store_is_not_pulled(hub: HubServer, tmp_path: Path) -> None:
    """A dataset of others, two manifests, and nothing at all."""
    hub.add_repo(REPO, files={"data.csv": b"a,b\n"})
    with pytest.raises(StoreError, match="anna/corpus: not a store"):
        pull(REPO, tmp_path / "back")
    hub.add_repo(REPO, files={kind.manifest: b"{}" for kind in KINDS})
    with pytest.raises(StoreError, match="a store has one; found"):
        pull(REPO, tmp_path / "back")
    with pytest.raises(InputError, match="404"):
        pull("anna/nothing", tmp_path / "back")
    with pytest.raises(InputError, match="404"):
        pull(REPO, tmp_path / "back", revision="nowhere")
    assert not (tmp_path / "back").exists()


def test_a_folder_that_holds_something_else_is_refused(hub: HubServer, tmp_path: Path) -> None:
    """Files of others, another store, a store of another repository: none is touched."""
    push(tokens(tmp_path / "made"), REPO)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="holds something else"):
        pull(REPO, other)
    assert [path.name for path in other.iterdir()] == ["thesis.txt"]
    with pytest.raises(MilldamError):
        pull(REPO, other / "thesis.txt")
    mine = token_store(tmp_path / "mine", [[4]])
    before = stored(mine)
    with pytest.raises(MismatchError, match="holds another store"):
        pull(REPO, mine)
    assert stored(mine) == before and not (mine / ".cache").exists()
    push(mine, "anna/mine")
    pull("anna/mine", tmp_path / "back")
    with pytest.raises(MismatchError, match="holds another store"):
        pull(REPO, tmp_path / "back")
    assert stored(tmp_path / "back") == before
    token_store(tmp_path / "back", [[5]])
    with pytest.raises(MismatchError, match="holds another store"):
        pull("anna/mine", tmp_path / "back")


# ---- what is remembered ----


def test_the_commands_tell_what_was_done(hub: HubServer, tmp_path: Path) -> None:
    """Sentences for people, JSON for programs."""
    folder, out = tokens(tmp_path / "made"), tmp_path / "back"
    sent = run_here("push", folder, REPO, "--public").stdout
    assert "8 sent" in sent
    assert "is up to date: 8 files" in run_here("push", folder, REPO, "--public").stdout
    told = json.loads(run_here("push", folder, REPO, "--public", "--json", "--dry-run").stdout)
    assert told["up_to_date"] and told["facts"]["dry_run"] and told["out"].endswith("/datasets/anna/corpus")
    assert "8 fetched" in run_here("pull", REPO, "-o", out).stdout
    assert "is up to date" in run_here("pull", REPO, "-o", out).stdout
    told = pulled(REPO, out)
    assert told["up_to_date"] and told["counts"]["files"] == 8 and Manifest.read(out).totals["tokens"] == 80_018
    assert "USER/NAME" in run_here("pull", "anna/a b", "-o", out, code=2).stderr


def test_files_of_others_are_left_alone(hub: HubServer, tmp_path: Path) -> None:
    """A file that is in the way and not ours is not replaced; others stay."""
    hub.add_repo(REPO, files={"tokenizer.json": b"theirs"})
    folder = tokens(tmp_path / "made")
    with pytest.raises(MismatchError, match=r"tokenizer\.json that milldam did not put there"):
        push(folder, REPO)
    assert hub.contents(REPO) == {"tokenizer.json": b"theirs"}
    hub.add_repo(REPO, files={"notes.md": b"theirs"})
    push(folder, REPO)
    push(token_store(tmp_path / "new", [[1]]), REPO)
    assert hub.contents(REPO)["notes.md"] == b"theirs"
    with pytest.raises(MismatchError, match="holds a token store; this is a table"):
        push(table_store(tmp_path / "table"), REPO)
