"""What an answer is, by `stepfleet run` and real workers: at a limit, empty, refused."""

from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from support.servers.redis_servers import short_folder
from support.workers.command_line import CommandLine

AGENTS = '''\
from typing import Literal

from pydantic import BaseModel

from stepfleet.orchestrator import Agent, tool


class Judgement(BaseModel):
    verdict: Literal["yes", "no"]


@tool(read_only=True)
def look(what: str) -> str:
    """Look something up."""
    return f"seen {what}"


MODEL = "openai:gpt-4o-mini"
plain = Agent("plain", model=MODEL, max_steps=1, model_attempts=2)
tools = Agent("tools", model=MODEL, tools=[look], max_steps=1)
data = Agent("data", model=MODEL, output_type=Judgement, max_steps=1)
native = Agent("native", model=MODEL, output_type=Judgement, answer_mode="native", max_steps=1)
caller = Agent("caller", model=MODEL, agents=[plain], max_steps=2, time_limit=None)
giver = Agent("giver", model=MODEL, handoffs=[plain], max_steps=2)
'''
RULES = '''\
from pathlib import Path

from stepfleet.worker.testing import Reply, ToolCallReply


def rules(request):
    """The question says what is answered, and how; its agent, where it is called."""
    question = request.question
    offered = [one["function"]["name"] for one in request.body.get("tools", ())]
    said = "maybe" if "maybe" in question else "yes"
    if "empty" in question:
        return Reply("")
    if "words" in question:
        return Reply("Well, yes.")
    if "whole" in question:
        return Reply('{"verdict": "%s"}' % said)
    if "structured_response" in offered:
        data = {"structured": {"verdict": said}}
        return Reply("I think", tool_calls=(ToolCallReply("structured_response", data),))
    if request.body.get("response_format"):
        return Reply('{"verdict": "%s"}' % said)
    if "look" in offered and "tool" in question and not Path("struck").exists():
        return Reply("Let me see", tool_calls=(ToolCallReply("look", {"what": "it"}),))
    if "plain" in offered and request.turn == 1:
        return Reply(tool_calls=(ToolCallReply("plain", {"input": "below"}),))
    if "transfer_to_plain" in offered and request.turn == 1:
        return Reply(tool_calls=(ToolCallReply("transfer_to_plain", {"reason": "it knows"}),))
    return Reply("done")
'''
RUN = ("run", "questions.jsonl", "--agents", "agents.py", "--simulate", "rules.py:rules")


@pytest.fixture
def stepfleet() -> Iterator[CommandLine]:
    with short_folder() as folder:
        commands = CommandLine(folder)
        commands.write("agents.py", AGENTS)
        commands.write("rules.py", RULES)
        try:
            yield commands
        finally:
            commands.end()


def rows(stepfleet: CommandLine, *lines: dict[str, Any]) -> None:
    numbered = ({"id": f"q{n}", **line} for n, line in enumerate(lines))
    stepfleet.write("questions.jsonl", b"\n".join(map(orjson.dumps, numbered)).decode() + "\n")


LIMITS: tuple[dict[str, Any], ...] = (
    {"max_steps": 1},
    {"token_limit": 1},
    {"cumulative_timeout": 1e-6},
    {"budget_usd": 1e-9},
    {"settings": {"stream": True}},
)


def test_rows_that_gave_their_answers_are_completed_at_every_limit(
    stepfleet: CommandLine,
) -> None:
    """CONT-33: exit code 0, and no retry is offered, which would be paid again."""
    asked = [(agent, one) for agent in ("plain", "data", "native") for one in LIMITS]
    asked += [(agent, LIMITS[-1]) for agent in ("tools", "caller", "giver")]
    lines = [{"input": "a question", "agent": name, "overrides": one} for name, one in asked]
    rows(stepfleet, *lines)
    done = stepfleet(*RUN, "--out", "out.jsonl")
    assert done.returncode == 0, done.stderr
    assert "--retry-failed" not in done.stderr
    found = {one["id"]: one for one in stepfleet.lines("out.jsonl")}
    assert len(found) == len(asked)
    for number, (agent, limit) in enumerate(asked):
        result, is_data = found[f"q{number}"], agent in {"data", "native"}
        said = result["structured"] if is_data else result["output"]
        expected = {"verdict": "yes"} if is_data else "done"
        assert (result["status"], said) == ("completed", expected), (agent, limit)
    told = stepfleet("explain", "q0").stdout
    assert "completed" in told
    assert "steps: 1 of 1, nothing was left to do" in " ".join(told.split())


def test_the_retry_that_a_run_offers_raises_the_limits_that_stopped_it(
    stepfleet: CommandLine,
) -> None:
    """CONT-33: it is the command that goes on; without the limits it would end at once again."""
    used = {"input": "use a tool", "overrides": {"max_steps": 5, "token_limit": 1}}
    rows(stepfleet, {"input": "use a tool"}, used, {"input": "a question"})
    first = stepfleet(*RUN, "--agent", "tools")
    assert first.returncode == 1, first.stderr
    (line,) = (line for line in first.stderr.splitlines() if "--retry-failed" in line)
    advised = line.partition("Again: stepfleet ")[2].split()
    assert "max_steps=2" in advised
    stepfleet.write("struck", "")
    again = stepfleet(*advised, "--json")
    assert again.returncode == 0, again.stderr
    assert orjson.loads(again.stdout)["completed"] == 3


def test_an_empty_answer_fails_its_row_and_is_named(stepfleet: CommandLine) -> None:
    rows(stepfleet, {"input": "empty"}, {"input": "a question"})
    done = stepfleet(*RUN, "--agent", "plain", "--out", "out.jsonl")
    assert done.returncode == 1, done.stderr
    assert "--retry-failed" in done.stderr
    empty, _ = sorted(stepfleet.lines("out.jsonl"), key=lambda one: one["id"])
    assert (empty["status"], empty["last_error"]["code"]) == ("error", "EMPTY_ANSWER")
    assert len(empty["lost_attempts"]) == 2
    batch = empty["batch_id"]
    assert "EMPTY_ANSWER" in stepfleet("failures", batch).stdout


def test_refused_answers_are_named_wherever_a_person_looks(stepfleet: CommandLine) -> None:
    rows(stepfleet, {"input": "maybe"}, {"input": "words"}, {"input": "whole: yes"})
    done = stepfleet(*RUN, "--agent", "data", "--out", "out.jsonl")
    assert done.returncode == 1, done.stderr
    wrong, words, whole = sorted(stepfleet.lines("out.jsonl"), key=lambda one: one["id"])
    refusal = "answer refused: verdict: 'maybe' is not one of ['yes', 'no']"
    assert refusal in wrong["last_error"]["message"]
    assert (wrong["status"], wrong["output"]) == ("max_iterations_reached", None)
    in_place = "answer refused: text in place of a call of structured_response"
    assert in_place in words["last_error"]["message"]
    assert whole["structured"] == {"verdict": "yes"}
    failures = " ".join(stepfleet("failures", wrong["batch_id"]).stdout.split())
    assert "without an error" not in failures
    assert refusal in failures
    assert in_place in failures
    for command in ("explain", "show"):
        assert refusal in " ".join(stepfleet(command, "q0").stdout.split())
    assert "no answer was given yet" not in stepfleet("explain", "q0").stdout
