"""Rule lines of every shape, for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from llm4agents.barrier.addresses import NEVER, classify

LABEL = st.from_regex(r"[a-z][a-z0-9-]{0,8}[a-z0-9]", fullmatch=True)
NAME = st.lists(LABEL, min_size=1, max_size=4).map(".".join)
HOST = st.one_of(
    NAME,
    NAME.map("*.{}".format),
    st.just("*"),
    st.ip_addresses(v=4).filter(lambda a: classify(a) not in NEVER).map(str),
    st.ip_addresses(v=6).filter(lambda a: classify(a) not in NEVER).map("[{}]".format),
    st.tuples(st.integers(0, 0xDF), st.integers(8, 24)).map(lambda t: f"{t[0] or 1}.0.0.0/{t[1]}"),
)  # fmt: skip
PATH = st.from_regex(r"/([a-z*]{1,5}(/[a-z*]{1,5}){0,3})?", fullmatch=True)


@st.composite
def lines(draw: st.DrawFn) -> str:
    allow = draw(st.booleans())
    words = ["allow" if allow else "deny"]
    tcp = draw(st.booleans()) and draw(st.booleans())
    if tcp:
        words.append("tcp")
    else:
        if draw(st.booleans()):
            words.append(
                ",".join(draw(st.lists(st.sampled_from(["GET", "POST", "PUT"]), min_size=1, unique=True)))
            )
        words += draw(st.sampled_from([[], ["http"], ["https"]]))
    target = draw(HOST)
    port = draw(st.one_of(st.just(""), st.integers(1, 65535).map(":{}".format), st.just(":*")))
    words.append(
        target + (port or (":22" if tcp else "")) + ("" if tcp else draw(st.one_of(st.just(""), PATH)))
    )
    if allow:
        words += draw(st.sampled_from([[], ["rate=3KiB/s"], ["rate=1MiB/s", "bytes=7GiB"]]))
    return " ".join(words)
