"""A store that lost the journal's response behind its owner's back: nothing is built on it."""

from support.runs.stored_runs import USAGE, Bench, called

from stepfleet.orchestrator import LLMResponse, ToolCall
from stepfleet.orchestrator.protocol.claim import Claim


async def begun(desk: Bench) -> Claim:
    """Return a claim whose response was journaled, and then lost by the store."""
    claim = await desk.claim(await desk.create())
    calls = tuple(ToolCall(id=f"c{n}", name="look", arguments={}) for n in range(2))
    response = LLMResponse(content="looking", tool_calls=calls, usage=USAGE)
    assert (await desk.steps.journal(claim, 0.1, response=response, started=(0,))).ours
    journal = f"{desk.opened.keys.run(claim.run_id)}:journal"
    await desk.opened.connection.execute("DEL", journal)
    return claim


async def test_no_result_is_noted_beside_a_response_that_was_lost(desk: Bench) -> None:
    """DIST-12: the next owner's call may ask for other tools; it must not find this result."""
    claim = await begun(desk)
    record = called(claim).records[0]
    held = await desk.steps.journal(claim, 0.2, results={0: record}, started=(1,))
    assert not held.ours
    journal = f"{desk.opened.keys.run(claim.run_id)}:journal"
    assert not await desk.opened.connection.execute("EXISTS", journal)


async def test_a_lease_is_renewed_all_the_same(desk: Bench) -> None:
    """DIST-12: what the commit writes is complete without the journal."""
    claim = await begun(desk)
    assert (await desk.steps.journal(claim, 0.2)).ours
    assert (await desk.commit(claim, called(claim))).applied
