"""pydantic-ai with its DBOS durability: `agent.run` inside a workflow, model calls as steps.

`DBOSDurability` makes model requests steps; the tool runs in the workflow, as it does by default
for plain tools. Everything else as in dbos_workflow.
"""

import asyncio

import job as jobs
from dbos import DBOS
from dbos_workflow import launched, start
from openai import AsyncOpenAI, DefaultAioHttpClient
from pydantic_ai import Agent
from pydantic_ai.durable_exec.dbos import DBOSDurability
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def provider(job: jobs.Job) -> OpenAIProvider:
    """Return the provider with the HTTP client that the job names."""
    if job.client == "own":
        return OpenAIProvider(base_url=job.model, api_key="none")
    return OpenAIProvider(openai_client=AsyncOpenAI(http_client=DefaultAioHttpClient()))


async def main(job: jobs.Job) -> None:
    """Do the job."""
    runner = Agent(
        OpenAIChatModel(jobs.MODEL, provider=provider(job)),
        name="runner",
        tools=[jobs.look],
        capabilities=[DBOSDurability()],
    )

    @DBOS.workflow()
    async def agent(name: str, turns: int) -> str:
        return (await runner.run(jobs.question(name, turns))).output

    async with launched(job):
        await jobs.serve(job, lambda name, turns: start(agent, name, turns))


if __name__ == "__main__":
    args = jobs.from_arguments()
    with asyncio.Runner(loop_factory=jobs.loop_factory(args)) as loop:
        loop.run(main(args))
