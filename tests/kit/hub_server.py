"""A stand-in for the Hugging Face Hub: its HTTP API for datasets, as huggingface_hub calls it, on this machine alone.

Repositories with branches and commits, LFS uploads (checked by sha256), files served with
redirects and etags, tokens that may read or write. It can be told to fail, to hang up or to stall at chosen
requests. What it does not speak: Xet, pull requests, gated repositories.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

WRITER, READER, STRANGER = "hf_WriterSecret0123456789", "hf_ReaderSecret0123456789", "hf_StrangerSecret012345678"
USERS = {WRITER: ("anna", "write"), READER: ("anna", "read"), STRANGER: ("bert", "write")}
GIT_ATTRIBUTES = b"*.bin filter=lfs diff=lfs merge=lfs -text\n"


@dataclass(frozen=True, slots=True)
class Blob:
    data: bytes
    large: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def sha1(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.large else self.sha1


@dataclass(slots=True)
class Repo:
    private: bool
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, Blob], message: str) -> str:
        sha = hashlib.sha1(f"{len(self.commits)} {branch} {message}".encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        self.messages.append(message)
        return sha

    def files(self, revision: str = "main") -> dict[str, Blob] | None:
        return self.commits.get(self.branches.get(revision, revision))


@dataclass(slots=True)
class Mishap:
    """What happens to the next `times` requests whose "METHOD path" matches."""

    pattern: re.Pattern[str]
    status: int | None
    """None: hang up without an answer."""
    times: int = 1
    stall: threading.Event | None = None
    reached: threading.Event = field(default_factory=threading.Event)
    after: int = 0
    """Requests that match and go well before."""
    partial: bool = False
    """Send half of the body, then stall or hang up."""
    first: Callable[[], object] | None = None
    """What someone else does before the request is answered, which then goes well."""


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.mishaps: list[Mishap] = []
        self.requests: list[str] = []
        self.page_size = 1000
        self.guard = threading.RLock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def mishap(self, pattern: str, status: int | None = 500, **options: Any) -> Mishap:
        made = Mishap(re.compile(pattern), status, **options)
        self.mishaps.append(made)
        return made

    def count(self, pattern: str) -> int:
        return sum(re.search(pattern, request) is not None for request in self.requests)

    def add_repo(self, name: str, *, private: bool = True, files: dict[str, bytes] | None = None) -> Repo:
        repo = self.repos[name] = Repo(private)
        blobs = {".gitattributes": GIT_ATTRIBUTES, **(files or {})}
        repo.commit("main", {path: Blob(data, is_large(path, data)) for path, data in blobs.items()}, "initial commit")
        return repo

    def remove(self, name: str, path: str) -> None:
        """Someone removes a file."""
        repo = self.repos[name]
        files = {one: blob for one, blob in (repo.files() or {}).items() if one != path}
        repo.commit("main", files, f"remove {path}")

    def contents(self, name: str, revision: str = "main") -> dict[str, bytes]:
        files = self.repos[name].files(revision) or {}
        return {path: blob.data for path, blob in files.items() if path != ".gitattributes"}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no error of ours."""


@contextmanager
def hub_server() -> Iterator[HubServer]:
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        for mishap in server.mishaps:
            if mishap.stall is not None:
                mishap.stall.set()
        server.shutdown()
        server.server_close()


def is_large(path: str, data: bytes) -> bool:
    return path.endswith((".bin", ".idx", ".arrow")) or len(data) > 10**7


class _RefusalError(Exception):
    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        self.status, self.message, self.code = status, message, code


class _HangUpError(Exception):
    pass


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"
    # Else every answer waits 40 ms for the client to acknowledge its headers.
    disable_nagle_algorithm = True
    wbufsize = -1
    partial: Mishap | None = None

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._handle()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def _handle(self) -> None:
        split = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(split.query).items()}
        path = unquote(split.path)
        self.body = self._read_body()
        self.partial = None
        self.server.requests.append(f"{self.command} {path}")
        try:
            self._meet_mishap(f"{self.command} {path}")
            self._route(path)
        except _RefusalError as refusal:
            headers = {"X-Error-Message": refusal.message}
            if refusal.code:
                headers["X-Error-Code"] = refusal.code
            self._json({"error": refusal.message}, refusal.status, headers)
        except _HangUpError:
            self.close_connection = True
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _meet_mishap(self, request: str) -> None:
        with self.server.guard:
            found = next((one for one in self.server.mishaps if one.times and one.pattern.search(request)), None)
            if found is None:
                return
            if found.after:
                found.after -= 1
                return
            found.times -= 1
        if found.partial:
            self.partial = found
            return
        found.reached.set()
        if found.first is not None:
            found.first()
            return
        if found.stall is not None:
            found.stall.wait(30)
        elif found.status is None:
            raise _HangUpError
        else:
            raise _RefusalError(found.status, f"told to fail; you sent {self.headers['Authorization']}")

    # ---- answers ----

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self._answer(status, data, {"Content-Type": "application/json", **(headers or {})})

    def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value.replace("\n", " "))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.partial is None:
            self.wfile.write(data)
            return
        self.wfile.write(data[: len(data) // 2])
        self.wfile.flush()
        self.partial.reached.set()
        if self.partial.stall is not None:
            self.partial.stall.wait(30)
        raise _HangUpError

    # ---- who asks ----

    def _user(self) -> tuple[str, str] | None:
        given = self.headers.get("Authorization")
        if given is None:
            return None
        token = given.removeprefix("Bearer ")
        if token not in USERS:
            raise _RefusalError(401, "Invalid credentials in Authorization header")
        return USERS[token]

    def _repo(self, name: str, *, write: bool = False) -> Repo:
        user = self._user()
        repo = self.server.repos.get(name)
        mine = user is not None and user[0] == name.split("/")[0]
        if repo is None or (repo.private and not mine):
            raise _RefusalError(401 if user is None else 404, "Repository not found", "RepoNotFound")
        if write and not (mine and user is not None and user[1] == "write"):
            raise _RefusalError(403, "You don't have the rights to write to this repository")
        return repo

    def _files(self, repo: Repo, revision: str) -> dict[str, Blob]:
        files = repo.files(revision)
        if files is None:
            raise _RefusalError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return files

    # ---- routes ----

    def _route(self, path: str) -> None:
        for pattern, method in _ROUTES:
            if found := re.fullmatch(pattern, f"{self.command} {path}"):
                getattr(self, method)(*found.groups())
                return
        raise _RefusalError(404, f"no such route: {self.command} {path}")

    def create(self) -> None:
        user = self._user()
        if user is None:
            raise _RefusalError(401, "Invalid username or password.")
        given = json.loads(self.body)
        owner = given.get("organization") or user[0]
        name = f"{owner}/{given['name']}"
        if owner != user[0] or user[1] != "write":
            raise _RefusalError(403, f"You don't have the rights to create a dataset under the namespace {owner}")
        url = f"{self.server.url}/datasets/{name}"
        if name in self.server.repos:
            self._json({"error": "You already created this dataset repo", "url": url}, 409)
            return
        private = given.get("visibility") == "private" or bool(given.get("private"))
        self.server.add_repo(name, private=private)
        self._json({"url": url, "name": name, "id": name})

    def info(self, name: str, revision: str | None = None) -> None:
        repo = self._repo(name)
        files = self._files(repo, revision or "main")
        sha = repo.branches.get(revision or "main", revision)
        siblings = [{"rfilename": path} for path in files]
        self._json({"_id": "1", "id": name, "sha": sha, "private": repo.private, "siblings": siblings, "tags": []})

    def tree(self, name: str, revision: str, folder: str | None = None) -> None:
        files = self._files(self._repo(name), revision)
        paths = sorted(path for path in files if not folder or path.startswith(folder.strip("/") + "/"))
        begin = int(self.query.get("cursor", 0))
        headers = {}
        if begin + self.server.page_size < len(paths):
            here = f"{self.server.url}/api/datasets/{name}/tree/{revision}{folder or ''}"
            headers["Link"] = f'<{here}?recursive=true&cursor={begin + self.server.page_size}>; rel="next"'
        page = paths[begin : begin + self.server.page_size]
        self._json([_listed(path, files[path]) for path in page], headers=headers)

    def paths_info(self, name: str, revision: str) -> None:
        files = self._files(self._repo(name), revision)
        text = self.body.decode()
        wanted = json.loads(text)["paths"] if text.startswith("{") else parse_qs(text).get("paths", [])
        self._json([_listed(path, files[path]) for path in wanted if path in files])

    def branch(self, name: str, branch: str) -> None:
        repo = self._repo(name, write=True)
        if branch in repo.branches:
            raise _RefusalError(409, "Reference already exists")
        repo.branches[branch] = repo.branches["main"]
        self._json({})

    def validate(self) -> None:
        given = json.loads(self.body)
        if not given["content"].startswith("---\n"):
            self._json({"errors": [], "warnings": [{"message": "empty or missing yaml metadata in repo card"}]})
            return
        import yaml

        yaml.safe_load(given["content"].split("---\n")[1])
        self._json({"errors": [], "warnings": []})

    def preupload(self, name: str, revision: str) -> None:
        files = self._files(self._repo(name, write=True), revision)
        told = []
        for file in json.loads(self.body)["files"]:
            sample = base64.b64decode(file["sample"])
            mode = "lfs" if is_large(file["path"], sample) or file["size"] > 10**7 else "regular"
            old = files.get(file["path"])
            told.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": old and old.etag})
        self._json({"files": told})

    def lfs_batch(self, name: str) -> None:
        self._repo(name, write=True)
        self._json(
            {"transfer": "basic", "objects": [self._lfs_object(one) for one in json.loads(self.body)["objects"]]}
        )

    def _lfs_object(self, asked: dict[str, Any]) -> dict[str, Any]:
        oid, size = asked["oid"], asked["size"]
        if oid in self.server.objects:
            return {"oid": oid, "size": size}
        actions = {
            name: {"href": f"{self.server.url}/lfs/{end}"}
            for name, end in (("upload", f"put/{oid}"), ("verify", "verify"))
        }
        return {"oid": oid, "size": size, "actions": actions}

    def lfs_put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise _RefusalError(400, "the bytes do not have that sha256")
        self.server.objects[oid] = self.body
        self._answer(200, b"", {"ETag": '"whole"'})

    def lfs_verify(self) -> None:
        given = json.loads(self.body)
        if len(self.server.objects.get(given["oid"], b"")) != given["size"]:
            raise _RefusalError(404, "no such object")
        self._json({})

    def commit(self, name: str, branch: str) -> None:
        repo = self._repo(name, write=True)
        with self.server.guard:
            files = dict(self._files(repo, branch))
            header, *operations = [json.loads(line) for line in self.body.splitlines() if line]
            parent = header["value"].get("parentCommit")
            if parent and repo.branches[branch] != parent:
                raise _RefusalError(412, "A commit has happened since. Please refresh and try again.")
            for operation in operations:
                self._apply(files, operation["key"], operation["value"])
            sha = repo.commit(branch, files, header["value"]["summary"])
        self._json({"success": True, "commitOid": sha, "commitUrl": f"{self.server.url}/datasets/{name}/commit/{sha}"})

    def _apply(self, files: dict[str, Blob], key: str, value: dict[str, Any]) -> None:
        path = value["path"]
        if key == "file":
            files[path] = Blob(base64.b64decode(value["content"]), False)
        elif key == "lfsFile":
            if value["oid"] not in self.server.objects:
                raise _RefusalError(400, f"{path}: no such object")
            files[path] = Blob(self.server.objects[value["oid"]], True)
        elif key == "deletedFile":
            if files.pop(path, None) is None:
                raise _RefusalError(404, "A file with this name doesn't exist", "EntryNotFound")
        else:
            raise _RefusalError(400, f"unknown operation {key}")

    def resolve(self, name: str, revision: str, path: str) -> None:
        repo = self._repo(name)
        blob = self._files(repo, revision).get(path)
        sha = repo.branches.get(revision, revision)
        if blob is None:
            raise _RefusalError(404, "Entry not found", "EntryNotFound")
        headers = {"X-Repo-Commit": sha, "ETag": f'"{blob.etag}"'}
        if not blob.large:
            self._answer(200, blob.data, headers)
            return
        self.server.objects[blob.sha256] = blob.data
        headers |= {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.data))}
        self._answer(
            302, b"", headers | {"Location": f"http://localhost:{self.server.server_port}/cdn/{blob.sha256}/{path}"}
        )

    def cdn(self, oid: str, _: str) -> None:
        """Another host, as far as a client can tell: the token must not come along."""
        if self.headers.get("Authorization"):
            raise _RefusalError(400, "a token was sent to another host")
        self._answer(200, self.server.objects[oid], {"ETag": f'"{oid}"'})


def _listed(path: str, blob: Blob) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "file", "path": path, "size": len(blob.data), "oid": blob.sha1}
    if blob.large:
        found["lfs"] = {"oid": blob.sha256, "size": len(blob.data), "pointerSize": 134}
    return found


_NAME = r"([\w.-]+/[\w.-]+)"
_ROUTES = (
    (r"POST /api/repos/create", "create"),
    (r"POST /api/validate-yaml", "validate"),
    (rf"GET /api/datasets/{_NAME}", "info"),
    (rf"GET /api/datasets/{_NAME}/revision/(.+)", "info"),
    (rf"GET /api/datasets/{_NAME}/tree/([^/]+)(/.+)?", "tree"),
    (rf"POST /api/datasets/{_NAME}/paths-info/(.+)", "paths_info"),
    (rf"POST /api/datasets/{_NAME}/branch/(.+)", "branch"),
    (rf"POST /api/datasets/{_NAME}/preupload/(.+)", "preupload"),
    (rf"POST /api/datasets/{_NAME}/commit/(.+)", "commit"),
    (rf"POST /datasets/{_NAME}\.git/info/lfs/objects/batch", "lfs_batch"),
    (r"PUT /lfs/put/(\w+)", "lfs_put"),
    (r"POST /lfs/verify", "lfs_verify"),
    (rf"(?:GET|HEAD) /datasets/{_NAME}/resolve/([^/]+)/(.+)", "resolve"),
    (r"(?:GET|HEAD) /cdn/(\w+)/(.+)", "cdn"),
)
