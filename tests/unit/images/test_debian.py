"""What the host says about itself, read from texts as it says them."""

from __future__ import annotations

import pytest

from llm4agents.errors import HostSetupError
from llm4agents.images import debian
from llm4agents.images.debian import Source, select_options, select_sources
from llm4agents.images.overlay import sources_list
from llm4agents.images.rootfs import licence_of

TARGETS = """\
http://deb.example/debian/\tDebian\ttrixie\ttrixie\tmain\tamd64
http://deb.example/debian/\tDebian\ttrixie\ttrixie\tmain\tall
http://deb.example/debian/\tDebian\ttrixie\ttrixie\tcontrib\tamd64
http://deb.example/debian/\tDebian\ttrixie-backports\ttrixie-backports\tmain\tamd64
http://deb.example/security/\tDebian\ttrixie-security\tstable-security\tmain\tamd64
http://other.example/\tElse\ttrixie\ttrixie\tmain\tamd64
nonsense
"""


def test_only_debians_own_sources_of_this_release_are_used() -> None:
    assert select_sources(TARGETS, "trixie") == [
        Source("http://deb.example/debian/", "trixie", "main"),
        Source("http://deb.example/security/", "stable-security", "main"),
    ]
    with pytest.raises(HostSetupError, match="apt knows no package list"):
        select_sources(TARGETS, "bookworm")


def test_a_password_in_an_address_stays_on_the_host() -> None:
    text = sources_list([Source("https://user:secret@deb.example/debian/", "trixie", "main")])
    assert text == "deb https://deb.example/debian/ trixie main\n"


def test_only_what_it_takes_to_reach_the_sources_is_passed_on() -> None:
    config = (
        'Acquire::http::Proxy "http://p:3128";\nAcquire::https::Proxy "";\nAcquire::Check-Valid-Until "false";\n'
        'DPkg::Post-Invoke:: "rm -rf /";\nAcquire::http::Proxy-Auto-Detect "/bin/evil";\n'
    )
    assert select_options(config) == [
        'Acquire::http::Proxy "http://p:3128";',
        'Acquire::Check-Valid-Until "false";',
    ]


def test_other_systems_are_refused_by_name() -> None:
    assert debian.host("ID=debian\nVERSION_CODENAME=trixie\n").python == "3.13"
    with pytest.raises(HostSetupError, match=r"this is Ubuntu 24\.04"):
        debian.host('ID=ubuntu\nPRETTY_NAME="Ubuntu 24.04"\nVERSION_CODENAME=noble\n')
    with pytest.raises(HostSetupError, match="this system"):
        debian.host("")


def test_licences_are_those_that_are_stated() -> None:
    text = (
        "Format: https://x\n\nFiles: *\nLicense: GPL-2+\n text\n\nFiles: a\nLicense: MIT\n\nLicense: GPL-2+\n"
    )
    assert licence_of(text) == "GPL-2+, MIT"
    assert licence_of("This is free software.\nLicense: see above\n") is None
