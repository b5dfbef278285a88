"""What weakens a host is said, and nothing else is."""

from __future__ import annotations

import pytest

from llm4agents.engine import hardening

GOOD = {
    "/proc/swaps": "Filename\tType\tSize\tUsed\tPriority",
    "/sys/kernel/mm/ksm/run": "0",
    "/sys/devices/system/cpu/smt/active": "0",
    "/sys/module/kvm_intel/parameters/nested": "N",
    "/sys/devices/system/cpu/vulnerabilities/mds": "Mitigation: Clear CPU buffers; SMT disabled",
    "/sys/devices/system/cpu/vulnerabilities/l1tf": "Not affected",
    "/proc/sys/vm/overcommit_memory": "0",
    "/proc/sys/fs/inotify/max_user_instances": "8192",
    "/sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory hugetlb pids",
}


def found(changes: dict[str, str | None], *, kvm: bool = True) -> list[str]:
    files = {**GOOD, **changes}

    def names(directory: str) -> list[str]:
        return sorted(path.rpartition("/")[2] for path in files if path.startswith(f"{directory}/"))

    return list(hardening.found(files.get, names, kvm=kvm))


def test_a_host_that_is_set_up_has_nothing_said_of_it() -> None:
    assert found({}) == []


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("/proc/swaps", "Filename\n/dev/sda2 partition 1 0 -2", "swap is on"),
        ("/sys/kernel/mm/ksm/run", "1", "KSM merges"),
        ("/sys/devices/system/cpu/smt/active", "1", "SMT is on"),
        ("/sys/module/kvm_intel/parameters/nested", "Y", "kvm_intel lets guests be hosts"),
        ("/sys/module/kvm_amd/parameters/nested", "1", "kvm_amd lets guests be hosts"),
        ("/sys/devices/system/cpu/vulnerabilities/mds", "Vulnerable: no microcode", "vulnerable: mds"),
        ("/proc/sys/vm/overcommit_memory", "2", "overcommit_memory=2"),
        ("/proc/sys/fs/inotify/max_user_instances", "128", "beyond 128 sandboxes"),
        ("/sys/fs/cgroup/cgroup.controllers", "cpu io", "no cgroup v2"),
        ("/sys/fs/cgroup/cgroup.controllers", None, "no cgroup v2"),
    ],
)
def test_each_weakness_is_said_alone(path: str, text: str | None, words: str) -> None:
    (said,) = found({path: text})
    assert words in said


def test_what_of_the_jail_a_host_cannot_give() -> None:
    files: dict[str, str] = {"/proc/sys/user/max_user_namespaces": "127000"}
    assert list(hardening.jail(files.get, root=True, landlock=4)) == []
    (said,) = hardening.jail(files.get, root=True, landlock=0)
    assert "landlock" in said
    (said,) = hardening.jail(files.get, root=False, landlock=4)
    assert "only root" in said
    files["/proc/sys/kernel/apparmor_restrict_unprivileged_userns"] = "1"
    *_, said = hardening.jail(files.get, root=False, landlock=4)
    assert "kernel.apparmor_restrict_unprivileged_userns=1" in said
    assert list(hardening.jail(files.get, root=True, landlock=4)) == [], "root needs none"


def test_the_processor_of_an_emulated_guest_is_not_there() -> None:
    bad = {
        "/sys/devices/system/cpu/smt/active": "1",
        "/sys/module/kvm_amd/parameters/nested": "1",
        "/sys/devices/system/cpu/vulnerabilities/mds": "Vulnerable",
    }
    assert found(bad, kvm=False) == []


def test_this_host_is_read_without_an_error() -> None:
    for words in hardening.here(kvm=True):
        assert words.isprintable()
