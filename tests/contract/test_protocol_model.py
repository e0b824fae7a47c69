"""The step protocol against a plain model of it: random operations on a real Redis.

After each of them the invariants of the design hold, and nothing but what the model says changed.
"""

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from protocol_machine import ProtocolMachine, rig
from redis_servers import RedisServer

GATE = settings(
    max_examples=int(__import__('os').environ.get('EX','150')),
    stateful_step_count=50,
    deadline=None,
    database=None,
    derandomize=not __import__('os').environ.get('RND'),
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
SOAK = settings(GATE, max_examples=20_000, stateful_step_count=120, derandomize=False)


def test_random_operations_keep_the_invariants(redis_server: RedisServer) -> None:
    with rig(redis_server.unix_url) as shared:
        run_state_machine_as_test(lambda: ProtocolMachine(shared), settings=GATE)
        print(shared.operations, shared.told)
        assert shared.operations > 20_000
