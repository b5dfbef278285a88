"""Alembic migrations of the store. `llm4agents.store.opening` runs them; there is no alembic.ini."""
