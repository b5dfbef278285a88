"""Run benchmarks and put their figures into SPECIFICATION.md, in the column of the accelerator that was used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPECIFICATION = ROOT / "SPECIFICATION.md"
BENCHES = ("tti", "files", "boot", "compute")
COLUMNS = {"tcg": 3, "kvm": 4}
"""Cells of a row: key, promise, TCG, KVM, held by (split at `|`, the first part is empty)."""


def run(name: str) -> dict[str, object]:
    print(f"== bench {name}", file=sys.stderr)
    out = subprocess.run(
        [ROOT / "scripts" / "bench", name], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    found = json.loads(out.strip().splitlines()[-1])
    print(json.dumps(found))
    return dict(found)


def figure(found: dict[str, object], path: list[str]) -> str | None:
    value: object = found
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, dict) and "p50" in value:
        return f"p50 {value['p50']:g}, p95 {value['p95']:g} (n={value['n']})"
    if isinstance(value, dict) and "factor" in value:
        return f"×{value['factor']:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return f"{value:g}"


def fill(text: str, results: dict[str, dict[str, object]], accelerator: str) -> str:
    """The specification with every row whose key is `bench.path` filled in."""
    lines = []
    for line in text.splitlines():
        cells = line.split("|")
        key = cells[1].strip().strip("`").split(".") if len(cells) > 5 else []
        if key and key[0] in results:
            seen = figure(results[key[0]], key[1:])
            if seen is not None:
                cells[COLUMNS[accelerator]] = f" {seen} "
        lines.append("|".join(cells))
    return "\n".join(lines) + "\n"


def main() -> None:
    names = sys.argv[1:] or list(BENCHES)
    if unknown := [name for name in names if name not in BENCHES]:
        raise SystemExit(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHES)}")
    doctor = subprocess.run(
        [ROOT / ".venv" / "bin" / "llm4agents", "doctor", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    accelerator = str(json.loads(doctor.stdout)["accelerator"])
    for name in names:
        # Written after each: a later one that fails loses nothing.
        SPECIFICATION.write_text(fill(SPECIFICATION.read_text(), {name: run(name)}, accelerator))


if __name__ == "__main__":
    main()
