"""Playwright for a test: the driver (Node and the library) out of its pinned wheel, kept by content in the cache.

Its own browsers are not fetched; it is told where one is. Not for what is done with it: `run` takes a script.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "playwright==1.65.2"
SHA256 = "58932d35f56767ab7ebcdd3d4a733bfb3e62a1a5bc43c08e28b9fa9b3e61cf33"


def driver(cache: Path) -> Path:
    """Directory with `node` and `package`, fetched by pip if it is not there. `cache`: a directory of ours."""
    place = cache / f"playwright-{SHA256}"
    if place.is_dir():
        return place
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as tmp:
        lock = Path(tmp) / "lock"
        lock.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        argv += ["--platform", "manylinux1_x86_64", "--require-hashes", "--dest", tmp, "-r", str(lock)]
        subprocess.run(argv, check=True)
        (wheel,) = Path(tmp).glob("*.whl")
        assert hashlib.sha256(wheel.read_bytes()).hexdigest() == SHA256
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.startswith("playwright/driver/"):
                    archive.extract(member, tmp)
        found = Path(tmp) / "playwright" / "driver"
        (found / "node").chmod(0o755)
        try:
            found.rename(place)
        except OSError:  # another run of the tests was first
            shutil.rmtree(found)
    return place


def run(at: Path, script: str, *words: str, timeout_s: float = 120) -> Any:
    """Run JavaScript that sees `chromium` and `words`; what it returns, which is JSON."""
    source = (
        f"const {{ chromium }} = require({json.dumps(str(at / 'package'))}); const words = process.argv.slice(1);"
        f"(async () => {{ {script} }})().then((found) => {{ console.log(JSON.stringify(found)); process.exit(0); }},"
        " (error) => { console.error(error); process.exit(1); });"
    )
    argv = [str(at / "node"), "-e", source, "--", *words]
    with tempfile.TemporaryDirectory() as tmp:  # where it keeps downloads of a browser it was connected to
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env={**os.environ, "TMPDIR": tmp},
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
