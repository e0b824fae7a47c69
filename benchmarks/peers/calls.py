"""One chat completion, as peers make it that bring no model client of their own.

`own` is the OpenAI SDK, which their documentation uses. `fast` is a plain POST: by aiohttp in an
event loop, by urllib3 in threads.
"""

import functools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import job as jobs

Message = dict[str, Any]
PACKAGES = {"own": "openai", "fast": "urllib3"}


def sync_call(job: jobs.Job) -> Callable[[list[Message]], Message]:
    """Return the call for threads and processes."""
    return _sdk_call() if job.client == "own" else _urllib3_call(job)


def async_call(job: jobs.Job) -> Callable[[list[Message]], Awaitable[Message]]:
    """Return the call for the running event loop."""
    return _async_sdk_call() if job.client == "own" else _aiohttp_call(job)


def _sdk_call() -> Callable[[list[Message]], Message]:
    from openai import OpenAI  # noqa: PLC0415 - only for this client

    client = OpenAI()

    def call(messages: list[Message]) -> Message:
        answer = client.chat.completions.create(
            model=jobs.MODEL, messages=messages, tools=jobs.TOOLS
        )
        return jobs.answered(answer.choices[0].message.model_dump(mode="json"))

    return call


def _urllib3_call(job: jobs.Job) -> Callable[[list[Message]], Message]:
    import urllib3  # noqa: PLC0415 - only for this client

    pool = urllib3.PoolManager(maxsize=job.concurrency)
    post = functools.partial(pool.request, "POST", f"{job.model}/chat/completions")

    def call(messages: list[Message]) -> Message:
        answer = post(body=_body(messages), headers={"Content-Type": "application/json"})
        return _message(answer.status, answer.data)

    return call


def _async_sdk_call() -> Callable[[list[Message]], Awaitable[Message]]:
    from openai import AsyncOpenAI  # noqa: PLC0415 - only for this client

    client = AsyncOpenAI()

    async def call(messages: list[Message]) -> Message:
        answer = await client.chat.completions.create(
            model=jobs.MODEL, messages=messages, tools=jobs.TOOLS
        )
        return jobs.answered(answer.choices[0].message.model_dump(mode="json"))

    return call


def _aiohttp_call(job: jobs.Job) -> Callable[[list[Message]], Awaitable[Message]]:
    import aiohttp  # noqa: PLC0415 - only for this client

    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def call(messages: list[Message]) -> Message:
        headers = {"Content-Type": "application/json"}
        url = f"{job.model}/chat/completions"
        async with session.post(url, data=_body(messages), headers=headers) as answer:
            return _message(answer.status, await answer.read())

    return call


def _body(messages: list[Message]) -> bytes:
    return json.dumps({"model": jobs.MODEL, "messages": messages, "tools": jobs.TOOLS}).encode()


def _message(status: int, body: bytes) -> Message:
    if status != 200:  # noqa: PLR2004 - OK
        raise ConnectionError(f"the model answered {status}: {body[:200]!r}")
    return jobs.answered(json.loads(body)["choices"][0]["message"])
