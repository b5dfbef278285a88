"""What this host's apt, pip, npm, cargo and go are set up to use, asked of the tools themselves.

Reads, and runs the tools; makes no HTTP request of its own (probe.py), decides nothing. No host is named here: also
defaults are asked for. The tools see the server's environment and an empty directory.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import json
import netrc
import re
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm4agents import limits
from llm4agents.barrier.packages.index import Found, Index, Login, expand, place, toml

_APT_FORMAT = "$(REPO_URI)\t$(RELEASE)\t$(COMPONENT)\t$(ORIGIN)\t$(CODENAME)\t$(SITE)"
NPMRC = "/etc/llm4agents/npmrc"
CARGO_CONFIG = "/.cargo/config.toml"
"""Cargo looks in every directory above a project's, so in the root."""
_SMALL_CRATE = "cfg-if"


class ToolError(Exception):
    """A tool is not here, or did not say what it was asked; the text says which."""


async def run(argv: list[str], env: Mapping[str, str], cwd: Path, *, errors: bool = False) -> str:
    """Its standard output (with `errors`, its standard error, whatever its exit). Raises ToolError."""
    if shutil.which(argv[0], path=env.get("PATH")) is None:
        raise ToolError("not installed")
    process = await asyncio.create_subprocess_exec(
        *argv,
        env={**env, "LC_ALL": "C", "COLUMNS": "400"},
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), limits.PACKAGE_TOOL_TIMEOUT_S)
    except TimeoutError:
        raise ToolError(f"{argv[0]} said nothing for {limits.PACKAGE_TOOL_TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if errors:
        return err.decode(errors="replace")
    if process.returncode:
        # Not its words: they may quote a configuration with a password in it.
        raise ToolError(f"`{' '.join(argv[:4])}` failed with {process.returncode}")
    return out.decode(errors="replace")


# apt


def apt_sources(text: str) -> list[tuple[str, str, str]]:
    """(URI, suite, component) of what `apt-get indextargets` lists in our format, each once."""
    found: dict[tuple[str, str, str], None] = {}
    for line in text.splitlines():
        fields = line.split("\t")
        if len(fields) >= 3 and fields[0]:
            found[(fields[0], fields[1], fields[2])] = None
    return list(found)


def apt_logins(text: str) -> list[tuple[str, Login]]:
    """(HOST[:PORT][/PATH], login) of an auth.conf."""
    found = []
    for part in re.split(r"(?:^|\s)machine\s+", re.sub(r"(?m)^\s*#.*$", "", text))[1:]:
        words = part.split()
        pairs = dict(zip(words[1::2], words[2::2], strict=False))
        if words and "login" in pairs:
            found.append((words[0], Login(pairs["login"], pairs.get("password", ""))))
    return found


async def apt(env: Mapping[str, str], cwd: Path) -> Found:
    found = Found()
    listed = await run(["apt-get", "indextargets", "--format", _APT_FORMAT, "Created-By: Packages"], env, cwd)
    etc = dict(
        line.rstrip(";").split(" ", 1)
        for line in (await run(["apt-config", "dump"], env, cwd)).splitlines()
        if line.startswith(("Dir ", "Dir::Etc ", "Dir::Etc::netrc"))
    )
    root, sub = etc.get("Dir", '"/"').strip('"'), etc.get("Dir::Etc", '"etc/apt"').strip('"')
    base = Path(root) / sub
    logins: list[tuple[str, Login]] = []
    parts = base / "auth.conf.d"
    for path in [base / "auth.conf", *(sorted(parts.glob("*.conf")) if parts.is_dir() else ())]:
        try:
            logins += apt_logins(path.read_text())
        except OSError:
            continue  # (readable by root alone, or not there)
    try:
        shown = await run(["apt-cache", "show", "--no-all-versions", "base-files"], env, cwd)
    except ToolError:
        shown = ""
    pool = re.search(r"(?m)^Filename: (\S+)$", shown)
    lines: dict[str, None] = {}
    seen: dict[str, Index] = {}
    for uri, suite, component in apt_sources(listed):
        try:
            where, login = place(uri if uri.endswith("/") else uri + "/")
        except ValueError as error:
            found.skipped.append(f"apt: {error}")
            continue
        for machine, other in logins:
            host, slash, path = re.sub(r"^https?://", "", machine).partition("/")
            name = where.host if ":" not in host else f"{where.host}:{where.port}"
            if login is None and host == name and where.path.startswith(slash + path):
                login = other
        url = where.url()
        if url not in seen:
            probes = (f"dists/{suite}/InRelease", *((pool[1],) if pool else ()))
            seen[url] = Index("apt", "apt", where, login, probes)
        lines[f"deb {where.guest_url()} {suite} {component}"] = None
    found.indexes = list(seen.values())
    if lines:
        found.files["/etc/apt/sources.list"] = "".join(f"{line}\n" for line in lines)
    return found


# pip


def pip_settings(text: str) -> dict[str, str]:
    """Options of `pip config list`, those for `install` and of the environment over the global ones."""
    ranks: dict[str, tuple[int, str]] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"(global|install|download|:env:)\.([a-z-]+)=(.*)", line)
        if match is None:
            continue
        try:
            value = str(ast.literal_eval(match[3]))
        except (ValueError, SyntaxError):
            continue
        rank = ("global", "download", "install", ":env:").index(match[1])
        if rank >= ranks.get(match[2], (-1, ""))[0]:
            ranks[match[2]] = (rank, value)
    return {key: value for key, (_, value) in ranks.items()}


def pip_default(text: str) -> str | None:
    """The index that `pip install --help` says is used without configuration."""
    match = re.search(r"--index-url <url>.*?\(default\s+(https?://\S+?)\)", " ".join(text.split()))
    return match[1] if match else None


async def pip(env: Mapping[str, str], cwd: Path) -> Found:
    found = Found()
    argv = next(
        (
            argv
            for argv in (["pip3"], ["pip"], ["python3", "-m", "pip"])
            if shutil.which(argv[0], path=env.get("PATH"))
        ),
        ["pip"],
    )
    settings = pip_settings(await run([*argv, "config", "list"], env, cwd))
    urls: list[tuple[str, bool]] = []
    no_index = settings.get("no-index", "").lower() in ("1", "true", "yes", "on")
    if not no_index:
        index = settings.get("index-url")
        if index is None:
            clean = {k: v for k, v in env.items() if not k.upper().startswith("PIP_")}
            index = pip_default(await run([*argv, "install", "--help"], clean, cwd))
        if index is None:
            found.skipped.append("pip: it does not say which index it uses")
        else:
            urls.append((index, False))
        urls += [(url, False) for url in settings.get("extra-index-url", "").split()]
    urls += [(url, True) for url in settings.get("find-links", "").split() if "://" in url]
    logins = _netrc(env)
    shown: dict[bool, list[str]] = {False: [], True: []}
    for url, is_links in urls:
        try:
            where, login = place(url if is_links or url.endswith("/") else url + "/")
        except ValueError as error:
            found.skipped.append(f"pip: {error}")
            continue
        login = login or logins.get(where.host)
        shown[is_links].append(where.guest_url())
        kind = ("pip", "links", ("",)) if is_links else ("pip", "simple", ("pip/", "setuptools/", "wheel/"))
        found.indexes.append(Index(kind[0], kind[1], where, login, kind[2]))  # type: ignore[arg-type]
    if shown[False]:
        found.environment["PIP_INDEX_URL"] = shown[False][0]
        if shown[False][1:]:
            found.environment["PIP_EXTRA_INDEX_URL"] = " ".join(shown[False][1:])
    if no_index and shown[True]:
        found.environment["PIP_NO_INDEX"] = "1"
    if shown[True]:
        found.environment["PIP_FIND_LINKS"] = " ".join(shown[True])
    plain = {i.place.guest_url().split("/")[2] for i in found.indexes if i.place.scheme == "http"}
    if plain:
        found.environment["PIP_TRUSTED_HOST"] = " ".join(sorted(plain))
    return found


def _netrc(env: Mapping[str, str]) -> dict[str, Login]:
    path = Path(env.get("NETRC") or Path(env.get("HOME") or "/") / ".netrc")
    try:
        hosts = netrc.netrc(str(path)).hosts
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return {}
    return {host: Login(user or account, word) for host, (user, account, word) in hosts.items() if word}


# npm


def npm_logins(texts: list[str], env: Mapping[str, str]) -> dict[str, Login]:
    """By `//host/path/` (and "" for the default registry), from the texts of npmrc files, later ones winning."""
    raw: dict[str, dict[str, str]] = {}
    for text in texts:
        for line in text.splitlines():
            key, equals, value = line.strip().partition("=")
            match = re.fullmatch(r"(//.+?/?):(_authToken|_auth|username|_password)", key.strip())
            where, name = (match[1], match[2]) if match else ("", key.strip())
            if equals and name in ("_authToken", "_auth", "username", "_password"):
                raw.setdefault(where if not where or where.endswith("/") else where + "/", {})[name] = expand(
                    value.strip().strip("\"'"), env
                )
    found = {}
    for where, words in raw.items():
        if "_authToken" in words:
            found[where] = Login(None, words["_authToken"], "Bearer")
        elif "_auth" in words:
            found[where] = Login(None, words["_auth"], "Basic")
        elif "username" in words and "_password" in words:
            try:
                word = base64.b64decode(words["_password"]).decode()
            except ValueError:
                continue
            found[where] = Login(words["username"], word)
    return found


def _npm_login(url: str, logins: Mapping[str, Login], default: bool) -> Login | None:
    bare = re.sub(r"^https?:", "", url)
    while bare.count("/") > 2:
        if bare in logins:
            return logins[bare]
        bare = bare[:-1].rpartition("/")[0] + "/"
    return logins.get("") if default else None


async def npm(env: Mapping[str, str], cwd: Path) -> Found:
    found = Found()
    try:
        settings: dict[str, Any] = json.loads(await run(["npm", "config", "ls", "--json"], env, cwd))
    except ValueError:
        raise ToolError("npm config: no JSON") from None
    texts = []
    for key in ("globalconfig", "userconfig"):
        try:
            texts.append(Path(str(settings.get(key))).read_text())
        except OSError:
            continue
    logins = npm_logins(texts, env)
    registries = {"registry": settings.get("registry")}
    registries |= {key: value for key, value in settings.items() if re.fullmatch(r"@[^:]+:registry", key)}
    lines = []
    for key, url in registries.items():
        if not isinstance(url, str):
            continue
        try:
            where, login = place(url if url.endswith("/") else url + "/")
        except ValueError as error:
            found.skipped.append(f"npm: {key}: {error}")
            continue
        login = login or _npm_login(where.url(), logins, key == "registry")
        probes = ("npm/latest", "npm") if key == "registry" else ()
        found.indexes.append(Index("npm", "npm", where, login, probes))
        lines.append(f"{key}={where.guest_url()}\n")
        if key == "registry":
            # bun reads no npmrc but a project's and the user's own.
            found.environment["BUN_CONFIG_REGISTRY"] = where.guest_url()
    if lines:
        # A file and no variable: a project's own .npmrc keeps its say.
        found.files[NPMRC] = "".join(lines)
        found.environment["npm_config_globalconfig"] = NPMRC
    return found


# cargo


async def cargo(env: Mapping[str, str], cwd: Path) -> Found:
    """Its index in use is what it fetches from when it is asked for a small crate; the rest is its configuration."""
    home = Path(env.get("CARGO_HOME") or Path(env.get("HOME") or "/") / ".cargo")
    project, scratch = cwd / "cargo", cwd / "cargo-home"
    (project / "src").mkdir(parents=True)
    scratch.mkdir()
    for name in ("config.toml", "config", "credentials.toml", "credentials"):
        if (home / name).exists():
            (scratch / name).symlink_to((home / name).absolute())
    (project / "src" / "lib.rs").touch()
    (project / "Cargo.toml").write_text(
        f'[package]\nname = "probe"\nversion = "0.0.1"\n[dependencies]\n{_SMALL_CRATE} = "1"\n'
    )
    scratch_env = {**env, "CARGO_HOME": str(scratch), "RUSTC_BOOTSTRAP": "1"}
    raw = await run(
        ["cargo", "-Z", "unstable-options", "config", "get", "--format", "json"], scratch_env, project
    )
    try:
        config = json.loads(raw)
    except ValueError:
        raise ToolError("cargo config: no JSON") from None
    log = await run(
        ["cargo", "generate-lockfile"], {**scratch_env, "CARGO_LOG": "network=debug"}, project, errors=True
    )
    return cargo_found(config, log, _cargo_tokens(home, env), env)


def _cargo_tokens(home: Path, env: Mapping[str, str]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in ("credentials", "credentials.toml"):
        try:
            tables = tomllib.loads((home / name).read_text()).get("registries", {})
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
            continue
        tokens |= {key: str(table["token"]) for key, table in tables.items() if "token" in table}
    return tokens


def cargo_found(
    config: Mapping[str, Any], log: str, tokens: Mapping[str, str], env: Mapping[str, str]
) -> Found:
    """From its configuration, and the log of what it fetched. Pure."""
    found = Found()
    fetched = re.search(r"network: fetch (https?://\S+?)config\.json", log)
    indexes: list[tuple[str, str, str]] = []  # (name, URL, the guest's line)
    lines: list[str] = []
    if fetched:
        indexes.append(("", f"sparse+{fetched[1]}", ""))
    else:
        found.skipped.append("cargo: it fetched nothing over HTTP when asked for a crate")
    sources = config.get("source") or {}
    registries: dict[str, Any] = dict(config.get("registries") or {})
    for key, value in env.items():
        match = re.fullmatch(r"CARGO_REGISTRIES_([A-Z0-9_]+)_(INDEX|TOKEN)", key)
        if match:
            registries.setdefault(match[1].lower().replace("_", "-"), {})[match[2].lower()] = value
    replaced = (sources.get("crates-io") or {}).get("replace-with")
    for name, table in registries.items():
        if isinstance(table, Mapping) and isinstance(table.get("index"), str):
            indexes.append((name, table["index"], f"[registries.{toml(name)}]\nindex = "))
    for name, table in sources.items():
        url = table.get("registry") if isinstance(table, Mapping) else None
        if isinstance(url, str) and name != "crates-io":
            indexes.append((name, url, f"[source.{toml(name)}]\nregistry = "))
        elif name != "crates-io" and name == replaced:
            found.skipped.append(f"cargo: its crates come from source {name}, which is no index of HTTP")
    for name, url, head in indexes:
        sparse = url.startswith("sparse+")
        bare = url.removeprefix("sparse+").removeprefix("registry+")
        try:
            where, login = place(bare if not sparse or bare.endswith("/") else bare + "/")
        except ValueError as error:
            found.skipped.append(f"cargo: {name}: {error}")
            continue
        token = tokens.get(name) or (registries.get(name) or {}).get("token") if name else None
        if isinstance(token, str) and login is None:
            login = Login(None, token, "")
            variable = re.sub(r"[^A-Z0-9]", "_", name.upper())
            found.environment[f"CARGO_REGISTRIES_{variable}_TOKEN"] = "put-in-by-the-host"
        found.indexes.append(
            Index(
                "cargo",
                "sparse" if sparse else "git",
                where,
                login,
                ("config.json",) if sparse else (),
                name,
            )
        )
        if head:
            lines.append(f"{head}{toml(('sparse+' if sparse else '') + where.guest_url())}\n")
    if replaced and lines:
        lines.append(f"[source.crates-io]\nreplace-with = {toml(str(replaced))}\n")
    if lines:
        found.files[CARGO_CONFIG] = "".join(lines)
    return found


# go


async def go(env: Mapping[str, str], cwd: Path) -> Found:
    names = ["GOPROXY", "GOSUMDB", "GONOSUMDB", "GONOPROXY", "GOPRIVATE", "GOINSECURE"]
    try:
        settings = json.loads(await run(["go", "env", "-json", *names], env, cwd))
    except ValueError:
        raise ToolError("go env: no JSON") from None
    return go_found({key: str(value) for key, value in settings.items()}, _netrc(env))


def go_found(settings: Mapping[str, str], logins: Mapping[str, Login]) -> Found:
    """From `go env`. Pure. `direct` is left to the guest: whose repositories those are, nobody can tell ahead."""
    found = Found()
    proxies = re.split(r"([,|])", settings.get("GOPROXY", ""))
    shown, any_proxy = "", False
    sumdb, _, sumdb_url = settings.get("GOSUMDB", "").strip().partition(" ")
    sumdb_name = sumdb.partition("+")[0]
    for word in proxies:
        if word in (",", "|", "direct", "off", ""):
            shown += word
            continue
        try:
            where, login = place(word if word.endswith("/") else word + "/")
        except ValueError as error:
            found.skipped.append(f"go: {error}")
            shown += "off"
            continue
        any_proxy = True
        probes = (f"sumdb/{sumdb_name}/supported",) if sumdb_name not in ("", "off") else ()
        found.indexes.append(Index("go", "go", where, login or logins.get(where.host), probes))
        shown += where.guest_url().rstrip("/")
    if sumdb_name not in ("", "off"):
        try:
            where, login = place((sumdb_url.strip() or f"https://{sumdb_name}").rstrip("/") + "/")
            found.indexes.append(Index("go", "sumdb", where, login))
        except ValueError as error:
            found.skipped.append(f"go: GOSUMDB: {error}")
    if any_proxy:
        found.environment["GOPROXY"] = shown
    for key in ("GOSUMDB", "GONOSUMDB", "GONOPROXY", "GOPRIVATE", "GOINSECURE"):
        value = settings.get(key, "")
        if value and not (key == "GOSUMDB" and "@" in value):
            found.environment[key] = value
    return found


TOOLS = {"apt": apt, "pip": pip, "npm": npm, "cargo": cargo, "go": go}


async def ask(tool: str, env: Mapping[str, str], cwd: Path) -> Found:
    """One tool; what goes wrong is in its `skipped`."""
    here = cwd / tool
    here.mkdir()
    try:
        return await TOOLS[tool](env, here)
    except (ToolError, OSError) as error:
        text = str(error) if isinstance(error, ToolError) else f"{error.strerror}"
        return Found(skipped=[f"{tool}: {text}"])


def extra_authorities(env: Mapping[str, str]) -> list[str]:
    """Files with certificates that the tools are told to trust."""
    names = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")
    return [
        path for path in dict.fromkeys(env.get(name, "") for name in names) if path and Path(path).is_file()
    ]
