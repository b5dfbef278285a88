"""What is promised of the repository itself: locks, documents that tell the truth, nothing of anybody's machine."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from llm4agents.cli.app import GROUPS
from llm4agents.config import Settings

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LOCKS = [ROOT / "requirements.lock", *sorted((ROOT / "src/llm4agents").rglob("*.lock"))]
# Said in two words, since no file of the repository may say them in one.
REGISTRIES = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("crates", "io/"),
        ("debian", "org"),
        ("npmjs", "org"),
    )
]
# Reserved names, names without a dot, numbers, and the two files that are others' words.
HOSTS = re.compile(r"[\w-]*|\d+(\.\d+){3}|([\w-]+\.)*(example(\.(com|org|net))?|localhost)")
VERBATIM = {"LICENSE", "Cargo.lock"}
MADE = re.compile(
    r"(^|/)(__pycache__|target|dist|build|demo-out|_bin|\.venv|\.\w+_cache|\.hypothesis)/"
    r"|\.(pyc|so|whl|o|img|qcow2)$|^\.bootstrap\.lock$"
)


@cache
def _tracked() -> dict[str, str]:
    """Text of every file of the repository, by path: what git tracks, or what there is in a copy without git."""
    # safe.directory: the checkout may be another user's (a container's mount).
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files"]
    if (ROOT / ".git").exists():
        names = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    else:
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*")]
        names = [name for name in names if not MADE.search(name)]
    return {
        name: (ROOT / name).read_bytes().decode("utf-8", "replace")
        for name in names
        if (ROOT / name).is_file()
    }


def _ids(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


# -- locks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lock", LOCKS, ids=_ids(LOCKS))
def test_a_lock_pins_everything_by_hash_and_names_no_index(lock: Path) -> None:
    entries = re.split(r"\n(?=[a-z0-9])", lock.read_text())
    pinned = [entry for entry in entries if not entry.startswith("#")]
    assert pinned
    for entry in pinned:
        assert re.match(r"[a-z0-9._-]+(\[[a-z,]+\])?==\S+", entry), entry
        assert "--hash=sha256:" in entry, entry
    assert "://" not in lock.read_text()
    assert not re.search(
        r"^\s*--?(index|extra-index|i\b|f\b|find-links|trusted)", lock.read_text(), re.MULTILINE
    )


def test_the_lock_has_every_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = project["project"]["dependencies"] + project["dependency-groups"]["dev"]
    locked = {line.split("==")[0] for line in LOCKS[0].read_text().splitlines() if "==" in line}
    names = {re.split(r"[^A-Za-z0-9._-]", text)[0].lower().replace("_", "-") for text in declared}
    assert names <= locked


# -- nothing of a machine or a registry -------------------------------------------------------------------------------


def test_no_file_names_a_registry_or_a_foreign_host() -> None:
    bad = []
    for name, text in _tracked().items():
        if Path(name).name in VERBATIM:
            continue
        bad += [f"{name}: {word}" for word in REGISTRIES if word in text]
        hosts = re.findall(r"https?://(?:[^/\s@\"']*@)?([\w.-]*)", text)
        bad += [f"{name}: {host}" for host in hosts if not HOSTS.fullmatch(host.rstrip("."))]
    assert not bad


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    # /home/user is the guest's.
    path = re.compile(r"(?<![\w./~-])/(?:work|Users|home/(?!user\b|a\b|x\b)[\w.-]+)/[\w.-]+")
    bad = [f"{name}: {match[0]}" for name, text in _tracked().items() for match in path.finditer(text)]
    assert not bad


def test_nothing_made_is_tracked() -> None:
    assert not [name for name in _tracked() if MADE.search(name)]


def test_no_tracked_file_is_large() -> None:
    generated = {"clients/openapi.json"}  # by scripts/; a test compares it with what the server says
    large = {name: len(text) for name, text in _tracked().items() if len(text) > 300_000}
    assert not {name: size for name, size in large.items() if name not in generated}


# -- scripts and modules ----------------------------------------------------------------------------------------------


def test_scripts_are_executable_and_say_how_they_are_run() -> None:
    for name in _tracked():
        if not name.startswith(("scripts/", ".ci/")):
            continue
        path = ROOT / name
        if path.suffix in ("", ".sh") and path.name != "lib.sh":
            assert path.stat().st_mode & 0o111 == 0o111, f"{name} is not executable"
            assert path.read_text().startswith("#!/usr/bin/env "), f"{name} has no #! line"
        elif path.stat().st_mode & 0o111:
            assert path.read_text().startswith("#!/usr/bin/env "), f"{name} is executable without a #! line"


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        name
        for name, text in _tracked().items()
        if name.endswith(".py") and text.strip() and not ast.get_docstring(ast.parse(text))
    ]
    assert not silent


def test_every_crate_module_says_what_it_is_for() -> None:
    rust = {n: t for n, t in _tracked().items() if n.endswith(".rs") and "/fuzz_targets/" not in n}
    assert not [name for name, text in rust.items() if not text.lstrip().startswith("//!")]


# -- documents --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS, ids=_ids(DOCUMENTS))
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
    assert not [t for t in targets if "://" not in t and not (document.parent / t).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=_ids(DOCUMENTS))
def test_files_that_documents_name_exist(document: Path) -> None:
    named = re.findall(
        r"(?<![\w/.-])((?:docs|scripts|tests|agent|shim|src)/[\w./-]*\w)", document.read_text()
    )
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=_ids(DOCUMENTS))
def test_tests_and_benches_that_documents_name_exist(document: Path) -> None:
    text = document.read_text()
    sources = {n: t for n, t in _tracked().items() if n.startswith(("tests/", "agent/", "shim/"))}
    for path, test in re.findall(r"(tests/[\w/]+\.py)::(\w+)", text):
        assert re.search(rf"^\s*(async )?def {test}\(", sources[path], re.MULTILINE), f"{path}::{test}"
    everything = "\n".join([*sources.values(), *sources])
    for test in set(re.findall(r"\btest_\w+", text)):
        assert re.search(rf"\b{test}(\b|_)" if test.endswith("_") else rf"\b{test}\b", everything), test
    for bench in set(re.findall(r"scripts/bench ([a-z]\w*)", text)):
        assert f"tests/bench/bench_{bench}.py" in sources, f"scripts/bench {bench}"


def test_there_is_one_unit_and_documents_print_no_other() -> None:
    """The one that is tried (tests/reliability/test_systemd.py): a copy in a page is soon another."""
    assert "ExecStart=" in (ROOT / "deploy" / "llm4agents.service").read_text()
    assert not [str(document) for document in DOCUMENTS if "ExecStart=" in document.read_text()]


def test_the_settings_are_all_told_and_no_other() -> None:
    page = (ROOT / "docs/reference/settings.md").read_text()
    told = re.findall(r"`LLM4AGENTS_([A-Z_]+)`", page)
    renamed = {"run_dir": "RUN"}
    assert sorted(told) == sorted(renamed.get(f.name, f.name.upper()) for f in fields(Settings))


def _commands() -> list[tuple[str, ...]]:
    """Every `llm4agents …` of the README, as (command, options…); a group's command as "group command"."""
    readme = (ROOT / "README.md").read_text()
    code = "\n".join(re.findall(r"```sh\n(.*?)```", readme, re.DOTALL) + re.findall(r"`([^`\n]+)`", readme))
    found = set()
    for line in code.splitlines():
        for part in re.split(r";|#|&&|\|", line):
            words = part.split()
            if words[:1] in (["llm4agents"], ["l4a"]) and len(words) > 1:
                mine = words[1 : words.index("--")] if "--" in words else words[1:]
                size = 2 if mine[0] in GROUPS and len(mine) > 1 else 1
                options = [word for word in mine[size:] if re.fullmatch(r"--?[a-z][a-z-]*", word)]
                found.add((" ".join(mine[:size]), *options))
    return sorted(found)


def test_the_readme_shows_commands() -> None:
    assert {"run", "create", "exec", "doctor"} <= {command for command, *_ in _commands()}


@pytest.mark.parametrize("command", _commands(), ids=" ".join)
def test_commands_of_the_readme_exist(command: tuple[str, ...]) -> None:
    name, *options = command
    done = subprocess.run(
        [sys.executable, "-m", "llm4agents", *name.split(), "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: llm4agents " + name in done.stdout
    for option in options:
        assert re.search(rf"(^|[\s,]){re.escape(option)}\b", done.stdout), f"{name} has no {option}"


def test_nginx_takes_the_configuration_that_is_told(tmp_path: Path) -> None:
    nginx = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if nginx is None:
        pytest.skip("there is no nginx here")
    told = (ROOT / "docs/howto/behind-a-proxy.md").read_text()
    server = told.partition("```nginx\n")[2].partition("```")[0]
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=sbx.example.com -keyout sbx.key -out sbx.pem"
    )
    subprocess.run(command.split(), cwd=tmp_path, capture_output=True, check=True)
    # Its own places, and a port that an ordinary user may have; all else as told.
    server = server.replace("/etc/ssl/", f"{tmp_path}/").replace("listen 443 ", "listen 127.0.0.1:4430 ")
    temporary = "".join(
        f"{name}_temp_path {tmp_path}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (tmp_path / "nginx.conf").write_text(
        f"pid {tmp_path}/pid;\nerror_log stderr;\nevents {{}}\nhttp {{\naccess_log off;\n{temporary}{server}}}\n"
    )
    command = f"{nginx} -t -p {tmp_path} -c nginx.conf -e stderr"
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
