"""A small local replacement of the Hugging Face Hub, so that tests run the real client offline.

The client reads its settings during its import, so use it in a subprocess that starts with
HF_ENDPOINT=<Served.url>, HF_HOME=<empty folder>, HF_HUB_DISABLE_XET=1 and
HF_HUB_DISABLE_TELEMETRY=1. The server keeps all files in memory: keep the folders small.
"""

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha1
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

# Revisions and paths after "tree/" contain slashes as %2F, so these expressions match the raw path.
_REPO = r"([^/]+(?:/[^/]+)??)"
_API = re.compile(rf"/api/(models|datasets)/{_REPO}(?:/(revision|tree|paths-info)/([^/]+)/?(.*))?")
_RESOLVE = re.compile(rf"/(datasets/)?{_REPO}/resolve/([^/]+)/(.+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(frozen=True)
class Served:
    """A running server: its address, and the requests so far, each as "METHOD path?query"."""

    url: str
    requests: list[str]


def _blob_id(data: bytes) -> str:
    """Return a file's id, computed from its content as in git."""
    return sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Repo:
    """The files of one repository at its only commit."""

    def __init__(self, repo_id: str, folder: Path, commit: str | None) -> None:
        self.id = repo_id
        self.files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        self.oids = {path: _blob_id(data) for path, data in self.files.items()}
        folders = {str(up) for path in self.files for up in PurePosixPath(path).parents}
        self.paths = sorted({*self.files, *folders} - {"."})
        self.commit = commit or sha1(repr((repo_id, self.oids)).encode()).hexdigest()

    def info(self, blobs: bool) -> dict[str, Any]:
        """Return the API's answer about the repository, with the sizes of its files if `blobs`."""
        siblings: list[dict[str, Any]] = []
        for path, data in self.files.items():
            details = {"size": len(data), "blobId": self.oids[path]} if blobs else {}
            siblings.append({"rfilename": path, **details})
        about = {"id": self.id, "sha": self.commit, "private": False, "gated": False, "tags": []}
        return {**about, "siblings": siblings}

    def entry(self, path: str) -> dict[str, Any]:
        """Return the API's answer about one file or folder."""
        if path in self.files:
            size = len(self.files[path])
            return {"type": "file", "path": path, "size": size, "oid": self.oids[path]}
        oid = sha1(path.encode()).hexdigest()
        return {"type": "directory", "path": path, "size": 0, "oid": oid}

    def tree(self, path: str, recursive: bool) -> list[str]:
        """Return all paths below a folder, or only its first level, or the file itself."""
        if path in self.files:
            return [path]
        prefix = f"{path}/" if path else ""
        below = [p for p in self.paths if p.startswith(prefix)]
        return below if recursive else [p for p in below if "/" not in p[len(prefix) :]]


class _Server(ThreadingHTTPServer):
    def __init__(self, repos: dict[tuple[str, str], _Repo]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos = repos
        self.requests: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"  # the client keeps connections alive
    disable_nagle_algorithm = True  # otherwise each body waits 40 ms for the acknowledgement of the headers

    def handle(self) -> None:
        with suppress(ConnectionError):  # a streaming client may disconnect before the end of a file
            super().handle()

    def do_GET(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        # Always read the body, because the next request follows it on the connection.
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        url = urlsplit(self.path)
        if match := _API.fullmatch(url.path):
            kind, repo_id, action, revision, path = match.groups()
            if repo := self._find(kind, repo_id, revision or "main"):
                self._api(repo, action, unquote(path or ""), parse_qs(f"{url.query}&{body}"))
        elif match := _RESOLVE.fullmatch(url.path):
            dataset, repo_id, revision, path = match.groups()
            if repo := self._find("datasets" if dataset else "models", repo_id, revision):
                self._resolve(repo, unquote(path))
        else:
            self._error(HTTPStatus.NOT_FOUND, "", "Not supported by this server")

    do_HEAD = do_POST = do_GET  # noqa: N815 - http.server requires these names

    def _find(self, kind: str, repo_id: str, revision: str) -> _Repo | None:
        """Return the repository if it has that revision; otherwise send an error and return None."""
        repo = self.server.repos.get((kind, repo_id))
        if repo is None:
            # 401, not 404, is the Hub's answer to a client that is not logged in.
            self._error(HTTPStatus.UNAUTHORIZED, "RepoNotFound", "Repository not found")
        elif unquote(revision) not in ("main", repo.commit):
            self._error(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repo
        return None

    def _api(self, repo: _Repo, action: str | None, path: str, args: dict[str, list[str]]) -> None:
        """Answer /api/{models,datasets}/{repo}[/{action}/{revision}[/{path}]]."""
        answer: object
        if action == "tree":
            if path and path not in repo.paths:
                self._error(HTTPStatus.NOT_FOUND, "EntryNotFound", "Entry not found", repo.commit)
                return
            answer = [repo.entry(p) for p in repo.tree(path, args.get("recursive") == ["true"])]
        elif action == "paths-info":
            answer = [repo.entry(p) for p in args.get("paths", []) if p in repo.paths]
        else:
            answer = repo.info(blobs=args.get("blobs") == ["true"])
        headers = {"Content-Type": "application/json"}
        self._send(HTTPStatus.OK, headers, json.dumps(answer).encode())

    def _resolve(self, repo: _Repo, path: str) -> None:
        """Answer with a file, or with the requested range of it."""
        if path not in repo.files:
            self._error(HTTPStatus.NOT_FOUND, "EntryNotFound", "Entry not found", repo.commit)
            return
        status, data = HTTPStatus.OK, repo.files[path]
        headers = {"X-Repo-Commit": repo.commit, "ETag": f'"{repo.oids[path]}"'}
        if wanted := _RANGE.fullmatch(self.headers.get("Range", "")):
            start, size = int(wanted[1]), len(data)
            data = data[start : int(wanted[2] or size) + 1]
            if data:
                status = HTTPStatus.PARTIAL_CONTENT
                headers["Content-Range"] = f"bytes {start}-{start + len(data) - 1}/{size}"
            else:
                status = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
                headers["Content-Range"] = f"bytes */{size}"
        self._send(status, headers, data)

    def _error(self, status: HTTPStatus, code: str, message: str, commit: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        if commit:  # lets the client remember that the file does not exist at this commit
            headers["X-Repo-Commit"] = commit
        self._send(status, headers, b"")

    def _send(self, status: HTTPStatus, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: `Served.requests` is the log."""


@contextmanager
def serve(
    models: Mapping[str, Path],
    datasets: Mapping[str, Path],
    revisions: Mapping[str, str] | None = None,
) -> Iterator[Served]:
    """Serve folders on 127.0.0.1 as model and dataset repositories; the keys are the repository ids.

    A repository has the revision "main" and one commit: the value of `revisions` for its id, or else a
    hash of its id and its files.
    """
    commits = revisions or {}
    repos = {
        (kind, repo_id): _Repo(repo_id, folder, commits.get(repo_id))
        for kind, folders in (("models", models), ("datasets", datasets))
        for repo_id, folder in folders.items()
    }
    with _Server(repos) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield Served(f"http://127.0.0.1:{server.server_port}", server.requests)
        finally:
            server.shutdown()
