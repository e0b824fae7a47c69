"""Restate as its documentation writes a durable agent: `ctx.run_typed` around each model call.

A service behind one process of Hypercorn over HTTP/2, with the limits of its documentation, and the
server beside it with its defaults. The tool is pure, so it needs no journal entry. Runs are
submitted to the ingress, `concurrency` requests open at a time; each answer is a finished run.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import calls
import job as jobs
import restate

JOB = "PEER_JOB"
START_SECONDS = 60
MANY = 2**31 - 1  # what its documentation sets


def application(job: jobs.Job) -> Any:
    """Return the ASGI application with the agent's service."""
    service = restate.Service("Runner")
    made: list[Any] = []

    async def complete(messages: list[calls.Message]) -> calls.Message:
        if not made:
            made.append(calls.async_call(job))
        answer: calls.Message = await made[0](messages)
        return answer

    @service.handler()
    async def run(ctx: restate.Context, job: dict[str, Any]) -> str:
        messages = [{"role": "user", "content": jobs.question(job["name"], job["turns"])}]
        while True:
            answer = await ctx.run_typed("model", complete, messages=messages)
            messages += [answer, *jobs.use_tools(answer)]
            if not answer.get("tool_calls"):
                return str(answer["content"])

    return restate.app([service])


def serve_service(job: jobs.Job, listening: socket.socket) -> None:
    """Serve until ended; `listening` is inherited."""
    from hypercorn.asyncio import serve  # noqa: PLC0415 - only in this process
    from hypercorn.config import Config  # noqa: PLC0415 - only in this process

    config = Config()
    config.bind = [f"fd://{listening.fileno()}"]
    config.h2_max_concurrent_streams = MANY
    config.keep_alive_max_requests = MANY
    config.accesslog = None
    with asyncio.Runner(loop_factory=jobs.loop_factory(job)) as runner:
        runner.run(serve(application(job), config))


async def submit(job: jobs.Job, port: int) -> None:
    """Register the service, and send runs to the ingress."""
    ingress, admin = json.loads(job.store)
    connector = aiohttp.TCPConnector(limit=0)
    patience = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=patience) as session:
        await register(session, admin, port)

        async def one(name: str, turns: int) -> str:
            body = {"name": name, "turns": turns}
            async with session.post(f"{ingress}/Runner/run", json=body) as answer:
                answer.raise_for_status()
                return str(await answer.json())

        await jobs.serve(job, one)


async def register(session: aiohttp.ClientSession, admin: str, port: int) -> None:
    """Tell the server where the service is."""
    async with asyncio.timeout(START_SECONDS):
        where = {"uri": f"http://127.0.0.1:{port}"}
        async with session.post(f"{admin}/deployments", json=where) as answer:
            if not answer.ok:
                raise ConnectionError(await answer.text())


def main() -> None:
    """Start the service's process and submit to it; or be that process."""
    job = jobs.from_arguments()
    if JOB in os.environ:
        serve_service(job, socket.socket(fileno=int(os.environ[JOB])))
        return
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listening:
        descriptor = listening.fileno()
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), sys.argv[1]],
            env={**os.environ, JOB: str(descriptor)},
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        )
        try:
            asyncio.run(submit(job, listening.getsockname()[1]))
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
