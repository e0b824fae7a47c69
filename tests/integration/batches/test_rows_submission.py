"""Rows and dicts into a real Redis: their prompts, ids and kept fields are the runs'."""

from pathlib import Path

import pytest
from support.runs.stored_runs import plain_agent

from stepfleet.orchestrator import AsyncFleet, ConfigurationError
from stepfleet.orchestrator.store.batches.batches import run_id_of

WORDED = plain_agent(prompt="Classify {item.name}, {price}")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "rows.csv"
    file.write_text('sku,price,text\nL1,5,"a\nlamp"\nC1,7,a chair\n')
    return file


async def test_a_dict_is_worded_by_the_prompt_and_else_sent_as_json(fleet: AsyncFleet) -> None:
    row = {"item": {"name": "Lamp"}, "price": 3}
    for agent, text in ((WORDED, "Classify Lamp, 3"), (plain_agent(), '{"item":{"name":"Lamp"}')):
        run = await fleet.runs.show(await fleet.submit(agent, row))
        assert run.state.messages[-1].text.startswith(text)
    with pytest.raises(ConfigurationError, match=r"'item.name'.*there are: price"):
        await fleet.submit(WORDED, {"price": 3})
    with pytest.raises(ConfigurationError, match="'input' is not valid JSON data"):
        await fleet.submit(plain_agent(), {"a": object()})


async def test_a_tables_rows_become_runs_with_their_fields(fleet: AsyncFleet, table: Path) -> None:
    agent = plain_agent(prompt="{sku}: {text}")
    batch = await fleet.submit_batch(table, agent, id_field="sku")
    results = [(await fleet.runs.show(run_id_of(batch.id, row))) for row in range(2)]
    assert [one.state.messages[-1].text for one in results] == ["L1: a\nlamp", "C1: a chair"]
    assert results[0].result().line_id == "L1"
    assert results[0].result().metadata == {"sku": "L1", "price": "5", "text": "a\nlamp"}
    again = await fleet.submit_batch(table, agent, id_field="sku")
    other = await fleet.submit_batch(table, agent, id_field="text")
    assert again.id == batch.id != other.id


async def test_bad_rows_are_named_by_their_lines_and_left_out_on_demand(
    fleet: AsyncFleet, table: Path
) -> None:
    table.write_text(table.read_text() + "L1,5,twice\nX\n,8,no id\n")
    with pytest.raises(ConfigurationError) as caught:
        await fleet.submit_batch(table, plain_agent(), input_field="text", id_field="sku")
    said = caught.value.message
    assert "3 of 5 lines cannot be used, so nothing was submitted" in said
    assert "line 5: field 'sku': 'L1' is the id of line 2 already" in said
    assert "line 6: has 1 fields, and the header 3" in said
    assert "line 7: field 'sku' is empty text" in said
    agent = plain_agent()
    batch = await fleet.submit_batch(
        table, agent, skip_invalid=True, input_field="text", id_field="sku"
    )
    assert (batch.skipped_count, (await batch.progress()).total) == (3, 2)
