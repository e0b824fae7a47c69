"""Hand-offs: another agent goes on with a run as its next step, with its own means, once."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from celery import Celery
from support.runs.heavy_calls import journal
from support.runs.opened_runs import lease_runs_out
from support.runs.scripted_steps import Crash, Hands, Script, call, say
from support.runs.stored_runs import Bench, bench
from support.runs.waits import let_pass

from stepfleet.orchestrator import Agent, ErrorPolicy, tool
from stepfleet.orchestrator.agents.agent import with_sub_agents
from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.client.control import RunControl
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.store.runs.control import ControlOutcome
from stepfleet.worker.agents.local import LocalAgents
from stepfleet.worker.ports import Ports

TO_BILLING = ("transfer_to_billing", {"reason": "an invoice"})


@tool
def look(what: str) -> str:
    """Look something up."""
    return f"found {what}"


@tool
def fail() -> str:
    """Fail, every time."""
    raise ValueError("it broke")


@dataclass
class Team(Hands):
    """Hands that know several agents."""

    agents: Sequence[Agent] = ()

    def ports(self) -> Ports:
        """Return ports that find all of them."""
        known = with_sub_agents(self.agents)
        return replace(
            super().ports(),
            agent=LocalAgents(known.values(), self.models).find,
            successor=_successor(self.desk, known),
        )


def _successor(desk: Bench, known: dict[str, Agent]) -> Callable[[str], Awaitable[AgentConfig]]:
    async def find(name: str) -> AgentConfig:
        config = known[name].config if name in known else await desk.opened.configs.named(name)
        await desk.opened.configs.save(config)
        return config

    return find


def team(*answers: Any, after: Sequence[Any] = (), **first: Any) -> tuple[Agent, Script]:
    """Return the first agent, and the model of the one that takes over; both follow scripts."""
    takes_over = Script((*answers, *after))
    billing = Agent(
        "billing",
        model=takes_over,
        instructions="You are billing.",
        tools=[look],
        max_steps=2,
        error_policy=ErrorPolicy.stop_on_any_error(),
    )
    fields = {"error_policy": ErrorPolicy.ignore_tool_errors(), **first}
    tools = [look, fail]
    reception = Agent(
        "reception",
        model=Script(answers),
        instructions="You are reception.",
        tools=tools,
        handoffs=[billing, "reception 2"],
        **fields,
    )
    return reception, takes_over


def roles(script: Script) -> list[list[str]]:
    """Return the roles of the messages of each request."""
    return [[one.role.value for one in request.messages] for request in script.requests]


async def test_the_next_step_is_the_other_agents_and_limits_stay(redis_url: str) -> None:
    """Instructions, model and tools change; steps, limits and cost are the run's."""
    turn = call(TO_BILLING, ("look", {"what": "x"}), text="One moment")
    reception, model = team(turn, say("Paid."), max_steps=7, time_limit=None)
    async with bench(redis_url, reception) as desk:
        hands = Team(desk, reception, agents=[reception])
        run_id = await desk.create()
        await hands.step(run_id, 0)
        header = await desk.header(run_id)
        assert header["agent"] == "billing"
        newest = await desk.opened.connection.execute("LINDEX", desk.opened.dispatch.queue_key, -1)
        assert "billing: step 2" in newest
        claim = await desk.claim(run_id, 1)
        assert (claim.config.name, claim.config.max_steps) == ("billing", 7)
        assert claim.config.time_limit is None
        assert claim.config.error_policy == reception.config.error_policy
        await lease_runs_out(desk, run_id)
        await hands.finish(run_id)
        run = await desk.stored(run_id)
    result = run.result()
    assert (result.agent_name, result.output, result.steps_used) == ("billing", "Paid.", 2)
    assert [step.agent for step in result.steps] == ["reception", "billing"]
    made = result.handoffs[0]
    assert (made.step, made.by, made.to, made.reason) == (1, "reception", "billing", "an invoice")
    first = result.steps[0].tool_calls
    assert [one.result for one in first] == [
        "Agent billing goes on with this conversation.",
        "found x",
    ]
    request = model.requests[0]
    assert request.messages[0].text == "You are billing."
    assert [one.name for one in request.tools] == ["look"]
    assert roles(model) == [["system", "user", "assistant", "tool", "tool"]]
    assert result.usage.total_tokens == 30


async def test_the_first_of_several_transfers_counts(redis_url: str) -> None:
    twice = call(TO_BILLING, ("transfer_to_reception_2", {}))
    reception, _ = team(twice, say("done"))
    async with bench(redis_url, reception) as desk:
        hands = Team(desk, reception, agents=[reception])
        run_id = await desk.create()
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    one, other = result.steps[0].tool_calls
    assert not one.is_error
    assert other.error is not None
    assert other.error.message == (
        "not done: an earlier call of this response hands over to agent billing"
    )
    assert not result.steps[0].errors
    assert result.agent_name == "billing"


async def test_an_unknown_agent_is_a_tool_error_and_the_run_stays(redis_url: str) -> None:
    reception, _ = team(call(("transfer_to_reception_2", {})), say("I do it myself"))
    async with bench(redis_url, reception) as desk:
        hands = Team(desk, reception, agents=[reception])
        run_id = await desk.create()
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    error = result.steps[0].tool_calls[0].error
    assert error is not None
    assert error.message.startswith("not handed over: no agent is named 'reception 2'")
    assert (result.agent_name, result.handoffs) == ("reception", ())


async def test_a_worker_that_lacks_the_agent_leaves_the_run_to_one_that_has_it(
    redis_url: str,
) -> None:
    reception, _ = team(call(("transfer_to_reception_2", {})), say("done"))
    other = Agent("reception 2", model=Script([say("never"), say("by the second")]))
    async with bench(redis_url, reception) as desk:
        await desk.opened.configs.announce(other.config)
        hands = Team(desk, reception, agents=[reception])
        run_id = await desk.create()
        await hands.step(run_id, 0)
        report = await hands.step(run_id, 1)
        assert report.verdict is not None
        assert (report.verdict.move, report.verdict.limited) == ("retry", True)
        await let_pass(desk, run_id)
        await Team(desk, other, agents=[other]).finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert (result.agent_name, result.output) == ("reception 2", "by the second")


@pytest.mark.parametrize("point", ["before-commit", "after-commit"])
async def test_a_crash_at_the_commit_hands_over_once(point: str, redis_url: str) -> None:
    reception, model = team(call(TO_BILLING), say("Paid."))
    async with bench(redis_url, reception, lease=600) as desk:
        run_id = await desk.create()
        with pytest.raises(Crash):
            await Team(desk, reception, crash_at=point, agents=[reception]).step(run_id, 0)
        await lease_runs_out(desk, run_id)
        await Team(desk, reception, agents=[reception]).finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert [step.agent for step in result.steps] == ["reception", "billing"]
    assert len(result.handoffs) == 1
    assert len(model.requests) == 1


async def test_a_retry_takes_a_failed_step_with_its_hand_off_back(redis_url: str) -> None:
    """The run goes back to the agent before, with its overrides and the limits of now."""
    turn = call(TO_BILLING, ("fail", {}))
    stop = ErrorPolicy.stop_on_any_error()
    reception, model = team(turn, say("done"), error_policy=stop)
    async with bench(redis_url, reception) as desk:
        hands = Team(desk, reception, agents=[reception])
        run_id = await desk.create(overrides={"instructions": "Be quick.", "max_steps": 4})
        await hands.step(run_id, 0)
        ended = await desk.header(run_id)
        assert (ended["status"], ended["agent"]) == ("failed", "billing")
        control = RunControl(desk.opened, Celery())
        policy = ErrorPolicy.ignore_tool_errors()
        done = await control.retry(run_id, {"error_policy": policy})
        assert done.outcome is ControlOutcome.RETRIED
        run = await desk.stored(run_id)
        assert (run.agent, run.config.name) == ("reception", "reception")
        assert (run.config.instructions, run.config.max_steps) == ("Be quick.", 4)
        assert set(await journal(desk, run_id)) >= {"response", "r:0"}
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert (result.agent_name, result.output, result.steps_used) == ("billing", "done", 2)
    assert result.max_iterations == 4
    assert len(model.requests) == 1


async def test_reasoning_and_answers_stay_with_their_agent(redis_url: str) -> None:
    """Plans are of the agent that made them; the second answers by a contract of its own."""
    planned = call(("update_plan", {"steps": [{"title": "ask", "status": "completed"}]}))
    reception, _ = team(planned, call(TO_BILLING), say("free text"), planning={})
    async with bench(redis_url, reception) as desk:
        hands = Team(desk, reception, agents=[reception])
        run_id = await desk.create()
        await hands.step(run_id, 0)
        assert (await desk.stored(run_id)).state.strategy_state
        await hands.step(run_id, 1)
        assert not (await desk.stored(run_id)).state.strategy_state
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert (result.success, result.output) == (True, "free text")


@pytest.mark.parametrize("trims", [False, True])
async def test_the_second_agent_sees_what_is_stored(trims: bool, redis_url: str) -> None:
    """A window over the conversation is its agent's; where the log was trimmed it stays."""
    looks = [call(("look", {"what": str(n)})) for n in range(4)]
    script = [*looks, call(TO_BILLING), say("done")]
    memory = {"max_messages": 4, "trim_log": trims}
    reception, model = team(*script, memory=memory)
    model.answers = [say("done")]
    reception.llm.answers = _by_step(script)  # type: ignore[union-attr]
    async with bench(redis_url, reception) as desk:
        hands = Team(desk, reception, agents=[reception])
        run_id = await desk.create()
        await hands.finish(run_id)
        run = await desk.stored(run_id)
    assert run.result().output == "done"
    shown = [one.text for one in model.requests[0].messages if one.is_tool()]
    assert ("found 0" in shown) is not trims
    assert shown[-1] == "Agent billing goes on with this conversation."
    assert (run.header.get("since", "") == "") is not trims


def _by_step(script: Sequence[Any]) -> list[Any]:
    """Return answers in turn: a trimmed conversation does not say how far it is."""
    left = iter(script)

    async def following(_: Any) -> Any:
        return next(left)

    return [following]


async def test_a_hand_off_to_nobody_is_refused_when_it_is_defined() -> None:
    billing = Agent("billing", model="openai:gpt-4o-mini")

    @tool
    def transfer_to_billing() -> str:
        """Send money."""
        return ""

    for given, part in (
        ({"handoffs": ["desk"]}, "hand over to itself"),
        ({"handoffs": [billing, "billing"]}, "'transfer_to_billing' appears twice"),
        ({"handoffs": [billing], "tools": [transfer_to_billing]}, "give one of them another name"),
        ({"handoffs": "billing"}, "write a list, as ['billing']"),
        ({"handoffs": [3]}, "holds an int; give agents or their names"),
        ({"handoffs": billing}, "'handoffs' is an Agent; write a list of agents or names"),
        ({"agents": billing}, "'agents' is an Agent; write a list of Agent objects"),
        ({"agents": [Agent]}, "'agents' holds a type; give Agent objects"),
    ):
        with pytest.raises(ConfigurationError, match=part.replace("[", r"\[")):
            Agent("desk", model="openai:gpt-4o-mini", **given)
    named = billing.as_handoff(name="to_money", description="Money.")
    desk = Agent("desk", model="openai:gpt-4o-mini", handoffs=[named], tools=[transfer_to_billing])
    assert [one.name for one in desk.tools] == ["transfer_to_billing", "to_money"]
    assert list(with_sub_agents([desk])) == ["desk", "billing"]


async def test_a_hand_off_follows_the_heavy_calls_and_leaves_reminders_behind(
    redis_url: str,
) -> None:
    """The run waits for a call on another queue, and then goes on with the other agent."""

    @tool(queue="gpu")
    def render() -> str:
        """Make a picture."""
        return "a picture"

    first = call(TO_BILLING, ("render", {}))
    billing = Agent("billing", model=Script([say("?")] * 2 + [say("done")]))
    reception = Agent(
        "reception",
        model=Script([say("hm"), first]),
        tools=[render],
        handoffs=[billing],
        require_final_answer=True,
    )
    async with bench(redis_url, reception) as desk:
        hands = Team(desk, reception, agents=[reception])
        run_id = await desk.create()
        await hands.step(run_id, 0)
        report = await hands.step(run_id, 1)
        assert report.verdict is not None
        assert report.verdict.move == "wait"
        assert (await desk.header(run_id))["agent"] == "reception"
        reminded = (await desk.stored(run_id)).state.messages
        await hands.call(run_id, 1, 1)
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert (result.output, [one.agent for one in result.steps]) == (
        "done",
        ["reception", "reception", "billing"],
    )
    assert result.steps[1].tool_calls[1].result == "a picture"
    assert reminded[-1].metadata == {"added_by": "contract"}
    asked = billing.llm.requests[0].messages  # type: ignore[union-attr]
    assert [one.role.value for one in asked] == ["user", "assistant", "assistant", "tool", "tool"]
