from stepfleet.orchestrator import LLMResponse, ToolCall
from stepfleet.orchestrator.records.responses import AgentContinue, AgentFinish, parse_response

CALL = ToolCall(id="c1", name="add")


def test_an_answer_without_calls_is_the_end() -> None:
    """RUN-28"""
    assert parse_response(LLMResponse(content="3")) == AgentFinish(output="3")
    assert parse_response(LLMResponse(content="3", tool_calls=())) == AgentFinish(output="3")


def test_an_answer_with_calls_goes_on_whatever_it_says_beside_them() -> None:
    """RUN-28"""
    response = LLMResponse(content="I'll add", tool_calls=(CALL,))
    assert parse_response(response) == AgentContinue(tool_calls=(CALL,))


def test_no_content_is_an_empty_text() -> None:
    """As servers send it beside calls."""
    assert LLMResponse(content=None, tool_calls=(CALL,)).content == ""  # type: ignore[arg-type]
    assert LLMResponse.from_json('{"content":null}') == LLMResponse()
