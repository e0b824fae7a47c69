"""Requests to models and their responses, in the fleet's own format."""

import operator
from typing import Any, Literal

from pydantic import Field, field_validator

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolSpec
from stepfleet.orchestrator.records.conversation.messages import Block, Content, Message
from stepfleet.orchestrator.records.memory_window import Remembered
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.orchestrator.records.usage import MOST_TOKENS, CacheUse, Fallback, UsageStats

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high"]


def _is_none(value: object) -> bool:
    return value is None


class ModelSettings(Record):
    """How a model is called. None means: the provider's (or the environment's) own default.

    `timeout` is in seconds for the whole call. `api_key_env` names the environment variable
    that holds the key on the worker; a key itself never enters a record. `reasoning_budget` is in
    tokens; 0, like the effort `none`, switches reasoning off. `service_tier` is the provider's own
    word. `prompt_cache` marks the prompt's stable parts for providers that cache only marked ones.
    """

    base_url: str | None = None
    api_key_env: str | None = None
    organization: str | None = None
    timeout: float = Field(default=120.0, gt=0)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_tokens: int | None = Field(default=None, gt=0, le=MOST_TOKENS)
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stream: bool = False
    extra_body: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: ReasoningEffort | None = Field(default=None, exclude_if=operator.not_)
    reasoning_budget: int | None = Field(default=None, ge=0, le=MOST_TOKENS, exclude_if=_is_none)
    service_tier: str | None = Field(default=None, min_length=1, exclude_if=operator.not_)
    prompt_cache: bool = Field(default=True, exclude_if=bool)


class OutputFormat(Record):
    """JSON as the form of an answer: any object, or one that fits `json_schema`.

    `name` is the schema's name in the request.
    """

    name: str = "response"
    json_schema: dict[str, Any] | None = None


class ModelRequest(Record):
    """One call: the whole conversation, the tools on offer, the settings.

    `tool_choice`: `auto`, `any`, `none` or the name of one tool. `output` None means: text.
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool | None = None
    settings: ModelSettings = ModelSettings()
    output: OutputFormat | None = None


class LLMResponse(Record):
    """One response. A `content` of None is read as "". `usage` is None when none was reported.

    A worker then estimates it and sets `usage_estimated`; `partial_usage` has what was reported all
    the same, with zeros for missing counts. `remembered` is the result of the memory
    policy before the call. `service_tier` is the provider's tier in which the call was served, ""
    for its standard one. `cache` is set where the response cache took part, `fallback` where other
    models of the agent's list had failed before. `reasoning` has the blocks that go back to the
    provider unchanged (see `conversation.messages.REASONING`), `reasoning_text` what people can
    read of it. `request_id` is the provider's own name of the request. `raw` is the provider's
    payload for hooks in the same process, `unread` names what it has besides text and calls, such
    as an image; these two and `partial_usage` are never stored.
    """

    content: str = ""
    tool_calls: tuple[ToolCall, ...] | None = None
    usage: UsageStats | None = None
    usage_estimated: bool = Field(default=False, exclude_if=operator.not_)
    model: str = ""
    service_tier: str = Field(default="", exclude_if=operator.not_)
    finish_reason: FinishReason = FinishReason.STOP
    reasoning: tuple[Block, ...] = Field(default=(), exclude_if=operator.not_)
    reasoning_text: str = Field(default="", exclude_if=operator.not_)
    request_id: str = Field(default="", exclude_if=operator.not_)
    remembered: Remembered | None = None
    cache: CacheUse | None = Field(default=None, exclude_if=operator.not_)
    fallback: Fallback | None = Field(default=None, exclude_if=operator.not_)
    raw: Any = Field(default=None, exclude=True, repr=False)
    unread: str = Field(default="", exclude=True, repr=False)
    partial_usage: UsageStats | None = Field(default=None, exclude=True, repr=False)

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, content: Any) -> Any:
        return "" if content is None else content

    @property
    def as_content(self) -> Content:
        """The content of the conversation's message: the text, after the reasoning if there is."""
        if not self.reasoning:
            return self.content
        return [*self.reasoning, *([{"text": self.content}] if self.content else [])]


class AgentFinish(Record):
    """The model is done; `output` is its text."""

    type: Literal["finish"] = "finish"
    output: str


class AgentContinue(Record):
    """The model calls tools, in this order."""

    type: Literal["continue"] = "continue"
    tool_calls: tuple[ToolCall, ...]


ParsedStep = AgentFinish | AgentContinue


def parse_response(response: LLMResponse) -> ParsedStep:
    """Return the next move of `response`; without tool calls it is the end."""
    if response.tool_calls:
        return AgentContinue(tool_calls=response.tool_calls)
    return AgentFinish(output=response.content)
