"""How long an answer takes from the response cache, and from a model of half a second.

python benchmarks/caching.py --calls 20 --hits 200

`call`: what a step waits for, in one process: the model call over HTTP (and the entry's write begun
behind it), against the same request answered by Redis. `run`: a whole run of one step on a worker,
from its submission to its result at the client, first without an entry and then with it. Seconds;
the model's latency is the option `--latency`.
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from agents import runner
from bench_figures import percentile
from loads import Running, Setup, fleet
from plots import Line, Plot
from repeats import Spread, paired
from reports import Column, Report, begin, finish, parser, show, values

from stepfleet import Agent, LLMResponse, Message, ModelRequest
from stepfleet.orchestrator.models.pricing import current_prices
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.store import open_store
from stepfleet.worker.agents import response_cache
from stepfleet.worker.agents.local import LocalAgent
from stepfleet.worker.agents.response_cache import ResponseCache
from stepfleet.worker.models import Models

ROOM = 1 << 26
SETTLE_SECONDS = 30.0
KEPT = Agent("kept", model=runner.config.model, cache=True)


def arguments() -> argparse.Namespace:
    """Return the parsed arguments."""
    made = parser(__doc__)
    made.add_argument("--latency", type=float, default=0.5, help="seconds of a model call")
    made.add_argument("--calls", type=int, default=20, help="calls that are made")
    made.add_argument("--hits", type=int, default=200, help="answers from the cache")
    made.add_argument("--runs", type=int, default=5, help="runs, without and with an entry")
    return made.parse_args()


async def calls(running: Running, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure calls and hits, one at a time; return a row of each kind."""
    environment = {"OPENAI_BASE_URL": running.model.url, "OPENAI_API_KEY": "none"}
    opened = await open_store(load_settings(redis_url=running.url, cache_bytes=ROOM))
    models = Models(environment=environment)
    # A slow read belongs into the figures: given up, it would end the measurement as a call.
    response_cache.READ_SECONDS = response_cache.KEEP_SECONDS = SETTLE_SECONDS
    cache = ResponseCache(opened.cache, current_prices().cost_of, environment)
    agent = LocalAgent(KEPT, KEPT.tools, models, cache=cache)
    stamp = time.time_ns()

    async def once(number: int) -> LLMResponse:
        question = Message.user(f"1 turns, call {stamp}-{number}")
        request = ModelRequest(model=KEPT.config.model, messages=(question,))
        return await agent.generate(request, None, KEPT.config)

    try:
        await once(-1)  # the connections are open then
        made = [await _timed(once, number, hit=False) for number in range(args.calls)]
        await cache.settle(SETTLE_SECONDS)
        order = [number % args.calls for number in range(args.hits)]
        found = [await _timed(once, number, hit=True) for number in order]
    finally:
        await models.aclose()
        await opened.aclose()
    return [_row("call", "made", made), _row("call", "cached", found)]


async def _timed(once: Callable[[int], Awaitable[LLMResponse]], number: int, *, hit: bool) -> float:
    begun = time.perf_counter()
    response = await once(number)
    took = time.perf_counter() - begun
    if response.cache is None or response.cache.hit is not hit:
        raise RuntimeError(f"expected {'a hit' if hit else 'a call'}: {response}")
    return took


def runs(running: Running, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure whole runs, each without an entry and then with it; return a row of each kind."""
    stamp = time.time_ns()
    made: list[float] = []
    found: list[float] = []
    for number in range(args.runs):
        for times, hit in ((made, False), (found, True)):
            question = f"1 turns, run {stamp}-{number}"
            begun = time.perf_counter()
            result = running.client.run_with_steps(runner, question, cache=True)
            times.append(time.perf_counter() - begun)
            if result.steps[0].cached is not hit:
                raise RuntimeError(f"expected {'a hit' if hit else 'a call'}: {result}")
    return [_row("run", "made", made), _row("run", "cached", found)]


def _row(part: str, what: str, times: list[float]) -> dict[str, Any]:
    return {
        "part": part,
        "what": what,
        "count": len(times),
        "p50": percentile(times, 0.5),
        "p99": percentile(times, 0.99),
        "longest": max(times),
    }


def main() -> None:
    """Measure, print, and write the files."""
    args = arguments()
    report = begin("caching", args)
    for _ in range(args.repeat):
        setup = Setup(workers=1 if args.runs else 0, slots=10, latency=str(args.latency))
        with fleet(setup) as running:
            for row in asyncio.run(calls(running, args)):
                report.add(row)
            if args.runs:
                running.warm()
                for row in runs(running, args):
                    report.add(row)
    columns = [Column("part", "part"), Column("answer", "what"), Column("count", "count", 0)]
    columns += [
        Column("p50 ms", "p50_ms", 2, spread=True),
        Column("p99 ms", "p99_ms", 2, spread=True),
    ]
    shown = [
        {**row, "p50_ms": row["p50"] * 1000, "p99_ms": row["p99"] * 1000} for row in report.rows
    ]
    title = f"An answer of a model of {args.latency * 1000:.0f} ms"
    show(title, shown, ("part", "what"), columns)
    for part in ("call", "run"):
        pair = (values(_of(report, part, what), "p50") for what in ("made", "cached"))
        if ratio := paired(*pair):
            report.ratios[f"{part}: made over cached, medians"] = ratio
    finish(report, args, lambda: [plot(report)])


def plot(report: Report) -> Plot:
    """Return both kinds of answers, for calls and for runs."""
    found = []
    parts = [one for one in ("call", "run") if _of(report, one, "made")]
    for what in ("made", "cached"):
        points = []
        for place, part in enumerate(parts, start=1):
            spread = Spread.of(values(_of(report, part, what), "p50"))
            points.append((place, spread.median, spread.low, spread.high))
        found.append(Line(what, points))
    return Plot("an answer, made or cached", "1 call, 2 run", "seconds", found)


def _of(report: Report, part: str, what: str) -> list[dict[str, Any]]:
    return [one for one in report.rows if one["part"] == part and one["what"] == what]


if __name__ == "__main__":
    main()
