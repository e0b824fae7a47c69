"""The first reading of a batch: every problem of every line, in constant memory."""

import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from stepfleet.orchestrator import AgentConfig, ConfigurationError
from stepfleet.orchestrator.agents.config import ToolRef
from stepfleet.orchestrator.batches.check import Checked, Plan, check, valid_lines
from stepfleet.orchestrator.batches.files.source import BatchInput, open_input
from stepfleet.orchestrator.store.runs.submission import Submission

SOLVER = AgentConfig(name="solver", model="openai:m", tools=(ToolRef(name="look"),))
WRITER = AgentConfig(name="writer", model="openai:m")


def unknown(name: str) -> AgentConfig:
    raise ConfigurationError(f"no agent is named {name!r}")


def plan_of(
    default: str | None = "solver",
    overrides: Mapping[str, Any] | None = None,
    *,
    skip_invalid: bool = False,
    **given: AgentConfig,
) -> Plan:
    agents = given or {"solver": SOLVER, "writer": WRITER}
    own: dict[str, Any] = {"overrides": overrides or {}, "skip_invalid": skip_invalid}
    return Plan(Submission(agent=default, agents=agents, **own), unknown)


@contextmanager
def source_of(*lines: Any) -> Iterator[BatchInput]:
    with open_input(line if isinstance(line, dict) else {"input": line} for line in lines) as made:
        yield made


def checked(*lines: Any, plan: Plan | None = None, skip_invalid: bool = False) -> Checked:
    with source_of(*lines) as source:
        return check(source, plan or plan_of(skip_invalid=skip_invalid))


def refusal(*lines: Any, plan: Plan | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        checked(*lines, plan=plan)
    return caught.value.message


def test_all_bad_lines_are_reported_with_number_field_and_count() -> None:
    said = refusal("fine", {"id": 1}, {"input": "x", "agent": "nobody"}, {"input": ""})
    assert "3 of 4 lines cannot be used, so nothing was submitted" in said
    assert "line 2: field 'input' is missing" in said
    assert "line 3: no agent is named 'nobody'" in said
    assert "line 4: field 'input' is empty" in said
    assert "skip_invalid=True" in said


def test_at_most_twenty_problems_are_shown_and_the_others_counted() -> None:
    said = refusal(*[{"input": "x", "overrides": {f"f{n}": 1}} for n in range(1, 51)])
    assert "line 20:" in said
    assert "line 21:" not in said
    assert "and 30 more" in said


def test_what_is_wrong_with_every_line_is_shown_three_times() -> None:
    said = refusal(*[{"id": n} for n in range(1, 51)])
    assert "line 3:" in said
    assert "line 4:" not in said
    assert "and 47 more" in said


def test_overrides_are_checked_against_the_agent_of_the_line() -> None:
    assert "line 1: field 'max_steps'" in refusal({"input": "x", "overrides": {"max_steps": 0}})
    assert "'speed' is not known" in refusal({"input": "x", "overrides": {"speed": 1}})
    assert "field 'tools' cannot be overridden" in refusal(
        {"input": "x", "overrides": {"tools": []}}
    )
    assert "field 'settings' must be an object" in refusal(
        {"input": "x", "overrides": {"settings": 1}}
    )
    assert "field 'tool_choice': 'jump'" in refusal(
        {"input": "x", "overrides": {"tool_choice": "jump"}}
    )


def test_an_id_that_occurs_twice_names_both_lines() -> None:
    said = refusal({"id": "a", "input": "x"}, {"id": "b", "input": "x"}, {"id": "a", "input": "y"})
    assert "line 3: field 'id': 'a' is the id of line 1 already" in said


def test_a_number_and_the_same_text_are_one_id() -> None:
    assert "'1' is the id of line 1" in refusal({"id": 1, "input": "x"}, {"id": "1", "input": "y"})


def test_formats_are_not_mixed() -> None:
    request = {"custom_id": "r", "body": {"model": "m", "messages": [{"role": "user"}]}}
    assert "line 2: has the format openai, and earlier lines stepfleet" in refusal("x", request)


def test_an_empty_file_is_refused() -> None:
    assert "is empty" in refusal()


def test_a_line_without_agent_is_refused_where_there_is_no_default() -> None:
    said = refusal("x", plan=plan_of(None))
    assert "field 'agent' is missing; name one of solver, writer" in said


def test_the_only_agent_is_the_default() -> None:
    assert checked("x", plan=plan_of(None, writer=WRITER)).total == 1


def test_bad_lines_can_be_left_out_and_keep_their_row() -> None:
    with source_of("a", {"id": 1}, "b", {"input": ""}, "c") as source:
        found = check(source, plan_of(skip_invalid=True))
        assert (found.rows, found.total, found.problems.rows.tolist()) == (5, 3, [1, 3])
        rows = [(row, draft.line.messages[0].text) for row, draft in valid_lines(found)]
    assert rows == [(0, "a"), (2, "b"), (4, "c")]


def test_nothing_is_left_to_submit_where_all_lines_are_bad() -> None:
    with pytest.raises(ConfigurationError, match="1 of 1 lines"):
        checked({"id": 1}, skip_invalid=True)


def test_the_same_lines_agents_and_overrides_have_one_digest() -> None:
    same = checked("x", "y").digest
    assert checked("x", "y").digest == same
    assert checked("x", "z").digest != same
    assert checked("x", "y", plan=plan_of(overrides={"max_steps": 3})).digest != same
    assert checked("x", "y", plan=plan_of("writer")).digest != same
    other = SOLVER.model_copy(update={"instructions": "Be brief."})
    assert checked("x", "y", plan=plan_of(solver=other, writer=WRITER)).digest != same


def test_a_file_that_changes_under_way_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"input": "a"}\n')
    with open_input(file) as source:
        found = check(source, plan_of())
        file.write_text('{"input": "a"}\n{"input": "b"}\n')
        with pytest.raises(ConfigurationError, match="was changed while it was submitted"):
            list(valid_lines(found))


def test_a_lines_overrides_win_over_the_batchs_field_by_field() -> None:
    plan = plan_of(overrides={"max_steps": 5, "settings": {"temperature": 0.5, "seed": 1}})
    line = {"input": "x", "overrides": {"max_steps": 7, "settings": {"temperature": 0}}}
    draft = plan.draft(orjson.dumps(line))
    assert draft.max_steps == 7
    assert draft.overrides == {"max_steps": 7, "settings": {"temperature": 0.0, "seed": 1}}
    assert plan.draft(b'{"input": "x"}').max_steps == 5


def request(**body: Any) -> dict[str, Any]:
    return {
        "custom_id": "r",
        "url": "/v1/chat/completions",
        "method": "POST",
        "body": {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}], **body},
    }


def test_an_openai_line_without_an_agent_runs_as_a_plain_one_with_its_model() -> None:
    plan = Plan(Submission(), unknown)
    draft = plan.draft(orjson.dumps(request(temperature=0, response_format={"type": "text"})))
    assert (draft.config.name, draft.config.model) == ("openai-batch", "openai:gpt-4o")
    assert draft.config.tools == ()
    assert draft.config.settings.extra_body == {"response_format": {"type": "text"}}
    assert draft.overrides == {"settings": {"temperature": 0.0}}


def test_an_openai_line_of_a_given_agent_keeps_the_agents_model() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    draft = plan_of().draft(orjson.dumps(request(tools=tools, max_tokens=5)))
    assert draft.config is SOLVER
    assert draft.overrides == {"settings": {"max_tokens": 5}}


def test_what_an_agent_cannot_do_for_an_openai_line_is_refused() -> None:
    tools = [{"type": "function", "function": {"name": "jump"}}]
    assert "agent 'solver' has no tool 'jump'" in refusal(request(tools=tools))
    assert "'body.logprobs' cannot be set per line" in refusal(request(logprobs=True))
    assert "tools run here as an agent's code" in refusal(
        request(tools=tools), plan=Plan(Submission(), unknown)
    )


def test_very_many_different_request_bodies_are_refused() -> None:
    lines = [request(user=f"u{n}") | {"custom_id": str(n)} for n in range(1001)]
    said = refusal(*lines, plan=Plan(Submission(), unknown))
    assert "line 1001: is the 1,001th" in said


def test_twenty_thousand_lines_are_checked_in_less_memory_than_their_ids(tmp_path: Path) -> None:
    """The memory of the first reading does not grow with the file."""
    file = tmp_path / "large.jsonl"
    with file.open("wb") as out:
        for number in range(20_000):
            out.write(b'{"id": "line-%d", "input": "What is %d?"}\n' % (number, number))
    with open_input(file) as source:
        plan = plan_of()
        tracemalloc.start()
        try:
            found = check(source, plan)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert found.total == 20_000
    assert peak < 300_000
