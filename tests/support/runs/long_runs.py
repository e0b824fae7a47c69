"""Runs with hundreds of committed steps, written without committing each."""

from support.runs.stored_runs import Bench, called, plain_agent

from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.store.codec import stored_step

AGENT = plain_agent(max_steps=100_000)
STEPS = 450


async def long_run(desk: Bench, steps: int = STEPS, text: str = "") -> str:
    """Return a run with so many steps, each as the first one but for its number, and `text`."""
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    verdict = desk.verdict(claim, called(claim))
    assert verdict.logged is not None
    fields = {}
    for step in range(steps):
        said = verdict.logged.messages[0].model_copy(update={"content": f"{step} {text}"})
        result = verdict.logged.result.model_copy(update={"step": step + 1})
        messages = (said, *verdict.logged.messages[1:])
        one = verdict.logged.model_copy(update={"messages": messages, "result": result})
        fields[str(step)] = stored_step(one)
    key = desk.opened.keys.run(run_id)
    flat = [part for pair in fields.items() for part in pair]
    for at in range(0, len(flat), 100):
        await desk.opened.connection.execute("HSET", f"{key}:log", *flat[at : at + 100])
    await desk.opened.connection.execute("HSET", key, "step", steps, "token", "", "last_token", "z")
    return run_id


def said(claim: Claim) -> list[int]:
    """Return the numbers that the steps of `long_run` have said, in their order."""
    words = [one.text.split()[0] for one in claim.state.messages if one.tool_calls]
    return [int(word) for word in words if word.isdigit()]
