"""What parts of a step take in process, without Redis and without a model: microseconds each.

python benchmarks/overheads.py
python benchmarks/overheads.py --repeat 5 --turns 2000 --json overheads.json

Rows: the memory's look at a conversation of `--messages`, which fit its limit or are twice as many
(then it moves on, once in many steps); a turn of each strategy, its request prepared and its
answer read; the criteria's decision behind a step; a step's line of JSON for the log; a
run's history of twenty messages as a chat window shows it. For a whole step with Redis, model and
tools see steps.py.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import Any

from reports import Column, begin, finish, parser, show

from stepfleet import AgentState, LLMResponse, MemoryPolicy, Message, ModelRequest, StepResult
from stepfleet.orchestrator.agents.reasoner import ModelTurn
from stepfleet.orchestrator.agents.strategies import StrategyReasoner, make_strategy
from stepfleet.orchestrator.client.rendering import Recorded, rendered
from stepfleet.orchestrator.continuation import base_criteria
from stepfleet.orchestrator.memory.window import History, Part, advance, shown
from stepfleet.orchestrator.records.memory_window import Window
from stepfleet.orchestrator.records.run.report import described
from stepfleet.orchestrator.records.state import LastStep, StateInfo
from stepfleet.types import LoggedStep
from stepfleet.worker.telemetry import JsonLines

START = datetime(2026, 1, 1, tzinfo=UTC)
STRATEGIES = ("noop", "react", "chain_of_thought")
PART = 50
TEXT = "a sentence of some eighty characters, as one that a model might have written"
Work = Callable[[], Awaitable[object]]


def state_of(messages: tuple[Message, ...]) -> AgentState:
    """Return a state behind one step, with that conversation."""
    info = StateInfo(id="run-1", started_at=START, updated_at=START)
    return AgentState(
        agent_id="a",
        info=info,
        messages=messages,
        step_count=1,
        current_step=LastStep.of(StepResult(step=1, thought=TEXT, started_at=START)),
    )


def memory_look(messages: tuple[Message, ...], most: int) -> Work:
    """Return a look that finds which messages a request shows, of at most `most`."""
    policy = MemoryPolicy(max_messages=most)
    history = History(tuple(Part(added=(one,)) for one in messages))

    async def look() -> object:
        return shown(advance(Window(), history, policy), history, policy)

    return look


def turn_of(strategy: str, messages: tuple[Message, ...]) -> Work:
    """Return a turn: the request in the strategy's words, and its answer read."""
    reasoner = StrategyReasoner(make_strategy(strategy, {}))
    state = state_of(messages)
    request = ModelRequest(model="m", messages=messages)
    answer = LLMResponse(content='{"thought": "so it is", "answer": "three", "steps": ["one"]}')

    async def turn() -> object:
        await reasoner.prepare(request, state)
        return await reasoner.read(ModelTurn(reasoner.interpret(answer, state)), state)

    return turn


def others() -> dict[str, Work]:
    """Return what is measured beside memory and strategies."""
    criteria, state = base_criteria(budget_usd=1.0), state_of((Message.user(TEXT),))
    step = StepResult(step=1, thought=TEXT, started_at=START)
    lines, log = JsonLines({}), logging.getLogger("stepfleet.steps")
    log_step = LoggedStep(result=step, messages=(Message.assistant(TEXT),))
    run = Recorded("run-1", START, {n: (Message.user(TEXT),) for n in range(10)}, [log_step] * 10)

    async def decide() -> object:
        return criteria.evaluate(state)

    async def tell() -> object:
        return lines.format(log.makeRecord(log.name, 20, "", 0, described(step), (), None))

    async def show_history() -> object:
        return rendered(run)

    return {"criteria": decide, "log line": tell, "history": show_history}


async def microseconds(work: Work, turns: int) -> float:
    """Return the processor time of one turn: the median of parts, since others use the machine."""
    await work()
    parts = []
    for _ in range(max(turns // PART, 1)):
        began = time.process_time()
        for _ in range(PART):
            await work()
        parts.append((time.process_time() - began) / PART * 1e6)
    return median(parts)


def main() -> None:
    """Measure and report."""
    made = parser(__doc__)
    made.add_argument("--turns", type=int, default=2000)
    made.add_argument("--messages", type=int, default=20, help="in the conversation")
    args = made.parse_args()
    messages = tuple(Message.user(f"{TEXT} {number}") for number in range(args.messages))
    measured: dict[str, Work] = {
        "memory": memory_look(messages, len(messages)),
        "memory moved on": memory_look(messages, max(len(messages) // 2, 1)),
    }
    measured |= {f"strategy {name}": turn_of(name, messages) for name in STRATEGIES}
    measured |= others()
    report = begin("overheads", args)
    for _ in range(args.repeat):
        for what, work in measured.items():
            spent = asyncio.run(partial(microseconds, work, args.turns)())
            report.add({"what": what, "microseconds": spent})
    columns = [Column("what", "what"), Column("µs", "microseconds", digits=1, spread=True)]
    found: list[dict[str, Any]] = report.rows
    show("In process, without Redis", found, ("what",), columns)
    finish(report, args, list)


if __name__ == "__main__":
    main()
