"""The state that a run begins with, written directly, is the one that the records would write."""

import uuid
from datetime import UTC, datetime
from typing import Any

import pytest

from stepfleet.orchestrator import AgentState
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.protocol.serialization import handoff
from stepfleet.orchestrator.records.state import StateInfo
from stepfleet.orchestrator.store.dispatch import TaskMessages
from stepfleet.orchestrator.store.runs.submission import NewRun, first_handoff

NOW = datetime(2026, 5, 4, 3, 2, 1, 1234, tzinfo=UTC)


@pytest.mark.parametrize("parent", [None, "above"])
@pytest.mark.parametrize("metadata", [{}, {"row": 1, "who": {"name": "Zoë"}, "seen": (1, 2)}])
def test_a_run_begins_with_the_state_that_the_records_would_store(
    parent: str | None, metadata: dict[str, Any]
) -> None:
    run = NewRun("r1", "solver", "digest", (), 10, metadata=metadata, parent=parent)
    info = StateInfo(id="r1", execution_id="r1:1", started_at=NOW, updated_at=NOW)
    state = AgentState(agent_id="r1", parent_agent_id=parent, info=info, metadata=metadata)

    assert AgentState.from_json(first_handoff(run, NOW)) == AgentState.from_json(handoff(state))


def test_every_message_has_a_random_uuid_of_its_own() -> None:
    messages = TaskMessages("steps")
    made = [messages.of(Work("r", 0), "solver: step 1") for _ in range(3)]
    ids = {part for one in made for part in one.split('"') if len(part) == len(str(uuid.uuid4()))}

    assert {uuid.UUID(one).version for one in ids if one.count("-") == 4} == {4}
    assert len({one for one in ids if one.count("-") == 4}) == 6
