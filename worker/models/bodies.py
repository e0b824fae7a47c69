"""What the bodies of all protocols have in common: JSON, names of tools, reasoning. Pure."""

import json
import logging
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import orjson
from pydantic_core import from_json

from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.calls.tools import ToolSpec
from stepfleet.orchestrator.records.conversation.messages import REASONING, Block, Message, Role
from stepfleet.orchestrator.records.errors import ModelErrorCode
from stepfleet.orchestrator.records.exact_json import MAX_DIGITS
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.orchestrator.records.usage import UsageStats, token_count
from stepfleet.orchestrator.tools.calls import MOST_CALLS
from stepfleet.orchestrator.tools.schemas.handles import fits_strict_mode
from stepfleet.worker.toolbox.failure_log import Equals

log = logging.getLogger(__name__)

MOST_SIGNS = 2_000_000
"""Brackets, commas and colons that a text may have. While the parser makes values of them no thread
of the process runs, and in an answer of 16 MiB that can be many seconds."""

_SIGNS = (b",", b":", b"[", b"{")
_equals = Equals()


def read_json(data: bytes) -> Any:
    """Return the value of `data`; whole numbers of up to 4,300 digits are exact.

    NaN and infinities are those of `float`, as are longer numbers; lone surrogates stay in texts.
    Raises `orjson.JSONDecodeError` where it is not JSON, and where it may have far more values than
    an answer has.
    """
    if len(data) > MOST_SIGNS and sum(map(data.count, _SIGNS)) > MOST_SIGNS:
        raise orjson.JSONDecodeError(f"more than {MOST_SIGNS} brackets, commas and colons", "", 0)
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError as error:
        return _read_leniently(data, str(error).partition(" at line ")[0])


def _read_leniently(data: bytes, why: str) -> Any:
    text = data.decode("utf-8-sig", "replace")
    constants: list[str] = []

    def constant(word: str) -> float:
        constants.append(word)
        return float(word)

    decoder = json.JSONDecoder(strict=False, parse_int=_whole, parse_constant=constant)
    try:
        value = decoder.decode(text)
    except json.JSONDecodeError as error:
        raise orjson.JSONDecodeError(error.msg, text, error.pos) from None
    except RecursionError:
        raise orjson.JSONDecodeError("nested too deep", "", 0) from None
    why = constants[0] if constants else why
    if (left_out := _equals.left_out(why)) is not None:
        more = f" ({left_out} more like it were not logged)" if left_out else ""
        log.warning("a service's answer is not standard JSON (%s), and is read%s", why, more)
    return value


def _whole(digits: str) -> float:
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)


DONE = b"[DONE]"
"""The last event of a stream of chat completions."""
NO_NAME = "unnamed_tool"
_NAME_LENGTH = 64
_LONGEST_REASONING = 16_000
_LONGEST_WORD = 100
_LONGEST_WORDS = 500
WHOLE_TURN = "whole_turn"
"""The `type` of blocks of reasoning that are all blocks of a turn, its texts too."""
_LONGEST_COUNT = 10
MOST_BLOCKS = 100_000
"""Blocks of a streamed answer that are kept: far more than one has."""
MOST_REASONING = 4 * MOST_CALLS
"""Blocks of an answer's reasoning that go back with it."""
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_-]")


def encode(body: dict[str, Any]) -> bytes:
    """Return the body as JSON. Lone surrogates and integers above 64 bits are kept, escaped."""
    try:
        # Copied: what orjson returns keeps 4 KiB, however short it is, and a call may be long.
        return bytes(memoryview(exact_json.dumps(body)))
    except TypeError:
        return json.dumps(body, separators=(",", ":")).encode()


def json_text(value: Any) -> str:
    """Return a value as JSON text, whatever characters and integers it has."""
    try:
        return exact_json.text(value)
    except TypeError:  # lone surrogates
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def parse_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`. Nesting is bounded by the parser (1,024 levels)."""
    try:
        payload = read_json(body)
    except orjson.JSONDecodeError as error:
        raise malformed(f"the body is not JSON ({error})") from None
    if not isinstance(payload, dict):
        raise malformed("the body is not a JSON object")
    return payload


def parse_event(data: bytes) -> dict[str, Any]:
    """Return the JSON object that is one event of a stream."""
    try:
        event = read_json(data)
    except orjson.JSONDecodeError:
        raise malformed("an event of the stream is not JSON") from None
    if not isinstance(event, dict):
        raise malformed("an event of the stream is not a JSON object")
    return event


def media_of_type(kind: Any) -> str:
    """Return what an answer has in place of a text, by its MIME type."""
    name = word(kind).partition("/")[0]
    return {"image": "an image", "audio": "audio", "video": "a video"}.get(name, "a file")


def malformed(what: str) -> ModelError:
    """Return the transient failure of an answer that cannot be read."""
    msg = f"the model's answer is malformed: {what}"
    return ModelError(msg, retryable=True, code=ModelErrorCode.MALFORMED_ANSWER, received=0)


def broken_off(reason: str) -> ModelError:
    """Return the transient failure of an answer that its service did not end, and says so."""
    msg = f"the service broke its answer off ({reason[:_LONGEST_WORD]!r})"
    return ModelError(msg, retryable=True, code=ModelErrorCode.SERVER_ERROR, received=0)


def blocked(reason: str, words: str = "") -> ModelError:
    """Return the failure of a prompt, or an answer, that its service withheld: without any text.

    `reason` is the service's word for it, `words` are what it says with it: neither is the
    model's answer.
    """
    said = words.strip()[:_LONGEST_WORDS] or "no answer was given"
    named = reason[:_LONGEST_WORD]
    error = ModelError(
        f"the service refused the content: {said} ({named}). Change the input",
        code=ModelErrorCode.CONTENT_FILTER,
        received=0,
    )
    error.finish_reason = FinishReason.CONTENT_FILTER
    return error


def word(value: Any) -> str:
    """Return a field that has one word of its service, such as a kind or a reason; "" if not."""
    return value if isinstance(value, str) else ""


@lru_cache(maxsize=1024)
def safe_name(name: str) -> str:
    """Return the name of a tool or author with the characters that services take."""
    # A name that the service refuses would end the run at its next step, whoever made it up.
    return _NOT_IN_A_NAME.sub("_", name)[:_NAME_LENGTH]


def is_strict(spec: ToolSpec, *, by_default: bool) -> bool:
    """Return whether the service is to hold calls of a tool to its schema itself.

    `by_default` is for tools that ask for neither. A schema that strict mode does not take is sent
    without it: the service refuses the request else.
    """
    wanted = by_default if spec.strict is None else spec.strict
    return wanted and fits_strict_mode(spec.parameters)


def reasoning_of(message: Message, provider: str) -> list[tuple[int, dict[str, Any]]]:
    """Return place and data of each block of reasoning that this provider made, in order.

    Blocks of a submitted conversation that are none are left out.
    """
    found: list[tuple[int, dict[str, Any]]] = []
    for block in message.reasoning:
        one = block[REASONING]
        if isinstance(one, dict) and one.get("provider") == provider:
            at, data = one.get("at"), one.get("data")
            if isinstance(at, int) and at >= 0 and isinstance(data, dict):
                found.append((at, data))
    return found


def without_half_a_turn(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the messages without the turn at their end that a service has paused.

    No other service goes on with it; some refuse a request that ends with a turn of the model.
    """
    end = len(messages)
    while end and _is_whole_turn(messages[end - 1]):
        end -= 1
    return messages[:end] if end < len(messages) else messages


def _is_whole_turn(message: Message) -> bool:
    if message.role is not Role.ASSISTANT or message.tool_calls:
        return False
    blocks = [one[REASONING] for one in message.reasoning if isinstance(one[REASONING], dict)]
    found = [one.get("data") for one in blocks]
    return any(isinstance(one, dict) and one.get("type") == WHOLE_TURN for one in found)


def reasoning_block(provider: str, at: int, data: dict[str, Any]) -> Block:
    """Return the block of an answer's reasoning; `at` is its place (see `REASONING`)."""
    return {REASONING: {"provider": provider, "at": at, "data": data}}


def shown_reasoning(texts: Iterable[str]) -> str:
    """Return the readable part of an answer's reasoning, as a step's record keeps it."""
    text = "".join(texts)
    return text if len(text) <= _LONGEST_REASONING else f"{text[:_LONGEST_REASONING]} [cut]"


def with_reasoning(items: list[Any], reasoning: list[tuple[int, dict[str, Any]]]) -> list[Any]:
    """Return the texts and calls of an answer with its reasoning at its places.

    Services refuse reasoning that nothing follows: that of an answer cut short is left out.
    """
    merged = list(items)
    followed = [(at, data) for at, data in reasoning if at < len(items)]
    for before, (at, data) in enumerate(followed):
        merged.insert(at + before, data)
    return merged


def alternating_turns(
    messages: Iterable[Message],
    blocks: Callable[[Message], Iterable[dict[str, Any]]],
    *,
    assistant: str = "assistant",
    field: str = "content",
) -> list[dict[str, Any]]:
    """Return alternating turns: all results of one answer, and what follows them, are one.

    `blocks` returns the content of a message; those without any are left out. `assistant` is the
    service's word for the model's role, `field` has a turn's blocks.
    """
    turns: list[dict[str, Any]] = []
    for message in messages:
        role = assistant if message.role is Role.ASSISTANT else "user"
        content = list(blocks(message))
        if not content:
            continue
        if turns and turns[-1]["role"] == role:
            turns[-1][field] += content
        else:
            turns.append({"role": role, field: content})
    return turns


def usage_within(
    prompt: int,
    completion: int,
    total: int | None,
    *,
    cached: int = 0,
    written: int = 0,
    thought: int = 0,
    may_be_apart: bool = False,
) -> UsageStats:
    """Return the token counts of one call, of a service whose prompt and completion are whole.

    Some count reasoning (xAI, Gemini) or their prompt cache (gateways to Anthropic) next to them:
    `total` shows it, or that the part is larger than the whole, where the cache `may_be_apart`.
    """
    beside = 0 if total is None else total - prompt - completion
    kept = cached + written
    if kept and (beside == kept or (may_be_apart and kept > prompt)):
        prompt += kept
    elif (beside > 0 and thought in (0, beside)) or (beside <= 0 and thought > completion):
        thought = thought or beside
        completion += thought
    cached = min(cached, prompt)
    written = min(written, prompt - cached)
    return UsageStats.model_construct(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=max(prompt + completion, total or 0),
        llm_calls=1,
        cached_tokens=cached,
        cache_write_tokens=written,
        reasoning_tokens=thought,
    )


def told_count(value: Any) -> int | None:
    """Return a number of tokens as servers report it: some as text. None where it is none."""
    if isinstance(value, str) and len(value) <= _LONGEST_COUNT and value.isdecimal():
        value = int(value)
    return token_count(value)


def completed_counts(
    prompt: Any, completion: Any, total: Any
) -> tuple[int, int, int | None] | None:
    """Return the three counts of a call; one that is missing is what the others leave of `total`.

    None where they are absent or no counts.
    """
    prompt, completion, total = told_count(prompt), told_count(completion), told_count(total)
    known = completion if prompt is None else prompt
    if known is None:
        return None
    if prompt is not None and completion is not None:
        # A smaller total is that of one of a stream's reports.
        return prompt, completion, total if (total or 0) >= prompt + completion else None
    rest = 0 if total is None else total - known
    if rest <= 0:  # an answer has tokens, and so has what it answers
        return None
    return (rest, known, total) if prompt is None else (known, rest, total)


_PROMPTS = ("prompt_tokens", "input_tokens", "inputTokens", "promptTokenCount")
_COMPLETIONS = ("completion_tokens", "output_tokens", "outputTokens", "candidatesTokenCount")
_TOTALS = ("total_tokens", "totalTokens", "totalTokenCount")
APART = ("cache_read_input_tokens", "cache_creation_input_tokens")
_APART_IN_CAMEL = ("cacheReadInputTokens", "cacheWriteInputTokens")


def partial_usage(usage: Any) -> UsageStats | None:
    """Return the counts of a report in which some are missing (0); None where all are."""
    if not isinstance(usage, dict):
        return None

    def first(names: tuple[str, ...]) -> int:
        return count_in(usage, *((name,) for name in names))

    prompt, completion, total = map(first, (_PROMPTS, _COMPLETIONS, _TOTALS))
    if prompt and "prompt_tokens" not in usage:  # elsewhere the cache is within the prompt
        prompt += sum(count_in(usage, (name,)) for name in (*APART, *_APART_IN_CAMEL))
    if not (prompt or completion or total):
        return None
    return UsageStats(prompt_tokens=prompt, completion_tokens=completion, total_tokens=total)


def with_counts(answer: LLMResponse, given: Any) -> LLMResponse:
    """Return an answer whose usage is `partial_usage` where a count of the report is missing.

    So is a zero with text or calls: servers that count nothing report it. `given` is the report.
    """
    usage = answer.usage
    if usage is None:
        stated = partial_usage(given)
    elif usage.prompt_tokens and usage.completion_tokens:
        return answer
    elif answer.content or answer.tool_calls:
        stated = usage if usage.total_tokens else None
    else:
        return answer
    return answer.model_copy(update={"usage": None, "partial_usage": stated})


def merged_usage(known: Any, given: Any) -> Any:
    """Add a report of a stream to the usage `known` and return it: of each count the largest one.

    Servers count up, report parts of it apart, or end with a usage of zeros. Lists of counts are
    those of the last report.
    """
    if not isinstance(known, dict):
        return given or known
    if not isinstance(given, dict):
        return known
    for name, value in given.items():
        before = known.get(name)
        if isinstance(before, dict) and isinstance(value, dict):
            _keep_largest(before, value)
        else:
            _keep_largest(known, {name: value})
    return known


def _keep_largest(known: dict[str, Any], given: dict[str, Any]) -> None:
    for name, value in given.items():
        before = known.get(name)
        if (
            before is None
            or (value and isinstance(value, list))
            or (told_count(value) or 0) > (told_count(before) or 0)
        ):
            known[name] = value


def count_in(usage: dict[str, Any], *places: tuple[str, ...]) -> int:
    """Return the first count that is at one of `places`, each a name, or a group and a name."""
    for place in places:
        fields = usage if len(place) == 1 else usage.get(place[0])
        if isinstance(fields, dict) and (found := told_count(fields.get(place[-1]))):
            return found
    return 0


def usage_apart(
    given: Any,
    completion: Any,
    *,
    cached: Any,
    written: Any,
    for_hour: Any = None,
    thought: Any = None,
) -> UsageStats | None:
    """Return the token counts of one call, or None when they are absent or no counts.

    For services that count tokens that were read from or written to their prompt cache apart;
    `for_hour` is the part that was written for an hour.
    """
    given, completion = token_count(given), token_count(completion)
    if given is None or completion is None:
        return None
    cached, written = token_count(cached) or 0, token_count(written) or 0
    prompt = given + cached + written
    return UsageStats.model_construct(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        llm_calls=1,
        cached_tokens=cached,
        cache_write_tokens=written,
        cache_write_1h_tokens=min(token_count(for_hour) or 0, written),
        reasoning_tokens=token_count(thought) or 0,
    )
