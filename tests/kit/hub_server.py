"""A stand-in for the Hugging Face Hub: its HTTP API for datasets, as huggingface_hub calls it, on this machine alone.

Repositories with branches and commits, LFS uploads (checked by sha256), files served with redirects and etags, tokens
that may write. It can be told to fail, to hang up or to stall at chosen requests. What it does not speak: Xet,
pull requests, gated repositories.
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

WRITER, USER = "hf_WriterSecret0123456789", "anna"
"""The only token, and whose it is."""
GIT_ATTRIBUTES = b"*.bin filter=lfs diff=lfs merge=lfs -text\n"


@dataclass(slots=True)
class Repo:
    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        sha = hashlib.sha1(f"{len(self.commits)} {branch} {message}".encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def files(self, revision: str = "main") -> dict[str, bytes] | None:
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
        self.url = f"http://127.0.0.1:{self.server_port}"

    def mishap(self, pattern: str, status: int | None = 500, **options: Any) -> Mishap:
        self.mishaps.append(Mishap(re.compile(pattern), status, **options))
        return self.mishaps[-1]

    def count(self, pattern: str) -> int:
        return sum(re.search(pattern, request) is not None for request in self.requests)

    def add_repo(self, name: str, *, private: bool = True, files: dict[str, bytes] | None = None) -> None:
        self.repos[name] = Repo(private)
        self.repos[name].commit("main", {".gitattributes": GIT_ATTRIBUTES, **(files or {})}, "initial commit")

    def remove(self, name: str, path: str) -> None:
        """Someone removes a file."""
        files = self.repos[name].files() or {}
        self.repos[name].commit("main", {one: files[one] for one in files if one != path}, f"remove {path}")

    def contents(self, name: str, revision: str = "main") -> dict[str, bytes]:
        files = self.repos[name].files(revision) or {}
        return {path: data for path, data in files.items() if path != ".gitattributes"}

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


def is_large(path: str, size: int) -> bool:
    return path.endswith((".bin", ".idx", ".arrow")) or size > 10**7


def _listed(path: str, data: bytes) -> dict[str, Any]:
    """A file as the Hub lists it."""
    sha1, sha256 = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(), hashlib.sha256(data).hexdigest()
    large = {"lfs": {"oid": sha256, "size": len(data), "pointerSize": 134}} if is_large(path, len(data)) else {}
    return {"type": "file", "path": path, "size": len(data), "oid": sha1, **large}


class _RefusalError(Exception):
    """`status` None: the connection ends without an answer."""

    def __init__(self, status: int | None, message: str = "", code: str | None = None) -> None:
        self.status, self.message, self.code = status, message, code


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"
    # Else every answer waits 40 ms for the client to acknowledge its headers.
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(split.query).items()}
        request = f"{self.command} {unquote(split.path)}"
        self.body = self._read_body()
        self.partial: Mishap | None = None
        self.server.requests.append(request)
        try:
            self._meet_mishap(request)
            for pattern, method in _ROUTES:
                if found := re.fullmatch(pattern, request):
                    method(self, *found.groups())
                    return
            raise _RefusalError(404, f"no such route: {request}")
        except _RefusalError as refusal:
            if refusal.status is None:
                self.close_connection = True
                return
            code = {"X-Error-Code": refusal.code} if refusal.code else {}
            self._json({"error": refusal.message}, refusal.status, {"X-Error-Message": refusal.message} | code)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().strip() or b"0", 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

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
        elif found.stall is not None:
            found.stall.wait(30)
        else:
            raise _RefusalError(found.status, f"told to fail; you sent {self.headers['Authorization']}")

    # ---- answers ----

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._answer(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

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
        raise _RefusalError(None)

    # ---- who asks ----

    def _is_user(self) -> bool:
        given = self.headers.get("Authorization")
        if given not in (None, f"Bearer {WRITER}"):
            raise _RefusalError(401, "Invalid credentials in Authorization header")
        return given is not None

    def _repo(self, name: str) -> Repo:
        is_user, repo = self._is_user(), self.server.repos.get(name)
        if repo is None or (repo.private and not is_user):
            raise _RefusalError(404 if is_user else 401, "Repository not found", "RepoNotFound")
        return repo

    def _files(self, name: str, revision: str) -> dict[str, bytes]:
        files = self._repo(name).files(revision)
        if files is None:
            raise _RefusalError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return files

    # ---- routes ----

    def create(self) -> None:
        given = json.loads(self.body)
        if not self._is_user():
            raise _RefusalError(401, "Invalid username or password.")
        name = f"{given.get('organization') or USER}/{given['name']}"
        url = f"{self.server.url}/datasets/{name}"
        if name in self.server.repos:
            self._json({"error": "You already created this dataset repo", "url": url}, 409)
            return
        self.server.add_repo(name, private=given.get("visibility") == "private" or bool(given.get("private")))
        self._json({"url": url, "name": name, "id": name})

    def info(self, name: str, revision: str = "main") -> None:
        files, repo = self._files(name, revision), self.server.repos[name]
        facts = {"_id": "1", "id": name, "sha": repo.branches.get(revision, revision), "private": repo.private}
        self._json(facts | {"siblings": [{"rfilename": path} for path in files], "tags": []})

    def tree(self, name: str, revision: str, folder: str | None = None) -> None:
        files = self._files(name, revision)
        paths = sorted(path for path in files if not folder or path.startswith(folder.strip("/") + "/"))
        begin, headers = int(self.query.get("cursor", 0)), {}
        end = begin + self.server.page_size
        if end < len(paths):
            here = f"{self.server.url}/api/datasets/{name}/tree/{revision}{folder or ''}"
            headers["Link"] = f'<{here}?recursive=true&cursor={end}>; rel="next"'
        self._json([_listed(path, files[path]) for path in paths[begin:end]], headers=headers)

    def paths_info(self, name: str, revision: str) -> None:
        files, text = self._files(name, revision), self.body.decode()
        wanted = json.loads(text)["paths"] if text.startswith("{") else parse_qs(text).get("paths", [])
        self._json([_listed(path, files[path]) for path in wanted if path in files])

    def validate(self) -> None:
        import yaml

        yaml.safe_load(json.loads(self.body)["content"].partition("---\n")[2].partition("---\n")[0])
        self._json({"errors": [], "warnings": []})

    def preupload(self, name: str, revision: str) -> None:
        files, told = self._files(name, revision), []
        for file in json.loads(self.body)["files"]:
            path, mode = file["path"], "lfs" if is_large(file["path"], file["size"]) else "regular"
            old = _listed(path, files[path]) if path in files else {}
            oid = old.get("lfs", old).get("oid")
            told.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._json({"files": told})

    def lfs_batch(self, name: str) -> None:
        self._repo(name)
        objects = []
        for asked in json.loads(self.body)["objects"]:
            upload = {"actions": {"upload": {"href": f"{self.server.url}/lfs/put/{asked['oid']}"}}}
            here = asked["oid"] in self.server.objects
            objects.append({"oid": asked["oid"], "size": asked["size"]} | ({} if here else upload))
        self._json({"transfer": "basic", "objects": objects})

    def lfs_put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise _RefusalError(400, "the bytes do not have that sha256")
        self.server.objects[oid] = self.body
        self._answer(200, b"", {"ETag": '"whole"'})

    def commit(self, name: str, branch: str) -> None:
        with self.server.guard:
            files, repo = dict(self._files(name, branch)), self.server.repos[name]
            header, *operations = [json.loads(line) for line in self.body.splitlines() if line]
            if header["value"].get("parentCommit") not in (None, "", repo.branches[branch]):
                raise _RefusalError(412, "A commit has happened since. Please refresh and try again.")
            for operation in operations:
                value, kind = operation["value"], operation["key"]
                if kind == "deletedFile":
                    if files.pop(value["path"], None) is None:
                        raise _RefusalError(404, "A file with this name doesn't exist", "EntryNotFound")
                elif kind == "lfsFile" and value["oid"] not in self.server.objects:
                    raise _RefusalError(400, f"{value['path']}: no such object")
                else:
                    large = kind == "lfsFile"
                    files[value["path"]] = (
                        self.server.objects[value["oid"]] if large else base64.b64decode(value["content"])
                    )
            sha = repo.commit(branch, files, header["value"]["summary"])
        self._json({"success": True, "commitOid": sha, "commitUrl": f"{self.server.url}/datasets/{name}/commit/{sha}"})

    def resolve(self, name: str, revision: str, path: str) -> None:
        data = self._files(name, revision).get(path)
        if data is None:
            raise _RefusalError(404, "Entry not found", "EntryNotFound")
        listed, sha = _listed(path, data), self.server.repos[name].branches.get(revision, revision)
        oid = listed.get("lfs", listed)["oid"]
        headers = {"X-Repo-Commit": sha, "ETag": f'"{oid}"'}
        if "lfs" not in listed:
            self._answer(200, data, headers)
            return
        self.server.objects[oid] = data
        headers |= {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(data))}
        headers["Location"] = f"http://localhost:{self.server.server_port}/cdn/{oid}/{path}"
        self._answer(302, b"", headers)

    def cdn(self, oid: str, _: str) -> None:
        """Another host, as far as a client can tell: the token must not come along."""
        if self.headers.get("Authorization"):
            raise _RefusalError(400, "a token was sent to another host")
        self._answer(200, self.server.objects[oid], {"ETag": f'"{oid}"'})


_NAME = r"([\w.-]+/[\w.-]+)"
_ROUTES: tuple[tuple[str, Callable[..., None]], ...] = (
    (r"POST /api/repos/create", _Handler.create),
    (r"POST /api/validate-yaml", _Handler.validate),
    (rf"GET /api/datasets/{_NAME}", _Handler.info),
    (rf"GET /api/datasets/{_NAME}/revision/(.+)", _Handler.info),
    (rf"GET /api/datasets/{_NAME}/tree/([^/]+)(/.+)?", _Handler.tree),
    (rf"POST /api/datasets/{_NAME}/paths-info/(.+)", _Handler.paths_info),
    (rf"POST /api/datasets/{_NAME}/preupload/(.+)", _Handler.preupload),
    (rf"POST /api/datasets/{_NAME}/commit/(.+)", _Handler.commit),
    (rf"POST /datasets/{_NAME}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (r"PUT /lfs/put/(\w+)", _Handler.lfs_put),
    (rf"(?:GET|HEAD) /datasets/{_NAME}/resolve/([^/]+)/(.+)", _Handler.resolve),
    (r"(?:GET|HEAD) /cdn/(\w+)/(.+)", _Handler.cdn),
)
