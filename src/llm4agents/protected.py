"""Paths that code running elsewhere obeys: what a sandbox must not plant on a host. Pure."""

from __future__ import annotations
