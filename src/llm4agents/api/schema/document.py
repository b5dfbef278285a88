"""The OpenAPI description: the routes' own parameters and bodies, as FastAPI finds them, and what `operations` says.

Built once for each application, in a thread, when it is first asked for: a server that nobody asks never loads this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from llm4agents.api.access.once import NOT_KEPT
from llm4agents.api.access.table import OPEN, TABLE
from llm4agents.api.schema import problems, words
from llm4agents.api.schema.kinds import NDJSON, Lines, Operation, Raw, Success
from llm4agents.api.schema.operations import OPERATIONS, TAGS

REF: Final = "#/components/schemas/"
REQUESTS: Final = {
    "Attributes": "AttributesChange",
    "Build": "TemplateBuild",
    "Capture": "CaptureStart",
    "ChangedProject": "ProjectChange",
    "Code": "CodeRun",
    "Context": "ContextName",
    "Create": "SandboxCreate",
    "Exec": "ExecRequest",
    "Fork": "SandboxFork",
    "Job": "JobCreate",
    "Link": "LinkMake",
    "Detach": "VolumeDetach",
    "Mkdir": "DirectoryMake",
    "Mount": "VolumeMount",
    "Move": "FileMove",
    "Network": "NetworkChange",
    "NewContext": "ContextCreate",
    "NewInvite": "InviteCreate",
    "NewKey": "KeyCreate",
    "NewProject": "ProjectCreate",
    "NewTemplate": "TemplateCreate",
    "NewVolume": "VolumeCreate",
    "Nothing": "Empty",
    "PortUrl": "PortUrlCreate",
    "Prune": "PruneRequest",
    "Registration": "Register",
    "Registry": "RegistryCredentials",
    "Remove": "FileRemove",
    "Resize": "ProcessResize",
    "Resume": "SandboxResume",
    "Search": "FileSearch",
    "SetTraffic": "TrafficChange",
    "Signal": "ProcessSignal",
    "Snapshot": "SandboxSnapshot",
    "Start": "ProcessStart",
    "Stdin": "ProcessStdin",
    "Stop": "ServerStop",
    "Timeout": "SandboxTimeout",
    "Traffic": "TrafficWish",
    "Tty": "Terminal",
    "Why": "NetworkQuestion",
    "Wish": "ShelfWish",
    "Wishes": "PoolChange",
}
"""What the routes' request models are called in the description."""


class Undescribed(ValueError):
    """A route has no operation, or an operation no route."""


def document(app: FastAPI, *, closed: bool = False) -> dict[str, Any]:
    """OpenAPI 3.1. `closed`: answers with a field that is not described are wrong, as tests want it.

    Raises Undescribed.
    """
    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = _requests(found.get("components", {}).get("schemas", {}))
    paths: dict[str, dict[str, Any]] = {}
    there = {
        (method.upper(), path)
        for path, methods in found["paths"].items()
        for method in methods
        if method != "head"
    }
    if there != OPERATIONS.keys():
        none, gone = sorted(there - OPERATIONS.keys()), sorted(OPERATIONS.keys() - there)
        raise Undescribed(f"not described (api/schema): {none}; described, and no route: {gone}")
    answers = _answers(schemas, closed=closed)
    for (method, path), operation in OPERATIONS.items():
        of_fastapi = _renamed(found["paths"][path][method.lower()])
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation, of_fastapi)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": app.title,
            "version": app.version,
            "summary": words.SUMMARY,
            "description": words.DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/", "description": "The server that gave you this."}],
        "security": [{"bearer": []}, {"apiKey": []}],
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": dict(sorted({**schemas, **answers}.items())),
            "responses": {name: _problem(status) for status, (name, _) in problems.WORDS.items()},
            "headers": words.HEADERS,
            "parameters": words.SHARED_PARAMETERS,
            "securitySchemes": words.SECURITY,
        },
        "x-websockets": list(words.WEBSOCKETS),
    }


def text_of(described: dict[str, Any]) -> bytes:
    """As it is served."""
    return json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()


# -- schemas ----------------------------------------------------------------------------------------------------


def _renamed(value: Any) -> Any:
    """References to requests by the names they have here."""
    if isinstance(value, dict):
        return {
            key: f"{REF}{REQUESTS.get(found.removeprefix(REF), found.removeprefix(REF))}"
            if key == "$ref" and isinstance(found, str)
            else _renamed(found)
            for key, found in value.items()
        }
    return [_renamed(one) for one in value] if isinstance(value, list) else value


def _requests(found: dict[str, Any]) -> dict[str, Any]:
    kept = {
        REQUESTS.get(name, name): _renamed(schema)
        for name, schema in found.items()
        if name not in ("HTTPValidationError", "ValidationError")
    }
    for name, schema in kept.items():
        schema["title"] = name
    return kept


def models_of(operation: Operation) -> Iterator[type[BaseModel]]:
    """The models that its answers are of."""
    for one in (*operation.answers, *(model for model, _ in operation.also.values())):
        if isinstance(one, Lines):
            yield from one.of
        elif not isinstance(one, Raw):
            yield one


def _answers(requests: dict[str, Any], *, closed: bool) -> dict[str, Any]:
    models: set[type[BaseModel]] = {
        model for operation in OPERATIONS.values() for model in models_of(operation)
    }
    models |= {problems.Problem, problems.ErrorLine}
    ordered = sorted(models, key=lambda model: model.__name__)
    _, described = models_json_schema(
        [(model, "validation") for model in ordered], ref_template=REF + "{model}"
    )
    found: dict[str, Any] = described["$defs"]
    if wrong := sorted(name for name in found if "__" in name or name in requests):
        raise Undescribed(f"names that two models have: {wrong}")
    for schema in found.values():
        if not closed and schema.get("additionalProperties") is False:
            del schema["additionalProperties"]  # a later server may answer with more
    for operation in OPERATIONS.values():
        for one in operation.answers:
            if isinstance(one, Lines):
                of: tuple[type[BaseModel], ...] = (*one.of, problems.ErrorLine)
                lines = [{"$ref": f"{REF}{model.__name__}"} for model in of]
                text = f"A line of a stream. {one.words} Or, last, a problem."
                found[one.name] = {"title": one.name, "description": text, "oneOf": lines}
    return found


# -- operations -------------------------------------------------------------------------------------------------


def _operation(method: str, path: str, operation: Operation, of_fastapi: dict[str, Any]) -> dict[str, Any]:
    needs = TABLE[path][method]
    scopes = [] if needs == OPEN else needs.split()
    text = operation.words
    if scopes:
        text = f"{text}\n\nScope: {' or '.join(f'`{one}`' for one in scopes)}.".strip()
    described: dict[str, Any] = {
        "operationId": operation.id,
        "tags": [operation.tag],
        "summary": operation.summary,
        "description": text,
        "parameters": list(_parameters(method, path, operation, of_fastapi)),
    }
    body = _body(operation, of_fastapi)
    if body is not None:
        described["requestBody"] = body
    described["responses"] = _responses(method, operation, needs, with_body=body is not None)
    if needs == OPEN:
        described["security"] = [{}, {"bearer": []}, {"apiKey": []}]
    else:
        described["x-scopes"] = scopes
    return described


def _parameters(
    method: str, path: str, operation: Operation, of_fastapi: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    for found in of_fastapi.get("parameters", ()):
        name = found["name"]
        schema = {key: value for key, value in found["schema"].items() if key != "title"}
        if found["in"] == "path":
            schema = {**schema, **words.PATH_SCHEMAS.get(name, {})}
        text = operation.parameters.get(name, words.PARAMETERS.get(name))
        if text is None:
            raise Undescribed(f"{operation.id}: nothing says what {name!r} is (api/schema/words.py)")
        required = found.get("required", False)
        yield {"name": name, "in": found["in"], "required": required, "description": text, "schema": schema}
    yield from (dict(one) for one in operation.more_parameters)
    if method == "POST" and path not in NOT_KEPT:
        yield {"$ref": "#/components/parameters/IdempotencyKey"}


def _body(operation: Operation, of_fastapi: dict[str, Any]) -> dict[str, Any] | None:
    if isinstance(operation.body, Raw):
        schema = {"type": "string", "format": "binary"}
        return {
            "required": False,  # none is an empty one
            "description": operation.body.words,
            "content": {operation.body.media_type: {"schema": schema}},
        }
    found: dict[str, Any] | None = of_fastapi.get("requestBody")
    if found is None:
        return None
    content = found["content"]["application/json"]
    if operation.body is None:
        raise Undescribed(f"{operation.id}: its body has no example")
    return {
        "required": found.get("required", False),
        "content": {"application/json": {**content, "example": operation.body}},
    }


def _responses(method: str, operation: Operation, needs: str, *, with_body: bool) -> dict[str, Any]:
    statuses = {*problems.ALWAYS, *problems.BY_REACH[operation.reach], *operation.problems}
    if needs != OPEN:
        statuses |= {*problems.WITH_KEY}
    else:
        statuses.add(401)  # for a key that is none
    if with_body:
        statuses |= {*problems.WITH_BODY}
    if method == "POST":
        statuses.add(409)  # of its idempotency key
    statuses -= operation.also.keys()
    found: dict[str, Any] = {str(operation.status): _success(operation)}
    if any(isinstance(one, Lines) for one in operation.answers) and operation.status != 200:
        lines = [one for one in operation.answers if isinstance(one, Lines)]
        found[str(operation.status)] = _success(
            operation, [one for one in operation.answers if one not in lines]
        )
        found["200"] = _success(operation, lines)
    for status, (model, text) in operation.also.items():
        schema = {"$ref": f"{REF}{model.__name__}"}
        headers = {"X-Request-ID": _header("X-Request-ID")}
        content = {"application/json": {"schema": schema}}
        found[str(status)] = {"description": text, "headers": headers, "content": content}
    for status in statuses:
        found[str(status)] = {"$ref": f"#/components/responses/{problems.WORDS[status][0]}"}
    return dict(sorted(found.items()))


def _header(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/headers/{re.sub('-', '', name)}"}


def _success(operation: Operation, of: Sequence[Success] | None = None) -> dict[str, Any]:
    headers = {"X-Request-ID": _header("X-Request-ID")}
    content: dict[str, Any] = {}
    text: list[str] = []
    for one in operation.answers if of is None else of:
        if isinstance(one, Lines):
            examples = {
                f"{at + 1}-{line.get('type', 'line')}": {"value": line} for at, line in enumerate(one.example)
            }
            content[NDJSON] = {
                "schema": {"$ref": f"{REF}{one.name}"},
                **({"examples": examples} if examples else {}),
            }
            text.append(f"{one.words} A JSON object on each line; the schema is that of a line.")
        elif isinstance(one, Raw):
            schema = {"type": "string"} if one.text else {"type": "string", "format": "binary"}
            content[one.media_type] = {"schema": schema}
            text.append(one.words)
            for name, about in one.headers.items():
                headers[name] = {"description": about, "schema": {"type": "string"}}
        else:
            content["application/json"] = {"schema": {"$ref": f"{REF}{one.__name__}"}}
            if operation.example is not None:
                content["application/json"]["example"] = operation.example
            text.append((one.__doc__ or "").strip().partition("\n")[0])
    said = " ".join(filter(None, text)) or operation.summary + "."
    described: dict[str, Any] = {"description": said, "headers": headers, "content": content}
    if (operation.links and of is None) or (of and not any(isinstance(one, Lines) for one in of)):
        links = {
            name: {"operationId": target, "parameters": dict(given)}
            for name, (target, given) in operation.links.items()
        }
        if links:
            described["links"] = links
    return described


def _problem(status: int) -> dict[str, Any]:
    _, text = problems.WORDS[status]
    codes = problems.codes_of(status)
    headers: dict[str, Any] = {"X-Request-ID": _header("X-Request-ID")}
    if status in (409, 429, 503):
        headers["Retry-After"] = _header("Retry-After")
    if status == 401:
        headers["WWW-Authenticate"] = _header("WWW-Authenticate")
    if status == 405:
        headers["Allow"] = _header("Allow")
    told = f" `code` is one of {', '.join(f'`{code}`' for code in codes)}." if codes else ""
    known = problems.example(status)
    return {
        "description": text + told,
        "headers": headers,
        "content": {"application/problem+json": {"schema": {"$ref": f"{REF}Problem"}, "example": known}},
    }
