"""What of a run's prompts each service finds in its prompt cache, by the service's own rule."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from stepfleet.orchestrator import Message, ModelRequest, ModelSettings, ToolSpec
from stepfleet.orchestrator.models.services import environment_of
from stepfleet.orchestrator.records.usage import UsageStats
from stepfleet.worker.models import Models
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import (
    Prompt,
    PromptCache,
    Reply,
    ToolCallReply,
    Usage,
    automatic,
    marked,
)
from stepfleet.worker.testing.server import ModelServer

PROVIDERS = ("openai", "openai-responses", "anthropic", "google", "bedrock")
MARKED = ("anthropic", "bedrock")
MODEL = "claude-sonnet-4-5"
STEPS = 20
LOOK = ToolSpec(name="look", description="Look.", parameters={"type": "object", "properties": {}})
SYSTEM = Message.system("You look things up in the catalogue and answer briefly. " * 110)


def rules(request: RequestRecord) -> Reply:
    call = ToolCallReply("look", {"page": request.turn})
    return Reply("Let me see.", (call, call), reasoning="Hm.")


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer(rules) as running:
        yield running


async def run(provider: str, server: ModelServer, **settings: Any) -> list[UsageStats]:
    """Return the usage of each of 20 steps, in which each call is answered with 800 characters."""
    models = Models(environment=environment_of(server.url.removesuffix("/v1")))
    talk: tuple[Message, ...] = (SYSTEM, Message.user("How many lamps are there?"))
    counts: list[UsageStats] = []
    for step in range(STEPS):
        answer = await models.generate(
            ModelRequest(
                model=f"{provider}:{MODEL}",
                messages=talk,
                tools=(LOOK,),
                settings=ModelSettings.model_validate(settings),
            )
        )
        calls = answer.tool_calls or ()
        results = (Message.tool(call, f"{step}: " + "a row of it " * 66) for call in calls)
        talk = (*talk, Message.assistant(answer.as_content, calls), *results)
        assert answer.usage is not None
        counts.append(answer.usage)
    await models.aclose()
    return counts


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_over_20_steps_most_of_the_prompts_are_read_from_the_cache(
    provider: str, server: ModelServer
) -> None:
    counts = await run(provider, server)
    assert server.violations == ()
    cached = [one.cached_tokens for one in counts]
    assert cached[0] == 0
    assert all(later > earlier for earlier, later in pairwise(cached))
    share = sum(cached) / sum(one.prompt_tokens for one in counts)
    assert share >= 0.88, f"{provider}: {share:.1%} of the prompt tokens were read"
    if provider in MARKED:  # each token of a prompt's beginning is written once
        last = counts[-1]
        assert sum(one.cache_write_tokens for one in counts) <= last.prompt_tokens
        assert last.cached_tokens + last.cache_write_tokens >= last.prompt_tokens - 1


@pytest.mark.parametrize("provider", MARKED)
async def test_without_marks_nothing_is_cached(provider: str, server: ModelServer) -> None:
    counts = await run(provider, server, prompt_cache=False)
    assert {(one.cached_tokens, one.cache_write_tokens) for one in counts} == {(0, 0)}


NOTHING = Usage(0, 0)
BLOCK = b"x" * 4096  # 1,024 tokens


def read(cache: PromptCache, prompt: Prompt, now: float = 0.0) -> tuple[int, int]:
    usage = cache.usage(prompt, NOTHING, now)
    cache.keep(prompt, now)
    return usage.cached_tokens, usage.cache_write_tokens


def test_a_marked_beginning_lives_5_minutes_after_its_last_use_for_its_model_alone() -> None:
    cache, prompt = PromptCache(), marked("m", [(BLOCK, True), (b"tail", False)])
    assert read(cache, prompt, 0) == (0, 1024)
    assert read(cache, prompt, 299) == (1024, 0)
    assert read(cache, prompt, 598) == (1024, 0)
    assert read(cache, marked("other", [(BLOCK, True)]), 598) == (0, 1024)
    assert read(cache, prompt, 898) == (0, 1024)


def test_a_marked_beginning_below_1024_tokens_is_not_cached() -> None:
    cache, short = PromptCache(), marked("m", [(BLOCK[:-1], True)])
    assert [read(cache, short) for _ in range(2)] == [(0, 0), (0, 0)]


@pytest.mark.parametrize(("between", "expected"), [(20, 1024), (21, 0)])
def test_a_mark_finds_what_ends_at_most_20_blocks_before_it(between: int, expected: int) -> None:
    cache = PromptCache()
    read(cache, marked("m", [(BLOCK, True)]))
    blocks = [(BLOCK, False), *[(b"y", False)] * (between - 1), (b"y", True)]
    assert read(cache, marked("m", blocks))[0] == expected


@pytest.mark.parametrize(("tokens", "expected"), [(1023, 0), (1151, 1024), (1152, 1152)])
def test_an_automatic_beginning_has_1024_tokens_and_steps_of_128(
    tokens: int, expected: int
) -> None:
    cache = PromptCache()
    text = b"z" * 4 * tokens
    assert read(cache, automatic("m", text)) == (0, 0)
    assert read(cache, automatic("m", text + b"more"))[0] == expected
    assert read(cache, automatic("m", b"!" + text))[0] == 0
