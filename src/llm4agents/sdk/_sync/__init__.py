# Generated from _async/__init__.py by scripts/unasync.py: change that file, then run the script.
"""The client, generated from `_sync` by scripts/unasync.py."""
