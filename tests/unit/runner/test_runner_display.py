"""Rich results, with small classes standing for what numpy, pandas and matplotlib bring (those run in tests/vm)."""

from __future__ import annotations

import base64

import pytest

from tests.unit.runner.runner_process import Runner

FRAME = """
class Frame:
    def __repr__(self): return "text"
    def _repr_html_(self): {html}
"""


def test_html_and_text(runner: Runner) -> None:
    cell = runner.ok(FRAME.format(html="return '<b>'") + "Frame()")
    assert cell.results == [
        {"type": "result", "main": True, "data": {"text/html": "<b>", "text/plain": "text"}}
    ]


@pytest.mark.parametrize("html", ["1/0", "return None", "raise NotImplementedError"])
def test_a_representation_that_fails_falls_back_to_text(runner: Runner, html: str) -> None:
    assert runner.ok(FRAME.format(html=html) + "Frame()").results[0]["data"] == {"text/plain": "text"}


def test_images_are_base64_and_json_is_json(runner: Runner) -> None:
    cell = runner.ok(
        "class A:\n    def _repr_png_(self): return b'\\x89PNG'\n    def _repr_svg_(self): return '<svg/>'\n"
        "    def _repr_json_(self): return {'a': [1, None]}\nA()"
    )
    data = cell.results[0]["data"]
    assert base64.b64decode(data["image/png"]) == b"\x89PNG"
    assert data["image/svg+xml"] == "<svg/>" and data["application/json"] == {"a": [1, None]}


def test_mimebundle_wins_and_other_objects_become_text(runner: Runner) -> None:
    cell = runner.ok(
        "class A:\n    def _repr_mimebundle_(self, include=None, exclude=None):\n"
        "        return {'text/plain': 'p', 'application/x+json': {'b': 1}, 'application/json': float('nan')}, {}\nA()"
    )
    data = cell.results[0]["data"]
    assert data["application/x+json"] == '{"b": 1}' and "application/json" not in data
    assert data["text/plain"].startswith("p\n[application/json left out")


def test_display_is_there_and_comes_in_order(runner: Runner) -> None:
    cell = runner.ok("print('a')\ndisplay(1, 'b')\nprint('c')")
    assert [e.get("text") or e.get("data", {}).get("text/plain") for e in cell.events[:-1]] == [
        "a\n",
        "1",
        "'b'",
        "c\n",
    ]
    assert not any(event["main"] for event in cell.results)
    cell = runner.ok("display({'text/html': '<i>'}, raw=True)")
    assert cell.results[0]["data"] == {"text/html": "<i>"}


def test_a_repr_that_raises(runner: Runner) -> None:
    cell = runner.ok("class A:\n    def __repr__(self): raise ValueError('no')\nA()")
    assert cell.value == "<A whose repr() raised ValueError: no>"


def test_a_repr_that_loops_can_be_interrupted(runner: Runner) -> None:
    cell = runner.start(
        "class A:\n    def __repr__(self):\n        print('looping')\n        while True: pass\nA()"
    )
    cell.until("looping")
    runner.op("interrupt")
    assert cell.wait().status == "interrupted"


def test_an_object_that_answers_to_everything_is_only_text(runner: Runner) -> None:
    cell = runner.ok("from unittest.mock import MagicMock\nMagicMock(name='m')")
    assert list(cell.results[0]["data"]) == ["text/plain"]


def test_huge_values_are_cut_with_a_note(runner: Runner) -> None:
    text = runner.ok("'x' * 5_000_000").value
    assert len(text) < 1_100_000 and "characters left out" in text
    cell = runner.ok(
        "class A:\n    def _repr_html_(self): return 'x' * 5_000_000\n"
        "    def _repr_png_(self): return b'x' * 20_000_000\nA()"
    )
    data = cell.results[0]["data"]
    assert list(data) == ["text/plain"] and data["text/plain"].count("left out") == 2


def test_a_large_image_is_whole_while_a_child_writes(runner: Runner) -> None:
    cell = runner.ok(
        "import subprocess\nchild = subprocess.Popen(['sh', '-c', 'while :; do echo noise; done'])\n"
        "class A:\n    def _repr_png_(self): return b'y' * 10_000_000\n"
        "display(A()); display(A()); child.kill(); child.wait();"
    )
    assert [len(base64.b64decode(r["data"]["image/png"])) for r in cell.results] == [10_000_000] * 2


def test_open_figures_are_shown_and_closed(runner: Runner) -> None:
    """A module shaped like pyplot's: what is asked of it is what the real one has."""
    runner.ok(
        "import sys, types\n"
        "class Figure:\n"
        "    def savefig(self, target, format, bbox_inches): target.write(b'<svg>' if format == 'svg' else b'png')\n"
        "    def __repr__(self): return 'Figure'\n"
        "class Gcf:\n"
        "    figs = []\n"
        "    @classmethod\n    def get_all_fig_managers(cls): return list(cls.figs)\n"
        "    @classmethod\n    def destroy_all(cls): cls.figs.clear()\n"
        "    @classmethod\n"
        "    def destroy_fig(cls, fig): cls.figs[:] = [m for m in cls.figs if m.canvas.figure is not fig]\n"
        "def figure():\n"
        "    f = Figure(); Gcf.figs.append(types.SimpleNamespace(canvas=types.SimpleNamespace(figure=f))); return f\n"
        "for name, content in {'': {}, '.figure': {'Figure': Figure}, '.pyplot': {'show': print, 'figure': figure},\n"
        "                      '._pylab_helpers': {'Gcf': Gcf}}.items():\n"
        "    sys.modules['matplotlib' + name] = module = types.ModuleType('matplotlib' + name)\n"
        "    vars(module).update(content)\n",
        context="figures",
    )
    png = {"image/png": base64.b64encode(b"png").decode(), "text/plain": "Figure"}
    cell = runner.ok("figure(); figure();", context="figures")
    assert [(r["main"], r["data"]) for r in cell.results] == [(False, png)] * 2
    cell = runner.ok("figure()", context="figures")
    assert [(r["main"], r["data"]) for r in cell.results] == [(True, png)]
    cell = runner.ok(
        "import matplotlib.pyplot as plt\nf = figure()\nplt.show()\nprint('after')", context="figures"
    )
    assert [e["type"] for e in cell.events] == ["result", "stdout", "end"]
    cell = runner.ok(
        "%config InlineBackend.figure_formats = ['svg']\n%matplotlib inline\nfigure();", context="figures"
    )
    assert cell.results[0]["data"]["image/svg+xml"] == "<svg>"
    assert runner.run("figure(); 1/0", context="figures").status == "error"
    assert not runner.ok("1;", context="figures").results
