"""What the bodies of all protocols have in common: JSON, names of tools, reasoning. Pure."""

import json
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import orjson

from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.records.calls.tools import ToolSpec
from stepfleet.orchestrator.records.conversation.messages import REASONING, Block, Message, Role
from stepfleet.orchestrator.records.errors import ModelErrorCode
from stepfleet.orchestrator.records.usage import UsageStats, token_count
from stepfleet.orchestrator.tools.schemas.strict import fits_strict_mode
from stepfleet.worker.models.lenient_json import read_json

NO_NAME = "unnamed_tool"
_encode_any = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_NAME_LENGTH = 64
_LONGEST_REASONING = 16_000
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_-]")


def encode(body: dict[str, Any]) -> bytes:
    """Return the body as JSON. Lone surrogates and integers above 64 bits are kept, escaped."""
    try:
        # Copied: what orjson returns keeps 4 KiB, however short it is, and a call may be long.
        return bytes(memoryview(orjson.dumps(body)))
    except TypeError:
        return json.dumps(body, separators=(",", ":")).encode()


def json_text(value: Any) -> str:
    """Return a value as JSON text, whatever characters and integers it has."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # lone surrogates, integers above 64 bits
        return _encode_any(value)


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


def malformed(what: str) -> ModelError:
    """Return the transient failure of an answer that cannot be read."""
    msg = f"the model's answer is malformed: {what}"
    return ModelError(msg, retryable=True, code=ModelErrorCode.MALFORMED_ANSWER, received=0)


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


def usage_apart(
    given: Any, completion: Any, *, cached: Any, written: Any, thought: Any = None
) -> UsageStats | None:
    """Return the token counts of one call, or None when they are absent or no counts.

    For services that count tokens that were read from or written to their prompt cache apart.
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
        reasoning_tokens=token_count(thought) or 0,
    )
