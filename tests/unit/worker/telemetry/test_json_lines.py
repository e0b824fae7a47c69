"""Log records as lines of JSON."""

import contextvars
import json
import logging
from typing import Any

from stepfleet.worker.telemetry import Identity, JsonLines, current_step
from stepfleet.worker.telemetry.logs import enter_task


def formatted(message: str, *args: Any, **fields: Any) -> dict[str, Any]:
    record = logging.makeLogRecord(
        {"name": "mine", "levelno": 20, "levelname": "INFO", "msg": message, "args": args, **fields}
    )
    line = JsonLines({"MY_API_KEY": 'sk-"canary"', "HOME": "/home/me"}).format(record)
    assert "\n" not in line
    told = json.loads(line)
    assert isinstance(told, dict)
    return told


def in_task(*args: Any, name: str = "stepfleet.step") -> dict[str, Any]:
    def format_there() -> dict[str, Any]:
        enter_task(name, "task-1", args)
        return formatted("hello")

    return contextvars.copy_context().run(format_there)


def test_a_line_has_time_level_logger_and_message() -> None:
    """OBS-04"""
    told = formatted("%s pieces", 3, created=0.5)
    assert told["time"] == "1970-01-01T00:00:00.500Z"
    assert (told["level"], told["logger"], told["message"]) == ("INFO", "mine", "3 pieces")
    assert "run_id" not in told


def test_what_is_written_in_a_task_has_its_ids() -> None:
    """OBS-04: steps from 1; tool calls' own tasks too."""
    told = in_task("run-1", 2)
    assert (told["run_id"], told["step"], told["task_id"]) == ("run-1", 3, "task-1")
    assert in_task("run-1", 2, 0, name="stepfleet.tool")["run_id"] == "run-1"
    assert current_step() is None


def test_a_task_of_another_kind_has_no_step() -> None:
    """OBS-04"""
    assert "run_id" not in in_task("run-1", 2, name="users.own")
    assert "run_id" not in in_task("run-1")
    assert "run_id" not in in_task(7, "x")


def test_the_newest_identity_is_that_of_the_code_that_asks() -> None:
    def entered() -> Identity | None:
        enter_task("stepfleet.step", "t", ("run-2", 0))
        return current_step()

    assert contextvars.copy_context().run(entered) == Identity("run-2", 1, task_id="t")


def test_celerys_own_words_about_a_task_have_the_tasks_id() -> None:
    """OBS-04"""
    assert formatted("received", data={"id": "task-7"})["task_id"] == "task-7"


def test_what_is_given_as_extra_is_reported_whatever_it_is() -> None:
    told = formatted("x", batch="b1", odd=object, nested={1: {"a"}})
    assert told["batch"] == "b1"
    assert "object" in told["odd"]


def test_secrets_of_the_environment_are_taken_out_of_every_line() -> None:
    """CONF-08"""
    error = ValueError('refused: sk-"canary"')
    told = formatted('key sk-"canary"', exc_info=(ValueError, error, None))
    assert told["message"] == "key [redacted]"
    assert told["exception"].endswith("ValueError: refused: [redacted]")


def test_text_that_utf8_has_no_form_for_is_reported_all_the_same() -> None:
    assert formatted("half \ud800")["message"] == "half ?"
