"""The node's CA in templates: what checks TLS in a guest trusts what it vouches for, also what was warm already.

A server inside the guest has a certificate of the node's CA (as the interceptor makes them) and one of another's: each
client must take the first and refuse the second. No network is needed.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import os
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from llm4agents import Sandbox, config
from llm4agents.barrier import ca
from llm4agents.barrier.ca import Authority
from tests.barrier import needles
from tests.support import Node, sdk_of

pytestmark = [pytest.mark.vm, pytest.mark.filterwarnings("ignore::llm4agents.EmulationWarning")]

GOOD, BAD = "good.trust.test", "bad.trust.test"
_SERVER = """
import functools, http.server, ssl, sys
class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 443), functools.partial(Quiet, directory="/srv/site"))
contexts = {}
for name in sys.argv[1:]:
    contexts[name] = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    contexts[name].load_cert_chain(f"/srv/{name}.pem")
def by_name(sock, name, _):
    sock.context = contexts.get(name, contexts[sys.argv[1]])
contexts[sys.argv[1]].sni_callback = by_name
server.socket = contexts[sys.argv[1]].wrap_socket(server.socket, server_side=True)
print("ready", flush=True)
server.serve_forever()
"""
_NODE_SERVER = """
const fs = require('fs'), tls = require('tls'), https = require('https'), path = require('path');
const contexts = {}; const names = process.argv.slice(2);
for (const name of names) { const pem = fs.readFileSync(`/srv/${name}.pem`);
  contexts[name] = tls.createSecureContext({ key: pem, cert: pem }); }
const pem = fs.readFileSync(`/srv/${names[0]}.pem`);
https.createServer({ key: pem, cert: pem, SNICallback: (name, done) => done(null, contexts[name]) },
  (request, response) => { const file = path.join('/srv/site', decodeURIComponent(request.url.split('?')[0]));
    fs.readFile(file, (error, data) => { response.statusCode = error ? 404 : 200; response.end(data); }); }
).listen(443, '127.0.0.1', () => console.log('ready'));
"""


def leaf(name: str, certificate_pem: bytes, key_pem: bytes) -> bytes:
    """Key and certificate of a server of that name, vouched for by that CA."""
    issuer = x509.load_pem_x509_certificate(certificate_pem)
    signer = serialization.load_pem_private_key(key_pem, password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=10))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .sign(signer, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + made.public_bytes(serialization.Encoding.PEM)


def authority() -> Authority:
    return Authority.open(config.settings().ca_directory)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the guest's server serves: a git repository, a package index for pip, one for npm, one for apt."""
    home = tmp_path_factory.mktemp("site")
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "init.defaultBranch=main"]
    work = home.parent / f"{home.name}-work"
    subprocess.run([*git, "init", "-q", work], check=True)
    subprocess.run([*git, "-C", work, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    subprocess.run([*git, "clone", "-q", "--bare", work, home / "repo.git"], check=True)
    subprocess.run([*git, "-C", home / "repo.git", "update-server-info"], check=True)

    wheel = home / "simple" / "tiny" / "tiny-1.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr(
            "tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    (wheel.parent / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')

    version = {"name": "tiny", "version": "1.2.3"}
    document = {"name": "tiny", "dist-tags": {"latest": "1.2.3"}, "versions": {"1.2.3": version}}
    (home / "tiny").write_text(json.dumps(document))

    apt = home / "apt"
    apt.mkdir()
    (apt / "Packages").write_text("")
    digest = hashlib.sha256(b"").hexdigest()
    (apt / "Release").write_text(
        f"Suite: tiny\nDate: Thu, 01 Jan 2026 00:00:00 UTC\nSHA256:\n {digest} 0 Packages\n"
    )
    return home


@pytest.fixture(scope="module", autouse=True)
def server(shared_node: Node) -> Iterator[None]:
    with sdk_of(shared_node):
        yield


def serving(sandbox: Sandbox, site: Path, tmp: Path, command: str, script: str) -> None:
    ours, theirs = authority(), ca.generate()
    (tmp / f"{GOOD}.pem").write_bytes(leaf(GOOD, ours.certificate_pem, ours.key_pem()))
    (tmp / f"{BAD}.pem").write_bytes(leaf(BAD, *theirs))
    (tmp / "server").write_text(script)
    sandbox.exec("mkdir -p /srv && chown user: /srv", user="root").check()
    sandbox.files.upload(str(site), "/srv/site")
    for file in tmp.iterdir():
        sandbox.files.upload(str(file), f"/srv/{file.name}")
    sandbox.exec(f"echo 127.0.0.1 {GOOD} {BAD} >> /etc/hosts", user="root").check()
    process = sandbox.processes.start(f"{command} /srv/server {GOOD} {BAD}", user="root")
    process.wait_for_log("ready", timeout=60)


@pytest.fixture(scope="module")
def python(server: None, site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with Sandbox(template="python") as made:
        serving(made, site, tmp_path_factory.mktemp("python"), "python3", _SERVER)
        yield made


@pytest.fixture(scope="module")
def node(server: None, site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with Sandbox(template="node") as made:
        serving(made, site, tmp_path_factory.mktemp("node"), "node", _NODE_SERVER)
        yield made


PYTHON = {
    "curl": "curl -sSf https://{host}/tiny",
    "git": "cd $(mktemp -d) && git clone -q https://{host}/repo.git && git -C repo log --oneline | grep first",
    "openssl": "said=$(echo | openssl s_client -connect {host}:443 -servername {host} -verify_return_error 2>&1);"
    ' echo "$said"; echo "$said" | grep -q "Verify return code: 0"',
    "python ssl": "python3 -c 'import urllib.request as u; print(u.urlopen(\"https://{host}/tiny\").status)'",
    "requests": "python3 -c 'import requests; print(requests.get(\"https://{host}/tiny\").status_code)'",
    "certifi": "env -u REQUESTS_CA_BUNDLE -u SSL_CERT_FILE python3 -c 'import certifi, requests;"
    ' print(requests.get("https://{host}/tiny", verify=certifi.where()).status_code)\'',
    "pip without its variable": "env -u PIP_CERT -u REQUESTS_CA_BUNDLE pip download --no-deps --no-cache-dir"
    " --retries 0 -d $(mktemp -d) --index-url https://{host}/simple/ tiny",
    "nothing set": "env -i curl -sSf https://{host}/tiny && env -i git ls-remote https://{host}/repo.git"
    " && env -i python3 -c 'import urllib.request as u; print(u.urlopen(\"https://{host}/tiny\").status)'",
    "pip": "pip download --no-deps --no-cache-dir --retries 0 -d $(mktemp -d)"
    " --index-url https://{host}/simple/ tiny",
}
NODE = {
    "curl": "curl -sSf https://{host}/tiny",
    "node https": 'node -e \'require("https").get("https://{host}/tiny", (r) => console.log(r.statusCode))\'',
    "node fetch": "node -e 'fetch(\"https://{host}/tiny\").then((r) => r.text()).then(console.log)'",
    "npm": "npm view --fetch-retries=0 --registry=https://{host}/ tiny version | grep 1.2.3",
}
REFUSED = (
    "certificate", "CERT", "unable to get local issuer", "SELF_SIGNED", "self-signed", "self signed",
)  # fmt: skip


def takes_one_and_refuses_the_other(sandbox: Sandbox, command: str, user: str = "user") -> None:
    good = sandbox.exec(command.replace("{host}", GOOD), user=user, timeout=120)
    assert good.exit_code == 0, good
    bad = sandbox.exec(command.replace("{host}", BAD), user=user, timeout=120)
    assert bad.exit_code != 0 and any(word in bad.stderr + bad.stdout for word in REFUSED), bad


@pytest.mark.parametrize("client", PYTHON)
def test_clients_of_python_trust_it(python: Sandbox, client: str) -> None:
    takes_one_and_refuses_the_other(python, PYTHON[client])


def test_clients_of_root_trust_it_too(python: Sandbox) -> None:
    takes_one_and_refuses_the_other(python, PYTHON["requests"], "root")


def test_apt_trusts_it(python: Sandbox) -> None:
    options = "-o Dir::Etc::sourcelist=/tmp/{host}.list -o Dir::Etc::sourceparts=- -o Acquire::Retries=0"
    takes_one_and_refuses_the_other(
        python,
        "echo 'deb [trusted=yes] https://{host}/apt ./' > /tmp/{host}.list; rm -rf /var/lib/apt/lists/*;"
        f" apt-get update -o APT::Update::Error-Mode=any {options}",
        "root",
    )


def test_the_warm_interpreter_trusts_it(python: Sandbox) -> None:
    code = f"""
import ssl, urllib.request, requests
print(urllib.request.urlopen("https://{GOOD}/tiny").status, requests.get("https://{GOOD}/tiny").status_code)
for get in (urllib.request.urlopen, requests.get):
    try:
        print(get("https://{BAD}/tiny"))
    except Exception as error:
        print("certificate verify failed" in str(error))
"""
    assert python.run_code(code).stdout == "200 200\nTrue\nTrue\n"


@pytest.mark.parametrize("client", NODE)
def test_clients_of_node_trust_it(node: Sandbox, client: str) -> None:
    takes_one_and_refuses_the_other(node, NODE[client])


def test_the_warm_node_trusts_it(node: Sandbox) -> None:
    code = f"""
console.log((await fetch("https://{GOOD}/tiny")).status);
try {{ await fetch("https://{BAD}/tiny") }} catch (error) {{ console.log(error.cause.code) }}
"""
    assert node.run_code(code, language="javascript").stdout == "200\nUNABLE_TO_VERIFY_LEAF_SIGNATURE\n"


def test_browsers_are_told_of_it(python: Sandbox) -> None:
    policy = json.loads(python.files.read("/etc/chromium/policies/managed/llm4agents.json"))
    der = x509.load_pem_x509_certificate(authority().certificate_pem).public_bytes(serialization.Encoding.DER)
    assert base64.b64encode(der).decode() in policy["CACertificates"]


def key_forms(pem: bytes) -> dict[str, bytes]:
    """What a private key looks like wherever it might lie."""
    key = serialization.load_pem_private_key(pem, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    scalar = key.private_numbers().private_value.to_bytes(32, "big")
    body = b"".join(pem.splitlines()[1:-1])
    return {
        "scalar": scalar,
        "hex": scalar.hex().encode(),
        "line of PEM": pem.splitlines()[1],
        "middle of PEM": body[40:80],
        "DER": key.private_bytes(
            serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )[-90:],
    }


def found_in(paths: list[Path], wanted: dict[str, bytes]) -> set[tuple[str, str]]:
    """(file, form) of what is in the bytes of files."""
    return {(path.name, form) for path in paths for form in needles.in_file(path, wanted)}


@pytest.fixture(scope="module")
def bundle(shared_node: Node, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, exported."""
    file = tmp_path_factory.mktemp("bundle") / "base.bundle"
    shared_node.call("POST", "/v1/templates/base/export", json={"file": str(file)})
    return file


def test_its_key_is_in_no_template_bundle_or_log(shared_node: Node, bundle: Path, tmp_path: Path) -> None:
    variants = [
        path
        for path in shared_node.cache.glob("templates/base/keys/*/template.json")
        if json.loads(path.read_text()).get("ca") == authority().digest
    ]
    assert variants, "no template says which CA it trusts"
    files = [path for one in variants for path in one.parent.rglob("*") if path.is_file()]
    blobs = {digest for one in variants for digest in json.loads(one.read_text())["blobs"]}
    files += [shared_node.cache / "blobs" / "sha256" / digest[:2] / digest for digest in blobs]
    files += [path for path in shared_node.home.rglob("*") if path.is_file()]
    unpacked = tmp_path / "unpacked"
    unpacked.write_bytes(subprocess.run(["gzip", "-dc", bundle], capture_output=True, check=True).stdout)
    sought = key_forms(authority().key_pem())
    assert not found_in([*files, bundle, unpacked], sought)
    # Positive controls: the certificate is found where it belongs, and a key where it is planted.
    line = {"certificate": authority().certificate_pem.splitlines()[2]}
    assert len(found_in(files, line)) >= 2 and found_in([unpacked], line)
    (tmp_path / "planted").write_bytes(b"x" * 5_000 + authority().key_pem())
    assert {form for _, form in found_in([tmp_path / "planted"], sought)} == {"line of PEM"}


@pytest.mark.root
def test_a_template_of_another_node_is_refused_where_tls_is_intercepted_and_only_there(
    bundle: Path, nodes: Callable[..., Node], tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("links need root here")
    cache = tmp_path / "cache"
    cache.mkdir()
    for name in (
        "build",
        "intercept",
    ):  # our binaries; the interceptor's environment, which takes a minute to make
        shared = config.settings().cache / name
        shared.mkdir(exist_ok=True)
        (cache / name).symlink_to(shared)
    node = nodes(cache=cache, LLM4AGENTS_CA=str(tmp_path / "ca")).start()
    node.call("POST", "/v1/templates/import", json={"file": str(bundle)})
    node.call("PUT", "/v1/secrets/TOKEN", json={"value": "value-of-it"})
    wish = {"template": "base", "memory_mib": 1024}
    credential = {"secret": "TOKEN", "host": "api.example.com", "as": "bearer"}
    spliced = {"rules": ["allow api.example.com"]}
    read = {"rules": ["allow GET api.example.com"]}

    sandbox = str(node.call("POST", "/v1/sandboxes", json={**wish, "network": spliced})["id"])
    assert node.exec(sandbox, "true")["exit_code"] == 0
    before = node.call("GET", f"/v1/sandboxes/{sandbox}/network")["network"]
    for answer in (
        node.http.post("/v1/sandboxes", json={**wish, "network": {**spliced, "credentials": [credential]}}),
        node.http.put(f"/v1/sandboxes/{sandbox}/network", json={"network": read}),
    ):
        assert (answer.status_code, answer.json()["code"]) == (409, "version_mismatch"), answer.text
        assert "another CA" in answer.json()["detail"] and "LLM4AGENTS_CA" in answer.json()["hint"]
    assert node.call("GET", f"/v1/sandboxes/{sandbox}/network")["network"] == before
    node.call("DELETE", f"/v1/sandboxes/{sandbox}")
