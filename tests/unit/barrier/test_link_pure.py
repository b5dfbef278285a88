"""The ruleset as text, and the words for what a host lacks."""

import errno
import re

import pytest

from llm4agents import limits
from llm4agents.barrier.link import nft
from llm4agents.barrier.link.problems import Step, System, explain

USER, ROOT = System(root=False), System(root=True)


def test_every_chain_ends_in_a_refusal_or_is_a_known_pass() -> None:
    text = nft.ruleset()
    hooked = re.findall(r"type \w+ hook (\w+) [^;]*; policy (\w+);", text)
    assert dict(hooked) == {
        "ingress": "drop",
        "prerouting": "accept",  # nat, which only rewrites what the chain before let through
        "input": "drop",
        "forward": "drop",
        "output": "drop",
    }
    assert "hook prerouting priority mangle; policy drop" in text
    assert set(re.findall(r'log prefix "([a-z0-9]+)"', text)) == set(nft.PREFIXES)
    assert text.count(nft.MANY) == text.count(f"mod {limits.PACKET_LOG_MANY}") > 0
    assert all(chain in text for chain in (f"chain {name} {{" for name in re.findall(r"goto (\w+)", text)))
    assert all(len(prefix + nft.MANY) < 64 for prefix in nft.PREFIXES)


@pytest.mark.parametrize(
    ("step", "number", "system", "words"),
    [
        ("nft", errno.ENOENT, ROOT, "apt-get install nftables"),
        ("nft", 0, ROOT, "nf_tables"),
        ("tun", errno.ENOENT, USER, "modprobe tun"),
        ("tun", errno.EACCES, USER, "chmod 0666 /dev/net/tun"),
        ("tun", errno.EPERM, ROOT, "--device /dev/net/tun"),
        ("tap", errno.EPERM, USER, "CAP_NET_ADMIN"),
        ("packet log", errno.EPROTONOSUPPORT, ROOT, "modprobe nfnetlink_log"),
        ("network namespace", errno.EPERM, ROOT, "CAP_SYS_ADMIN"),
        ("network namespace", errno.ENOSPC, ROOT, "user.max_net_namespaces"),
        ("user namespace", errno.EPERM, USER, "seccomp"),
        ("user namespace", errno.EPERM, USER, "pivot_root"),
        (
            "user namespace",
            errno.EPERM,
            System(False, clone_sysctl="0"),
            "kernel.unprivileged_userns_clone=1",
        ),
        (
            "user namespace",
            errno.EPERM,
            System(False, apparmor_sysctl="1"),
            "kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ("user namespace", errno.ENOSPC, System(False, namespaces_max="0"), "user.max_user_namespaces"),
        ("sockets", errno.EMFILE, ROOT, "Too many open files"),
    ],
)
def test_a_problem_says_what_to_do(step: Step, number: int, system: System, words: str) -> None:
    text = explain(step, number, system, "what nft said")
    assert words in text
    assert "\n" not in text and len(text) < 300
    if step in ("user namespace", "tun") and not system.root and number != errno.ENOENT:
        assert "run the server as root" in text
