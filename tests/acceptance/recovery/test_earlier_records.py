"""Runs that an earlier version wrote go on: its whole Redis, when its worker was killed."""

import runpy
from collections.abc import Callable

from support.deadlines import wait_until
from support.runs.dumped_records import AGENTS, OUTPUTS, ROWS, read_in, run
from support.workers.fleet_workers import FleetWorker

from stepfleet import Fleet
from stepfleet.worker.testing import ModelServer

LONG = 90.0


def outputs_of(fleet: Fleet, batch_id: str) -> list[str | None]:
    return [one.output for one in fleet.batches.get(batch_id).results(ordered=True)]


def test_runs_of_an_earlier_version_go_on_and_keep_what_they_had(
    redis_url: str, model: ModelServer, start_worker: Callable[..., FleetWorker], fleet: Fleet
) -> None:
    """Whatever they waited for; none does a committed step again."""
    read_in(redis_url)
    model.follow(runpy.run_path(str(AGENTS))["rules"])
    start_worker(options=("-Q", "stepfleet,gpu"), env={"STEPFLEET_AGENTS": str(AGENTS)})
    fleet.limits.set("openai:limited", requests_per_minute=6000)
    stopped = run("look-stop")
    wait_until(
        lambda: fleet.runs.show(stopped).header["status"] == "paused", within=LONG, what="a pause"
    )
    assert fleet.runs.resume(stopped).outcome == "resumed"
    assert fleet.runs.resume(run("refund-Pam")).outcome == "resumed"
    asked = {one.run_id: one for one in fleet.approvals.all()}
    assert len(asked) == 6
    assert fleet.decide(run("ask-Ben"), answer="blue").applied == 1
    assert sum(fleet.decide(one).applied for one in asked if one != run("ask-Ben")) == 5

    results = {name: fleet.runs.wait(run(name), timeout=LONG) for name in OUTPUTS}
    assert {name: result.output for name, result in results.items()} == OUTPUTS
    assert {result.status for result in results.values()} == {"completed"}
    assert [call.turn for call in model.requests if call.question == "look mid"] == [2, 3]
    assert fleet.runs.result(run("look-done")).output == "done: seen done"
    (rows,) = (one for one in fleet.batches.newest() if one.name == "rows")
    (after,) = (one for one in fleet.batches.newest() if one.batch_id != rows.batch_id)
    assert outputs_of(fleet, rows.batch_id) == ROWS
    assert outputs_of(fleet, after.batch_id) == [f"done: seen sum {one}" for one in ROWS]
