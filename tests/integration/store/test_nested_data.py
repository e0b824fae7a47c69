"""Data nested deeper than records can be written and read are refused where they come in."""

from pathlib import Path
from typing import Any

import orjson
import pytest
from support.runs.stored_runs import Bench, plain_agent
from support.workers.command_line import CommandLine

from stepfleet.orchestrator import Agent, AsyncFleet, ConfigurationError
from stepfleet.orchestrator.agents.config import stored_overrides
from stepfleet.orchestrator.batches.files.lines import parse_line, read_object
from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.tools.schemas.bounded_json import MAX_DEPTH, is_too_deep

AGENT = plain_agent()
DEPTHS = [MAX_DEPTH + 1, 190, 260, 900, 100_000]


BENCH: dict[str, Any] = {"agent": AGENT}


def deep(levels: int, *, lists: bool = False) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value] if lists else {"a": value}
    return value


def text(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


async def test_metadata_of_100_levels_can_be_read_by_everything(fleet: AsyncFleet) -> None:
    run_id = await fleet.submit(AGENT, "hello", metadata=deep(MAX_DEPTH))
    assert (await fleet.runs.show(run_id)).state.metadata == deep(MAX_DEPTH)
    assert (await fleet.history.checkpoint(run_id)).to_json()
    assert orjson.dumps(await fleet.history.snapshot(run_id))
    fork = await fleet.history.fork(run_id, at=0)
    assert (await fleet.runs.result(fork)).metadata == deep(MAX_DEPTH)


@pytest.mark.parametrize("levels", DEPTHS)
async def test_deeper_metadata_are_refused_by_every_submission(
    fleet: AsyncFleet, levels: int
) -> None:
    said = "field 'metadata' is nested deeper than 100 levels"
    with pytest.raises(ConfigurationError, match=said):
        await fleet.submit(AGENT, "hello", metadata=deep(levels))
    with pytest.raises(ConfigurationError, match=said):
        await fleet.submit(AGENT, "hello", metadata={"all": deep(levels, lists=True)})
    with pytest.raises(ConfigurationError, match=said):
        Agent("other", model="openai:gpt-4o-mini", metadata=deep(levels))
    with pytest.raises(ConfigurationError, match=r"metadata|nested deeper"):
        await fleet.submit_batch([{"input": "hello", "metadata": deep(levels)}], AGENT)
    given = {"role": "user", "content": "hello", "metadata": deep(levels)}
    with pytest.raises(ConfigurationError, match="'input' is nested deeper"):
        await fleet.submit(AGENT, [given])


@pytest.mark.parametrize("levels", DEPTHS)
@pytest.mark.parametrize("field", ["metadata", "error_policy", "settings", "memory"])
def test_deeper_overrides_are_refused(levels: int, field: str) -> None:
    with pytest.raises(ConfigurationError, match=f"field {field!r} is nested deeper"):
        stored_overrides(AGENT.config, {field: deep(levels)})


@pytest.mark.parametrize("levels", [MAX_DEPTH + 1, 260, 900])
def test_a_deeper_line_of_a_file_is_refused_by_its_field(levels: int) -> None:
    for field in ("metadata", "overrides", "input"):
        line = f'{{"id": "a", "{field}": {text(levels)}}}'.encode()
        with pytest.raises(ConfigurationError, match=f"field '{field}' is nested deeper"):
            parse_line(read_object(line))


def test_a_value_that_holds_itself_or_is_shared_by_many_is_judged_at_once() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert is_too_deep(endless)
    shared: Any = 1
    for _ in range(MAX_DEPTH):
        shared = [shared, shared]
    assert not is_too_deep(shared)


@pytest.mark.parametrize("stored", [text(900), text(5000), "{", "[]", '"text"'])
async def test_stored_overrides_that_cannot_be_read_are_named_by_whoever_reads(
    fleet: AsyncFleet, desk: Bench, stored: str
) -> None:
    run_id = await fleet.submit(AGENT, "hello")
    run_key = desk.opened.keys.run(run_id)
    await desk.opened.connection.execute("HSET", run_key, "overrides", stored)
    for reading in (
        fleet.runs.show,
        fleet.runs.result,
        fleet.history.checkpoint,
        fleet.history.snapshot,
        fleet.runs.view,
    ):
        with pytest.raises(SerializationError, match="the run's overrides cannot be read"):
            await reading(run_id)


def test_commands_say_so_in_one_line(tmp_path: Path, redis_url: str) -> None:
    commands = CommandLine(tmp_path, STEPFLEET_REDIS_URL=redis_url)
    commands.write("deep.jsonl", f'{{"id": "a", "input": "x", "metadata": {text(900)}}}\n')
    done = commands("run", "deep.jsonl", "--agents", "agents.py", "--simulate", "rules.py:rules")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "field 'metadata' is nested deeper than 100 levels; flatten it" in done.stderr
    commands.end()
