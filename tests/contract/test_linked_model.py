"""Runs that wait for runs and people against a plain model of it, and bugs that it must find.

Beside the operations of the protocol: children, followers, answers, debts, time limits, requests.
"""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from support.protocol.linked import LinkedMachine, LinksAlone
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
OPERATIONS = {"create child", "follow", "answer", "settled", "asks", "take", "leave", "retry"}

MUTATIONS = {
    "an answer to another key counts": Mutation(
        "answer", "h.step == ARGV[2] and j[1] == ARGV[4]", "h.step == ARGV[2]"
    ),
    "the second answer counts": Mutation(
        "answer", "if mine and j[2] then return { 'before', j[2] } end", ""
    ),
    "an ended run takes answers": Mutation(
        "answer", "if TERMINAL[h.status] or not mine", "if not mine"
    ),
    "an answered call stays in the index": Mutation(
        "answer", "redis.call('ZREM', shard .. 'asks', ask_of(ARGV[2], index))\n", ""
    ),
    "who looked after a call puts it off behind its answer": Mutation(
        "answer", "'o:', 'l:', 's:',", "'l:', 's:',"
    ),
    "who looked after a call counts as one that began it": Mutation(
        "answer", "'s:', 'c:', 'x:'", "'c:', 'x:'"
    ),
    "an answered call waits for its time": Mutation("answer", "{ 'n:', 't:',", "{ 't:',"),
    "an answer makes a run due that still waits": Mutation(
        "answer", "then left[#left + 1] = call end", "then left[0] = call end"
    ),
    "an answer wakes a paused run": Mutation(
        "answer", "if h.status == 'paused' then return { 'delivered', #left, h.status } end", ""
    ),
    "a question is in no index": Mutation(
        "park", "if is_ask then\n    redis.call('ZADD'", "if false then\n    redis.call('ZADD'"
    ),
    "a worker looks after a question at once": Mutation(
        "park", "digits(is_ask and till or math.min(soon, till))", "digits(math.min(soon, till))"
    ),
    "a call waits for a run that nobody starts": Mutation(
        "park", "messages[#messages + 1] = { KEYS[3 + i], message }\n    elseif", "elseif"
    ),
    "a call that waits no more stays in the index": Mutation(
        "unask", "return redis.call('ZREM', shard .. 'asks', ask_of(ARGV[2], ARGV[3]))", "return 0"
    ),
    "an end is owed to nobody": Mutation(
        "common", "  owe(a.returns, now, batch", "  local _ = (batch"
    ),
    "an end behind a commit is owed to nobody": Mutation(
        "commit", "created, returns or ''", "created, ''"
    ),
    "what is owed is dispatched once": Mutation(
        "rescue",
        "elseif owes(h.status, h.returns, h.reach) then",
        "elseif false then",
    ),
    "what is owed waits for the end of the fleet's pause": Mutation(
        "rescue", "not is_open and owes(h.status, h.returns, h.reach) and owing", "nil"
    ),
    "a logged end forgets the runs that its step has waited for": Mutation(
        "commit", "  elseif orphans ~= '' then\n", "  elseif false then\n"
    ),
    "a person decides behind the time limit": Mutation(
        "answer", "if now_ms() >= till then", "if false then"
    ),
    "who leaves a call puts off the look that a resume has asked for": Mutation(
        "leave", "if number(due[1]) < number(due[2]) then", "if false then"
    ),
    "a call that is looked after is not looked at behind a resume": Mutation(
        "common", "call[2] == '@run' or not owner", "not owner"
    ),
    "a child owes its end to nobody": Mutation(
        "create", "if a.returns == '1' then", "if false then"
    ),
    "a settled run stays due": Mutation(
        "settled", "and not owes then redis.call('ZREM', due_key, run_id) end", "and false then end"
    ),
    "a run that has gone on is settled": Mutation(
        "settled", "local is_read = (h.seq or '0') == ARGV[3]", "local is_read = true"
    ),
    "runs stay paused below one that went on meanwhile": Mutation(
        "settled", "ARGV[2] == 'pause' and", "false and"
    ),
    "what a retried run owes expires": Mutation(
        "retry", "  redis.call('PERSIST', run_key .. ':returns')\n", ""
    ),
    "a cancel does not reach the runs below": Mutation("cancel", "  reach('cancel', now)\n", ""),
    "a pause does not reach the runs below": Mutation("pause", "  reach('pause', now)\n", ""),
    "a pause at the wait does not reach the runs below": Mutation(
        "park", "  reach('pause', now)\n", ""
    ),
    "a resume leaves the pause to be passed on": Mutation(
        "resume", "'reach', 'paused_by')", "'paused_by')"
    ),
    "a retry leaves the cancel to be passed on": Mutation(
        "retry", "'reach',\n  'orphans', 'hinted')", "'hinted')"
    ),
    "a resume looks after questions at once": Mutation("resume", "ASKS[call[2]] and till or", ""),
}


@pytest.mark.timeout(300)
def test_links_between_runs_keep_the_invariants(redis_server: RedisServer) -> None:
    """MULTI-04, MULTI-07, MULTI-08: an answer counts once, and nothing that is owed is lost."""
    with rig(redis_server.unix_url) as shared:
        run_until_all(shared, GATE, OPERATIONS, LinksAlone)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", [LinksAlone, LinkedMachine])
def test_links_amid_other_operations_keep_the_invariants(
    kind: type[LinkedMachine], redis_server: RedisServer
) -> None:
    """Other examples in each run, and longer ones."""
    with rig(redis_server.unix_url) as shared:
        run_machine(shared, SOAK, kind)
    assert shared.told.keys() >= OPERATIONS


def test_the_seeded_bugs_of_links_fit_the_scripts() -> None:
    for mutation in MUTATIONS.values():
        assert mutation.old != mutation.new
        texts_with(mutation)


@pytest.mark.long
@pytest.mark.timeout(3600)  # only ends a search that hangs
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_model_finds_a_seeded_bug_of_links(
    name: str,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    seeded = texts_with(MUTATIONS[name])
    monkeypatch.setattr(lua, "source", seeded.__getitem__)
    monkeypatch.setattr(lua, "digest", lua.digest.__wrapped__)
    with rig(redis_server.unix_url) as shared, pytest.raises(AssertionError) as found:
        run_machine(shared, SEARCH, LinksAlone)
    record_property("examples", shared.examples)
    record_property("operations", shared.operations)
    assert shared.operations > 0, found.value
