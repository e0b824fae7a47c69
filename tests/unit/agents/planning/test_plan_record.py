import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfleet.orchestrator.agents.planning import (
    LONGEST_STEP,
    MOST_STEPS,
    AgentPlan,
    PlanStep,
    PlanStepState,
)

TEXT = """\
Here is my plan:
1. [x] Look up the tower
2. [~] Look up the bridge
3) [!] Ask the keeper
- [ ] Add both
* Answer
10. [in_progress] Wait
And that is all."""


def test_a_list_becomes_steps_with_their_states() -> None:
    """PLAN-07"""
    plan = AgentPlan.from_text(TEXT)
    assert [(step.text, step.state.value) for step in plan.steps] == [
        ("Look up the tower", "completed"),
        ("Look up the bridge", "in_progress"),
        ("Ask the keeper", "blocked"),
        ("Add both", "pending"),
        ("Answer", "pending"),
        ("Wait", "in_progress"),
    ]


def test_there_are_four_states() -> None:
    """PLAN-07"""
    assert {state.value for state in PlanStepState} == {
        "pending",
        "in_progress",
        "completed",
        "blocked",
    }


def test_an_unknown_mark_belongs_to_the_text() -> None:
    assert AgentPlan.from_text("1. [1] see page one").steps[0].text == "[1] see page one"


def test_a_text_without_a_list_has_no_steps() -> None:
    assert AgentPlan.from_text("I look, then I add.\n1.5 is a number").steps == ()


def test_a_plan_is_bounded() -> None:
    plan = AgentPlan.from_text("\n".join(f"{n}. {'x' * 999}" for n in range(1, 200)))
    assert len(plan.steps) == MOST_STEPS
    assert len(plan.steps[0].text) == LONGEST_STEP


@given(
    st.lists(
        st.builds(
            PlanStep,
            text=st.from_regex(r"[a-z][a-z ]{0,20}[a-z]", fullmatch=True),
            state=st.sampled_from(PlanStepState),
        ),
        max_size=9,
    )
)
def test_a_written_plan_reads_back_equal(steps: list[PlanStep]) -> None:
    plan = AgentPlan(steps=tuple(steps))
    assert AgentPlan.from_text(plan.as_text()) == plan


def test_a_step_gets_a_state_in_a_copy() -> None:
    plan = AgentPlan.from_text("1. look\n2. add")
    changed = plan.with_state(2, PlanStepState.COMPLETED)
    assert [step.state.value for step in changed.steps] == ["pending", "completed"]
    assert plan.steps[1].state is PlanStepState.PENDING
    with pytest.raises(ValueError, match="no step 3; its steps are 1 to 2"):
        plan.with_state(3, PlanStepState.BLOCKED)
