"""A server on this machine with the files of repositories, as the Hugging Face Hub serves them."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

REVISION = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """`files`: id → name of a file → its contents. `downloads`: the names of the files that were downloaded."""

    def __init__(self, files: Mapping[str, Mapping[str, bytes]]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.downloads = files, []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._answer(has_body=True)

    def do_HEAD(self):
        self._answer(has_body=False)

    def _answer(self, has_body: bool) -> None:
        path = self.path.partition("?")[0]
        if match := re.fullmatch(r"/api/models/(.+?)(/revision/[^/]+|/tree/[^/]+)?", path):
            return self._answer_about(match[1], is_tree=(match[2] or "").startswith("/tree"))
        match = re.fullmatch(r"/(.+?)/resolve/[^/]+/(.+)", path)
        contents = self.server.files.get(match[1], {}).get(match[2]) if match else None
        if contents is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        if has_body:
            self.server.downloads.append(match[2])
        headers = {"ETag": f'"{hashlib.sha1(contents).hexdigest()}"', "X-Repo-Commit": REVISION}
        self._send(200, contents, headers, has_body)

    def _answer_about(self, model: str, is_tree: bool) -> None:
        files = self.server.files.get(model)
        if files is None:
            return self._send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
        tree = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in files.items()
        ]
        about = {"id": model, "sha": REVISION, "siblings": [{"rfilename": name} for name in files]}
        self._send(200, json.dumps(tree if is_tree else about).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str], has_body: bool = True) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def fake_hub(files: Mapping[str, Mapping[str, bytes]]) -> Iterator[FakeHub]:
    with FakeHub(files) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
