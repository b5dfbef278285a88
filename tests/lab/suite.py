"""Which of our tests run in the laboratory: conformance, the life of sandboxes, what clones share."""

from __future__ import annotations

from collections.abc import Iterable

PIECES = (
    (
        "tests/contract/test_machine.py",
        "tests/contract/test_link.py",
        "tests/contract/test_isolation.py",
        "tests/contract/test_pause.py",
        "tests/vm/test_firecracker.py",
    ),
    ("tests/vm/test_engine.py", "tests/vm/test_clones.py"),
    ("tests/vm/test_pause.py",),
    ("tests/vm/test_guest_view.py", "tests/vm/test_hostile_guest.py"),
)
"""Of five minutes at most each; the files of the first share one frozen machine."""
FILES = tuple(file for piece in PIECES for file in piece)
NEED_PYTHON = (
    "tests/vm/test_engine.py::test_code_keeps_its_state_and_streams",
    "tests/vm/test_clones.py::test_an_interpreter_draws_its_own_numbers",
    "tests/vm/test_clones.py::test_a_program_started_in_a_clone_draws_its_own_numbers",
    "tests/vm/test_clones.py::test_an_interpreter_has_the_right_time",
    "tests/vm/test_clones.py::test_variables_are_private",
    "tests/vm/test_clones.py::test_three_in_parallel",
    "tests/vm/test_clones.py::test_environment_given_at_create",
    "tests/vm/test_clones.py::test_code_runs_as_user_and_as_root_on_request",
)
"""Of the template `python`, whose interpreter takes more than its two minutes to warm up in a machine within an
emulated one. The entropy and names that they check are given by the same `post_restore` as `base`'s."""
SLOW = (
    "tests/vm/test_pause.py::test_twenty_cycles_lose_nothing_and_do_not_grow",
    "tests/vm/test_pause.py::test_a_flood_that_nobody_reads_and_random_numbers_are_neither_lost_nor_repeated",
    "tests/vm/test_pause.py::test_processes_files_cwd_interpreter_and_clock_come_back",
    "tests/vm/test_pause.py::test_cold_resume_keeps_files",
    "tests/vm/test_pause.py::test_a_stopped_server_pauses_those_that_want_it",
    "tests/vm/test_pause.py::test_fifty_callers_of_a_paused_sandbox_resume_it_once",
    "tests/vm/test_pause.py::test_its_time_pauses_it_and_a_call_brings_it_back",
    "tests/vm/test_engine.py::test_many_at_once",
    "tests/vm/test_engine.py::test_other_shapes_are_variants_and_concurrent_creates_share_one_build",
    "tests/vm/test_guest_view.py::test_no_interface_but_lo_where_there_is_no_barrier",
    "tests/vm/test_hostile_guest.py::test_floods[firecracker-memory files]",
    "tests/vm/test_hostile_guest.py::test_floods[firecracker-files]",
)
"""Up to minutes of each in there: what the engine does alone or a guest does to itself, whoever the VMM is, and
twenty pauses (`tests/contract/test_pause.py` has rounds of them, and machines without a link)."""
NEED_MORE = ("tests/vm/test_engine.py::test_the_node_describes_itself",)
"""Of hosts that have every tool: `doctor` misses QEMU and mmdebstrap in there."""
PASSED_OVER = ("says nothing of Firecracker", "no cgroup v1 of memory")
"""Reasons of a skip that are none to complain about: how a test says that it is about another VMM alone, or about what
this kernel has not (it has cgroup v2)."""


def arguments(files: Iterable[str] = FILES) -> list[str]:
    """Of pytest in there; verbose, so that the last line of one that hangs names the test."""
    over = [word for test in (*NEED_PYTHON, *SLOW, *NEED_MORE) for word in ("--deselect", test)]
    return ["-v", "--tb=short", "--durations=15", *over, *files]
