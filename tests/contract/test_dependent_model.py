"""Runs that begin behind others against a plain model of it, and bugs that it must find."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from support.protocol.dependents import DependentMachine, DependentsAlone
from support.protocol.machine import run_machine, run_until_all
from support.protocol.mutations import SEARCH, Mutation, texts_with
from support.protocol.rig import rig
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator.store import lua

GATE = settings(
    max_examples=12,
    stateful_step_count=40,
    deadline=None,
    database=None,
    derandomize=True,
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
SOAK = settings(GATE, max_examples=1_500, stateful_step_count=60, derandomize=False)
OPERATIONS = {
    *("create behind", "follow", "arrived", "look later", "wait again", "begin", "purge"),
    *("end without a step", "tell of an end"),
}

MUTATIONS = {
    "a run behind others may begin at once": Mutation(
        "create", "if a.after then\n", "if false then\n"
    ),
    "a resume lets a run begin": Mutation(
        "common", "elseif is_on(wait) and wait.reason ~= 'runs' then", "elseif is_on(wait) then"
    ),
    "a retry lets a run begin": Mutation(
        "retry", "if waits then set_wait(run_key, { reason = 'runs', since = now }) end\n", ""
    ),
    "a retry knows the ends from before": Mutation(
        "retry", "local waits = redis.call('HEXISTS', run_key, 'after') == 1", "local waits = false"
    ),
    "a retry waits for one of the runs only": Mutation(
        "retry",
        "redis.call('HINCRBY', run_key, 'ahead', '1')",
        "redis.call('HSET', run_key, 'ahead', 1)",
    ),
    "a claim does not tell that a run is to be looked at": Mutation(
        "claim", "return { 'early', AN_HOUR, 'owed' }", "return { 'early', AN_HOUR, '' }"
    ),
    "an end counts as often as it is told": Mutation(
        "arrived",
        "if redis.call('HSETNX', journal_key, 'd:' .. ARGV[2], '1') == 0 then",
        "if redis.call('HSETNX', journal_key, 'd:' .. ARGV[2], '1') == 9 then",
    ),
    "the first of several ends is enough": Mutation("arrived", "if left <= 0 and", "if"),
    "an end makes a paused run due": Mutation("arrived", " and h.status ~= 'paused' then", " then"),
    "an end is no news to a run that was put off": Mutation(
        "arrived", "  redis.call('ZADD', due_key, digits(now_ms()), run_id)\n", ""
    ),
    "nobody is told of the last end": Mutation("arrived", "  push(ARGV[3])\n", ""),
    "a run that was looked at often is dispatched late": Mutation(
        "arrived", "  redis.call('HSET', run_key, 'dispatches', 0)\n", ""
    ),
    "an ended run is told of ends": Mutation(
        "arrived", "TERMINAL[h.status] or not h.after", "not h.after"
    ),
    "a run that has begun is told of ends": Mutation(
        "arrived", "TERMINAL[h.status] or not h.after", "TERMINAL[h.status]"
    ),
    "who read a run before its retry lets it begin": Mutation("begin", " or h.seq ~= ARGV[2]", ""),
    "who looks does not see that all have ended": Mutation(
        "begin", "  if number(h.ahead) <= 0 then return { 'ready' } end\n", ""
    ),
    "nobody looks again": Mutation(
        "begin",
        "  redis.call('ZADD', due_key, digits(now + number(a.later)), run_id)",
        "  redis.call('ZREM', due_key, run_id)",
    ),
    "one that goes on is not waited for again": Mutation(
        "begin",
        "redis.call('HINCRBY', run_key, 'ahead', '1')",
        "redis.call('HGET', run_key, 'ahead')",
    ),
    "one that goes on is waited for twice": Mutation(
        "begin",
        "if redis.call('HDEL', journal_key, 'd:' .. a.run) == 1 then",
        "redis.call('HDEL', journal_key, 'd:' .. a.run)\n  if true then",
    ),
    "one that goes on is still noted as ended": Mutation(
        "begin",
        "redis.call('HDEL', journal_key, 'd:' .. a.run) == 1",
        "redis.call('HEXISTS', journal_key, 'd:' .. a.run) == 1",
    ),
    "a run begins though one goes on": Mutation(
        "begin", "elseif number(h.ahead) > 0 then", "elseif false then"
    ),
    "a run begins without its input": Mutation(
        "begin", "  redis.call('HSET', log_key, 'input:0', a.input)\n", ""
    ),
    "a run begins twice": Mutation(
        "begin", "  redis.call('HDEL', run_key, 'after', 'ahead')\n", ""
    ),
    "the first step finds notes of ends in its journal": Mutation(
        "begin", "  redis.call('DEL', journal_key)\n", ""
    ),
    "a run that may begin is due in an hour": Mutation(
        "begin",
        "  redis.call('ZADD', due_key, digits(now + number(a.grace)), run_id)\n",
        "",
    ),
    "nobody is told that a run may begin": Mutation("begin", "  push(a.message)\n", ""),
    "a run that may begin can never be claimed": Mutation("begin", "  end_wait(run_key)\n", ""),
    "a follower is not noted": Mutation("follow", "redis.call('SADD', key, ARGV[2])\n", ""),
    "the end of a run with followers is owed to nobody": Mutation(
        "follow", "redis.call('HSET', run_key, 'returns', '1')\n", ""
    ),
    "an ended run is followed": Mutation(
        "follow", "if TERMINAL[status] then return { 'ended', status } end\n", ""
    ),
    "a run that was removed is followed": Mutation(
        "follow", "if not status then return { 'unknown' } end\n", ""
    ),
    "a run with other followers is settled": Mutation(
        "settled", "if left == 0 then redis.call", "if true then redis.call"
    ),
    "a run that owes others its end is not due": Mutation(
        "settled", "(TERMINAL[h.status] and left > 0)", "false"
    ),
    "a claim does not tell that an end is owed": Mutation(
        "claim", "return { 'ended', status, owed }", "return { 'ended', status, '' }"
    ),
    "a commit does not tell that an end is owed": Mutation("commit", "owes and 'owed' or ''", "''"),
    "a run is removed before others know of its end": Mutation(
        "purge", "if h.reach or (h.returns == '1' and", "if false and (h.returns == '1' and"
    ),
}

QUICK = {
    *("the first of several ends is enough", "a run begins twice", "a follower is not noted"),
    "a claim does not tell that an end is owed",
}
"""Seeded bugs that are found in the gate, too; each takes a few examples."""


@pytest.mark.timeout(300)
def test_runs_behind_others_keep_the_invariants(redis_server: RedisServer) -> None:
    """MULTI-04: a run begins once, behind the ends of all before it, and never waits for none."""
    with rig(redis_server.unix_url) as shared:
        run_until_all(shared, GATE, OPERATIONS, DependentsAlone)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", [DependentsAlone, DependentMachine])
def test_runs_behind_others_amid_other_operations_keep_the_invariants(
    kind: type[DependentMachine], redis_server: RedisServer
) -> None:
    """Other examples in each run, and longer ones."""
    with rig(redis_server.unix_url) as shared:
        run_machine(shared, SOAK, kind)
    assert shared.told.keys() >= OPERATIONS


def test_the_seeded_bugs_of_waiting_runs_fit_the_scripts() -> None:
    for mutation in MUTATIONS.values():
        assert mutation.old != mutation.new
        texts_with(mutation)


@pytest.mark.timeout(3600)  # only ends a search that hangs
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.long] * (one not in QUICK)) for one in MUTATIONS]
)
def test_the_model_finds_a_seeded_bug_of_waiting_runs(
    name: str,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    seeded = texts_with(MUTATIONS[name])
    monkeypatch.setattr(lua, "source", seeded.__getitem__)
    monkeypatch.setattr(lua, "digest", lua.digest.__wrapped__)
    with rig(redis_server.unix_url) as shared, pytest.raises(AssertionError) as found:
        run_machine(shared, SEARCH, DependentsAlone)
    record_property("examples", shared.examples)
    record_property("operations", shared.operations)
    assert shared.operations > 0, found.value
