"""What `submit` refuses before there is a batch to pay; and lines that commands name."""

from collections.abc import Iterator

import pytest
from support.servers.redis_servers import short_folder
from support.workers.command_line import CommandLine
from support.workers.fleet_workers import AGENTS

from stepfleet.orchestrator import Fleet

SUBMIT = ("--agents", str(AGENTS), "--agent", "plain", "--no-check")


@pytest.fixture
def stepfleet(redis_url: str) -> Iterator[CommandLine]:
    with short_folder() as folder:
        (folder / "lines.jsonl").write_text('{"id": "a", "input": "A"}')
        commands = CommandLine(folder, STEPFLEET_REDIS_URL=redis_url)
        try:
            yield commands
        finally:
            commands.end()


def test_a_file_that_is_no_results_file_is_refused_before_a_batch_is_made(
    stepfleet: CommandLine, fleet: Fleet
) -> None:
    source, notes = (stepfleet.folder / name for name in ("lines.jsonl", "notes.jsonl"))
    notes.write_text('{"dear": "diary"}')
    for out, says in (
        (notes, "line 1 is not a result"),
        (source, "is the input file; name another"),
    ):
        before = out.read_bytes()
        refused = stepfleet("submit", str(source), *SUBMIT, "--wait", "--out", str(out))
        assert (refused.returncode, says in refused.stderr) == (2, True), refused.stderr
        assert out.read_bytes() == before
    other = stepfleet.folder / "other.jsonl"
    other.write_text('{"run_id": "of-another-batch", "end_time": "2026-11-27T10:00:00Z"}\n')
    before = other.read_bytes()
    for again in ((), ("--again",)):
        refused = stepfleet("submit", str(source), *SUBMIT, "--wait", "--out", str(other), *again)
        assert refused.returncode == 2
        assert "1 of its 1 lines are of another batch than" in refused.stderr
    assert other.read_bytes() == before
    refused = stepfleet("run", str(source), "--agents", str(AGENTS), "--out", str(source))
    assert refused.returncode == 2
    assert "is the input file; name another" in refused.stderr
    refused = stepfleet("submit", str(source), *SUBMIT, "--idempotency-key", "")
    assert refused.returncode == 2
    assert "idempotency_key is ''; write text" in refused.stderr
    assert list(fleet.batches.newest()) == []


def test_costs_take_the_id_of_a_line_as_show_does(stepfleet: CommandLine) -> None:
    stepfleet("submit", str(stepfleet.folder / "lines.jsonl"), *SUBMIT)
    found = stepfleet("costs", "--run", "a", "--format", "csv")
    assert (found.returncode, found.stdout.count("\n")) == (0, 1), found.stderr
    missing = stepfleet("costs", "--lines", "--run", "b")
    assert missing.returncode == 2
    assert "'b'" in missing.stderr
