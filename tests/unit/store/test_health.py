"""What about a server stops all work, by its reply to `INFO`."""

from typing import Any

from stepfleet.orchestrator.store.fleet.servers import ServerFacts, health_findings, worst_of

SOUND = {"used_memory": 50, "maxmemory": 0, "aof_last_write_status": "ok"}


def stops(*servers: dict[str, Any]) -> list[str]:
    facts = ServerFacts.of(worst_of([{**SOUND, **one} for one in servers]))
    return [one.about for one in health_findings(facts) if one.stops]


def test_a_server_with_room_or_without_a_limit_stops_nothing() -> None:
    assert stops({}) == []
    assert stops({"used_memory": 99, "maxmemory": 100}) == []


def test_a_full_server_stops_all_work_and_buffers_do_not_count() -> None:
    full = {"used_memory": 101, "maxmemory": 100}
    assert stops(full) == ["memory"]
    assert stops(full | {"mem_not_counted_for_evict": 1}) == []


def test_a_server_whose_disk_takes_no_data_stops_all_work() -> None:
    assert stops({"aof_last_write_status": "err"}) == ["disk"]
    assert stops({"rdb_last_bgsave_status": "err"}) == ["disk"]


def test_one_bad_master_of_a_cluster_is_enough() -> None:
    """The largest limit and the largest use are not those of one server."""
    small = {"used_memory": 11, "maxmemory": 10}
    assert stops({"used_memory": 90, "maxmemory": 100}, small) == ["memory"]
    assert stops({"used_memory": 90, "maxmemory": 100}, {"used_memory": 1, "maxmemory": 10}) == []
    assert stops({}, {"aof_last_write_status": "err"}) == ["disk"]
