"""What lies in Redis about every run, held against the invariants and against the model.

The invariants are checked on the raw records alone; the comparison says that nothing else changed.
Key names are spelled out here, as an operator would: no product code.
"""

from dataclasses import dataclass, field
from typing import Any

import orjson
from redis import Redis
from support.protocol.call_model import WaitingModel
from support.protocol.model import ENDED, NEVER, SHARDS, Run, shard_of
from support.runs.packed_records import plain_log, read

from stepfleet.orchestrator.store.codec import load_events

BATCHES = ("b0", "b1")
NO_KEY = -2
SLACK = 60_000  # real time that an example may take, in ms; every model time is longer

# Of the shards ARGV[1] to ARGV[2], and runs of theirs. With a key: the broker is elsewhere.
DUMP = """
local function all(key) return redis.call('HGETALL', key) end
local function left(key) return redis.call('PTTL', key) end
local t = redis.call('TIME')
local shards, runs, queued, calls = {}, {}, 0, 0
local LISTS = { 'queued', 'in_progress', 'paused', 'completed', 'error', 'retry_limit',
  'steps_limit', 'user_requested' }
for s = ARGV[1], ARGV[2] do
  local tag = string.format('sf:{s%02d}:', s)
  local batches = {}
  for i, batch in ipairs({ 'b0', 'b1' }) do
    local key = tag .. 'batch:' .. batch
    batches[i] = { all(key), left(key), redis.call('ZRANGE', key .. ':ended', 0, -1),
      left(key .. ':ended') }
  end
  local lists = {}
  for i, name in ipairs(LISTS) do
    lists[i] = { name, redis.call('ZRANGE', tag .. 'runs:' .. name, 0, -1) }
  end
  shards[#shards + 1] = { redis.call('ZRANGE', tag .. 'due', 0, -1, 'WITHSCORES'), batches, lists,
    redis.call('ZRANGE', tag .. 'asks', 0, -1) }
end
for i = 3, #ARGV do
  local key = ARGV[i]
  runs[#runs + 1] = { all(key), all(key .. ':log'), all(key .. ':journal'), all(key .. ':lost'),
    redis.call('XREVRANGE', key .. ':events', '+', '-', 'COUNT', 1),
    { left(key), left(key .. ':log'), left(key .. ':events'), left(key .. ':lost'),
      left(key .. ':outcomes'), left(key .. ':journal'), left(key .. ':returns') },
    redis.call('HKEYS', key .. ':outcomes'), redis.call('SMEMBERS', key .. ':returns') }
end
if #KEYS == 0 then queued, calls = redis.call('LLEN', 'stepfleet'), redis.call('LLEN', 'heavy') end
return { t[1] * 1000 + math.floor(t[2] / 1000), queued, shards, runs, calls }
"""

SHIFT = """
for i = 2, #ARGV, 3 do
  local key = ARGV[i]
  if tonumber(redis.call('HGET', key, 'lease') or 0) > 0 then
    redis.call('HINCRBY', key, 'lease', -ARGV[1])
  end
  local wait = cjson.decode(redis.call('HGET', key, 'wait') or '{}')
  if wait.since then
    wait.since = wait.since - ARGV[1]
    wait.deadline = wait.deadline and wait.deadline - ARGV[1]
    redis.call('HSET', key, 'wait', cjson.encode(wait))
  end
  for _, name in ipairs({ 'l:0', 'l:1', 'n:0', 'n:1', 't:0', 't:1' }) do
    if redis.call('HEXISTS', key .. ':journal', name) == 1 then
      redis.call('HINCRBY', key .. ':journal', name, -ARGV[1])
    end
  end
  if redis.call('ZSCORE', ARGV[i + 1], ARGV[i + 2]) then
    redis.call('ZINCRBY', ARGV[i + 1], -ARGV[1], ARGV[i + 2])
  end
end
"""


@dataclass
class Raw:
    """The raw records of one run."""

    header: dict[str, str]
    log: dict[str, str]
    journal: dict[str, str]
    lost: dict[str, str]
    newest_events: list[Any]
    left: list[int]
    outcomes: list[str]
    due: float | None
    lists: list[str] = field(default_factory=list)
    followers: list[str] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.header["status"] in ENDED

    @property
    def owes(self) -> bool:
        """Whether others are to learn of its end, or of a request to it."""
        return bool(self.header.get("reach") or (self.ended and self.followers))

    @property
    def wait(self) -> dict[str, Any]:
        """Why the open step does not go on, or what it waited for before a worker took it."""
        return dict(orjson.loads(self.header.get("wait", "{}")))

    @property
    def not_before(self) -> int:
        """Until when nobody takes the step, or `NEVER`; 0 where it does not wait."""
        wait = self.wait
        return wait.get("deadline", NEVER) if wait and not wait.get("over") else 0

    def number(self, name: str) -> int:
        return int(self.header.get(name) or 0)


@dataclass
class Counted:
    """Counters of one batch in one shard, as stored."""

    fields: dict[str, int]
    left: int
    ended: list[str]
    ended_left: int


@dataclass
class Dump:
    """Everything at one moment. `now` is Redis's, in ms."""

    now: int
    queued: int
    runs: dict[str, Raw]
    counted: dict[tuple[int, str], Counted]
    due: list[str] = field(default_factory=list)
    calls_queued: int = 0
    asks: set[str] = field(default_factory=set)


class Auditor:
    """Reads the raw records in one call, and moves stored times: what a clock jump amounts to."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._dump = client.register_script(DUMP)
        self._shift = client.register_script(SHIFT)

    def flush(self) -> None:
        self._client.flushdb()

    def dump(self, run_ids: list[str]) -> Dump:
        now, queued, shards, runs, calls = self._read(run_ids)
        due: dict[str, float] = {}
        counted = {}
        lists: dict[str, list[str]] = {}
        asks: set[str] = set()
        for shard, (scores, batches, listed, asked) in enumerate(shards):
            asks.update(asked)
            for name, there in listed:
                for run_id in there:
                    lists.setdefault(run_id, []).append(name)
            due.update(zip(scores[::2], map(float, scores[1::2]), strict=True))
            for batch, (fields, left, ended, ended_left) in zip(BATCHES, batches, strict=True):
                numbers = {name: int(value) for name, value in _pairs(fields).items()}
                counted[shard, batch] = Counted(numbers, left, ended, ended_left)
        raw = {
            run_id: Raw(
                header=_pairs(one[0]),
                log=plain_log(_pairs(one[1])),
                journal=_pairs(one[2]),
                lost=_pairs(one[3]),
                newest_events=one[4],
                left=one[5],
                outcomes=one[6],
                due=due.get(run_id),
                lists=lists.get(run_id, []),
                followers=one[7],
            )
            for run_id, one in zip(run_ids, runs, strict=True)
        }
        return Dump(now, queued, raw, counted, list(due), calls, asks)

    def _read(self, run_ids: list[str]) -> Any:
        return self._dump(args=[0, SHARDS - 1, *map(run_key, run_ids)])

    def shift(self, run_ids: list[str], milliseconds: int) -> None:
        """Move every stored time of these runs `milliseconds` towards the past."""
        names = [
            name
            for run_id in run_ids
            for name in (run_key(run_id), f"{tag(shard_of(run_id))}due", run_id)
        ]
        self._shift(args=[milliseconds, *names])

    def waiting(self, circuit: str) -> set[str]:
        """Return the runs that lie in the circuit's sets."""
        sets = (self._client.smembers(f"{tag(shard)}service:{circuit}") for shard in range(SHARDS))
        return {str(one) for found in sets for one in found}

    def uncancel(self, batch: str) -> None:
        """Let a cancelled batch have new runs all the same."""
        for shard in range(SHARDS):
            self._client.hdel(f"{tag(shard)}flags", f"x:{batch}")

    def newest_messages(self, count: int) -> list[tuple[str, int]]:
        """Return the hints at the head of the queue, the newest last."""
        return [hint_of(str(text)) for text in self._client.lrange("stepfleet", -count, -1)]

    def newest_at_both_ends(
        self, ahead: int, behind: int
    ) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        """Return so many hints at the queue's head, and so many at its end, in their order."""
        end = self._client.lrange("stepfleet", 0, behind - 1) if behind else []
        return self.newest_messages(ahead) if ahead else [], [hint_of(str(one)) for one in end]

    def take_message(self, *, keep: bool) -> tuple[str, int]:
        """Return the hint at the head of the queue; `keep` leaves it for a second delivery."""
        text = self._client.lindex("stepfleet", -1) if keep else self._client.rpop("stepfleet")
        assert isinstance(text, str)
        hint: tuple[str, int] = hint_of(text)
        return hint

    def lose_messages(self) -> None:
        self._client.delete("stepfleet")

    def newest_calls(self, count: int) -> list[tuple[str, int, int]]:
        """Return the tool calls at the head of their queue, the newest last."""
        return [call_of(str(text)) for text in self._client.lrange("heavy", -count, -1)]

    def take_call(self, *, keep: bool) -> tuple[str, int, int]:
        """Return the tool call at the head of the queue; `keep` leaves it there."""
        text = self._client.lindex("heavy", -1) if keep else self._client.rpop("heavy")
        assert isinstance(text, str)
        return call_of(text)

    def messages(self) -> tuple[list[tuple[str, int]], list[tuple[str, int, int]]]:
        """Return all hints and all tool calls that wait, the next ones last."""
        hints, calls = (self._client.lrange(name, 0, -1) for name in ("stepfleet", "heavy"))
        return [hint_of(str(one)) for one in hints], [call_of(str(one)) for one in calls]

    def lose_calls(self) -> None:
        self._client.delete("heavy")


def tag(shard: int) -> str:
    return f"sf:{{s{shard:02d}}}:"


def run_key(run_id: str) -> str:
    return f"{tag(shard_of(run_id))}run:{run_id}"


def hint_of(message: str) -> Any:
    """Return the hint of a step; with an index, that of a call that no tool's worker makes."""
    return tuple(orjson.loads(orjson.loads(message)["headers"]["argsrepr"].replace("'", '"')))


def call_of(message: str) -> tuple[str, int, int]:
    shown = orjson.loads(orjson.loads(message)["headers"]["argsrepr"].replace("'", '"'))
    run_id, step, index = shown
    return run_id, step, index


def awaited_in(raw: Raw) -> tuple[int, ...]:
    """Return the calls that the header says the open step waits for."""
    return tuple(index for index, _, _ in raw.wait.get("calls", ()))


def _outage(wait: dict[str, Any]) -> str:
    out = wait.get("outage")
    return "" if out is None else "probes" if out.get("probes") else "waits"


def _pairs(flat: list[str]) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def check_invariants(dump: Dump) -> None:
    """Assert the invariants of the design on the raw records alone."""
    for run_id, raw in dump.runs.items():
        _check_log(run_id, raw)
        active = raw.header["status"] in {"queued", "in_progress"}
        needed = active or raw.owes
        assert (raw.due is not None) == needed, f"{run_id}: in due exactly while it is active"
        listed = [raw.header["stop_reason"] if raw.ended else raw.header["status"]]
        assert raw.lists == listed, f"{run_id}: in the lists {raw.lists}, not {listed}"
        of_step = [name for name in raw.journal if name[:2] != "d:"]
        unanswered = of_step and "response" not in raw.journal
        assert not unanswered, f"{run_id}: a tool started without a journaled response"
        assert not (raw.header["token"] and not active), f"{run_id}: held though not active"
        waits = not raw.header["token"] and raw.not_before > 0
        awaited = awaited_in(raw) if waits else ()
        answered = [index for index in awaited if f"r:{index}" in raw.journal]
        assert not answered, f"{run_id}: waits for calls {answered}, which have results"
        _check_expiry(run_id, raw)
        if raw.newest_events:
            newest = dict(zip(*[iter(raw.newest_events[0][1])] * 2, strict=True))
            last = int(newest["first"]) + len(load_events(run_id, newest["events"])) - 1
            assert raw.number("seq") == last, f"{run_id}: the events have a gap"
    assert set(dump.due) <= dump.runs.keys(), "an unknown run is due"
    for (shard, batch), counted in dump.counted.items():
        _check_counters(dump, shard, batch, counted)


def _check_log(run_id: str, raw: Raw) -> None:
    numbers = {int(name) for name in raw.log if name.isdigit()}
    assert numbers == set(range(raw.number("step"))), f"{run_id}: the log is not 0..step-1"
    outcomes = {int(name) for name in raw.outcomes}
    assert outcomes == numbers, f"{run_id}: outcomes of steps {outcomes}, the log has {numbers}"
    steps = [_result(raw.log[str(number)]) for number in sorted(numbers)]
    state = read(raw.header["slim"])
    usage = state.get("usage", {})
    sums = {
        "steps": (state.get("step_count", 0), len(steps)),
        "tokens": (usage.get("total_tokens", 0), sum(_tokens(step) for step in steps)),
        "calls": (usage.get("llm_calls", 0), sum(_calls(step) for step in steps)),
        "cost": (state.get("cost_usd", 0.0), sum(step.get("cost_usd", 0.0) for step in steps)),
        "seconds": (
            state["info"].get("cumulative_execution_seconds", 0.0),
            sum(step.get("duration_ms", 0.0) for step in steps) / 1000,
        ),
    }
    wrong = {name: pair for name, pair in sums.items() if pair[0] != pair[1]}
    assert not wrong, f"{run_id}: (state, sum over committed steps) differ: {wrong}"


def _check_expiry(run_id: str, raw: Raw) -> None:
    there = [left for left in raw.left if left != NO_KEY]
    if raw.ended and not raw.header["batch"]:
        assert all(left > 0 for left in there), f"{run_id}: ended and never expires: {raw.left}"
    elif raw.ended:
        alike = len({left > 0 for left in there}) == 1
        assert alike, f"{run_id}: a part of its records expires: {raw.left}"
    else:
        assert all(left == -1 for left in there), f"{run_id}: active and expires: {raw.left}"


def _check_counters(dump: Dump, shard: int, batch: str, counted: Counted) -> None:
    runs = {
        run_id: raw
        for run_id, raw in dump.runs.items()
        if raw.header["batch"] == batch and shard_of(run_id) == shard
    }
    stored = {name: value for name, value in counted.fields.items() if value}
    stored.pop("endings", None)
    recount = {name: value for name, value in _recount(list(runs.values())).items() if value}
    assert stored == recount, f"counters of {batch} in shard {shard}: {stored}, recount: {recount}"
    ended = {run_id for run_id, raw in runs.items() if raw.ended}
    assert set(counted.ended) == ended, f"index of ended runs: {counted.ended}, they are {ended}"
    if len(ended) < len(runs):
        assert counted.left == -1, f"{batch}: its counters expire before it is over"


def check_upkeep(dump: Dump) -> None:
    """Assert that ended runs expire exactly where all runs of their batch have ended."""
    for batch in BATCHES:
        runs = {run_id: raw for run_id, raw in dump.runs.items() if raw.header["batch"] == batch}
        over = all(raw.ended for raw in runs.values())
        for run_id, raw in runs.items():
            there = [left for left in raw.left if left != NO_KEY]
            wrong = raw.ended and any((left > 0) != over for left in there)
            assert not wrong, f"{run_id}: its batch is over: {over}, its records: {raw.left}"
        for shard in range(SHARDS):
            counted = dump.counted[shard, batch]
            if counted.fields:
                assert (counted.left > 0) == over, f"{batch}: its counters, over: {over}"
            if counted.ended:
                assert (counted.ended_left > 0) == over, f"{batch}: its index, over: {over}"


def _recount(runs: list[Raw]) -> dict[str, int]:
    counts: dict[str, int] = {"total": len(runs), "open": sum(not raw.ended for raw in runs)}

    def add(name: str, value: int) -> None:
        counts[name] = counts.get(name, 0) + value

    for raw in runs:
        add(f"status:{raw.header['status']}", 1)
        if raw.ended:
            add(f"reason:{raw.header['stop_reason']}", 1)
        add("lost", len(raw.lost))
        for name, text in raw.log.items():
            if name.isdigit():
                step = _result(text)
                add("steps", 1)
                add("tokens", _tokens(step))
                add("calls", _calls(step))
                add("cost", round(step.get("cost_usd", 0.0) * 1_000_000_000))
    return counts


_parsed: dict[str, dict[str, Any]] = {}


def _result(text: str) -> dict[str, Any]:
    if text not in _parsed:
        if len(_parsed) > 10_000:
            _parsed.clear()
        _parsed[text] = orjson.loads(text)["result"]
    return _parsed[text]


def _tokens(step: dict[str, Any]) -> int:
    return int((step.get("usage") or {}).get("total_tokens", 0))


def _calls(step: dict[str, Any]) -> int:
    return int((step.get("usage") or {}).get("llm_calls", 0))


def check_model(dump: Dump, model: WaitingModel) -> None:
    """Assert that Redis holds what the model holds."""
    assert dump.queued == len(model.queue), "messages in the queue"
    assert dump.calls_queued == len(model.call_queue), "messages in the tools' queue"
    for run_id, run in model.runs.items():
        _check_run(dump.runs[run_id], run, dump.now, model.now)
    for group, counted in dump.counted.items():
        assert counted.ended == model.endings.get(group, []), f"order of ended runs in {group}"
        ends = counted.fields.get("endings", 0)
        assert ends == model.ends.get(group, 0), f"how often runs of {group} ended"


def _check_run(raw: Raw, run: Run, now: int, model_now: int) -> None:
    stored = {
        "status": raw.header["status"],
        "step": raw.number("step"),
        "token": raw.header["token"],
        "want": raw.header["want"],
        "reason": raw.header.get("stop_reason", ""),
        "crashes": raw.number("crashes"),
        "attempts": raw.number("attempt"),
        "limited": raw.number("limited"),
        "dispatches": raw.number("dispatches"),
        "seq": raw.number("seq"),
        "ledger": len(raw.lost),
        "journal": raw.journal.keys(),
        "awaited": awaited_in(raw),
        "outage": _outage(raw.wait),
        "parked": raw.wait.get("uncounted", False),
        "reach": raw.header.get("reach", ""),
        "returns": raw.header.get("returns") == "1",
    }
    expected = {name: getattr(run, name) for name in stored}
    expected |= {"ledger": len(run.ledger), "journal": run.journal.keys()}
    assert stored == expected, f"{run.run_id}: stored {stored}, expected {expected}"
    for name, author in run.journal.items():
        assert author in raw.journal[name], f"{run.run_id}: {name} of the journal is another's"
        left = name.startswith("o:") and not author
        assert not (left and raw.journal[name]), f"{run.run_id}: {name} is left, but has an owner"
    for number, step in enumerate(run.log):
        assert step.author in raw.log[str(number)], f"{run.run_id}: step {number} is another's"
    times: list[tuple[str, float, int]] = []
    if run.due is not None and raw.due is not None:
        times.append(("due", raw.due, run.due))
    if run.token:
        times.append(("lease", raw.number("lease"), run.lease))
    waits = raw.not_before > 0
    assert run.due is None or waits == (run.not_before > 0), f"{run.run_id}: a wait"
    if run.not_before == NEVER:
        assert raw.not_before == NEVER, f"{run.run_id}: it may begin"
    elif run.not_before and run.due is not None:
        times.append(("not_before", raw.not_before, run.not_before))
    for index in run.awaited:
        call = run.calls[index]
        times.append((f"look at {index}", float(raw.journal[f"n:{index}"]), call.look))
        if call.owner:
            times.append((f"lease of {index}", float(raw.journal[f"l:{index}"]), call.lease))
    for name, at, expected_at in times:
        late = (expected_at - model_now) - (at - now)
        assert 0 <= late < SLACK, f"{run.run_id}: {name} is {late} ms from where it should be"
