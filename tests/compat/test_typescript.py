"""The TypeScript client as its users get it: packed, installed from the package, typed, against a real server."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llm4agents.config import settings
from tests.support import Node

pytestmark = pytest.mark.vm
ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "clients" / "typescript"


def run(*argv: str, cwd: Path, timeout: float = 300, **env: str) -> str:
    done = subprocess.run(
        argv,
        cwd=cwd,
        env={**os.environ, "NO_COLOR": "1", **env},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{' '.join(argv)}:\n{done.stdout[-6_000:]}\n{done.stderr[-4_000:]}"
    return done.stdout


def sources() -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "clients"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in names.stdout.splitlines()]


@pytest.fixture(scope="module")
def built() -> Path:
    """A directory in the cache in which the package is built and, beside it, installed by a user of its own."""
    files = sources()
    digest = hashlib.sha256(b"".join(str(path).encode() + path.read_bytes() for path in files)).hexdigest()
    root = settings().cache / "build" / f"typescript-{digest[:20]}"
    if (root / "user" / "done").exists():
        return root
    shutil.rmtree(root, ignore_errors=True)
    root.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=root.parent))
    try:
        for path in files:
            copy = work / path.relative_to(ROOT / "clients")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        client = work / "typescript"
        run("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", cwd=client)
        run("npm", "run", "build", cwd=client)
        packed = json.loads(run("npm", "pack", "--json", "--ignore-scripts", cwd=client))
        user = work / "user"
        shutil.copytree(client / "test", user / "test")
        shutil.copyfile(client / "tsconfig.json", user / "tsconfig.json")
        shutil.copyfile(client / "tsconfig.test.json", user / "tsconfig.test.json")
        (user / "package.json").write_text('{"name": "user", "private": true, "type": "module"}\n')
        (user / "node_modules").mkdir()
        # As published: nothing of the source tree but what the package holds.
        run("tar", "-xzf", str(client / packed[0]["filename"]), cwd=user)
        (user / "package").rename(user / "node_modules" / "llm4agents")
        for name in ("@types", "undici-types"):
            shutil.copytree(client / "node_modules" / name, user / "node_modules" / name)
        run("node", str(client / "node_modules/typescript/bin/tsc"), "-p", "tsconfig.test.json", cwd=user)
        (user / "done").touch()
        shutil.rmtree(client / "node_modules")
        work.rename(root)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return root


def test_the_package_holds_what_it_should(built: Path) -> None:
    package = built / "user" / "node_modules" / "llm4agents"
    files = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    assert {"package.json", "README.md", "dist/index.js", "dist/index.d.ts", "dist/openapi.d.ts"} <= files
    assert not [
        name for name in files if not name.startswith("dist/") and name not in ("package.json", "README.md")
    ]
    assert "dependencies" not in json.loads((package / "package.json").read_text())


def test_it_does_everything_against_a_real_server(built: Path, nodes: Callable[..., Node]) -> None:
    node = nodes(LLM4AGENTS_LISTEN="127.0.0.1:0").start()
    address = node.call("GET", "/v1/server")["listen"].rpartition("/")[2]
    command = [sys.executable, "-m", "llm4agents", "key", "create", "--name", "typescript", "--json"]
    made = subprocess.run(command, env=dict(node.env), cwd="/", capture_output=True, text=True, timeout=60)
    key: dict[str, Any] = json.loads(made.stdout)
    tests = sorted(str(path) for path in (built / "user" / "build" / "test").glob("*.test.js"))
    said = run(
        "node",
        "--test",
        *tests,
        cwd=built / "user",
        timeout=500,
        LLM4AGENTS_URL=f"http://{address}",
        LLM4AGENTS_API_KEY=key["key"],
    )
    assert "# fail 0" in said or "ℹ fail 0" in said, said[-4_000:]
