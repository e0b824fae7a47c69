"""What Flower's own pages show of our tasks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flower import __file__ as flower_file

from stepfleet.orchestrator.dashboard.access import is_rebindable
from stepfleet.orchestrator.dashboard.tasks import readable, run_of, with_link

RUN = "461b350b-6711-5ecf-8f27-707a1d1cd60d"


def task(name: Any, args: Any, exception: Any = None, result: Any = None) -> Any:
    return SimpleNamespace(name=name, args=args, exception=exception, result=result)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("solver: step 3", f"['{RUN}', 2]"),
        ("solver: step 1", f"('{RUN}', 0)"),
        ("a: step 2, lookup", f"['{RUN}', 1, 0]"),
        ("<b>: step 9: step 2\n", f"['{RUN}', 1]"),
    ],
)
def test_a_step_and_a_tool_call_name_their_run(name: str, args: str) -> None:
    assert run_of(task(name.strip(), args)) == RUN


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("solver: step 3", f"['{RUN}', 1]"),
        ("theirs.add", f"['{RUN}', 1]"),
        ("solver: step 3", "['../../evil', 2]"),
        ("solver: step 3", f"['{RUN}\"><script>', 2]"),
        ("solver: step 3", None),
        (None, f"['{RUN}', 2]"),
        (17, {"a": 1}),
        ("solver: step " + "9" * 5_000, f"['{RUN}', {'9' * 5_000}]"),
    ],
)
def test_other_tasks_name_none(name: Any, args: Any) -> None:
    assert run_of(task(name, args)) is None


def test_texts_of_tasks_have_no_characters_that_cannot_be_seen() -> None:
    shown = readable(task("clerk: step 1", f"['{RUN}', 0]", "StepFailed('\u202egnp')", None))
    assert (shown.exception, shown.result) == ("\ufffdgnp",) * 2


def test_a_failure_is_the_steps_own_and_short_where_a_result_would_be() -> None:
    error = "tool: ValueError: it's <b> \\ 'no' " + "x" * 100
    shown = readable(task("a: step 1", f"['{RUN}', 0]", f"StepFailed({error!r})"))
    assert shown.exception == error
    assert (len(shown.result), shown.result[-1]) == (40, "…")
    done = readable(task("a: step 1", f"['{RUN}', 0]", None, "'completed'"))
    assert done.result == "completed"


@pytest.mark.parametrize("raised", ["StepFailed('a'*9)", "StepFailed(x)", "ValueError('a')", "'"])
def test_what_is_no_failure_of_a_step_stays(raised: str) -> None:
    assert readable(task("a: step 1", f"['{RUN}', 0]", raised)).exception == raised
    theirs = task("theirs.add", "[1]", "StepFailed('a')", "'b'")
    assert (readable(theirs).exception, theirs.result) == ("StepFailed('a')", "'b'")


def test_flowers_page_of_a_task_has_the_place_for_the_link() -> None:
    page = (Path(flower_file).parent / "templates" / "task.html").read_bytes()
    assert b"page_of_run(run)" in with_link(page)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "[::1]", "10.0.0.7", "flower"])
def test_addresses_and_names_without_a_domain_cannot_be_turned(host: str) -> None:
    assert not is_rebindable(host)


@pytest.mark.parametrize("host", ["evil.test", "localhost.evil.test", "127.0.0.1.nip.io"])
def test_names_of_the_dns_can(host: str) -> None:
    assert is_rebindable(host)
