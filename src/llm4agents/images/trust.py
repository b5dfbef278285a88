"""Whom a guest trusts: the host's extra certificates and the node's CA, for everything in it that checks TLS.

The system store serves what asks OpenSSL or GnuTLS (Python, git, curl, wget, apt, go); variables (`spec.TRUST`) serve
what brings its own list (node, requests, pip, cargo, boto3); a policy and a data base serve browsers. A Java that is
installed imports the system store by itself (ca-certificates-java). Not here: the CA (`barrier.ca`); only its
certificate comes.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import ssl
from collections.abc import Mapping
from pathlib import Path

from llm4agents.errors import HostSetupError
from llm4agents.images import process
from llm4agents.images.cache import Cache, digest_of

DIRECTORY = "/usr/local/share/ca-certificates"
"""Of a Debian, host and guest: what is in it is trusted beside Debian's own list."""
BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
AUTHORITY = "llm4agents-node.crt"
CERTIFICATE_BYTES_MAX = 1_048_576

_POLICIES = (
    "/etc/chromium/policies/managed/llm4agents.json",
    "/etc/opt/chrome/policies/managed/llm4agents.json",
)
_HOMES = ("/root", "/home/user")
_NSS = "cert9.db", "key4.db"
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.S)


def host_certificates(directory: Path = Path(DIRECTORY)) -> dict[str, bytes]:
    """The certificates this host trusts beside Debian's, by file name: companies intercept TLS."""
    found: dict[str, bytes] = {}
    for path in sorted(directory.rglob("*.crt")) if directory.is_dir() else []:
        if path.is_file() and path.stat().st_size <= CERTIFICATE_BYTES_MAX:
            data = path.read_bytes()
            if b"PRIVATE KEY" not in data:
                found[path.relative_to(directory).as_posix().replace("/", "-")] = data
    return found


def certificates(authority: bytes | None) -> dict[str, bytes]:
    """All that a guest trusts beside Debian's list, by file name. Raises HostSetupError for a key among it."""
    found = host_certificates()
    if authority is not None:
        if b"PRIVATE KEY" in authority or len(_PEM.findall(authority)) != 1:
            raise HostSetupError(
                "the node's CA is not one certificate", hint="a key has no business in an image"
            )
        found[AUTHORITY] = authority
    return found


def policy(trusted: Mapping[str, bytes]) -> bytes:
    """Chromium's policy that has it trust them (its list is its own, and it reads no system store)."""
    ders = [base64.b64encode(der).decode() for data in trusted.values() for der in _ders(data)]
    return json.dumps({"CACertificates": sorted(set(ders))}, indent=1).encode() + b"\n"


def _ders(data: bytes) -> list[bytes]:
    found = []
    for pem in _PEM.findall(data):
        with contextlib.suppress(ValueError):
            found.append(ssl.PEM_cert_to_DER_cert(pem.decode("ascii", "replace")))
    return found


def certutil() -> str | None:
    """The tool that makes NSS data bases (Debian: libnss3-tools), if this host has it."""
    return shutil.which("certutil")


async def browser_files(trusted: Mapping[str, bytes], cache: Cache, tmp: Path) -> dict[str, bytes]:
    """Files for browsers, by their path in the guest: a policy, and NSS data bases where the host can make them."""
    if not trusted:
        return {}
    found = dict.fromkeys(_POLICIES, policy(trusted))
    for name, data in (await _nss(trusted, cache, tmp)).items():
        found.update({f"{home}/.pki/nssdb/{name}": data for home in _HOMES})
    return found


async def _nss(trusted: Mapping[str, bytes], cache: Cache, tmp: Path) -> dict[str, bytes]:
    """The files of a data base that trusts them. Made once for equal inputs: each one made has a salt of its own."""
    tool = certutil()
    if tool is None:
        return {}
    key = digest_of({"nss": 1, "certificates": {name: data.hex() for name, data in trusted.items()}})
    known = cache.recall("nss", key)
    paths = {name: cache.blob(str((known or {}).get(name))) for name in _NSS} if known else {}
    if paths and all(paths.values()):
        return {name: path.read_bytes() for name, path in paths.items() if path is not None}
    home = tmp / "nss"
    home.mkdir()
    await process.run([tool, "-N", "-d", f"sql:{home}", "--empty-password"], cwd=tmp, needed_bytes=1_000_000)
    for file, data in trusted.items():
        for index, der in enumerate(_ders(data)):
            (tmp / "nss.der").write_bytes(der)
            nick = f"{file}-{index}"
            await process.run(
                [tool, "-A", "-d", f"sql:{home}", "-n", nick, "-t", "C,,", "-i", str(tmp / "nss.der")],
                cwd=tmp,
                needed_bytes=1_000_000,
            )
    found = {name: (home / name).read_bytes() for name in _NSS}
    cache.remember("nss", key, {name: cache.ingest_bytes(data)[0] for name, data in found.items()})
    shutil.rmtree(home)
    return found
