"""Who gives way when many keep things within one bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llm4agents.fair import Held, surplus

THINGS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.integers(0, 9), st.booleans()), max_size=30
)


@given(THINGS, st.integers(0, 120))
def test_whoever_has_most_gives_way_with_his_oldest(
    things: list[tuple[str, int, int, bool]], most: int
) -> None:
    held = [
        Held(owner, used, at, size=size, fixed=fixed) for at, (owner, used, size, fixed) in enumerate(things)
    ]
    gone = surplus(held, most)
    left = {one.item: one for one in held}
    for item in gone:
        assert sum(one.size for one in left.values()) > most, "no more goes than must"
        one = left[item]
        assert not one.fixed
        sizes = {
            owner: sum(other.size for other in left.values() if other.owner == owner)
            for owner in {other.owner for other in left.values() if not other.fixed}
        }
        assert sizes[one.owner] == max(sizes.values())
        assert one.used == min(x.used for x in left.values() if x.owner == one.owner and not x.fixed)
        del left[item]
    assert sum(one.size for one in left.values()) <= most or all(one.fixed for one in left.values())


def test_one_who_keeps_little_loses_nothing_to_one_who_keeps_much() -> None:
    held = [Held("few", 0, "oldest"), *(Held("many", at, str(at)) for at in range(1, 10))]
    assert surplus(held, 4) == ["1", "2", "3", "4", "5", "6"]
    assert surplus(held, 10) == []
