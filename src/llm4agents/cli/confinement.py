"""An isolation report as lines for a person. Pure; what comes from a VMM was escaped by the server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llm4agents.sdk.results import Isolation

Found = Mapping[str, Any]
ENTRIES_SHOWN = 8


def lines(found: Isolation) -> Iterator[str]:
    """A paragraph for each process, then what does not hold and what is missing."""
    for process in found.report.get("processes") or ():
        yield from _process(process, found)
    for words in found.differences:
        yield f"FAIL  {words}"
    for words in found.missing:
        yield f"warn  {words}"
    yield (
        "everything that is promised holds" if found.ok else f"{len(found.differences)} promises do not hold"
    ) + (", as far as this host can give it" if found.ok and found.missing else "")


def _process(process: Found, found: Isolation) -> Iterator[str]:
    what = f" ({found.driver})" if process["role"] == "vmm" else ""
    yield f"{process['role']}{what}: pid {process['pid']}, {process['name']}"
    digest = (process.get("executable_sha256") or "?")[:16]
    yield f"  executable    {process.get('executable') or 'not seen'} sha256:{digest}"
    yield f"  uid, gid      {_numbers(process.get('uids'))}, {_numbers(process.get('gids'))}{_groups(process)}"
    sets = process.get("capabilities")
    held = [f"{name} {_few(caps)}" for name, caps in (sets or {}).items() if caps]
    yield f"  capabilities  {('; '.join(held) or 'none') if sets is not None else 'not seen'}"
    yield f"  seccomp       {_seccomp(process.get('threads') or ())}"
    spaces = process.get("namespaces")
    for words, shared in (("its own", False), ("the server's", True)):
        names = [name for name, space in (spaces or {}).items() if space["shared"] is shared]
        if names:
            yield f"  namespaces    {' '.join(names)}: {words}"
    if (root := process.get("root")) is not None:
        yield f"  root          {_root(root)}"
    if (entries := process.get("descriptors")) is not None:
        kinds = Counter(entry["kind"] for entry in entries)
        yield f"  descriptors   {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}"
    bounds = [
        f"{name} {'-' if value is None else value}" for name, value in (process.get("limits") or {}).items()
    ]
    yield f"  limits        {', '.join(bounds) or 'not seen'}"
    if (group := process.get("cgroup")) is not None:
        own = "the server's" if group["shared"] else group["path"]
        limits = ", ".join(f"{name} {' '.join(value.split())}" for name, value in group["limits"].items())
        yield f"  cgroup        {own}{f' ({limits})' if limits and not group['shared'] else ''}"
    if process["role"] == "vmm" and (said := found.report.get("said")):
        yield f"  jail          {', '.join(f'{name} {value}' for name, value in said.items())}"
    for words in process.get("unseen") or ():
        yield f"  not seen      {words}"


def _groups(process: Found) -> str:
    groups = process.get("groups")
    return f", groups {_numbers(groups)}" if groups else ""


def _numbers(values: Sequence[int] | None) -> str:
    if values is None:
        return "not seen"
    return " ".join(map(str, dict.fromkeys(values)))


def _few(values: Sequence[str]) -> str:
    more = f" and {len(values) - ENTRIES_SHOWN} more" if len(values) > ENTRIES_SHOWN else ""
    return ", ".join(values[:ENTRIES_SHOWN]) + more


def _seccomp(threads: Sequence[Found]) -> str:
    modes = Counter(
        f"{thread['seccomp'] or 'not seen'}"
        + (f" ×{thread['seccomp_filters']}" if thread.get("seccomp_filters") else "")
        + ("" if thread["no_new_privs"] else ", without no_new_privs")
        for thread in threads
    )
    return (
        "; ".join(f"{mode} on {count} thread{'s'[: count > 1]}" for mode, count in modes.items())
        or "not seen"
    )


def _root(root: Found) -> str:
    if root["shared"]:
        return "the server's"
    said = f"its own, {len(root['entries'])}{'+' if root['more'] else ''} entries"
    for name in ("devices", "writable", "special"):
        if root[name]:
            said += f"; {name}: {_few(root[name])}"
    return said
