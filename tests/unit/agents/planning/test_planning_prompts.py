import pytest

from stepfleet.orchestrator import ToolSpec
from stepfleet.orchestrator.agents.planning import (
    AgentPlan,
    initial_prompt,
    is_planning_response,
    next_prompt,
    tools_prompt,
)

LOOK = ToolSpec(name="look", description="Look something\n up.")
ADD = ToolSpec(name="add", description="Add numbers.")


def test_the_first_prompt_names_task_and_tools_and_asks_for_an_approach() -> None:
    """PLAN-01"""
    prompt = initial_prompt("count the stars", [LOOK, ADD])
    assert "count the stars" in prompt
    assert "look, add" in prompt
    assert "what is your approach?" in prompt


def test_the_first_prompt_says_so_where_there_are_no_tools() -> None:
    """PLAN-01"""
    assert "no tools are available" in initial_prompt("count the stars", [])


def test_a_later_prompt_asks_for_the_next_step_from_the_observations() -> None:
    """PLAN-02"""
    prompt = next_prompt("count the stars", 3, [LOOK])
    for part in ("count the stars", "iteration 3", "look", "observations", "next step"):
        assert part in prompt
    assert "plan so far" not in prompt


def test_a_later_prompt_shows_the_plan_that_there_is() -> None:
    """PLAN-02, PLAN-07"""
    plan = AgentPlan.from_text("1. [x] look\n2. add")
    assert "1. [x] look\n2. [ ] add" in next_prompt("count", 3, [], plan)


def test_the_tool_prompt_has_a_line_per_tool() -> None:
    """PLAN-03"""
    assert tools_prompt([LOOK, ADD]) == "Tools:\n- look: Look something up.\n- add: Add numbers."
    assert tools_prompt([]) == "Tools: no tools are available."


@pytest.mark.parametrize(
    "text",
    [
        "My plan is simple.",
        "APPROACH: look, add",
        "The strategy follows.",
        "Steps: 1, 2",
        "First I look",
        "and THEN add",
        "Finally, done",
        "I need to search",
        "we should look",
        "I will use the calculator",
        "Planning: two approaches",
    ],
)
def test_an_indicator_word_in_any_case_makes_a_plan(text: str) -> None:
    """PLAN-04"""
    assert is_planning_response(text)


@pytest.mark.parametrize(
    "text",
    ["", "The answer is 42.", "Paris", "an authentic planet", "firstborn", "I used it", "steps"],
)
def test_an_answer_without_an_indicator_is_none(text: str) -> None:
    """PLAN-04: whole words only."""
    assert not is_planning_response(text)
