"""An agent's subscribers hear of its steps where they are made, and never hold them up."""

import asyncio
import threading
from collections import Counter
from typing import Any

from support.deadlines import until
from support.runs.scripted_steps import Script, call, say
from support.runs.tools import look

from stepfleet.orchestrator import (
    Agent,
    AgentState,
    AsyncFleet,
    LLMResponse,
    StepResult,
    Subscribers,
)
from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.events.domain_events import (
    AgentFailed,
    AgentFinished,
    AgentStateUpdated,
    AgentStepCompleted,
    AgentStepStarted,
    ContinuationEvaluated,
    DomainEvent,
    TokenUsageReported,
    ToolCallCompleted,
    ToolCallStarted,
)
from stepfleet.orchestrator.events.subscribers import Moment
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.events.subscribers import SubscriberQueue
from stepfleet.worker.runtime.inline import InlineWorker


def looker(subscribers: Subscribers, **config: Any) -> Agent:
    answers = [call(("look", {"what": "x" * 50}), text="Looking."), say("It is there.")]
    return Agent("looker", model=Script(answers), tools=[look], subscribers=subscribers, **config)


async def run(redis_url: str, agent: Agent) -> str:
    async with AsyncFleet(redis_url) as fleet:
        run_id = await fleet.submit(agent, "hi")
        async with InlineWorker(load_settings(redis_url=redis_url), [agent]) as worker:
            await worker.finish(run_id)
        assert (await fleet.runs.result(run_id)).success
        return run_id


async def test_callbacks_are_called_in_the_order_of_a_run(redis_url: str) -> None:
    """EVT-17: with the moment and their value."""
    heard: list[tuple[str, Moment, Any]] = []

    def keeping(name: str) -> Any:
        return lambda moment, value: heard.append((name, moment, value))

    names = ("step_start", "llm_response", "step_end", "agent_finish")
    run_id = await run(redis_url, looker(Subscribers(**{name: keeping(name) for name in names})))
    assert [(name, moment.step) for name, moment, _ in heard] == [
        *(("step_start", 1), ("llm_response", 1), ("step_end", 1)),
        *(("step_start", 2), ("llm_response", 2), ("step_end", 2), ("agent_finish", 2)),
    ]
    assert {(one.run_id, one.agent) for _, one, _ in heard} == {(run_id, "looker")}
    kinds = {name: type(value) for name, _, value in heard}
    assert kinds == {
        "step_start": AgentState,
        "llm_response": LLMResponse,
        "step_end": StepResult,
        "agent_finish": AgentState,
    }
    assert heard[-1][2].last_output == "It is there."


async def test_a_run_emits_each_domain_event_with_all_there_is(redis_url: str) -> None:
    """EVT-13, EVT-14, EVT-15: whole arguments; one full outcome for each step."""
    heard: list[DomainEvent] = []
    await run(redis_url, looker(Subscribers().wiretap(heard.append)))
    assert [type(event) for event in heard] == [
        *(AgentStepStarted, ToolCallStarted, ToolCallCompleted, AgentStepCompleted),
        *(ContinuationEvaluated, TokenUsageReported, AgentStateUpdated),
        *(AgentStepStarted, AgentStepCompleted, ContinuationEvaluated, TokenUsageReported),
        *(AgentStateUpdated, AgentFinished),
    ]
    started = next(event for event in heard if isinstance(event, ToolCallStarted))
    assert started.args == {"what": "x" * 50}
    evaluated = [event for event in heard if isinstance(event, ContinuationEvaluated)]
    assert [event.outcome.should_continue for event in evaluated] == [True, False]
    assert all(event.outcome.evaluations for event in evaluated)
    assert [event.step_number for event in evaluated] == [1, 2]
    usage = [event.usage.total_tokens for event in heard if isinstance(event, TokenUsageReported)]
    assert usage == [15, 15]


async def test_a_run_that_fails_emits_its_failure(redis_url: str) -> None:
    """EVT-15"""
    heard: list[DomainEvent] = []
    told = Subscribers().wiretap(heard.append)
    agent = Agent("broken", model=Script([ModelError("no luck")]), subscribers=told)
    async with AsyncFleet(redis_url) as fleet:
        run_id = await fleet.submit(agent, "hi")
        async with InlineWorker(load_settings(redis_url=redis_url), [agent]) as worker:
            await worker.finish(run_id)
        assert not (await fleet.runs.result(run_id)).success
    (failed,) = [event for event in heard if isinstance(event, AgentFailed)]
    assert (failed.agent_id, failed.step_count) == (run_id, 1)
    assert "no luck" in str(failed.error)
    assert not any(isinstance(event, AgentFinished) for event in heard)


async def test_the_trace_on_the_wire_makes_no_second_evaluation(redis_url: str) -> None:
    """EVT-14: count = steps, also where the envelope is told."""
    heard: Counter[str] = Counter()

    def count(event: DomainEvent) -> None:
        heard[type(event).__name__] += 1

    await run(redis_url, looker(Subscribers().wiretap(count), broadcast="debug"))
    assert heard["ContinuationEvaluated"] == 2


async def test_a_slow_or_failing_subscriber_holds_up_no_step(redis_url: str) -> None:
    """EVT-20: the run ends while the first call still hangs in its thread."""
    gate = threading.Event()
    heard: list[str] = []

    def hangs(moment: Moment, _: Any) -> None:
        heard.append(f"began {moment.step}")
        gate.wait(60)

    def fails(_moment: Moment, _: Any) -> None:
        raise RuntimeError("no")

    async def has_begun() -> bool:
        return bool(heard)

    agent = looker(Subscribers(step_start=hangs, step_end=fails))
    async with AsyncFleet(redis_url) as fleet:
        run_id = await fleet.submit(agent, "hi")
        async with InlineWorker(load_settings(redis_url=redis_url), [agent]) as worker:
            working = asyncio.create_task(worker.finish(run_id))
            result = await fleet.runs.wait(run_id, timeout=60)
            await until(has_begun, within=60)
            assert heard == ["began 1"]
            gate.set()
            await working
    assert result.success
    assert agent.subscribers is not None
    assert agent.subscribers.failures == 2


async def test_calls_that_find_no_room_are_dropped_and_counted() -> None:
    """EVT-20: bounded."""
    listening = SubscriberQueue(most=2)
    gate, made = asyncio.Event(), []

    async def hang() -> None:
        await gate.wait()
        made.append("call")

    for _ in range(5):
        listening.offer(hang)
    gate.set()
    await listening.settle(30)
    await listening.aclose()
    assert (len(made), listening.dropped) == (2, 3)


async def test_subscribers_can_follow_a_run_from_a_client(redis_url: str) -> None:
    """EVT-15, EVT-16: fed from its stream, in any process."""
    run_id = await run(redis_url, looker(Subscribers()))
    heard: list[DomainEvent] = []
    told = Subscribers().on(AgentFinished, heard.append)
    async with AsyncFleet(redis_url) as fleet:
        async for event in fleet.runs.events(run_id, follow=True):
            await told.broadcast(f"agent.{run_id}", event)
    assert [type(event) for event in heard] == [AgentFinished]
