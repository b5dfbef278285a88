"""Whom a guest trusts: which certificates go in, and that no key does."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import subprocess
from pathlib import Path

import pytest

from llm4agents.barrier import ca
from llm4agents.errors import HostSetupError
from llm4agents.images import trust
from llm4agents.images.cache import Cache


def test_a_key_is_refused_and_so_is_what_is_not_one_certificate() -> None:
    certificate, key = ca.generate()
    assert trust.certificates(certificate)[trust.AUTHORITY] == certificate
    assert trust.AUTHORITY not in trust.certificates(None)
    for wrong in (key, certificate + key, certificate + certificate, b""):
        with pytest.raises(HostSetupError, match="not one certificate"):
            trust.certificates(wrong)


def test_the_hosts_certificates_are_found_and_its_keys_are_not(tmp_path: Path) -> None:
    certificate, key = ca.generate()
    (tmp_path / "company").mkdir()
    (tmp_path / "company" / "root.crt").write_bytes(certificate)
    (tmp_path / "mistake.crt").write_bytes(certificate + key)
    (tmp_path / "other.txt").write_bytes(certificate)
    assert trust.host_certificates(tmp_path) == {"company-root.crt": certificate}
    assert trust.host_certificates(tmp_path / "none") == {}


def test_browsers_are_told_by_a_policy() -> None:
    first, second = ca.generate()[0], ca.generate()[0]
    told = json.loads(trust.policy({"a.crt": first + second, "b.crt": first}))
    ders = {ssl.PEM_cert_to_DER_cert(pem.decode()) for pem in (first, second)}
    assert {base64.b64decode(one) for one in told["CACertificates"]} == ders and len(
        told["CACertificates"]
    ) == 2


def test_nss_data_bases_are_made_once_where_the_host_can(tmp_path: Path) -> None:
    certificate, _ = ca.generate()
    (tmp_path / "w").mkdir()
    trusted = {"llm4agents-node.crt": certificate}
    cache = Cache(tmp_path / "c")
    made = asyncio.run(trust.browser_files(trusted, cache, tmp_path / "w"))
    assert made == asyncio.run(trust.browser_files(trusted, cache, tmp_path / "w")), (
        "equal inputs, equal images"
    )
    tool = trust.certutil()
    if tool is None:
        assert not any(".pki" in path for path in made)
        pytest.skip("this host has no certutil (Debian: libnss3-tools): templates have no NSS data base")
    (tmp_path / "db").mkdir()
    for name in ("cert9.db", "key4.db"):
        (tmp_path / "db" / name).write_bytes(made[f"/home/user/.pki/nssdb/{name}"])
    listed = subprocess.run(
        [tool, "-L", "-d", f"sql:{tmp_path / 'db'}"], capture_output=True, text=True, check=True
    )
    assert "llm4agents-node.crt-0" in listed.stdout and "C,," in listed.stdout
