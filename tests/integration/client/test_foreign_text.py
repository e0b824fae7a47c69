"""Text that is no valid Unicode, and bytes: every way in refuses them by name, or mends them."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.runs.scripted_steps import Script, say

from stepfleet.orchestrator import Agent, AsyncFleet, ConfigurationError, Message

HALF = "half \ud83d"
Ask = Callable[[AsyncFleet, Agent], Awaitable[Any]]
WAYS: dict[tuple[str, str], Ask] = {
    ("input", "text"): lambda fleet, agent: fleet.submit(agent, HALF),
    ("input", "message"): lambda fleet, agent: fleet.submit(agent, [Message.user(HALF)]),
    ("input", "dict"): lambda fleet, agent: fleet.submit(agent, {"text": HALF}),
    ("metadata", "value"): lambda fleet, agent: fleet.submit(agent, "x", metadata={"text": HALF}),
    ("metadata", "key"): lambda fleet, agent: fleet.submit(agent, "x", metadata={HALF: 1}),
    ("instructions", ""): lambda fleet, agent: fleet.submit(agent, "x", instructions=HALF),
    ("name", ""): lambda fleet, agent: fleet.submit_batch([{"input": "x"}], agent, name=HALF),
    ("tenant", ""): lambda fleet, agent: fleet.submit(agent, "x", tenant=HALF),
}


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
async def test_text_that_is_no_unicode_is_refused_by_its_field(
    fleet: AsyncFleet, way: tuple[str, str]
) -> None:
    agent = Agent("plain", model=Script([say("hi")]))
    with pytest.raises(ConfigurationError, match=f"field '{way[0]}'"):
        await WAYS[way](fleet, agent)


@pytest.mark.parametrize(
    ("field", "value"),
    [("instructions", HALF), ("metadata", {"a": [HALF]}), ("metadata", {"a": b"\xff"})],
    ids=["instructions", "metadata", "bytes"],
)
def test_an_agent_that_cannot_be_stored_is_refused_by_its_field(field: str, value: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=f"field '{field}' is stored, so it must be JSON data"
    ):
        Agent("plain", model=Script([say("hi")]), **{field: value})


async def test_a_cancels_note_is_mended(fleet: AsyncFleet) -> None:
    run_id = await fleet.submit(Agent("plain", model=Script([say("hi")])), "x")
    await fleet.runs.cancel(run_id, HALF)
    outcome = (await fleet.runs.result(run_id)).outcome
    assert outcome is not None
    assert outcome.evaluations[0].context == {"note": "half \\ud83d"}
