"""The few answers of the Hugging Face Hub that pushing and pulling a model need, from memory."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub(ThreadingHTTPServer):
    """Repositories by name: a list of commits, each its id and all files."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.repositories: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.address = f"http://127.0.0.1:{self.server_port}"

    def commit(self, name: str, changed: dict[str, bytes]) -> str:
        commits = self.repositories[name]
        content = {**commits[-1][1], **changed}
        code = hashlib.sha1(f"{len(commits)} {sorted(content)}".encode()).hexdigest()
        commits.append((code, content))
        return code

    def find(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commits = self.repositories.get(name, [])
        known = {code: (code, content) for code, content in commits}
        return commits[-1] if revision == "main" and commits else known.get(revision)


class Answers(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        name = self.model_name()
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            self.server.repositories.setdefault(name, [("0" * 40, {})])
            self.answer({"url": f"{self.server.address}/{name}", "id": name, "name": name})
        elif "/preupload/" in self.path:
            paths = [each["path"] for each in json.loads(body)["files"]]
            plain = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            self.answer({"files": [{"path": path, **plain} for path in paths]})
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            parts = [line["value"] for line in lines if line["key"] == "file"]
            code = self.server.commit(
                name, {part["path"]: base64.b64decode(part["content"]) for part in parts}
            )
            link = f"{self.server.address}/{name}/commit/{code}"
            self.answer({"success": True, "commitUrl": link, "commitOid": code})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        else:
            self.answer({"error": "not known"}, 404)

    def do_GET(self) -> None:
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path):
            name, revision, file = match.groups()
            stored = self.server.find(name, revision)
            if stored is None or file not in stored[1]:
                code = "RepoNotFound" if stored is None else "EntryNotFound"
                self.answer({"error": code}, 404, {"X-Error-Code": code})
                return
            data = stored[1][file]
            etag = f'"{hashlib.sha1(data).hexdigest()}"'
            self.answer(data, 200, {"X-Repo-Commit": stored[0], "ETag": etag})
            return
        revision = self.path.partition("/revision/")[2].partition("?")[0] or "main"
        stored = self.server.find(self.model_name(), revision)
        if stored is None:
            self.answer({"error": "no"}, 404, {"X-Error-Code": "RepoNotFound"})
            return
        siblings = [{"rfilename": name} for name in stored[1]]
        self.answer({"id": self.model_name(), "sha": stored[0], "siblings": siblings})

    do_HEAD = do_GET  # noqa: N815

    def model_name(self) -> str:
        match = re.match(r"/api/models/([^/?]+/[^/?]+)", self.path)
        return match[1] if match else ""

    def answer(self, content: object, code: int = 200, headers: dict[str, str] | None = None):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        for key, value in {"Content-Type": kind, **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serve_hub() -> Iterator[Hub]:
    with Hub() as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            hub.shutdown()
