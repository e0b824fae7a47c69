"""OpenAI's batch format: its request lines in, its response lines out. Pure.

A request becomes one run: of the agent that the batch names, or of a plain agent without tools
that calls the model named by the line.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.batches.files.lines import BatchLine, parse_id, parse_input
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.responses import ModelSettings
from stepfleet.orchestrator.records.run.results import AgentRunResult, RunStatus
from stepfleet.orchestrator.records.steps import FinishReason

LINE_LIMIT = 4 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class RawLine:
    """One line that is not blank. `row` counts such lines from 0, `number` all lines from 1.

    `data` is None for a line that cannot be used, with the `problem`. `unit` is what `number`
    counts.
    """

    row: int
    number: int
    data: bytes | None
    problem: str = ""
    unit: str = "line"


def too_long(row: int, number: int, unit: str = "line") -> RawLine:
    """Return a line that is left out for its size."""
    return RawLine(row, number, None, "is longer than 4 MiB; shorten it", unit)


def lines_in(file: BinaryIO) -> Iterator[RawLine]:
    """Yield the lines of a JSONL file from its place on; of those above 4 MiB nothing is kept."""
    row = number = 0
    while (line := file.readline(LINE_LIMIT)) != b"":
        number += 1
        whole = line.endswith(b"\n") or len(line) < LINE_LIMIT or _skip_rest(file) == 0
        data = line.removeprefix(_BOM) if number == 1 else line
        data = data.strip()
        if data or not whole:
            yield RawLine(row, number, data) if whole else too_long(row, number)
            row += 1


def _skip_rest(file: BinaryIO) -> int:
    """Read to the end of an overlong line without keeping it; return its further bytes."""
    skipped = 0
    while (part := file.readline(LINE_LIMIT)) != b"":
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


PLAIN_AGENT = "openai-batch"
URL = "/v1/chat/completions"
PROVIDER = "openai:"
_FIELDS = ("custom_id", "method", "url", "body")
_SETTINGS = ("temperature", "top_p", "seed")
_OWN = frozenset(
    {
        *_SETTINGS,
        "model",
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "stream",
        "stream_options",
        "n",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
    }
)
_CHOICES = {"auto": "auto", "none": "none", "required": "any"}
_REASONS = {
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
    FinishReason.CONTENT_FILTER: "content_filter",
}


def plain_config(
    model: str | None = None, extra_body: Mapping[str, Any] | None = None
) -> AgentConfig:
    """Return the agent of request lines that name none: no tools, no limits but one answer.

    `extra_body` are fields of the lines that only the provider knows.
    """
    return AgentConfig(
        name=PLAIN_AGENT,
        model=PROVIDER + (model or "named-by-each-line"),
        token_limit=None,
        time_limit=None,
        settings=ModelSettings(extra_body=dict(extra_body or {})),
    )


def parse_openai_line(data: dict[str, Any]) -> BatchLine:
    """Read a request line. Raises `ConfigurationError` that names the field and the fix."""
    unknown = [name for name in data if name not in _FIELDS]
    if unknown:
        msg = f"field {unknown[0]!r} is not known; a request line has {', '.join(_FIELDS)}"
        raise ConfigurationError(msg)
    custom_id = parse_id(data.get("custom_id"), "custom_id")
    if custom_id is None:
        raise ConfigurationError("field 'custom_id' is missing; write one that no other line has")
    if str(data.get("method", "POST")).upper() != "POST":
        raise ConfigurationError(f"field 'method' is {data['method']!r}; write 'POST'")
    if data.get("url", URL) != URL:
        msg = f"field 'url' is {data['url']!r}; only {URL!r} is supported"
        raise ConfigurationError(msg)
    body = data.get("body")
    if not isinstance(body, dict):
        raise ConfigurationError("field 'body' is missing or not an object; write model, messages")
    return _request(custom_id, body)


def to_openai_line(result: AgentRunResult) -> dict[str, Any]:
    """Return a run's line as OpenAI's batch output has it.

    A run without an answer has an `error` and no `response`. The line's id names the run and, in
    milliseconds since 1970, its end: a retry gives another one.
    """
    ended = f"_{round(result.end_time.timestamp() * 1000):x}" if result.end_time else ""
    answered = result.status in (RunStatus.COMPLETED, RunStatus.MAX_ITERATIONS_REACHED)
    has_answer = answered and _content(result) is not None
    return {
        "id": f"batch_req_{result.run_id.replace('-', '')}{ended}",
        "custom_id": result.line_id or result.run_id,
        "response": _response(result) if has_answer else None,
        "error": None if has_answer else _error(result),
    }


def _request(custom_id: str, body: dict[str, Any]) -> BatchLine:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise ConfigurationError("field 'body.model' is missing; name the model")
    if "messages" not in body or not isinstance(body["messages"], list):
        raise ConfigurationError("field 'body.messages' is missing or not a list; write messages")
    if body.get("stream"):
        raise ConfigurationError(
            "field 'body.stream' is true; a batch has no streams: leave it out"
        )
    if body.get("n") not in (None, 1):
        raise ConfigurationError("field 'body.n' must be 1; write one line per answer")
    tools = _tool_names(body.get("tools"))
    overrides: dict[str, Any] = {}
    settings = _settings(body)
    if settings:
        overrides["settings"] = settings
    if tools and body.get("tool_choice") is not None:
        overrides["tool_choice"] = _tool_choice(body["tool_choice"])
    if tools and body.get("parallel_tool_calls") is not None:
        overrides["parallel_tool_calls"] = body["parallel_tool_calls"]
    return BatchLine(
        line_id=custom_id,
        messages=parse_input(body["messages"], "body.messages"),
        overrides=overrides,
        model=model.removeprefix(PROVIDER),
        tools=tools,
        extra_body={name: value for name, value in body.items() if name not in _OWN},
    )


def _settings(body: dict[str, Any]) -> dict[str, Any]:
    """Return how the model is called."""
    settings = {name: body[name] for name in _SETTINGS if body.get(name) is not None}
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    if most is not None:
        settings["max_tokens"] = most
    stop = body.get("stop")
    if stop:
        settings["stop"] = [stop] if isinstance(stop, str) else stop
    return settings


def _tool_names(tools: Any) -> tuple[str, ...]:
    if tools is None:
        return ()
    try:
        return tuple(str(tool["function"]["name"]) for tool in tools)
    except (KeyError, TypeError):
        msg = "field 'body.tools': each tool needs a function with a name; see chat completions"
        raise ConfigurationError(msg) from None


def _tool_choice(choice: Any) -> str:
    if isinstance(choice, str) and choice in _CHOICES:
        return _CHOICES[choice]
    try:
        return str(choice["function"]["name"])
    except (KeyError, TypeError):
        msg = f"field 'body.tool_choice' is {choice!r}; write auto, none, required or a function"
        raise ConfigurationError(msg) from None


def _content(result: AgentRunResult) -> str | None:
    """Return a run's answer as a message has it: data of an `output_type` as JSON."""
    if result.structured is None:
        return result.output
    return exact_json.text(result.structured)


def _response(result: AgentRunResult) -> dict[str, Any]:
    last = result.steps[-1] if result.steps else None
    moment = result.end_time or result.start_time
    usage = result.usage
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": _content(result), "refusal": None},
        "logprobs": None,
        "finish_reason": _finish_reason(result),
    }
    body = {
        "id": f"chatcmpl-{result.run_id}",
        "object": "chat.completion",
        "created": int(moment.timestamp()),
        "model": (last.model if last else None) or "",
        "choices": [choice],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        },
    }
    return {"status_code": 200, "request_id": result.run_id, "body": body}


def _finish_reason(result: AgentRunResult) -> str:
    if result.status is RunStatus.MAX_ITERATIONS_REACHED:
        return "length"
    if result.structured is not None:  # given by a tool, and no call that a reader could answer
        return "stop"
    return _REASONS.get(result.steps[-1].finish_reason, "stop") if result.steps else "stop"


def _error(result: AgentRunResult) -> dict[str, Any]:
    if result.status is None:
        return {"code": "not_finished", "message": f"the run is {result.lifecycle}"}
    if result.status is RunStatus.CANCELLED:
        return {"code": "batch_cancelled", "message": "the run was cancelled"}
    problems = result.steps[-1].problems if result.steps else ()
    code = problems[0].code if problems else str(result.stop_reason).upper()
    why = f": {result.explaining.message}" if result.explaining else ""
    message = result.error or f"the run stopped without an answer ({result.stop_reason}){why}"
    return {"code": code.lower(), "message": message}
