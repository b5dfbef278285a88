"""Specs are data: what goes into keys is JSON-able and changes with what it stands for."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from llm4agents.errors import InvalidRequestError, TemplateNotFoundError
from llm4agents.images import spec
from llm4agents.images.rootfs import hooks


@pytest.mark.parametrize("template", spec.BUILTIN.values(), ids=lambda t: t.name)
def test_inputs_are_json_and_split_by_what_they_are_for(template: spec.TemplateSpec) -> None:
    rootfs, warm = json.dumps(template.rootfs_inputs()), json.dumps(template.warm_inputs())
    warmer = replace(template, environment={"A": "b"})
    assert json.dumps(warmer.rootfs_inputs()) == rootfs
    assert json.dumps(warmer.warm_inputs()) != warm
    larger = replace(template, packages=(*template.packages, "jq"))
    assert json.dumps(larger.rootfs_inputs()) != rootfs
    assert json.dumps(larger.warm_inputs()) == warm


@pytest.mark.parametrize("name", ["", "../x", "a/b", "A", "-a", "x" * 65])
def test_a_bad_name_is_an_invalid_request(name: str) -> None:
    with pytest.raises(InvalidRequestError):
        spec.get(name)


def test_an_unknown_name_says_which_there_are() -> None:
    with pytest.raises(TemplateNotFoundError, match=r"base, browser, bun, .*python"):
        spec.get("nodes")
    assert spec.get("python") is spec.PYTHON


def test_python_is_base_and_more() -> None:
    assert set(spec.BASE.packages) < set(spec.PYTHON.packages)
    assert set(spec.BASE.environment.items()) <= set(spec.PYTHON.environment.items())


def test_only_a_template_with_python_compiles_it() -> None:
    from pathlib import Path

    assert not [h for h in hooks(spec.BASE, "3.11", Path("/x y/o.tar")) if "compileall" in h]
    found = hooks(spec.PYTHON, "3.11", Path("/x y/o.tar"))
    assert [h for h in found if "compileall" in h and "unchecked-hash" in h]
    assert "tar-in '/x y/o.tar' /" in found


def test_packages_follow_the_release() -> None:
    rust = spec.BUILTIN["rust"]
    assert "rustc-web" in rust.packages_for("bookworm") and "rustc" in rust.packages_for("trixie")
    assert rust.packages_for("a-later-one") == rust.packages_for("trixie")
    assert spec.BASE.packages_for("trixie") == spec.BASE.packages


@pytest.mark.parametrize("template", spec.BUILTIN.values(), ids=lambda t: t.name)
def test_what_is_stated_can_be_had(template: spec.TemplateSpec) -> None:
    from llm4agents.images.overlay import DATA

    for python in ("3.11", "3.13") if template.wheels else ():
        assert (DATA / f"{template.wheels}-{python}.lock").exists()
    assert all(one.integrity.startswith("sha512-") for one in template.npm)
    assert all(step.argv[0].startswith("/") for step in template.warm_up.steps)
    assert {"PATH", "SSL_CERT_FILE"} <= set(template.environment)
