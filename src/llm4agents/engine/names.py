"""What a template is called: by its project (`NAME`), and on this host (`NAME@PROJECT`, its ref). Pure.

Built-in ones and those of the project `default` have the same in both. `@` is in no name that a caller gives, so a ref
can be guessed by nobody: `ref` refuses it.
"""

from __future__ import annotations

import re

from llm4agents.engine.principal import DEFAULT
from llm4agents.errors import InvalidRequestError, TemplateNotFoundError
from llm4agents.images import spec

_PROJECT = re.compile(r"prj_[a-z0-9]{12}")


def ref(name: str, project: str) -> str:
    """The template that `name` means to a project: a built-in one, else its own. Raises TemplateNotFoundError."""
    if "@" in name:
        raise TemplateNotFoundError(
            f"there is no template {name[:100]!r}", hint="llm4agents template ls shows what there is"
        )
    return name if project == DEFAULT or name in spec.BUILTIN else f"{name}@{project}"


def new(name: str, project: str) -> str:
    """The ref of a template that a project is about to make. Raises InvalidRequestError."""
    if not spec.valid_name(name):
        raise InvalidRequestError(
            f"{name[:100]!r} cannot be a template's name",
            hint="a-z, 0-9, '.', '-' and '_', beginning with a letter",
        )
    return ref(name, project)


def shown(template: str) -> str:
    """What its project calls the template of that ref."""
    return template.partition("@")[0]


def project_of(template: str) -> str | None:
    """Whose the template of that ref is; None for a built-in one, which is everybody's."""
    name, _, project = template.partition("@")
    return None if not project and name in spec.BUILTIN else project or DEFAULT


def valid(template: str) -> bool:
    """Whether it can be a ref: what is looked for on disk is nothing else."""
    name, at, project = template.partition("@")
    return spec.valid_name(name) and (not at or _PROJECT.fullmatch(project) is not None)
