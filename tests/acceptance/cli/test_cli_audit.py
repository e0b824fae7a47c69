"""What commands change is in the audit, with the user, the machine and the command."""

import getpass
import socket
from typing import Any

import orjson
import pytest
from support.deadlines import wait_until
from support.workers.command_line import CommandLine

from stepfleet.orchestrator import Agent, Fleet

pytestmark = pytest.mark.timeout(300)
SECRET = "the-customers-words"


def test_commands_are_audited_with_user_host_and_name(
    commands: CommandLine, redis_url: str, fleet: Fleet
) -> None:
    """Read again by `stepfleet audit`: as lines, as JSON, by user, and while they come."""
    run_id = fleet.submit(Agent("clerk", model="openai:none"), SECRET)
    here: dict[str, Any] = {"STEPFLEET_REDIS_URL": redis_url}
    assert "Nothing" not in commands("audit", **here).stdout
    commands.start("audit", "--follow", "--json", **here)
    assert commands("pause", run_id, **here).returncode == 0
    assert commands("cancel", run_id, STEPFLEET_USER="ann", **here).returncode == 0
    assert commands("limits", "set", "tenant:a", "in_flight=3", **here).returncode == 0
    assert commands("send", run_id, SECRET, **here).returncode == 0
    assert commands("cancel", "no-such-run", **here).returncode == 2

    lines = commands("audit", "--json", **here).stdout.splitlines()
    found = [orjson.loads(line) for line in lines]
    me, host = getpass.getuser(), socket.gethostname()
    assert [(one["user"], one["source"], one["action"], one["target"]) for one in found] == [
        (me, "stepfleet pause", "pause", f"run {run_id}"),
        ("ann", "stepfleet cancel", "cancel", f"run {run_id}"),
        (me, "stepfleet limits set", "set", "limit tenant:a"),
        (me, "stepfleet send", "send", f"run {run_id}"),
    ]
    assert {one["host"] for one in found} == {host}
    assert SECRET not in "".join(lines)
    shown = commands("audit", "--user", "ann", "--since", "1h", **here).stdout
    assert shown.endswith(
        f"  ann@{host} (stepfleet cancel): cancel run {run_id}: done: cancelled\n"
    )
    assert len(shown.splitlines()) == 1
    wait_until(lambda: len(commands.lines("started.out")) == 4, within=60, what="what is followed")
    assert commands.lines("started.out") == found
    refused = commands("audit", "--since", "soon", **here)
    assert refused.returncode == 2
    assert "since" in refused.stderr
