"""Ports that are bound much later: no other process of the same pytest run is given them."""

from itertools import islice

import pytest
from support.servers.redis_servers import dealt

PORTS = range(10_000, 10_100)


def share(monkeypatch: pytest.MonkeyPatch, worker: int, count: int) -> list[int]:
    """Return what a process of pytest-xdist deals in one round and a half."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{worker}")
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(count))
    return list(islice(dealt.__wrapped__(PORTS), 3 * len(PORTS) // count // 2))


def test_the_processes_of_a_run_deal_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [set(share(monkeypatch, worker, 4)) for worker in range(4)]
    assert set.union(*shares) == set(PORTS)
    assert sum(map(len, shares)) == len(PORTS)


def test_a_process_deals_each_of_its_ports_before_any_comes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = share(monkeypatch, 1, 2)
    assert len(set(told[:50])) == 50
    assert told[50:] == told[:25]


def test_a_process_that_stands_in_for_one_that_died_deals_its_ports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert set(share(monkeypatch, 5, 4)) == set(share(monkeypatch, 1, 4))
