"""Which VMMs this host can run, by proof, and which one a sandbox gets. The only module that knows them all.

Drivers are imported when they are first asked for; each probes once per server (and keeps on disk what took long).
`choose` is pure. Not here: what a VMM needs (its own package says it), what is recorded of it (engine).
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, cast

from llm4agents.config import VMMS, Settings
from llm4agents.errors import HostSetupError, InvalidRequestError
from llm4agents.vmm.base import Capabilities, Driver

Maker = Callable[[Settings], Driver]
LABELS: Final = {"firecracker": "Firecracker", "cloud-hypervisor": "Cloud Hypervisor", "qemu": "QEMU"}
_CLASSES: Final = {
    "firecracker": "llm4agents.vmm.firecracker.driver:FirecrackerDriver",
    "cloud-hypervisor": "llm4agents.vmm.cloud_hypervisor.driver:CloudHypervisorDriver",
    "qemu": "llm4agents.vmm.qemu.driver:QemuDriver",
}
ORDER: Final = ("firecracker", "qemu", "cloud-hypervisor")
"""For an ordinary sandbox, the best first."""
ORDER_NESTED: Final = ("cloud-hypervisor", "qemu", "firecracker")


@dataclass(frozen=True, slots=True)
class Found:
    """What a look at one VMM came to: what it can do here, or (`problem`) why it cannot be used."""

    name: str
    can: Capabilities | None
    problem: HostSetupError | None = None

    def why_not(self, nested: bool) -> str | None:
        """Why it cannot have a sandbox of that kind; None when it can. Pure."""
        if self.can is None:
            return self.problem.message if self.problem is not None else "it was not looked at"
        if nested and not self.can.nested:
            why = (
                f": {self.can.why_not_kvm}" if self.can.accelerator != "kvm" and self.can.why_not_kvm else ""
            )
            return f"it cannot give a sandbox a /dev/kvm that works here{why}"
        return None


def choose(found: Iterable[Found], nested: bool) -> Found | None:
    """The one a sandbox gets that names none: one with KVM before one without, then as ORDER has it. Pure."""
    order = ORDER_NESTED if nested else ORDER
    fit = [one for one in found if one.can is not None and one.why_not(nested) is None]
    fit.sort(key=lambda one: (one.can is None or one.can.accelerator != "kvm", order.index(one.name)))
    return fit[0] if fit else None


def canonical(name: str) -> str:
    """`name` as drivers are called. Raises InvalidRequestError for one that there is not."""
    found = name.strip().lower().replace("_", "-")
    if found not in VMMS:
        raise InvalidRequestError(f"there is no VMM {name!r}", hint=f"one of {', '.join(VMMS)}")
    return found


class Drivers:
    """Every driver of one server. Belongs to one event loop."""

    def __init__(self, settings: Settings, makers: Mapping[str, Maker] | None = None) -> None:
        """`makers`: drivers other than the built-in ones, by name (tests)."""
        self._settings = settings
        self._makers = makers
        self._drivers: dict[str, Driver] = {}
        self._found: dict[str, Found] = {}
        self._looking: dict[str, asyncio.Task[Found]] = {}
        self._picked: dict[tuple[str | None, bool], Driver] = {}

    @property
    def all(self) -> tuple[str, ...]:
        """Names, in the order in which an ordinary sandbox gets them."""
        return ORDER if self._makers is None else tuple(name for name in ORDER if name in self._makers)

    def of(self, name: str) -> Driver:
        """The driver called `name`, whether or not it can be used here.

        Raises HostSetupError for one that this installation does not have.
        """
        found = self._drivers.get(name)
        if found is None:
            found = self._drivers[name] = self._make(name)
        return found

    async def can(self, name: str) -> Capabilities:
        """What that driver can do here. Raises HostSetupError when it cannot be used at all."""
        found = self._found.get(name)
        return (
            found.can if found is not None and found.can is not None else await self.of(name).capabilities()
        )

    async def pick(self, vmm: str | None = None, nested: bool = False) -> Driver:
        """The driver of a new sandbox: `vmm`, else what LLM4AGENTS_VMM names, else by proof.

        After the first time it is a look into a dict: a better one that is installed later is found by the next
        server. Raises InvalidRequestError (no such VMM), HostSetupError (says why not).
        """
        wanted = vmm if vmm is not None else self._settings.vmm
        picked = self._picked.get((wanted, nested))
        if picked is None:
            picked = await self._pick(wanted, nested)
            self._picked[(wanted, nested)] = picked
        return picked

    async def survey(self) -> list[Found]:
        """Every driver looked at, in the order of `all`."""
        return [await self._look(name) for name in self.all]

    async def close(self) -> None:
        """Let go of what they hold; machines live on."""
        for driver in self._drivers.values():
            await driver.close()

    # -- inside -------------------------------------------------------------------------------------------

    async def _pick(self, wanted: str | None, nested: bool) -> Driver:
        if wanted is not None:
            name = canonical(wanted)
            found = await self._look(name)
            if (why := found.why_not(nested)) is not None:
                hint = found.problem.hint if found.problem is not None else None
                raise HostSetupError(
                    f"{LABELS[name]} cannot be used: {why}", hint=hint or "llm4agents doctor", vmm=name
                )
            return self.of(name)
        looked: list[Found] = []
        for name in ORDER_NESTED if nested else ORDER:
            if name in self.all:
                looked.append(await self._look(name))
                # With KVM none after it is better, and need not be looked at.
                if (
                    (best := choose(looked, nested)) is not None
                    and best.can
                    and best.can.accelerator == "kvm"
                ):
                    break
        best = choose(looked, nested)
        if best is not None:
            return self.of(best.name)
        whys = {one.name: one.why_not(nested) for one in looked}
        if nested and any(one.can is not None for one in looked):
            words = "; ".join(f"{LABELS[name]}: {why}" for name, why in whys.items())
            raise HostSetupError(f"no nested sandbox can be made here: {words}", hint="llm4agents doctor")
        # Nothing at all: what is missing is QEMU, which runs wherever Linux does.
        problem = next((one.problem for one in looked if one.name == "qemu"), None)
        if problem is None:
            raise HostSetupError("no VMM can run here", hint="llm4agents doctor", why=whys)
        raise problem

    async def _look(self, name: str) -> Found:
        """Look at one driver; those who ask meanwhile share it. What failed is looked at again by who asks next."""
        found = self._found.get(name)
        if found is not None:
            return found
        task = self._looking.get(name)
        if task is None:
            task = self._looking[name] = asyncio.create_task(self._probe(name))
            task.add_done_callback(lambda _: self._looking.pop(name, None))
        return await asyncio.shield(task)

    async def _probe(self, name: str) -> Found:
        try:
            found = Found(name, await self.of(name).capabilities())
        except HostSetupError as error:
            return Found(name, None, error)
        except OSError as error:
            return Found(name, None, HostSetupError(f"the probe could not run: {error.strerror or error}"))
        self._found[name] = found
        return found

    def _make(self, name: str) -> Driver:
        if self._makers is not None and name in self._makers:
            return self._makers[name](self._settings)
        module, _, attribute = _CLASSES.get(name, "").partition(":")
        if self._makers is not None or not _exists(module):
            raise HostSetupError(
                f"this version of llm4agents has no driver for {LABELS.get(name, name)}", vmm=name
            )
        return cast(Driver, getattr(importlib.import_module(module), attribute)(self._settings))


def _exists(module: str) -> bool:
    try:
        return bool(module) and importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package it would be in
        return False
