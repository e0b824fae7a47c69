"""What Celery shows as the traceback of a failed task."""

from types import SimpleNamespace

import pytest

from stepfleet.orchestrator.errors import StoreError
from stepfleet.worker.tasks import StepFailed, show_users_code

OURS = 'File "worker/tasks.py", line 1, in step'


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        (StepFailed("tool: x", "Traceback: agents.py"), "Traceback: agents.py"),
        (StepFailed("tool: x"), "tool: x (no code of the agent raised it)"),
        (StoreError("Redis is full"), "Redis is full (no code of the agent raised it)"),
        (KeyError("a defect"), OURS),
    ],
)
def test_it_is_that_of_the_users_code_and_ours_only_for_a_defect(
    raised: Exception, shown: str
) -> None:
    einfo = SimpleNamespace(exception=raised, traceback=OURS)
    show_users_code(einfo)
    assert shown in einfo.traceback
    assert (OURS in einfo.traceback) == isinstance(raised, KeyError)
