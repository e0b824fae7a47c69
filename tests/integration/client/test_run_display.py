"""Windows on runs in a real store: history, live messages, failed runs."""

import asyncio
import json
from pathlib import Path

import pytest
from support.runs.scripted_steps import Script, call, say
from support.runs.tools import look

from stepfleet.orchestrator import Agent, AsyncFleet, RunView, UIMessage
from stepfleet.orchestrator.cli.main import build
from stepfleet.orchestrator.client.rendering import UIRole
from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.runtime.inline import InlineWorker

LOOKER = Agent(
    "looker",
    model=Script([call(("look", {"what": "a"}), text="Looking."), say("It is there.")]),
    tools=[look],
    broadcast="debug",
)
BROKEN = Agent(
    "broken", model=Script([call(("look", {"what": "a"})), ModelError("no luck")]), tools=[look]
)
SAID = [
    ("user", "hi"),
    ("assistant", "Looking."),
    ("tool", "seen a"),
    ("assistant", "It is there."),
]


def said(messages: tuple[UIMessage, ...]) -> list[tuple[str, str]]:
    return [(one.role.value, one.content) for one in messages]


async def work(redis_url: str, agent: Agent, run_id: str) -> None:
    async with InlineWorker(load_settings(redis_url=redis_url), [agent]) as worker:
        await worker.finish(run_id)


async def test_a_window_that_followed_a_run_ends_with_its_stored_history(redis_url: str) -> None:
    """UI-07, UI-04, UI-06: text, statuses and tools on the way."""
    async with AsyncFleet(redis_url) as fleet:
        run_id = await fleet.submit(LOOKER, "hi")
        followed = fleet.runs.display(run_id, continuation=True)
        windows = [await anext(followed)]
        working = asyncio.create_task(work(redis_url, LOOKER, run_id))
        windows += [one async for one in followed]
        await working
        view = await fleet.runs.view(run_id)
    assert windows[-1] == view.messages
    assert said(view.messages) == SAID
    told = {(one.role, one.content) for window in windows for one in window}
    assert (UIRole.STATUS, "Stopped: completed (aggregate)") in told


async def test_a_window_that_opens_late_shows_the_whole_conversation(redis_url: str) -> None:
    """UI-07: also that of an earlier turn."""
    async with AsyncFleet(redis_url) as fleet:
        run_id = await fleet.submit(LOOKER, "hi")
        await work(redis_url, LOOKER, run_id)
        await fleet.runs.send(run_id, "again")
        await work(redis_url, LOOKER, run_id)
        (window,) = [one async for one in fleet.runs.display(run_id)]
    assert said(window) == [*SAID, ("user", "again"), ("assistant", "It is there.")]


async def test_a_failed_run_shows_its_banner_and_its_history(redis_url: str) -> None:
    """UI-08: and every criterion with its word."""
    async with AsyncFleet(redis_url) as fleet:
        run_id = await fleet.submit(BROKEN, "hi")
        await work(redis_url, BROKEN, run_id)
        view = await fleet.runs.view(run_id)
        window = [one async for one in fleet.runs.display(run_id)][-1]
    assert said(view.messages) == [("user", "hi"), ("tool", "seen a")]
    assert view.banner is not None
    assert (view.banner.step, view.banner.type) == (2, "model")
    assert view.continuation is not None
    assert view.continuation.get_forbidding_criterion() == "ErrorPolicyCriterion"
    assert next(one.content for one in window if one.is_error) == "no luck"
    assert window[:2] == view.messages
    assert RunView.model_validate(json.loads(json.dumps(view.to_dict()))) == view


async def test_a_retry_is_seen_with_its_attempt(redis_url: str) -> None:
    """UI-10: attempt 2 of 5, from the agent's own configuration."""

    async def first_fails(_: object) -> object:
        if len(script.requests) == 1:
            raise ModelError("overloaded", retryable=True)
        return say("Done.")

    script = Script([first_fails])
    agent = Agent("shaky", model=script)
    async with AsyncFleet(redis_url) as fleet:
        run_id = await fleet.submit(agent, "hi")
        followed = fleet.runs.display(run_id)
        windows = [await anext(followed)]
        working = asyncio.create_task(work(redis_url, agent, run_id))
        windows += [one async for one in followed]
        await working
    retries = [
        one.metadata.retry
        for window in windows
        for one in window
        if one.metadata and one.metadata.retry
    ]
    assert {(retry.attempt, retry.of) for retry in retries} == {(2, 5)}
    assert said(windows[-1]) == [("user", "hi"), ("assistant", "Done.")]


def test_show_prints_the_chat_of_a_run(
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """UI-02, UI-08, UI-09: for people, as JSON, and followed."""
    monkeypatch.setenv("STEPFLEET_REDIS_URL", redis_url)

    async def submitted(agent: Agent) -> str:
        async with AsyncFleet(redis_url) as fleet:
            run_id = await fleet.submit(agent, "hi")
            await work(redis_url, agent, run_id)
            return run_id

    def show(*arguments: str) -> str:
        build()(["show", *arguments, "--data", str(tmp_path)], standalone_mode=False)
        return capsys.readouterr().out

    done, failed = asyncio.run(submitted(LOOKER)), asyncio.run(submitted(BROKEN))
    lines = show(done, "--follow").splitlines()
    assert lines[-6].startswith("user: hi")
    assert lines[-5].startswith("assistant: Looking.")
    assert lines[-4].startswith('  calls look(what: "a")')
    assert lines[-3].startswith('tool: look(what: "a") → seen a')
    assert "(step 2: " in lines[-2]
    assert lines[-1] == "stopped: completed, by aggregate"
    assert "failed in step 2 (model, " in show(failed, "--chat", "--full")
    assert json.loads(show(failed, "--chat", "--json"))["banner"]["step"] == 2
    assert len(json.loads(show(done, "--follow", "--json").splitlines()[-1])) == 4
