"""Recounts a finished chaos run from the raw records, the effects and the model server's log.

Shares no code with the product: key names, fields and JSON are spelled out as an operator reads
them. Every violation becomes one sentence; none ends the recount.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import redis
from support.chaos.plan import plan_of
from support.deadlines import wait_until
from support.runs.packed_records import plain_log, read

from stepfleet.orchestrator.store.codec import load_events

SHARDS = 16
ENDED = frozenset({"completed", "failed", "cancelled", "stopped"})
NANO = 1_000_000_000
PRICES = {
    "prompt_tokens": 0.15e-6,
    "completion_tokens": 0.60e-6,
    "cached_tokens": -0.075e-6,  # they are among the prompt's, at half of its price
}
"""USD, of the agents' model."""
MOST_TURNS = 30
EFFECTS = frozenset({"effect", "render"})
UNKNOWN = "OUTCOME_UNKNOWN"
EVENT_OF_A_STEP = "agent.step.completed"
Place = tuple[str, int]


@dataclass
class RawRun:
    """The records of one run, as they lie in Redis."""

    run_id: str
    shard: int
    header: dict[str, str]
    log: dict[str, str]
    journal: dict[str, str]
    lost: dict[str, dict[str, Any]]
    events: list[dict[str, Any]]
    gaps: bool
    lasting: bool
    due: bool

    @property
    def key(self) -> str:
        """The conversation's key: the run's line."""
        return self.header["line"]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The results of the committed steps, in order."""
        numbers = sorted(int(name) for name in self.log if name.isdigit())
        return [orjson.loads(self.log[str(number)])["result"] for number in numbers]

    @property
    def statuses(self) -> list[str]:
        """The states that its events tell of, in order."""
        return [one["payload"]["status"] for one in self.events if one["type"] == "agent.status"]

    @property
    def retried(self) -> bool:
        """Whether a client has taken it up again after an end, to do a step anew."""
        return self.retries > 0

    @property
    def retries(self) -> int:
        """How often a client has done so."""
        return sum(status in ENDED for status in self.statuses[:-1]) - self.further

    @property
    def further(self) -> int:
        """How many messages it was given after its first end, each for a turn more."""
        given = [orjson.loads(text) for name, text in self.log.items() if name[:6] == "input:"]
        return sum(map(len, given)) - 1


@dataclass
class Calls:
    """What the model server has seen, by conversation and turn.

    `paid` are calls that were answered or whose client went away while the model was at work.
    """

    answered: Counter[Place] = field(default_factory=Counter)
    paid: Counter[Place] = field(default_factory=Counter)
    asked: Counter[Place] = field(default_factory=Counter)
    usage: dict[Place, set[tuple[int, int]]] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    cost: int = 0
    """Of all answers, in billionths of a dollar."""


@dataclass
class Recount:
    """What came out.

    Where the store itself has lost records, `unlisted` model calls were paid for that no record
    tells of any more, and `redone` effects happened again since nothing told of the first time.
    """

    lossy: bool = False
    runs: int = 0
    steps: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    repeated: int = 0
    repeated_answers: int = 0
    ambiguous: int = 0
    ambiguous_cost: float = 0.0
    unknown: int = 0
    effects: int = 0
    unlisted: int = 0
    redone: int = 0
    ledger: Counter[str] = field(default_factory=Counter)
    costs: Counter[str] = field(default_factory=Counter)
    """By state, in billionths of a dollar; and what the model server has answered for."""
    violations: list[str] = field(default_factory=list)


def read_calls(path: Path) -> Calls:
    """Read the model server's JSONL log."""
    calls = Calls()
    for line in path.read_bytes().splitlines():
        one = orjson.loads(line)
        place = (one["key"], one["turn"])
        calls.asked[place] += 1
        calls.outcomes[one["outcome"]] += 1
        calls.paid[place] += one["outcome"] in {"replied", "disconnected"}
        if one["outcome"] == "replied":
            calls.answered[place] += 1
            calls.usage.setdefault(place, set()).add(
                (one["prompt_tokens"], one["completion_tokens"])
            )
            calls.cost += round(sum(one[name] * price for name, price in PRICES.items()) * NANO)
    return calls


def read_runs(client: "redis.Redis") -> list[RawRun]:
    """Read every run that is there."""
    found: list[RawRun] = []
    for shard in range(SHARDS):
        tag = f"sf:{{s{shard:02d}}}:"
        due = set(map(str, client.zrange(f"{tag}due", 0, -1)))
        for key in client.scan_iter(match=f"{tag}run:*", count=1000):
            run_id = key.removeprefix(f"{tag}run:")
            if ":" not in run_id:
                found.append(_read(client, key, run_id, shard, due))
    return found


def await_nothing_owed(client: "redis.Redis") -> None:
    """Wait until nothing is due, and no run waits for another one or a person."""

    def left() -> list[str]:
        kinds = ("due", "asks", "run:*:returns")
        return [key for kind in kinds for key in client.scan_iter(f"sf:{{s*}}:{kind}", count=1000)]

    wait_until(lambda: not left(), within=60, what="nothing that is due, asked or owed")


def check_linked_runs(client: "redis.Redis") -> int:
    """Assert that each run has ended once, and that none waits for another one or a person.

    Returns how many calls are listed as perhaps made twice.
    """
    await_nothing_owed(client)
    lost = 0
    for run in read_runs(client):
        ends = [status for status in run.statuses if status in ENDED]
        assert ends == run.statuses[-1:], (run.run_id, run.statuses)
        assert (run.due, run.gaps, run.header["token"]) == (False, False, ""), run.header
        assert "after" not in run.header or run.header["status"] == "failed"
        lost += sum(bool(entry.get("ambiguous")) for entry in run.lost.values())
    return lost


def _read(client: "redis.Redis", key: str, run_id: str, shard: int, due: set[str]) -> RawRun:
    asked = client.pipeline(transaction=False)
    for part in ("", ":log", ":journal", ":lost"):
        asked.hgetall(f"{key}{part}")
    asked.xrange(f"{key}:events")
    for part in ("", ":log", ":events"):
        asked.ttl(f"{key}{part}")
    header, log, journal, lost, stream, *left = asked.execute()
    events: list[dict[str, Any]] = []
    gaps = False
    for _, fields in stream:
        gaps = gaps or int(fields["first"]) != len(events) + 1
        events += load_events(run_id, fields["events"])
    return RawRun(
        run_id=run_id,
        shard=shard,
        header=header,
        log=plain_log(log),
        journal=journal,
        lost={name: orjson.loads(text) for name, text in lost.items()},
        events=events,
        gaps=gaps or int(header.get("seq", 0)) != len(events),
        lasting=any(seconds <= 0 for seconds in left),
        due=run_id in due,
    )


def recount(
    client: "redis.Redis", log: Path, effects: Path, expected: Iterable[str], *, lossy: bool = False
) -> Recount:
    """Hold everything against everything; `expected` are the keys that were submitted.

    `lossy`: the store has lost records, so what they told of may have been done again.
    """
    runs, calls, out = read_runs(client), read_calls(log), Recount(lossy=lossy)
    there = Counter(run.key for run in runs)
    for key in expected:
        if there[key] != 1:
            out.violations.append(f"{key}: submitted once, there are {there[key]} runs of it")
    out.runs, out.requests = len(runs), sum(calls.asked.values())
    done = [line.split(maxsplit=3) for line in effects.read_text().splitlines()]
    out.effects = len(done)
    keyed = Counter(line[2] for line in done)
    if lossy:
        out.redone = out.effects - len({line[3] for line in done})
    else:
        out.violations += _of_keys(done, keyed, {run.run_id: run for run in runs})
    named = Counter(line[3] for line in done)
    for run in runs:
        out.statuses[run.header["status"]] += 1
        out.steps += len(run.steps)
        out.ledger.update(entry["kind"] for entry in run.lost.values())
        problems = [
            *_of_record(run),
            *_of_sums(run),
            *_of_prices(run),
            *_of_plan(run),
            *_of_effects(run, named, lossy=lossy),
            *_of_calls(run, calls, out),
        ]
        out.violations += [f"{run.key} ({run.header['status']}): {one}" for one in problems]
    out.violations += [*_of_batches(client, runs), *_of_lists(client, runs)]
    out.costs = _costs(client)
    if not lossy:
        out.violations += _of_costs(out.costs, calls, runs)
    out.costs["server"] = calls.cost
    return out


def _costs(client: "redis.Redis") -> Counter[str]:
    """Add the rows of the ledger up, and its lines that are not in a row yet."""
    found: Counter[str] = Counter()
    for shard in range(SHARDS):
        costs = f"sf:{{s{shard:02d}}}:costs"
        lines = [str(line).split("\n", 1) for line in client.lrange(costs, 0, -1)]
        rows = [(name, numbers.split(" ", 1)[1]) for numbers, name in lines]
        for key in client.scan_iter(match=f"{costs}:*"):
            rows += [(str(name), str(numbers)) for name, numbers in client.hgetall(key).items()]
        for name, numbers in rows:
            state = orjson.loads(name.partition("\n")[0])[0]
            calls, cost, unpriced = (int(numbers.split()[at]) for at in (0, 7, 10))
            found.update({state: cost, f"{state} calls": calls, "unpriced": unpriced})
    return found


def _of_costs(costs: Counter[str], calls: Calls, runs: list[RawRun]) -> Iterable[str]:
    """Committed calls are those of the steps; with the lost ones they were all answered."""
    steps = [step for run in runs for step in run.steps]
    committed = sum(round(one.get("cost_usd", 0.0) * NANO) for one in steps)
    if costs["committed"] != committed:
        yield f"the ledger has {costs['committed']} committed, the steps {committed}"
    if sum(map(_llm_calls, steps)) != costs["committed calls"]:
        yield f"the ledger has {costs['committed calls']} committed calls, not those of the steps"
    sure = costs["committed"] + costs["lost"]
    if not sure <= calls.cost <= sure + costs["ambiguous"]:
        yield f"the model server has answered for {calls.cost}, the ledger has {dict(costs)}"
    if costs["unpriced"] and not any(run.header["status"] == "cancelled" for run in runs):
        yield f"{costs['unpriced']} calls have no price"


def await_upkeep(client: "redis.Redis") -> None:
    """Wait until the workers have let all ended batches expire: they look every few seconds."""

    def is_done() -> bool:
        return not any(client.exists(key) for key in client.scan_iter("sf:{s*}:over", count=1000))

    wait_until(is_done, within=120, what="the expiry of ended batches")


def _of_record(run: RawRun) -> Iterable[str]:
    header, numbers = run.header, sorted(int(name) for name in run.log if name.isdigit())
    if header["status"] not in ENDED:
        yield "has not ended"
    if numbers != list(range(int(header["step"]))):
        yield f"its log is {numbers}, its step {header['step']}"
    by = Counter(int(value) for name, value in run.log.items() if name.startswith("by:"))
    heavy = {n for n, step in enumerate(run.steps) if _has_effects(step, "render")}
    wrong = [
        number for number in numbers if by[number] != 1 and not (by[number] and number in heavy)
    ]
    # A pause between the tools of a step parks it: its worker and the next one each did a part.
    parts = sum(by[number] - 1 for number in wrong)
    paused = all(by[number] for number in wrong) and parts <= run.statuses.count("paused")
    if wrong and not run.retried and not paused:
        yield f"steps {wrong} were not committed by exactly one worker: {by}"
    if run.due or header["token"]:
        yield f"is held or due: {run.due}, {header['token']!r}"
    if run.journal and header["status"] == "completed":
        yield f"completed with an open step: {set(run.journal)}"
    if run.lasting:
        yield "never expires"
    if run.gaps:
        yield "its events have a gap"
    told = [one["payload"]["step_number"] for one in run.events if one["type"] == EVENT_OF_A_STEP]
    if not run.retried and told != [number + 1 for number in numbers]:
        yield f"its events tell of steps {told}"
    ends = [status in ENDED for status in run.statuses]
    if not ends[-1] or any(both == (True, True) for both in pairwise(ends)):
        yield f"entered end states without being taken up between: {run.statuses}"


def _has_effects(step: dict[str, Any], tool: str) -> bool:
    return any(call["tool_name"] == tool for call in step.get("tool_calls", ()))


def _of_sums(run: RawRun) -> Iterable[str]:
    """Usage, cost and time are those of the newest turn: of the steps behind its message."""
    newest = max(int(name[6:]) for name in run.log if name[:6] == "input:")
    steps = run.steps[newest:]
    state = read(run.header["slim"])
    usage = state.get("usage", {})
    pairs = {
        "steps": (state.get("step_count", 0), len(steps)),
        "tokens": (usage.get("total_tokens", 0), sum(map(_tokens, steps))),
        "calls": (usage.get("llm_calls", 0), sum(map(_llm_calls, steps))),
        "cost": (state.get("cost_usd", 0.0), sum(one.get("cost_usd", 0.0) for one in steps)),
        "seconds": (
            state["info"].get("cumulative_execution_seconds", 0.0),
            sum(one.get("duration_ms", 0.0) for one in steps) / 1000,
        ),
    }
    for name, (kept, summed) in pairs.items():
        if abs(kept - summed) > 1e-6:
            yield f"{name}: the header says {kept}, its steps sum to {summed}"


def _of_prices(run: RawRun) -> Iterable[str]:
    """Each step costs what its tokens do; that these are the server's is counted elsewhere."""
    for step in run.steps:
        usage = step.get("usage") or {}
        cost = sum(usage.get(name, 0) * price for name, price in PRICES.items())
        if abs(step.get("cost_usd", 0.0) - cost) > 1e-9:
            yield f"step {step['step']} costs {step.get('cost_usd')}, its tokens {cost}"


def _of_plan(run: RawRun) -> Iterable[str]:
    plan, turns = plan_of(run.key), (*plan_of(run.key).turns, ())
    answered = [step for step in run.steps if step.get("usage")]
    for step, turn in zip(answered, turns, strict=False):
        calls = [(one["tool_name"], one["arguments"]["what"]) for one in step.get("tool_calls", ())]
        if calls != list(turn):
            yield f"step {step['step']} called {calls}, planned were {turn}"
    if run.header["status"] == "completed":
        last = run.steps[-1].get("thought") if run.steps else None
        # A run that was cancelled while its last answer came is asked once more by a retry.
        more = len(answered) - plan.steps - run.further
        if not 0 <= more <= run.retries or last != plan.answer:
            yield f"has {len(answered)} of {plan.steps} + {run.further} steps, the last is {last!r}"
    elif run.header["status"] != "cancelled":
        yield f"ended otherwise: {run.header.get('stop_reason')}, {run.header.get('error')}"


def _of_keys(done: list[list[str]], keyed: Counter[str], runs: dict[str, RawRun]) -> Iterable[str]:
    """An effect happens once under its key, and once more when a client retries its step."""
    for run_id, step, key, what in done:
        entries = runs[run_id].lost.values()
        asked = sum(one["kind"] == "retried" and one["step"] == int(step) for one in entries)
        if keyed[key] > 1 + asked:
            yield f"effect {what} happened {keyed[key]} times, its step was retried {asked} times"


def _of_effects(run: RawRun, named: Counter[str], *, lossy: bool) -> Iterable[str]:
    repeatable = run.retried or lossy
    for step in run.steps:
        for call in step.get("tool_calls", ()):
            if call["tool_name"] not in EFFECTS:
                continue
            happened = named[call["arguments"]["what"]]
            if not call.get("is_error") and happened != 1 and not (repeatable and happened):
                yield f"{call['arguments']} is committed and happened {happened} times"
            if call.get("is_error") and happened > 1 and not repeatable:
                yield f"{call['arguments']} is not known and happened {happened} times"


def _of_calls(run: RawRun, calls: Calls, out: Recount) -> Iterable[str]:
    """Every answer of the model is a committed step, kept for a retry, or listed as ambiguous."""
    listed = Counter(one["step"] for one in run.lost.values() if one.get("ambiguous"))
    hit = {one["step"] for one in run.lost.values() if one["kind"] != "deferred"}
    out.ambiguous += listed.total()
    out.ambiguous_cost += sum(
        one.get("cost_usd") or _cost_of(run.steps, one["step"])
        for one in run.lost.values()
        if one.get("ambiguous")
    )
    committed = {}
    turn = 1
    for step in run.steps:
        committed[turn] = step
        turn += bool(step.get("usage"))
        unknown = sum(
            (call.get("error") or {}).get("code") == UNKNOWN for call in step.get("tool_calls", ())
        )
        out.unknown += unknown
        if unknown and step["step"] not in hit:
            yield f"step {step['step']} has calls of unknown outcome and no lost worker"
    for place in ((run.key, turn) for turn in range(1, MOST_TURNS)):
        paid = calls.paid[place]
        if not paid:
            continue
        step = committed.get(place[1], {})
        number = step.get("step", len(run.steps) + 1)
        # A run that ended in the midst of a step keeps the answer in its journal, for a retry.
        kept = place[1] == turn and "response" in run.journal
        surplus = paid - (bool(step.get("usage")) or kept)
        out.repeated += surplus
        out.repeated_answers += max(calls.answered[place] - (bool(step.get("usage")) or kept), 0)
        if surplus > listed[number] and out.lossy:
            out.unlisted += surplus - listed[number]
        elif surplus > listed[number]:
            yield f"turn {place[1]} was paid for {paid} times, listed are {dict(listed)}"
        usage = step.get("usage")
        if usage and (usage["prompt_tokens"], usage["completion_tokens"]) not in calls.usage[place]:
            yield f"step {number} says {usage}, the server {calls.usage[place]}"
    for at, step in committed.items():
        if step.get("usage") and not calls.answered[run.key, at]:
            yield f"turn {at} is committed and was never answered"


def _of_batches(client: "redis.Redis", runs: list[RawRun]) -> Iterable[str]:
    batches = {run.header["batch"] for run in runs}
    for batch in sorted(batches):
        for shard in range(SHARDS):
            own = [run for run in runs if run.header["batch"] == batch and run.shard == shard]
            key = f"sf:{{s{shard:02d}}}:batch:{batch}"
            stored = {name: int(value) for name, value in client.hgetall(key).items()}
            stored.pop("endings", None)
            kept = {name: value for name, value in stored.items() if value}
            if kept != _counted(own):
                yield f"batch {batch}, shard {shard}: counters {kept}, recount {_counted(own)}"
            if set(client.zrange(f"{key}:ended", 0, -1)) != {run.run_id for run in own}:
                yield f"batch {batch}, shard {shard}: its index of ended runs differs"


def _of_lists(client: "redis.Redis", runs: list[RawRun]) -> Iterable[str]:
    there = {(run.shard, run.header["stop_reason"], run.run_id) for run in runs}
    for shard in range(SHARDS):
        lists = f"sf:{{s{shard:02d}}}:runs:"
        for key in map(str, client.scan_iter(match=f"{lists}*", count=1000)):
            for run_id in map(str, client.zrange(key, 0, -1)):
                place = (shard, key.removeprefix(lists), run_id)
                if place not in there:
                    yield f"run {run_id} is in the list {place[1]} and did not end so"
                there.discard(place)
    yield from (f"run {run_id} is not in the list {name}" for _, name, run_id in there)


def _counted(runs: list[RawRun]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for run in runs:
        ended = run.header["status"] in ENDED
        counts.update({"total": 1, "open": not ended, f"status:{run.header['status']}": 1})
        counts[f"reason:{run.header.get('stop_reason')}"] += ended
        counts["lost"] += len(run.lost)
        counts["steps"] += len(run.steps)
        counts["tokens"] += sum(map(_tokens, run.steps))
        counts["calls"] += sum(map(_llm_calls, run.steps))
        counts["cost"] += sum(round(one.get("cost_usd", 0.0) * NANO) for one in run.steps)
    return {name: int(value) for name, value in counts.items() if value}


def _cost_of(steps: list[dict[str, Any]], number: int) -> float:
    """Return what the committed call cost that was made in place of a lost one."""
    return sum(float(one.get("cost_usd", 0.0)) for one in steps[number - 1 : number])


def _tokens(step: dict[str, Any]) -> int:
    return int((step.get("usage") or {}).get("total_tokens", 0))


def _llm_calls(step: dict[str, Any]) -> int:
    return int((step.get("usage") or {}).get("llm_calls", 0))
