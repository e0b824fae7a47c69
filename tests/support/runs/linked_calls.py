"""What tests of calls that wait for runs and people share: tools, and what an attendant does."""

from support.runs.heavy_calls import HEAVY, journal
from support.runs.scripted_steps import call, say
from support.runs.stored_runs import Bench

from stepfleet.orchestrator import Message, tool
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.protocol.revision import revise
from stepfleet.orchestrator.records.calls.answers import Awaited
from stepfleet.orchestrator.store.runs.submission import NewRun


@tool(queue=Awaited.PERSON)
def ask(question: str) -> str:
    """Ask somebody."""
    raise AssertionError(question)


@tool(queue=Awaited.RUN)
def research(topic: str) -> str:
    """Have somebody look."""
    raise AssertionError(topic)


@tool(approval=True, queue=HEAVY)
def melt(what: str) -> str:
    """Take a while on another machine, if somebody allows it."""
    raise AssertionError(what)


MELT = (call(("melt", {"what": "steel"})), say("done"))
ASK = (call(("ask", {"question": "how many?"})), say("done"))
MIXED = (
    call(
        ("research", {"topic": "a"}), ("ask", {"question": "which?"}), ("research", {"topic": "b"})
    ),
    say("done"),
)
RESEARCH = (call(("research", {"topic": "a"}), ("research", {"topic": "b"})), say("done"))


async def key_of(desk: Bench, run_id: str, index: int) -> str:
    """Return what the waiting call waits for."""
    return (await journal(desk, run_id))[f"k:{index}"]


async def start(desk: Bench, run_id: str, index: int) -> str:
    """Start the run that the waiting call is, as its attendant does."""
    child = await key_of(desk, run_id, index)
    run = NewRun(
        run_id=child,
        agent=desk.agent.name,
        config=await desk.opened.configs.save(desk.agent.config),
        messages=(Message.user("look"),),
        max_steps=desk.agent.config.max_steps,
        parent=run_id,
        returns_to=Work(run_id, 0, index),
    )
    assert await desk.submission.create(run)
    return child


async def retry(desk: Bench, run_id: str) -> None:
    """Retry a run as a client does."""
    stored = await desk.stored(run_id)
    now = stored.state.info.updated_at
    await desk.control.retry(stored, revise(stored.state, stored.log, stored.overrides, now))
