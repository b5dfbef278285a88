"""The node's CA: made once, kept private, and good for what it is made for."""

from __future__ import annotations

import datetime
import shutil
import ssl
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from llm4agents.barrier import ca
from llm4agents.barrier.ca import Authority
from llm4agents.errors import HostSetupError


def test_it_is_made_once_and_found_again(tmp_path: Path) -> None:
    made = Authority.open(tmp_path / "s" / "ca")
    again = Authority.open(tmp_path / "s" / "ca")
    assert made == again and made.key_pem() == again.key_pem()
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["ca"], "a half-made directory is left"
    assert (tmp_path / "s" / "ca").stat().st_mode & 0o7777 == 0o700
    assert (tmp_path / "s" / "ca" / "key.pem").stat().st_mode & 0o7777 == 0o600
    assert Authority.open(tmp_path / "other").digest != made.digest


def test_it_is_a_ca_and_says_nothing_of_its_host(tmp_path: Path) -> None:
    certificate = x509.load_pem_x509_certificate(Authority.open(tmp_path / "ca").certificate_pem)
    basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert basic.critical and basic.value.ca and basic.value.path_length == 0
    usage = certificate.extensions.get_extension_for_class(x509.KeyUsage)
    assert usage.critical and usage.value.key_cert_sign and not usage.value.key_encipherment
    years = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert years > datetime.timedelta(days=3650)
    assert certificate.subject.rfc4514_string().endswith("O=LLM4Agents sandbox")
    with pytest.raises(x509.ExtensionNotFound):
        certificate.extensions.get_extension_for_class(x509.NameConstraints)


def test_the_key_is_in_nothing_that_is_printed(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path / "ca")
    line = authority.key_pem().splitlines()[1].decode()
    assert line not in repr(authority) and b"PRIVATE KEY" not in authority.certificate_pem
    ssl.create_default_context(cadata=authority.certificate_pem.decode())


def test_many_at_once_make_one(tmp_path: Path) -> None:
    found: list[tuple[str, bytes]] = []

    def one() -> None:
        authority = Authority.open(tmp_path / "ca")
        found.append((authority.digest, authority.key_pem()))

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["ca"]


def test_what_is_not_in_order_is_refused_with_the_way_out(tmp_path: Path) -> None:
    directory = tmp_path / "ca"
    authority = Authority.open(directory)
    key = authority.key_pem()
    for spoil, words in (
        (lambda: (directory / "key.pem").chmod(0o644), "can be read by others"),
        (lambda: (directory / "key.pem").unlink(), "is gone"),
        (lambda: (directory / "certificate.pem").write_text("x"), "is no certificate"),
        (lambda: (directory / "certificate.pem").unlink(), "without certificate.pem"),
    ):
        spoil()
        with pytest.raises(HostSetupError, match=words) as caught:
            Authority.open(directory)
        assert caught.value.hint
        shutil.rmtree(directory)
        directory.mkdir(mode=0o700)
        ca.keyfiles.write(directory / "key.pem", key)
        ca.keyfiles.write(directory / "certificate.pem", authority.certificate_pem, 0o644)
        assert Authority.open(directory) == authority


def test_a_key_of_another_certificate_is_not_given_out(tmp_path: Path) -> None:
    authority, other = Authority.open(tmp_path / "ca"), Authority.open(tmp_path / "other")
    (tmp_path / "ca" / "key.pem").write_bytes(other.key_pem())
    with pytest.raises(HostSetupError, match="is not the key of"):
        authority.key_pem()
    (tmp_path / "ca" / "key.pem").write_bytes(b"nonsense")
    with pytest.raises(HostSetupError, match="is not the key of"):
        authority.key_pem()


def test_what_it_makes_is_read_by_others_as_well() -> None:
    certificate, key = ca.generate()
    loaded = serialization.load_pem_private_key(key, password=None)
    assert loaded.public_key() == x509.load_pem_x509_certificate(certificate).public_key()
