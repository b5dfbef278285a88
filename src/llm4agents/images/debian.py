"""What this host is and what its package sources offer: the only place that reads os-release and asks apt.

Templates are made of the host's own Debian, from the host's own sources, so nothing here names an address.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from llm4agents.errors import HostSetupError
from llm4agents.images.process import run

SUPPORTED = {"bookworm": (12, "3.11"), "trixie": (13, "3.13")}
"""By codename: Debian's number and the version of its python3."""
_FORMAT = "$(REPO_URI)\t$(ORIGIN)\t$(CODENAME)\t$(RELEASE)\t$(COMPONENT)\t$(ARCHITECTURE)"


@dataclass(frozen=True, slots=True)
class Debian:
    codename: str
    number: int
    python: str
    architecture: str = "amd64"


@dataclass(frozen=True, slots=True)
class Source:
    uri: str
    suite: str
    component: str

    def line(self) -> str:
        return f"deb {self.uri} {self.suite} {self.component}"


def parse_os_release(text: str) -> dict[str, str]:
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {key.strip(): value.strip().strip("\"'") for key, value in pairs}


def host(os_release: str | None = None) -> Debian:
    """This host's Debian. Raises HostSetupError on anything that templates can't be built on."""
    facts = parse_os_release(os_release if os_release is not None else _read(Path("/etc/os-release")))
    codename = facts.get("VERSION_CODENAME", "")
    if facts.get("ID") != "debian" or codename not in SUPPORTED:
        name = facts.get("PRETTY_NAME") or facts.get("ID") or "this system"
        raise HostSetupError(
            f"templates can be built on Debian 12 and 13; this is {name}",
            hint="use a Debian host, a remote server (LLM4AGENTS_URL), or `template import`",
        )
    number, python = SUPPORTED[codename]
    return Debian(codename, number, python)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def select_sources(targets: str, codename: str) -> list[Source]:
    """Of what `apt-get indextargets` lists, Debian's own of that release (itself, updates, security)."""
    suites = {codename, f"{codename}-updates", f"{codename}-security"}
    found: dict[Source, None] = {}
    for line in targets.splitlines():
        fields = line.split("\t")
        if len(fields) != 6:
            continue
        uri, origin, name, release, component, architecture = fields
        if origin == "Debian" and name in suites and component == "main" and architecture in ("amd64", "all"):
            found[Source(uri, release, component)] = None
    if not any(not source.suite.endswith(("-updates", "-security")) for source in found):
        raise HostSetupError(
            f"apt knows no package list of Debian {codename} main",
            hint="as root: apt-get update",
        )
    return list(found)


async def sources(debian: Debian, cwd: Path) -> list[Source]:
    targets = await run(["apt-get", "indextargets", "--format", _FORMAT, "Created-By: Packages"], cwd=cwd)
    return select_sources(targets.decode(), debian.codename)


_PASSED_ON = re.compile(
    r"^Acquire::(?:(?:https?|ftp)::(?:Proxy(?:::[^ ]+)?|Verify-Peer|Verify-Host|CaInfo|CAInfo|Timeout)"
    r'|Check-Valid-Until|Check-Date|Retries|ForceIPv4|ForceIPv6) "[^"]*";$'
)


def select_options(config: str) -> list[str]:
    """Of `apt-config dump`, what it takes to reach the host's sources (proxies, certificates, dates)."""
    return [line for line in config.splitlines() if _PASSED_ON.match(line) and not line.endswith(' "";')]


async def apt_options(cwd: Path) -> list[str]:
    return select_options((await run(["apt-config", "dump"], cwd=cwd)).decode())


def parse_control(text: str) -> dict[str, str]:
    """The fields of one stanza of a control file; continuation lines are joined by newlines."""
    fields: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line[:1] in (" ", "\t") and name:
            fields[name] += "\n" + line.strip()
        elif ":" in line:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
        elif not line.strip() and fields:
            break
    return fields


async def show(package: str, cwd: Path) -> dict[str, str]:
    """The control fields of a package's candidate version. Raises HostSetupError when apt offers none."""
    try:
        text = (await run(["apt-cache", "show", "--no-all-versions", package], cwd=cwd)).decode()
    except HostSetupError:
        text = ""
    fields = parse_control(text)
    if "Version" not in fields:
        raise HostSetupError(f"apt offers no package {package}", hint="as root: apt-get update")
    return fields


async def download(package: str, version: str, directory: Path) -> Path:
    """Fetch one .deb into `directory` through apt, which checks it against the signed lists."""
    argv = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", f"{package}={version}"]
    await run(argv, cwd=directory, needed_bytes=200_000_000)
    found = _debs(directory, package)
    if len(found) != 1:
        raise HostSetupError(f"apt-get download of {package} {version} left {len(found)} files, not one")
    return found[0]


def _debs(directory: Path, package: str) -> list[Path]:
    return list(directory.glob(f"{package}_*.deb"))
