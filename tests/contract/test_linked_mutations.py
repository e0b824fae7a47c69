"""Seeded bugs in the scripts of linked runs, approvals and hand-offs: a test finds each."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from support.documents.same_tests import borrowed
from support.runs.opened_runs import opened_run

from stepfleet.orchestrator.store import lua

TESTS = borrowed("test_linked_runs") | borrowed("test_handoffs")
QUESTION = "test_a_question_waits_in_the_index_and_the_first_answer_counts"
KEPT = "test_an_answer_during_a_pause_is_kept"
JOIN = "test_calls_for_runs_join_once_and_are_dispatched_at_once"
ENDS = "test_an_ended_run_stays_due_until_its_followers_know"
REQUESTS = "test_a_request_to_a_waiting_run_reaches_the_runs_it_has_started"
HELD = "test_a_held_run_that_is_cancelled_reaches_the_runs_it_waits_for"
NEXT = "test_the_next_step_is_the_other_agents_and_limits_stay"
CRASH = "test_a_crash_at_the_commit_hands_over_once"
BACK = "test_a_retry_takes_a_failed_step_with_its_hand_off_back"
GIVEN = {ENDS: {"how": "completed"}, NEXT: {}, BACK: {}, CRASH: {"point": "after-commit"}}
_HAND_OFF = "'agent', a.agent, 'config', a.config, 'overrides', a.overrides, 'model', a.model)"


@dataclass(frozen=True)
class Seeded:
    """A bug in the script `script`, and the test that finds it."""

    script: str
    old: str
    new: str
    test: str


BUGS = {
    "an answer with another key is taken": Seeded(
        "answer", "h.step == ARGV[2] and j[1] == ARGV[4]", "h.step == ARGV[2]", QUESTION
    ),
    "the second answer counts": Seeded(
        "answer", "if mine and j[2] then return { 'before', j[2] } end", "", QUESTION
    ),
    "an answered question stays in the index": Seeded(
        "answer", "redis.call('ZREM', shard .. 'asks', ask_of(ARGV[2], index))\n", "", QUESTION
    ),
    "an ended run takes answers": Seeded(
        "answer",
        "if TERMINAL[h.status] or not mine or not call_of(wait, index)",
        "if false",
        QUESTION,
    ),
    "an answer wakes a paused run": Seeded(
        "answer",
        "if h.status == 'paused' then return { 'delivered', #left, h.status } end",
        "",
        KEPT,
    ),
    "the first of two answers makes the run due": Seeded(
        "answer", "then left[#left + 1] = call end", "then left[0] = call end", JOIN
    ),
    "a question is in no index": Seeded(
        "park",
        "if is_ask then\n    redis.call('ZADD'",
        "if false then\n    redis.call('ZADD'",
        QUESTION,
    ),
    "an end is owed to nobody": Seeded("commit", "owe(a.returns, now,", "owe('', now,", ENDS),
    "a claim does not say what is owed": Seeded(
        "claim", "return { 'ended', status, owed }", "return { 'ended', status, '' }", ENDS
    ),
    "a settled run stays due": Seeded(
        "settled",
        "and not owes then redis.call('ZREM', due_key, run_id) end",
        "and false then end",
        ENDS,
    ),
    "one of two followers settles for both": Seeded(
        "settled", "(TERMINAL[h.status] and left > 0)", "false", ENDS
    ),
    "a follower is not noted": Seeded("follow", "redis.call('SADD', key, ARGV[2])\n", "", ENDS),
    "a cancel does not reach the runs below": Seeded(
        "cancel", "  reach('cancel', now)\n", "", REQUESTS
    ),
    "a pause does not reach the runs below": Seeded(
        "pause", "  reach('pause', now)\n", "", REQUESTS
    ),
    "a resume leaves the pause to be passed on": Seeded(
        "resume", "'reach', 'paused_by')", "'paused_by')", REQUESTS
    ),
    "a held run that is cancelled forgets the runs below": Seeded(
        "commit", "owes = seldom('reach', 'cancel', now) or owes", "local _", HELD
    ),
    "a hand-off is not committed": Seeded("commit", "if a.agent then", "if false then", NEXT),
    "a hand-off keeps the configuration of the agent before": Seeded(
        "commit", _HAND_OFF, "'agent', a.agent, 'overrides', a.overrides)", NEXT
    ),
    "a hand-off loses the run's limits": Seeded(
        "commit", _HAND_OFF, "'agent', a.agent, 'config', a.config, 'overrides', '{}')", NEXT
    ),
    "a hand-off whose commit is repeated is made by nobody": Seeded(
        "commit", "redis.call('HSET', log_key, at, a.log, by, at)", "local _", CRASH
    ),
    "a retry leaves the run with the agent of the failed hand-off": Seeded(
        "retry",
        "if a.agent then redis.call('HSET', run_key, 'agent', a.agent, 'config', a.config) end",
        "",
        BACK,
    ),
    "a retry takes the agent back and not its configuration": Seeded(
        "retry", "'agent', a.agent, 'config', a.config) end", "'agent', a.agent) end", BACK
    ),
    "a retry takes the agent back and not its overrides": Seeded(
        "retry", "'slim', a.slim, 'overrides', a.overrides,", "'slim', a.slim,", BACK
    ),
}


def seeded(bug: Seeded) -> dict[str, str]:
    """Return the script's text with the bug in it."""
    text = lua.source(bug.script)
    assert text.count(bug.old) == 1, f"{bug.script}: the bug does not fit any more"
    return {bug.script: text.replace(bug.old, bug.new)}


@pytest.mark.parametrize("name", BUGS)
async def test_a_seeded_bug_is_found(
    name: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MULTI-04, MULTI-07, MULTI-08"""
    bug, source = BUGS[name], lua.source
    texts = seeded(bug)
    monkeypatch.setattr(lua, "source", lambda script: texts.get(script) or source(script))
    monkeypatch.setattr(lua, "digest", lua.digest.__wrapped__)
    test: Callable[..., Any] = TESTS[bug.test]
    given: dict[str, Any] = {"opened": partial(opened_run, redis_url)}
    if bug.test in GIVEN:
        given = {**GIVEN[bug.test], "redis_url": redis_url}
    with pytest.raises((AssertionError, KeyError, ValueError)):
        await test(**given)
