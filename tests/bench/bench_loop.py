"""The coding loop: a fork of a warm sandbox, one file edited, one small test run. Milliseconds from fork to verdict,
and (`edit_test_ms`) from the edit to the verdict in a fork that is there."""

from __future__ import annotations

import argparse
import asyncio
import time

from llm4agents import AsyncSandbox
from tests.bench.common import finish, summary

CODE = "def add(a, b):\n    return a {} b\n"
TEST = (
    "import unittest\nfrom calc import add\n\nclass T(unittest.TestCase):\n"
    "    def test_add(self):\n        self.assertEqual(add(2, 3), 5)\n"
)
RUN = """
import importlib, io, unittest
import calc, test_calc
importlib.reload(calc); importlib.reload(test_calc)
suite = unittest.defaultTestLoader.loadTestsFromModule(test_calc)
run = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
print(run.testsRun, len(run.failures))
"""


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    edits, whole = [], []
    async with await AsyncSandbox.create("python", timeout=600) as sandbox:
        await sandbox.files.write("calc.py", CODE.format("-"))
        await sandbox.files.write("test_calc.py", TEST)
        await sandbox.run_code(
            "import os, sys; os.chdir('/home/user'); sys.path.insert(0, ''); sys.dont_write_bytecode = True"
        )
        assert (await sandbox.run_code(RUN)).stdout == "1 1\n"
        for _ in range(options.rounds):
            began = time.perf_counter()
            (child,) = await sandbox.fork(1)
            at = time.perf_counter()
            await child.files.write("calc.py", CODE.format("+"))
            answer = await child.run_code(RUN)
            now = time.perf_counter()
            assert answer.stdout == "1 0\n", answer
            edits.append((now - at) * 1000)
            whole.append((now - began) * 1000)
            await child.kill()
    finish({"edit_test_ms": summary(edits), "fork_edit_test_ms": summary(whole)})


if __name__ == "__main__":
    asyncio.run(main())
