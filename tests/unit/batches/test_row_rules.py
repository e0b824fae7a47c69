"""Rows of the user's own: their input, id and the fields that their runs keep."""

from typing import Any

import pytest

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.batches.files.lines import RowRules, input_of, kept_of

ROW = {"id": 7, "sku": "L1", "description": "a lamp", "agent": "Bob", "body": "text"}
PROMPT = "Classify: {description}"


def text_of(data: dict[str, Any], prompt: str | None = None, **rules: Any) -> str:
    (message,) = RowRules(**rules).line_of(data, prompt).messages
    return message.text


def test_a_prompt_words_a_row_and_the_row_stays_with_the_run() -> None:
    line = RowRules().line_of(ROW, PROMPT)
    assert line.messages[0].text == "Classify: a lamp"
    assert line.line_id == "7"
    assert line.metadata == ROW


def test_a_rows_own_fields_name_no_agent_and_make_no_request() -> None:
    assert RowRules().agent_of(ROW) is None
    assert RowRules().agent_of({"input": "x", "agent": "Bob"}) == "Bob"
    assert RowRules().format_of(ROW) == "stepfleet"
    assert RowRules().format_of({"custom_id": "1", "body": {}}) == "openai"
    assert RowRules(id_field="custom_id").format_of({"custom_id": "1"}) == "stepfleet"


def test_without_a_prompt_the_named_field_is_sent() -> None:
    assert text_of(ROW, input_field="description") == "a lamp"
    assert text_of({"n": 5}, input_field="n") == "5"
    assert text_of({"n": {"a": [1]}}, input_field="n") == '{"a":[1]}'
    line = RowRules("description", "sku").line_of(ROW, None)
    assert (line.line_id, line.messages[0].text) == ("L1", "a lamp")


def test_with_a_prompt_the_named_field_is_its_input() -> None:
    assert text_of(ROW, "{input} {sku}", input_field="description") == "a lamp L1"


def test_a_table_needs_a_column_input_a_prompt_or_a_name() -> None:
    assert text_of({"input": "hi", "note": "x"}, is_table=True) == "hi"
    with pytest.raises(ConfigurationError, match=r"'input'.*there are: id, sku.*--input-field"):
        text_of(ROW, is_table=True)


def test_an_unknown_field_of_a_line_names_both_ways_to_run_rows() -> None:
    with pytest.raises(ConfigurationError) as caught:
        text_of({"input": "x", "sku": "L1"})
    assert "field 'sku' is not known" in caught.value.message
    assert "prompt='... {sku}'" in caught.value.message
    assert "--input-field sku" in caught.value.message


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"description": "x"}, "'sku', which is to be the id, is missing; there are: description"),
        ({"sku": None, "description": "x"}, "'sku', which is to be the id, is null"),
        ({"sku": "", "description": "x"}, "'sku' is empty text"),
        ({"sku": "1"}, "field 'description', which is to be the input, is missing"),
        ({"sku": "1", "description": None}, "field 'description' is null"),
        ({"sku": "1", "description": " "}, "field 'description' is empty"),
    ],
)
def test_a_row_without_what_was_named_is_bad(row: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        text_of(row, input_field="description", id_field="sku")
    assert why in caught.value.message


def test_a_line_stays_a_line_beside_a_prompt() -> None:
    line = {"id": 1, "input": {"description": "a chair"}, "metadata": {"n": 1}}
    made = RowRules().line_of(line, PROMPT)
    assert (made.messages[0].text, made.metadata) == ("Classify: a chair", {"n": 1})
    assert text_of({"id": 1, "input": "hallo"}, "{id}: {input}") == "1: hallo"
    talk = {"input": [{"role": "user", "content": "as it is"}]}
    assert text_of(talk, PROMPT) == "as it is"


def test_a_dict_without_a_prompt_is_sent_as_json() -> None:
    assert input_of({"a": "ä"}, "input")[0].text == '{"a":"ä"}'
    with pytest.raises(ConfigurationError, match="one message; write a list of messages"):
        input_of({"role": "user", "content": "hi"}, "input")
    with pytest.raises(ConfigurationError, match="there are: input"):
        input_of("text", "input", PROMPT)


def test_a_run_keeps_short_fields_up_to_four_kibibytes() -> None:
    assert kept_of({"a": "x" * 300, "b": [1] * 300, "c": "short"}) == {"c": "short"}
    wide = {f"column{n}": "v" * 90 for n in range(100)}
    assert list(kept_of(wide)) == [f"column{n}" for n in range(len(kept_of(wide)))]
    assert 30 < len(kept_of(wide)) < 50
