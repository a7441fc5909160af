"""A small local replacement of the Hugging Face Hub, so that tests run the real client offline.

The client reads its settings during its import, so use it in a subprocess that starts with
HF_ENDPOINT=<Served.url>, HF_HOME=<empty folder>, HF_HUB_DISABLE_XET=1 and
HF_HUB_DISABLE_TELEMETRY=1. The server keeps all files in memory: keep the folders small.

Clients with a token of `hub_uploads.TOKEN_ROLES` may upload, by LFS as without Xet.
"""

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha1, sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import hub_uploads
from hub_uploads import Objects, Refused

# Revisions and paths after "tree/" contain slashes as %2F, so these expressions match the raw path.
_REPO = r"([^/]+(?:/[^/]+)??)"
_ACTIONS = "revision|tree|paths-info|preupload|commit|branch|refs"
_API = re.compile(rf"/api/(models|datasets)/{_REPO}(?:/({_ACTIONS})(?:/([^/]+)/?(.*))?)?")
_RESOLVE = re.compile(rf"/(datasets/)?{_REPO}/resolve/([^/]+)/(.+)")
_BATCH = re.compile(rf"/{_REPO}\.git/info/lfs/objects/batch")
_OBJECT = re.compile(r"/lfs/([0-9a-f]{64})(/verify)?")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(frozen=True)
class Served:
    """A running server: its address, and the requests so far, each as "METHOD path?query".

    A request that contains a word of `broken` gets no answer, once: the connection breaks.
    """

    url: str
    requests: list[str]
    broken: list[str]
    repos: "dict[tuple[str, str], _Versions]"


def _blob_id(data: bytes) -> str:
    """Return a file's id, computed from its content as in git."""
    return sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Repo:
    """The files of one repository at one commit."""

    def __init__(
        self, repo_id: str, files: Mapping[str, bytes], commit: str | None = None, *, private: bool = False
    ) -> None:
        self.id = repo_id
        self.private = private
        self.files = dict(sorted(files.items()))
        self.oids = {
            path: sha256(data).hexdigest() if hub_uploads.LFS.fullmatch(path) else _blob_id(data)
            for path, data in self.files.items()
        }
        folders = {str(up) for path in self.files for up in PurePosixPath(path).parents}
        self.paths = sorted({*self.files, *folders} - {"."})
        self.commit = commit or sha1(repr((repo_id, self.oids)).encode()).hexdigest()

    def info(self, blobs: bool) -> dict[str, Any]:
        """Return the API's answer about the repository, with the sizes of its files if `blobs`."""
        siblings: list[dict[str, Any]] = []
        for path, data in self.files.items():
            details = {"size": len(data), "blobId": self.oids[path]} if blobs else {}
            siblings.append({"rfilename": path, **details})
        about = {"id": self.id, "sha": self.commit, "private": self.private, "gated": False, "tags": []}
        return {**about, "siblings": siblings, "cardData": hub_uploads.front_matter(self.files.get("README.md"))}

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


def _read(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class _Versions:
    """All commits of a repository, and its branches and tags by name."""

    def __init__(self, first: _Repo) -> None:
        self.commits = {first.commit: first}
        self.branches = {"main": first.commit}
        self.tags: dict[str, str] = {}

    def at(self, revision: str) -> _Repo | None:
        """Return the files at a branch, a tag or a commit."""
        return self.commits.get(self.branches.get(revision) or self.tags.get(revision) or revision)

    def refs(self) -> dict[str, Any]:
        """Return the API's answer about branches and tags."""
        answer: dict[str, Any] = {"converts": []}
        for kind, found in (("branches", self.branches), ("tags", self.tags)):
            answer[kind] = [
                {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": commit} for name, commit in found.items()
            ]
        return answer


class _Server(ThreadingHTTPServer):
    def __init__(self, repos: dict[tuple[str, str], _Versions]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos = repos
        self.objects = Objects()
        self.requests: list[str] = []
        self.broken: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"  # the client keeps connections alive
    disable_nagle_algorithm = True  # otherwise each body waits 40 ms for the acknowledgement of the headers

    def handle(self) -> None:
        with suppress(ConnectionError):  # a streaming client may disconnect before the end of a file
            super().handle()

    def do_GET(self) -> None:
        request = f"{self.command} {self.path}"
        self.server.requests.append(request)
        for word in [word for word in self.server.broken if word in request]:
            self.server.broken.remove(word)
            self.close_connection = True
            return
        # Always read the body, because the next request follows it on the connection.
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urlsplit(self.path)
        try:
            if self.command in ("PUT", "POST") and self._upload(url.path, body):
                return
            if match := _API.fullmatch(url.path):
                kind, repo_id, action, revision, path = match.groups()
                if repo := self._find(kind, repo_id, revision or "main"):
                    self._api(repo, action, unquote(path or ""), parse_qs(f"{url.query}&{body.decode()}"))
            elif match := _RESOLVE.fullmatch(url.path):
                dataset, repo_id, revision, path = match.groups()
                if repo := self._find("datasets" if dataset else "models", repo_id, revision):
                    self._resolve(repo, unquote(path))
            else:
                self._error(HTTPStatus.NOT_FOUND, "", "Not supported by this server")
        except Refused as answer:
            headers = {"X-Error-Code": answer.code, "X-Error-Message": answer.message}
            self._send(answer.status, headers, json.dumps(answer.body).encode())

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815 - http.server requires these names

    def _find(self, kind: str, repo_id: str, revision: str) -> _Repo | None:
        """Return the repository if it has that revision; otherwise send an error and return None."""
        versions = self._visible(kind, repo_id)
        if (repo := versions.at(unquote(revision))) is None:
            self._error(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo

    def _visible(self, kind: str, repo_id: str) -> _Versions:
        """Return a repository that the client may read."""
        mine = hub_uploads.owners(self.headers.get("Authorization"))
        versions = self.server.repos.get((kind, repo_id))
        if versions is None or (versions.at("main").private and repo_id.split("/")[0] not in mine):
            # 401, not 404, is the Hub's answer to a client that is not logged in.
            status = HTTPStatus.NOT_FOUND if mine else HTTPStatus.UNAUTHORIZED
            raise Refused(status, "Repository not found", "RepoNotFound")
        return versions

    def _upload(self, path: str, body: bytes) -> bool:
        """Answer a request of an upload; return False if it is none."""
        if match := _OBJECT.fullmatch(path):
            if not match[2]:
                hub_uploads.store(match[1], body, self.server.objects)
            answer: dict[str, Any] = {}
        elif path == "/api/validate-yaml":
            answer = hub_uploads.validate_yaml(body)
        elif path == "/api/repos/create":
            answer = self._create(json.loads(body))
        elif match := _BATCH.fullmatch(path):
            self._check_writer(match[1])
            answer = hub_uploads.lfs_batch(body, f"http://{self.headers['Host']}", self.server.objects)
        elif (match := _API.fullmatch(path)) and match[3] in ("preupload", "branch", "commit"):
            kind, repo_id, action, branch, _ = match.groups()
            versions = self._visible(kind, repo_id)
            self._check_writer(repo_id)
            answer = self._write(versions, action, unquote(branch), body)
        else:
            return False
        self._send(HTTPStatus.OK, {"Content-Type": "application/json"}, json.dumps(answer).encode())
        return True

    def _check_writer(self, repo_id: str) -> None:
        if repo_id.split("/")[0] not in hub_uploads.owners(self.headers.get("Authorization")):
            raise Refused(HTTPStatus.FORBIDDEN, "You don't have the rights to write to this repository")

    def _create(self, wanted: dict[str, Any]) -> dict[str, Any]:
        repo_id = f"{wanted['organization']}/{wanted['name']}"
        self._check_writer(repo_id)
        url = f"http://{self.headers['Host']}/{repo_id}"
        if ("models", repo_id) in self.server.repos:
            raise Refused(HTTPStatus.CONFLICT, "You already created this model repo", url=url)
        private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        self.server.repos["models", repo_id] = _Versions(_Repo(repo_id, {".gitattributes": b"lfs"}, private=private))
        return {"url": url}

    def _write(self, versions: _Versions, action: str, branch: str, body: bytes) -> dict[str, Any]:
        """Make a branch, or answer about or commit files on one."""
        if action == "branch":
            if branch in versions.branches:
                raise Refused(HTTPStatus.CONFLICT, "Reference already exists")
            start = versions.at(json.loads(body).get("startingPoint", "main"))
            if start is None:
                raise Refused(HTTPStatus.NOT_FOUND, "Invalid rev id", "RevisionNotFound")
            versions.branches[branch] = start.commit
            return {}
        if branch not in versions.branches:
            raise Refused(HTTPStatus.NOT_FOUND, f"Invalid rev id: {branch}", "RevisionNotFound")
        before = versions.commits[versions.branches[branch]]
        if action == "preupload":
            return hub_uploads.upload_modes(body, before.oids)
        files = hub_uploads.committed(body, before.files, before.commit, self.server.objects)
        after = _Repo(before.id, files, private=before.private)
        versions.commits[after.commit] = after
        versions.branches[branch] = after.commit
        url = f"http://{self.headers['Host']}/{before.id}/commit/{after.commit}"
        return {"success": True, "commitUrl": url, "commitOid": after.commit}

    def _api(self, repo: _Repo, action: str | None, path: str, args: dict[str, list[str]]) -> None:
        """Answer /api/{models,datasets}/{repo}[/{action}/{revision}[/{path}]]."""
        answer: object
        if action == "tree":
            if path and path not in repo.paths:
                self._error(HTTPStatus.NOT_FOUND, "EntryNotFound", "Entry not found", repo.commit)
                return
            answer = [repo.entry(p) for p in repo.tree(path, args.get("recursive") == ["true"])]
        elif action == "refs":
            answer = self._visible("models", repo.id).refs()
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
        (kind, repo_id): _Versions(_Repo(repo_id, _read(folder), commits.get(repo_id)))
        for kind, folders in (("models", models), ("datasets", datasets))
        for repo_id, folder in folders.items()
    }
    with _Server(repos) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield Served(f"http://127.0.0.1:{server.server_port}", server.requests, server.broken, server.repos)
        finally:
            server.shutdown()
