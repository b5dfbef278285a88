"""Keys, projects and invites on the command line, as processes, before the real application."""

from __future__ import annotations

import json
from typing import Any

from tests.unit.api.served import serving
from tests.unit.cli.conftest import Run


def test_keys_projects_and_invites(cli: Run, tmp_path: Any) -> None:
    with serving(tmp_path / "served", REGISTRATION="1") as here:

        def run(*words: str, key: str | None, stdin: str = "") -> Any:
            env = {"LLM4AGENTS_URL": here.url, **({} if key is None else {"LLM4AGENTS_API_KEY": key})}
            return cli(*words, stdin=stdin, **env)

        def done(*words: str, key: str | None, stdin: str = "") -> str:
            found = run(*words, key=key, stdin=stdin)
            assert found.returncode == 0, (words, found.stderr)
            return str(found.stdout)

        operator = here.key(scopes=["node"])
        # An invite: its code once, nowhere else; whoever has it is somebody.
        code = done("invite", "create", "--note", "for Ada", "--quota", "sandboxes=2", key=operator).strip()
        listed = done("invite", "ls", key=operator)
        assert code.startswith("l4i_") and code not in listed and "for Ada" in listed
        theirs = done("register", "--name", "ada", key=None, stdin=f"{code}\n").strip()
        who = done("whoami", key=theirs)
        assert "of project ada" in who and "sandboxes: 0 of 2" in who and "node" not in who
        [invite] = json.loads(done("invite", "ls", "--json", key=operator))["invites"]
        assert invite["uses_left"] == 0
        assert json.loads(done("invite", "revoke", invite["id"], "--json", key=operator))["invites"]
        assert run("invite", "revoke", invite["id"], key=operator).returncode == 3
        # Projects.
        row = next(line for line in done("project", "ls", key=operator).splitlines() if " ada " in line)
        assert row.startswith("prj_") and "sandboxes=2" in row
        done("project", "set", "ada", "--quota", "sandboxes=none", "--quota", "vcpus=3", key=operator)
        assert json.loads(done("project", "show", "ada", "--json", key=operator))["quotas"] == {"vcpus": 3}
        done("project", "disable", "ada", key=operator)
        refused = run("whoami", key=theirs)
        assert refused.returncode != 0 and "is disabled" in refused.stderr
        done("project", "enable", "ada", key=operator)
        # Keys: a stranger's are his own.
        mine = json.loads(done("key", "ls", "--json", key=theirs))["keys"]
        assert [one["id"] for one in mine] == [f"key_{theirs[4:12]}"]
        table = done("key", "ls", key=operator)
        assert theirs not in table and mine[0]["id"] in table and f"key_{operator[4:12]}" in table
        done("key", "revoke", mine[0]["id"], key=operator)
        refused = run("whoami", key=theirs)
        assert refused.returncode != 0 and "is revoked" in refused.stderr
