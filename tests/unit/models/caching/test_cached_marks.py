"""Where a step says that its answer came from the response cache."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console
from support.runs.agent_records import a_step
from support.runs.seen_steps import a_claim, a_verdict, an_attempt

from stepfleet.orchestrator import (
    AgentRunResult,
    ContinuationCriteria,
    Lifecycle,
    LLMResponse,
    LoggedStep,
    StepResult,
    UsageStats,
)
from stepfleet.orchestrator.cli.operate import statistics_picture
from stepfleet.orchestrator.cli.trace import trace
from stepfleet.orchestrator.events.domain_events import AgentStepCompleted, from_envelope
from stepfleet.orchestrator.models.caching import statistics_of
from stepfleet.orchestrator.protocol.attempt import Answered, Span
from stepfleet.orchestrator.protocol.commit_events import events_of
from stepfleet.orchestrator.protocol.verdict import Facts, decide
from stepfleet.orchestrator.records.run.report import described
from stepfleet.orchestrator.records.usage import CacheUse
from stepfleet.worker.telemetry.metrics import Metrics
from stepfleet.worker.telemetry.span_plans import spans_of

KEY = "ab" * 32
HIT = CacheUse(key=KEY, hit=True, saved_tokens=15, saved_usd=0.25)
ONE_HIT = UsageStats(cached_calls=1)
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def printed(what: Any) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(what)
    return captured.get()


def answered(use: CacheUse | None, usage: UsageStats | None) -> Answered:
    claim = a_claim()
    response = LLMResponse(content="yes", usage=usage, cache=use)
    return Answered(Span(claim.now, 0.5), response)


def logged(use: CacheUse | None, usage: UsageStats | None) -> StepResult:
    claim = a_claim()
    verdict = decide(claim, answered(use, usage), ContinuationCriteria(), Facts(claim.now))
    assert verdict.logged
    return verdict.logged.result


@pytest.mark.parametrize("made", [None, CacheUse(key=KEY)])
def test_a_call_that_was_made_counts_as_a_call(made: CacheUse | None) -> None:
    """CACHE-09"""
    step = logged(made, UsageStats(total_tokens=15))
    assert (step.cached, step.cache) == (False, made)
    assert step.usage == UsageStats(total_tokens=15, llm_calls=1)


def test_a_hit_counts_apart_from_calls() -> None:
    """CACHE-09, COST-13"""
    step = logged(HIT, ONE_HIT)
    assert (step.cached, step.cache) == (True, HIT)
    assert (step.usage, step.usage_reported, step.cost_usd) == (ONE_HIT, True, 0)


def test_what_comes_of_a_hit_too_late_was_not_paid_for() -> None:
    claim = a_claim()
    for use, ambiguous in ((HIT, False), (None, True)):
        verdict = decide(claim, answered(use, None), ContinuationCriteria(), Facts(claim.now))
        assert verdict.dropped
        assert verdict.dropped.ambiguous is ambiguous


def test_cached_calls_are_added_and_taken_back_like_all_counts() -> None:
    """CACHE-09"""
    two = ONE_HIT + UsageStats(cached_calls=1, llm_calls=3)
    assert two == UsageStats(cached_calls=2, llm_calls=3)
    assert two - ONE_HIT == UsageStats(cached_calls=1, llm_calls=3)


def test_records_without_a_cache_are_written_as_before() -> None:
    """CACHE-01"""
    step = logged(None, UsageStats(total_tokens=15))
    assert "cache" not in step.to_dict()
    assert "cached_calls" not in step.to_json()
    assert "cache" not in LLMResponse(content="x").to_dict()
    again = StepResult.from_json(logged(HIT, ONE_HIT).to_json())
    assert (again.cache, again.usage) == (HIT, ONE_HIT)


def test_events_tell_it_where_they_tell_usage() -> None:
    """CACHE-09"""
    claim = a_claim()
    told = {}
    for use, usage in ((HIT, ONE_HIT), (None, UsageStats(total_tokens=15))):
        attempt = answered(use, usage)
        verdict = decide(claim, attempt, ContinuationCriteria(), Facts(claim.now))
        event = events_of(claim, attempt, verdict, Facts(claim.now))[1]
        told[use] = event.payload
    assert (told[HIT]["cached"], told[HIT]["usage"]["cached_calls"]) == (True, 1)
    assert "cached" not in told[None]
    head = {
        "session_id": claim.run_id,
        "execution_id": "e",
        "timestamp": NOW.isoformat(),
        "type": "agent.step.completed",
    }
    completed, reported = from_envelope({**head, "payload": told[HIT]})
    assert isinstance(completed, AgentStepCompleted)
    assert completed.cached
    assert getattr(reported, "usage", None) == ONE_HIT


def test_a_run_in_words_says_which_steps_were_cached_and_what_that_saved() -> None:
    """CACHE-09"""
    result = AgentRunResult(
        run_id="r1",
        agent_name="solver",
        lifecycle=Lifecycle.COMPLETED,
        start_time=NOW,
        max_iterations=10,
        steps=(logged(None, UsageStats(total_tokens=15)), logged(HIT, ONE_HIT)),
        usage=UsageStats(total_tokens=15, llm_calls=1, cached_calls=1),
    )
    text = printed(trace(result, {}, full=False))
    assert "final_response, 0.5 s, 15 tokens\n" in text
    assert "final_response, 0.5 s, cached (saved 15 tokens, $0.2500)\n" in text
    assert "15 tokens (0 prompt, 0 completion), $0.00, 1 cached (saved $0.2500)" in text
    assert result.saved_usd == 0.25
    assert result.explain().count("0 tokens (cached)") == 1
    assert "15 tokens, 1 calls, 0.000000 USD, 1 cached" in str(result.debug())
    assert "ms, cached)" in described(logged(HIT, ONE_HIT))
    assert "cached" not in described(logged(None, None))


def test_spans_and_metrics_say_it() -> None:
    """CACHE-09, OBS-02"""
    verdict = a_verdict(logged=True)
    hit = replace(verdict, logged=LoggedStep(result=a_step(1, cache=HIT)))
    steps = [plan.attributes for one in (verdict, hit) for plan in spans_of(an_attempt(one))]
    assert [one.get("stepfleet.cached") for one in steps] == [None, True]
    metrics = Metrics()
    for one, applied in ((verdict, True), (hit, True), (hit, False)):
        metrics.export(an_attempt(one, applied=applied))
    counted = metrics.registry.get_sample_value("stepfleet_cached_calls_total", {"agent": "clerk"})
    assert counted == 1


def test_statistics_are_a_row_per_model_and_one_for_all() -> None:
    """CACHE-08"""
    parts = [{"entries:openai:m": "2", "bytes:openai:m": "2048", "hits:openai:m": "3"}]
    text = printed(statistics_picture(statistics_of(parts, 1 << 20)))
    assert "openai:m" in text
    assert "100% hits; room for 1,048,576 bytes" in " ".join(text.split())
