"""Key files and sealed values, with real files and real cryptography."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from llm4agents import limits
from llm4agents.barrier import keyfiles
from llm4agents.barrier.vault import CannotOpen, Vault, check_name, value_of
from llm4agents.errors import HostSetupError, InvalidRequestError

AWS = {"access_key_id": "AKIAIOSFODNN7EXAMPLE", "secret_access_key": "wJalrXUtnFEMI/K7MDENG/bPxRfi"}


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    found = Vault(tmp_path)
    found.make()
    return found


@pytest.mark.parametrize(
    "value", ["s3cret", "with\nlines\n", "ü" * 100, AWS, {**AWS, "session_token": "FwoGZXIvYXdzEBY"}]
)
def test_what_was_sealed_is_opened_again(vault: Vault, tmp_path: Path, value: Any) -> None:
    sealed = vault.seal("TOKEN", 3, value)
    assert Vault(tmp_path).open("TOKEN", 3, sealed) == value
    assert sealed != vault.seal("TOKEN", 3, value), "two seals have the same nonce"
    for text in [value] if isinstance(value, str) else value.values():
        assert text.encode() not in sealed


@pytest.mark.parametrize(("name", "version"), [("TOKEN", 2), ("OTHER", 1)])
def test_it_opens_as_nothing_else(vault: Vault, name: str, version: int) -> None:
    sealed = vault.seal("TOKEN", 1, "value")
    with pytest.raises(CannotOpen, match="changed"):
        vault.open(name, version, sealed)


def test_no_changed_byte_is_taken(vault: Vault) -> None:
    sealed = vault.seal("TOKEN", 1, "value")
    for at in range(len(sealed)):
        with pytest.raises(CannotOpen):
            vault.open("TOKEN", 1, sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :])
        with pytest.raises(CannotOpen):
            vault.open("TOKEN", 1, sealed[:at])


def test_another_key_says_so(vault: Vault, tmp_path: Path) -> None:
    sealed = vault.seal("TOKEN", 1, "value")
    vault.path.unlink()
    with pytest.raises(CannotOpen, match="is gone"):
        Vault(tmp_path).open("TOKEN", 1, sealed)
    with pytest.raises(HostSetupError, match="is gone"):
        Vault(tmp_path).seal("TOKEN", 2, "value")
    Vault(tmp_path).make()
    with pytest.raises(CannotOpen, match="another key"):
        Vault(tmp_path).open("TOKEN", 1, sealed)


def test_the_key_file_is_its_owners_alone(vault: Vault) -> None:
    assert vault.path.stat().st_mode & 0o7777 == 0o600
    assert [path.name for path in vault.path.parent.iterdir()] == ["vault.key"], "a half-made file is left"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_key_that_others_can_read_is_refused(vault: Vault, tmp_path: Path, mode: int) -> None:
    vault.path.chmod(mode)
    with pytest.raises(HostSetupError, match="can be read by others") as caught:
        Vault(tmp_path).make()
    assert f"chmod 600 {vault.path}" in str(caught.value.hint)


def test_what_is_no_key_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vault.key"
    for make, words in (
        (lambda: path.symlink_to("/etc/passwd"), "cannot be read"),
        (lambda: path.mkdir(), "is not a file"),
        (lambda: os.mkfifo(path, 0o600), "is not a file"),
        (lambda: keyfiles.write(path, b"short"), "has 5 bytes"),
    ):
        make()
        with pytest.raises(HostSetupError, match=words):
            Vault(tmp_path).make()
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_many_at_once_make_one_key(tmp_path: Path) -> None:
    sealed: list[bytes] = []

    def one() -> None:
        vault = Vault(tmp_path)
        vault.make()
        sealed.append(vault.seal("TOKEN", 1, "value"))

    threads = [threading.Thread(target=one) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [Vault(tmp_path).open("TOKEN", 1, one) for one in sealed] == ["value"] * 16


def test_a_key_file_elsewhere_is_used(tmp_path: Path) -> None:
    elsewhere = Vault(tmp_path / "state", tmp_path / "keys" / "k")
    elsewhere.make()
    assert (tmp_path / "keys" / "k").exists() and not (tmp_path / "state").exists()


BAD = [
    *("", " \n", "a\0b", "\ud800", 7, None, ["CANARY"], {"value": "CANARY"}, {"access_key_id": "CANARY"}),
    *({**AWS, "CANARY": "x"}, {**AWS, "secret_access_key": "CANARY x"}, {**AWS, "AccessKeyId": "CANARY"}),
    *("CANARY" * limits.SECRET_BYTES_MAX, {**AWS, "session_token": "CANARYü"}),
]


@pytest.mark.parametrize("given", BAD)
def test_a_bad_value_is_refused_and_not_repeated(given: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        value_of(given)
    assert "CANARY" not in f"{caught.value} {caught.value.details}"


def test_aws_credentials_in_its_own_words() -> None:
    printed = {
        "Version": 1,
        "AccessKeyId": "A",
        "SecretAccessKey": "B",
        "SessionToken": None,
        "Expiration": "x",
    }
    assert value_of(printed) == {"access_key_id": "A", "secret_access_key": "B"}


@pytest.mark.parametrize("name", ["", "a b", "-x", ".x", "x" * 65, "a/b", "index:host", "ü", "a\n", "a=b"])
def test_a_bad_name_is_refused_and_not_repeated(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_name(name)
    assert not name or repr(name)[1:-1] not in caught.value.message.replace("secret's name", "")


@hypothesis.given(st.text(min_size=1).filter(str.strip))
def test_any_text_is_kept_as_it_is(text: str) -> None:
    try:
        value = value_of(text)
    except InvalidRequestError:
        assert "\0" in text or any(0xD800 <= ord(character) <= 0xDFFF for character in text)
        return
    assert value == text
