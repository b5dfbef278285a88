"""`console`, `events`, `usage`, `top`: what a server tells of its sandboxes."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llm4agents.cli import options

if TYPE_CHECKING:
    from rich.table import Table

EVERY_S = 2.0


def console(
    id: Annotated[str, typer.Argument(metavar="ID", help="A sandbox, or a unique beginning of its id.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until it has ended.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Show what a sandbox's server and console have said."""
    from llm4agents.cli import ids, output
    from llm4agents.sdk._sync.observe import Observer

    with Observer() as observer:
        for line in observer.logs(ids.resolve(id), follow=follow):
            if json:
                _line(line)
            elif line.get("type") == "console":
                print(output.plain(line["text"]), end="", flush=True)
            else:
                more = {k: v for k, v in line.items() if k not in ("type", "at", "event") and v is not None}
                words = " ".join(f"{name}={value}" for name, value in more.items())
                print(output.plain(f"{line.get('at')} {line.get('event')} {words}"), flush=True)


def events(
    after: Annotated[int | None, typer.Option(help="Only behind this cursor (an event's id).")] = None,
    sandbox: Annotated[str | None, typer.Option(help="Only of this sandbox.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Show what happened to sandboxes; with --follow as it happens."""
    from llm4agents.cli import ids, output
    from llm4agents.sdk._sync.observe import Observer

    which = None if sandbox is None else ids.resolve(sandbox)
    with Observer() as observer:
        for event in observer.events(after, sandbox=which, follow=follow):
            if json:
                _line(event)
                continue
            moved = f"{event['from'] or 'new'} → {event['to']}"
            reason = f"  ({event['reason']})" if event.get("reason") else ""
            text = f"{event['id']:>6}  {output.when(event['at'])}  {event['sandbox']}  {moved}{reason}"
            print(output.plain(text), flush=True)


def usage(
    sandbox: Annotated[str | None, typer.Argument(metavar="[ID]", help="Only of this sandbox.")] = None,
    rows: Annotated[bool, typer.Option("--rows", help="Every stretch instead of the sums.")] = False,
    json: options.Json = False,
) -> None:
    """Show what sandboxes have used: time running and paused."""
    from llm4agents.cli import ids, output
    from llm4agents.sdk._sync.observe import Observer

    which = None if sandbox is None else ids.resolve(sandbox)
    with Observer() as observer:
        if rows:
            found = list(observer.usage(which))
            if json:
                output.emit({"usage": found})
                return
            shown = [
                (
                    row["key"],
                    row["state"],
                    output.when(row["from_ns"] / 1e9),
                    f"{row['duration_ns'] / 1e9:.3f}",
                    row["vcpus"],
                    row["memory_mib"],
                    output.size(row["disk_bytes"]),
                )
                for row in found
            ]
            output.table(("KEY", "STATE", "FROM", "SECONDS", "VCPUS", "MIB", "DISK"), shown)
            return
        totals = observer.usage_totals(which)
    if json:
        output.emit({"usage": totals})
        return
    sums = [
        (
            row["sandbox"],
            row["state"],
            f"{row['duration_ns'] / 1e9:.1f}",
            f"{row['vcpu_ns'] / 1e9:.1f}",
            f"{row['memory_mib_ns'] / 1024e9:.1f}",
        )
        for row in totals
    ]
    output.table(("SANDBOX", "STATE", "SECONDS", "VCPU·S", "GIB·S"), sums)


def top(
    once: Annotated[bool, typer.Option("--once", help="Once, and leave.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.2)] = EVERY_S,
    json: options.Json = False,
) -> None:
    """Show what sandboxes take now, live (q quits)."""
    from llm4agents.cli import output
    from llm4agents.sdk._sync.observe import Observer

    with Observer() as observer:
        if once or json or not sys.stdout.isatty():
            if json:
                output.emit(observer.top())
            else:
                head, rows = _figures(_look(observer), None)
                print(head)
                output.table(_COLUMNS, rows)
            return
        _live(observer, interval)


_COLUMNS = ("SANDBOX", "TEMPLATE", "STATE", "CPU%", "MEM", "OF MIB", "CALLS", "IDLE S")


def _look(observer: Any) -> dict[str, Any]:
    """What there is now, and `at`: the node's clock, or this machine's for who is not told of the node."""
    seen: dict[str, Any] = observer.top()
    return {**seen, "at": seen["node"]["at"] if seen["node"] else time.time()}


def _live(observer: Any, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live

    before: dict[str, Any] | None = None
    with _Keys() as keys, Live(console=Console(), screen=True, auto_refresh=False) as live:
        while True:
            now = _look(observer)
            live.update(_drawn(*_figures(now, before)), refresh=True)
            before = now
            if keys.quit_within(interval):
                return


def _drawn(head: str, rows: list[tuple[Any, ...]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    drawn = Table(*_COLUMNS, box=None, header_style="bold", title=Text(head), title_justify="left")
    for row in rows:
        drawn.add_row(*(Text("-" if cell is None else str(cell)) for cell in row))
    return drawn


def _figures(now: dict[str, Any], before: dict[str, Any] | None) -> tuple[str, list[tuple[Any, ...]]]:
    """A line about the node, and the rows, the busiest first. CPU% needs an earlier look: else of its whole life."""
    from llm4agents.cli.output import size

    node = now["node"]
    earlier = {row["id"]: row for row in (before or {}).get("data", ())}
    passed = now["at"] - before["at"] if before else 0.0
    states = node["sandboxes"] if node else Counter(row["state"] for row in now["data"])
    head = ", ".join(f"{count} {state}" for state, count in states.items() if count) or "no sandboxes"
    if node:  # else it is a project's key, which sees its own sandboxes and nothing of the node
        held = node["admission"]
        ready = sum(shelf["ready"] for shelf in node["pool"])
        head += (
            f"; load {node['load1']:.1f} of {node['cores']} cores; "
            f"{size(held['held_bytes'])} of {size(held['total_bytes'])} set aside; "
            + (f"pool {ready} ready; " if node["pool"] else "")
            + f"server {size(node['server_rss_bytes'])}"
        )

    def cpu(row: dict[str, Any]) -> float | None:
        if row["cpu_s"] is None:
            return None
        was = earlier.get(row["id"], {}).get("cpu_s")
        if was is not None and passed > 0:
            return float(max(0.0, (row["cpu_s"] - was) / passed * 100))
        return float(row["cpu_s"] / max(1.0, now["at"] - row["created_at"]) * 100)

    found = sorted(((cpu(row), row) for row in now["data"]), key=lambda pair: -(pair[0] or -1.0))
    rows = [
        (
            row["id"],
            row["template"],
            row["state"],
            None if used is None else f"{used:.1f}",
            size(row["pss_bytes"]),
            row["memory_mib"],
            row["calls"],
            None if row["idle_s"] is None else f"{row['idle_s']:.0f}",
        )
        for used, row in found
    ]
    return head, rows


class _Keys:
    """The terminal's keys, one at a time and not shown. q, Ctrl-C and Ctrl-D quit."""

    def __enter__(self) -> _Keys:
        import termios
        import tty

        self._was: Any = None
        if sys.stdin.isatty():
            self._was = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(self, *_: object) -> None:
        import termios

        if self._was is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._was)

    def quit_within(self, seconds: float) -> bool:
        import os
        import select

        if self._was is None:
            time.sleep(seconds)
            return False
        end = time.monotonic() + seconds
        try:
            while (left := end - time.monotonic()) > 0:
                if select.select([sys.stdin], [], [], left)[0] and os.read(sys.stdin.fileno(), 1) in (
                    b"q",
                    b"\4",
                    b"",
                ):
                    return True
        except KeyboardInterrupt:
            return True
        return False


def _line(value: Any) -> None:
    from llm4agents.cli import output

    print(output.as_json(value), flush=True)
