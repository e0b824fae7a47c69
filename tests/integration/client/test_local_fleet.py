"""Local development: a fleet in one line, and single steps under a person's eyes."""

import asyncio
import bdb
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from support.runs.scripted_steps import Script, call, say

from stepfleet.orchestrator import (
    Agent,
    AsyncFleet,
    ConfigurationError,
    DebugStep,
    Fleet,
    RunStatus,
    ToolCallRecord,
    tool,
)
from stepfleet.orchestrator.errors import ModelError

LONG = 60.0


@tool(read_only=True)
def thread() -> str:
    """Return the name of the tool's thread."""
    return threading.current_thread().name


def threaded(name: str = "threaded", **config: Any) -> Agent:
    answers = [call(("thread", {}), text="Looking."), say("done")]
    return Agent(name, model=Script(answers), tools=[thread], **config)


def with_tool(function: Callable[..., Any], **options: Any) -> Agent:
    """Return an agent that calls `function` once."""
    one = tool(name="work", description="Work.", **options)(function)
    return Agent("worker", model=Script([call(("work", {})), say("done")]), tools=[one])


def only_call(steps: list[DebugStep]) -> ToolCallRecord:
    (found,) = [one for step in steps for one in step.calls]
    return found


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory without a fleet, and no Redis in the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STEPFLEET_REDIS_URL", raising=False)


def test_one_line_gives_a_server_and_a_worker_and_the_folder_keeps_the_runs() -> None:
    agent = threaded()
    with Fleet.local(agents=[agent]) as fleet:
        assert fleet.run(agent, "hi") == "done"
        batch = fleet.submit_batch([{"id": f"{n}", "input": "hi"} for n in range(30)], agent=agent)
        assert {one.output for one in batch.results()} == {"done"}
        run_id = fleet.submit(agent, "kept")
        assert fleet.runs.wait(run_id, LONG).status is RunStatus.COMPLETED
    assert Path(".stepfleet/.gitignore").read_text() == "*\n"
    with Fleet() as plain:
        assert plain.runs.result(run_id).output == "done"
        assert not plain.overview().workers


def test_a_temporary_fleet_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    agent = threaded()
    with Fleet.local(agents=[agent], folder=None) as fleet:
        assert fleet.run(agent, "hi") == "done"
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


async def test_an_asynchronous_local_fleet_does_the_calls_on_queues_of_their_own() -> None:
    agent = with_tool(lambda: "heavy", queue="gpu")
    async with AsyncFleet.local([agent], folder=None) as fleet:
        result = await fleet.run_with_steps(agent, "hi", timeout=LONG)
        (worker,) = (await fleet.overview()).workers
        assert set(worker.queues or ()) == {"stepfleet", "gpu"}
    assert result.steps[0].tool_calls[0].result == "heavy"


def test_what_is_open_at_the_end_is_done_by_the_next_one() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> str:
        begun.set()
        go_on.wait(LONG)
        return "waited"

    agent = with_tool(wait, read_only=True)
    with Fleet.local(agents=[agent]) as fleet:
        run_id = fleet.submit(agent, "hi")
        assert begun.wait(LONG)
    go_on.set()
    with Fleet.local(agents=[agent]) as fleet:
        assert fleet.runs.wait(run_id, LONG).output == "done"


def test_a_tool_at_a_prompt_has_no_time_limit_in_a_local_fleet() -> None:
    """In a thread, and in the event loop, which the tool blocks."""

    async def in_loop() -> str:
        time.sleep(0.5)  # noqa: ASYNC251 - a prompt blocks the loop
        await asyncio.sleep(0.01)  # where a time limit that has passed would strike
        return "at last"

    def in_thread() -> str:
        time.sleep(0.5)  # as a person at a prompt: longer than the limit
        return "at last"

    for function in (in_loop, in_thread):
        agent = with_tool(function, timeout=0.1)
        with Fleet.local(agents=[agent], folder=None) as fleet:
            result = fleet.run_with_steps(agent, "hi", timeout=LONG)
            assert result.steps[0].tool_calls[0].result == "at last"
            assert only_call(list(fleet.debug("hi"))).result == "at last"


def test_each_next_does_one_step_in_the_calling_thread() -> None:
    steps = Fleet().debug("hi", threaded())
    first = next(steps)
    assert only_call([first]).result == threading.current_thread().name
    assert [one.role for one in first.messages] == ["assistant", "tool"]
    assert first.result.lifecycle == "in_progress"
    assert "call:  thread()" in str(first)
    assert "the run goes on" in first.decision
    last = next(steps)
    assert last.result.output == "done"
    assert "the run ends: completed" in str(last)
    assert list(steps) == []


def test_a_run_is_debugged_as_a_copy_with_the_agent_as_it_is_now() -> None:
    agent = threaded()
    with Fleet.local(agents=[agent]) as fleet:
        run_id = fleet.submit(agent, "hi", max_steps=9)
        before = fleet.runs.wait(run_id, LONG)
        changed = Agent("threaded", model=Script([say("changed")]), instructions="Be brief.")
        (again,) = fleet.debug(run_id, changed)
        assert (again.step, again.result.output) == (1, "changed")
        (rest,) = fleet.debug(run_id, at=1)
        assert (rest.step, rest.result.output) == (2, "done")
        assert fleet.runs.result(run_id) == before
        with pytest.raises(ConfigurationError, match="steps"):
            next(fleet.debug(run_id, at=7))


def test_a_failed_attempt_is_a_step_that_says_when_it_is_repeated() -> None:
    agent = Agent("failing", model=Script([ModelError("no luck", retryable=True)]))
    first = next(Fleet().debug("hi", agent))
    assert first.logged is None
    assert "no luck" in str(first.error)
    assert "the step is repeated in" in str(first)


def test_who_leaves_the_debugger_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise bdb.BdbQuit

    with pytest.raises(bdb.BdbQuit):
        list(Fleet().debug("hi", with_tool(stop)))


async def test_debug_awaits_in_a_running_loop() -> None:
    agent = threaded()
    with pytest.raises(ConfigurationError, match="AsyncFleet"):
        next(Fleet().debug("hi", agent))
    steps: AsyncIterator[DebugStep] = AsyncFleet().debug("hi", agent)
    found = [step async for step in steps]
    assert only_call(found).result == threading.current_thread().name


def test_errors_name_the_fix() -> None:
    with pytest.raises(ConfigurationError, match=r"stepfleet up.*Fleet\.local"), Fleet():
        pass
    with pytest.raises(ConfigurationError, match="pass agent="):
        next(Fleet().debug("hi"))
    two = [threaded("one"), threaded("two")]
    with (
        Fleet.local(agents=two, folder=None) as fleet,
        pytest.raises(ConfigurationError, match="agent="),
    ):
        next(fleet.debug("hi"))
    program = (
        "import sys; sys.modules['aiohttp'] = None\n"
        "from stepfleet.orchestrator import Agent, Fleet\n"
        "Fleet.local([Agent('a', model='openai:x')], folder=None).check()"
    )
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert "pip install 'stepfleet[local]'" in done.stderr
    assert "'aiohttp'" in done.stderr


PROMPT = '''
from stepfleet.orchestrator import LLM, Agent, Fleet, LLMResponse, ToolCall, tool


@tool(read_only=True, timeout=0.1)
def stock(product: str) -> int:
    """Count."""
    pieces = 12
    breakpoint()
    return pieces


class Model(LLM):
    async def generate(self, request):
        if any(one.is_tool() for one in request.messages):
            return LLMResponse(content="done")
        return LLMResponse(tool_calls=(ToolCall(id="1", name="stock", arguments={"product": "l"}),))


clerk = Agent("clerk", model=Model(), tools=[stock])
with Fleet.local(agents=[clerk], folder=None) as fleet:
'''
DEBUGGED = "    for step in fleet.debug('hi'):\n        print(step)\n"
LOCAL = "    print(fleet.run_with_steps(clerk, 'hi', timeout=60).steps[0].tool_calls[0].result)\n"


@pytest.mark.parametrize("body", [DEBUGGED, LOCAL])
def test_a_real_debugger_stops_in_a_tool(tmp_path: Path, body: str) -> None:
    program = tmp_path / "shop.py"
    program.write_text(PROMPT + body)
    env = {**os.environ, "PYTHONBREAKPOINT": "pdb.set_trace"}
    typed = "import time; time.sleep(0.3)\np 'product is', product\npieces = 13\nc\n"
    done = subprocess.run(
        [sys.executable, str(program)],
        input=typed,
        capture_output=True,
        text=True,
        timeout=LONG,
        env=env,
        check=False,
    )
    assert "('product is', 'l')" in done.stdout, done.stderr
    assert "13" in done.stdout.rpartition("product is")[2], done.stdout + done.stderr
