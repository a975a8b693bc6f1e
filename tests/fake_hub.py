"""A Hub on this machine that huggingface_hub downloads from as from the real one.

    hub = FakeHub()
    commit = hub.add("someone/drafter", folder, refs=("main", "v1"))
    hub.add("datasets/someone/chats", folder, licence="mit")
    hub.environment(cache)          # variables for a subprocess
    hub.used_by(monkeypatch, cache) # or this process

huggingface_hub reads HF_ENDPOINT, HF_HUB_CACHE and HF_HUB_OFFLINE once, when it is
imported. A subprocess gets them as variables; in the process that runs the tests
`used_by` sets the constants they became and closes the shared connection pool.

Served are the routes of `snapshot_download` and `HfFileSystem`: a revision's commit, a
commit's tree whole or by folder, HEAD and GET of files, whole or in ranges. Names that
are not there answer 404 with the Hub's codes, a gated repository 403 with `GatedRepo`.
"""

import hashlib
import json
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """Folders by commit, commits by branch or tag."""

    commits: dict[str, Path] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    licence: str | None = None

    def commit(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)


class FakeHub:
    """Serves folders as repositories until `close`.

    Attributes:
        requests: Every request as (method, path), in order.
        cut_off: A file of this name is answered with half of its bytes.
        absent: A file of this name is answered 404, though the tree lists it.
        broken: Every request is answered 503 while set.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str]] = []
        self.cut_off: str | None = None
        self.absent: str | None = None
        self.broken = False
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        ).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(
        self,
        name: str,
        folder: Path,
        *,
        refs: tuple[str, ...] = ("main",),
        gated: bool = False,
        licence: str | None = None,
    ) -> str:
        """Serve `folder` under a new commit of `name` that `refs` point to.

        Args:
            name: A model's; a data set's begins with `datasets/`.
            licence: As the header of the card states it.
        """
        repository = self.repositories.setdefault(name, Repository())
        label = f"{name} {len(repository.commits)}"
        commit = hashlib.sha1(label.encode()).hexdigest()
        repository.commits[commit] = folder
        repository.refs |= dict.fromkeys(refs, commit)
        repository.gated, repository.licence = gated, licence
        return commit

    def downloads(self) -> Counter[str]:
        """How often each file's content was sent, by path inside its repository."""
        return Counter(
            path.split("/resolve/")[1].split("/", 1)[1]
            for method, path in self.requests
            if method == "GET" and "/resolve/" in path
        )

    def environment(self, cache: Path, *, offline: bool = False) -> dict[str, str]:
        """Variables that make another process use this Hub with the folder `cache`."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(cache),
            "HF_HUB_CACHE": str(cache / "hub"),
            "HF_HUB_OFFLINE": "1" if offline else "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def used_by(self, monkeypatch, cache: Path, *, offline: bool = False) -> None:
        """Make this process use this Hub with the folder `cache`."""
        from huggingface_hub import close_session, constants

        for name, value in self.environment(cache, offline=offline).items():
            monkeypatch.setenv(name, value)
        template = self.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", self.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        close_session()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing goes to stderr."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        split = urlsplit(self.path)
        path = unquote(split.path)
        self.hub.requests.append((self.command, path))
        if self.hub.broken:
            return self._send(503, b"", {})
        if path.startswith("/api/"):
            called = path.removeprefix("/api/").removeprefix("models/")
            name, _, rest = called.partition("/revision/")
            if rest:
                return self._describe(name, rest)
            name, _, rest = called.partition("/tree/")
            if rest:
                revision, _, folder = rest.partition("/")
                whole = "recursive=true" in split.query.lower()
                return self._tree(name, revision, folder, whole)
            return self._describe(name, "main")
        name, _, rest = path.lstrip("/").partition("/resolve/")
        revision, _, file = rest.partition("/")
        return self._file(name, revision, file, with_body)

    def _find(self, name: str, revision: str) -> tuple[Repository, str] | None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            return None
        commit = repository.commit(revision)
        if commit is None:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return None
        return repository, commit

    def _describe(self, name: str, revision: str) -> None:
        found = self._find(name, revision)
        if found:
            content = {"id": name, "sha": found[1], "private": False}
            if found[0].licence is not None:
                content["cardData"] = {"license": found[0].licence}
            self._send_json(content)

    def _tree(self, name: str, revision: str, inside: str, whole: bool) -> None:
        found = self._find(name, revision)
        if not found:
            return
        repository, commit = found
        folder = repository.commits[commit]
        top = folder / inside
        paths = top.rglob("*") if whole else top.glob("*")
        self._send_json(
            [
                {
                    "type": "file" if path.is_file() else "directory",
                    "path": path.relative_to(folder).as_posix(),
                    "size": path.stat().st_size if path.is_file() else 0,
                    "oid": hashlib.sha1(path.name.encode()).hexdigest(),
                }
                for path in sorted(paths)
                if path.is_file() or not whole
            ]
        )

    def _file(self, name: str, revision: str, file: str, with_body: bool) -> None:
        found = self._find(name, revision)
        if not found:
            return
        repository, commit = found
        if repository.gated:
            return self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        path = repository.commits[commit] / file
        if not path.is_file() or path.name == self.hub.absent:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        content = path.read_bytes()
        headers = {
            "X-Repo-Commit": commit,
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "Content-Length": str(len(content)),
        }
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if with_body and asked:
            content = content[int(asked[1]) : int(asked[2]) + 1]
            headers["Content-Length"] = str(len(content))
            return self._send(206, content, headers)
        if with_body and Path(file).name == self.hub.cut_off:
            content = content[: len(content) // 2]
            self.close_connection = True
        return self._send(200, content if with_body else b"", headers)

    def _send_json(self, content: object) -> None:
        body = json.dumps(content).encode()
        self._send(200, body, {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
