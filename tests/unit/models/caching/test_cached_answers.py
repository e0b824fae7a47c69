"""Which answers the response cache keeps, and what it gives back."""

import pytest

from stepfleet.orchestrator import FinishReason, LLMResponse, ToolCall, UsageStats
from stepfleet.orchestrator.models.caching import answer_of, entry_of, is_keepable, marked
from stepfleet.orchestrator.records.responses import OutputFormat
from stepfleet.orchestrator.records.usage import CacheUse

KEY = "ab" * 32
USED = UsageStats(prompt_tokens=10, completion_tokens=5, total_tokens=15, llm_calls=1)
CALLS = (ToolCall(id="c1", name="look", arguments={"what": "sun"}),)
ANSWER = LLMResponse(content="It shines.", usage=USED, model="m-1", raw={"id": "x"})


def price(model: str, usage: UsageStats, tier: str) -> float:
    per_token = {"m-1": 0.01, "openai:m": 0.1}[model]
    return per_token * usage.total_tokens * (0.5 if tier == "flex" else 1)


def asks(call: ToolCall) -> LLMResponse:
    return LLMResponse(tool_calls=(call,), finish_reason=FinishReason.TOOL_CALLS)


@pytest.mark.parametrize("answer", [ANSWER, asks(CALLS[0])])
def test_whole_answers_are_kept(answer: LLMResponse) -> None:
    """CACHE-04"""
    assert is_keepable(answer)


@pytest.mark.parametrize(
    "answer",
    [
        *(
            LLMResponse(content="It", finish_reason=one)
            for one in FinishReason
            if one not in (FinishReason.STOP, FinishReason.TOOL_CALLS)
        ),
        LLMResponse(content="  "),
        asks(CALLS[0].model_copy(update={"error": "the arguments are no JSON"})),
    ],
)
def test_answers_that_were_cut_filtered_empty_or_unreadable_are_not_kept(
    answer: LLMResponse,
) -> None:
    """CACHE-07"""
    assert not is_keepable(answer)


@pytest.mark.parametrize(
    ("content", "keepable"),
    [
        ('{"sum": 3}', True),
        ('{"sum": "3"}', False),
        ("{", False),
        ("[" * 99_999, False),
        ("", False),
    ],
)
def test_json_is_kept_where_it_is_what_was_asked_for(content: str, keepable: bool) -> None:
    """CACHE-07"""
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}}
    answer = LLMResponse(content=content)
    assert is_keepable(answer, OutputFormat(json_schema=schema)) is keepable
    assert is_keepable(asks(CALLS[0]), OutputFormat(json_schema=schema))
    assert is_keepable(LLMResponse(content="[1]"), OutputFormat())


def test_an_answer_comes_back_marked_without_tokens_and_with_what_it_saved() -> None:
    """CACHE-04, CACHE-09, COST-13"""
    given = answer_of(entry_of(marked(ANSWER, KEY)), KEY, "openai:m", price)
    assert given is not None
    assert (given.content, given.model) == (ANSWER.content, ANSWER.model)
    assert given.usage == UsageStats(cached_calls=1)
    assert given.cache == CacheUse(key=KEY, hit=True, saved_tokens=15, saved_usd=0.15)


def test_an_answer_has_saved_what_its_tier_costs() -> None:
    """LANE-01"""
    flex = ANSWER.model_copy(update={"service_tier": "flex"})
    given = answer_of(entry_of(flex), KEY, "openai:m", price)
    assert given is not None
    assert given.cache is not None
    assert (given.service_tier, given.cache.saved_usd) == ("flex", 0.075)


def test_an_answer_without_usage_or_model_saves_what_is_known() -> None:
    """COST-13"""
    unreported = answer_of(entry_of(ANSWER.model_copy(update={"usage": None})), KEY, "", price)
    assert unreported is not None
    assert unreported.cache == CacheUse(key=KEY, hit=True)
    unnamed = answer_of(entry_of(ANSWER.model_copy(update={"model": ""})), KEY, "openai:m", price)
    assert unnamed is not None
    assert unnamed.cache is not None
    assert unnamed.cache.saved_usd == 1.5


def test_tool_calls_come_back_as_they_were() -> None:
    """CACHE-04"""
    asked = asks(CALLS[0])
    given = answer_of(entry_of(asked), KEY, "openai:m", price)
    assert given is not None
    assert (given.tool_calls, given.finish_reason) == (asked.tool_calls, asked.finish_reason)


def test_an_entry_holds_the_answer_and_nothing_of_the_payload() -> None:
    entry = entry_of(marked(ANSWER, KEY))
    assert KEY not in entry
    assert '"raw"' not in entry


@pytest.mark.parametrize("entry", ["", "{", '{"content":"x","of_a_newer_version":1}', "[]"])
def test_an_entry_that_cannot_be_read_is_none(entry: str) -> None:
    assert answer_of(entry, KEY, "openai:m", price) is None


def test_a_call_that_was_made_is_marked_as_no_hit() -> None:
    """CACHE-09"""
    made = marked(ANSWER, KEY)
    assert made.cache == CacheUse(key=KEY)
    assert made.usage == USED
