"""A registry that does what it is told to, good or bad: answers by path, what was asked is written down."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.oci.make import MANIFEST, sha

Headers = dict[str, str]
Answer = tuple[int, Headers, bytes]


class Fake:
    """Serves `blobs` by digest and `tags` by name, unless `before` has another answer for a request.

    `before(path, headers)`: an answer, or None. A length in the headers may be a lie: the connection then ends early.
    """

    def __init__(self, *, tls: ssl.SSLContext | None = None) -> None:
        self.asked: list[tuple[str, Headers]] = []
        self.blobs: dict[str, bytes] = {}
        self.tags: dict[str, tuple[str, bytes]] = {}
        self.before: Callable[[str, Headers], Answer | None] = lambda path, headers: None
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                fake.asked.append((self.path, headers))
                status, more, body = fake.before(self.path, headers) or fake._answer(self.path, headers)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **more}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)
                if int(more.get("Content-Length", len(body))) != len(body):
                    self.close_connection = True

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def _answer(self, path: str, headers: Headers) -> Answer:
        kind, _, what = path.partition("?")[0].removeprefix("/v2/a/").partition("/")
        if kind == "manifests" and what in self.tags:
            media, body = self.tags[what]
            return 200, {"Content-Type": media}, body
        if kind == "blobs" and what in self.blobs:
            body = self.blobs[what]
            if "range" in headers:
                begin = int(headers["range"].removeprefix("bytes=").partition("-")[0])
                return 206, {"Content-Range": f"bytes {begin}-{len(body) - 1}/{len(body)}"}, body[begin:]
            return 200, {}, body
        return 404, {}, json.dumps({"errors": [{"code": "UNKNOWN", "message": "not here"}]}).encode()

    def image(self, tar: bytes) -> str:
        """Have an image of one layer under the tag `t`; the layer's digest."""
        config = json.dumps(
            {"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": [sha(tar)]}, "config": {}}
        ).encode()
        self.blobs.update({sha(tar): tar, sha(config): config})
        layers = [
            {"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": sha(tar), "size": len(tar)}
        ]
        body = {"schemaVersion": 2, "config": {"digest": sha(config), "size": len(config)}, "layers": layers}
        self.tags["t"] = (MANIFEST, json.dumps(body).encode())
        return sha(tar)

    def to(self, path: str) -> list[Headers]:
        """The headers of what was asked of that path."""
        return [headers for asked, headers in self.asked if path in asked]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
