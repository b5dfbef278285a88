"""Paths that a developer's machine obeys without being asked: what a sandbox must not plant there. Pure.

For: deciding whether a path is one of them (`match`), whatever its case, spelling or depth. Not for: looking at a
disk (links are the caller's to follow, `sdk._landing`), nor for what a project *is*: a Makefile, `package.json`, a test
or CI definition runs what the agent was asked to write, and a list could never say which of it is meant. What is here
is obeyed by programs that were started for something else: a shell, git, an editor that opens a directory, an agent.

A pattern is components with `*`, `?` and `**` (any number of components), matched at any depth; with a leading `/` only
there. What lies below a match matches too.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, Literal

Kind = Literal["file", "directory", "link"]

_SHELL = "shells run it when they start or end"
_GIT = "git runs or obeys it at the next command in that directory"
_HOOKS = "it is run at the next commit or checkout where that tool is installed"
_EDITOR = "editors run what it says when the directory is opened"
_AGENT = "coding agents obey it, or start the programs it names"
_PROMPT = "coding agents read it as instructions"
_SESSION = "it is started with the session or by a timer"
_KEYS = "it decides who may log in, or what ssh and gpg run"
_TOOL = "a package manager or build tool runs what it names, or is sent elsewhere by it"
_CLOUD = "a client runs the programs it names to log in"
_REPL = "an interpreter or debugger runs it when it starts"
_PATH = "programs found there are run in place of the system's"
_DESKTOP = "the desktop opens what it names"
_SYSTEM = "the system runs or obeys it"

PATTERNS: Final[dict[str, tuple[str, ...]]] = {
    _SHELL: (
        ".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".bash_aliases", ".profile", ".inputrc",
        ".zshrc", ".zshenv", ".zprofile", ".zlogin", ".zlogout", ".oh-my-zsh", ".zsh", ".config/zsh", ".kshrc",
        ".mkshrc", ".shrc", ".cshrc", ".tcshrc", ".login", ".logout", ".xonshrc", ".config/xonsh", ".config/fish",
        ".local/share/fish/vendor_conf.d", ".config/nushell", ".config/elvish", ".config/bash*",
        ".config/powershell", "documents/powershell", "documents/windowspowershell", "*profile.ps1", ".envrc",
        ".direnv", ".autoenv", ".autoenv.zsh", "mise.toml", ".mise.toml", "mise.local.toml", ".mise",
        ".config/mise", ".config/starship.toml", ".tmux.conf", ".config/tmux", ".screenrc", ".lessfilter",
        ".config/direnv",
    ),
    _GIT: (
        # `*.git`: also bare repositories and what a worktree or submodule keeps in its own.
        "*.git/hooks", "*.git/config", "*.git/config.worktree", "*.git/commondir", "*.git/gitdir",
        "*.git/modules/**/hooks", "*.git/modules/**/config", "*.git/modules/**/config.worktree",
        "*.git/worktrees/*/config.worktree", "*.git/worktrees/*/commondir", "*.git/worktrees/*/gitdir",
        "*.git/info/attributes", "*.git/objects/info/alternates", "*.git/rebase-merge", "*.git/rebase-apply",
        "*.git/sequencer", ".gitconfig", ".config/git", ".git-credentials", ".git-templates", ".git_template",
        ".hgrc", ".hg/hgrc", ".config/hg", ".bzr/branch/branch.conf", ".jj/repo/config.toml", ".config/jj",
        ".config/lazygit", ".config/gh",
    ),
    _HOOKS: (
        ".husky", ".githooks", ".git-hooks", ".lefthook", ".lefthook-local", ".lefthook*.yml", "lefthook*.yml",
        ".lefthook*.yaml", "lefthook*.yaml", ".pre-commit-config.yaml", ".pre-commit-hooks.yaml",
        ".overcommit.yml",
    ),
    _EDITOR: (
        ".vscode/tasks.json", ".vscode/settings.json", ".vscode/launch.json", ".vscode/extensions",
        ".vscode/mcp.json", ".vscode-server", ".vscode-oss", "*.code-workspace", ".config/code*",
        "application support/code*", "appdata/roaming/code*", ".idea", "*.run.xml", ".fleet", ".zed",
        ".config/zed", ".vs", "*.suo", ".externaltoolbuilders", ".nova", ".devcontainer", ".devcontainer.json",
        ".helix", ".config/helix", ".theia", ".kakrc", ".config/kak", ".vimrc", ".gvimrc", ".exrc", ".nvimrc",
        ".nvim.lua", ".lvimrc", ".local.vimrc", ".vim", ".config/vim", ".config/nvim", ".local/share/nvim/site",
        ".emacs", ".emacs.el", ".emacs.d", ".config/emacs", ".dir-locals.el", ".dir-locals-2.el", ".spacemacs",
        ".doom.d", ".config/doom", ".config/sublime-text*",
        # Editors run the interpreter they find in a project; one that comes from a guest does not work here anyway.
        ".venv/bin", "venv/bin", ".venv/scripts", "venv/scripts",
    ),
    _AGENT: (
        ".mcp.json", "mcp.json", "mcp_config.json", ".claude", ".claude.json", "claude_desktop_config.json",
        ".cursor", ".windsurf", ".codeium", ".codex", ".gemini", ".qwen", ".continue", ".cline", ".clinerules",
        ".roo", ".roomodes", ".kilocode", ".kiro", ".junie", ".augment", ".amazonq", ".aider.conf.yml",
        ".aider*.yml", ".goose", ".config/goose", ".opencode", "opencode.json", "opencode.jsonc",
        ".config/opencode", ".crush.json", "crush.json", ".config/crush", ".amp", ".config/amp", ".factory",
        ".agents", ".agent", ".trae", ".copilot", ".config/github-copilot", ".github/hooks", ".openhands",
        ".devin", ".warp",
    ),
    _PROMPT: (
        "claude.md", "claude.local.md", "agents.md", "agents.override.md", "gemini.md", "qwen.md", ".cursorrules",
        ".windsurfrules", ".roorules*", ".goosehints", ".rules", ".github/copilot-instructions.md",
        ".github/instructions", ".github/agents", ".github/prompts", ".github/chatmodes",
    ),
    _SESSION: (
        ".config/systemd", ".local/share/systemd", ".config/autostart", ".config/autostart-scripts",
        ".kde*/autostart", ".config/plasma-workspace", ".config/environment.d", ".pam_environment", ".xprofile",
        ".xsession", ".xsessionrc", ".xinitrc", ".xserverrc", ".config/i3", ".config/sway", ".config/hypr",
        ".config/openbox", ".config/awesome", ".config/bspwm", ".config/labwc", ".fluxbox", ".xmonad",
        ".config/xmonad", ".config/upstart", ".init", ".local/share/dbus-1", "library/launchagents",
        "library/launchdaemons", "library/startupitems", "start menu/programs/startup", ".crontab",
        ".config/cron", ".forward", ".procmailrc", ".mailcap", ".hammerspoon", ".config/karabiner",
    ),
    _KEYS: (
        ".ssh", "authorized_keys", ".rhosts", ".shosts", ".gnupg", ".password-store", ".netrc", "_netrc",
    ),
    _TOOL: (
        ".npmrc", ".yarnrc", ".yarnrc.yml", ".yarn/releases", ".yarn/plugins", ".pnpmfile.cjs", ".pnpmrc",
        ".config/pnpm", "bunfig.toml", ".bunfig.toml", ".denorc", ".pypirc", "pip.conf", "pip.ini", ".pip",
        ".config/pip", ".config/uv", ".config/pypoetry", ".pydistutils.cfg", ".condarc", ".mambarc",
        ".cargo/config", ".cargo/config.toml", ".cargo/credentials*", ".config/go/env", ".gemrc",
        ".gem/credentials", ".bundle/config", ".m2", ".mvn/extensions.xml", ".mvn/jvm.config",
        ".mvn/maven.config", ".mvn/wrapper", ".gradle/init.d", ".gradle/init.gradle*",
        ".gradle/gradle.properties", ".sbt", ".ivy2", ".composer", ".config/composer", ".config/nuget",
        "nuget.config", ".ansible.cfg", ".ansible/plugins", ".terraformrc", ".terraform.d", ".tofurc",
        ".pulumi/credentials.json", ".ccache/ccache.conf", ".curlrc", ".wgetrc", ".config/nix", ".nix-profile",
        ".guix-profile", ".config/guix",
    ),
    _CLOUD: (
        ".docker/config.json", ".docker/cli-plugins", ".docker/contexts", ".config/containers", ".kube", ".aws",
        ".azure", ".config/gcloud", ".boto", ".oci", ".s3cfg", ".config/rclone", ".config/doctl",
        ".databrickscfg", ".snowflake", ".pgpass", ".my.cnf", ".mylogin.cnf",
    ),
    _REPL: (
        ".psqlrc", ".sqliterc", ".irbrc", ".pryrc", ".pdbrc", ".pdbrc.py", ".pythonrc", ".pythonrc.py",
        ".pythonstartup", ".ipython", ".jupyter", "sitecustomize.py", "usercustomize.py", "site-packages/*.pth",
        "dist-packages/*.pth", ".rprofile", ".renviron", ".julia/config", ".ghci", ".ghc", ".octaverc",
        ".gdbinit", ".gdbearlyinit", ".config/gdb", ".lldbinit", ".lldbinit-*", ".perldb",
        ".node_repl_history.js", ".noderc", ".config/ipython",
    ),
    _PATH: (
        ".local/bin", ".cargo/bin", ".pyenv/shims", ".asdf/shims", ".local/share/mise/shims", ".rbenv/shims",
        ".nodenv/shims",
    ),
    _DESKTOP: (
        ".local/share/applications", ".config/mimeapps.list", ".config/kitty", ".config/alacritty",
        ".alacritty.*", ".config/wezterm", ".wezterm.lua", ".config/ghostty", ".config/terminator",
        ".local/share/kservices5", ".local/share/nautilus*", "autorun.inf", "desktop.ini", "*.lnk", "*.scf",
        "*.library-ms",
    ),
    _SYSTEM: (
        "/etc/profile", "/etc/profile.d", "/etc/bash.bashrc", "/etc/bashrc", "/etc/zsh*", "/etc/zshrc",
        "/etc/zprofile", "/etc/fish", "/etc/environment", "/etc/environment.d", "/etc/ld.so.preload",
        "/etc/ld.so.conf*", "/etc/sudoers*", "/etc/passwd", "/etc/shadow", "/etc/group", "/etc/pam.d",
        "/etc/security", "/etc/ssh", "/etc/cron*", "/etc/anacrontab", "/var/spool/cron", "/etc/systemd",
        "/etc/init*", "/etc/rc*", "/etc/udev", "/etc/xdg", "/etc/apt", "/etc/dpkg", "/etc/gitconfig",
        "/etc/npmrc", "/etc/pip.conf", "/etc/hosts", "/etc/resolv.conf", "/etc/nsswitch.conf", "/usr/bin",
        "/usr/sbin", "/usr/lib*", "/usr/share", "/usr/local/bin", "/usr/local/sbin", "/usr/local/lib*",
        "/usr/local/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/boot", "/opt/homebrew",
    ),
}  # fmt: skip
"""Every pattern, in lower case, by the reason it is here for."""

_GIT_FILE = "a .git that is no directory makes git obey another directory's configuration"
_LEADS = "a link of that name would let other files take the place of protected ones"
OPERATOR = "the operator of the server protects it"
BARE = "beside a HEAD it makes a git repository whose configuration and hooks git obeys"
LINKED = "it links to a protected path"

# Drawn as nothing, and left out of names by HFS+ (git's CVE-2014-9390).
_IGNORED = dict.fromkeys(
    [0x200C, 0x200D, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x206A, 0x2070), 0xFEFF, 0xAD]
)
_SHORT_GIT = re.compile(r"g(?:it)?[0-9a-f]{0,4}~\d+")
"""How Windows calls `.git` where names of 8+3 characters are kept."""


def components(path: str) -> list[str]:
    """The components of `path` as the most forgiving file system would have them: `..` and `//` resolved, case and
    spelling folded, no trailing dots and blanks, no streams, `\\` as good as `/`."""
    found: list[str] = []
    for raw in unicodedata.normalize("NFKC", path.translate(_IGNORED)).replace("\\", "/").split("/"):
        name = raw
        if name not in (".", ".."):
            # Folding may undo a normal form: fold, then normalise again.
            name = unicodedata.normalize("NFKC", name.partition(":")[0].rstrip(". ").casefold())
        if name == ".." and found:
            found.pop()
        elif name and name not in (".", ".."):
            found.append(".git" if _SHORT_GIT.fullmatch(name) else name)
    return found


def match(path: str, extra: Sequence[str] = (), *, kind: Kind = "file", defaults: bool = True) -> str | None:
    """Why `path` (absolute, or relative to anything) is protected; None when it is not.

    `extra`: further patterns; `defaults` False leaves those of this module out. `kind`: what is to be at `path`; a
    link is refused too where it would stand above a protected path.
    """
    names = components(path)
    anchored = path.startswith(("/", "\\"))
    if anchored and names[:1] == ["private"]:
        del names[0]  # as macOS keeps /etc and /var
    if (below := _worktree(names)) is not None:
        names, anchored = below, False
    judges: list[_Rules] = [_rules(tuple(extra))] if extra else []
    if defaults:
        judges.append(_defaults())
    for rules in judges:
        if (reason := rules.match(names, anchored, kind)) is not None:
            return reason
    if defaults and kind != "directory" and names[-1:] == [".git"]:
        return _GIT_FILE
    return None


def problem(pattern: str) -> str | None:
    """What is wrong with a pattern an operator or user gives, or None."""
    if not components(pattern):
        return f"{pattern!r} names nothing"
    if len(pattern) > 1_024 or "\0" in pattern or pattern.count("**") > 4:
        return f"{pattern[:40]!r} is too long, or has more than four **"
    return None


def _worktree(names: list[str]) -> list[str] | None:
    """Coding agents keep whole checkouts in `.claude/worktrees/NAME`: in one, what lies below counts."""
    for at in range(len(names) - 3):
        if names[at : at + 2] == [".claude", "worktrees"]:
            return names[at + 3 :]
    return None


class _Rules:
    """Patterns by what they begin with, since a tree has many paths and few of them come near a pattern."""

    def __init__(self, patterns: Iterable[tuple[str, str]]) -> None:
        self._by_first: dict[str, list[tuple[bool, tuple[str, ...], str]]] = {}
        self._globs: list[tuple[bool, tuple[str, ...], str]] = []
        for pattern, reason in patterns:
            parts = tuple(components(pattern))
            entry = (pattern.startswith("/"), parts, reason)
            if "*" in parts[0] or "?" in parts[0]:
                self._globs.append(entry)
            else:
                self._by_first.setdefault(parts[0], []).append(entry)
        firsts = "|".join(sorted({_regex(parts[0]) for _, parts, _ in self._globs}))
        self._any_glob = re.compile(firsts) if firsts else None

    def match(self, names: list[str], anchored: bool, kind: Kind) -> str | None:
        for at, name in enumerate(names):
            entries = self._by_first.get(name, ())
            if self._any_glob is not None and self._any_glob.fullmatch(name):
                entries = [*entries, *self._globs]
            for top, parts, reason in entries:
                if top and (at or not anchored):
                    continue
                covered = _covers(parts, names[at:])
                if covered is None:
                    return reason
                if covered and kind == "link":
                    return _LEADS
        return None


def _covers(parts: tuple[str, ...], names: list[str]) -> bool | None:
    """None when `names` is or lies below what `parts` say, True when it lies above it, else False."""
    above = False
    ends = {0}
    for part in parts:
        if not ends:
            return False
        if len(names) in ends:
            above = True
        if part == "**":
            ends = set(range(min(ends), len(names) + 1))
            continue
        ends = {at + 1 for at in ends if at < len(names) and _fits(part, names[at])}
    return None if ends else above


def _fits(part: str, name: str) -> bool:
    if "*" not in part and "?" not in part:
        return part == name
    return _compiled(part).fullmatch(name) is not None


@lru_cache(maxsize=4_096)
def _compiled(part: str) -> re.Pattern[str]:
    return re.compile(_regex(part), re.DOTALL)


def _regex(part: str) -> str:
    # Atomic: a name of many characters is not tried in every way (`*a*a*a*`)… each star takes the least that goes on.
    pieces = re.split(r"\*+", part)
    said = [re.escape(piece).replace(r"\?", ".") for piece in pieces]
    if len(said) == 1:
        return said[0]
    middle = "".join(f"(?>.*?{piece})" for piece in said[1:-1])
    return f"{said[0]}{middle}.*{said[-1]}"


@lru_cache(maxsize=1)
def _defaults() -> _Rules:
    return _Rules((pattern, reason) for reason, patterns in PATTERNS.items() for pattern in patterns)


@lru_cache(maxsize=64)
def _rules(extra: tuple[str, ...]) -> _Rules:
    return _Rules((pattern, OPERATOR) for pattern in extra if problem(pattern) is None)
