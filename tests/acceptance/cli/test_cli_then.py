"""What follows a batch or a run, on the command line: registered, shown, refused with the fix."""

import json
from collections.abc import Iterator

import pytest
from support.servers.redis_servers import short_folder
from support.workers.command_line import CommandLine
from support.workers.fleet_workers import AGENTS

from stepfleet.orchestrator import Fleet


@pytest.fixture
def stepfleet(redis_url: str) -> Iterator[CommandLine]:
    with short_folder() as folder:
        commands = CommandLine(folder, STEPFLEET_REDIS_URL=redis_url)
        try:
            yield commands
        finally:
            commands.end()


def test_batches_and_lines_name_what_they_wait_for(stepfleet: CommandLine, fleet: Fleet) -> None:
    """MULTI-04: without a worker, so that everything waits."""
    lines = [{"id": "a", "input": "A"}, {"id": "b", "input": "{output}", "after": "a"}]
    file = stepfleet.folder / "lines.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    agents = ("--agents", str(AGENTS), "--agent", "plain")
    first = stepfleet("submit", str(file), *agents, "--no-check").stdout.strip()
    given = (first, *agents, "--input", "{outputs}", "--page", "5", "--json")
    second = stepfleet("submit", "--after-batch", *given)
    found = json.loads(second.stdout)
    old_word = json.loads(stepfleet("then", *given).stdout)
    assert old_word == {**found, "is_new": False}
    assert (found["follows"], found["is_new"], found["sealed"]) == (first, True, False)
    assert found["batch_id"] in stepfleet("status", first).stdout
    waits = stepfleet("status", found["batch_id"]).stdout
    assert f"begins when batch {first} has ended" in " ".join(waits.split())
    run_ids = list(fleet.batches.get(first).run_ids())
    explained = json.loads(stepfleet("explain", "b", "--batch", first, "--json").stdout)
    assert explained["says"] == f"queued: begins when these have ended: {run_ids[0]} (queued)"
    mixed = stepfleet("submit", str(file), "--after-batch", first, *agents)
    assert mixed.returncode == 2
    assert "FILE does not go with --after-batch; leave it out" in mixed.stderr
    alone = stepfleet("submit", str(file), *agents, "--page", "5")
    assert alone.returncode == 2
    assert "--page needs --after-batch ID" in alone.stderr
    assert "name a FILE of inputs, or --after-batch ID" in stepfleet("submit", *agents).stderr
    bad = stepfleet("then", first, *agents, "--input", "{nope}")
    assert bad.returncode == 2
    assert "field 'input' names {nope}; there are: {output}, {input}, {id}" in bad.stderr
    paged = stepfleet("then", first, *agents, "--input", "{outputs}")
    assert paged.returncode == 2
    assert "field 'input' names {outputs}, which pages have: give --page N" in paged.stderr
    unknown = stepfleet("submit", str(file), *agents, "--no-check", "--after", "nobody")
    assert unknown.returncode == 2
    assert "field 'after': no run has the id 'nobody'" in unknown.stderr
