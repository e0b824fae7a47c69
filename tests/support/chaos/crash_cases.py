"""The crash points, what a single kill at each may cost, and how a fleet's results are compared.

Knows no workers: what ran is judged by results, the effects file and the model server's log.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepfleet.orchestrator import AgentRunResult
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply

UNKNOWN = "OUTCOME_UNKNOWN"


@dataclass(frozen=True)
class CrashCase:
    """A point, at which visit of it the process ends, and what that costs.

    `work` chooses the script: three steps with tools, one answer, or a step with a tool on a queue
    of its own. `crashes` is how many
    attempts the ledger gets, `repeats` how many model calls are made again, and `unknown` how
    many tool calls nobody knows the outcome of.
    """

    point: str
    visit: int = 1
    work: str = "work"
    crashes: int = 0
    repeats: int = 0
    unknown: int = 0

    def __str__(self) -> str:
        return f"{self.point}:{self.visit}" + ("" if self.work == "work" else f"-{self.work}")


CASES = (
    CrashCase("message-popped", 2),
    CrashCase("before-claim", 2),
    CrashCase("after-claim", 2, crashes=1),
    CrashCase("during-call", 2, crashes=1, repeats=1),
    CrashCase("after-reply", 2, crashes=1, repeats=1),
    CrashCase("before-journal", crashes=1, repeats=1),
    CrashCase("before-journal", 2, crashes=1, unknown=1),  # between two tools
    CrashCase("after-journal", crashes=1, unknown=1),
    CrashCase("tool-started", 2, crashes=1, unknown=1),
    CrashCase("during-tool", crashes=1, unknown=1),
    CrashCase("after-tool", crashes=1, unknown=1),
    CrashCase("after-tools", crashes=1, unknown=1),
    CrashCase("before-commit", crashes=1, unknown=1),
    CrashCase("before-commit", 2, "answer", crashes=1, repeats=1),
    CrashCase("commit-applied"),
    CrashCase("end-applied", 1, "answer"),
    CrashCase("after-commit", 2),
    CrashCase("before-acknowledge", 2),
    CrashCase("rescue-saved"),
    # A call on a queue of its own: its step parks, its task is taken and delivered.
    CrashCase("before-commit", 1, "heavy", crashes=1),
    CrashCase("tool-parked", 1, "heavy"),
    CrashCase("call-taken", 1, "heavy", crashes=1, unknown=1),
    CrashCase("during-call-task", 1, "heavy", crashes=1, unknown=1),
    CrashCase("call-made", 1, "heavy", crashes=1, unknown=1),
    CrashCase("call-delivered", 1, "heavy"),
    # Under a limit of the fleet.
    CrashCase("step-put-back", 1, "answer"),
    CrashCase("limits-requested", 1, "answer"),
    CrashCase("limits-admitted", 1, "answer"),
)
LIMITED = {"step-put-back", "limits-requested", "limits-admitted"}


def script(request: RequestRecord) -> Reply:
    """Two effects, an effect and a look, then an answer; or the answer at once."""
    place = f"{request.key}/{request.turn}"
    first = ToolCallReply("effect", {"what": f"{place}/0"})
    seconds = {
        1: ToolCallReply("effect", {"what": f"{place}/1"}),
        2: ToolCallReply("look", {"what": place}),
    }
    if request.key.startswith("heavy") and request.turn == 1:
        calls = (ToolCallReply("render", {"what": place}), ToolCallReply("look", {"what": place}))
        return Reply(tool_calls=calls, latency=0.1)
    if request.key.startswith("work") and request.turn in seconds:
        return Reply(tool_calls=(first, seconds[request.turn]), latency=0.1)
    return Reply(f"answer to {request.key}", latency=0.1)


def shape(results: Sequence[AgentRunResult]) -> dict[str, Any]:
    """Return what must be equal whatever happened: outputs, steps, calls and results.

    The result of a call with unknown outcome stands for any; tokens follow from results.
    """
    return {
        str(result.line_id): (
            result.status,
            result.output,
            [
                (
                    step.step,
                    step.thought,
                    step.finish_reason,
                    [(call.tool_name, call.arguments) for call in step.tool_calls],
                )
                for step in result.steps
            ],
        )
        for result in results
    }


def tool_results(results: Sequence[AgentRunResult]) -> dict[tuple[str, int, int], Any]:
    """Return the results of all tool calls whose outcome is known, by line, step and index."""
    return {
        (str(result.line_id), step.step, index): call.result
        for result in results
        for step in result.steps
        for index, call in enumerate(step.tool_calls)
        if not (call.error and call.error.code == UNKNOWN)
    }


def unknown_calls(results: Sequence[AgentRunResult]) -> int:
    """Count the tool calls that are listed as unknown."""
    return sum(
        bool(call.error and call.error.code == UNKNOWN)
        for result in results
        for step in result.steps
        for call in step.tool_calls
    )


def check_effects(results: Sequence[AgentRunResult], effects: Path) -> None:
    """Assert that an effect happened once per committed result, and once at most if unknown."""
    done = Counter(line.split()[2] for line in effects.read_text().splitlines())
    assert set(done.values()) <= {1}, "an effect happened twice under one key"
    named = Counter(line.split(maxsplit=3)[3] for line in effects.read_text().splitlines())
    asked = set()
    for result in results:
        for step in result.steps:
            for call in step.tool_calls:
                if call.tool_name in ("effect", "render"):
                    what = str(call.arguments["what"])
                    asked.add(what)
                    assert named[what] == 1 or (call.is_error and not named[what]), what
    assert set(named) <= asked


def check_calls(
    results: Sequence[AgentRunResult],
    questions: Mapping[str, str],
    counts: Mapping[tuple[str, int], int],
) -> int:
    """Assert that every repeated model call is listed as ambiguous; return how many there were."""
    listed = Counter(
        (questions[str(result.line_id)], lost.step)
        for result in results
        for lost in result.lost_attempts
        if lost.ambiguous
    )
    repeated = {place: count - 1 for place, count in counts.items() if count > 1}
    for place, count in repeated.items():
        assert count <= listed[place], f"{place} was asked for {count} times more, listed: {listed}"
    return sum(repeated.values())
