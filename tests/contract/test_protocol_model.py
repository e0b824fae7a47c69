"""The step protocol against a plain model of it: random operations on a real Redis.

After each of them the invariants of the design hold, and nothing but what the model says changed.
"""

import pytest
from hypothesis import HealthCheck, Phase, settings
from support.protocol.machine import run_machine, run_until_all
from support.protocol.pages import PAGED, paged
from support.protocol.rig import rig
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator.store import lua

GATE = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    database=None,
    derandomize=True,
    report_multiple_bugs=False,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
# Hypothesis draws from the constants of whatever modules are loaded, so that the same examples come
# only in the same company: how often each operation is done differs a little.
OPERATIONS = {
    *("create", "claim", "deliver", "journal", "clock", "loss", "rescue"),
    *("commit continue", "commit finish", "commit retry", "commit release", "commit wait"),
    "commit hold",
    *("cancel", "pause", "resume", "retry", "upkeep"),
    *("flag", "late flag", "lift", "sweep", "fleet"),
    "wake",
    *("take", "keep", "leave", "deliver call", "deliver result"),
}
SELDOM = 4
SOAK = settings(GATE, max_examples=5_000, stateful_step_count=100, derandomize=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a failure is made small before it is told; without one it is a minute
def test_random_operations_keep_the_invariants(redis_server: RedisServer) -> None:
    """DIST-03, DIST-04, DIST-05, DIST-06, DIST-08, DIST-10, DIST-13: tens of thousands of them."""
    with rig(redis_server.unix_url) as shared:
        run_until_all(shared, GATE, OPERATIONS, times=SELDOM)
    assert shared.operations > 12_000


@pytest.mark.timeout(300)
def test_the_invariants_hold_where_every_claim_takes_pages(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log by the step, the journal by the field: what a claim gets is the same."""
    source = lua.source
    texts = {name: source(name) for name in PAGED}
    small = paged(texts)
    monkeypatch.setattr(lua, "source", lambda name: small.get(name) or source(name))
    monkeypatch.setattr(lua, "digest", lua.digest.__wrapped__)
    with rig(redis_server.unix_url) as shared:
        run_machine(shared, settings(GATE, max_examples=15, phases=[Phase.generate]))
    assert shared.told["claim"] > SELDOM


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_other_random_operations_keep_the_invariants(redis_server: RedisServer) -> None:
    """Other examples in each run, and longer ones."""
    with rig(redis_server.unix_url) as shared:
        run_machine(shared, SOAK)
    assert shared.operations > 200_000
