"""The code contexts of a running sandbox: which there are, in what language, and running a cell in one.

A context is a state that cells share: an interpreter process or a shell, with its own working directory. Every
language has one called `default` that nobody creates. What was created is written down in the guest, so that it
is known after a restart of the server, a pause or a fork. Not here: HTTP, what a cell's answer is (`calls`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import secrets
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from llm4agents import limits
from llm4agents.errors import ConflictError, GuestError, InvalidRequestError, NotFoundError, PathNotFoundError
from llm4agents.guest import code as interpreter
from llm4agents.guest import shell as shells
from llm4agents.guest.code import NODE, PYTHON, Event, Interpreter
from llm4agents.guest.shell import Shell
from llm4agents.guest.verbs import Agent

if TYPE_CHECKING:
    from llm4agents.engine.live import Live

LANGUAGES: Final = ("python", "javascript", "typescript", "bash")
DEFAULT: Final = "default"
_INTERPRETERS: Final[Mapping[str, Interpreter]] = {"python": PYTHON, "javascript": NODE, "typescript": NODE}
_LANGUAGE_OF: Final = {"python": "python", "node": "javascript", "base": "bash"}
"""What a cell of no stated language is, by built-in template."""
_FILE: Final = "/run/llm4agents/contexts.json"
_FILE_BYTES_MAX: Final = 1_048_576
_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz0123456789"


@dataclass(slots=True)
class Context:
    id: str
    language: str
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    slot: str = DEFAULT
    """Its name in the guest. Python's interpreter cannot forget one, so those are used again."""
    fresh: bool = False
    """Its next cell is to be told the working directory."""

    @property
    def key(self) -> str:
        """Its name among all of the sandbox: there is a `default` in every language."""
        return f"{self.language}:{self.slot}"

    @property
    def process(self) -> str:
        """The id of its managed process, if it is a shell."""
        plain = re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", self.slot)
        return f"shell.{self.slot if plain else hashlib.sha256(self.slot.encode()).hexdigest()[:40]}"

    def to_json(self) -> dict[str, Any]:
        """As the wire has it."""
        return {"id": self.id, "language": self.language, "cwd": self.cwd}


class Contexts:
    """What this server knows of one sandbox's contexts. `of` makes it."""

    def __init__(self, language: str) -> None:
        self.language = language
        """Of cells that state none."""
        self.created: dict[str, Context] = {}
        self.used: dict[tuple[str, str], Context] = {}
        """Those that were only named, by language and name."""
        self.shells: dict[str, Shell] = {}
        self.starting = asyncio.Lock()
        self.defaults: Mapping[str, Any] = {}
        """`user` and `workdir` of the template, for shells that say no other. The interpreters are older than it."""

    def find(self, name: str, language: str | None) -> Context:
        """The context of that name. Raises InvalidRequestError when it is of another language."""
        context = self.created.get(name)
        if context is None:
            language = language or self.language
            context = self.used.get((language, name))
            return context or Context(name, language, slot=name)
        if language not in (None, context.language):
            raise InvalidRequestError(
                f"the context {name} is of {context.language}, not {language}",
                hint="leave the language out, or create another context",
            )
        return context

    def note_use(self, context: Context) -> None:
        """Raises ConflictError when it would be one more than a sandbox may have."""
        if context.id in self.created or (context.language, context.id) in self.used:
            return
        self.check_room(default=context.id == DEFAULT)
        self.used[context.language, context.id] = context

    def check_room(self, *, default: bool = False) -> None:
        others = sum(name != DEFAULT for _, name in self.used)
        if not default and len(self.created) + others >= limits.CODE_CONTEXTS_MAX:
            raise ConflictError(
                f"this sandbox has {limits.CODE_CONTEXTS_MAX} contexts, and that is the most",
                hint="remove one",
            )

    def free_slot(self) -> str:
        taken = {context.slot for context in self.created.values()}
        return next(slot for number in range(1, 99) if (slot := f"slot-{number}") not in taken)

    def list(self) -> list[Context]:
        default = self.find(DEFAULT, None)
        used = [context for context in self.used.values() if context.key != default.key]
        return [default, *used, *self.created.values()]


def fresh(template: str) -> Contexts | None:
    """Those of a clone that is new, of a template of ours: none was created yet. None: the guest is to be asked."""
    language = _LANGUAGE_OF.get(template)
    return None if language is None else Contexts(language)


async def of(live: Live, agent: Agent) -> Contexts:
    """The contexts of `live`, read from the guest when this server has not seen them yet."""
    if live.contexts is None:
        language = _LANGUAGE_OF.get(live.row.template) or await _guess(agent)
        contexts = Contexts(language)
        contexts.defaults = live.row.defaults or {}
        contexts.created = await _read(agent)
        live.contexts = live.contexts or contexts  # another call may have been faster
    return live.contexts


async def create(live: Live, language: str | None, cwd: str | None, env: Mapping[str, str]) -> dict[str, Any]:
    """A new context. Raises InvalidRequestError (language, cwd), ConflictError (the template lacks it, too many)."""
    async with live.use("create a context") as agent:
        contexts = await of(live, agent)
        language = _language(language) or contexts.language
        await _check_there(agent, language)
        if cwd is not None:
            await _check_directory(agent, cwd)
        contexts.check_room()
        ident = "ctx_" + "".join(secrets.choice(_ALPHABET) for _ in range(12))
        context = Context(ident, language, cwd, dict(env), contexts.free_slot(), fresh=True)
        contexts.created[ident] = context
        try:
            if language == "bash":
                await _shell(agent, contexts, context)
            await _write(agent, contexts)
        except BaseException:
            contexts.created.pop(ident, None)
            if (shell := contexts.shells.pop(context.key, None)) is not None:
                await shell.end()
            raise
        return context.to_json()


async def list_(live: Live) -> list[dict[str, Any]]:
    """Those that were created or used, and the default one of the template's language."""
    async with live.use("list contexts") as agent:
        return [context.to_json() for context in (await of(live, agent)).list()]


async def remove(live: Live, name: str) -> None:
    """End a context and what runs in it. Raises NotFoundError."""
    async with live.use("remove a context") as agent:
        contexts = await of(live, agent)
        context = contexts.created.get(name)
        if context is None:
            raise NotFoundError(f"there is no context {name!r}", hint="only what was created can be removed")
        await _end(agent, contexts, context, for_good=True)
        contexts.created.pop(name, None)
        await _write(agent, contexts)


async def interrupt(live: Live, name: str, language: str | None = None) -> None:
    """Interrupt the cell that runs in a context, if one does."""
    async with live.use("interrupt") as agent:
        contexts = await of(live, agent)
        context = contexts.find(name, _language(language))
        if context.language == "bash":
            if (shell := contexts.shells.get(context.key)) is not None:
                await shell.interrupt()
        else:
            await interpreter.interrupt(agent, _slot(context), at=_INTERPRETERS[context.language])


async def restart(live: Live, name: str, language: str | None = None) -> None:
    """Give a context a fresh interpreter or shell."""
    async with live.use("restart") as agent:
        contexts = await of(live, agent)
        await _end(agent, contexts, contexts.find(name, _language(language)), for_good=False)


async def run(
    live: Live,
    agent: Agent,
    code: str,
    *,
    context: str,
    language: str | None,
    env: Mapping[str, str],
    sandbox_env: Mapping[str, str],
    timeout_s: float | None,
) -> AsyncGenerator[Event, None]:
    """Run a cell; its events, the last one an End. Close it (`aclosing`) to interrupt."""
    contexts = await of(live, agent)
    found = contexts.find(context, _language(language))
    contexts.note_use(found)
    if found.language == "bash":
        shell = await _shell(agent, contexts, found)
        events = shell.run(code, env=env, timeout_s=timeout_s)
    else:
        events = interpreter.run(
            agent,
            code,
            context=_slot(found),
            env={**sandbox_env, **found.env, **env},
            cwd=found.cwd if found.fresh else None,
            timeout_s=timeout_s,
            at=_INTERPRETERS[found.language],
            more=None if found.language == "python" else {"language": found.language},
        )
    found.fresh = False
    async with contextlib.aclosing(events):
        async for event in events:
            if isinstance(event, interpreter.End) and event.status in ("died", "timed_out"):
                found.fresh = True
            yield event


def _language(name: str | None) -> str | None:
    if name is None or name in LANGUAGES:
        return name
    short = {"js": "javascript", "ts": "typescript", "py": "python", "sh": "bash", "shell": "bash"}
    if name.lower() in short:
        return short[name.lower()]
    raise InvalidRequestError(f"there is no language {name!r}", hint=f"there are: {', '.join(LANGUAGES)}")


def _slot(context: Context) -> str:
    return context.slot if context.language == "python" else context.key


async def _shell(agent: Agent, contexts: Contexts, context: Context) -> Shell:
    """The shell of a context, started when there is none or it has ended."""
    async with contexts.starting:
        shell = contexts.shells.get(context.key)
        if shell is None or not shell.alive or shell.agent is not agent:
            said = contexts.defaults
            shell = await Shell.open(
                agent,
                context.process,
                env=context.env,
                cwd=context.cwd or said.get("workdir"),
                user=said.get("user") or "user",
            )
            contexts.shells[context.key] = shell
        return shell


async def _end(agent: Agent, contexts: Contexts, context: Context, *, for_good: bool) -> None:
    context.fresh = True
    if context.language == "bash":
        async with contexts.starting:
            if (shell := contexts.shells.pop(context.key, None)) is not None and shell.alive:
                await shell.end()
            else:
                await shells.end(agent, context.process)
    elif for_good and context.language != "python":
        await interpreter.remove(agent, _slot(context), at=_INTERPRETERS[context.language])
    else:
        await interpreter.restart(agent, _slot(context), at=_INTERPRETERS[context.language])


# -- what the guest knows ------------------------------------------------------------------------------------


async def _there(agent: Agent, path: str) -> bool:
    try:
        await agent.stat(path, user="root")
    except PathNotFoundError:
        return False
    return True


async def _guess(agent: Agent) -> str:
    """The language of a template that somebody made of a sandbox: that of the interpreter it has."""
    for language in ("python", "javascript"):
        if await _there(agent, _INTERPRETERS[language].socket):
            return language
    return "bash"


async def _check_there(agent: Agent, language: str) -> None:
    at = _INTERPRETERS.get(language)
    if at is not None and not await _there(agent, at.socket):
        raise ConflictError(
            f"this sandbox has no {at.name} interpreter, which {language} needs",
            hint=f"create it from the template {at.template!r}",
        )


async def _check_directory(agent: Agent, path: str) -> None:
    if (await agent.stat(path)).kind != "directory":
        raise InvalidRequestError(f"{path} is not a directory", hint="cwd is where cells begin")


async def _read(agent: Agent) -> dict[str, Context]:
    """What was created, from the guest's file; whoever is root there may have written anything."""
    try:
        async with await agent.read(_FILE, user="root") as file:
            text = await file.read(_FILE_BYTES_MAX)
        found = [Context(**item) for item in json.loads(text)]
    except (PathNotFoundError, GuestError, InvalidRequestError, ValueError, TypeError, RecursionError):
        return {}
    return {context.id: context for context in found if _sane(context)}


def _sane(context: Context) -> bool:
    texts = (context.id, context.slot, *([] if context.cwd is None else [context.cwd]))
    return (
        all(isinstance(text, str) and len(text) <= limits.PATH_BYTES_MAX for text in texts)
        and context.language in LANGUAGES
        and isinstance(context.env, dict)
        and all(isinstance(word, str) for pair in context.env.items() for word in pair)
    )


async def _write(agent: Agent, contexts: Contexts) -> None:
    body = [{**asdict(context), "fresh": False} for context in contexts.created.values()]
    await agent.write(_FILE, json.dumps(body).encode(), mode=0o600, user="root")
