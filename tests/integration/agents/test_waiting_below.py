"""A run that waits for runs below it says for which people these wait."""

import asyncio
from contextlib import suppress
from typing import Any

from rich.console import Console
from support.deadlines import until
from support.runs.scripted_steps import Script, call

from stepfleet.orchestrator import Agent, AsyncFleet, tool
from stepfleet.orchestrator.cli.explain import explanation_picture, read_explanation
from stepfleet.orchestrator.cli.look import fleet_picture, read_fleet, read_tree, show_picture
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.runtime.inline import InlineWorker


@tool(approval=True)
def pay(usd: int) -> str:
    """Pay somebody."""
    return f"paid {usd}"


def printed(shown: Any) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(shown)
    return captured.get()


async def test_show_explain_and_status_name_the_person_that_a_tree_waits_for(
    fleet: AsyncFleet, redis_url: str
) -> None:
    cashier = Agent("cashier", model=Script([call(("pay", {"usd": 7}))]), tools=[pay])
    clerk = Agent("clerk", model=Script([call(("cashier", {"input": "x"}))]), agents=[cashier])
    manager = Agent("manager", model=Script([call(("clerk", {"input": "y"}))]), agents=[clerk])
    top = await fleet.submit(manager, "begin")
    settings = load_settings(redis_url=redis_url)

    async def waits() -> bool:
        return bool((await fleet.overview()).waiting_for_people)

    async with InlineWorker(settings, [manager, clerk, cashier]) as worker:
        work = asyncio.create_task(worker.finish(top))
        try:
            await until(waits, what="a call that waits")
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work

    (ask,) = [one async for one in fleet.approvals.all()]
    shown = printed(show_picture(await read_tree(top, None, fleet), full=False))
    assert 'waits for a person: cashier calls pay({"usd":7})' in shown
    why = await read_explanation(top, None, fleet)
    assert [(one.run_id, one.agent, one.tool) for one in why.below] == [
        (ask.run_id, "cashier", "pay")
    ]
    assert "Below it cashier waits for a person's approval" in printed(explanation_picture(why))
    assert "1 call waits for a person" in printed(fleet_picture(await read_fleet(fleet)))

    await fleet.decide(ask.run_id, approve=False)

    assert "waits for a person" not in printed(
        show_picture(await read_tree(top, None, fleet), full=False)
    )
    assert (await read_explanation(top, None, fleet)).below == ()
