"""`python`: CPython, what data work needs, and the interpreter of run_code, already running."""

from __future__ import annotations

from types import MappingProxyType

from llm4agents.images.catalogue import base
from llm4agents.images.kinds import File, Service, TemplateSpec, WarmStep, WarmUp

RUNNER_DIRECTORY = "/usr/lib/llm4agents/runner"
PYTHON_SOCKET = "/run/llm4agents/python.sock"
PYTHON_READY = "/run/llm4agents/python.ready"
PRELOAD = ("numpy", "pandas", "matplotlib.pyplot", "IPython.core.interactiveshell")
"""What the interpreter has imported before it is frozen; every context is forked from it."""

_WARM_FILE = "/usr/lib/llm4agents/warm.py"
_WARM_CELLS = """\
# What first cells usually do, run once before the freeze; see the interpreter's --warm. Each stands alone.
# %%
import numpy, pandas
print(1 + 1)
41 + 1
# %%
import pandas as pd
_f = pd.DataFrame({"a": range(10), "b": ["x", "y"] * 5, "c": pd.date_range("2025-01-01", periods=10)})
_f.groupby("b").a.mean()
_f.describe()
_f.head()
# %%
import io, pandas as pd
pd.read_csv(io.StringIO("a,b\\n1,2\\n3,4\\n")).sum()
# %%
import matplotlib.pyplot as plt
plt.plot([1, 2, 3])
plt.title("warm")
plt.show()
# %%
import sqlite3
sqlite3.connect(":memory:").execute("select 1").fetchall()
# %%
try:
    raise ValueError("warm")
except ValueError as error:
    print(error)
# %%
!true
"""

_PYTHON_IS_WARM = WarmStep(
    # Its own warm-up goes on after its socket is there, and it says in a file when, and with what problems.
    (
        "/bin/sh",
        "-c",
        f'until [ -e {PYTHON_READY} ]; do sleep 0.2; done; ! grep \'"[^"]*"\\]\' {PYTHON_READY} >&2',
    ),
    timeout_s=180.0,
)

PYTHON = TemplateSpec(
    name="python",
    description="base with CPython, numpy, pandas, matplotlib, scipy, pyarrow, duckdb and SQL drivers",
    languages=("python", "sql"),
    packages=(*base.PACKAGES, "python3", "python3-venv", "python-is-python3"),
    wheels="python",
    drop=(
        "numpy/tests",
        "numpy/*/tests",
        "numpy/f2py/tests",
        "pandas/tests",
        "scipy/*/tests",
        "scipy/*/*/tests",
        "scipy/*/*/*/tests",
        "pyarrow/tests",
        "pyarrow/include",
        "pyarrow/src",
        "pyarrow/includes",
        "matplotlib/tests",
        "mpl_toolkits/*/tests",
        "matplotlib/backends/web_backend",
        "IPython/*/tests",
        "duckdb/experimental/spark",
        "psutil/tests",
        "sqlalchemy/testing",
    ),
    runner=True,
    files=(File(_WARM_FILE, _WARM_CELLS),),
    environment=MappingProxyType(
        {
            **base.ENVIRONMENT,
            "MPLBACKEND": "agg",
            "MPLCONFIGDIR": f"{base.HOME}/.cache/matplotlib",
            "PYTHONUNBUFFERED": "1",
            # One vCPU is the usual shape; a pool of threads beside it only costs time.
            "OPENBLAS_NUM_THREADS": "1",
            # QEMU's processor states no cache, of which every `import numpy` would otherwise complain (KiB).
            "OPENBLAS_L2_SIZE": "512",
            # pandas imports pyarrow, whose allocator's thread would wake up in every idle clone.
            "JE_ARROW_MALLOC_CONF": "background_thread:false",
            "PIP_NO_INPUT": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
    ),
    warm_up=WarmUp(
        services=(
            Service(
                name="python",
                argv=(
                    "/usr/bin/python3",
                    "-I",
                    f"{RUNNER_DIRECTORY}/zygote.py",
                    "--socket",
                    PYTHON_SOCKET,
                    "--preload",
                    ",".join(PRELOAD),
                    "--warm",
                    _WARM_FILE,
                    "--ready",
                    PYTHON_READY,
                ),
                restore_signal=12,  # SIGUSR2: reseed
                ready_socket=PYTHON_SOCKET,
                ready_timeout_s=120.0,
            ),
        ),
        steps=(_PYTHON_IS_WARM, *base.STEPS, WarmStep(("/usr/bin/python3", "-c", "pass"))),
    ),
    build_bytes=4_000_000_000,
    rootfs_bytes=900_000_000,
)
