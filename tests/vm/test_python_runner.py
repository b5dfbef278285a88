"""The interpreter in a real clone of the `python` template: numpy, pandas, matplotlib, IPython, randomness.

What needs only the standard library is in tests/unit/runner, against the same program on the host.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llm4agents import Sandbox
from tests.support import Node, sdk_of

pytestmark = [pytest.mark.vm, pytest.mark.filterwarnings("ignore::llm4agents.EmulationWarning")]

FRAME = "import pandas as pd\ndf = pd.DataFrame({'city': ['Rome', 'Oslo', 'Rome'], 't': [20.5, 3.0, 22.5]})\n"
PNG = b"\x89PNG\r\n\x1a\n"
AT_ONCE_MS = 5_000
"""A refusal that came without waiting for anything, on a slow machine."""


@pytest.fixture(scope="module", autouse=True)
def server(shared_node: Node) -> Iterator[None]:
    with sdk_of(shared_node):
        yield


@pytest.fixture(scope="module")
def sandbox(server: None) -> Iterator[Sandbox]:
    with Sandbox(template="python") as made:
        yield made


def test_state_and_value(sandbox: Sandbox) -> None:
    assert sandbox.run_code("x = 6\nprint('hello')\nx * 7").text == "42"
    assert sandbox.run_code("x").text == "6"


def test_a_data_frame_is_text_and_html(sandbox: Sandbox) -> None:
    result = sandbox.run_code(FRAME + "df").results[0]
    assert result.main and "Rome" in (result.text or "") and "<table" in (result.html or "")
    assert "20.5" in (sandbox.run_code("df.groupby('city').t.min()").text or "")


def test_a_plot_is_a_png_once(sandbox: Sandbox) -> None:
    found = sandbox.run_code("import matplotlib.pyplot as plt\nplt.plot([1, 2, 3]);")
    assert [result.png is not None and result.png.startswith(PNG) for result in found.results] == [True]
    assert not sandbox.run_code("1;").results
    found = sandbox.run_code("figure, axes = plt.subplots()\naxes.bar(['a'], [1])\nfigure")
    assert [(r.main, r.png is not None) for r in found.results] == [(True, True)]


def test_show_is_silent_and_in_order(sandbox: Sandbox) -> None:
    found = sandbox.run_code("plt.plot([1, 2])\nplt.show()\nprint('after')")
    assert len(found.results) == 1 and not found.stderr and found.stdout == "after\n"


def test_svg_when_asked(sandbox: Sandbox) -> None:
    found = sandbox.run_code("%config InlineBackend.figure_formats = ['svg']\nplt.plot([1, 2]);")
    assert "<svg" in (found.results[0].svg or "") and found.results[0].png is None
    sandbox.run_code("%config InlineBackend.figure_formats = ['png']")


def test_magics_commands_and_help(sandbox: Sandbox) -> None:
    assert sandbox.run_code("!echo from the shell").stdout == "from the shell\n"
    assert sandbox.run_code("lines = !printf 'a\\nb\\n'\nlist(lines)").text == "['a', 'b']"
    assert sandbox.run_code("%%bash\necho in bash").stdout == "in bash\n"
    found = sandbox.run_code("%time 6 * 7")
    assert found.text == "42" and "Wall time" in found.stdout
    assert "Return the number of items" in sandbox.run_code("len?").stdout
    assert sandbox.run_code("%matplotlib inline\n5").text == "5"


def test_ipythons_display_is_ours(sandbox: Sandbox) -> None:
    found = sandbox.run_code(
        "from IPython.display import display, HTML, JSON\ndisplay(HTML('<b>x</b>'))\nJSON({'a': 1})"
    )
    assert found.results[0].html == "<b>x</b>"
    assert found.results[1].data["application/json"] == {"a": 1}


def test_an_error_inside_pandas_shows_the_cells_line(sandbox: Sandbox) -> None:
    error = sandbox.run_code(FRAME + "df['nothing']").error
    assert error is not None and error.name == "KeyError" and "df['nothing']" in error.traceback
    assert "llm4agents" not in error.traceback


def test_no_network_is_said(sandbox: Sandbox) -> None:
    for code in (
        "import urllib.request; urllib.request.urlopen('http://example.com')",
        "import requests; requests.get('https://example.com')",
    ):
        error = sandbox.run_code(code).error
        assert error is not None and "this sandbox has no network" in error.traceback


def test_memory_exhausted_is_an_error_and_the_next_cell_runs(sandbox: Sandbox) -> None:
    found = sandbox.run_code("kept = 1\nhog = []\nwhile True: hog.append(b'x' * 50_000_000)")
    assert found.error is not None and found.error.name in ("MemoryError", "InterpreterDied")
    assert sandbox.run_code("1 + 1").text == "2"


def test_two_clones_draw_different_numbers() -> None:
    code = (
        "import random, numpy, uuid, tempfile, ssl, secrets\n"
        "[random.random(), numpy.random.random(), str(uuid.uuid4()), str(uuid.uuid1())[14:], "
        "next(tempfile._get_candidate_names()), ssl.RAND_bytes(8).hex(), secrets.token_hex(8)]"
    )
    draws = []
    for _ in range(2):
        with Sandbox(template="python") as made:
            draws.append(made.run_code(f"{code}").text)
    first, second = ([part.strip(" []") for part in (draw or "").split(",")] for draw in draws)
    assert len(first) == len(second) == 7
    assert not set(first) & set(second)


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.getaddrinfo('example.com', 80)",
        "import requests; requests.get('https://example.com')",
        "import urllib.request; urllib.request.urlopen('http://example.com')",
    ],
)
def test_networking_says_why_and_at_once(shared_node: Node, sandbox: Sandbox, code: str) -> None:
    done = shared_node.code(sandbox.id, code)
    assert done["status"] == "error"
    assert "this sandbox has no network" in done["error"]["traceback"]
    assert done["duration_ms"] < AT_ONCE_MS


def test_a_servers_own_loopback_works(sandbox: Sandbox) -> None:
    code = (
        "import socket\nserver = socket.create_server(('127.0.0.1', 0))\n"
        "client = socket.create_connection(server.getsockname())\nclient.sendall(b'x')\nserver.accept()[0].recv(1)"
    )
    assert sandbox.run_code(code).text == "b'x'"
