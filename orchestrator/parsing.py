"""What a model's answer asks for: the end, or tools. The result never leaves the step."""

from typing import Literal

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.tools import ToolCall


class AgentFinish(Record):
    """The model is done; `output` is its text."""

    type: Literal["finish"] = "finish"
    output: str


class AgentContinue(Record):
    """The model asks for tools, in this order."""

    type: Literal["continue"] = "continue"
    tool_calls: tuple[ToolCall, ...]


ParsedStep = AgentFinish | AgentContinue


def parse_response(response: LLMResponse) -> ParsedStep:
    """Return what `response` asks for; an answer without tool calls is the end."""
    if response.tool_calls:
        return AgentContinue(tool_calls=response.tool_calls)
    return AgentFinish(output=response.content)
