"""Credentials a guest never holds, each form through a real guest, gateway and interceptor, to services that check.

The lab's world records what arrived; `services` refuses who is not who he says. See `test_secret_nowhere` for where the
values are not.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.barrier.lab import Lab
from tests.barrier.services import AWS, AWS_PORT, GIT, GIT_PORT, Services, prepare, wheels
from tests.barrier.world import Arrival
from tests.support import Node, eventually

pytestmark = [pytest.mark.vm, pytest.mark.root]

VALUE = "gh/8c5d+1e=42 &ü"
PLAIN = "tok-5b0f6c1e9a77"
AWS_KEY, AWS_SECRET, AWS_TOKEN = "AKIAREALONE", "r3al/Secret+Key=", "session/token+1="
DUMMY = {
    "AWS_ACCESS_KEY_ID": "AKIADUMMY",
    "AWS_SECRET_ACCESS_KEY": "dummy",
    "AWS_DEFAULT_REGION": "eu-west-1",
}
API = "api.example.com"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    prepare(("base", 256), ("python", 1024))
    with Lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture(scope="module")
def services(lab: Lab) -> Iterator[Services]:
    with Services(lab, users={"x-access-token": PLAIN}, keys={AWS_KEY: (AWS_SECRET, AWS_TOKEN)}) as made:
        yield made


@pytest.fixture(scope="module")
def node(services: Services, shared_nodes: Callable[..., Node]) -> Node:
    lab = services.lab
    return shared_nodes(within=lab.enter(), **lab.environment).start()


class Box:
    """A sandbox with bindings, and what it asks for."""

    def __init__(self, node: Node, lab: Lab, network: dict[str, Any], template: str = "base") -> None:
        self.node, self.lab = node, lab
        memory = 256 if template == "base" else 1024
        self.id = node.create(template, memory_mib=memory, network=network)

    def sh(self, command: str, **more: Any) -> dict[str, Any]:
        return self.node.exec(self.id, command, timeout_s=120, **more)

    def curl(self, arguments: str, url: str = f"https://{API}/echo") -> tuple[int, str, Arrival | None]:
        """Status, body, and what arrived of it in the world (None: nothing)."""
        mark = self.lab.mark()
        done = self.sh(f"curl -sS -m 60 -w '\\n%{{http_code}}' {arguments} '{url}'")
        assert done["exit_code"] == 0, done
        body, _, status = done["stdout"].rpartition("\n")
        arrived = self.lab.arrived(mark, kind="https")
        assert len(arrived) <= 1, arrived
        return int(status), body, arrived[0] if arrived else None

    def audit(self, **what: Any) -> list[dict[str, Any]]:
        """Of its record, as it lies on disk, what has those values."""
        records = []
        for path in sorted((self.node.state / "barrier" / "gateway" / "audit").glob(f"{self.id}*")):
            records += [json.loads(line) for line in path.read_text().splitlines()]
        return [
            record for record in records if all(record.get(name) == value for name, value in what.items())
        ]

    def kill(self) -> None:
        self.node.call("DELETE", f"/v1/sandboxes/{self.id}")


@pytest.fixture
def box(node: Node, lab: Lab) -> Iterator[Callable[..., Box]]:
    made: list[Box] = []

    def make(network: dict[str, Any], template: str = "base") -> Box:
        made.append(Box(node, lab, network, template))
        return made[-1]

    yield make
    for one in made:
        one.kill()


def nowhere_in(box: Box, value: str) -> str:
    """What in the guest's files and environments has the value, by a pattern that is not itself the value."""
    pattern = f"{value[:-1].replace('+', '[+]')}[{value[-1]}]"
    done = box.sh(
        f"grep -rlEa '{pattern}' / --exclude-dir=proc --exclude-dir=sys 2>/dev/null;"
        f" grep -lEa '{pattern}' /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null; true",
        user="root",
    )
    return str(done["stdout"])


def secret(node: Node, name: str, value: object) -> None:
    node.call("PUT", f"/v1/secrets/{name}", json={"value": value})


def bound(how: dict[str, Any], *more: str, name: str = "TOKEN") -> dict[str, Any]:
    return {"rules": [f"allow {API}", *more], "credentials": [{"secret": name, "host": API, **how}]}


# -- the forms


def test_bearer(node: Node, box: Callable[..., Box]) -> None:
    secret(node, "TOKEN", PLAIN)
    one = box(bound({"as": "bearer"}))
    status, body, arrived = one.curl("")
    assert status == 200 and arrived is not None and arrived.header("authorization") == f"Bearer {PLAIN}"
    assert PLAIN not in body and "***" in body, "the origin echoed it, and the guest must not see it"
    # The guest's own is overwritten, whatever its case, and however often it comes.
    _, _, arrived = one.curl("-H 'authorization: Bearer mine' -H 'AUTHORIZATION: Basic eDp5'")
    assert arrived is not None
    assert [v for k, v in arrived.headers if k.lower() == "authorization"] == [f"Bearer {PLAIN}"]
    record = eventually(lambda: one.audit(kind="request", credentials=["TOKEN"]))[0]
    assert record["name"] == API and PLAIN not in json.dumps(record)
    # A binding opens nothing: another host's name does not exist for it.
    assert one.sh("curl -sS -m 60 https://other.example.com/echo")["exit_code"] == 6


def test_header_with_a_prefix(node: Node, box: Callable[..., Box]) -> None:
    secret(node, "TOKEN", PLAIN)
    one = box(bound({"as": "header", "header": "X-Api-Key", "prefix": "v1 "}))
    _, body, arrived = one.curl("-H 'x-api-key: mine'")
    assert arrived is not None and PLAIN not in body
    assert [v for k, v in arrived.headers if k.lower() == "x-api-key"] == [f"v1 {PLAIN}"]
    assert arrived.header("authorization") is None


def test_basic(node: Node, box: Callable[..., Box]) -> None:
    secret(node, "TOKEN", VALUE)
    one = box(bound({"as": "basic", "username": "robot"}))
    _, body, arrived = one.curl("-u robot:wrong")
    whole = base64.b64encode(f"robot:{VALUE}".encode()).decode()
    assert arrived is not None and arrived.header("authorization") == f"Basic {whole}"
    assert whole not in body


def test_query(node: Node, box: Callable[..., Box]) -> None:
    secret(node, "TOKEN", VALUE)
    one = box(bound({"as": "query", "parameter": "api_key"}))
    _, body, arrived = one.curl("", f"https://{API}/echo?a=1&api_key=mine&b=2")
    assert arrived is not None and "mine" not in arrived.target
    from urllib.parse import parse_qs, urlsplit

    query = parse_qs(urlsplit(arrived.target).query)
    assert query == {"a": ["1"], "b": ["2"], "api_key": [VALUE]}
    assert "8c5d" not in body
    assert all("8c5d" not in json.dumps(record) for record in one.audit())


def test_placeholder(node: Node, box: Callable[..., Box]) -> None:
    secret(node, "TOKEN", PLAIN)
    one = box(bound({"as": "placeholder", "placeholder": "PUT-IT-HERE"}))
    _, body, arrived = one.curl(
        "-H 'X-Custom: a PUT-IT-HERE b' -H 'content-type: application/json' -d '{\"key\": \"PUT-IT-HERE\"}'",
        f"https://{API}/echo/PUT-IT-HERE?k=PUT-IT-HERE",
    )
    assert arrived is not None and arrived.header("x-custom") == f"a {PLAIN} b"
    assert arrived.target == f"/echo/{PLAIN}?k={PLAIN}"
    assert json.loads(arrived.body) == {"key": PLAIN} and PLAIN not in body
    # Where there is no placeholder nothing is put.
    _, _, arrived = one.curl("")
    assert arrived is not None and PLAIN not in arrived.raw.decode("latin-1")


def test_methods_and_paths_bound_it(node: Node, box: Callable[..., Box]) -> None:
    secret(node, "TOKEN", PLAIN)
    one = box(bound({"as": "bearer", "methods": ["GET"], "path": "/repos/*"}))
    for arguments, path, carried in (
        ("", "/repos/x", True),
        ("-X POST", "/repos/x", False),
        ("", "/other", False),
        ("--path-as-is", "/repos/../other", False),
        ("--path-as-is", "/repos/%2e%2e/other", False),
    ):
        _, _, arrived = one.curl(arguments, f"https://{API}{path}")
        found = arrived.header("authorization") if arrived else None
        assert (found == f"Bearer {PLAIN}") == carried, (arguments, path, found)


def test_a_redirect_to_another_host_takes_nothing_along(node: Node, box: Callable[..., Box]) -> None:
    secret(node, "TOKEN", PLAIN)
    one = box(bound({"as": "bearer"}, "allow GET other.example.com"))
    mark = one.lab.mark()
    url = f"https://{API}/redirect?to=https%3A%2F%2Fother.example.com%2Fecho"
    done = one.sh(f"curl -sS -m 60 -L --location-trusted '{url}'")
    assert done["exit_code"] == 0, done
    first, second = one.lab.arrived(mark, kind="https")
    assert first.header("authorization") == f"Bearer {PLAIN}" and second.sni == "other.example.com"
    assert PLAIN not in second.raw.decode("latin-1")


# -- rotation, and secrets that are not there


def test_a_new_value_is_used_at_once_on_a_connection_that_is_open(
    node: Node, box: Callable[..., Box]
) -> None:
    secret(node, "TOKEN", "first-5521")
    one = box(bound({"as": "bearer"}), "python")
    ask = f"print(session.get('https://{API}/echo').status_code)"
    one.lab.mark()
    assert "200" in str(node.code(one.id, f"import requests; session = requests.Session(); {ask}")["stdout"])
    mark = one.lab.mark()
    secret(node, "TOKEN", "second-7710")
    assert "200" in str(node.code(one.id, ask)["stdout"])
    (arrived,) = one.lab.arrived(mark, kind="https")
    assert arrived.header("authorization") == "Bearer second-7710"


def test_one_that_is_missing_is_refused_at_create(node: Node) -> None:
    answer = node.http.post(
        "/v1/sandboxes",
        json={"template": "base", "memory_mib": 256, "network": bound({"as": "bearer"}, name="NOT_SET")},
    )
    body = answer.json()
    assert (answer.status_code, body["code"]) == (400, "invalid_request") and "NOT_SET" in body["detail"]
    assert "secret set" in body["hint"]


def test_one_that_is_removed_is_refused_readably(node: Node, box: Callable[..., Box]) -> None:
    secret(node, "GOING", PLAIN)
    one = box(bound({"as": "bearer"}, name="GOING"))
    assert one.curl("")[0] == 200
    assert node.call("DELETE", "/v1/secrets/GOING")["used_by"] == [one.id]
    status, body, arrived = one.curl("")
    assert status >= 400 and arrived is None and "GOING" in body, (status, body)
    assert eventually(lambda: one.audit(kind="request", status=status))
    secret(node, "GOING", "back-again-1")
    status, _, arrived = one.curl("")
    assert status == 200 and arrived is not None and arrived.header("authorization") == "Bearer back-again-1"


# -- git


def git_network() -> dict[str, Any]:
    return {
        "rules": [f"allow {GIT}:{GIT_PORT}"],
        "credentials": [
            {"secret": "GIT", "host": GIT, "port": GIT_PORT, "as": "basic", "username": "x-access-token"}
        ],
    }


def test_git_clones_and_pushes_without_a_credential_in_the_guest(
    node: Node, services: Services, box: Callable[..., Box]
) -> None:
    secret(node, "GIT", PLAIN)
    one = box(git_network())
    done = one.sh(
        f"set -e; cd ~; git clone -q https://{GIT}:{GIT_PORT}/repo.git; cd repo; cat README;"
        " git config user.name agent; git config user.email agent@example.com;"
        " head -c 3000000 /dev/urandom > big; git add big; git commit -q -m 'from the guest';"
        " git push -q origin HEAD:main; git fetch -q; git status -sb"
    )
    assert done["exit_code"] == 0 and done["stdout"].startswith("first\n"), done
    assert services.log == ["from the guest", "first"]
    assert nowhere_in(one, PLAIN) == ""
    assert all(seen.accepted for seen in services.seen if seen.target.startswith("/repo.git"))


def test_git_without_the_binding_is_not_let_in(
    node: Node, services: Services, box: Callable[..., Box]
) -> None:
    one = box({"rules": [f"allow {GIT}:{GIT_PORT}"]})
    # Spliced: it is the origin's own certificate that the guest sees, and the lab's authority is none of the guest's.
    done = one.sh(
        f"GIT_TERMINAL_PROMPT=0 git -c http.sslVerify=false clone -q https://{GIT}:{GIT_PORT}/repo.git ~/r"
    )
    assert done["exit_code"] != 0 and "could not read Username" in done["stderr"], done


# -- AWS


def aws_network() -> dict[str, Any]:
    return {
        "rules": [f"allow {AWS}:{AWS_PORT}"],
        "credentials": [
            {"secret": "AWS", "host": AWS, "port": AWS_PORT, "as": "sigv4"},
        ],
    }


def aws(node: Node) -> None:
    secret(
        node,
        "AWS",
        {"access_key_id": AWS_KEY, "secret_access_key": AWS_SECRET, "session_token": AWS_TOKEN},
    )


def test_requests_signed_with_dummy_keys_are_signed_anew(
    node: Node, services: Services, box: Callable[..., Box]
) -> None:
    aws(node)
    one = box(aws_network())
    services.objects["/bucket/some key+%~"] = b"object"
    sign = "--aws-sigv4 aws:amz:eu-west-1:s3 -u AKIADUMMY:dummy"
    url = f"https://{AWS}:{AWS_PORT}/bucket/some%20key%2B%25~"
    hashed = "-H 'x-amz-content-sha256: UNSIGNED-PAYLOAD'"
    done = one.sh(f"curl -sS -m 60 {sign} {hashed} '{url}'")
    assert done["stdout"] == "object", (done, services.seen[-1])
    assert services.seen[-1].accepted and f"Credential={AWS_KEY}/" in str(services.seen[-1].authorization)
    # Without a signature of the guest's there is none to make anew.
    before = len(services.seen)
    done = one.sh(f"curl -sS -m 60 -w '%{{http_code}}' '{url}'")
    assert not any(seen.accepted for seen in services.seen[before:]), "an unsigned request was signed"


def test_boto3_with_dummy_keys_works(node: Node, services: Services, box: Callable[..., Box]) -> None:
    aws(node)
    one = box(aws_network(), "python")
    directory = wheels(node.cache, "boto3")
    for wheel in sorted(directory.glob("*.whl")):
        put(node, one.id, f"/home/user/wheels/{wheel.name}", wheel)
    done = one.sh("pip install -q --user --no-index --find-links ~/wheels boto3")
    assert done["exit_code"] == 0, done
    script = f"""
import boto3, botocore.config
session = boto3.Session()
kw = dict(endpoint_url="https://{AWS}:{AWS_PORT}", config=botocore.config.Config(
    retries=dict(max_attempts=1), s3=dict(addressing_style="path")))
s3 = session.client("s3", **kw)
s3.put_object(Bucket="bucket", Key="dir/a b+c=ü.txt", Body=b"from the guest" * 1000)
print(len(s3.get_object(Bucket="bucket", Key="dir/a b+c=ü.txt")["Body"].read()))
print([one["Key"] for one in s3.list_objects_v2(Bucket="bucket", Prefix="dir/")["Contents"]])
print(session.client("sts", **kw).get_caller_identity()["Arn"])
"""
    before = len(services.seen)
    done = node.exec(one.id, ["python3", "-c", script], env=DUMMY, timeout_s=180)
    assert done["exit_code"] == 0, (done["stderr"][-2000:], services.seen[before:])
    lines = done["stdout"].splitlines()
    assert lines[0] == "14000" and "dir/a b+c=ü.txt" in lines[1] and lines[2].endswith("user/agent")
    assert len(services.seen) - before >= 4 and all(seen.accepted for seen in services.seen[before:])
    assert nowhere_in(one, AWS_SECRET) == ""


def put(node: Node, sandbox: str, path: str, file: Path) -> None:
    answer = node.http.put(
        f"/v1/sandboxes/{sandbox}/files", params={"path": path, "parents": "true"}, content=file.read_bytes()
    )
    assert answer.status_code < 300, answer.text
