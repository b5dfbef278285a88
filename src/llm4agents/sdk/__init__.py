"""The client: what users import through `llm4agents`. Speaks HTTP (docs/design/interfaces.md), nothing else.

`_async/` is written by hand; `_sync/` is generated from it by scripts/unasync.py. What differs between the
two is in `_runtime.py`; what neither needs I/O for is in `_wire.py` and `results.py`; finding or starting the
local server is `_local.py`. Import from `llm4agents`, not from here.
"""

from __future__ import annotations
