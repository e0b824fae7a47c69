"""Records are copied and built by a short way of their own, with the results of pydantic's."""

import json

import pytest
from pydantic import BaseModel

from stepfleet.orchestrator import AgentState, FinishReason, ModelSettings, StepResult, UsageStats
from stepfleet.orchestrator.records import base
from stepfleet.orchestrator.records.state import StateInfo
from stepfleet.orchestrator.records.steps import StepType

RESULT = StepResult(
    step=1,
    finish_reason=FinishReason.STOP,
    type=StepType.FINAL_RESPONSE,
    started_at="2026-01-02T03:04:05Z",  # type: ignore[arg-type]  # read by pydantic
    duration_ms=1.0,
)
INFO = StateInfo(
    id="run", execution_id="run:1", started_at=RESULT.started_at, updated_at=RESULT.started_at
)


@pytest.mark.parametrize("update", [None, {}, {"thought": "a"}, {"usage": UsageStats(llm_calls=1)}])
def test_a_copy_is_what_pydantic_copies(update: dict[str, object] | None) -> None:
    ours = RESULT.model_copy(update=update)
    theirs = BaseModel.model_copy(RESULT, update=update)

    assert ours == theirs
    assert ours.model_fields_set == theirs.model_fields_set
    assert ours.to_json() == theirs.to_json()
    assert ours is not RESULT


def test_a_deep_copy_shares_nothing() -> None:
    settings = ModelSettings(extra_body={"a": [1]})
    copied = settings.model_copy(deep=True)

    assert copied == settings
    assert copied.extra_body["a"] is not settings.extra_body["a"]


def test_a_built_record_is_what_pydantic_builds() -> None:
    values = {name: getattr(RESULT, name) for name in RESULT.model_fields_set}
    built = StepResult.model_construct(**values)

    assert built == RESULT
    assert built.model_fields_set == set(StepResult.model_fields)
    assert json.loads(built.to_json()) == json.loads(RESULT.to_json())


def test_built_records_share_no_changeable_default() -> None:
    first, second = (AgentState.model_construct(agent_id=name, info=INFO) for name in "ab")

    assert first.metadata == {}
    assert first.metadata is not second.metadata


def test_an_original_is_never_changed_by_its_copies() -> None:
    before = RESULT.to_json()
    RESULT.model_copy(update={"step": 9})

    assert RESULT.to_json() == before


def test_attributes_of_a_model_are_set_also_where_it_has_no_slots_of_their_names() -> None:
    record = UsageStats()
    set_value = base._setter("without_a_slot")
    set_value(record, 1)
    assert record.__dict__["without_a_slot"] == 1
