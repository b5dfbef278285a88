"""Which VMM a sandbox gets: the pure decision, and who is asked how often. Drivers here are answers and no more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llm4agents.config import VMMS, Settings, load
from llm4agents.errors import HostSetupError, InvalidRequestError
from llm4agents.vmm.base import Capabilities, Driver
from llm4agents.vmm.choice import ORDER, ORDER_NESTED, Drivers, Found, canonical, choose

KVM = Capabilities("", "1", "kvm", None, True, True, nested=False)
TCG = replace(KVM, accelerator="tcg", why_not_kvm="there is no /dev/kvm", nested=True)


def found(**can: Capabilities | str) -> list[Found]:
    return [
        Found(name.replace("_", "-"), None, HostSetupError(one))
        if isinstance(one, str)
        else Found(name.replace("_", "-"), replace(one, vmm=name))
        for name, one in can.items()
    ]


@pytest.mark.parametrize(
    ("there", "ordinary", "nested"),
    [
        (
            found(firecracker=KVM, qemu=KVM, cloud_hypervisor=replace(KVM, nested=True)),
            ORDER[0],
            ORDER_NESTED[0],
        ),
        (found(firecracker="no jailer", qemu=KVM, cloud_hypervisor="not found"), "qemu", None),
        (found(firecracker="no", qemu=replace(KVM, nested=True), cloud_hypervisor="no"), "qemu", "qemu"),
        (found(firecracker="no KVM", qemu=TCG, cloud_hypervisor="no KVM"), "qemu", "qemu"),
        # One with KVM that is further down is better than one without.
        (found(qemu=TCG, cloud_hypervisor=replace(KVM, nested=True)), "cloud-hypervisor", "cloud-hypervisor"),
        (found(firecracker="no", qemu="not installed", cloud_hypervisor="no"), None, None),
        ([], None, None),
    ],
)
def test_the_choice(there: list[Found], ordinary: str | None, nested: str | None) -> None:
    for wanted, is_nested in ((ordinary, False), (nested, True)):
        best = choose(there, is_nested)
        assert (best.name if best else None) == wanted
        assert best is None or best.why_not(is_nested) is None


def test_every_vmm_has_a_place_in_both_orders() -> None:
    assert sorted(ORDER) == sorted(ORDER_NESTED) == sorted(VMMS)
    assert canonical(" Cloud_Hypervisor ") == "cloud-hypervisor"
    with pytest.raises(InvalidRequestError, match="no VMM 'bochs'"):
        canonical("bochs")


@pytest.mark.parametrize("name", VMMS)
def test_every_driver_is_one_and_is_called_what_it_is(name: str) -> None:
    driver = Drivers(load({"HOME": "/nowhere"})).of(name)
    assert driver.name == name
    wanted = {what for what in vars(Driver) if not what.startswith("_") and callable(getattr(Driver, what))}
    assert wanted and not {what for what in wanted if not callable(getattr(driver, what, None))}


class Answers:
    """A driver that says what it can do, and counts how often it was asked."""

    def __init__(self, name: str, answer: Capabilities | str) -> None:
        self.name, self.answer, self.asked = name, answer, 0

    async def capabilities(self) -> Capabilities:
        self.asked += 1
        await asyncio.sleep(0)
        if isinstance(self.answer, str):
            raise HostSetupError(self.answer, hint=f"install {self.name}")
        return replace(self.answer, vmm=self.name)

    async def close(self) -> None:
        self.asked = -1


Made = dict[str, Answers]


def with_drivers(
    test: Callable[[Drivers, Made], Coroutine[Any, Any, None]], *, vmm: str | None = None, **answers: Any
) -> None:
    async def main() -> None:
        made = {name.replace("_", "-"): Answers(name.replace("_", "-"), one) for name, one in answers.items()}
        settings = replace(load({"HOME": "/nowhere"}), vmm=vmm)
        drivers = Drivers(settings, {name: lambda _, one=one: one for name, one in made.items()})  # type: ignore[misc, return-value]
        await test(drivers, made)
        await drivers.close()
        assert all(one.asked in (-1, 0) for one in made.values()), "every driver that was made is closed"

    asyncio.run(main())


def test_what_is_chosen_is_asked_once_by_a_thousand_creates_at_once() -> None:
    async def test(drivers: Drivers, made: Made) -> None:
        names = {one.name for one in await asyncio.gather(*(drivers.pick() for _ in range(1000)))}
        assert names == {"qemu"}
        # The better one was looked at once for all of them too; what cannot nest is not in the way.
        assert (made["qemu"].asked, made["firecracker"].asked) == (1, 1)
        assert (await drivers.pick()).name == "qemu" and made["firecracker"].asked == 1
        assert (await drivers.can("qemu")).accelerator == "tcg" and made["qemu"].asked == 1

    with_drivers(test, firecracker="KVM is not there", qemu=TCG)


def test_with_kvm_nothing_after_the_best_is_looked_at() -> None:
    async def test(drivers: Drivers, made: Made) -> None:
        assert (await drivers.pick()).name == "firecracker"
        assert made["qemu"].asked == made["cloud-hypervisor"].asked == 0
        assert (await drivers.pick(nested=True)).name == "cloud-hypervisor"

    with_drivers(test, firecracker=KVM, qemu=KVM, cloud_hypervisor=replace(KVM, nested=True))


def test_one_that_is_named_is_that_one_or_an_error_that_says_why() -> None:
    async def test(drivers: Drivers, made: Made) -> None:
        assert (await drivers.pick("qemu")).name == "qemu"
        with pytest.raises(HostSetupError, match="Firecracker cannot be used: no jailer") as told:
            await drivers.pick("firecracker")
        assert told.value.hint == "install firecracker"
        with pytest.raises(HostSetupError, match="QEMU cannot be used: it cannot give a sandbox a /dev/kvm"):
            await drivers.pick("qemu", nested=True)
        with pytest.raises(
            HostSetupError, match=r"no nested sandbox can be made here: .*QEMU: it cannot give"
        ):
            await drivers.pick(nested=True)
        with pytest.raises(HostSetupError, match="no driver for Cloud Hypervisor"):
            drivers.of("cloud-hypervisor")
        # What is installed while the server runs is found.
        made["firecracker"].answer = KVM
        assert (await drivers.pick("firecracker")).name == "firecracker"

    with_drivers(test, firecracker="no jailer", qemu=KVM)


def test_the_setting_names_one_for_who_names_none() -> None:
    async def test(drivers: Drivers, made: Made) -> None:
        assert (await drivers.pick()).name == "qemu"
        assert (await drivers.pick("firecracker")).name == "firecracker"

    with_drivers(test, vmm="qemu", firecracker=KVM, qemu=KVM)


def test_without_any_the_error_is_what_to_install() -> None:
    async def test(drivers: Drivers, made: Made) -> None:
        with pytest.raises(HostSetupError, match="QEMU is not installed"):
            await drivers.pick()
        assert [one.why_not(False) for one in await drivers.survey()] == ["no KVM", "QEMU is not installed"]

    with_drivers(test, firecracker="no KVM", qemu="QEMU is not installed")


def test_the_settings(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path)}
    plain: Settings = load(env)
    assert (plain.vmm, plain.nested) == (None, "allow")
    told = load({**env, "LLM4AGENTS_VMM": "cloud-hypervisor", "LLM4AGENTS_NESTED": "refuse"})
    assert (told.vmm, told.nested) == ("cloud-hypervisor", "refuse")
    for name in ("VMM", "NESTED"):
        with pytest.raises(InvalidRequestError, match=f"LLM4AGENTS_{name}"):
            load({**env, f"LLM4AGENTS_{name}": "bochs"})
