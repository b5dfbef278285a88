"""A real sandbox in the lab whose root is the attacker, and what a case asks of it and of the barrier about it."""

from __future__ import annotations

import ast
import inspect
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.barrier.attacks import kit
from tests.barrier.lab import Lab
from tests.barrier.world import WORLD, Mark
from tests.support import Node, eventually

PORT = 7_777
GATEWAY = "llm4agents.barrier.gateway"
INTERCEPTOR = "llm4agents.barrier.intercept"


def source_of(*functions: Callable[..., Any], **constants: Any) -> str:
    """For `Guest.run_source`: functions that use each other, and the constants they use."""
    lines = [f"{name} = {value!r}" for name, value in constants.items()]
    return "\n".join([*lines, *(textwrap.dedent(inspect.getsource(one)) for one in functions)])


class Guest:
    """One sandbox. `run` executes functions in it as root; `network` sets its policy; `audit` reads the record."""

    def __init__(self, node: Node, lab: Lab, network: Any = "none", *, template: str = "python") -> None:
        self.node, self.lab = node, lab
        self.id = node.create(template, network=network)
        self.arm()

    def arm(self) -> None:
        """The kit into the guest, and its service started."""
        for path, source in (
            ("/root/kit.py", Path(kit.__file__).read_bytes()),
            ("/root/lab-ca.pem", self.lab.authority.certificate.read_bytes()),
        ):
            answer = self.node.http.put(
                f"/v1/sandboxes/{self.id}/files", params={"path": path, "user": "root"}, content=source
            )
            assert answer.status_code < 300, answer.text
        self.node.call(
            "POST",
            f"/v1/sandboxes/{self.id}/processes",
            json={"argv": ["python3", "-I", "/root/kit.py", str(PORT)], "user": "root", "id": "kit"},
        )
        eventually(self._answers, 30)

    def _answers(self) -> bool:
        answer = self.node.http.post(self._kit, content=repr((None, "checksum", (b"",), {})))
        return answer.status_code == 200

    @property
    def _kit(self) -> str:
        return f"/v1/sandboxes/{self.id}/ports/{PORT}/"

    def run(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """`function(*args, **named)` inside the guest. It may use what the kit exports, and itself alone; arguments and
        answer are literals."""
        source = None if function.__module__ == kit.__name__ else source_of(function)
        return self.run_source(source, function.__name__, *args, **named)

    def run_source(self, source: str | None, name: str, *args: Any, **named: Any) -> Any:
        """The function `name` of `source` (None: of the kit)."""
        answer = self.node.http.post(self._kit, content=repr((source, name, args, named)))
        assert answer.status_code == 200, answer.text
        done, value = ast.literal_eval(answer.text)
        assert done, f"in the guest: {value}"
        return value

    # -- the barrier about it

    def network(self, value: Any) -> dict[str, Any]:
        """A new policy, in force when this returns."""
        answer = self.node.call("PUT", f"/v1/sandboxes/{self.id}/network", json={"network": value})
        return dict(answer)

    def records(self, since: float = 0.0) -> list[dict[str, Any]]:
        answer = self.node.call("GET", f"/v1/sandboxes/{self.id}/network/log", params={"limit": 10_000})
        records: list[dict[str, Any]] = answer["data"]
        return [one for one in records if one.get("at", 0) >= since]

    def audit(self, since: float, **what: Any) -> dict[str, Any]:
        """The first record since then with these values (a callable judges), waited for."""

        def fits(record: Mapping[str, Any]) -> bool:
            return all(
                value(record.get(name)) if callable(value) else record.get(name) == value
                for name, value in what.items()
            )

        def first() -> dict[str, Any] | None:
            return next((record for record in self.records(since) if fits(record)), None)

        try:
            return dict(eventually(first))
        except AssertionError:
            raise AssertionError(f"no record {what} among {self.records(since)[-20:]}") from None

    def kill(self) -> None:
        self.node.call("DELETE", f"/v1/sandboxes/{self.id}")


class Case:
    """One attack: what was there before it, and that nothing came of it."""

    def __init__(self, guest: Guest) -> None:
        self.guest, self.lab = guest, guest.lab
        self.mark: Mark = self.lab.mark()
        self.at = time.time()

    def again(self) -> None:
        """From here on it is another attempt."""
        self.mark, self.at = self.lab.mark(), time.time()

    def nothing_arrived(self, *but_at: str, resolving: tuple[str, ...] = ()) -> None:
        """No packet left the host (but for `but_at`, and queries of the host for the names `resolving`), and no
        listener was reached."""
        self.lab.settle()
        packets = self.lab.left(self.mark, WORLD, *but_at)
        assert not packets, f"left the host: {[str(one) for one in packets]}"
        asked = {one.name for one in self.lab.asked(self.mark)} - set(resolving)
        assert not asked, f"the host asked for {asked}"
        arrived = [one for one in self.lab.arrived(self.mark) if one.address not in but_at]
        assert not arrived, f"reached: {arrived}"

    def denied(self, **what: Any) -> dict[str, Any]:
        """The audit shows the attempt as denied."""
        return self.guest.audit(self.at, verdict="deny", **what)

    def allowed(self, **what: Any) -> dict[str, Any]:
        return self.guest.audit(self.at, verdict="allow", **what)
