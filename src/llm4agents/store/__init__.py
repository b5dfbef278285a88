"""What outlives a server: sandboxes and their append-only events. SQLite now, through SQLAlchemy Core."""

from llm4agents.store.opening import open_store
from llm4agents.store.store import SandboxRow, Store

__all__ = ["SandboxRow", "Store", "open_store"]
