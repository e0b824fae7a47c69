"""The audit stream: each method of a client that changes something leaves one entry."""

import inspect
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from redis import Redis
from support.archives import long_known
from support.runs.asking_runs import asks, clerk, waiting, worked_on
from support.runs.scripted_steps import say

from stepfleet.orchestrator import Agent, AsyncFleet, ConfigurationError, Fleet
from stepfleet.orchestrator.client.approvals import AsyncFleetApprovals
from stepfleet.orchestrator.client.archive import AsyncFleetArchive
from stepfleet.orchestrator.client.audit import PAGE
from stepfleet.orchestrator.client.batch import AsyncBatch, AsyncFleetBatches
from stepfleet.orchestrator.client.history import AsyncFleetHistory
from stepfleet.orchestrator.client.limits import AsyncFleetCache, AsyncFleetLimits
from stepfleet.orchestrator.client.runs import AsyncFleetRuns
from stepfleet.orchestrator.client.schedules import AsyncFleetSchedules
from stepfleet.orchestrator.limits.limit import Limit
from stepfleet.orchestrator.records.audit import AuditEntry
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.keys import AUDIT

AGENT = Agent("clerk", model="openai:none")
SECRET = "the-customers-words"
ROWS = [{"id": "1", "input": SECRET}]
ROOMS: dict[str, type] = {
    "": AsyncFleet,
    "runs.": AsyncFleetRuns,
    "batch.": AsyncBatch,
    "batches.": AsyncFleetBatches,
    "history.": AsyncFleetHistory,
    "limits.": AsyncFleetLimits,
    "cache.": AsyncFleetCache,
    "approvals.": AsyncFleetApprovals,
    "schedules.": AsyncFleetSchedules,
    "archive.": AsyncFleetArchive,
}
CHANGE_NOTHING = {
    *("aclose", "check", "forget", "warnings", "overview", "audit", "acting_for", "debug"),
    *("costs", "cost_lines", "runs.show", "runs.waits_for", "runs.standstill", "runs.find"),
    *("runs.page", "runs.failures", "runs.timeline", "runs.tree", "runs.result", "runs.wait"),
    *("runs.events", "runs.steps", "runs.view", "runs.display", "batch.id", "batch.progress"),
    *("batch.run_ids", "batch.results", "batch.table", "batch.to_arrow", "batch.to_pandas"),
    *("batch.wait", "batch.watch", "batch.on_standstill", "batch.limit_waits", "batch.failures"),
    *("batches.get", "batches.newest", "batches.page", "batches.check", "history.snapshot"),
    *("history.checkpoint", "history.checkpoints", "history.save_state", "history.compare"),
    *("history.tool_traces", "history.get_cost_calls", "history.get_cost_stats"),
    *("history.get_cost_summary", "limits.all", "limits.use", "limits.wait_of"),
    *("cache.statistics", "scale", "approvals.page", "approvals.of_run", "approvals.of_batch"),
    *("approvals.all", "schedules.all", "schedules.get", "schedules.troubles"),
    *("archive.state", "archive.verify"),
}
HOT = {"submit", "run", "run_with_steps", "run_with_messages", "run_stream", "limits.submitted"}
"""The submission of one run: no entry."""
DECISIONS = {"decide", "approvals.decide"}
Act = Callable[[AsyncFleet, dict[str, Any]], Awaitable[Any]]
ACTIONS: dict[str, tuple[Act, str, str]] = {
    "submit_batch": (
        lambda f, _: f.submit_batch(ROWS, AGENT, name="monday"),
        "submit",
        "batch {result.id}",
    ),
    "batch.then": (
        lambda _, s: s["submit_batch"].then(AGENT, "{output}"),
        "submit",
        "batch {result.id}",
    ),
    "batch.pause": (lambda _, s: s["submit_batch"].pause(), "pause", "batch {submit_batch.id}"),
    "batch.resume": (lambda _, s: s["submit_batch"].resume(), "resume", "batch {submit_batch.id}"),
    "batch.cancel": (lambda _, s: s["submit_batch"].cancel(), "cancel", "batch {submit_batch.id}"),
    "batch.retry": (
        lambda _, s: s["submit_batch"].retry(failed_only=False),
        "retry",
        "batch {submit_batch.id}",
    ),
    "pause": (lambda f, _: f.pause(), "pause", "fleet"),
    "resume": (lambda f, _: f.resume(), "resume", "fleet"),
    "runs.pause": (lambda f, s: f.runs.pause(s["run"]), "pause", "run {run}"),
    "runs.resume": (lambda f, s: f.runs.resume(s["run"]), "resume", "run {run}"),
    "history.load_state": (
        lambda f, s: f.history.load_state(s["state"], AGENT, run_id=s["other"]),
        "restore",
        "run {run}",
    ),
    "history.restore": (
        lambda f, s: f.history.restore(s["checkpoint"], AGENT, run_id=s["third"]),
        "restore",
        "run {run}",
    ),
    "runs.cancel": (lambda f, s: f.runs.cancel(s["run"], SECRET), "cancel", "run {run}"),
    "history.clear_tool_traces": (
        lambda f, s: f.history.clear_tool_traces(s["run"]),
        "clear",
        "tool traces of run {run}",
    ),
    "history.reset_cost_tracking": (
        lambda f, s: f.history.reset_cost_tracking(s["run"]),
        "reset",
        "costs of run {run}",
    ),
    "history.fork": (
        lambda f, s: f.history.fork(s["run"], at=0, message=SECRET),
        "fork",
        "run {run}",
    ),
    "runs.retry": (lambda f, s: f.runs.retry(s["run"]), "retry", "run {run}"),
    "runs.send": (lambda f, s: f.runs.send(s["ended"], SECRET), "send", "run {ended}"),
    "runs.purge": (
        lambda f, _: f.runs.purge(statuses=["cancelled"]),
        "purge",
        "ended runs, cancelled",
    ),
    "limits.set": (lambda f, _: f.limits.set("tenant:a", in_flight=3), "set", "limit tenant:a"),
    "limits.provide": (
        lambda f, _: f.limits.provide({"tenant:b": Limit(in_flight=1)}),
        "provide",
        "limits",
    ),
    "limits.clear": (lambda f, _: f.limits.clear("tenant:a"), "clear", "limits tenant:a"),
    "cache.clear": (lambda f, _: f.cache.clear(model="openai:x"), "clear", "cache model openai:x"),
    "schedules.add": (
        lambda f, _: f.schedules.add("daily", ROWS, AGENT, cron="@daily"),
        "add",
        "schedule daily",
    ),
    "schedules.pause": (lambda f, _: f.schedules.pause("daily"), "pause", "schedule daily"),
    "schedules.resume": (lambda f, _: f.schedules.resume("daily"), "resume", "schedule daily"),
    "schedules.run_now": (lambda f, _: f.schedules.run_now("daily"), "submit", "schedule daily"),
    "schedules.remove": (lambda f, _: f.schedules.remove("daily"), "remove", "schedule daily"),
    "archive.move": (
        lambda f, _: f.archive.move(older_than=0),
        "archive",
        "runs that ended 0 s ago",
    ),
    "archive.restore": (
        lambda f, s: f.archive.restore([s["ended"]]),
        "restore",
        "archived {ended}",
    ),
}


async def entries(fleet: AsyncFleet, **which: Any) -> list[AuditEntry]:
    """Return the entries, the oldest first."""
    return [entry async for entry in fleet.audit(**which)]


def test_each_public_method_is_known_to_change_something_or_nothing() -> None:
    """A new method fails here until it is an action with an entry, or is said to change nothing."""
    public = {
        f"{room}{name}"
        for room, of in ROOMS.items()
        for name, one in vars(of).items()
        if not name.startswith("_") and (callable(one) or isinstance(one, property | staticmethod))
    }
    assert public == CHANGE_NOTHING | HOT | DECISIONS | ACTIONS.keys()


async def test_each_action_leaves_one_entry_and_no_text_of_inputs(
    redis_url: str, tmp_path: Path
) -> None:
    long_known(redis_url)
    settings = load_settings(redis_url=redis_url, archive_url=tmp_path.as_uri())
    async with AsyncFleet(settings=settings, user="ann") as fleet:
        state: dict[str, Any] = {"run": await fleet.submit(AGENT, SECRET)}
        state |= {"ended": await fleet.submit(AGENT, SECRET), "other": uuid4(), "third": uuid4()}
        state["checkpoint"] = await fleet.history.checkpoint(state["run"])
        state["state"] = await fleet.history.save_state(state["run"])
        await fleet.runs.cancel(state["ended"])
        known = len(await entries(fleet))
        assert known == 1  # the cancel: not what was submitted
        for name, (act, action, target) in ACTIONS.items():
            state[name] = await act(fleet, state)
            found = await entries(fleet)
            assert len(found) == (known := known + 1), name
            entry = found[-1]
            assert (entry.action, entry.target) == (
                action,
                target.format(**state, result=state[name]),
            ), name
            assert entry.detail.startswith("done"), name
            assert (entry.user, entry.host) == ("ann", socket.gethostname())
            assert entry.source == "client"
        assert SECRET not in str(await entries(fleet))
        counted = {one.action: one.detail for one in await entries(fleet) if "batch" in one.target}
        assert counted["retry"] == "done: 1"
        (purged,) = await entries(fleet, action="purge")
        assert purged.detail.startswith("done: ")


async def test_what_changes_nothing_and_what_is_refused_leaves_no_entry(fleet: AsyncFleet) -> None:
    with pytest.raises(ConfigurationError):
        await fleet.runs.cancel("00000000-0000-4000-8000-000000000000")
    with pytest.raises(ConfigurationError):
        await fleet.submit_batch([{"id": "1"}], AGENT)
    await fleet.runs.purge(dry_run=True)
    await fleet.runs.page()
    assert await entries(fleet) == []


async def test_decisions_are_noted_without_their_words_for_whom_they_are_made(
    fleet: AsyncFleet, redis_url: str
) -> None:
    agent = clerk(asks(2), say("done"))
    run_id = await fleet.submit(agent, "pay")
    async with worked_on(redis_url, agent, run_id):
        await waiting(fleet, 1)
        with fleet.acting_for("zoe@x.org"):
            decided = await fleet.decide(run_id, approve=False, reason=SECRET)
        assert decided.applied == 1
        (entry,) = await entries(fleet)
        assert (entry.user, entry.action) == ("zoe@x.org", "deny")
        assert entry.target == f"calls that wait: run {run_id}"
        assert entry.detail == "done: 1 decided, 0 had been before"
        result = await fleet.runs.wait(run_id, timeout=60)
    (call,) = result.steps[0].tool_calls
    assert call.decision is not None
    assert call.decision.by == "zoe@x.org"
    assert SECRET not in str(await entries(fleet))
    assert SECRET in (await fleet.runs.timeline(run_id)).to_json()
    hidden = await fleet.runs.timeline(run_id, content=False)
    assert SECRET not in hidden.to_json()  # as where Flower hides texts
    assert hidden.steps[0].tool_calls[0].error == "denied"


async def test_entries_are_found_by_user_action_and_time_over_pages(
    fleet: AsyncFleet, redis_url: str
) -> None:
    """Also those of the version before, which had neither host nor source."""
    with Redis.from_url(redis_url, decode_responses=True) as client:
        old = {"user": "eve", "action": "retry", "target": "run 1", "detail": "done: [by hand]"}
        client.xadd(AUDIT, old)
        with client.pipeline() as many:
            for _ in range(PAGE + 10):
                many.xadd(AUDIT, {**old, "user": "bob"})
            many.execute()
        await fleet.pause()
        newest = client.xrevrange(AUDIT, count=1)[0][1]
        # What the version before accepts: exactly these fields.
        assert set(newest) == set(old)
    (first,) = await entries(fleet, user="eve")
    assert (first.host, first.source, first.detail) == ("", "", old["detail"])
    found = await entries(fleet, limit=3)
    assert [one.user for one in found][:2] == ["bob", "bob"]
    assert (found[-1].action, found[-1].target, found[-1].detail) == ("pause", "fleet", "done")
    assert await entries(fleet, action="pause", since=found[-1].at) == [found[-1]]
    assert len(await entries(fleet, limit=10_000)) == PAGE + 12
    assert await entries(fleet, since="2099-01-01") == []
    for wrong in ({"limit": 0}, {"since": "soon"}):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            await entries(fleet, **wrong)


async def test_an_entry_that_cannot_be_written_is_logged_and_the_action_is_done(
    fleet: AsyncFleet, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_id = await fleet.submit(AGENT, "x")
    with Redis.from_url(redis_url) as client:
        client.set(AUDIT, "no stream")
    with caplog.at_level(logging.WARNING):
        assert (await fleet.runs.pause(run_id)).is_done
    assert f"pause run {run_id}: done: paused" in caplog.text


async def test_an_action_that_breaks_off_is_noted(
    fleet: AsyncFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await fleet.submit_batch(ROWS, AGENT)

    def stop(_: int) -> None:
        raise KeyError(SECRET)

    with pytest.raises(KeyError):
        await batch.pause(stop)
    newest = (await entries(fleet))[-1]
    assert (newest.action, newest.detail) == ("pause", "failed: KeyError")


def test_the_blocking_client_names_whom_it_acts_for(redis_url: str) -> None:
    """Also through its own thread; the setting holds outside of the block."""
    with Fleet(redis_url, user="server") as fleet:
        with fleet.acting_for("ann"):
            fleet.pause()
        fleet.resume()
        assert [one.user for one in fleet.audit()] == ["ann", "server"]
        with pytest.raises(ConfigurationError, match="user"), fleet.acting_for(""):
            pass
    with pytest.raises(ConfigurationError, match="user"):
        Fleet(redis_url, user="x" * 101)


def test_wrapped_methods_keep_their_signatures() -> None:
    assert "overrides" in inspect.signature(AsyncFleetRuns.retry).parameters
