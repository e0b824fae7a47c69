"""What a reasoner makes of a turn is committed with the step, and once."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from support.runs.scripted_steps import Crash, Hands, Script, call, say
from support.runs.stored_runs import Bench, bench
from support.runs.tools import look

from stepfleet.orchestrator import (
    Agent,
    AgentConfig,
    AgentState,
    ContinuationCriteria,
    ErrorPolicy,
    LLMResponse,
    Message,
    RunStatus,
    ToolCall,
)
from stepfleet.orchestrator.agents.agent import criteria_of
from stepfleet.orchestrator.agents.reasoner import ModelTurn, Reasoner
from stepfleet.orchestrator.errors import StrategyError
from stepfleet.orchestrator.protocol.fold import rebuild
from stepfleet.orchestrator.records.steps import Progress, StepType
from stepfleet.worker.agents.local import LocalAgent
from stepfleet.worker.models import Models
from stepfleet.worker.ports import Ports


@dataclass
class Counting(Reasoner):
    """Counts its turns in the state, and takes a text that begins with `look` for a call."""

    interpreted: list[str] = field(default_factory=list)
    raises: Exception | None = None

    def interpret(self, response: LLMResponse, state: AgentState) -> LLMResponse:
        self.interpreted.append(response.content)
        if not response.content.startswith("look "):
            return response
        asked = ToolCall(id="read", name="look", arguments={"what": response.content[5:]})
        return response.model_copy(update={"tool_calls": (asked,)})

    async def read(self, turn: ModelTurn, state: AgentState) -> Progress:
        if self.raises:
            raise self.raises
        turns = state.strategy_state.get("turns", 0) + 1
        return Progress(
            messages=(Message.user(f"{turns} turns, the last said {turn.texts}"),),
            strategy_state={"turns": turns},
            custom_state={f"turn-{turns}": turn.response.content},
        )


class Code(LocalAgent):
    """An agent's code on a worker, with a reasoner of the test's own."""

    def __init__(self, agent: Agent, own: Reasoner) -> None:
        super().__init__(agent, agent.tools, Models())
        self.own = own

    def criteria(self, config: AgentConfig) -> ContinuationCriteria:
        return criteria_of(config, self._agent, self.own)

    def reasoner(self, config: AgentConfig) -> Reasoner:
        return self.own


@dataclass
class ReasonerHands(Hands):
    """Hands whose agent follows a reasoner."""

    own: Reasoner = field(default_factory=Counting)

    def ports(self) -> Ports:
        code = Code(self.agent, self.own)
        return replace(super().ports(), agent=lambda _: code)


@asynccontextmanager
async def opened(
    url: str, *answers: Any, own: Reasoner, **config: Any
) -> AsyncIterator[tuple[Bench, ReasonerHands, str]]:
    agent = Agent("scripted", model=Script(answers), tools=(look,), **config)
    async with bench(url, agent, lease=0.5, grace=60) as desk:
        yield desk, ReasonerHands(desk, agent, own=own), await desk.create()


ASK, DONE = call(("look", {"what": "a"})), say("done")


async def test_progress_is_in_the_log_and_the_next_worker_goes_on_from_it(redis_url: str) -> None:
    """STATE-06"""
    async with opened(redis_url, ASK, ASK, DONE, own=Counting()) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        another = ReasonerHands(desk, hands.agent, own=Counting())
        await another.step(run_id, 1)
        await hands.step(run_id, 2)
        stored = await desk.stored(run_id)
    assert stored.state.strategy_state == {"turns": 3}
    assert stored.state.custom_state == {"turn-1": "", "turn-2": "", "turn-3": "done"}
    said = [message.text for message in stored.state.messages if message.is_user()]
    assert said[1:] == [
        "1 turns, the last said ('seen a',)",
        "2 turns, the last said ('seen a',)",
        "3 turns, the last said ()",
    ]


async def test_the_state_rebuilt_from_the_log_equals_the_one_that_was_handed_on(
    redis_url: str,
) -> None:
    """STATE-06"""
    async with opened(redis_url, ASK, DONE, own=Counting()) as (desk, hands, run_id):
        before = (await desk.stored(run_id)).state
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    again = rebuild(before, stored.log)
    for name in ("messages", "strategy_state", "custom_state", "usage", "current_step"):
        assert getattr(again, name) == getattr(stored.state, name)


async def test_an_answer_is_interpreted_once_and_its_calls_are_run_once(redis_url: str) -> None:
    own = Counting()
    async with opened(redis_url, say("look b"), DONE, own=own) as (desk, hands, run_id):
        hands.crash_at = "after-tool"
        with pytest.raises(Crash):
            await hands.step(run_id, 0)
        await desk.opened.connection.execute(
            "HSET", desk.opened.keys.run(run_id), "lease", 0, "token", ""
        )
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert own.interpreted == ["look b", "done"]
    assert result.steps[0].tool_calls[0].result == "seen b"
    assert (result.status, result.steps_used) == (RunStatus.COMPLETED, 2)


@pytest.mark.parametrize("error", [StrategyError("no idea"), ValueError("no idea")])
async def test_a_reasoner_that_fails_is_an_error_of_a_step_that_keeps_its_work(
    redis_url: str, error: Exception
) -> None:
    own = Counting(raises=error)
    async with opened(redis_url, ASK, own=own) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        stored = await desk.stored(run_id)
    result = stored.result()
    assert (result.status, result.steps_used) == (RunStatus.ERROR, 1)
    assert result.steps[0].type is StepType.ERROR
    assert "no idea" in result.steps[0].errors[0].message
    assert result.steps[0].tool_calls[0].result == "seen a"
    assert result.usage.total_tokens == 15


async def test_the_policy_decides_whether_a_run_goes_on_behind_a_failed_reasoner(
    redis_url: str,
) -> None:
    own = Counting(raises=ValueError("no idea"))
    policy = ErrorPolicy.retry_all(3)
    async with opened(redis_url, ASK, DONE, own=own, error_policy=policy) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        own.raises = None
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.status is RunStatus.COMPLETED
    assert [step.type for step in result.steps] == [StepType.ERROR, StepType.FINAL_RESPONSE]
