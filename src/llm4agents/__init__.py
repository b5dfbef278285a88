"""LLM4Agents sandbox: every sandbox is a microVM cloned from a frozen, warmed machine."""

from __future__ import annotations

__version__ = "0.1.0"
