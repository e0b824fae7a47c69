"""What `stepfleet run` says of one answer that was refused."""

import pytest
from support.runs.agent_records import a_result, a_step

from stepfleet.orchestrator import StopReason
from stepfleet.orchestrator.cli.ask import print_answer
from stepfleet.orchestrator.cli.options import SOME_FAILED
from stepfleet.orchestrator.records.errors import refused_answer
from stepfleet.orchestrator.records.run.facts import last_error

WHY = refused_answer("verdict: 'maybe' is no verdict")
STEP = a_step().model_copy(update={"refused": WHY})
REFUSED = a_result(StopReason.STEPS_LIMIT, steps=(STEP,), last_error=last_error([STEP]))


def test_a_refused_answer_is_named_after_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_answer(REFUSED, json=False) == SOME_FAILED
    assert WHY in capsys.readouterr().err
