import re
from pathlib import Path

import pytest

import stepfleet as public
from stepfleet import AgentRunResult, ErrorPolicy, StepResult, ToolCallRecord
from stepfleet.orchestrator import continuation

PAGE = (Path(__file__).parents[3] / "docs" / "migration.md").read_text(encoding="utf-8")
NAMES = PAGE.partition("## Error criteria")[0]
ROWS = re.findall(r"^\| (`.+?) \| (.+) \|$", NAMES, re.MULTILINE)
OWNERS = (AgentRunResult, StepResult, ToolCallRecord, ErrorPolicy, public, continuation)
NEW = {
    "output": AgentRunResult,
    "steps": AgentRunResult,
    "added_messages": AgentRunResult,
    "StepResult": public,
    "ToolCallRecord": public,
    "ErrorPolicyCriterion": continuation,
    "max_retries": ErrorPolicy,
}


@pytest.mark.parametrize(("old", "new"), ROWS)
def test_each_old_name_is_absent_and_its_replacement_is_there(old: str, new: str) -> None:
    """RUN-32, CONT-31, DOC-02: the page maps every name that is gone to one that resolves."""
    for name in re.findall(r"`(\w+)`", old):
        assert not any(has(owner, name) for owner in OWNERS)
    first = re.findall(r"`([\w.]+)`", new)[0].split(".")[-1]
    assert has(NEW[first], first)


def has(owner: object, name: str) -> bool:
    return hasattr(owner, name) or name in getattr(owner, "model_fields", {})


def test_the_page_names_all_that_is_gone() -> None:
    """RUN-32, CONT-31, DOC-02: six renames and two criteria."""
    gone = set(re.findall(r"`(\w+)`", " ".join(old for old, _ in ROWS)))
    assert gone == {
        *("final_text", "final_message", "iterations", "conversation_history"),
        *("IterationResult", "ToolCallExecution", "ErrorPresenceCheck", "RetryLimit"),
    }


def test_the_page_has_the_sections_of_what_changed() -> None:
    """DOC-02: their samples are run with those of the other pages."""
    heads = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    assert {"Names", "Error criteria", "Slim serialization", "Event envelopes"} <= set(heads)
