"""Hostile answers over real HTTP: each is told to the model, bounded, and the run goes on."""

from collections.abc import Iterator

import pytest

from stepfleet.orchestrator import Agent, AsyncFleet, RunStatus
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.runtime.inline import InlineWorker
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

GOOD = {"code": "aaa"}
SCHEMA = {
    "type": "object",
    "properties": {"code": {"type": "string", "pattern": "^(a+)+$"}},
    "required": ["code"],
}
SCHEMA_NAME = "structured"
DEEP = "[" * 10_000 + "]" * 10_000


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelServer]:
    with ModelServer() as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
        yield server


def data(arguments: str | dict[str, object]) -> Reply:
    return Reply(tool_calls=(ToolCallReply("structured_response", arguments),))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"structured": ' + DEEP + "}", "nested deeper than 100 levels"),
        ('{"structured": {"code": "' + "a" * 2_000_000 + '"}}', "longer than the limit"),
        ('{"structured": {"code": "' + "a" * 500_000 + '"}}', "larger than the limit"),
        ('{"structured": {"code": "' + "a" * 100_000 + '!"}}', "does not match"),
        ('{"structured": {"code": NaN}}', "NaN is not a JSON number"),
        ('{"structured": {"code": "a"', "not valid JSON"),
        ('{"structured": {"code": ' + "9" * 5000 + "}}", "more than 4300 digits"),
    ],
)
async def test_a_hostile_answer_is_an_observation(
    redis_url: str, model: ModelServer, arguments: str, told: str
) -> None:
    """ANS-07, ANS-09, TOOL-07"""
    agent = Agent("guarded", model="openai:scripted", output_type=SCHEMA, token_limit=None)
    model.script("q", data(arguments), data({"structured": GOOD}))
    settings = load_settings(redis_url=redis_url)
    async with AsyncFleet(redis_url) as fleet, InlineWorker(settings, [agent]) as worker:
        run_id = await fleet.submit(agent, "q")
        await worker.finish(run_id)
        result = await fleet.runs.result(run_id)
    assert result.status is RunStatus.COMPLETED
    assert (result.structured, result.schema_name) == (GOOD, SCHEMA_NAME)
    error = result.steps[0].tool_calls[0].error
    assert error is not None
    assert told in error.message
    assert len(error.message) < 1000
    assert result.steps_used == 2
