"""Rows that are added to a file: its batch gets them, each once, and keeps what it has."""

import asyncio
import csv
from pathlib import Path

import pytest
from support.runs.stored_runs import Bench, plain_agent

from stepfleet.orchestrator import Agent, AsyncFleet, ConfigurationError
from stepfleet.orchestrator.store.batches.batches import run_id_of

AGENT = plain_agent(prompt="What is {name}?")


class Table:
    def __init__(self, file: Path, *, ids: bool) -> None:
        self.file = file
        self.ids = ids

    def write(self, *names: str) -> Path:
        with self.file.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["id", "name"] if self.ids else ["name"])
            writer.writerows([f"i-{name}", name] if self.ids else [name] for name in names)
        return self.file


@pytest.fixture(params=[True, False], ids=["by id", "by content"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Table:
    return Table(tmp_path / "rows.csv", ids=request.param)


async def inputs_of(fleet: AsyncFleet, batch_id: str, rows: int) -> list[str]:
    runs = [await fleet.runs.show(run_id_of(batch_id, row)) for row in range(rows)]
    return [one.state.messages[-1].text.removeprefix("What is ")[:-1] for one in runs]


async def test_only_new_rows_become_runs_of_the_files_batch(
    fleet: AsyncFleet, desk: Bench, table: Table
) -> None:
    first = await fleet.submit_batch(table.write("a", "b"), AGENT)
    assert first.added is None
    again = await fleet.submit_batch(table.write("c", "a", "d", "b"), AGENT, only_new=True)
    assert (again.id, again.added) == (first.id, 2)
    assert await inputs_of(fleet, first.id, 4) == ["a", "b", "c", "d"]
    progress = await again.progress()
    assert (progress.total, progress.queued, progress.sealed) == (4, 4, True)
    assert await desk.queued() == 4
    nothing = await fleet.submit_batch(table.file, AGENT, only_new=True)
    assert (nothing.id, nothing.added) == (first.id, 0)
    assert await desk.queued() == 4


async def test_the_first_submission_makes_the_batch(fleet: AsyncFleet, table: Table) -> None:
    batch = await fleet.submit_batch(table.write("a"), AGENT, only_new=True)
    assert batch.added is None
    assert (await batch.progress()).total == 1


async def test_another_file_agent_or_name_has_another_batch(
    fleet: AsyncFleet, table: Table, tmp_path: Path
) -> None:
    batch = await fleet.submit_batch(table.write("a"), AGENT)
    other = Table(tmp_path / "other.csv", ids=table.ids).write("a", "b")
    assert (await fleet.submit_batch(other, AGENT, only_new=True)).added is None
    helper = Agent("other", model="openai:none", prompt="{name}")
    assert (await fleet.submit_batch(table.file, helper, only_new=True)).id != batch.id
    with pytest.raises(ConfigurationError, match="only_new needs a file or a name"):
        await fleet.submit_batch([{"name": "a"}], AGENT, only_new=True)
    rows = [{"id": "i-m", "name": "m"}] if table.ids else [{"name": "m"}]
    made = await fleet.submit_batch(rows, AGENT, only_new=True, name="of a database")
    more = [*rows, {"id": "i-z", "name": "z"}]
    added = await fleet.submit_batch(more, AGENT, only_new=True, name="of a database")
    assert (added.id, added.added) == (made.id, 1)


async def test_a_file_without_one_known_row_is_refused(fleet: AsyncFleet, table: Table) -> None:
    """Ids or prompts that have changed would pay for every row again."""
    await fleet.submit_batch(table.write("a", "b"), AGENT)
    with pytest.raises(ConfigurationError, match="none of the file's 2 rows is in batch"):
        await fleet.submit_batch(table.write("y", "z"), AGENT, only_new=True)


async def test_a_batch_that_cannot_grow_is_refused(
    fleet: AsyncFleet, desk: Bench, table: Table
) -> None:
    batch = await fleet.submit_batch(table.write("a", "b"), AGENT)
    # As after its retention.
    await desk.opened.connection.execute("DEL", desk.opened.keys.run(run_id_of(batch.id, 1)))
    with pytest.raises(ConfigurationError, match="1 of its runs are past their retention"):
        await fleet.submit_batch(table.write("a", "b", "c"), AGENT, only_new=True)
    await batch.cancel()
    with pytest.raises(ConfigurationError, match="was cancelled, and gets no more runs"):
        await fleet.submit_batch(table.file, AGENT, only_new=True)


async def test_an_addition_that_was_cut_off_is_completed_by_the_same_command(
    fleet: AsyncFleet, desk: Bench, table: Table
) -> None:
    batch = await fleet.submit_batch(table.write("a"), AGENT)
    names = [f"n{n}" for n in range(3000)]

    def cut(_: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        await fleet.submit_batch(table.write("a", *names), AGENT, only_new=True, on_progress=cut)
    progress = await batch.progress()
    assert 1 < progress.submitted < 3001
    assert not progress.sealed
    with pytest.raises(ConfigurationError, match="is being submitted, or was a moment ago"):
        await fleet.submit_batch(table.file, AGENT, only_new=True)
    # As 30 seconds later.
    manifest = desk.opened.keys.manifest(batch.id)
    await desk.opened.connection.execute("HSET", manifest, "submitting", "1")
    await fleet.submit_batch(table.file, AGENT, only_new=True)
    progress = await batch.progress()
    assert (progress.total, progress.submitted, progress.sealed) == (3001, 3001, True)
    nothing = await fleet.submit_batch(table.file, AGENT, only_new=True)
    assert nothing.added == 0


async def test_two_additions_at_once_add_each_row_once(fleet: AsyncFleet, table: Table) -> None:
    batch = await fleet.submit_batch(table.write("a"), AGENT)
    names = [f"n{n}" for n in range(50)]
    file = table.write("a", *names)
    tries = (fleet.submit_batch(file, AGENT, only_new=True) for _ in range(3))
    outcomes = await asyncio.gather(*tries, return_exceptions=True)
    refused = [one for one in outcomes if isinstance(one, BaseException)]
    assert len(refused) < 3
    assert all(isinstance(one, ConfigurationError) for one in refused)
    progress = await batch.progress()
    assert (progress.total, progress.submitted, progress.sealed) == (51, 51, True)
    assert sorted(await inputs_of(fleet, batch.id, 51)) == sorted(["a", *names])
