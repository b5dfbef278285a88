"""`base`: a small Debian, and what every template has of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from llm4agents.images.kinds import TemplateSpec, WarmStep, WarmUp

HOME = "/home/user"
TRUST: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        (
            "SSL_CERT_FILE",
            "REQUESTS_CA_BUNDLE",
            "PIP_CERT",
            "NODE_EXTRA_CA_CERTS",
            "CURL_CA_BUNDLE",
            "GIT_SSL_CAINFO",
            "AWS_CA_BUNDLE",
            "CARGO_HTTP_CAINFO",
        ),
        "/etc/ssl/certs/ca-certificates.crt",
    )
)
"""What programs that bring their own list of certificates look at instead: the system's (`images.trust`)."""

ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "PATH": f"{HOME}/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "TERM": "xterm-256color",
        "PAGER": "cat",
        "DEBIAN_FRONTEND": "noninteractive",
        # What brings its own list lacks the certificates that the host trusts beside the public ones, and the node's.
        **TRUST,
    }
)

PACKAGES = (
    "bash",
    "ca-certificates",
    "curl",
    "file",
    "git",
    "less",
    "nano",
    "netbase",
    "passwd",
    "procps",
    "tzdata",
    "unzip",
    "xz-utils",
    "zip",
)

STEPS = (
    WarmStep(("/bin/true",)),
    WarmStep(("/bin/true",), user="root"),
    WarmStep(("/bin/sh", "-c", "true")),
    WarmStep(("/bin/bash", "-lc", "ls -la / /tmp >/dev/null; cat /etc/os-release >/dev/null; id >/dev/null")),
    WarmStep(
        (
            "/bin/bash",
            "-c",
            "echo x | grep x | sed s/x/y/ | head -1 >/dev/null; find /etc -maxdepth 1 >/dev/null",
        )
    ),
    WarmStep(("/usr/bin/git", "--version")),
    WarmStep(("/usr/bin/curl", "--version")),
)

BASE = TemplateSpec(
    name="base",
    description="a small Debian with shell, coreutils, git and curl",
    packages=PACKAGES,
    environment=ENVIRONMENT,
    warm_up=WarmUp(steps=STEPS),
)
