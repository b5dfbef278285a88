"""The laboratory for developers (docs/howto/laboratory.md).

python -m tests.lab run [--rebuild] PYTEST-ARGUMENTS…     our tests on Firecracker, in there
python -m tests.lab shell [--rebuild] COMMAND…            a command of the shell, as root, in there
"""

from __future__ import annotations

import json
import sys

from .laboratory import laboratory, to_stderr
from .watch import Patience

RUN_S = 3_000.0
"""Less than the laboratory lives."""


def main(argv: list[str]) -> int:
    if len(argv) < 2 or argv[0] not in ("run", "shell"):
        sys.stderr.write(__doc__ or "")
        return 2
    rebuild, rest = "--rebuild" in argv[1:], [word for word in argv[1:] if word != "--rebuild"]
    with laboratory(rebuild=rebuild, say=to_stderr) as lab:
        if argv[0] == "shell":
            done = lab.shell(" ".join(rest), say=to_stderr)
            return 1 if done.exit_code is None else int(done.exit_code)
        report = lab.run(rest, say=to_stderr, patience=Patience(whole_s=RUN_S))
        sys.stderr.write(
            json.dumps({"seconds": round(report.seconds, 1), "vmms": report.vmms}, indent=1) + "\n"
        )
        return 1 if report.exit_code is None else report.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
