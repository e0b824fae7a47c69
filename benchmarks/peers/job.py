"""The job that every peer does, and how its script speaks with the benchmark.

A script gets the job as JSON in its first argument. It prints one JSON line when it is warm, waits
for a line on standard input, does the job, prints one JSON line with what it did, and ends when
standard input ends. Standard library only: each peer has an environment of its own.
"""

import asyncio
import json
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

MODEL = "benchmark"
WARM_RUNS, WARM_TURNS = 20, 2
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Return the number it is given.",
            "parameters": {
                "type": "object",
                "properties": {"step": {"type": "integer"}},
                "required": ["step"],
            },
        },
    }
]


@dataclass(frozen=True)
class Job:
    """What to do: `runs` agents of `turns` model calls, `concurrency` of them at a time.

    `client` is "own" (what the peer brings along) or "fast" (aiohttp and uvloop, or urllib3).
    `store` is the address of what keeps the state; `folder` is empty and the peer's own.
    """

    runs: int
    turns: int
    concurrency: int
    model: str
    client: str
    store: str
    folder: str
    kind: str


def from_arguments() -> Job:
    """Return the job of the command line; let the process have as many sockets as it may."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    job = Job(**json.loads(sys.argv[1]))
    os.environ.update({"OPENAI_BASE_URL": job.model, "OPENAI_API_KEY": "none"})
    return job


def question(name: str, turns: int) -> str:
    """Return a run's first message; the model server reads the number of turns from it."""
    return f"{turns} turns, run {name}"


def look(step: int) -> int:
    """Return the number it is given."""
    return step


def use_tools(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the answers to the tool calls of an assistant's message."""
    return [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "content": str(look(**json.loads(call["function"]["arguments"]))),
        }
        for call in message.get("tool_calls") or ()
    ]


def answered(message: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an assistant's message that go back to the model."""
    kept = {"role": "assistant", "content": message.get("content")}
    return {**kept, "tool_calls": message["tool_calls"]} if message.get("tool_calls") else kept


async def in_turn(
    one: Callable[[str, int], Awaitable[str]], names: list[str], turns: int, at_once: int
) -> int:
    """Do runs, `at_once` at a time; return how many ended with the model's last answer."""
    waiting = iter(names)

    async def slot() -> int:
        done = 0
        for name in waiting:
            done += await one(name, turns) == "done"
        return done

    return sum(await asyncio.gather(*(slot() for _ in range(min(at_once, len(names))))))


async def serve(job: Job, one: Callable[[str, int], Awaitable[str]]) -> None:
    """Warm up, tell that, wait for the start, do the job and tell what came of it."""
    warm = [f"warm-{number}" for number in range(WARM_RUNS)]
    await in_turn(one, warm, WARM_TURNS, job.concurrency)
    await asyncio.to_thread(wait_for_start)
    started = time.monotonic()
    done = await in_turn(one, names(job), job.turns, job.concurrency)
    tell_end(done, time.monotonic() - started)


def names(job: Job) -> list[str]:
    """Return the names of the job's runs."""
    return [str(number) for number in range(job.runs)]


def wait_for_start() -> None:
    """Tell that everything is warm, and wait until the benchmark says go."""
    _tell({"ready": True})
    sys.stdin.readline()


def tell_end(done: int, seconds: float) -> None:
    """Report how many runs succeeded and how long that took; wait for the request to leave."""
    _tell({"done": done, "seconds": seconds})
    sys.stdin.read()


def loop_factory(job: Job) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop for the fast client, else the default."""
    if job.client == "own":
        return None
    import uvloop  # noqa: PLC0415 - only in environments that have it

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _tell(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)
