"""Finding, starting and replacing the local server, with real processes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from llm4agents import (
    HostSetupError,
    InvalidRequestError,
    Sandbox,
    ServerUnavailableError,
    UnsupportedPlatformError,
    VersionMismatchError,
    config,
    limits,
)
from llm4agents.config import Settings
from llm4agents.sdk import _local, _wire
from llm4agents.sdk._sync.transport import Transport


def forget(settings: Settings) -> None:
    _local.forget(settings)


def test_the_first_call_starts_one_in_private(settings: Settings, starts: Any) -> None:
    info = _local.ensure(settings)
    assert starts() == [info["pid"]]
    assert stat.S_IMODE(settings.run_dir.stat().st_mode) == 0o700
    assert os.getsid(info["pid"]) == info["pid"]
    assert Path(f"/proc/{info['pid']}/cwd").readlink() == Path("/")
    links = {os.readlink(f"/proc/{info['pid']}/fd/{fd}") for fd in (0, 1, 2)}
    assert links == {"/dev/null", str(settings.server_log)}
    assert _local.ensure(settings) is info


def test_descriptors_of_the_client_are_not_inherited(settings: Settings, tmp_path: Path) -> None:
    held = os.open(tmp_path / "mine", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(held, True)
    try:
        info = _local.ensure(settings)
        open_files = {os.readlink(entry) for entry in Path(f"/proc/{info['pid']}/fd").iterdir()}
        assert str(tmp_path / "mine") not in open_files
    finally:
        os.close(held)


def test_many_clients_at_once_start_one_server(settings: Settings, starts: Any) -> None:
    server = str(Path(__file__).with_name("contract_server.py"))
    code = (
        "import sys; from llm4agents.sdk import _local; from llm4agents.config import settings\n"
        f"_local.server_command = lambda: [sys.executable, {server!r}]\n"
        "print(_local.ensure(settings())['pid'])"
    )
    clients = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(4)]
    pids = {client.communicate(timeout=60)[0] for client in clients}
    assert len(pids) == 1
    assert len(starts()) == 1


def test_threads_of_one_process_start_one_server(settings: Settings, starts: Any) -> None:
    threads = [threading.Thread(target=_local.ensure, args=(settings,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(starts()) == 1


def test_autostart_off_says_how_to_start(settings: Settings, monkeypatch: Any, starts: Any) -> None:
    monkeypatch.setenv("LLM4AGENTS_AUTOSTART", "0")
    config.settings.cache_clear()
    with pytest.raises(ServerUnavailableError, match="llm4agents server start"):
        Sandbox()
    assert starts() == []
    assert not settings.run_dir.exists()


def test_a_server_that_fails_gives_its_own_words(settings: Settings, monkeypatch: Any) -> None:
    monkeypatch.setenv("CONTRACT_FAIL", "store")
    with pytest.raises(VersionMismatchError, match=r"version 9\.9.*upgrade") as caught:
        _local.ensure(settings)
    assert str(settings.server_log) in str(caught.value)


def test_a_server_that_dies_silently_gives_the_end_of_its_log(settings: Settings, monkeypatch: Any) -> None:
    settings.state.mkdir()
    settings.server_log.write_text("an old story\n")
    monkeypatch.setenv("CONTRACT_FAIL", "silent")
    with pytest.raises(ServerUnavailableError, match="ended with code 1") as caught:
        _local.ensure(settings)
    assert "looking around" in str(caught.value)
    assert "an old story" not in str(caught.value)
    assert str(settings.server_log) in str(caught.value)


def test_a_server_that_never_answers_has_a_deadline(settings: Settings, monkeypatch: Any) -> None:
    monkeypatch.setattr(limits, "SERVER_START_TIMEOUT_S", 0.5)
    monkeypatch.setattr(_local, "server_command", lambda: ["sleep", "2"])
    with pytest.raises(ServerUnavailableError, match=r"did not answer within 0\.5 s"):
        _local.ensure(settings)


def test_an_older_server_hands_over(settings: Settings, monkeypatch: Any, starts: Any) -> None:
    monkeypatch.setenv("CONTRACT_VERSION", "0.0.9")
    old = _local.start(settings)
    monkeypatch.delenv("CONTRACT_VERSION")
    forget(settings)
    new = _local.ensure(settings)
    assert new["pid"] != old["pid"]
    assert starts() == [old["pid"], new["pid"]]


def test_a_newer_server_is_left_alone(settings: Settings, monkeypatch: Any, starts: Any) -> None:
    monkeypatch.setenv("CONTRACT_VERSION", "9.0.0")
    _local.start(settings)
    forget(settings)
    with pytest.raises(VersionMismatchError, match="newer than this client"):
        _local.ensure(settings)
    assert len(starts()) == 1


def test_a_server_that_left_is_followed_by_another(settings: Settings, starts: Any) -> None:
    way = Transport(settings)
    assert way.json("GET", "/v1/du")["total_bytes"] == 2048
    assert _local.stop(settings, keep=False)
    assert not _local.stop(settings, keep=False)
    assert way.json("GET", "/v1/du")["total_bytes"] == 2048
    assert len(starts()) == 2


def test_another_s_run_directory_is_refused(settings: Settings) -> None:
    settings.run_dir.mkdir(mode=0o777)
    settings.run_dir.chmod(0o777)
    with pytest.raises(HostSetupError, match="not a private directory"):
        _local.ensure(settings)


def test_a_run_directory_of_ours_that_others_could_read_is_closed(settings: Settings) -> None:
    settings.run_dir.mkdir()
    settings.run_dir.chmod(0o755)
    _local.ensure(settings)
    assert stat.S_IMODE(settings.run_dir.stat().st_mode) == 0o700


def test_a_link_is_no_run_directory(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    settings.run_dir.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HostSetupError, match="not a private directory"):
        _local.ensure(settings)


def test_a_socket_path_too_long_is_said(settings: Settings, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("LLM4AGENTS_RUN", str(tmp_path / ("r" * 120)))
    config.settings.cache_clear()
    with pytest.raises(InvalidRequestError, match="LLM4AGENTS_RUN"):
        Sandbox.list()


def test_elsewhere_a_url_is_needed(settings: Settings, monkeypatch: Any) -> None:
    monkeypatch.setattr(_wire.sys, "platform", "darwin")
    with pytest.raises(UnsupportedPlatformError, match="set LLM4AGENTS_URL"):
        Sandbox()


def test_no_remote_server_is_unavailable_and_none_is_started(
    settings: Settings, monkeypatch: Any, starts: Any
) -> None:
    monkeypatch.setenv("LLM4AGENTS_URL", "http://127.0.0.1:9")
    config.settings.cache_clear()
    with pytest.raises(ServerUnavailableError, match="LLM4AGENTS_URL"):
        Sandbox.list()
    assert starts() == []
    monkeypatch.setenv("LLM4AGENTS_URL", "nonsense")
    config.settings.cache_clear()
    with pytest.raises(InvalidRequestError, match="not a URL"):
        Sandbox.list()
