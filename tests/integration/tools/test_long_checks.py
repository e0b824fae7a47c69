"""A check that takes long holds up nobody else: the worker's event loop goes on meanwhile."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.runs.scripted_steps import Script, call, say

from stepfleet.orchestrator import Agent, AsyncFleet, ErrorPolicy
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.runtime.inline import InlineWorker

MOST_HELD = 0.8
"""CPU seconds of the loop's own thread between two turns; the check itself takes two."""


class Doubling:
    """A tool whose schema is checked 2 ** 40 times."""

    name = "doubling"
    description = "Takes anything, in the end."
    schema: dict[str, Any] = {  # noqa: RUF012 - the protocol's own shape
        "type": "object",
        "$defs": {
            **{f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(40)},
            "a40": {},
        },
        "$ref": "#/$defs/a0",
    }

    async def execute(self) -> str:
        """Never be reached."""
        return "done"


@asynccontextmanager
async def held() -> AsyncIterator[list[float]]:
    """Note how much CPU time the loop's thread used between two of its turns."""
    found: list[float] = []

    async def look() -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0.005)  # the pace of the measurement
            now = time.thread_time()
            found.append(now - before)
            before = now

    task = asyncio.create_task(look())
    try:
        yield found
    finally:
        task.cancel()


@pytest.mark.timeout(120)
async def test_a_schema_that_is_checked_for_ever_holds_up_no_other_run(redis_url: str) -> None:
    """TOOL-10: it is given up after two seconds, outside the event loop."""
    import jsonschema.validators  # noqa: F401, PLC0415 - its import is no part of the check

    agent = Agent(
        "a",
        model=Script([call(("doubling", {})), say("done")]),
        tools=[Doubling()],
        error_policy=ErrorPolicy.ignore_tool_errors(),
    )
    settings = load_settings(redis_url=redis_url)
    async with AsyncFleet(settings=settings) as fleet, InlineWorker(settings, [agent]) as worker:
        run_id = await fleet.submit(agent, "go on")
        async with held() as found:
            await worker.finish(run_id)
        result = await fleet.runs.result(run_id)
    assert result.output == "done"
    (record,) = result.steps[0].tool_calls
    assert record.error is not None
    assert "take too long to be checked" in record.error.message
    assert max(found) < MOST_HELD
