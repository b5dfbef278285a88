"""LLM4Agents sandbox: every sandbox is a microVM cloned from a frozen, warmed machine.

    from llm4agents import Sandbox

    with Sandbox() as sandbox:
        print(sandbox.run_code("6 * 7").text)

This file is the whole public surface. Names are imported when they are first used, so that
`import llm4agents` and the command line start fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llm4agents.errors import (
        AmbiguousRequestError,
        AuthenticationError,
        BootError,
        CapacityError,
        ConflictError,
        ConnectionLostError,
        CorruptSnapshotError,
        ForbiddenError,
        GuestError,
        HeadTooLargeError,
        HostSetupError,
        InvalidRequestError,
        LLM4AgentsError,
        MediaTypeError,
        MethodNotAllowedError,
        MisdirectedError,
        NotFoundError,
        NotStartedError,
        PathNotFoundError,
        PortError,
        PortRefusedError,
        ProgramFailedError,
        ProtocolError,
        QuotaError,
        SandboxDiedError,
        SandboxNotFoundError,
        SandboxPausedError,
        ServerUnavailableError,
        SlowRequestError,
        TemplateBuildError,
        TemplateNotFoundError,
        TimedOutError,
        TooLargeError,
        UnknownOutcomeError,
        UnsupportedPlatformError,
        VersionMismatchError,
        VmmError,
    )
    from llm4agents.sdk._async.observe import AsyncObserver
    from llm4agents.sdk._async.sandbox import AsyncSandbox
    from llm4agents.sdk._async.secrets import AsyncSecrets
    from llm4agents.sdk._async.template import AsyncTemplate
    from llm4agents.sdk._async.volumes import AsyncVolume
    from llm4agents.sdk._jobs import JobInfo, JobRun
    from llm4agents.sdk._landing import Downloaded, ProtectedPath
    from llm4agents.sdk._recipes import BuildEvent, BuiltTemplate
    from llm4agents.sdk._secrets import SecretInfo
    from llm4agents.sdk._sync.observe import Observer
    from llm4agents.sdk._sync.sandbox import Sandbox
    from llm4agents.sdk._sync.secrets import Secrets
    from llm4agents.sdk._sync.template import Template
    from llm4agents.sdk._sync.volumes import Volume
    from llm4agents.sdk._volumes import VolumeInfo
    from llm4agents.sdk.results import (
        CodeContext,
        EmulationWarning,
        ExecResult,
        Execution,
        ExecutionError,
        FileInfo,
        NetworkInfo,
        Output,
        Port,
        ProcessInfo,
        ProcessOutput,
        Result,
        SandboxInfo,
        Traffic,
    )
    from llm4agents.sdk.tree_results import FileChange, FileMatch, SearchResult

__version__ = "0.1.0"

_ERRORS = (
    "AuthenticationError BootError CapacityError ConflictError ConnectionLostError CorruptSnapshotError "
    "ForbiddenError GuestError "
    "HostSetupError InvalidRequestError LLM4AgentsError NotFoundError NotStartedError "
    "PathNotFoundError PortError PortRefusedError ProgramFailedError ProtocolError "
    "ProtectedPathError QuotaError SandboxDiedError SandboxNotFoundError "
    "SandboxPausedError ServerUnavailableError TemplateBuildError TemplateNotFoundError TimedOutError "
    "UnknownOutcomeError UnsupportedPlatformError VersionMismatchError VmmError "
    "AuthenticationError ForbiddenError QuotaError HeadTooLargeError MisdirectedError SlowRequestError TooLargeError "
    "MediaTypeError MethodNotAllowedError AmbiguousRequestError"
)
_RESULTS = (
    "CodeContext EmulationWarning ExecResult Execution ExecutionError FileInfo NetworkInfo Output Port ProcessInfo "
    "ProcessOutput Result SandboxInfo Traffic"
)
_HOMES = {
    "Sandbox": "llm4agents.sdk._sync.sandbox",
    "AsyncSandbox": "llm4agents.sdk._async.sandbox",
    "Observer": "llm4agents.sdk._sync.observe",
    "AsyncObserver": "llm4agents.sdk._async.observe",
    "Secrets": "llm4agents.sdk._sync.secrets",
    "AsyncSecrets": "llm4agents.sdk._async.secrets",
    "SecretInfo": "llm4agents.sdk._secrets",
    "Template": "llm4agents.sdk._sync.template",
    "AsyncTemplate": "llm4agents.sdk._async.template",
    "BuildEvent": "llm4agents.sdk._recipes",
    "BuiltTemplate": "llm4agents.sdk._recipes",
    "Volume": "llm4agents.sdk._sync.volumes",
    "AsyncVolume": "llm4agents.sdk._async.volumes",
    "VolumeInfo": "llm4agents.sdk._volumes",
    "JobInfo": "llm4agents.sdk._jobs",
    "JobRun": "llm4agents.sdk._jobs",
    **dict.fromkeys(_ERRORS.split(), "llm4agents.errors"),
    **dict.fromkeys(_RESULTS.split(), "llm4agents.sdk.results"),
    **dict.fromkeys(("Downloaded", "ProtectedPath"), "llm4agents.sdk._landing"),
    **dict.fromkeys(("FileChange", "FileMatch", "SearchResult"), "llm4agents.sdk.tree_results"),
}

__all__ = [
    "AmbiguousRequestError",
    "AsyncObserver",
    "AsyncSandbox",
    "AsyncSecrets",
    "AsyncTemplate",
    "AsyncVolume",
    "AuthenticationError",
    "BootError",
    "BuildEvent",
    "BuiltTemplate",
    "CapacityError",
    "CodeContext",
    "ConflictError",
    "ConnectionLostError",
    "CorruptSnapshotError",
    "Downloaded",
    "EmulationWarning",
    "ExecResult",
    "Execution",
    "ExecutionError",
    "FileChange",
    "FileInfo",
    "FileMatch",
    "ForbiddenError",
    "GuestError",
    "HeadTooLargeError",
    "HostSetupError",
    "InvalidRequestError",
    "JobInfo",
    "JobRun",
    "LLM4AgentsError",
    "MediaTypeError",
    "MethodNotAllowedError",
    "MisdirectedError",
    "NetworkInfo",
    "NotFoundError",
    "NotStartedError",
    "Observer",
    "Output",
    "PathNotFoundError",
    "Port",
    "PortError",
    "PortRefusedError",
    "ProcessInfo",
    "ProcessOutput",
    "ProgramFailedError",
    "ProtectedPath",
    "ProtectedPathError",
    "ProtocolError",
    "QuotaError",
    "Result",
    "Sandbox",
    "SandboxDiedError",
    "SandboxInfo",
    "SandboxNotFoundError",
    "SandboxPausedError",
    "SearchResult",
    "SecretInfo",
    "Secrets",
    "ServerUnavailableError",
    "SlowRequestError",
    "Template",
    "TemplateBuildError",
    "TemplateNotFoundError",
    "TimedOutError",
    "TooLargeError",
    "Traffic",
    "UnknownOutcomeError",
    "UnsupportedPlatformError",
    "VersionMismatchError",
    "VmmError",
    "Volume",
    "VolumeInfo",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
