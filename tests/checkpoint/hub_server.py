"""A Hugging Face hub on 127.0.0.1 with just enough of its HTTP API to list and download models.

It logs what it is asked for, so that tests can state which files were and were not downloaded.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Refusal(NamedTuple):
    """An error answer: HTTP status and the X-Error-Code header that huggingface_hub reads."""

    status: int
    code: str = ""


@dataclass
class Repo:
    """branches: {name: {path: content}}. refuse: an answer for "info", "tree", "file" or a path."""

    branches: dict[str, dict[str, bytes]]
    refuse: dict[str, Refusal] = field(default_factory=dict)

    def find(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """(commit, files) of a branch or of a commit, which is 40 hexadecimal digits."""
        for branch, files in self.branches.items():
            commit = hashlib.sha1(branch.encode() + repr(files).encode()).hexdigest()
            if revision in (branch, commit):
                return commit, files
        return None


class Request(NamedTuple):
    """A request that was answered with content. sent: bytes of the body."""

    kind: str  # "info", "tree", "file" or "head"
    path: str
    sent: int


class HubServer:
    """repos: {"org/name": Repo}, may be added to while the server runs."""

    def __init__(self, http: ThreadingHTTPServer) -> None:
        self.url = f"http://127.0.0.1:{http.server_address[1]}"
        self.repos: dict[str, Repo] = {}
        self._log: list[Request] = []

    def take_log(self) -> list[Request]:
        """The requests since the last call."""
        log, self._log = self._log, []
        return log

    def record(self, request: Request) -> None:
        self._log.append(request)


@contextmanager
def serve() -> Iterator[HubServer]:
    """A hub in a thread of this process."""

    class Handler(_Handler):
        hub: HubServer

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        Handler.hub = HubServer(http)
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield Handler.hub
        finally:
            http.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer

    def log_message(self, *_: object) -> None:
        """Keep stderr clean."""

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def _route(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := _API.fullmatch(path):
            name, kind, revision = match[1], "tree" if match[2] == "tree" else "info", match[3]
        elif match := _FILE.fullmatch(path):
            name, kind, revision = match[1], "file", match[2]
        else:
            return self._refuse(Refusal(404))
        repo = self.hub.repos.get(name)
        if repo is None:
            return self._refuse(Refusal(404, "RepoNotFound"))
        if kind in repo.refuse:
            return self._refuse(repo.refuse[kind])
        if kind == "file" and match[3] in repo.refuse:
            return self._refuse(repo.refuse[match[3]])
        found = repo.find(revision or "main")
        if found is None:
            return self._refuse(Refusal(404, "RevisionNotFound"))
        commit, files = found
        if kind == "file":
            return self._file(match[3], commit, files)
        listing = [_entry(path, content) for path, content in files.items()]
        answer = listing if kind == "tree" else {"id": name, "sha": commit, "siblings": listing}
        return self._answer(kind, 200, {}, json.dumps(answer).encode())

    def _file(self, path: str, commit: str, files: dict[str, bytes]) -> None:
        if path not in files:
            return self._refuse(Refusal(404, "EntryNotFound"))
        body, status = files[path], 200
        headers = {"ETag": f'"{_digest(body)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), min(int(wanted[2] or len(body)), len(body) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
            body, status = body[first : last + 1], 206
        return self._answer("file", status, headers, body, path)

    def _answer(
        self, kind: str, status: int, headers: dict[str, str], body: bytes, path: str = ""
    ) -> None:
        head = self.command == "HEAD"
        self.hub.record(Request("head" if head else kind, path, 0 if head else len(body)))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if not head:
            self.wfile.write(body)

    def _refuse(self, refusal: Refusal) -> None:
        self.send_response(refusal.status)
        if refusal.code:
            self.send_header("X-Error-Code", refusal.code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, object]:
    """One file as both the model info (rfilename, blobId) and the tree (path, oid) describe it."""
    digest, size = _digest(content), len(content)
    return {
        **{"rfilename": path, "blobId": digest},
        **{"type": "file", "path": path, "oid": digest, "size": size},
    }
