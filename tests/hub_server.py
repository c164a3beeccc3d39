"""A small Hugging Face hub on the loopback interface, with optional faults."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".bin", ".h5")  # stored with LFS, as on the real hub: by SHA-256
REPO = r"(?P<repo>[\w.-]+(?:/[\w.-]+)?)"
INFO = re.compile(rf"/api/models/{REPO}/revision/(?P<revision>[^/]+)")
TREE = re.compile(rf"/api/models/{REPO}/tree/(?P<revision>[^/]+)")
FILE = re.compile(rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<file>.+)")

# Faults of a file. "cut once" affects only one request; "listed …" only the listing.
FILE_FAULTS = (
    "500",
    "hang",  # no response, not even to HEAD
    "stall",  # sends half of the file, then nothing more, but keeps the connection open
    "silent",  # sends the headers, but no bytes
    "slow",  # sends the file in eight pieces, with pauses
    "cut",  # closes the connection after half of the file; the rest cannot be downloaded
    "cut once",
    "wrong size",  # X-Linked-Size exceeds the real size
    "flip",  # flips one bit in the middle
    "gone",  # responds with 404, although the file is listed
    "no etag",
    "listed larger",
    "listed without hash",
)
# Faults of a repository; they are set for the file name "".
REPO_FAULTS = ("500", "hang", "gated", "bad token", "web page", "no commit", "push")


@dataclass(frozen=True)
class File:
    data: bytes
    large: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def sha1(self) -> str:
        """git's blob hash; the real hub states the hash of the pointer file for a large file."""
        data = b"pointer to " + self.sha256.encode() if self.large else self.data
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.large else self.sha1


@dataclass
class Repo:
    """All commits of a repository, and the commits of its branches and tags."""

    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    to_push: Path | None = None

    def push(self, folder: Path, ref: str = "main") -> str:
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        files = {
            path.relative_to(folder).as_posix(): File(path.read_bytes(), path.suffix in LARGE)
            for path in paths
        }
        named = "".join(f"{name} {file.sha256}\n" for name, file in files.items())
        commit = hashlib.sha1(named.encode()).hexdigest()
        self.commits[commit] = files
        self.refs[ref] = commit
        return commit


@dataclass(frozen=True)
class Request:
    """A request and the status of the response; `file` is "" for requests about a repository."""

    method: str
    path: str
    status: int
    token: str | None
    range: str | None


class HubServer:
    """A hub that serves `repos` from threads of this process while its `with` block runs.

    Attributes:
        faults: (repository, file) → one of the faults above; the file is "" for the repository.
        tokens: repository → the token that every request for it must contain.
        moved: old name → the name to which the hub redirects, as it does for `gpt2`.
        log: all requests to which the hub has started to respond.
        half_sent: set when the hub has sent half of a stalling file.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.faults: dict[tuple[str, str], str] = {}
        self.tokens: dict[str, str] = {}
        self.moved: dict[str, str] = {}
        self.log: list[Request] = []
        self.half_sent = threading.Event()
        self.closing = threading.Event()
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()  # ends the waiting of hanging requests
        self._server.shutdown()
        self._server.server_close()

    def push(self, repo_id: str, folder: Path, ref: str = "main") -> str:
        """Publish a folder as a new commit."""
        return self.repos.setdefault(repo_id, Repo()).push(folder, ref)

    def fault(self, repo_id: str, file: str) -> str | None:
        """Return the current fault of a file."""
        with self.lock:
            fault = self.faults.get((repo_id, file))
            assert fault is None or fault in (FILE_FAULTS if file else REPO_FAULTS), fault
            return fault

    def downloaded_files(self, repo_id: str) -> set[str]:
        """Return the files of a repository that were downloaded, in any revision."""
        found = [FILE.fullmatch(r.path) for r in list(self.log) if r.method == "GET"]
        return {match["file"] for match in found if match and match["repo"] == repo_id}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors, because tests terminate clients."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing, because the hub keeps its own log."""

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        path = urlsplit(self.path).path
        routes = {INFO: self._info, TREE: self._tree, FILE: self._file}
        route = next((route for route in routes if route.fullmatch(path)), None)
        match = route and route.fullmatch(path)
        if route is None or match is None:
            return self._refuse(404, "NotFound", f"no such route: {path}")
        repo_id, revision = match["repo"], unquote(match["revision"])
        if repo_id in self.hub.moved:
            target = self.path.replace(repo_id, self.hub.moved[repo_id], 1)
            return self._reply(307, b"", {"Location": target})
        repo = self.hub.repos.get(repo_id)
        token = self.hub.tokens.get(repo_id)
        if repo is None or (token and self.headers.get("Authorization") != f"Bearer {token}"):
            return self._refuse(401, "RepoNotFound", "Repository not found")
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        routes[route](repo_id, repo, commit, *match.groups()[2:])

    def _info(self, repo_id: str, repo: Repo, commit: str) -> None:
        fault = self.hub.fault(repo_id, "")
        if fault == "hang":
            self.hub.closing.wait()
        elif fault == "500":
            return self._refuse(500, "", "Internal error")
        elif fault == "gated":
            return self._refuse(403, "GatedRepo", "Access is restricted")
        elif fault == "bad token":
            return self._refuse(401, "", "Invalid credentials in Authorization header")
        elif fault == "web page":
            return self._reply(200, b"<!doctype html>Log in to the network", {})
        sha = None if fault == "no commit" else commit
        siblings = [self._sibling(repo_id, *item) for item in repo.commits[commit].items()]
        if fault == "push" and repo.to_push:
            repo.push(repo.to_push)
        self._json({"_id": "1", "id": repo_id, "sha": sha, "tags": [], "siblings": siblings})

    def _sibling(self, repo_id: str, name: str, file: File) -> dict[str, Any]:
        fault = self.hub.fault(repo_id, name)
        size = len(file.data) + (1000 if fault == "listed larger" else 0)
        row: dict[str, Any] = {"rfilename": name}
        if "blobs=" not in self.path:
            return row
        if fault == "listed without hash":
            return {**row, "size": size}
        lfs = {"lfs": {"sha256": file.sha256, "size": size, "pointerSize": 134}}
        return {**row, "size": size, "blobId": file.sha1, **(lfs if file.large else {})}

    def _tree(self, repo_id: str, repo: Repo, commit: str) -> None:
        rows = []
        for name, file in repo.commits[commit].items():
            row = {"type": "file", "oid": file.sha1, "size": len(file.data), "path": name}
            lfs = {"lfs": {"oid": file.sha256, "size": len(file.data), "pointerSize": 134}}
            rows.append({**row, **(lfs if file.large else {})})
        self._json(rows)

    def _file(self, repo_id: str, repo: Repo, commit: str, name: str) -> None:
        fault = self.hub.fault(repo_id, name)
        file = repo.commits[commit].get(name)
        commit_header = {"X-Repo-Commit": commit}
        if fault == "hang":
            self.hub.closing.wait()
        if fault == "500":
            return self._refuse(500, "", "Internal error")
        if file is None or fault == "gone":
            return self._refuse(404, "EntryNotFound", "Entry not found", commit_header)
        headers = {**commit_header, "Accept-Ranges": "bytes"}
        if fault != "no etag":
            headers["ETag"] = f'"{file.etag}"'
        if file.large:
            size = len(file.data) + (1000 if fault == "wrong size" else 0)
            headers |= {"X-Linked-Size": str(size)}
            headers |= {"X-Linked-Etag": f'"{file.etag}"'} if fault != "no etag" else {}
        self._send(repo_id, name, _flipped(file.data) if fault == "flip" else file.data, headers)

    def _send(self, repo_id: str, name: str, data: bytes, headers: dict[str, str]) -> None:
        """Send the requested range, up to the point at which the fault occurs."""
        start, status = 0, 200
        if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start, status = int(wanted[1]), 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        fault = self.hub.fault(repo_id, name) if self.command == "GET" else None
        if fault == "cut once":
            with self.hub.lock:
                self.hub.faults.pop((repo_id, name), None)
        end = {"cut": 0.5, "cut once": 0.5, "stall": 0.5, "silent": 0.0}.get(fault or "", 1.0)
        sent = data[start : int(len(data) * end)]
        self.close_connection = end < 1
        self._reply(status, self._paced(sent, fault), headers, len(data) - start)
        if fault in ("stall", "silent"):
            self.hub.half_sent.set()
            self.hub.closing.wait()

    def _paced(self, data: bytes, fault: str | None) -> Iterable[bytes]:
        step = -(-len(data) // 8) or 1
        for start in range(0, len(data), step):
            if fault == "slow":
                self.hub.closing.wait(0.1)
            yield data[start : start + step]

    def _json(self, value: Any) -> None:
        self._reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(
        self, status: int, code: str, message: str, headers: dict[str, str] | None = None
    ) -> None:
        headers = {"X-Error-Message": message, **(headers or {})}
        headers |= {"X-Error-Code": code} if code else {}
        self._reply(status, json.dumps({"error": message}).encode(), headers)

    def _reply(
        self,
        status: int,
        body: bytes | Iterable[bytes],
        headers: dict[str, str],
        length: int | None = None,
    ) -> None:
        """Send the headers and, except for HEAD, the body.

        A body that is shorter than its stated length ends the connection.
        """
        self.hub.log.append(
            Request(
                self.command,
                urlsplit(self.path).path,
                status,
                self.headers.get("Authorization"),
                self.headers.get("Range"),
            )
        )
        pieces = [body] if isinstance(body, bytes) else body
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body) if isinstance(body, bytes) else length))
        self.end_headers()
        if self.command == "GET":
            for piece in pieces:
                self.wfile.write(piece)
                self.wfile.flush()


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
