"""The description of the API: complete, valid, true. Real answers against it: `test_schema_answers`, tests/vm."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jsonschema  # type: ignore[import-untyped]
import pytest
import schemathesis
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from llm4agents import errors
from llm4agents.api.access.table import OPEN, TABLE
from llm4agents.api.app import create_app
from llm4agents.api.context import Context
from llm4agents.api.schema import document
from llm4agents.api.schema.kinds import NDJSON
from llm4agents.api.schema.operations import OPERATIONS, TAGS
from tests.unit.api.served import serving

FILE = Path(__file__).resolve().parents[3] / "clients" / "openapi.json"
Doc = dict[str, Any]


@pytest.fixture(scope="module")
def doc() -> Doc:
    return document.document(create_app(cast(Context, None)), closed=True)


def operations(doc: Doc) -> Iterator[tuple[str, str, Doc]]:
    for path, methods in doc["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def responses(doc: Doc, operation: Doc) -> Iterator[tuple[int, Doc]]:
    for status, found in operation["responses"].items():
        if "$ref" in found:
            found = doc["components"]["responses"][found["$ref"].rpartition("/")[2]]
        yield int(status), found


def test_every_route_has_an_operation_with_all_that_belongs_to_it(doc: Doc) -> None:
    ids = set()
    for method, path, operation in operations(doc):
        place = f"{method} {path}"
        ids.add(operation["operationId"])
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", operation["operationId"]), place
        assert operation["summary"] and not operation["summary"].endswith("."), place
        assert operation["tags"] and set(operation["tags"]) <= TAGS.keys(), place
        assert all(one.get("$ref") or one["description"] for one in operation["parameters"]), place
        found = dict(responses(doc, operation))
        good = [status for status in found if status < 300]
        assert good and all(found[status]["content"] for status in good), f"{place}: no model of success"
        bad = [status for status in found if status >= 400]
        assert {400, 429, 500, 503} <= set(bad), place
        for status in bad:
            if status not in OPERATIONS[method, path].also:
                assert "application/problem+json" in found[status]["content"], f"{place} {status}"
        if TABLE[path][method] == OPEN:
            assert {} in operation["security"], place
        else:
            assert {401, 403} <= set(bad), place
            assert operation["x-scopes"] == TABLE[path][method].split(), place
    assert len(ids) == len(OPERATIONS)


def test_what_is_described_is_under_v1_and_nothing_of_v1_is_missing(doc: Doc) -> None:
    # Not described: what is not HTTP's request and answer, or another protocol's.
    left_out = {"/openapi.json", "/mcp"}
    for path, methods in TABLE.items():
        if path in left_out or "/ports/{port}/{" in path:
            continue
        for method in methods:
            if method == "WS":
                assert path in {one["path"] for one in doc["x-websockets"]}
            elif method != "HEAD" and path not in _PLANNED:
                assert method.lower() in doc["paths"].get(path, {}), f"{method} {path}"


_PLANNED: set[str] = set()


def test_it_is_openapi_3_1(doc: Doc) -> None:
    assert doc["openapi"] == "3.1.0"
    schemathesis.openapi.from_dict(doc).validate()
    text = json.dumps(doc)
    for ref in set(re.findall(r'"\$ref": "#/([^"]+)"', text)):
        found: Any = doc
        for part in ref.split("/"):
            found = found[part]
    named = {name for one in OPERATIONS.values() for name, _ in one.links.values()}
    assert named <= {one.id for one in OPERATIONS.values()}


def test_examples_are_what_they_are_examples_of(doc: Doc) -> None:
    registry: Any = Registry().with_resource("urn:doc", DRAFT202012.create_resource(doc))

    def check(place: str, schema: Doc, value: Any) -> None:
        here = json.loads(json.dumps(schema).replace('"#/', '"urn:doc#/'))
        validator = jsonschema.Draft202012Validator(here, registry=registry)
        assert not [error.message for error in validator.iter_errors(value)], f"{place}: {value}"

    count = 0
    for method, path, operation in operations(doc):
        place = f"{method} {path}"
        body = operation.get("requestBody", {}).get("content", {}).get("application/json")
        if body is not None:
            check(place, body["schema"], body["example"])
        for status, found in responses(doc, operation):
            for media, content in found["content"].items():
                if media in ("application/json", "application/problem+json") and status not in (
                    OPERATIONS[method, path].also
                ):
                    assert "example" in content, f"{place} {status}: no example of the answer"
                    check(f"{place} {status}", content["schema"], content["example"])
                    count += 1
                for line in content.get("examples", {}).values():
                    assert media == NDJSON
                    check(f"{place} line", content["schema"], line["value"])
    assert count > 100


def test_every_code_of_a_problem_is_described(doc: Doc) -> None:
    known = set(errors.all_errors()) - {"error", "not_started"}
    assert set(doc["components"]["schemas"]["Problem"]["properties"]["code"]["x-known-values"]) == known
    said = json.dumps(doc["components"]["responses"])
    for code, error in errors.all_errors().items():
        if code in known and error.outcome != "finished":
            assert f"`{code}`" in said, f"{code}: {error.http_status} is not in api/schema/problems.py"


def test_the_file_that_clients_are_made_from_is_true() -> None:
    described = document.document(create_app(cast(Context, None)))
    described["info"]["version"] = "1"
    assert json.loads(FILE.read_text()) == described, "run scripts/openapi.py"


def test_it_is_served_to_everybody_and_built_once(tmp_path: Path) -> None:
    with serving(tmp_path) as here:
        first = here.ask("GET", "/openapi.json")
        assert (first.status_code, first.headers["content-type"]) == (200, "application/json")
        assert first.json()["paths"].keys() == {path for _, path in OPERATIONS}
        again = here.ask("GET", "/openapi.json", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert here.ask("HEAD", "/openapi.json").headers["content-length"] == str(len(first.content))
