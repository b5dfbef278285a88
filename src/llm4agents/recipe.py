"""How a template is made, as data: what it begins with, its steps, what runs in it when it is frozen. Pure.

One form for the SDK's builder, for `template.toml` and for the wire; read the same way by the client, which finds
mistakes before it sends anything, and by the server, which believes nobody. Not here: doing a step
(`engine.building`), the files of a copy (`sdk._build_files`).
"""

from __future__ import annotations

import difflib
import hashlib
import json
import posixpath
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from llm4agents import limits
from llm4agents.errors import InvalidRequestError

FILE: Final = "template.toml"
BUILDER: Final = 2
"""Of the way steps are done: another one makes every step anew."""
OPS: Final = ("run", "copy", "env", "workdir", "user", "apt", "pip", "npm")
BASES: Final = ("template", "debian", "image")
_TOP: Final = ("from", "steps", "start", "warm", "network", "vcpus", "memory_mib", "description")
_OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "run": ("as", "timeout_s"),
    "copy": ("to", "sha256"),
    "apt": ("timeout_s",),
    "pip": ("timeout_s",),
    "npm": ("timeout_s",),
}
_MEANT: Final = {
    "base": "from",
    "step": "steps",
    "memory": "memory_mib",
    "cpus": "vcpus",
    "cmd": "run",
    "command": "run",
    "src": "copy",
    "source": "copy",
    "dst": "to",
    "dest": "to",
    "target": "to",
    "snapshot": "template",
    "entrypoint": "start",
    "timeout": "timeout_s",
    "cwd": "workdir",
    "add": "copy",
}
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9+.:=~/_-]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


Run = str | tuple[str, ...]
"""A command: a line for the guest's shell, or the words of one that needs none."""


@dataclass(frozen=True, slots=True)
class Base:
    """What it begins with. `value`: a template's name, an image's reference, or Debian packages."""

    kind: Literal["template", "debian", "image"]
    value: str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class State:
    """What steps have set so far, and clones have as their defaults."""

    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str = "user"

    def to_json(self) -> dict[str, Any]:
        return {"env": dict(self.env), "workdir": self.workdir, "user": self.user}


@dataclass(frozen=True, slots=True)
class Step:
    """`value`: as it was asked for. `user` and `timeout_s` are of commands, `to` and `sha256` of a copy."""

    op: str
    value: Any
    user: str | None = None
    timeout_s: float = float(limits.STEP_TIMEOUT_S)
    to: str | None = None
    sha256: str | None = None

    @property
    def on_disk(self) -> bool:
        """Whether it changes the disk; the others are only noted."""
        return self.op not in ("env", "workdir", "user")

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {self.op: _plain(self.value)}
        if self.user is not None:
            body["as"] = self.user
        if self.on_disk and self.op != "copy" and self.timeout_s != limits.STEP_TIMEOUT_S:
            body["timeout_s"] = self.timeout_s
        return body | {
            name: value for name, value in (("to", self.to), ("sha256", self.sha256)) if value is not None
        }

    def words(self) -> str:
        """For people: one line."""
        if isinstance(self.value, Mapping):
            said = " ".join(self.value)  # names alone: a value may be long, or nobody's business
        elif isinstance(self.value, tuple):
            said = " ".join(self.value)
        else:
            said = str(self.value)
        said = " ".join(said.split())
        if self.to is not None:
            said += f" → {self.to}"
        return f"{self.op} {said if len(said) <= 160 else said[:159] + '…'}"

    def inputs(self) -> dict[str, Any]:
        """What its result depends on beside what came before it. What a copy was called is no part of that."""
        body = self.to_json()
        body.pop("timeout_s", None)
        return body | {"copy": True} if self.op == "copy" else body


@dataclass(frozen=True, slots=True)
class Ready:
    """When what was started is ready: something listens on a TCP port, a file is there, or a command ends with 0."""

    kind: Literal["port", "file", "run"]
    value: int | Run


@dataclass(frozen=True, slots=True)
class Start:
    """A command that lives in the frozen machine, and so in every clone. `run` True: the image's own."""

    run: Run | Literal[True]
    user: str | None = None
    ready: Ready | None = None
    timeout_s: float = float(limits.READY_TIMEOUT_S)

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {"run": _plain(self.run)}
        if self.user is not None:
            body["as"] = self.user
        if self.ready is not None:
            body["ready"] = {self.ready.kind: _plain(self.ready.value)}
        if self.timeout_s != limits.READY_TIMEOUT_S:
            body["timeout_s"] = self.timeout_s
        return body


@dataclass(frozen=True, slots=True)
class Recipe:
    base: Base
    steps: tuple[Step, ...] = ()
    start: Start | None = None
    warm: tuple[Run, ...] = ()
    """Commands run once before the freeze, so that what they touch is warm in every clone."""
    network: Any = "packages"
    """Of the build, as a create's."""
    vcpus: int | None = None
    memory_mib: int | None = None
    description: str = ""

    def to_json(self) -> dict[str, Any]:
        """As `parse` reads it; equal for equal recipes."""
        body: dict[str, Any] = {"from": {self.base.kind: _plain(self.base.value)}}
        if self.steps:
            body["steps"] = [step.to_json() for step in self.steps]
        if self.start is not None:
            body["start"] = self.start.to_json()
        if self.warm:
            body["warm"] = [_plain(command) for command in self.warm]
        if self.network != "packages":
            body["network"] = self.network
        for name in ("vcpus", "memory_mib", "description"):
            if getattr(self, name):
                body[name] = getattr(self, name)
        return body

    def frozen_inputs(self) -> dict[str, Any]:
        """Of it, what the frozen machine depends on beyond its disk."""
        return {"start": self.start and self.start.to_json(), "warm": [_plain(one) for one in self.warm]}


@dataclass(frozen=True, slots=True)
class File:
    """What a `template.toml` says."""

    name: str | None
    body: dict[str, Any]
    """The recipe: `parse` takes it, once its copies have digests."""
    ignore: tuple[str, ...]


# -- reading -------------------------------------------------------------------------------------------------


def parse(body: Any, *, digests: bool = True) -> Recipe:
    """A recipe from its JSON. `digests`: whether copies must say the digest of their files (the wire's do).

    Raises InvalidRequestError that names the place, and for an unknown key the one that was probably meant.
    """
    top = _table(body, "the recipe")
    _only(top, "the recipe", _TOP)
    steps = top.get("steps", [])
    if not isinstance(steps, list):
        raise _wrong("steps", "a list", steps)
    if len(steps) > limits.STEPS_MAX:
        raise InvalidRequestError(
            f"the recipe has {len(steps)} steps, and {limits.STEPS_MAX} are the most",
            hint="join commands with &&, or build one template from another",
        )
    recipe = Recipe(
        base=_base(top.get("from")),
        steps=tuple(_step(step, f"steps[{at}]", digests) for at, step in enumerate(steps)),
        start=None if top.get("start") is None else _start(top["start"]),
        warm=tuple(
            _command(command, f"warm[{at}]") for at, command in enumerate(_list(top.get("warm", []), "warm"))
        ),
        network=_network(top.get("network", "packages")),
        vcpus=_whole(top.get("vcpus"), "vcpus"),
        memory_mib=_whole(top.get("memory_mib"), "memory_mib"),
        description=_text(top.get("description", ""), "description", empty=True),
    )
    if recipe.start is not None and recipe.start.run is True and recipe.base.kind != "image":
        raise InvalidRequestError(
            "start.run = true means the image's own command, and this template does not begin with an image",
            hint="say the command",
        )
    if len(json.dumps(recipe.to_json())) > limits.RECIPE_BYTES_MAX:
        raise InvalidRequestError(
            f"the recipe is larger than {limits.RECIPE_BYTES_MAX} bytes",
            hint="put long scripts into files, and copy them",
        )
    return recipe


def read_toml(text: str) -> File:
    """A `template.toml`. Raises InvalidRequestError naming what is wrong and, for broken TOML, the line."""
    try:
        body = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequestError(
            f"{FILE} is no TOML: {error}", hint="llm4agents template init writes an example"
        ) from None
    name, ignore = body.pop("name", None), body.pop("ignore", [])
    _only(body, FILE, _TOP, more=("name", "ignore"))
    if name is not None:
        check_name(name)
    patterns = tuple(_text(one, f"ignore[{at}]") for at, one in enumerate(_list(ignore, "ignore")))
    parse(body, digests=False)
    return File(name, body, patterns)


def check_name(name: Any) -> str:
    """Raises InvalidRequestError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{str(name)[:80]!r} cannot be a template's name",
            hint="1 to 64 of a-z, 0-9, '.', '_', '-', beginning and ending with a letter or digit",
        )
    return name


def read_start(body: Any) -> Start:
    """What `Start.to_json` wrote. Raises InvalidRequestError."""
    return _start(body)


def check_step(body: Any, where: str = "step") -> None:
    """Raises InvalidRequestError for what is no step; a copy's digest may be missing."""
    _step(body, where, digests=False)


def _base(body: Any) -> Base:
    if body is None:
        raise InvalidRequestError(
            "the recipe does not say what it begins with",
            hint='from = {template = "base"}, {debian = ["package", …]} or {image = "reference"}',
        )
    table = _table(body, "from")
    _only(table, "from", BASES)
    if len(table) != 1:
        raise InvalidRequestError(
            f"from says {len(table)} things, and exactly one is wanted", hint=f"one of {', '.join(BASES)}"
        )
    ((kind, value),) = table.items()
    if kind == "debian":
        names = _list(value, "from.debian")
        if len(names) > limits.STEP_PACKAGES_MAX:
            raise InvalidRequestError(f"from.debian names more than {limits.STEP_PACKAGES_MAX} packages")
        return Base("debian", tuple(_debian(name, f"from.debian[{at}]") for at, name in enumerate(names)))
    if kind == "template":
        return Base("template", check_name(value))
    return Base("image", _text(value, "from.image"))


def _step(body: Any, where: str, digests: bool) -> Step:
    table = _table(body, where)
    found = [op for op in OPS if op in table]
    if len(found) != 1:
        if not found:
            _only(table, where, OPS)
        what = "no operation" if not found else f"several ({', '.join(found)})"
        hint = "the user of one command is its `as`" if set(found) == {"run", "user"} else "each is a step"
        raise InvalidRequestError(
            f"{where} has {what}", hint=hint if found else f"exactly one of {', '.join(OPS)}"
        )
    op = found[0]
    _only(table, where, (op, *_OPTIONS.get(op, ())))
    value = table[op]
    timeout_s = _seconds(
        table.get("timeout_s"), f"{where}.timeout_s", limits.STEP_TIMEOUT_S, limits.STEP_TIMEOUT_S_MAX
    )
    if op == "run":
        user = None if table.get("as") is None else _user(table["as"], f"{where}.as")
        return Step("run", _command(value, f"{where}.run"), user, timeout_s)
    if op == "copy":
        digest = table.get("sha256")
        if digest is None and digests:
            raise InvalidRequestError(
                f"{where}: a copy names the digest of its files (sha256)",
                hint="the SDK and the command line do it for you",
            )
        if digest is not None and (not isinstance(digest, str) or not _DIGEST.fullmatch(digest)):
            raise InvalidRequestError(f"{where}.sha256 is no SHA-256: 64 hex digits are wanted")
        if "to" not in table:
            raise InvalidRequestError(f"{where}: a copy says where to", hint='{copy = "src", to = "/app"}')
        return Step(
            "copy", _text(value, f"{where}.copy"), to=_path(table["to"], f"{where}.to"), sha256=digest
        )
    if op == "env":
        return Step("env", _env(value, f"{where}.env"))
    if op == "workdir":
        return Step("workdir", _path(value, f"{where}.workdir"))
    if op == "user":
        return Step("user", _user(value, f"{where}.user"))
    names = _list([value] if isinstance(value, str) else value, f"{where}.{op}")
    if not 1 <= len(names) <= limits.STEP_PACKAGES_MAX:
        raise InvalidRequestError(f"{where}.{op} names 1 to {limits.STEP_PACKAGES_MAX} packages")
    check = _debian if op == "apt" else _text
    return Step(
        op, tuple(check(name, f"{where}.{op}[{at}]") for at, name in enumerate(names)), timeout_s=timeout_s
    )


def _start(body: Any) -> Start:
    if isinstance(body, str):
        body = {"run": body}
    table = _table(body, "start")
    _only(table, "start", ("run", "as", "ready", "timeout_s"))
    if "run" not in table:
        raise InvalidRequestError("start has no command", hint='start = {run = "…"}')
    run = table["run"]
    if run is not True:
        run = _command(run, "start.run")
    user = None if table.get("as") is None else _user(table["as"], "start.as")
    timeout_s = _seconds(
        table.get("timeout_s"), "start.timeout_s", limits.READY_TIMEOUT_S, limits.READY_TIMEOUT_S_MAX
    )
    return Start(run, user, None if table.get("ready") is None else _ready(table["ready"]), timeout_s)


def _ready(body: Any) -> Ready:
    if isinstance(body, bool):
        raise _wrong("start.ready", "a port, a file or a command", body)
    if isinstance(body, int):
        body = {"port": body}
    elif isinstance(body, str):
        body = {"file" if re.fullmatch(r"/\S*", body) else "run": body}
    table = _table(body, "start.ready")
    _only(table, "start.ready", ("port", "file", "run"))
    if len(table) != 1:
        raise InvalidRequestError("start.ready says exactly one of port, file, run")
    ((kind, value),) = table.items()
    if kind == "port":
        if type(value) is not int or not 1 <= value <= 65_535:
            raise _wrong("start.ready.port", "a TCP port, 1 to 65535", value)
        return Ready("port", value)
    if kind == "file":
        path = _text(value, "start.ready.file")
        if not path.startswith("/"):
            raise InvalidRequestError(f"start.ready.file = {path[:200]!r} is no absolute path")
        return Ready("file", path)
    return Ready("run", _command(value, "start.ready.run"))


def _network(value: Any) -> Any:
    if not isinstance(value, str | list | dict):
        raise _wrong("network", "a profile, a list of rules or a table", value)
    return value


def _only(table: Mapping[str, Any], where: str, known: Sequence[str], more: Sequence[str] = ()) -> None:
    known = (*known, *more)
    for key in table:
        if key in known:
            continue
        meant = {word: target for word, target in _MEANT.items() if target in known}
        close = next(iter(difflib.get_close_matches(key[:80].lower(), (*known, *meant), n=1)), None)
        near = meant.get(close or "", close)
        raise InvalidRequestError(
            f"{where} has a key {key[:80]!r} that means nothing here",
            hint=f"did you mean {near!r}?" if near else f"there are {', '.join(known)}",
        )


def _wrong(where: str, wanted: str, found: Any) -> InvalidRequestError:
    return InvalidRequestError(
        f"{where} is {type(found).__name__} {str(found)[:80]!r}, and {wanted} is wanted"
    )


def _table(body: Any, where: str) -> dict[str, Any]:
    if not isinstance(body, dict) or not all(isinstance(key, str) for key in body):
        raise _wrong(where, "a table", body)
    return body


def _list(body: Any, where: str) -> list[Any]:
    if not isinstance(body, list | tuple):
        raise _wrong(where, "a list", body)
    return list(body)


def _text(value: Any, where: str, *, empty: bool = False) -> str:
    if not isinstance(value, str):
        raise _wrong(where, "text", value)
    if "\0" in value or _bytes(value) > limits.PATH_BYTES_MAX or not (value.strip() or empty):
        raise InvalidRequestError(
            f"{where}: 1 to {limits.PATH_BYTES_MAX} bytes of text without NUL are wanted"
        )
    return value


def _command(value: Any, where: str) -> Run:
    words = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not words or not all(isinstance(word, str) for word in words):
        raise _wrong(where, "a command", value)
    if (
        not words[0].strip()
        or "\0" in "".join(words)
        or sum(map(_bytes, words)) > limits.STEP_COMMAND_BYTES_MAX
    ):
        raise InvalidRequestError(
            f"{where}: a command is 1 to {limits.STEP_COMMAND_BYTES_MAX} bytes without NUL",
            hint="put long scripts into a file, and copy it",
        )
    return words if isinstance(value, list | tuple) else words[0]


def _is_broken(text: str) -> bool:
    """Whether it has half a character, which no encoding of ours can write."""
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _path(value: Any, where: str) -> str:
    """As it was said, but plain. A relative one is below the working directory."""
    path = _text(value, where)
    if path.startswith("~"):
        raise InvalidRequestError(
            f"{where} = {path[:200]!r}: ~ is not known here", hint="say /home/user, or /root"
        )
    if ".." in path.split("/"):
        raise InvalidRequestError(
            f"{where} = {path[:200]!r}: `..` is not possible here", hint="say where it really is"
        )
    return posixpath.normpath("/" + path.lstrip("/")) if path.startswith("/") else posixpath.normpath(path)


def _user(value: Any, where: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not _USER.fullmatch(value):
        raise InvalidRequestError(f"{where} = {str(value)[:80]!r} is no user: a name or a uid is wanted")
    return value


def _debian(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _PACKAGE.fullmatch(value):
        raise InvalidRequestError(
            f"{where} = {str(value)[:80]!r} is no Debian package", hint="a name, or name=version"
        )
    return value


def _env(value: Any, where: str) -> dict[str, str]:
    table = _table(value, where)
    for name, text in table.items():
        if not _VARIABLE.fullmatch(name):
            raise InvalidRequestError(
                f"{where}: {name[:80]!r} is no variable's name", hint="A-Z, a-z, 0-9 and _"
            )
        if not isinstance(text, str) or "\0" in text or _is_broken(text):
            raise InvalidRequestError(f"{where}.{name} is text without NUL", hint=f'{name} = "…"')
    if sum(len(name) + len(text.encode()) + 2 for name, text in table.items()) > limits.ENV_BYTES_MAX:
        raise InvalidRequestError(f"{where} is more than {limits.ENV_BYTES_MAX} bytes")
    return dict(table)


def _whole(value: Any, where: str) -> int | None:
    if value is not None and type(value) is not int:
        raise _wrong(where, "a whole number", value)
    return value


def _seconds(value: Any, where: str, default: float, most: float) -> float:
    if value is None:
        return float(default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise InvalidRequestError(f"{where} = {value!r}: more than 0 and at most {most:g} seconds")
    return float(value)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


# -- what a step does ----------------------------------------------------------------------------------------


def absolute(path: str, state: State) -> str:
    """A path of a step: a relative one is below the working directory, or below the root when there is none."""
    return path if path.startswith("/") else posixpath.normpath(posixpath.join(state.workdir or "/", path))


def after(state: State, step: Step) -> State:
    """What is set once `step` is done."""
    if step.op == "env":
        return replace(state, env={**state.env, **step.value})
    if step.op == "workdir":
        return replace(state, workdir=absolute(step.value, state))
    if step.op == "user":
        return replace(state, user=step.value)
    return state


# -- digests -------------------------------------------------------------------------------------------------


def step_key(parent: str, step: Step) -> str:
    """Of the disk after `step`, by that of the disk before it: equal keys, equal inputs all the way down."""
    return digest({"builder": BUILDER, "parent": parent, "step": step.inputs()})


def chain(base: str, steps: Iterable[Step]) -> list[str]:
    """The key after each step, beginning with `base`, the key of what it begins with."""
    keys: list[str] = []
    for step in steps:
        keys.append(step_key(keys[-1] if keys else base, step))
    return keys


def digest(body: object) -> str:
    """SHA-256 (hex) of a JSON-able value in its canonical form."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
