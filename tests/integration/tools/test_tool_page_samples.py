"""Samples of docs/tools.md that need a fleet, or whose tools have to be called, do what it says."""

import re
from pathlib import Path
from typing import Any

import pytest
from support.runs.opened_runs import lease_runs_out, opened_run
from support.runs.scripted_steps import Crash, call, say

from stepfleet.orchestrator import ErrorPolicy
from stepfleet.orchestrator.tools import registry

PAGE = (Path(__file__).parents[3] / "docs" / "tools.md").read_text(encoding="utf-8")


@pytest.fixture
def names() -> Any:
    registry.tool_catalog.cache_clear()
    made: dict[str, Any] = {"__name__": "samples"}
    for sample in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(compile(sample, "docs/tools.md", "exec"), made)  # noqa: S102 - our own page
    yield made
    registry.tool_catalog.cache_clear()


async def test_a_class_serves_as_a_tool_and_its_arguments_are_checked(
    redis_url: str, names: dict[str, Any]
) -> None:
    """TOOL-01, DOC-03"""
    script = (
        call(("search_letters", {"word": "lamp"}), ("search_letters", {"word": "a"})),
        say("done"),
    )
    policy = ErrorPolicy.retry_tool_errors(3)
    async with opened_run(redis_url, *script, tools=(names["letters"],), error_policy=policy) as (
        desk,
        hands,
        run_id,
    ):
        await hands.step(run_id, 0)
        found, refused = (await desk.stored(run_id)).result().steps[0].tool_calls
    assert found.result == ["a lamp came"]
    assert refused.error is not None
    assert refused.error.code == "VALIDATION_ERROR"


@pytest.mark.parametrize("point", ["tool-started", "after-tool"])
async def test_the_payment_of_the_page_is_made_once(
    redis_url: str, names: dict[str, Any], point: str
) -> None:
    """TOOL-26, DOC-03"""
    script = (call(("pay", {"to": "Ann", "amount": 5})), say("done"))
    async with opened_run(redis_url, *script, tools=(names["pay"],)) as (desk, hands, run_id):
        hands.crash_at = point
        with pytest.raises(Crash):
            await hands.step(run_id, 0)
        await lease_runs_out(desk, run_id)
        await hands.finish(run_id)
        (record,) = (await desk.stored(run_id)).result().steps[0].tool_calls
    assert record.result == "paid 5 to Ann"
    assert list(names["payments"].values()) == ["paid 5 to Ann"]


async def test_the_report_of_the_page_tells_every_call(
    redis_url: str, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TOOL-17, DOC-03: from any process, by `Fleet` alone."""
    monkeypatch.setenv("STEPFLEET_REDIS_URL", redis_url)
    script = (
        call(("population", {"city": "Oslo"}), ("population", {"where": "Oslo"})),
        say("done"),
    )
    policy = ErrorPolicy.retry_tool_errors(3)
    tools = (names["population"],)
    async with opened_run(redis_url, *script, tools=tools, error_policy=policy) as (
        _,
        hands,
        run_id,
    ):
        await hands.step(run_id, 0)
        lines, failed, count = names["call_report"](run_id)
    assert lines[0] == "1.0 population({'city': 'Oslo'}) -> 730000"
    assert (len(lines), failed, count) == (2, ["population: VALIDATION_ERROR"], 2)
