"""LangGraph as its quick start builds an agent: a model node, a tool node, and a checkpointer.

`ChatOpenAI` with bound tools, `MessagesState`, `ToolNode`, one thread per run, `ainvoke` in one
event loop. The durability mode is the default, `async`: each checkpoint is written while the next
node runs, so the loop does not wait for it (`sync` would, as the others here do). SQLite through
`AsyncSqliteSaver`, Postgres through `AsyncPostgresSaver` over a pool of 20 connections.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import job as jobs
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

POOL_SIZE = 20

look = tool(jobs.look)


@contextlib.asynccontextmanager
async def sqlite(job: jobs.Job) -> AsyncIterator[Any]:
    """Yield a checkpointer over a new SQLite file."""
    from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver  # noqa: PLC0415 - one variant

    path = str(Path(job.folder) / "checkpoints.sqlite")
    async with AsyncSqliteSaver.from_conn_string(path) as saver:
        yield saver


@contextlib.asynccontextmanager
async def postgres(job: jobs.Job) -> AsyncIterator[Any]:
    """Yield a checkpointer over a pool of connections, its tables made."""
    from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver  # noqa: PLC0415 - one variant
    from psycopg.rows import dict_row  # noqa: PLC0415 - one variant
    from psycopg_pool import AsyncConnectionPool  # noqa: PLC0415 - one variant

    settings = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
    pool = AsyncConnectionPool(job.store, max_size=POOL_SIZE, kwargs=settings, open=False)
    async with pool:
        saver = AsyncPostgresSaver(pool)
        await saver.setup()
        yield saver


def model(job: jobs.Job) -> Any:
    """Return the chat model with the tool."""
    if job.client == "own":
        return ChatOpenAI(model=jobs.MODEL).bind_tools([look])
    from openai import DefaultAioHttpClient, DefaultHttpxClient  # noqa: PLC0415 - one variant

    clients = {"http_async_client": DefaultAioHttpClient(), "http_client": DefaultHttpxClient()}
    return ChatOpenAI(model=jobs.MODEL, **clients).bind_tools([look])


def graph(chat: Any, saver: Any) -> Any:
    """Return the compiled agent."""

    async def call_model(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await chat.ainvoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("llm", call_model)
    builder.add_node("tools", ToolNode([look]))
    builder.add_edge(START, "llm")
    builder.add_conditional_edges("llm", tools_condition)
    builder.add_edge("tools", "llm")
    return builder.compile(checkpointer=saver)


async def main(job: jobs.Job) -> None:
    """Do the job."""
    stores = {"sqlite": sqlite, "postgres": postgres}
    async with stores[job.kind](job) as saver:
        agent = graph(model(job), saver)

        async def one(name: str, turns: int) -> str:
            config = {"configurable": {"thread_id": name}, "recursion_limit": 10 * turns}
            first = {"role": "user", "content": jobs.question(name, turns)}
            state = await agent.ainvoke({"messages": [first]}, config)
            return str(state["messages"][-1].content)

        await jobs.serve(job, one)


if __name__ == "__main__":
    args = jobs.from_arguments()
    with asyncio.Runner(loop_factory=jobs.loop_factory(args)) as runner:
        runner.run(main(args))
