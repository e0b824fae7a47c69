"""The pytest fixture with a scripted model: pleasant where it fits, at once wrong where not."""

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from support.runs.tools import broken, look

from stepfleet.orchestrator import Agent, ErrorPolicy, StopReason, tool
from stepfleet.orchestrator.errors import ModelError
from stepfleet.worker.testing.scenario import Reply
from stepfleet.worker.testing.scripted import Scripted, ScriptError, call


class Found(BaseModel):
    what: str
    pieces: int


looker = Agent("looker", model="openai:gpt-4o-mini", instructions="Look.", tools=[look])


@pytest.fixture(scope="module")
def session() -> Iterator[Scripted]:
    with Scripted() as made:
        yield made


@pytest.fixture
def scripted(session: Scripted) -> Scripted:
    return session.anew()


def test_tools_are_real_and_the_model_is_the_script(scripted: Scripted) -> None:
    """LLM-07: calls of one turn, text beside calls; several runs in one test."""
    script: list[Any] = [
        [call("look", what="a"), call("look", what="b")],
        Reply("Once more.", tool_calls=(call("look", what="c"),)),
        "It is there.",
    ]
    result = scripted.run(looker, "hi", script)
    assert (result.output, result.stop_reason) == ("It is there.", StopReason.COMPLETED)
    assert scripted.calls == [("look", {"what": one}, f"seen {one}") for one in "abc"]
    assert scripted.run(looker, "hi", "short").output == "short"
    assert scripted.calls == []


def test_data_is_sent_as_json_and_an_override_holds(scripted: Scripted) -> None:
    agent = Agent("finder", model="openai:x", output_type=Found)
    either: tuple[Found | dict[str, Any], ...] = (
        Found(what="lamp", pieces=3),
        {"what": "lamp", "pieces": 3},
    )
    for data in either:
        assert scripted.run(agent, "hi", [data]).structured == {"what": "lamp", "pieces": 3}
    result = scripted.run(looker, "hi", [call("look", what="a")], max_steps=1)
    assert result.stop_reason == StopReason.STEPS_LIMIT


def test_errors_of_provider_and_tools_are_played_too(scripted: Scripted) -> None:
    policy = ErrorPolicy.retry_tool_errors(3)
    agent = Agent("breaker", model="openai:x", tools=[broken], error_policy=policy)
    assert scripted.run(agent, "hi", [call("broken"), "never mind"]).output == "never mind"
    ((name, _, problem),) = scripted.calls
    assert (name, "no luck" in problem) == ("broken", True), problem
    failed = scripted.run(looker, "hi", [ModelError("no money")])
    assert "no money" in str(failed.error)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (["done", "more"], r"1 of 2 replies .* not used: the run ended after 1 \(completed\)"),
        ([call("look", what="a")], r"called the model 2 times, and the script has 1 replies"),
        ([], r"called the model 1 times, and the script has 0 replies"),
        ([call("loook", what="a"), "x"], r"reply 1 .* calls the tool 'loook'; .* offers: look"),
        ([3], r"reply 1 of the script is 3; write text"),
    ],
)
def test_a_script_that_does_not_fit_fails_with_the_conversation(
    scripted: Scripted, script: Any, problem: str
) -> None:
    """At once: errors of the script are never tried again, whatever the policy."""
    agent = Agent("looker", model="openai:x", tools=[look], model_attempts=5)
    with pytest.raises(ScriptError, match=problem) as failed:
        scripted.run(agent, "Where is it?", script)
    assert "user: Where is it?" in str(failed.value)
    assert len(scripted.steps) == (2 if script[:1] == [call("look", what="a")] else 1)


async def test_in_a_running_loop_the_error_says_what_to_write(scripted: Scripted) -> None:
    with pytest.raises(RuntimeError, match="to_thread"):
        scripted.run(looker, "hi", ["x"])
    result = await asyncio.to_thread(scripted.run, looker, "hi", ["x"])
    assert result.output == "x"


@tool
def thread() -> int:
    """Return the number of the tool's thread."""
    return threading.get_ident()


def test_tools_run_in_the_tests_thread(scripted: Scripted) -> None:
    """Patches, context variables and `--pdb` work in them."""
    agent = Agent("threaded", model="openai:x", tools=[thread])
    scripted.run(agent, "hi", [call("thread"), "x"])
    assert scripted.calls == [("thread", {}, threading.get_ident())]


PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "test-with-pytest.md"
WRONG = """

def test_wrong(scripted):
    scripted.run(shop.clerk, "Which colour?", ["red", "green"])
"""


@pytest.mark.timeout(300)
def test_the_pages_tests_run_with_xdist_and_a_failure_shows_the_users_line(
    tmp_path: Path,
) -> None:
    """Two processes, a private server each."""
    for name, text in re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (tmp_path / name).write_text(text)
    tests = tmp_path / "test_shop.py"
    tests.write_text(tests.read_text() + WRONG)
    plain = [part for name in ("asyncio", "cacheprovider") for part in ("-p", f"no:{name}")]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "stepfleet.worker.testing.fixtures"),
            *(*plain, "-q", "-n", "2"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert '>       scripted.run(shop.clerk, "Which colour?", ["red", "green"])' in done.stdout
    assert "1 of 2 replies of the script were not used" in done.stdout
    assert "user: Which colour?" in done.stdout
    assert "scripted.py" not in done.stdout.partition("short test summary")[0]


def test_pytest_imports_nothing_of_the_worker_before_a_test_asks() -> None:
    """The plugin is loaded wherever Stepfleet is installed, also without the worker's packages."""
    program = (
        "import sys, stepfleet.worker.testing.fixtures\n"
        "print(sorted({'aiohttp', 'celery', 'redis', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"
