"""The power of the protocol's model: bugs seeded in copies of the scripts must be found by it.

Each mutation is a small, plausible slip. The changed text is loaded only for its own test.
What limits a search is its number of examples, which a loaded machine does not change.
"""

from collections.abc import Callable

import pytest
from support.protocol.machine import run_machine
from support.protocol.mutations import SEARCH, Mutation, texts_with
from support.protocol.rig import rig
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator.store import lua

MUTATIONS = {
    "create makes a run twice": Mutation(
        "create",
        "  if known.made == a.made then return 'created' end\n",
        "",
    ),
    "claim does not read what is asked of a batch": Mutation(
        "claim", "local word, n = pending_request(flags[2], reached)", "local word, n"
    ),
    "claim begins a step while the fleet is paused": Mutation(
        "claim",
        "if flags[1] and wanted(want, word) ~= 'cancel' then return { 'paused' } end",
        "",
    ),
    "claim leaves a cancelled run of a paused fleet open": Mutation(
        "claim", "if flags[1] and wanted(want, word) ~= 'cancel' then", "if flags[1] then"
    ),
    "rescue leaves a cancelled run of a paused fleet to nobody": Mutation(
        "rescue", "h.want == 'cancel'", "false"
    ),
    "a step of a held batch goes on": Mutation(
        "commit",
        "if a.hold and seldom('newest_request', batch) <= number(a.hold) then want = 'pause' end\n",
        "",
    ),
    "a step waits for a resume of its batch that was": Mutation(
        "commit", " and seldom('newest_request', batch) <= number(a.hold) then", " then"
    ),
    "a resume of a batch is forgotten when all its runs know of it": Mutation(
        "common",
        "number(string.match(flags[1] or '', ' (%S+)$')), number(flags[2]))",
        "number(string.match(flags[1] or '', ' (%S+)$')), 0)",
    ),
    "commit does not read what is asked of a batch": Mutation(
        "commit", "want = wanted(want, word)", ""
    ),
    "renewal does not tell what is asked of a batch": Mutation(
        "journal", "wanted(word, (pending_request(flags[2], reached)))", "word"
    ),
    "rescue dispatches runs of a paused batch": Mutation(
        "rescue", "and word ~= 'resume'", "and false"
    ),
    "a request to a run does not come behind its batch's": Mutation(
        "common", "local _, n = flag_of(batch)", "local n"
    ),
    "an old request to a batch comes back": Mutation("flag", " or over >= number then", " then"),
    "an old request to a batch overrides a newer one": Mutation(
        "flag", "there > number or over", "over"
    ),
    "a sweep overrides what was asked of a run since": Mutation(
        "sweep", "and h.heard ~= n then", "then"
    ),
    "a repeated request is done again": Mutation(
        "common", "if whose == token then", "if false then"
    ),
    "a request's answer is not remembered": Mutation(
        "common",
        "redis.call('HSET', run_key, 'asked', table.concat(lines, '\\n'))",
        "",
    ),
    "a repeated cancel looks at the status first": Mutation(
        "cancel",
        "local known = answered(a.request)\nif known then return known end\n",
        "",
    ),
    "a repeated retry looks at the status first": Mutation(
        "retry",
        "local known = answered(a.request)\nif known then return known end\n",
        "",
    ),
    "a repeated pause pauses again": Mutation("pause", "if known then return known end\n", ""),
    "a repeated resume goes on again": Mutation("resume", "if known then return known end\n", ""),
    "a page leaves a step out": Mutation(
        "page", "read_part(number(ARGV[6])", "read_part(number(ARGV[6]) + 1"
    ),
    "a page leaves an entry of the journal out": Mutation(
        "page", "read_journal(ARGV, 7)", "read_journal(ARGV, 8)"
    ),
    "a page is refused to the owner of its step": Mutation("page", "~= ARGV[5]", "== ARGV[5]"),
    "create leaves a batch's counters to expire": Mutation(
        "create", "  seldom('go_on', a.batch)\n", ""
    ),
    "claim takes a step whose lease has not run out": Mutation(
        "claim",
        "if owner ~= '' and number(lease) > now then return",
        "if false then return",
    ),
    "claim runs ahead of a store that was rolled back": Mutation(
        "claim", "if wanted_step > step then return { 'ahead', step } end", ""
    ),
    "claim does a step again that was committed": Mutation(
        "claim", "if wanted_step < step then return { 'stale', step } end", ""
    ),
    "a vanished owner is not counted": Mutation(
        "common", "redis.call('HINCRBY', run_key, 'crashes', 1)", ""
    ),
    "claim does not wait for a retry's time": Mutation(
        "claim",
        "if wait.deadline > now then return { 'early', wait.deadline - now } end",
        "",
    ),
    "claim starts an ended run again": Mutation(
        "claim", "if TERMINAL[status] or status == 'paused' then", "if status == 'paused' then"
    ),
    "claim lets a late repetition own a step that nobody works on": Mutation(
        "claim",
        "if last_token == ARGV[3] or last_token == 'died:' .. ARGV[3] then",
        "if false then",
    ),
    "a call's owner whose death was counted is answered that its result was delivered": Mutation(
        "deliver", "if delivered and delivered ~= '-1' then", "if delivered then"
    ),
    "retry counts what a call had lost before": Mutation("retry", "^[ctxy]", "^[txy]"),
    "claim lets an owner whose death was counted own the step again": Mutation(
        "claim", " or last_token == 'died:' .. ARGV[3] then", " then"
    ),
    "an owner whose death was counted is answered that its commit was applied": Mutation(
        "died", "'last_token', 'died:' .. token", "'last_token', token"
    ),
    "claim leaves the old time in the index": Mutation(
        "claim", "redis.call('ZADD', due_key, till, run_id)", ""
    ),
    "an owner that writes late stays counted as lost": Mutation(
        "common",
        "if number(redis.call('HGET', key, crashes)) > 0 then "
        "redis.call('HINCRBY', key, crashes, -1) end",
        "",
    ),
    "a death that was seen is taken back": Mutation(
        "common",
        "if not how or string.match(how, '^[ac]') then return end",
        "if not how then return end",
    ),
    "a loss while a tool ran looks like one of a model call": Mutation(
        "common",
        "not known['o:' .. index] then return 't' end",
        "not known['o:' .. index] then end",
    ),
    "a loss in a process for suspects looks like any other": Mutation(
        "common", "if token == owner then return 'p' .. group end", ""
    ),
    "a finished tool makes its step suspect": Mutation(
        "common", "not known['r:' .. index] and not known['o:'", "not known['o:'"
    ),
    "take does not know a process for suspects": Mutation(
        "take", "token == j[1] and 'p' .. group or 't'", "'t'"
    ),
    "tried notes what another worker has": Mutation(
        "tried", "if owner ~= ARGV[3] or h.step ~= ARGV[2] then return 0 end", ""
    ),
    "died takes work from its owner": Mutation("died", "if owner ~= token then", "if false then"),
    "died does not give the work to others": Mutation("died", "push(ARGV[6])", ""),
    "died leaves a call to its dead owner": Mutation(
        "died", "'o:' .. index, '', 'n:'", "'o:' .. index, token, 'n:'"
    ),
    "retry keeps what is known of losses": Mutation("retry", "'^[ctxy]:?%d*$'", "'^[ct]:?%d*$'"),
    "journal writes for anybody": Mutation(
        "journal", "if token ~= ARGV[3] or at ~= ARGV[2] then", "if false then"
    ),
    "journal lets a tool start in a run that is to pause": Mutation(
        "journal", "if want == '' or string.sub", "if true or string.sub"
    ),
    "journal lets a tool start in a paused fleet": Mutation(
        "journal", "then want = 'pause' end", "then end"
    ),
    "journal does not renew the lease": Mutation(
        "journal", "'lease', till, 'elapsed'", "'elapsed'"
    ),
    "commit does not check the token": Mutation(
        "commit", "if token ~= ARGV[3] or at ~= ARGV[2] then", "if at ~= ARGV[2] then"
    ),
    "commit moves counters again when it is repeated": Mutation(
        "commit",
        "if last_token == ARGV[3] then return",
        "if last_token == ARGV[3] then count(batch, 'steps', 1) return",
    ),
    "commit does not know its own older token": Mutation(
        "commit",
        "if redis.call('HEXISTS', log_key, by) == 1 then return { 'mine', status, step } end",
        "",
    ),
    "commit keeps the journal": Mutation(
        "commit", "  redis.call('DEL', journal_key)\n  step = step + 1", "  step = step + 1"
    ),
    "commit keeps the crashes of the step before": Mutation(
        "commit", "'limited', '0', 'crashes', '0', 'logged'", "'limited', '0', 'logged'"
    ),
    "commit does not heed a cancel": Mutation(
        "commit",
        "if want == 'cancel' and a.want ~= 'cancel' then return { 'wanted', want } end",
        "",
    ),
    "a pause leaves the run in the index": Mutation(
        "common",
        "redis.call('ZREM', due_key, run_id)\n  relist(from, 'paused')",
        "relist(from, 'paused')",
    ),
    "commit keeps a dispatch count that delays the next rescue": Mutation(
        "commit", "'dispatches', '0', 'slim'", "'slim'"
    ),
    "finish leaves the run in the index": Mutation(
        "common", "redis.call('ZREM', due_key, run_id)\n  relist(from, a.", "relist(from, a."
    ),
    "finish lets the run live for ever": Mutation(
        "common", "return seldom('retain', a.retention)", "return"
    ),
    "finish lets a run expire before its batch is over": Mutation(
        "common", "if batch == '' then return seldom", "if batch ~= '0' then return seldom"
    ),
    "nobody looks at a batch whose last run has ended": Mutation(
        "common", " == 0 then return look_at_batch(batch, now) end", " == 0 then return end"
    ),
    "nobody looks at a batch that has begun anew": Mutation(
        "common", "  look_at_batch(batch, now_ms())\n", ""
    ),
    "a batch's runs stay for ever": Mutation(
        "expire", "return redis.call('PEXPIREAT', key, ARGV[2])", "return"
    ),
    "a batch's other runs expire though it goes on": Mutation(
        "expire", "return redis.call('PERSIST', key)", "return"
    ),
    "a run begins untold": Mutation("claim", "emit_status(status, 'in_progress')", ""),
    "a run that begins stays in the list of queued ones": Mutation(
        "claim", "relist(status, 'in_progress', created)", ""
    ),
    "a pause is not told": Mutation("common", "  emit_status(from, 'paused')\n", ""),
    "the end of a pause is not told": Mutation("resume", "emit_status('paused', to)", ""),
    "events have gaps": Mutation("common", "digits(last - n + 1)", "digits(last)"),
    "a replaced entry of the ledger is counted again": Mutation(
        "common",
        "if redis.call('HSET', lost_key, entry, text) == 1 then count(batch, 'lost', 1) end",
        "redis.call('HSET', lost_key, entry, text) count(batch, 'lost', 1)",
    ),
    "cancel ends a run that a worker holds": Mutation(
        "cancel", "if h.token ~= '' and number(h.lease) > now then", "if false then"
    ),
    "cancel waits for a worker whose lease ran out": Mutation(
        "cancel", "if h.token ~= '' and number(h.lease) > now then", "if h.token ~= '' then"
    ),
    "cancel does not list the attempt of a worker whose lease ran out": Mutation(
        "cancel", "if h.token ~= '' then vanish(h.batch, h.token, h.step, h.elapsed) end", ""
    ),
    "cancel does not list an answer that a lost worker paid for": Mutation(
        "common", "elseif owner ~= '' and redis.call", "elseif false and redis.call"
    ),
    "pause takes the step out of its worker's hands": Mutation(
        "pause",
        "h.token ~= '' and (number(h.lease) > now or h.want == 'cancel')",
        "false",
    ),
    "pause waits for a worker whose lease ran out": Mutation(
        "pause",
        "h.token ~= '' and (number(h.lease) > now or h.want == 'cancel')",
        "h.token ~= ''",
    ),
    "pause takes a cancel back that was asked for": Mutation(
        "pause", "(number(h.lease) > now or h.want == 'cancel')", "number(h.lease) > now"
    ),
    "resume goes on with an active run": Mutation(
        "resume",
        "if h.status ~= 'paused' then",
        "if h.status ~= 'paused' and h.want == 'pause' then",
    ),
    "retry leaves the tokens counted": Mutation(
        "retry", "count(batch, 'tokens', -number(a.tokens))", ""
    ),
    "retry leaves the stop reason counted": Mutation(
        "common",
        "count(batch, 'reason:' .. reason, -1)",
        "",
    ),
    "retry leaves the run among the ended ones": Mutation(
        "common", "redis.call('ZREM', batch_key(batch) .. ':ended', run_id)", ""
    ),
    "retry leaves the run in the list of its end": Mutation(
        "common", "relist(list_of(from, reason), to)", ""
    ),
    "retry leaves the run to expire": Mutation(
        "common",
        "redis.call('PERSIST', key) end",
        "end",
    ),
    "retry takes an older end for this one": Mutation(
        "retry", "if h.seq ~= a.expected then return { 'changed', h.step } end", ""
    ),
    "retry keeps the log of the step that it takes back": Mutation(
        "retry", "redis.call('HDEL', log_key, i)", ""
    ),
    "rescue floods a long queue": Mutation(
        "rescue", "ARGV[3] == '1' and h.status == 'queued' and not (waits and n == 1)", "false"
    ),
    "rescue forgets what it has published": Mutation(
        "rescue",
        "redis.call('ZADD', due_key, now + (leave and DEFERRED + later * 16 or later), run_id)",
        "redis.call('ZREM', due_key, run_id)",
    ),
    "rescue never looks at what it has deferred": Mutation(
        "rescue", "if left > 0 then", "if left > 0 and ARGV[3] == '1' then"
    ),
    "rescue leaves hints lost that a long queue has lost": Mutation(
        "rescue", "left = math.min(left, tonumber(ARGV[4]) or 0)", "left = 0"
    ),
    "rescue publishes all that wait in a long queue again": Mutation(
        "rescue", "left = math.min(left, tonumber(ARGV[4]) or 0)", ""
    ),
    "rescue does not wait before it publishes again in a long queue": Mutation(
        "rescue", "till = till - (tonumber(ARGV[5]) or 0)", "till = '+inf'"
    ),
    "rescue publishes again ahead of all that wait": Mutation(
        "rescue", "local to = leave and behind or out", "local to = out"
    ),
    "rescue does not publish retries while the queue is long": Mutation(
        "rescue", "and h.status == 'queued' and not (waits and n == 1)", ""
    ),
    "park leaves the step to be claimed while it waits": Mutation(
        "park", "if #calls > 0 then set_wait(run_key, wait) else", "if true then else"
    ),
    "park keeps the lease": Mutation("park", "'token', '', 'last_token'", "'last_token'"),
    "park does not know its own token": Mutation(
        "park", "redis.call('HSET', log_key, by, step)\n", ""
    ),
    "park does not heed a cancel": Mutation(
        "park",
        "if want == 'cancel' and a.want ~= 'cancel' then return { 'wanted', want } end",
        "",
    ),
    "park waits for results that are there": Mutation(
        "park", "if redis.call('HEXISTS', journal_key, 'r:' .. index) == 0 then", "if true then"
    ),
    "park forgets the time before it": Mutation(
        "park", "redis.call('HINCRBY', journal_key, 'spent', digits(number(a.spent)))\n", ""
    ),
    "take gives one call to two workers": Mutation(
        "take", "if number(j[2]) > now then return { 'leased', number(j[2]) - now } end", ""
    ),
    "take does not count crashes": Mutation(
        "take", "redis.call('HINCRBY', journal_key, 'c:' .. index, 1)", ""
    ),
    "take starts a call of a paused run": Mutation(
        "take", "if status == 'paused' then return { 'paused' } end", ""
    ),
    "take starts a call that nobody waits for": Mutation(
        "take", "j[5] and call_of(wait, index)", "j[5]"
    ),
    "keep renews what another worker has": Mutation("keep", "j[1] ~= ARGV[4] or ", ""),
    "leave counts a start that was none": Mutation("leave", "ARGV[6] == '1'", "ARGV[6] == '2'"),
    "deliver writes for anybody": Mutation("deliver", "j[1] ~= ARGV[4] or ", ""),
    "deliver writes a second result": Mutation(
        "deliver", "if delivered and delivered ~= '-1' then return { 'mine' } end", ""
    ),
    "deliver does not count the call's time": Mutation(
        "deliver", "redis.call('HINCRBY', journal_key, 'spent', digits(number(a.spent)))\n", ""
    ),
    "deliver does not make the run due": Mutation(
        "deliver", "redis.call('ZADD', due_key, now_ms() + number(grace), run_id)\n", ""
    ),
    "deliver wakes a run that still waits": Mutation(
        "deliver", "if #left > 0 then\n    arm(wait)", "if false then\n    arm(wait)"
    ),
    "deliver wakes a paused run": Mutation(
        "deliver", "if h.status == 'paused' then", "if false then"
    ),
    "resume ends a wait": Mutation(
        "common", "+ paused\n    set_wait(run_key, wait)\n", "\n    end_wait(run_key)\n"
    ),
    "rescue dispatches a call that is held": Mutation(
        "rescue", "if till <= now then", "if true then"
    ),
    "cancel does not list an answer that was paid for": Mutation(
        "common", "    note_lost(batch, 'paid', paid or price)\n", ""
    ),
    "the end of a circuit ends a wait for tools": Mutation(
        "park",
        "patience, calls = calls }",
        "patience, calls = calls, outage = (own_wait() or {}).outage }",
    ),
    "retry keeps an old wait for a service": Mutation("retry", "end_wait(run_key)\n", ""),
    "commit keeps a wait for a service that is over": Mutation(
        "commit", "or a.verdict == 'release' and wait and wait.outage", "or wait and wait.outage"
    ),
    "a step that is handed back forgets its wait for a service": Mutation(
        "commit", "or a.verdict == 'release' and wait and wait.outage", ""
    ),
    "a step that waits for a service is in no set": Mutation(
        "commit", "  redis.call('SADD', shard .. 'service:' .. id, run_id)\n", ""
    ),
    "wake makes a step due that a worker holds": Mutation("wake", " and h.token == ''\n", "\n"),
    "wake makes a run due that is paused or has ended": Mutation(
        "wake", "(h.status == 'queued' or h.status == 'in_progress') and ", ""
    ),
    "wake leaves the run in the index as it was": Mutation(
        "wake", "    redis.call('ZADD', due_key, now, run_id)\n", ""
    ),
    "a run that is to probe does not know it": Mutation(
        "wake", "now, ARGV[3] == 'probes'", "now, false"
    ),
    "retry lists an answer that it uses": Mutation("retry", "count(batch, 'lost', -1)\n", ""),
}


def test_the_seeded_bugs_fit_the_scripts() -> None:
    """In the gate, as nobody searches for them there: a script's change takes its seeds along."""
    for mutation in MUTATIONS.values():
        assert mutation.old != mutation.new
        texts_with(mutation)


@pytest.mark.long
@pytest.mark.timeout(3600)  # only ends a search that hangs: 2,000 examples are some minutes
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_model_finds_a_seeded_bug(
    name: str,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    mutation = MUTATIONS[name]
    seeded = texts_with(mutation)
    monkeypatch.setattr(lua, "source", seeded.__getitem__)
    monkeypatch.setattr(lua, "digest", lua.digest.__wrapped__)
    with rig(redis_server.unix_url) as shared, pytest.raises(AssertionError) as found:
        run_machine(shared, SEARCH)
    record_property("examples", shared.examples)
    record_property("operations", shared.operations)
    assert shared.operations > 0, found.value
