"""A Hub on 127.0.0.1: the smallest server that the real huggingface_hub client downloads from and uploads to.

It speaks the endpoints that `snapshot_download`, `hf_hub_download`, `create_repo`, `create_branch` and `create_commit`
call, with the error codes that the client tells apart. Files live in memory and are all "regular": no LFS, no Xet.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest

Files = dict[str, bytes]
TOKEN = "hf_loopback"


@dataclass
class Repo:
    """A repo's branches and commits; who may see it."""

    private: bool = False
    gated: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Files] = field(default_factory=dict)

    def commit(self, files: Files, branch: str = "main") -> str:
        content = json.dumps({path: hashlib.sha1(data).hexdigest() for path, data in sorted(files.items())})
        sha = hashlib.sha1(f"{len(self.commits)}{branch}{content}".encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.branches[branch] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        return revision if revision in self.commits else (self.branches | self.tags).get(revision)

    def files(self, revision: str = "main") -> Files:
        return self.commits[self.branches[revision]]


class LoopbackHub:
    """The server; use `with`, then point the client at `endpoint`.

    Attributes:
        repos: by id.
        requests: "METHOD path" of every request so far.
        cut_short: paths of files of which only the first half is sent.
        altered: paths of files of which a byte is changed on the way.
        hang_up_at: parts of paths at which the connection is closed without an answer; each once.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []
        self.cut_short: set[str] = set()
        self.altered: set[str] = set()
        self.hang_up_at: list[str] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> LoopbackHub:
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def add(self, repo_id: str, folder: Path, branch: str = "main", **settings: Any) -> str:
        """Publishes a folder as one commit, not counted as a request; returns the commit."""
        repo = self.repos.setdefault(repo_id, Repo(**settings))
        files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
        return repo.commit({name: file.read_bytes() for name, file in files.items()}, branch)

    def downloaded(self) -> set[str]:
        """Names of the files whose content was asked for."""
        return {path.split("/")[-1] for path in self.requests if path.startswith("GET") and "/resolve/" in path}

    def point_client_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Switches the client of this process, which read its environment at import, to this server."""
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", self.endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", self.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


class _RefusedError(Exception):
    def __init__(self, status: int, code: str) -> None:
        self.status, self.code = status, code


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        for part in self.hub.hang_up_at:
            if part in path:
                self.hub.hang_up_at.remove(part)
                self.close_connection = True
                return self.connection.close()
        try:
            self._route(path, body)
        except _RefusedError as refused:
            self._send(refused.status, b"{}", {"X-Error-Code": refused.code})

    def _route(self, path: str, body: bytes) -> None:
        routes = {
            r"/api/repos/create": self._create,
            r"/api/validate-yaml": lambda body: self._send_json({"errors": [], "warnings": []}),
            r"/api/models/([^/]+/[^/]+)/branch/(.+)": self._branch,
            r"/api/models/([^/]+/[^/]+)/tag/(.+)": self._tag,
            r"/api/models/([^/]+/[^/]+)/preupload/(.+)": self._preupload,
            r"/api/models/([^/]+/[^/]+)/commit/(.+)": self._commit,
            r"/api/models/([^/]+/[^/]+)/revision/(.+)": self._info,
            r"/api/models/([^/]+/[^/]+)/tree/([^/]+)": self._tree,
            r"/api/models/([^/]+/[^/]+)": self._info,
            r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)": self._file,
        }
        for pattern, respond in routes.items():
            if match := re.fullmatch(pattern, path):
                return respond(*match.groups(), body=body)
        raise _RefusedError(404, "")

    def _repo(self, repo_id: str) -> Repo:
        repo = self.hub.repos.get(repo_id)
        if repo is None or (repo.private and not self._logged_in()):
            raise _RefusedError(404 if self._logged_in() else 401, "RepoNotFound")
        if repo.gated and not self._logged_in():
            raise _RefusedError(403, "GatedRepo")
        return repo

    def _commit_of(self, repo: Repo, revision: str) -> str:
        sha = repo.resolve(revision)
        if sha is None:
            raise _RefusedError(404, "RevisionNotFound")
        return sha

    def _logged_in(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _must_be_logged_in(self) -> None:
        if not self._logged_in():
            raise _RefusedError(401, "")

    def _info(self, repo_id: str, revision: str = "main", *, body: bytes) -> None:
        repo = self._repo(repo_id)
        sha = self._commit_of(repo, revision)
        siblings = [{"rfilename": path} for path in repo.commits[sha]]
        self._send_json({"id": repo_id, "sha": sha, "private": repo.private, "tags": [], "siblings": siblings})

    def _tree(self, repo_id: str, revision: str, *, body: bytes) -> None:
        repo = self._repo(repo_id)
        files = repo.commits[self._commit_of(repo, revision)]
        self._send_json(
            [{"type": "file", "path": path, "size": len(data), "oid": _blob(data)} for path, data in files.items()]
        )

    def _file(self, repo_id: str, revision: str, path: str, *, body: bytes) -> None:
        repo = self._repo(repo_id)
        sha = self._commit_of(repo, revision)
        headers = {"X-Repo-Commit": sha}
        if path not in repo.commits[sha]:
            return self._send(404, b"", headers | {"X-Error-Code": "EntryNotFound"})
        data = repo.commits[sha][path]
        headers["ETag"] = f'"{_blob(data)}"'
        if path in self.hub.cut_short and self.command == "GET":
            data = data[: len(data) // 2]
        if path in self.hub.altered and self.command == "GET":
            data = data[:-1] + bytes([data[-1] ^ 1])
        return self._send(200, data, headers)

    def _create(self, *, body: bytes) -> None:
        self._must_be_logged_in()
        asked = json.loads(body)
        repo_id = f"{asked.get('organization') or 'me'}/{asked['name']}"
        status = 409 if repo_id in self.hub.repos else 200
        private = asked.get("private") or asked.get("visibility") == "private"
        self.hub.repos.setdefault(repo_id, Repo(private=private, branches={}, commits={})).branches or self.hub.repos[
            repo_id
        ].commit({})
        self._send_json({"url": f"{self.hub.endpoint}/{repo_id}", "id": repo_id, "name": repo_id}, status)

    def _branch(self, repo_id: str, branch: str, *, body: bytes) -> None:
        self._must_be_logged_in()
        repo = self._repo(repo_id)
        if branch in repo.branches:
            raise _RefusedError(409, "")
        repo.branches[branch] = repo.branches["main"]
        self._send_json({})

    def _tag(self, repo_id: str, revision: str, *, body: bytes) -> None:
        self._must_be_logged_in()
        repo = self._repo(repo_id)
        tag = json.loads(body)["tag"]
        if tag in repo.tags:
            raise _RefusedError(409, "")
        repo.tags[tag] = self._commit_of(repo, revision)
        self._send_json({})

    def _preupload(self, repo_id: str, revision: str, *, body: bytes) -> None:
        self._must_be_logged_in()
        self._repo(repo_id)
        paths = [file["path"] for file in json.loads(body)["files"]]
        self._send_json({"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]})

    def _commit(self, repo_id: str, revision: str, *, body: bytes) -> None:
        self._must_be_logged_in()
        repo = self._repo(repo_id)
        files = dict(repo.commits[self._commit_of(repo, revision)])
        for line in body.decode().splitlines():
            operation = json.loads(line)
            if operation["key"] == "file":
                files[operation["value"]["path"]] = base64.b64decode(operation["value"]["content"])
            elif operation["key"] == "deletedFile":
                del files[operation["value"]["path"]]
        sha = repo.commit(files, revision)
        self._send_json({"commitUrl": f"{self.hub.endpoint}/{repo_id}/commit/{sha}", "commitOid": sha})

    def _send_json(self, content: Any, status: int = 200) -> None:
        self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _blob(data: bytes) -> str:
    """The id that git gives to a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
