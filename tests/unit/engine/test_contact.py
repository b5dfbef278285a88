"""What a machine's end is told as: its console's words are a guest's."""

from llm4agents.engine import contact
from llm4agents.vmm.base import Exit


def test_a_panic_is_told_in_words_that_move_no_terminal() -> None:
    said = contact.exit_words(
        Exit(0, None, "exited", "x\nKernel panic - not syncing: oops\x1b]52;c;eA==\x07" + "y" * 9_000)
    )
    assert said.startswith("ended: its kernel panicked (not syncing: oops]52;c")
    assert said.isprintable()
    assert len(said) < 300
    assert contact.exit_words(Exit(0, None, "exited", "Kernel panic")) == "ended: its kernel panicked ()"
