"""A small local stand-in for the Hugging Face Hub, so that tests run the real client offline.

The client reads its settings when it is imported, so use it in a subprocess that starts with
HF_ENDPOINT=<Served.url>, HF_HOME=<empty folder>, HF_HUB_DISABLE_XET=1 and
HF_HUB_DISABLE_TELEMETRY=1. Files are read into memory once: keep the folders small.
"""

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha1
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

# A quoted revision or path keeps its slashes as %2F, so these match the raw path.
_API = re.compile(r"/api/(models|datasets)/(.+?)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?")
_RESOLVE = re.compile(r"/(datasets/)?(.+?)/resolve/([^/]+)/(.+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(frozen=True)
class Served:
    """A running stand-in: its address, and each request so far as "METHOD path?query"."""

    url: str
    requests: list[str]


class _Repo:
    """The files of one repository, at its only commit."""

    def __init__(self, repo_id: str, folder: Path, commit: str | None) -> None:
        self.id = repo_id
        self.files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        # As in git: a file's id is that of its blob, whatever its path.
        self.oids = {
            path: sha1(b"blob %d\0" % len(data) + data).hexdigest()
            for path, data in self.files.items()
        }
        folders = {str(up) for path in self.files for up in PurePosixPath(path).parents}
        self.paths = sorted({*self.files, *folders} - {"."})
        self.commit = commit or sha1(repr((repo_id, self.oids)).encode()).hexdigest()

    def info(self, blobs: bool) -> dict[str, Any]:
        """What the API says about the repository, with the files' sizes if `blobs`."""
        siblings = [
            {"rfilename": path} | ({"size": len(data), "blobId": self.oids[path]} if blobs else {})
            for path, data in self.files.items()
        ]
        return {
            "id": self.id,
            "sha": self.commit,
            "private": False,
            "gated": False,
            "disabled": False,
            "tags": [],
            "siblings": siblings,
        }

    def entry(self, path: str) -> dict[str, Any]:
        """What the API says about one file or folder."""
        if path in self.files:
            size = len(self.files[path])
            return {"type": "file", "path": path, "size": size, "oid": self.oids[path]}
        oid = sha1(path.encode()).hexdigest()
        return {"type": "directory", "path": path, "size": 0, "oid": oid}

    def tree(self, path: str, recursive: bool) -> list[str]:
        """The paths below a folder (or at its first level), or the file itself."""
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
    protocol_version = "HTTP/1.1"  # the client keeps connections alive
    server: _Server

    def do_GET(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        # The body must be read even if unused: the next request follows it on the connection.
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        url = urlsplit(self.path)
        if match := _API.fullmatch(url.path):
            kind, repo_id, action, revision, path = match.groups()
            if repo := self._find(kind, repo_id, revision or "main"):
                self._api(repo, action, unquote(path or ""), parse_qs(url.query), parse_qs(body))
        elif match := _RESOLVE.fullmatch(url.path):
            dataset, repo_id, revision, path = match.groups()
            if repo := self._find("datasets" if dataset else "models", repo_id, revision):
                self._resolve(repo, unquote(path))
        else:
            self._error(HTTPStatus.NOT_FOUND, "", "Not Found")

    do_HEAD = do_POST = do_GET

    def _find(self, kind: str, repo_id: str, revision: str) -> _Repo | None:
        """The repository at that revision; None once an error was sent."""
        repo = self.server.repos.get((kind, unquote(repo_id)))
        if repo is None:
            # 401 and not 404: so the Hub answers those who are not logged in.
            self._error(HTTPStatus.UNAUTHORIZED, "RepoNotFound", "Repository not found")
        elif unquote(revision) not in ("main", repo.commit):
            self._error(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repo
        return None

    def _api(
        self,
        repo: _Repo,
        action: str | None,
        path: str,
        query: dict[str, list[str]],
        form: dict[str, list[str]],
    ) -> None:
        """Answer /api/{models,datasets}/{repo}[/{action}/{revision}[/{path}]]."""
        if action == "tree":
            if path and path not in repo.paths:
                self._missing(repo)
                return
            self._json([repo.entry(p) for p in repo.tree(path, query.get("recursive") == ["true"])])
        elif action == "paths-info":
            self._json([repo.entry(p) for p in form.get("paths", []) if p in repo.paths])
        else:
            self._json(repo.info(blobs=query.get("blobs") == ["true"]))

    def _resolve(self, repo: _Repo, path: str) -> None:
        """Answer with a file, or the range of it that was asked for."""
        if path not in repo.files:
            self._missing(repo)
            return
        data = repo.files[path]
        headers = {
            "X-Repo-Commit": repo.commit,
            "ETag": f'"{repo.oids[path]}"',
            "Accept-Ranges": "bytes",
        }
        wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
        if wanted is None:
            self._send(HTTPStatus.OK, headers, data)
            return
        start, last = int(wanted[1]), int(wanted[2] or len(data))
        part = data[start : last + 1]
        if part:
            end = start + len(part) - 1
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            self._send(HTTPStatus.PARTIAL_CONTENT, headers, part)
        else:
            headers["Content-Range"] = f"bytes */{len(data)}"
            self._send(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, headers, b"")

    def _missing(self, repo: _Repo) -> None:
        # With the commit, the client remembers that the file does not exist at it.
        headers = {"X-Repo-Commit": repo.commit}
        self._error(HTTPStatus.NOT_FOUND, "EntryNotFound", "Entry not found", headers)

    def _error(
        self, status: HTTPStatus, code: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self._send(
            status, {"X-Error-Code": code, "X-Error-Message": message, **(headers or {})}, b""
        )

    def _json(self, value: object) -> None:
        self._send(HTTPStatus.OK, {"Content-Type": "application/json"}, json.dumps(value).encode())

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
    """Serve folders as model and dataset repositories, named by their ids, on 127.0.0.1.

    A repository is found at "main" and at its one commit: the one that `revisions` gives for its
    id, or else one made from its id and its files.
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
