"""CPU of one model call by provider, beside the official SDK's own client: same server, same run.

python benchmarks/providers.py
python benchmarks/providers.py --calls 200 --pairs 9 --json providers.json

The prompt is that of a typical run: ten messages, three tools. The answer has 400 characters, whole
or streamed. Ours and the SDK's calls alternate in pairs on one event loop. Ours begins with the
fleet's messages and ends with its response; the SDK gets the ready body, and ends with its own
object, or with the text of its stream. With Bedrock both sign, and botocore's client blocks.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from processes import model
from reports import Column, Report, begin, finish, parser, show

from stepfleet import Message, ModelRequest, ModelSettings, ToolCall, ToolSpec
from stepfleet.orchestrator.models.endpoint import ROUTES, endpoint_of
from stepfleet.orchestrator.models.services import SERVICES, environment_of
from stepfleet.worker.models import Models
from stepfleet.worker.models.providers import FORMATS

PROVIDERS = ("openai", "openai-responses", "anthropic", "google", "bedrock")
TURNS = 4
NAMES = ("look", "search", "calculate")
TEXT = "a sentence of some eighty characters, as one that a model might have written"
WARM_UP = 20
SIGNED = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "AKIDBENCH")
SIGNED["AWS_REGION"] = "us-east-1"
Call = Callable[[], Awaitable[str]]


def request_of(provider: str, *, stream: bool) -> ModelRequest:
    """Return the request: system, question, and four calls with their results."""
    messages = [Message.system(TEXT * 3), Message.user(f"{TURNS} turns, at length")]
    for turn in range(TURNS):
        call = ToolCall(id=f"call_{turn}", name="look", arguments={"step": turn, "what": TEXT})
        messages += [Message.assistant("", (call,)), Message.tool(call, TEXT * 2)]
    fields = {"step": {"type": "integer"}, "what": {"type": "string", "description": TEXT}}
    schema = {"type": "object", "properties": fields, "required": ["step"]}
    tools = [ToolSpec(name=name, description=TEXT, parameters=schema) for name in NAMES]
    settings = ModelSettings(stream=stream, max_tokens=500)
    return ModelRequest(
        model=f"{provider}:tiny", messages=tuple(messages), tools=tuple(tools), settings=settings
    )


def our_call(models: Models, request: ModelRequest) -> Call:
    """Return a call by our own path, which returns the text."""

    async def call() -> str:
        pieces: list[str] = []
        response = await models.generate(request, on_text=pieces.append)
        return response.content or ""

    return call


def body_of(request: ModelRequest) -> dict[str, Any]:
    """Return the body that the request becomes, which the SDK is given ready."""
    provider, _, name = request.model.partition(":")
    service = SERVICES[provider]
    endpoint = endpoint_of(request.settings, os.environ, service, path=ROUTES[service.api].path)
    named = request.model_copy(update={"model": name})
    body: dict[str, Any] = orjson.loads(FORMATS[service.api].body(named, endpoint))
    return body


def sdk_call(provider: str, request: ModelRequest) -> Call:
    """Return a call by the official client, which returns the text; it has read all of it."""
    makers = {
        "openai": _chat,
        "openai-responses": _responses,
        "anthropic": _anthropic,
        "google": _google,
        "bedrock": _bedrock,
    }
    return makers[provider](body_of(request), request.settings.stream)


def _chat(body: dict[str, Any], stream: bool) -> Call:
    from openai import AsyncOpenAI  # noqa: PLC0415 - one SDK at a time

    client = AsyncOpenAI()

    async def call() -> str:
        answer = await client.chat.completions.create(**body)
        if not stream:
            return str(answer.choices[0].message.content)
        parts = [one.choices[0].delta.content or "" async for one in answer if one.choices]
        return "".join(parts)

    return call


def _responses(body: dict[str, Any], stream: bool) -> Call:
    from openai import AsyncOpenAI  # noqa: PLC0415

    client = AsyncOpenAI()

    async def call() -> str:
        answer = await client.responses.create(**body)
        if not stream:
            return str(answer.output_text)
        kind = "response.output_text.delta"
        return "".join([one.delta async for one in answer if one.type == kind])

    return call


def _anthropic(body: dict[str, Any], stream: bool) -> Call:
    from anthropic import AsyncAnthropic  # noqa: PLC0415

    client = AsyncAnthropic()

    async def call() -> str:
        answer = await client.messages.create(**body)
        if not stream:
            return str(answer.content[0].text)
        kind = "content_block_delta"
        return "".join([one.delta.text async for one in answer if one.type == kind])

    return call


def _google(body: dict[str, Any], stream: bool) -> Call:
    from google import genai  # noqa: PLC0415

    client = genai.Client(http_options={"base_url": os.environ["GEMINI_BASE_URL"]}).aio.models
    kept = ("systemInstruction", "tools", "toolConfig")
    config = {name: body[name] for name in kept} | body["generationConfig"]
    given: Any = {"model": "tiny", "contents": body["contents"], "config": config}

    async def call() -> str:
        if not stream:
            return str((await client.generate_content(**given)).text)
        events = await client.generate_content_stream(**given)
        return "".join([one.text or "" async for one in events])

    return call


def _bedrock(body: dict[str, Any], stream: bool) -> Call:
    from botocore.session import get_session  # noqa: PLC0415

    address = os.environ["AWS_ENDPOINT_URL_BEDROCK_RUNTIME"]
    client = get_session().create_client("bedrock-runtime", "us-east-1", endpoint_url=address)

    async def call() -> str:
        if not stream:
            answer = client.converse(modelId="tiny", **body)
            return str(answer["output"]["message"]["content"][0]["text"])
        events = client.converse_stream(modelId="tiny", **body)["stream"]
        deltas = [one["contentBlockDelta"]["delta"] for one in events if "contentBlockDelta" in one]
        return "".join(one.get("text", "") for one in deltas)

    return call


async def spent(call: Call, calls: int) -> float:
    """Return the milliseconds of this process's CPU for one call."""
    began = time.process_time()
    for _ in range(calls):
        await call()
    return (time.process_time() - began) * 1000 / calls


async def pairs(provider: str, calls: int, count: int) -> list[dict[str, Any]]:
    """Measure a provider whole and streamed; raise where both do not read the same."""
    found = []
    models = Models()
    for stream in (False, True):
        request = request_of(provider, stream=stream)
        ours, sdk = our_call(models, request), sdk_call(provider, request)
        if await ours() != await sdk():
            raise RuntimeError(f"{provider}: the texts differ")
        await spent(ours, WARM_UP)
        await spent(sdk, WARM_UP)
        for number in range(count):
            order = (ours, sdk) if number % 2 else (sdk, ours)
            cost = {one: await spent(one, calls) for one in order}
            found.append({
                "provider": provider,
                "answer": "streamed" if stream else "whole",
                "ours_ms": cost[ours],
                "sdk_ms": cost[sdk],
                "ratio": cost[sdk] / cost[ours],
            })  # fmt: skip
    await models.aclose()
    return found


async def measure(report: Report, args: argparse.Namespace) -> None:
    """Measure every provider on one event loop, which their clients belong to."""
    for provider in args.providers:
        for row in await pairs(provider, args.calls, args.pairs):
            report.add(row)


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__)
    options.add_argument("--calls", type=int, default=100)
    options.add_argument("--pairs", type=int, default=7)
    options.add_argument("--providers", nargs="+", default=PROVIDERS, choices=PROVIDERS)
    args = options.parse_args()
    report = begin("providers", args)
    with model("0") as served:
        os.environ |= environment_of(served.url.removesuffix("/v1")) | SIGNED
        del os.environ["AWS_BEARER_TOKEN_BEDROCK"]  # botocore sends none without TLS
        asyncio.run(measure(report, args))
    columns = [
        Column("provider", "provider"),
        Column("answer", "answer"),
        Column("ours, ms", "ours_ms", digits=2, spread=True),
        Column("SDK, ms", "sdk_ms", digits=2, spread=True),
        Column("SDK / ours", "ratio", digits=1, spread=True),
    ]
    show("CPU of one model call", report.rows, ("provider", "answer"), columns)
    finish(report, args, list)


if __name__ == "__main__":
    main()
