"""The floor: the same chains of model calls in one bare asyncio process, without a queue.

Each step is a GET and a SET of the conversation in Redis around a POST to the same model server,
by aiohttp and redis-py's asyncio client under uvloop. Nothing survives a crash, nothing retries,
nobody can look inside: what a step costs where none of that is needed.

python benchmarks/floor.py --redis URL --model URL --runs 1000 --steps 5

Started by steps.py and scale.py: says {"ready": true} on standard output, measures when a line
comes in, and prints {"wall": s, "cpu": s, "memory": bytes, "steps": n}.
"""

import argparse
import asyncio
import json
import resource
import sys
import time
from typing import Any

import aiohttp
import orjson
import redis.asyncio as redis
import uvloop

CONNECTIONS = 32
TOOL = {
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


async def chain(
    store: "redis.Redis", http: aiohttp.ClientSession, url: str, name: str, steps: int
) -> int:
    """Do one run: model calls with a tool between them, the conversation in Redis; count steps."""
    key = f"run:{name}"
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{steps} turns, run {name}"}]
    await store.set(key, orjson.dumps(messages))
    done = 0
    while True:
        messages = orjson.loads(await store.get(key) or b"[]")
        body = orjson.dumps({"model": "benchmark", "messages": messages, "tools": [TOOL]})
        async with http.post(url, data=body) as answer:
            reply = orjson.loads(await answer.read())["choices"][0]["message"]
        messages.append(reply)
        for call in reply.get("tool_calls") or ():
            seen = str(orjson.loads(call["function"]["arguments"])["step"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": seen})
        await store.set(key, orjson.dumps(messages))
        done += 1
        if not reply.get("tool_calls"):
            return done


async def measure(args: argparse.Namespace) -> dict[str, float]:
    """Warm up, wait for the start signal, and do the runs."""
    pool = redis.BlockingConnectionPool.from_url(
        args.redis, max_connections=CONNECTIONS, timeout=None
    )
    store = redis.Redis.from_pool(pool)
    limits = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    url = f"{args.model}/chat/completions"
    headers = {"Content-Type": "application/json"}
    async with (
        store,
        aiohttp.ClientSession(connector=connector, timeout=limits, headers=headers) as http,
    ):
        await asyncio.gather(*(chain(store, http, url, f"warm-{n}", 2) for n in range(20)))
        print(json.dumps({"ready": True}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        stamp = time.time_ns()
        started, cpu = time.monotonic(), time.process_time()
        places = asyncio.Semaphore(args.at_once or args.runs)

        async def one(name: str) -> int:
            async with places:
                return await chain(store, http, url, name, args.steps)

        done = await asyncio.gather(*(one(f"{stamp}-{n}") for n in range(args.runs)))
        wall, used = time.monotonic() - started, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024
    return {"wall": wall, "cpu": used, "memory": peak * unit, "steps": sum(done)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redis", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=0, help="runs in flight; 0: all")
    print(json.dumps(uvloop.run(measure(parser.parse_args()))), flush=True)


if __name__ == "__main__":
    main()
