"""A stand-in for the Hugging Face Hub: what it answers follows from the name of the repository.

It speaks the little that `huggingface_hub` needs: HEAD and GET of `/<id>/resolve/main/config.json` with the Hub's
headers, and `/api/models/<id>`. Every request is written down.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
VALID_TOKEN = "hf_valid"


class Hub:
    """A running stand-in: its address and the requests it has seen, as (method, path, authorization)."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        self.requests: list[tuple[str, str, str | None]] = []


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Stay quiet."""

    def _answer(self, *, body: bool) -> None:
        self.hub.requests.append((self.command, self.path, self.headers.get("Authorization")))
        if self.path.startswith("/api/models/"):
            return self._api(self.path.removeprefix("/api/models/").partition("?")[0])
        name = self.path.split("/")[2] if self.path.count("/") >= 2 else ""
        behave = getattr(self, "_" + name.replace("-", "_"), self._missing)
        behave(body)
        return None

    def _api(self, model_id: str) -> None:
        weights = {"parameters": {"BF16": 12345}, "total": 12345}
        info: dict[str, Any] = {"id": model_id, "tags": [], "siblings": [], "downloads": 0}
        if model_id == "org/good":
            info["safetensors"] = weights
        self._send(200, json.dumps(info).encode(), body=True)

    def _send(
        self, status: int, data: bytes = b"", *, body: bool, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        all_headers = {"Content-Length": str(len(data)), "X-Repo-Commit": COMMIT}
        for key, value in (all_headers | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _file(self, data: bytes, body: bool) -> None:
        self._send(200, data, body=body, headers={"ETag": f'"{len(data):040d}"'})

    def _refuse(self, status: int, code: str, body: bool, message: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self._send(status, b"", body=body, headers=headers)

    # one method for each repository name

    def _good(self, body: bool) -> None:
        self._file(json.dumps(CONFIG).encode(), body)

    def _with_code(self, body: bool) -> None:
        auto_map = {"AutoModelForCausalLM": "modeling_evil.EvilForCausalLM"}
        self._file(json.dumps(CONFIG | {"auto_map": auto_map}).encode(), body)

    def _private(self, body: bool) -> None:
        token = self.headers.get("Authorization")
        if token == f"Bearer {VALID_TOKEN}":
            self._file(json.dumps(CONFIG).encode(), body)
        elif token is None:
            self._refuse(401, "RepoNotFound", body)
        else:
            message = "Invalid credentials in Authorization header"
            self._refuse(401, "", body, message)

    def _gated(self, body: bool) -> None:
        self._refuse(401, "GatedRepo", body)

    def _gated_403(self, body: bool) -> None:
        self._refuse(403, "GatedRepo", body)

    def _missing(self, body: bool) -> None:
        self._refuse(401, "RepoNotFound", body)

    def _weights_only(self, body: bool) -> None:
        self._refuse(404, "EntryNotFound", body)

    def _broken(self, body: bool) -> None:
        self._file(b'{"model_type": "llama", ', body)

    def _huge(self, body: bool) -> None:
        """Announce 50 MB; nobody should ask for them."""
        self._send(200, b"", body=False, headers={"Content-Length": "50000000", "ETag": '"huge"'})

    def _liar(self, body: bool) -> None:
        """Announce no size, then send without end."""
        self.send_response(200)
        for key, value in (("X-Repo-Commit", COMMIT), ("ETag", '"liar"')):
            self.send_header(key, value)
        self.end_headers()
        try:
            for _ in range(400 if body else 0):
                self.wfile.write(b" " * 2**20)
        except OSError:
            return

    def _circle(self, body: bool) -> None:
        self._send(302, b"", body=body, headers={"Location": self.path})

    def _slow(self, body: bool) -> None:
        time.sleep(4)
        self._good(body)

    def _down(self, body: bool) -> None:
        self._send(500, b"", body=body)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Serve on a free port of this machine."""
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub = Hub(server)
    handler.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
