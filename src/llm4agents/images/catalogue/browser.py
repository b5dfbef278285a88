"""`browser`: Chromium without a screen, already up when a sandbox begins; DevTools on a port of the guest's loopback.

It is Chromium's headless shell, which Playwright and Puppeteer use too where no window is asked for: the whole browser
(`chromium --headless=new`) draws windows, bars and menus that nobody sees, and in emulation each page took ten times as
long. No page is open in the frozen machine.

The network service ends as a clone wakes, before anybody can reach it, and so does any renderer; they come anew when
they are needed. What they had drawn at random before the freeze would be the same in every clone.
"""

from __future__ import annotations

from llm4agents.images.catalogue import base
from llm4agents.images.kinds import File, Service, TemplateSpec, WarmStep, WarmUp

BROWSER_PORT = 9222
BROWSER_SCRIPT = "/usr/lib/llm4agents/browser"
"""Keeps one up: [PORT [PROFILE]]."""
_PROFILE = f"{base.HOME}/.config/llm4agents-browser"

# bash, and nothing else: no process has to be started in a clone that has just woken.
_SUPERVISOR = f"""\
#!/bin/bash
# [PORT [PROFILE]]: keeps Chromium up. SIGUSR2: a clone has woken; what holds random state of before the freeze ends
# and comes anew.
port=${{1:-{BROWSER_PORT}}} profile=${{2:-{_PROFILE}}}
anew() {{
    local file words pid state turns
    # It stands still until it can only see that its service has gone: a page that is asked for at once would fail.
    kill -STOP "$browser" 2>/dev/null
    for file in /proc/[0-9]*/cmdline; do
        {{ mapfile -d '' words < "$file"; }} 2>/dev/null || continue
        case " ${{words[*]}} " in
        *" --utility-sub-type=network.mojom.NetworkService "* | *" --type=renderer "*)
            pid=${{file#/proc/}} pid=${{pid%/cmdline}}
            kill -KILL "$pid" 2>/dev/null
            for ((turns = 0; turns < 2000; turns++)); do
                {{ read -r _ _ state _ < "/proc/$pid/stat"; }} 2>/dev/null || break
                [ "$state" = Z ] && break
            done
            ;;
        esac
    done
    kill -CONT "$browser" 2>/dev/null
}}
trap anew USR2
trap 'kill "$browser" 2>/dev/null; exit 0' TERM INT
while :; do
    rm -f "$profile"/Singleton*
    /usr/lib/chromium/chromium-headless-shell \\
        --remote-debugging-port="$port" \\
        --user-data-dir="$profile" \\
        --disable-features=SpareRendererForSitePerProcess \\
        --disable-breakpad \\
        --disable-gpu \\
        --hide-scrollbars \\
        --mute-audio \\
        --password-store=basic \\
        --window-size=1280,800 &
    browser=$!
    while kill -0 "$browser" 2>/dev/null; do wait "$browser"; done
    sleep 1
done
"""

_IS_UP = WarmStep(
    (
        "/bin/bash",
        "-c",
        f"until curl -fsS -m 5 http://127.0.0.1:{BROWSER_PORT}/json/version 2>/dev/null; do sleep 0.5; done",
    ),
    timeout_s=180.0,
)

# A page is opened and closed again, so that what a first page needs has been read and run once.
_A_PAGE = WarmStep(
    (
        "/bin/bash",
        "-ec",
        f"at=http://127.0.0.1:{BROWSER_PORT}/json\n"
        'found=$(curl -fsS -m 60 -X PUT "$at/new?data:text/html,<p>warm")\n'
        '[[ $found =~ \'"id": "\'([0-9A-F]+) ]]\n'
        "sleep 2\n"
        'curl -fsS -m 60 "$at/close/${BASH_REMATCH[1]}"\n'
        f"curl -fsS -m 60 http://127.0.0.1:{BROWSER_PORT}/json/version\n",
    ),
    timeout_s=180.0,
)

BROWSER = TemplateSpec(
    name="browser",
    description=f"base with Chromium already up, without a screen: DevTools on port {BROWSER_PORT}",
    packages=(
        *base.PACKAGES,
        "chromium-headless-shell",
        "chromium-sandbox",
        "fonts-dejavu-core",
        "fonts-liberation",
        "fonts-noto-color-emoji",
    ),
    vcpus=1,
    memory_mib=2_048,
    files=(File(BROWSER_SCRIPT, _SUPERVISOR, 0o755),),
    environment=base.ENVIRONMENT,
    warm_up=WarmUp(
        services=(
            Service(name="browser", argv=(BROWSER_SCRIPT,), cwd=base.HOME, restore_signal=12),
        ),  # SIGUSR2
        steps=(*base.STEPS, _IS_UP, _A_PAGE),
    ),
    build_bytes=5_000_000_000,
    rootfs_bytes=1_000_000_000,
)
