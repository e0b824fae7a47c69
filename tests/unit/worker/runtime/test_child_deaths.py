"""Which child of a pool is counted as dead at a hard time limit: the one that Celery kills."""

import gc

from stepfleet.worker.runtime.child_deaths import Requests, is_child


class Received:
    """A task as Celery's signal shows it."""

    def __init__(self, task_id: str, pid: int) -> None:
        self.id = task_id
        self.worker_pid = pid


def test_only_the_child_that_had_the_task_is_counted_as_dead() -> None:
    """The run may be in the hands of another child: the task that was killed was a duplicate."""
    requests = Requests()
    duplicate = Received("duplicate", 4711)
    requests(request=duplicate)
    killed = requests.pid_of("duplicate")
    assert is_child("w1@vm:4711", "w1@vm", killed)
    assert not is_child("w1@vm:4712", "w1@vm", killed)
    assert not is_child("w2@vm:4711", "w1@vm", killed)


def test_a_task_that_nobody_knows_has_no_child() -> None:
    requests = Requests()
    requests(request=Received("gone", 4711))
    gc.collect()
    assert requests.pid_of("gone") is None
    assert not is_child("w1@vm:4711", "w1@vm", None)
