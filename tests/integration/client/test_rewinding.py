"""A log tells every earlier state: with memory policies and strategies, through real steps."""

from typing import Any
from uuid import uuid4

import pytest
from support.runs.opened_runs import opened_run
from support.runs.scripted_steps import Hands, Script, call, say
from support.runs.tools import look

from stepfleet.orchestrator import AsyncFleet, ConfigurationError, MemoryPolicy
from stepfleet.orchestrator.protocol.revision import state_before

STEPS = 7
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a window of messages": {"memory": MemoryPolicy(max_messages=4)},
    "react": {"strategy": "react"},
    "chain of thought": {"strategy": "chain_of_thought"},
}


def answers() -> list[Any]:
    return [
        *(call(("look", {"what": str(number)}), text=f"look {number}") for number in range(STEPS)),
        say("done"),
    ]


def requests_of(hands: Hands) -> list[Any]:
    script = hands.agent.llm
    assert isinstance(script, Script)
    return script.requests


@pytest.mark.parametrize("name", CONFIGS)
async def test_each_state_is_reported_by_the_log(redis_url: str, name: str) -> None:
    """CKPT-14: the state behind each step, rebuilt, is the one that was handed on."""
    config = {"max_steps": 20, **CONFIGS[name]}
    async with opened_run(redis_url, *answers(), tools=(look,), **config) as (desk, hands, run_id):
        handed = [(await desk.stored(run_id)).state]
        for step in range(STEPS):
            await hands.step(run_id, step)
            handed.append((await desk.stored(run_id)).state)
        run = await desk.stored(run_id)
    volatile = {"info", "messages", "status", "tool_results"}
    for at, state in enumerate(handed):
        told = state_before(run.state, run.log, at)
        assert _without(told, volatile) == _without(state, volatile)
        assert told.info.cumulative_execution_seconds == state.info.cumulative_execution_seconds


def _without(state: Any, names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in state.to_dict().items() if name not in names}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("at", [0, 1, STEPS - 1])
async def test_a_fork_and_a_restored_run_ask_what_the_run_asked_there(
    redis_url: str, name: str, at: int
) -> None:
    """CKPT-07"""
    config = {"max_steps": 20, **CONFIGS[name]}
    async with opened_run(redis_url, *answers(), tools=(look,), **config) as (desk, hands, run_id):
        await desk.opened.configs.announce(hands.agent.config)
        for step in range(STEPS):
            await hands.step(run_id, step)
        asked = list(requests_of(hands))
        async with AsyncFleet(redis_url) as fleet:
            fork = await fleet.history.fork(run_id, at=at)
            kept = await fleet.history.checkpoint(run_id, at=at)
            copy = await fleet.history.restore(kept, run_id=str(uuid4()))
            for one in (fork, copy):
                requests_of(hands).clear()
                await hands.step(one, at)
                assert requests_of(hands) == [asked[at]]


async def test_a_file_chooses_neither_code_nor_tools(redis_url: str) -> None:
    """What only the agent's code may say is taken from the agent."""
    async with opened_run(redis_url, *answers(), tools=(look,)) as (desk, hands, run_id):
        await desk.opened.configs.announce(hands.agent.config)
        async with AsyncFleet(redis_url) as fleet:
            data = await fleet.history.save_state(run_id)
            evil = {
                "memory": {"custom": "os:system"},
                "strategy": "os:system",
                "settings": {"base_url": "http://elsewhere", "api_key_env": "HOME"},
            }
            copy = await fleet.history.load_state(
                {**data, "config": {**data["config"], **evil}}, run_id=str(uuid4())
            )
            config = (await fleet.runs.show(copy)).config
            assert (config.memory.custom, config.strategy) == (None, hands.agent.config.strategy)
            assert config.settings == hands.agent.config.settings
            tools = [{"name": "fly"}]
            with pytest.raises(ConfigurationError, match="has no tool 'fly'"):
                await fleet.history.load_state(
                    {**data, "config": {**data["config"], "tools": tools}}, run_id=str(uuid4())
                )
