"""Templates: what can be created, how it is built, what a build says. Models and operations. Pure."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field

from llm4agents.api.schema.kinds import NOW, Answer, Json, Lines, Operation, Operations, Raw


class Package(Answer):
    """A part of a template."""

    kind: str = Field(description="`debian`, `python`, …")
    name: str
    version: str
    licence: str | None


class Template(Answer):
    """One shape of a template that is built."""

    name: str
    project: str | None = Field(description="Whose it is; null: everybody's.")
    built: Literal[True]
    key: str = Field(description="Digest of everything that went in.")
    vcpus: int
    memory_mib: int
    bytes: int = Field(description="On disk, without what it shares.")
    rootfs_bytes: int
    created_at: float
    packages: list[Package]
    vmm: str
    nested: bool
    description: str
    languages: list[str] = Field(description="What it is for, of a built-in one.")
    defaults: dict[str, Json] | None = Field(description="`user` and `workdir` of calls that name none.")
    start: Json = Field(description="What was started in it, and how it was found ready.")


class TemplateNotBuilt(Answer):
    """One that is built when it is first asked for."""

    name: str
    built: Literal[False]
    vcpus: int
    memory_mib: int
    description: str
    languages: list[str]


class TemplateList(Answer):
    data: list[Template | TemplateNotBuilt]


class TemplateInfo(Answer):
    """A template, each of its shapes, and the recipe it was made by."""

    name: str
    variants: list[Template | TemplateNotBuilt]
    recipe: dict[str, Json] | None


class TemplateRemoved(Answer):
    name: str


class Exported(Answer):
    file: str
    bytes: int


class Sent(Answer):
    """Files of a copy that the server has."""

    sha256: str
    bytes: int


class BuildProgressLine(Answer):
    """A step of work that is under way, and is no step of the recipe."""

    type: Literal["progress"]
    step: str
    detail: str
    fraction: float | None


class BuildBegunLine(Answer):
    type: Literal["build"]
    name: str
    steps: int
    force: bool


class BuildStepLine(Answer):
    """A step of the recipe has come to another state."""

    type: Literal["step"]
    step: int = Field(description="Which, from 0.")
    op: str
    words: str
    status: str = Field(description="`waiting`, `running`, `cached`, `done`, `failed`.")
    ms: int | None = None


class BuildLogLine(Answer):
    """A line of what a step says."""

    type: Literal["log"]
    step: int
    stream: Literal["stdout", "stderr"]
    text: str


class BuildMissedLine(Answer):
    """The reader was too slow for some."""

    type: Literal["missed"]
    events: int


class BuildEndLine(Answer):
    type: Literal["end"]
    state: Literal["done", "failed", "cancelled"]
    detail: str | None = None
    error: dict[str, Json] | None = Field(
        default=None, description="A problem: what failed, and in which step."
    )


class TemplateLine(Template):
    """The last line: the template."""

    type: Literal["template"]


class Build(Answer):
    """A build under way, or the last one."""

    name: str
    state: str = Field(description="`building`, `done`, `failed`, `cancelled`, or `lost`: its server died.")
    steps: list[BuildStepLine]
    events: list[dict[str, Json]] = Field(description="The lines it has said, as a stream has them.")
    dropped: int = Field(description="How many are not kept any more.")


TEMPLATE: Final[dict[str, Any]] = {
    "name": "base",
    "project": None,
    "built": True,
    "key": "4d5f7a0f0c1b",
    "vcpus": 1,
    "memory_mib": 1024,
    "bytes": 67_108_864,
    "rootfs_bytes": 54_525_952,
    "created_at": NOW,
    "packages": [{"kind": "debian", "name": "bash", "version": "5.2.15-2+b7", "licence": "GPL-3+"}],
    "vmm": "qemu",
    "nested": False,
    "description": "Debian with a shell",
    "languages": [],
    "defaults": None,
    "start": None,
}
_STEP: Final = {"type": "step", "step": 0, "op": "run", "words": "run make", "status": "running"}
_RECIPE: Final = {"from": {"template": "python"}, "steps": [{"pip": ["requests"]}]}
_BUILD_LINES = (
    BuildBegunLine,
    BuildStepLine,
    BuildLogLine,
    BuildProgressLine,
    BuildMissedLine,
)
_UNBUILT: Final = {
    "name": "python",
    "built": False,
    "vcpus": 1,
    "memory_mib": 1024,
    "description": "Python with pandas",
    "languages": ["python"],
}
_N = "/v1/templates/{name}"

OPERATIONS: Final[Operations] = {
    ("GET", "/v1/templates"): Operation(
        "templates_list",
        "Templates",
        "List templates",
        (TemplateList,),
        words="Each shape that is built, of the caller's project and of everybody's, and built-in ones "
        "that are not yet.",
        example={"data": [TEMPLATE, _UNBUILT]},
    ),
    ("POST", "/v1/templates"): Operation(
        "templates_create",
        "Templates",
        "Build a template of one's own",
        (
            Lines(
                "TemplateCreateLine",
                (*_BUILD_LINES, TemplateLine),
                "What happens as it does, then the template. A failure is the last line, and names the step.",
                (_STEP, {"type": "template", **TEMPLATE}),
            ),
        ),
        words="From a recipe (docs/reference/template-toml.md). Steps that were done before are not done again. Who "
        "goes away ends the build, if nobody else waits for it.",
        problems=(404, 409, 422, 501),
        body={"name": "mine", "recipe": _RECIPE},
    ),
    ("POST", "/v1/templates/import"): Operation(
        "templates_import",
        "Templates",
        "Take in a template from a file of the node",
        (Template,),
        problems=(404, 409),
        body={"file": "/srv/base.l4a"},
        example=TEMPLATE,
    ),
    ("POST", f"{_N}/export"): Operation(
        "templates_export",
        "Templates",
        "Write a template to a file of the node",
        (Exported,),
        problems=(404, 409),
        body={"file": "/srv/base.l4a"},
        example={"file": "/srv/base.l4a", "bytes": 41_943_040},
    ),
    ("POST", f"{_N}/build"): Operation(
        "templates_build",
        "Templates",
        "Build a shape of a template",
        (
            Lines(
                "TemplateBuildLine",
                (BuildProgressLine, TemplateLine),
                "Lines of progress, then the template.",
                ({"type": "progress", "step": "rootfs", "detail": "bash", "fraction": 0.4},),
            ),
        ),
        words="`force`: anew.",
        problems=(404, 409, 422, 501),
        body={"memory_mib": 512},
    ),
    ("GET", f"{_N}/build"): Operation(
        "templates_build_state",
        "Templates",
        "How its build is",
        (
            Build,
            Lines(
                "TemplateFollowLine", (*_BUILD_LINES, BuildEndLine), "With `follow`: its lines, to its end."
            ),
        ),
        problems=(404,),
        example={"name": "mine", "state": "building", "steps": [_STEP], "events": [_STEP], "dropped": 0},
    ),
    ("DELETE", f"{_N}/build"): Operation(
        "templates_cancel_build",
        "Templates",
        "End its build",
        (TemplateRemoved,),
        words="Whoever waits for it. The steps that were done are kept.",
        problems=(404, 409),
        example={"name": "mine"},
    ),
    ("GET", _N): Operation(
        "templates_get",
        "Templates",
        "Look at a template",
        (TemplateInfo,),
        problems=(404,),
        example={"name": "base", "variants": [TEMPLATE], "recipe": None},
    ),
    ("DELETE", _N): Operation(
        "templates_remove",
        "Templates",
        "Remove a template",
        (TemplateRemoved,),
        problems=(404, 409),
        example={"name": "mine"},
    ),
    ("GET", "/v1/templates/files/{digest}"): Operation(
        "templates_files_get",
        "Templates",
        "Whether the files of a copy are there",
        (Sent,),
        problems=(404,),
        example={
            "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
            "bytes": 10_240,
        },
    ),
    ("PUT", "/v1/templates/files/{digest}"): Operation(
        "templates_files_put",
        "Templates",
        "Send the files of a copy",
        (Sent,),
        problems=(409,),
        body=Raw(
            "application/x-tar",
            "Files, directories and links below one directory; its SHA-256 is the digest.",
        ),
        example={
            "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
            "bytes": 10_240,
        },
    ),
}
