"""Profile `packages`: this host's real tools are asked, and a small index of the test's own with a password.

The tools run with a home of the test's own; what they say is what is looked at. Nothing here names a registry.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import stat
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest

from llm4agents import limits
from llm4agents.barrier.network import Network, Packages
from llm4agents.barrier.packages import Discovered, Discovery, assemble, tools
from llm4agents.barrier.packages.index import THIS_HOST, Index, Login, Place, links, pattern, place, prefix_of
from llm4agents.barrier.packages.probe import Probed
from llm4agents.barrier.policy import Policy, Request, Target

PASSWORD = "pa55/w:ord%"  # with everything that an address encodes
QUOTED = "pa55%2Fw%3Aord%25"
TOKEN = "npm-token-4711"


class _Index(BaseHTTPRequestHandler):
    """Simple pages, npm documents, a cargo index and apt files, below /repo/KIND/, for whoever has the password."""

    seen: ClassVar[list[tuple[str, str, str | None]]] = []
    elsewhere: ClassVar[str] = ""

    def do_GET(self) -> None:
        login = self.headers.get("Authorization")
        self.seen.append((self.path, self.headers.get("Accept", ""), login))
        basic = "Basic " + base64.b64encode(f"ci:{PASSWORD}".encode()).decode()
        if self.path.startswith("/repo/") and login not in (basic, f"Bearer {TOKEN}", TOKEN):
            return self._answer(401, b"who are you?")
        base = f"http://127.0.0.1:{self.server.server_port}"  # type: ignore[attr-defined]
        if self.path == "/repo/pypi/simple/pip/":
            page = '<a href="../../packages/aa/pip-1.tar.gz#sha256=0">pip</a>'
            return self._answer(
                200, f'{page}<a data-x href="{self.elsewhere}/far/pip-2.whl">x</a>'.encode(), "text/html"
            )
        if self.path == "/repo/npm/npm/latest":
            return self._answer(
                200, json.dumps({"dist": {"tarball": f"{base}/repo/npm/npm/-/npm-1.tgz"}}).encode()
            )
        if self.path == "/repo/cargo/config.json":
            return self._answer(
                200, json.dumps({"dl": f"{base}/repo/crates/{{crate}}/{{version}}.crate"}).encode()
            )
        if self.path.startswith("/repo/debian/dists/"):
            return self._answer(302, b"", to=f"{self.elsewhere}/pool-mirror/dists/InRelease")
        if self.path.startswith(("/repo/pypi/packages/", "/repo/npm/npm/-/", "/far/", "/pool-mirror/")):
            return self._answer(200, b"file")
        return self._answer(404, b"")

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, kind: str = "application/json", to: str = "") -> None:
        self.send_response(status)
        if to:
            self.send_header("Location", to)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def index() -> Iterator[type[_Index]]:
    handler = type("Handler", (_Index,), {"seen": []})
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(2)]
    threads = [threading.Thread(target=server.serve_forever, daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    handler.port = servers[0].server_port  # type: ignore[attr-defined]
    handler.elsewhere = f"http://127.0.0.1:{servers[1].server_port}"
    yield handler
    for server, thread in zip(servers, threads, strict=True):
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """What a tool needs to run, without this machine's own settings."""
    import os

    kept = {"PATH", "PYENV_ROOT", "PYENV_VERSION", "RUSTUP_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "GOROOT"}
    found = {name: value for name, value in os.environ.items() if name in kept}
    rustup = Path(os.environ.get("RUSTUP_HOME") or Path.home() / ".rustup")
    if rustup.is_dir():
        found["RUSTUP_HOME"] = str(rustup)
    home = tmp_path / "home"
    home.mkdir()
    return {**found, "HOME": str(home), "NO_PROXY": "127.0.0.1"}


def ask(tool: str, env: dict[str, str], tmp_path: Path) -> Any:
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    return asyncio.run(tools.ask(tool, env, scratch))


def needs(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not _runs(tool), reason=f"{tool} is not installed here")


def _runs(tool: str) -> bool:
    """Whether it is there and is itself: a rustup proxy without a toolchain is no cargo."""
    argument = "version" if tool == "go" else "--version"
    return (
        shutil.which(tool) is not None
        and not subprocess.run([tool, argument], capture_output=True).returncode
    )


def discovered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, env: dict[str, str], *names: str
) -> Discovered:
    monkeypatch.setattr(tools, "TOOLS", {name: tools.TOOLS[name] for name in names})
    return asyncio.run(Discovery(tmp_path / "cache", env).get())


# -- the tools themselves ----------------------------------------------------------------------------------------------


@needs("pip3")
def test_pip_says_its_default(env: dict[str, str], tmp_path: Path) -> None:
    found = ask("pip", env, tmp_path)
    assert not found.skipped
    [one] = found.indexes
    assert one.kind == "simple" and one.place.scheme == "https" and one.login is None
    assert found.environment == {"PIP_INDEX_URL": one.place.url()}


@needs("pip3")
def test_pip_says_what_it_is_configured_to(env: dict[str, str], tmp_path: Path) -> None:
    directory = Path(env["HOME"]) / ".config" / "pip"
    directory.mkdir(parents=True)
    (directory / "pip.conf").write_text(
        f"[global]\nindex-url = https://ci:{QUOTED.replace('%', '%%')}@a.example/simple\n"
        "extra-index-url =\n  http://b.example:8080/x/simple/\n  https://tok@c.example/simple\n"
        "find-links = /opt/wheels\n  https://d.example/wheels/\n"
        "[install]\nindex-url = https://ci:other@e.example/simple\n"
    )
    found = ask("pip", {**env, "PIP_INDEX_URL": f"https://ci:{QUOTED}@f.example/simple"}, tmp_path)
    assert [one.place.host for one in found.indexes] == ["f.example", "b.example", "c.example", "d.example"]
    assert found.indexes[0].login == Login("ci", PASSWORD)
    assert found.indexes[2].login is not None and "tok" not in repr(found.indexes[2].login)
    assert found.environment == {
        "PIP_INDEX_URL": "https://f.example/simple/",
        "PIP_EXTRA_INDEX_URL": "http://b.example:8080/x/simple/ https://c.example/simple/",
        "PIP_FIND_LINKS": "https://d.example/wheels/",
        "PIP_TRUSTED_HOST": "b.example:8080",
    }
    assert (
        ask("pip", env, tmp_path / "other").indexes[0].place.host == "e.example"
        if (tmp_path / "other").mkdir() is None
        else 0
    )


@needs("npm")
def test_npm_says_its_default_and_its_scopes(env: dict[str, str], tmp_path: Path) -> None:
    [one] = ask("npm", env, tmp_path).indexes
    assert one.kind == "npm" and one.place.path == "/" and one.login is None
    word = base64.b64encode(PASSWORD.encode()).decode()
    (Path(env["HOME"]) / ".npmrc").write_text(
        "registry=https://npm.example/npm/\n//npm.example/npm/:_authToken=${NPM_TOKEN}\n"
        f"@corp:registry=https://corp.example/\n//corp.example/:username=ci\n//corp.example/:_password={word}\n"
    )
    (tmp_path / "again").mkdir()
    found = ask("npm", {**env, "NPM_TOKEN": TOKEN}, tmp_path / "again")
    assert {one.place.url(): one.login for one in found.indexes} == {
        "https://npm.example/npm/": Login(None, TOKEN, "Bearer"),
        "https://corp.example/": Login("ci", PASSWORD),
    }
    assert sorted(found.files[tools.NPMRC].splitlines()) == [
        "@corp:registry=https://corp.example/",
        "registry=https://npm.example/npm/",
    ]
    assert TOKEN not in str(found.files) and word not in str(found.files)


@needs("go")
def test_go_says_its_proxies(env: dict[str, str], tmp_path: Path) -> None:
    found = ask("go", env, tmp_path)
    assert [one.kind for one in found.indexes] == ["go", "sumdb"] and not found.skipped
    (tmp_path / "again").mkdir()
    own = {
        **env,
        "GOPROXY": f"https://ci:{QUOTED}@go.example/x|direct,off",
        "GOSUMDB": "off",
        "GOPRIVATE": "corp.example",
    }
    found = ask("go", own, tmp_path / "again")
    assert [(one.place.url(), one.login) for one in found.indexes] == [
        ("https://go.example/x/", Login("ci", PASSWORD))
    ]
    assert found.environment["GOPROXY"] == "https://go.example/x|direct,off"
    assert (found.environment["GOSUMDB"], found.environment["GOPRIVATE"]) == ("off", "corp.example")


@needs("cargo")
def test_cargo_says_its_default_by_what_it_fetches(env: dict[str, str], tmp_path: Path) -> None:
    found = ask("cargo", env, tmp_path)
    if found.skipped:
        pytest.skip(f"no crate index is reached from here: {found.skipped}")
    [one] = found.indexes
    assert one.kind == "sparse" and one.probes == ("config.json",)
    assert not found.files  # a guest's own cargo has the same default


@needs("cargo")
def test_cargo_says_its_replacements_and_registries(
    env: dict[str, str], tmp_path: Path, index: type[_Index]
) -> None:
    home = Path(env["HOME"]) / ".cargo"
    home.mkdir()
    url = f"sparse+http://127.0.0.1:{index.port}/repo/cargo/"  # type: ignore[attr-defined]
    (home / "config.toml").write_text(
        f'[source.crates-io]\nreplace-with = "mirror"\n[source.mirror]\nregistry = "{url}"\n'
        '[registries.corp]\nindex = "https://git.example/corp/index.git"\n'
    )
    (home / "credentials.toml").write_text(f'[registries.corp]\ntoken = "{TOKEN}"\n')
    found = ask("cargo", env, tmp_path)
    by_host = {one.place.url(): one for one in found.indexes}
    assert by_host["https://git.example/corp/index.git"].login == Login(None, TOKEN, "")
    assert by_host[url.removeprefix("sparse+")].kind == "sparse"
    text = found.files[tools.CARGO_CONFIG]
    assert f'registry = "sparse+http://{THIS_HOST}:{index.port}/repo/cargo/"' in text  # type: ignore[attr-defined]
    assert 'replace-with = "mirror"' in text and TOKEN not in text + str(found.environment)
    assert found.environment["CARGO_REGISTRIES_CORP_TOKEN"]


@needs("apt-get")
def test_apt_says_its_sources(env: dict[str, str], tmp_path: Path) -> None:
    found = ask("apt", env, tmp_path)
    if not found.indexes:
        pytest.skip("this host's apt has no package lists")
    assert all(one.kind == "apt" and one.probes for one in found.indexes)
    assert found.files["/etc/apt/sources.list"].startswith("deb http")


def test_apt_reads_logins_and_lists() -> None:
    logins = tools.apt_logins(
        "# no\nmachine deb.example/debian login ci password x\nmachine h.example\n login a\n password b\n"
    )
    assert logins == [("deb.example/debian", Login("ci", "x")), ("h.example", Login("a", "b"))]
    assert tools.apt_sources("http://a/\tbookworm\tmain\tDebian\n\nhttp://a/\tbookworm\tmain\tx\n") == [
        ("http://a/", "bookworm", "main")
    ]


@pytest.mark.parametrize("tool", ["apt", "pip", "npm", "cargo", "go"])
def test_a_tool_that_is_not_here_is_said(tool: str, tmp_path: Path) -> None:
    found = ask(tool, {"PATH": str(tmp_path), "HOME": str(tmp_path)}, tmp_path)
    assert not found.indexes and found.skipped == [f"{tool}: not installed"]


def test_a_tool_that_fails_or_hangs_is_said_without_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PACKAGE_TOOL_TIMEOUT_S", 0.3)
    for script, words in (
        ("echo secret >&2; exit 3", "failed with 3"),
        ("exec sleep 60", "said nothing"),
        ("echo {", "no JSON"),
    ):
        npm = tmp_path / "npm"
        npm.write_text(f"#!/bin/sh\n{script}\n")
        npm.chmod(0o755)
        scratch = tmp_path / words.replace(" ", "")
        scratch.mkdir()
        [text] = ask("npm", {"PATH": f"{tmp_path}:/usr/bin:/bin"}, scratch).skipped
        assert words in text and "secret" not in text


# -- indexes -----------------------------------------------------------------------------------------------------------


@needs("pip3")
def test_a_mirror_with_a_password(
    env: dict[str, str], tmp_path: Path, index: type[_Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = index.port  # type: ignore[attr-defined]
    own = {**env, "PIP_INDEX_URL": f"http://ci:{QUOTED}@127.0.0.1:{port}/repo/pypi/simple"}
    found = discovered(monkeypatch, tmp_path, own, "pip")
    assert not found.packages.skipped
    assert found.secrets == {"index:127.0.0.1": PASSWORD}
    assert found.packages.environment["PIP_INDEX_URL"] == f"http://{THIS_HOST}:{port}/repo/pypi/simple/"
    assert {(h.port, h.paths) for h in found.packages.hosts} == {
        (port, ("/repo/pypi/simple/*", "/repo/pypi/*")),
        (int(index.elsewhere.rpartition(":")[2]), ("/far/*",)),
    }
    # The password went to its index, and to nobody else.
    assert [login for path, _, login in index.seen if path.startswith("/repo/")] and all(
        login is None for path, _, login in index.seen if path.startswith("/far/")
    )
    cache = tmp_path / "cache" / "packages.json"
    assert stat.S_IMODE(cache.stat().st_mode) == 0o600
    for text in (cache.read_text(), json.dumps(found.packages.to_json()), repr(found)):
        assert PASSWORD not in text and QUOTED not in text
        assert base64.b64encode(f"ci:{PASSWORD}".encode()).decode() not in text
    # A guest's request gets it back, on the host.
    packages = Packages.from_json(json.loads(json.dumps(found.packages.to_json())))
    policy = Policy.compile(Network.from_json("packages"), packages=packages)
    policy = Policy.from_json(json.loads(json.dumps(policy.to_json())))
    target = policy.rewrite(Target(THIS_HOST, None, port))
    request = Request("GET", "/repo/pypi/simple/six/", "http", f"{THIS_HOST}:{port}")
    assert policy.request(target, request).allowed and policy.address(target, "127.0.0.1").allowed
    [binding] = {b.secret: b for b in policy.credentials(target, request)}.values()
    assert (binding.secret, binding.form, binding.username) == ("index:127.0.0.1", "basic", "ci")
    assert not policy.request(target, Request("PUT", "/repo/pypi/simple/six/", "http", "")).allowed
    assert not policy.request(target, Request("GET", "/other", "http", "")).allowed
    # Asked again within the hour, no index is.
    asked = len(index.seen)
    assert asyncio.run(Discovery(tmp_path / "cache", own).get()).packages == found.packages
    assert len(index.seen) == asked


@needs("npm")
def test_a_private_npm_registry(
    env: dict[str, str], tmp_path: Path, index: type[_Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = index.port  # type: ignore[attr-defined]
    base = f"//127.0.0.1:{port}/repo/npm/"
    (Path(env["HOME"]) / ".npmrc").write_text(f"registry=http:{base}\n{base}:_authToken={TOKEN}\n")
    found = discovered(monkeypatch, tmp_path, env, "npm")
    assert found.secrets == {"index:127.0.0.1": TOKEN} and not found.packages.skipped
    policy = Policy.compile(Network.from_json("packages"), packages=found.packages)
    target = policy.rewrite(Target(THIS_HOST, None, port))

    def allowed(method: str, path: str) -> bool:
        return policy.request(target, Request(method, path, "http", "")).allowed

    assert allowed("GET", "/repo/npm/@types%2fnode") and allowed(
        "POST", "/repo/npm/-/npm/v1/security/advisories/bulk"
    )
    assert not allowed("PUT", "/repo/npm/left-pad") and not allowed("GET", "/repo/other/")
    [binding] = policy.credentials(target, Request("GET", "/repo/npm/x", "http"))
    assert (binding.header, binding.prefix) == ("Authorization", "Bearer ")


@needs("cargo")
def test_a_private_cargo_index(
    env: dict[str, str], tmp_path: Path, index: type[_Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = index.port  # type: ignore[attr-defined]
    own = {
        **env,
        "CARGO_REGISTRIES_CORP_INDEX": f"sparse+http://127.0.0.1:{port}/repo/cargo/",
        "CARGO_REGISTRIES_CORP_TOKEN": TOKEN,
    }
    found = discovered(monkeypatch, tmp_path, own, "cargo")
    paths = {path for host in found.packages.hosts if host.port == port for path in host.paths}
    assert {"/repo/cargo/*", "/repo/*"} <= paths  # (its files: what index and download share)
    assert found.secrets == {"index:127.0.0.1": TOKEN}
    assert TOKEN not in json.dumps(found.packages.to_json())


def test_an_index_that_refuses_is_said(
    env: dict[str, str], tmp_path: Path, index: type[_Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("pip3") is None:
        pytest.skip("pip is not installed here")
    port = index.port  # type: ignore[attr-defined]
    own = {**env, "PIP_INDEX_URL": f"http://ci:wrong@127.0.0.1:{port}/repo/pypi/simple"}
    found = discovered(monkeypatch, tmp_path, own, "pip")
    assert "HTTP 401" in found.packages.skipped["pip"] and "wrong" not in str(found.packages.skipped)
    assert [h.paths for h in found.packages.hosts] == [("/repo/pypi/simple/*",)]
    assert not (tmp_path / "cache" / "packages.json").exists()  # asked again next time


def test_a_redirect_takes_no_password_along(index: type[_Index]) -> None:
    from llm4agents.barrier.packages.probe import Prober, authorities

    port = index.port  # type: ignore[attr-defined]
    where = Place("http", "127.0.0.1", port, "/repo/debian/")
    probed = Prober(authorities([])).probe(
        Index("apt", "apt", where, Login("ci", PASSWORD), ("dists/x/InRelease", "pool/y"))
    )
    far = urlsplit(index.elsewhere)
    assert probed.places == [where, Place("http", "127.0.0.1", far.port or 0, "/pool-mirror/")]
    assert [login for path, _, login in index.seen if path.startswith("/pool-mirror/")] == [None]


@pytest.mark.parametrize(
    "index, link, prefix",
    [
        ("https://a.example/simple/", "https://b.example/packages/aa/bb/x.whl", "/packages/"),
        ("https://a.example/simple/", "https://a.example/packages/aa/x.whl", "/packages/"),
        (
            "https://a.example/repository/p/simple/",
            "https://a.example/repository/p/packages/x/1/x.whl",
            "/repository/p/",
        ),
        ("https://a.example/root/pypi/+simple/", "https://a.example/root/pypi/+f/ab/x.whl", "/root/pypi/"),
        ("https://a.example/", "https://a.example/x.tgz", "/"),
        ("https://a.example/npm/", "https://a.example/npm/x/-/x.tgz", "/npm/"),
    ],
)
def test_where_files_are(index: str, link: str, prefix: str) -> None:
    assert prefix_of(place(index)[0], place(link)[0]) == prefix


def test_addresses_are_cleaned() -> None:
    assert place(f"https://ci:{QUOTED}@A.example:8443/x?y#z") == (
        Place("https", "a.example", 8443, "/x"),
        Login("ci", PASSWORD),
    )
    where, login = place("https://token@a.example/")
    assert (
        login is not None
        and login.header() == "Basic " + base64.b64encode(b"token:").decode()
        and "token" not in where.url()
    )
    assert place("http://[::1]:80/")[0].guest_url() == f"http://{THIS_HOST}/"
    for text in (
        "file:///x",
        "ssh://a/",
        "http://a b/",
        "http://x:y/",
        "https://0x7f000001/",
        "",
        "http://u:secret@:1:2/",
    ):
        with pytest.raises(ValueError) as raised:
            place(text)
        assert "secret" not in str(raised.value)
    assert pattern("/") is None and pattern("/a/") == "/a/*" and pattern("/a//b/") is None
    assert list(links('<a href=\'x&amp;y\'>1</a> <A data-a="b" HREF = "z">')) == ["x&y", "z"]


def test_two_passwords_of_one_host_have_two_names() -> None:
    one = Index("pip", "simple", Place("https", "a.example", 443, "/x/"), Login("u", "1"))
    two = Index("npm", "npm", Place("https", "a.example", 443, "/y/"), Login("u", "2"))
    probed = [Probed([index.place]) for index in (one, two)]
    found = assemble({}, [one, two], probed)
    assert found.secrets == {"index:a.example": "1", "index:a.example:2": "2"}
    assert [(b.secret, b.path) for b in found.packages.credentials] == [
        ("index:a.example", "/x/*"),
        ("index:a.example:2", "/y/*"),
    ]
    assert Packages.from_json(json.loads(json.dumps(found.packages.to_json()))) == found.packages


# -- all of it, for real -----------------------------------------------------------------------------------------------


def test_this_hosts_own_registries(tmp_path: Path) -> None:
    """Whatever this host uses: its tools reach it, so its indexes answer, and the policy lets a guest read them."""
    found = asyncio.run(Discovery(tmp_path).get(print))
    assert set(found.packages.skipped) <= set(tools.TOOLS)
    policy = Policy.compile(Network.from_json("packages"), packages=found.packages)
    hosts = {host.tool: host for host in found.packages.hosts}
    for tool in set(tools.TOOLS) - set(found.packages.skipped):
        assert tool in hosts
    for host in found.packages.hosts:
        target = Target(host.host, None, host.port)
        path = (host.paths or ("/*",))[0].replace("*", "x")
        assert policy.request(target, Request("GET", path, host.scheme, host.host)).allowed, host
        assert not policy.request(target, Request("PUT", path, host.scheme, host.host)).allowed
        assert not policy.request(target, Request("POST", path, host.scheme, host.host)).allowed
        assert policy.intercepts(target) and policy.resolve(host.host).allowed
