"""DBOS as its documentation writes an agent: a workflow whose model and tool calls are steps.

Async workflow and steps in one event loop, started with `start_workflow_async`, `concurrency` at a
time (its queues would add a write and a poll per run). SQLite is its default; Postgres is what it
recommends for production. Pool sizes and threads are its defaults.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import calls
import job as jobs
from dbos import DBOS, DBOSConfig, SetWorkflowID

Agent = Callable[[str, int], Awaitable[str]]


@contextlib.asynccontextmanager
async def launched(job: jobs.Job) -> AsyncIterator[None]:
    """Launch DBOS over the job's store; destroy it at the end."""
    url = f"sqlite:///{Path(job.folder) / 'dbos.sqlite'}" if job.kind == "sqlite" else job.store
    config = DBOSConfig(name="peer", system_database_url=url, log_level="WARNING")
    DBOS(config=config)
    DBOS.launch()
    try:
        yield
    finally:
        DBOS.destroy()


async def start(agent: Agent, name: str, turns: int) -> str:
    """Start one workflow and wait for its result."""
    with SetWorkflowID(f"run-{name}"):
        handle = await DBOS.start_workflow_async(agent, name, turns)
    return str(await handle.get_result())


async def main(job: jobs.Job) -> None:
    """Do the job."""
    complete = calls.async_call(job)

    @DBOS.step()
    async def call_model(messages: list[calls.Message]) -> calls.Message:
        return await complete(messages)

    @DBOS.step()
    async def use_tools(message: calls.Message) -> list[calls.Message]:
        return jobs.use_tools(message)

    @DBOS.workflow()
    async def agent(name: str, turns: int) -> str:
        messages = [{"role": "user", "content": jobs.question(name, turns)}]
        while True:
            answer = await call_model(messages)
            messages.append(answer)
            if not answer.get("tool_calls"):
                return str(answer["content"])
            messages += await use_tools(answer)

    async with launched(job):
        await jobs.serve(job, lambda name, turns: start(agent, name, turns))


if __name__ == "__main__":
    args = jobs.from_arguments()
    with asyncio.Runner(loop_factory=jobs.loop_factory(args)) as runner:
        runner.run(main(args))
