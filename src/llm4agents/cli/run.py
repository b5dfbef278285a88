"""`llm4agents run`: one piece of code in a sandbox of its own (or in one that exists)."""

from __future__ import annotations

import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llm4agents import limits
from llm4agents.cli import options
from llm4agents.errors import PathNotFoundError, ProtectedPathError
from llm4agents.sdk._landing import Downloaded, ProtectedPath

if TYPE_CHECKING:
    from llm4agents import Execution, Result, Sandbox

OUT = "/home/user/out"
_SHORT = {"py": "python", "js": "javascript", "ts": "typescript", "sh": "bash"}
_SUFFIXES = {f".{short}": name for short, name in _SHORT.items()} | {
    ".mjs": "javascript",
    ".cjs": "javascript",
    ".mts": "typescript",
}
_TEMPLATES = {"javascript": "node", "typescript": "node", "bash": "base"}
"""The smallest built-in template that has a language."""
_IMAGES = (("png", "png"), ("jpeg", "jpg"), ("svg", "svg"), ("pdf", "pdf"))


def run(
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="A file of code, or - for stdin.")
    ] = None,
    code: Annotated[str | None, typer.Option("-c", "--code", help="The code itself.")] = None,
    in_: Annotated[
        str | None, typer.Option("--in", metavar="ID", help="In this sandbox, which is left running.")
    ] = None,
    template: Annotated[
        str | None, typer.Option("--template", "-t", help="What to clone (default: by the language).")
    ] = None,
    language: Annotated[
        str | None,
        typer.Option(
            "--language", "-l", help="python, javascript, typescript, bash (default: by FILE's suffix)."
        ),
    ] = None,
    context: Annotated[
        str, typer.Option("--context", help="With --in: the code context to run it in.")
    ] = "default",
    files: Annotated[
        list[str] | None, typer.Option("--file", "-f", metavar="LOCAL", help="Copy into /home/user first.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help=f"Save figures, and what the code writes to {OUT}.")
    ] = None,
    allow_protected: options.AllowProtected = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds the code may run; 0: no limit.")
    ] = limits.CODE_TIMEOUT_S,
    env: options.Env = None,
    memory_mib: options.Memory = None,
    vcpus: options.Vcpus = None,
    net: options.Net = None,
    credential: options.Credential = None,
    rewrite: options.Rewrite = None,
    protect: options.Protect = None,
    volume: options.Volume = None,
    require_kvm: options.RequireKvm = False,
    vmm: options.Vmm = None,
    nested: options.Nested = False,
    json: options.Json = False,
) -> None:
    """Run code in a microVM: prints its output as it comes, then the last value.

    Exit code 1 when the code fails, with the traceback on stderr; 5 when something of --out was not copied since this
    machine would obey it (.bashrc, .git/hooks…; --allow-protected).
    """
    from llm4agents import Sandbox
    from llm4agents.cli import ids, output

    source = _source(file, code)
    if language is None and context == "default" and (in_ is None or code is None):
        language = _SUFFIXES.get(Path(file or "").suffix)
    language = None if language is None else _SHORT.get(language.lower(), language)
    variables = options.pairs(env, "--env")
    output.quiet_warnings()
    signal.signal(signal.SIGTERM, _as_interrupt)
    progress = output.Progress()
    if in_ is not None:
        sandbox = Sandbox.connect(ids.resolve(in_))
        raise typer.Exit(
            _in(
                sandbox,
                source,
                files or [],
                out,
                allow_protected,
                timeout,
                variables,
                json,
                language,
                context,
            )
        )
    with progress:
        sandbox = Sandbox.create(
            template or _TEMPLATES.get(language or "", limits.DEFAULT_TEMPLATE),
            env=variables,
            memory_mib=memory_mib,
            vcpus=vcpus,
            network=options.network(net, credential, rewrite),
            protect=protect or (),
            volumes=options.volumes(volume),
            require_kvm=require_kvm,
            vmm=vmm,
            nested=nested,
            on_progress=progress,
        )
    with sandbox:
        status = _in(
            sandbox, source, files or [], out, allow_protected, timeout, None, json, language, "default"
        )
    raise typer.Exit(status)


def _source(file: str | None, code: str | None) -> str:
    if (file is None) == (code is None):
        raise typer.BadParameter("give a FILE, -c CODE, or - for stdin (one of them)", param_hint="FILE")
    if code is not None:
        return code
    if file == "-":
        return sys.stdin.read()
    try:
        return Path(str(file)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8 text"
        raise typer.BadParameter(f"cannot read {file}: {why}", param_hint="FILE") from None


def _as_interrupt(*_: object) -> None:
    """SIGTERM ends us as Ctrl-C does, so that the sandbox we made goes with us."""
    raise KeyboardInterrupt


def _in(
    sandbox: Sandbox,
    source: str,
    files: list[str],
    out: Path | None,
    allow_protected: bool,
    timeout: float,
    env: dict[str, str] | None,
    as_json: bool,
    language: str | None,
    context: str,
) -> int:
    from llm4agents.cli.output import Progress, emit, left_out, say

    with Progress() as progress:
        for name in files:
            sandbox.files.upload(name, on_progress=progress.copied(name))
    if out is not None:
        sandbox.files.mkdir(OUT)

    def show(stream: Any) -> Any:
        def write(text: str) -> None:
            stream.write(text)
            stream.flush()

        return None if as_json else write

    done = sandbox.run_code(
        source,
        language=language,
        context=context,
        env=env,
        timeout=timeout,
        on_stdout=show(sys.stdout),
        on_stderr=show(sys.stderr),
    )
    saved: list[Path] = []
    protected = Downloaded("")
    if out is not None:
        saved += _save(done.results, out)
        saved += _collect(sandbox, out, allow_protected, protected)
    if as_json:
        emit(
            {
                **_as_dict(sandbox.id, done, saved),
                "protected": [asdict(found) for found in protected.protected],
            }
        )
    else:
        _show_value(done, out)
        for path in saved:
            say(f"saved {path}")
        if done.error is not None:
            say(done.error.traceback.rstrip() or str(done.error))
    status = left_out(protected)
    return 1 if done.error is not None else status


def _show_value(done: Execution, out: Path | None) -> None:
    from llm4agents.cli.output import say

    if done.stdout and not done.stdout.endswith("\n"):
        print()
    pictures = sum(_picture(result) is not None for result in done.results)
    main = next((result for result in reversed(done.results) if result.main), None)
    if main is not None and main.text is not None and _picture(main) is None:
        print(main.text, flush=True)
    if pictures and out is None:
        say(f"{pictures} figure{'s' if pictures > 1 else ''}; --out DIR saves them")


def _picture(result: Result) -> tuple[str, bytes] | None:
    """Suffix and content of what to save a result as, if it is a picture."""
    for name, suffix in _IMAGES:
        value = getattr(result, name)
        if value is not None:
            return suffix, value.encode() if isinstance(value, str) else value
    return None


def _save(results: list[Result], out: Path) -> list[Path]:
    """chart-1.png… for pictures, table-1.html… for other rich results."""
    out.mkdir(parents=True, exist_ok=True)
    saved: list[Path] = []
    counts = {"chart": 0, "table": 0}
    for result in results:
        picture = _picture(result)
        if picture is not None:
            kind, (suffix, content) = "chart", picture
        elif result.html is not None:
            kind, suffix, content = "table", "html", result.html.encode()
        else:
            continue
        counts[kind] += 1
        path = out / f"{kind}-{counts[kind]}.{suffix}"
        path.write_bytes(content)
        saved.append(path)
    return saved


def _collect(sandbox: Sandbox, out: Path, allow_protected: bool, left: Downloaded) -> list[Path]:
    """What the code wrote to /home/user/out; `left` is told what of it was left out."""
    try:
        entries = sandbox.files.list(OUT)
    except PathNotFoundError:
        return []
    saved: list[Path] = []
    found: list[ProtectedPath] = []
    for entry in entries:
        if not (entry.is_file or entry.is_dir) or "/" in entry.name or entry.name in ("", ".", ".."):
            continue  # the guest's words: a name, and nothing else
        try:
            got = sandbox.files.download(
                f"{OUT}/{entry.name}", out / entry.name, allow_protected=allow_protected
            )
        except ProtectedPathError as error:
            found.append(ProtectedPath(entry.name, str(error.details.get("reason") or error.message)))
            left.protected_count += 1
            continue
        found += [replace(one, path=f"{entry.name}/{one.path}") for one in got.protected]
        left.protected_count += got.protected_count
        saved.append(got)
    left.protected = found
    return saved


def _as_dict(id: str, done: Execution, saved: list[Path]) -> dict[str, Any]:
    error = done.error
    return {
        "sandbox": id,
        "status": done.status,
        "text": done.text,
        "stdout": done.stdout,
        "stderr": done.stderr,
        "results": [{"main": result.main, "data": result.data} for result in done.results],
        "error": None
        if error is None
        else {"name": error.name, "value": error.value, "traceback": error.traceback},
        "duration_ms": done.duration_ms,
        "saved": [str(path) for path in saved],
    }
