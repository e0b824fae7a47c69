"""Three turns on one run, in this process: a private Redis, the same steps, no Celery worker.

On a fleet `submit` and `runs.send` are the same; workers do what `InlineWorker` does here.
"""

import asyncio
import os

from agents import shopper
from rules import rules

from stepfleet import AsyncFleet
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.embedded import EmbeddedRedis
from stepfleet.worker.runtime.inline import InlineWorker
from stepfleet.worker.testing.server import ModelServer

TURNS = ("Add milk, bread and tea.", "Drop tea.", "Add coffee.")


async def talk(redis_url: str) -> None:
    """Say each sentence and print the answer; then print what the whole session took."""
    settings = load_settings(redis_url=redis_url)
    first, *further = TURNS
    async with AsyncFleet(redis_url) as fleet, InlineWorker(settings, [shopper]) as worker:
        run_id = await fleet.submit(shopper, first)
        await worker.finish(run_id)
        print(f"{first}  {(await fleet.runs.result(run_id)).output}")
        for said in further:
            await fleet.runs.send(run_id, said)
            await worker.finish(run_id)
            print(f"{said}  {(await fleet.runs.result(run_id)).output}")
        state = (await fleet.runs.show(run_id)).state
        print(f"turns: {state.info.execution}, steps in all: {state.session_steps}")


def main() -> None:
    """Talk with a model: the simulated one, unless a key is set."""
    with ModelServer(rules) as server, EmbeddedRedis.start(".stepfleet") as redis:
        if "OPENAI_API_KEY" not in os.environ:
            os.environ.update(OPENAI_API_KEY="none", OPENAI_BASE_URL=server.url)
        asyncio.run(talk(redis.url))


if __name__ == "__main__":
    main()
