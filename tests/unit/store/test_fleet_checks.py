from dataclasses import replace
from datetime import UTC, datetime, timedelta

from stepfleet.orchestrator import Ask
from stepfleet.orchestrator.records.schedule import Schedule, ScheduleView
from stepfleet.orchestrator.store.fleet import checks
from stepfleet.orchestrator.store.fleet.checks import State
from stepfleet.orchestrator.store.fleet.overview import KeeperSeen, WorkerSeen
from stepfleet.orchestrator.store.fleet.servers import (
    RedisFacts,
    ServerFacts,
    health_findings,
    version_of,
    warnings,
)
from stepfleet.orchestrator.store.limits import LimitState
from stepfleet.orchestrator.version import Build

OLD, NEW = "1" * 40, "2" * 40
SOUND = ServerFacts("7.0.15", append_only=True, eviction="noeviction")
STORE = RedisFacts(SOUND, shards=16, quarantined=0)


def test_a_sound_redis_gives_no_worries() -> None:
    assert health_findings(SOUND) == []
    assert {check.state for check in checks.redis(SOUND)} == {State.OK}


def test_each_danger_of_a_redis_fails_with_a_fix_of_its_own() -> None:
    bad = replace(SOUND, version="6.2.14", append_only=False, eviction="allkeys-lru", full=True)

    found = checks.redis(replace(bad, writes=False))

    assert [check.state for check in found] == [State.FAIL] * 5
    assert "appendonly yes" in found[1].fix
    assert "noeviction" in found[2].fix


def test_a_server_that_hides_its_settings_is_not_accused() -> None:
    assert health_findings(replace(SOUND, append_only=None, eviction=None)) == []
    assert warnings({}) == []


def test_clients_and_workers_are_warned_in_the_same_words_as_the_command_line() -> None:
    info = {"redis_version": "6.2.14", "aof_enabled": 0, "maxmemory_policy": "allkeys-lru"}

    bad = ServerFacts("6.2.14", append_only=False, eviction="allkeys-lru")

    assert ServerFacts.of(info) == bad
    assert warnings(info) == [finding.text for finding in health_findings(bad)]
    assert len(warnings(info)) == 3


def test_versions_are_compared_as_numbers() -> None:
    assert version_of("7.10.1") > version_of("7.9")
    assert version_of("unknown") == ()


def test_other_shards_than_the_stores_fail_with_the_stores_number() -> None:
    assert checks.shards(STORE, 16).state is State.OK
    assert checks.shards(replace(STORE, shards=None), 16).state is State.OK
    assert "STEPFLEET_SHARDS=16" in checks.shards(STORE, 4).fix


def test_no_workers_is_a_failure_only_while_runs_wait() -> None:
    assert checks.workers([], waiting=0).state is State.WARN
    assert checks.workers([], waiting=3).state is State.FAIL
    assert checks.workers([], waiting=3).found.startswith("none alive, and 3 runs wait; nobody")
    assert checks.workers([], waiting=1).found.startswith("none alive, and 1 run waits; nobody")
    assert checks.workers(["host:1"], waiting=3).state is State.OK


def test_a_queue_that_nobody_serves_is_reported_with_who_waits_and_the_command() -> None:
    """A failure only while runs wait."""
    gpu, sound, steps = checks.queues({"gpu": 1, "sound": 0, "stepfleet": 3}, "stepfleet")
    assert (gpu.check, gpu.state, sound.state) == ("queue gpu", State.FAIL, State.WARN)
    assert "1 run waits for a tool there" in gpu.found
    assert gpu.fix == "start one: stepfleet worker --agents MODULE --queue gpu"
    assert "3 runs wait for a step" in steps.found
    assert steps.fix == "start one: stepfleet worker --agents MODULE"
    assert checks.queues({}, "stepfleet") == []


def test_quarantined_messages_are_reported() -> None:
    assert checks.quarantine(0).state is State.OK
    assert checks.quarantine(2).state is State.WARN


def test_every_finding_that_is_not_ok_names_a_fix() -> None:
    old, new = seen("old"), seen("new", version="2")
    found = [
        checks.shards(STORE, 4),
        checks.workers([], waiting=1),
        checks.agents([]),
        checks.quarantine(1),
        checks.versions([old, new]),
        *checks.client_version([new], Build("1")),
        *checks.stopping([seen("last", stopping=True)]),
        *checks.paused(is_paused=True),
        *checks.limits("", [LimitState(name="tenant:acme", waits_for="usd of tenant:acme")]),
        *checks.limits("a limit in Redis cannot be read", []),
        *checks.queues({"gpu": 0, "stepfleet": 0}, "stepfleet"),
    ]

    assert all(check.fix for check in found)
    assert State.OK not in {check.state for check in found}


def seen(
    name: str, *, version: str = "", commit: str = "", release: str = "", stopping: bool = False
) -> WorkerSeen:
    told = {"version": version, "commit": commit, "release": release, "stopping": stopping}
    return WorkerSeen.model_validate({"name": name, "seen_seconds_ago": 1.0, **told})


def test_workers_of_several_builds_are_a_mixed_fleet_and_named_with_theirs() -> None:
    """OPS-04: a warning: rolling upgrades are normal. Those that are gone do not count."""
    gone = WorkerSeen(name="gone", seen_seconds_ago=99.0, alive=False, version="1")
    assert checks.versions([gone, seen("b", version="2"), seen("a", version="2")]).found == "2"
    mixed = checks.versions([seen("a"), seen("b", version="2")])
    assert (mixed.state, mixed.found) == (State.WARN, "a mixed fleet: 2: b; an older one: a")
    keeper = KeeperSeen(name="k", seen_seconds_ago=1.0, version="1")
    assert checks.versions([seen("b", version="2"), keeper]).found == "a mixed fleet: 1: k; 2: b"
    commits = [seen("a", version="2", commit=NEW), seen("b", version="2", commit=OLD)]
    mixed = checks.versions([*commits, seen("c", version="2", commit=OLD, release="v7")])
    assert mixed.state is State.WARN
    assert mixed.found == "a mixed fleet: 2+11111111: b; 2+11111111 (v7): c; 2+22222222: a"


def test_releases_of_one_build_are_named_and_no_worry() -> None:
    """OPS-04: a user's new image with the same stepfleet."""
    found = checks.versions([seen("a", version="2", release="v7"), seen("b", version="2")])
    assert (found.state, found.found) == (State.OK, "2: b; 2 (v7): a")


def test_a_client_of_another_build_than_all_workers_is_told_so() -> None:
    """OPS-04: what it does not know of itself it does not compare."""
    old, new = seen("a", version="2", commit=OLD), seen("b", version="2", commit=NEW)
    (found,) = checks.client_version([old], Build("2", NEW))
    assert (found.state, found.found) == (State.WARN, "2+22222222 here, workers have 2+11111111")
    assert not list(checks.client_version([old, new], Build("2", NEW)))
    assert not list(checks.client_version([old], Build("2")))
    assert not list(checks.client_version([], Build("2")))
    (found,) = checks.client_version([seen("c")], Build("2"))
    assert found.found == "2 here, workers have an older one"


def test_stopping_workers_are_a_worry_only_without_another_one() -> None:
    assert not list(checks.stopping([seen("a", stopping=True), seen("b")]))
    (found,) = checks.stopping([seen("a", stopping=True)])
    assert "a" in found.found


def test_a_held_budget_says_how_it_is_raised() -> None:
    held = LimitState(name="tenant:acme", waiting=2, waits_for="usd of tenant:acme")
    (found,) = checks.limits("", [held])
    assert found.found == "2 runs wait for usd of tenant:acme"
    assert found.fix == "raise it: stepfleet limits set tenant:acme usd=..."


def test_calls_that_wait_for_people_are_a_finding_when_their_time_is_nearly_over() -> None:
    since = datetime(2026, 11, 23, 8, tzinfo=UTC)
    at = {"step": 1, "index": 0, "key": "k", "call_id": "c", "kind": "approval", "since": since}
    ask = Ask.model_validate(
        {"run_id": "r", "agent": "a", "tool": "pay", "until": since + timedelta(hours=10), **at}
    )
    endless = ask.model_copy(update={"until": None})

    assert list(checks.approvals([], 0, since)) == []
    (early,) = checks.approvals([ask, endless], 7, since + timedelta(hours=9))
    assert early.state is State.OK
    assert early.found == "7 calls wait for people, the first since 2026-11-23 08:00 UTC"
    for hours in (9.1, 11):
        (late,) = checks.approvals([endless, ask], 2, since + timedelta(hours=hours))
        assert late.state is State.WARN
        assert "the time of 1 is nearly over, or over (until 2026-11-23 18:00 UTC)" in late.found
        assert late.fix == "decide them: stepfleet approvals"


def test_a_late_schedule_names_the_missing_worker_or_how_it_begins_anew() -> None:
    """Pause and resume leave missed ticks out; a worker that is started makes them up."""
    now = datetime(2026, 11, 23, 8, tzinfo=UTC)
    given = {"name": "s", "cron": "@daily", "agent": "a", "config": "c", "created": now}
    due = now - timedelta(seconds=42)
    view = ScheduleView(schedule=Schedule.model_validate(given), next_tick=due)

    (alone,) = checks.schedules([view], now, served=False)
    late = "late: no worker is alive to submit what was due at 2026-11-23 07:59:18 UTC"
    assert alone.found == late
    assert alone.fix.startswith("start one: stepfleet worker --agents MODULE")
    (served,) = checks.schedules([view], now, served=True)
    assert served.state is State.OK
    (stuck,) = checks.schedules([view], now + timedelta(minutes=5), served=True)
    assert stuck.found == "nobody has submitted what was due at 2026-11-23 07:59:18 UTC"
    assert stuck.fix.endswith("to leave its missed ticks out: pause, resume")
    early = view.model_copy(update={"next_tick": now + timedelta(seconds=1)})
    (fine,) = checks.schedules([early], now, served=False)
    assert fine.found == "1 on time or paused"
