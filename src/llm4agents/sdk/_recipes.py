"""A template's recipe, step by step: what `Template` and `AsyncTemplate` share. Its I/O is reading local files."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from llm4agents import recipe
from llm4agents.errors import InvalidRequestError
from llm4agents.sdk import _build_files
from llm4agents.sdk._build_files import Source

Command = str | Sequence[str]
"""A line for the guest's shell, or the words of a command that needs none."""


@dataclass(frozen=True, slots=True)
class BuildEvent:
    """Something that a build says. `str(event)` is a line for people."""

    kind: str
    """`step` (how one is: `status`), `log` (a line of its output: `text`), `progress` (of what is no step)."""
    text: str
    step: int | None = None
    """From 0."""
    steps: int = 0
    status: str | None = None
    """`cached`, `set`, `running`, `done`, `failed`."""
    stream: str | None = None
    ms: float | None = None

    def __str__(self) -> str:
        if self.kind == "log":
            return f"    {self.text}"
        if self.kind == "step":
            took = "" if self.ms is None else f" ({self.ms / 1000:.1f} s)"
            return f"[{(self.step or 0) + 1}/{self.steps}] {self.status}: {self.text}{took}"
        return self.text

    @classmethod
    def of(cls, event: Mapping[str, Any], steps: int) -> BuildEvent | None:
        kind = event.get("type")
        if kind == "step":
            return cls(
                "step",
                str(event.get("words")),
                event.get("step"),
                steps,
                event.get("status"),
                ms=event.get("ms"),
            )
        if kind == "log":
            return cls("log", str(event.get("text")), event.get("step"), steps, stream=event.get("stream"))
        if kind == "progress":
            return cls("progress", f"{event.get('step')}: {event.get('detail')}", steps=steps)
        return None


@dataclass(frozen=True, slots=True)
class BuiltTemplate:
    """A template that is there now."""

    name: str
    key: str
    vcpus: int
    memory_mib: int
    bytes: int
    steps: list[BuildEvent] = field(default_factory=list)
    """How each of the recipe's steps was come by: `cached`, `set` or `done`."""
    raw: dict[str, Any] = field(default_factory=dict, repr=False)


class RecipeBuilder:
    """Each method gives a new one: what several templates have in common can be kept and gone on from."""

    def __init__(self, *, directory: str | Path | None = None, ignore: Sequence[str] = ()) -> None:
        """`directory`: where the sources of copies are relative to (default: the current one). `ignore`: what of them
        is left out, as a .gitignore has it."""
        self._directory = Path.cwd() if directory is None else Path(directory)
        self._ignore = tuple(ignore)
        self._body: dict[str, Any] = {}
        self._name: str | None = None

    @classmethod
    def from_file(cls, path: str | Path = recipe.FILE) -> Self:
        """From a `template.toml`, or the directory it is in. Raises InvalidRequestError naming what is wrong in it."""
        path = Path(path)
        if path.is_dir():
            path = path / recipe.FILE
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise InvalidRequestError(
                f"{path} cannot be read: {why}", hint="llm4agents template init writes one"
            ) from error
        file = recipe.read_toml(text)
        made = cls(directory=path.parent, ignore=file.ignore)
        made._body, made._name = file.body, file.name
        return made

    @property
    def name(self) -> str | None:
        """As the file says."""
        return self._name

    def to_dict(self) -> dict[str, Any]:
        """The recipe so far, as `template.toml` has it."""
        return copy.deepcopy(self._body)

    def _with(self, **changed: Any) -> Self:
        made = copy.copy(self)
        made._body = {**copy.deepcopy(self._body), **changed}
        return made

    def _step(self, body: dict[str, Any]) -> Self:
        body = {name: value for name, value in body.items() if value is not None}
        steps = [*self._body.get("steps", []), body]
        recipe.check_step(body, f"step {len(steps)}")
        return self._with(steps=steps)

    # -- what it begins with

    def from_debian(self, packages: Sequence[str] = ()) -> Self:
        """A small Debian (what `base` has) and these packages."""
        return self._with(**{"from": {"debian": list(packages)}})

    def from_image(self, reference: str) -> Self:
        """An OCI image of a registry (`HOST/NAME:TAG`, with a digest better), or of the server's disk (`oci:DIR`)."""
        return self._with(**{"from": {"image": reference}})

    def from_template(self, name: str) -> Self:
        """A built-in template, or one of one's own: its disk, environment, services and start command."""
        return self._with(**{"from": {"template": name}})

    def from_snapshot(self, name: str) -> Self:
        """What a sandbox's `snapshot` has made: its disk, not its processes."""
        return self.from_template(name)

    # -- steps, in their order

    def run(self, command: Command, *, user: str | None = None, timeout: float | None = None) -> Self:
        """Run a command; it must end with 0. `timeout` in seconds (default 1800)."""
        return self._step({"run": _words(command), "as": user, "timeout_s": timeout})

    def copy(self, source: str | Path, to: str) -> Self:
        """Copy a local file, or what is in a local directory, to `to`. Modes are kept; the files are the user's."""
        return self._step({"copy": str(source), "to": to})

    def env(self, **variables: str) -> Self:
        """Set environment variables, of the steps that follow and of every sandbox."""
        return self._step({"env": variables})

    def workdir(self, path: str) -> Self:
        """Where the steps that follow, and calls in sandboxes, run; made if it is not there."""
        return self._step({"workdir": path})

    def user(self, name: str) -> Self:
        """Whose rights the steps that follow, and calls in sandboxes, have."""
        return self._step({"user": name})

    def apt_install(self, *packages: str, timeout: float | None = None) -> Self:
        return self._step({"apt": list(packages), "timeout_s": timeout})

    def pip_install(self, *packages: str, timeout: float | None = None) -> Self:
        """For everybody, the interpreter of the template too. Takes pip's options: `"-r", "requirements.txt"`."""
        return self._step({"pip": list(packages), "timeout_s": timeout})

    def npm_install(self, *packages: str, timeout: float | None = None) -> Self:
        """For everybody (`npm install -g`)."""
        return self._step({"npm": list(packages), "timeout_s": timeout})

    # -- the frozen machine, the build

    def start(
        self,
        command: Command | None = None,
        *,
        ready: int | str | Sequence[str] | None = None,
        user: str | None = None,
        timeout: float | None = None,
    ) -> Self:
        """What runs already in every sandbox (None: an image's own command).

        `ready`: it is when something listens on a TCP port (a number), a file is there (an absolute path), or a command
        ends with 0. `timeout`: seconds until it must be (default 60).
        """
        body: dict[str, Any] = {"run": True if command is None else _words(command)}
        if user is not None:
            body["as"] = user
        if ready is not None:
            body["ready"] = ready if isinstance(ready, int | str) else {"run": list(ready)}
        if timeout is not None:
            body["timeout_s"] = timeout
        return self._with(start=body)

    def warm(self, *commands: Command) -> Self:
        """Run once before the freeze, so that what they touch is warm in every sandbox."""
        return self._with(warm=[*self._body.get("warm", []), *(_words(command) for command in commands)])

    def network(self, rules: Any) -> Self:
        """What the build may reach, as a create's `network=`; default the profile `packages`. Clones do not get it."""
        return self._with(network=rules)

    def size(self, *, vcpus: int | None = None, memory_mib: int | None = None) -> Self:
        """Of its sandboxes, unless a create says otherwise."""
        said = {"vcpus": vcpus, "memory_mib": memory_mib}
        return self._with(**{name: value for name, value in said.items() if value is not None})

    def describe(self, text: str) -> Self:
        return self._with(description=text)

    # -- made ready to be sent

    def resolved(self) -> tuple[dict[str, Any], dict[str, Source]]:
        """The recipe with the digests of its copies' files, and where these are. Reads the files: blocks.

        Raises InvalidRequestError.
        """
        body, sources = copy.deepcopy(self._body), {}
        for step in body.get("steps", []):
            if isinstance(step, dict) and "copy" in step:
                recipe.check_step(step)
                path = Path(step["copy"])
                found = _build_files.source(
                    path if path.is_absolute() else self._directory / path, str(step["to"]), self._ignore
                )
                step["to"], step["sha256"] = found.target, found.digest()
                sources[step["sha256"]] = found
        recipe.parse(body)
        return body, sources


def _words(command: Command) -> str | list[str]:
    return command if isinstance(command, str) else list(command)
