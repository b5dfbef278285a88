"""Services of the lab's world that check who asks: git over HTTPS with a password, AWS that verifies signatures.

They are written from the protocols' own descriptions and know nothing of how the interceptor signs or injects. Not for
what merely records (`origins`).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import http.server
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from llm4agents import config
from llm4agents.barrier.intercept import environment
from tests.barrier.lab import Lab, within
from tests.conftest import _nodes

GIT, GIT_PORT = "git.example.com", 7_443
AWS, AWS_PORT = "s3.example.com", 7_444
ADDRESSES = {GIT: "93.184.216.70", AWS: "93.184.216.71"}


@dataclass(slots=True)
class Seen:
    """A request as it arrived, and what was thought of it."""

    method: str
    target: str
    authorization: str | None
    accepted: bool
    why: str = ""


@dataclass(slots=True)
class Services:
    """Entered, both listen in the lab's world; left, they don't."""

    lab: Lab
    users: dict[str, str]
    """Of git: name → password."""
    keys: dict[str, tuple[str, str | None]]
    """Of AWS: access key id → (secret access key, session token it must come with)."""
    seen: list[Seen] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    _servers: list[http.server.ThreadingHTTPServer] = field(default_factory=list)

    def __enter__(self) -> Services:
        for name, address in ADDRESSES.items():
            self.lab.names[name] = [address]
        git = ["git", "-c", "init.defaultBranch=main"]
        repository = self.lab.home / "git" / "repo.git"
        subprocess.run([*git, "init", "-q", "--bare", repository], check=True)
        subprocess.run(["git", "-C", repository, "config", "http.receivepack", "true"], check=True)
        work = self.lab.home / "work"
        subprocess.run([*git, "init", "-q", work], check=True)
        author = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
        (work / "README").write_text("first\n")
        subprocess.run(["git", "-C", work, "add", "."], check=True)
        subprocess.run(["git", *author, "-C", work, "commit", "-q", "-m", "first"], check=True)
        subprocess.run(["git", "-C", work, "push", "-q", repository, "HEAD:main"], check=True)
        for name, port, handler in ((GIT, GIT_PORT, _Git), (AWS, AWS_PORT, _Aws)):
            context = self.lab.authority.context(self.lab.home, [name])

            def make(port: int = port, handler: Any = handler) -> http.server.ThreadingHTTPServer:
                made = _Server(("0.0.0.0", port), handler)
                made.services = self
                return made

            server = within(self.lab.world, make)
            server.socket = context.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
            self._servers.append(server)
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    @property
    def log(self) -> list[str]:
        """Subjects of the commits that the repository has, newest first."""
        command = ["git", "-C", self.lab.home / "git" / "repo.git", "log", "--format=%s", "main"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")[:-1]


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    services: Services

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that breaks off is no news."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: `Services.seen` has it."""

    def setup(self) -> None:
        self.request: socket.socket
        self.request.do_handshake()  # type: ignore[attr-defined]
        super().setup()

    def body(self) -> bytes:
        if "chunked" in (self.headers.get("transfer-encoding") or "").lower():
            found = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return found
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def note(self, accepted: bool, why: str = "") -> bool:
        self.server.services.seen.append(
            Seen(self.command, self.path, self.headers.get("authorization"), accepted, why)
        )
        return accepted

    def say(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def everything(self) -> None:
        raise NotImplementedError

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = lambda self: self.everything()


class _Git(_Handler):
    """`git http-backend` behind basic authentication."""

    def everything(self) -> None:
        body = self.body()
        given = (self.headers.get("authorization") or "").removeprefix("Basic ")
        user, _, password = base64.b64decode(given or b"").decode("utf-8", "replace").partition(":")
        if not self.note(bool(password) and self.server.services.users.get(user) == password):
            self.say(401, b"who are you?\n", WWW_Authenticate='Basic realm="git"')
            return
        path, _, query = self.path.partition("?")
        done = subprocess.run(
            ["git", "http-backend"],
            input=body,
            capture_output=True,
            check=False,
            env={
                "PATH": os.environ["PATH"],
                "GIT_PROJECT_ROOT": str(self.server.services.lab.home / "git"),
                "GIT_HTTP_EXPORT_ALL": "1",
                "GIT_CONFIG_COUNT": "1",
                "GIT_CONFIG_KEY_0": "safe.directory",
                "GIT_CONFIG_VALUE_0": "*",
                "PATH_INFO": unquote(path),
                "QUERY_STRING": query,
                "REQUEST_METHOD": self.command,
                "CONTENT_TYPE": self.headers.get("content-type") or "",
                "CONTENT_LENGTH": str(len(body)),
                "HTTP_CONTENT_ENCODING": self.headers.get("content-encoding") or "",
                "HTTP_GIT_PROTOCOL": self.headers.get("git-protocol") or "",
                "REMOTE_USER": user,
                "REMOTE_ADDR": "192.0.2.1",
            },
        )
        head, _, answer = done.stdout.partition(b"\r\n\r\n")
        fields = [line.decode().partition(": ") for line in head.split(b"\r\n") if line]
        status = next((int(value.split()[0]) for name, _, value in fields if name == "Status"), 200)
        self.say(
            status,
            answer,
            **{name.replace("-", "_"): value for name, _, value in fields if name.lower() == "content-type"},
        )


class _Aws(_Handler):
    """As much of S3 and STS as shows that a request was signed: everything else is refused, with the reason."""

    def everything(self) -> None:
        body = self.body()
        why = verify(
            self.command,
            self.path,
            [(name.lower(), value) for name, value in self.headers.items()],
            body,
            lambda ident: self.server.services.keys.get(ident),
        )
        if not self.note(not why, why):
            self.say(
                403, f"<Error><Code>SignatureDoesNotMatch</Code><Message>{why}</Message></Error>".encode()
            )
            return
        objects = self.server.services.objects
        path = unquote(urlsplit(self.path).path)
        if self.command == "PUT":
            if "aws-chunked" in (self.headers.get("content-encoding") or ""):
                body = _unchunked(body)
            objects[path] = body
            self.say(200, ETag=f'"{hashlib.md5(body).hexdigest()}"')
        elif b"Action=GetCallerIdentity" in body:
            result = "<Arn>arn:aws:iam::1:user/agent</Arn><UserId>U</UserId><Account>1</Account>"
            xml = (
                "<GetCallerIdentityResponse>"
                f"<GetCallerIdentityResult>{result}</GetCallerIdentityResult></GetCallerIdentityResponse>"
            )
            self.say(200, xml.encode(), Content_Type="text/xml")
        elif path in objects:
            self.say(200, objects[path], Content_Type="application/octet-stream")
        elif "list-type" in self.path:
            keys = "".join(
                f"<Contents><Key>{key.split('/', 2)[2]}</Key></Contents>" for key in sorted(objects)
            )
            self.say(200, f"<ListBucketResult>{keys}</ListBucketResult>".encode(), Content_Type="text/xml")
        else:
            self.say(404, b"<Error><Code>NoSuchKey</Code></Error>")


def _unchunked(body: bytes) -> bytes:
    found, rest = b"", body
    while rest:
        head, _, rest = rest.partition(b"\r\n")
        size = int(head.split(b";")[0], 16)
        if not size:
            break
        found, rest = found + rest[:size], rest[size + 2 :]
    return found


_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/([^/]+)/aws4_request, ?"
    r"SignedHeaders=([^,]+), ?Signature=([0-9a-f]{64})"
)


def verify(
    method: str,
    target: str,
    headers: list[tuple[str, str]],
    body: bytes,
    key_of: Callable[[str], tuple[str, str | None] | None],
) -> str:
    """Why a request is not signed as AWS's "Signature Version 4 signing process" has it; "" when it is."""
    fields: dict[str, list[str]] = {}
    for name, value in headers:
        fields.setdefault(name, []).append(" ".join(value.split()))
    match = _AUTHORIZATION.fullmatch((fields.get("authorization") or [""])[0])
    if match is None or len(fields.get("authorization", ())) != 1:
        return "no authorization of that kind"
    ident, date, region, service, names, signature = match.groups()
    found = key_of(ident)
    if found is None:
        return f"no such key {ident}"
    secret, token = found
    signed = names.split(";")
    stamp = (fields.get("x-amz-date") or [""])[0]
    if signed != sorted(signed) or not {"host", "x-amz-date"} <= set(signed) or stamp[:8] != date:
        return "host and x-amz-date are signed, names are sorted"
    # What AWS asks to be signed: every x-amz header that is sent, and the content type if there is one.
    unsigned = {name for name in fields if name.startswith("x-amz-")} - set(signed)
    if unsigned:
        return f"not signed: {', '.join(sorted(unsigned))}"
    if token is not None and fields.get("x-amz-security-token") != [token]:
        return "another session token"
    if token is None and "x-amz-security-token" in fields:
        return "a session token with a key that has none"
    claimed = (fields.get("x-amz-content-sha256") or [None])[0]
    actual = hashlib.sha256(body).hexdigest()
    if service == "s3" and claimed is None:
        return "S3 wants x-amz-content-sha256"
    if claimed is None:
        claimed = actual
    elif not claimed.startswith(("UNSIGNED-PAYLOAD", "STREAMING-UNSIGNED-PAYLOAD")) and claimed != actual:
        return "x-amz-content-sha256 is not that of the body"
    path, _, query = target.partition("?")
    # S3 signs the path as it is sent, the others one with each segment encoded once more.
    canonical_path = path if service == "s3" else quote(path, safe="/-_.~")
    pairs = sorted(
        (quote(name, safe="-_.~"), quote(value, safe="-_.~"))
        for name, value in parse_qsl(query, keep_blank_values=True)
    )
    canonical = "\n".join(
        [
            method,
            canonical_path,
            "&".join(f"{name}={value}" for name, value in pairs),
            *(f"{name}:{','.join(fields.get(name, ['']))}" for name in signed),
            "",
            names,
            claimed,
        ]
    )
    scope = f"{date}/{region}/{service}/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{secret}".encode()
    for part in (date, region, service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    if not hmac.compare_digest(hmac.digest(key, text.encode(), "sha256").hex(), signature):
        return f"the signature is another\n{canonical}"
    return ""


def prepare(*templates: tuple[str, int]) -> None:
    """What a server in the lab, which has no package registries, must find in the cache: templates (of so many MiB) and
    the interceptor's environment."""
    asyncio.run(environment.ensure(config.settings().cache))
    for make in _nodes():
        node = make().start()
        for template, memory_mib in templates:
            node.call("DELETE", f"/v1/sandboxes/{node.create(template, memory_mib=memory_mib)}")
        node.stop()


def wheels(cache: Path, *names: str) -> Path:
    """A directory of wheels for the guest, downloaded once by this host's own pip, from wherever it is told to."""
    key = hashlib.sha256(" ".join([*names, sys.version]).encode()).hexdigest()[:16]
    found = cache / "build" / f"test-wheels-{key}"
    if not (found / ".whole").exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--only-binary",
            ":all:",
            "-d",
            found,
            *names,
        ]
        subprocess.run(command, check=True)
        (found / ".whole").touch()
    return found
