from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from celery.app.task import Context
from hypothesis import given
from hypothesis import strategies as st

from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.settings.settings import TOOL_TASK
from stepfleet.orchestrator.settings.signing import HEADER, signing_keys
from stepfleet.worker.engine.messages import Inadmissible, SignatureCheck, work_in

KEYS = signing_keys("a key of the fleet no. 1")
assert KEYS is not None
GATE = SignatureCheck(KEYS, lambda: {"stepfleet", "gpu"})
TASK, ARGS = "stepfleet.step", ["run", 0]


def request(queue: str = "stepfleet", **fields: object) -> Any:
    assert KEYS is not None
    signed = {HEADER: KEYS.sign(TASK, queue, ARGS)}
    return Context({"delivery_info": {"routing_key": queue}, **signed, **fields})


def result_or_reason(of: Callable[[], object]) -> object:
    try:
        return of()
    except Inadmissible as refused:
        return str(refused)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("run", 3), {}),
        (("run",), {"step": 3}),
        ((), {"step": 3, "run_id": "run"}),
    ],
)
def test_a_step_is_named_by_place_or_by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert work_in(TASK, args, kwargs) == Work("run", 3)


def test_a_tool_call_is_named_with_its_index() -> None:
    assert work_in(TOOL_TASK, ("run", 3, 1), {}) == Work("run", 3, 1)


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((), {}, "are not run_id, step"),
        (("run",), {}, "are not run_id, step"),
        (("run", 1, 2), {}, "are not run_id, step"),
        (("run", 1), {"step": 1}, "are not run_id, step"),
        (("run", 1), {"more": 1}, "are not run_id, step"),
        (("", 1), {}, "run_id must be text of 1 to 200 characters"),
        (("r" * 201, 1), {}, "run_id must be text of 1 to 200 characters"),
        ((["run"], 1), {}, "run_id must be text"),
        (("\ud800", 1), {}, "run_id holds a lone surrogate"),
        (("run", -1), {}, "step must be an integer from 0"),
        (("run", 2**31), {}, "step must be an integer from 0"),
        (("run", True), {}, "step must be an integer from 0"),
        (("run", 1.0), {}, "step must be an integer from 0"),
        (("run", "1"), {}, "step must be an integer from 0"),
        (("run", None), {}, "step must be an integer from 0"),
    ],
)
def test_what_names_no_step_is_refused_with_the_reason(
    args: tuple[Any, ...], kwargs: dict[str, Any], says: str
) -> None:
    with pytest.raises(Inadmissible, match=says):
        work_in(TASK, args, kwargs)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.lists(JSON, max_size=4), st.dictionaries(st.text(), JSON, max_size=3))
def test_any_arguments_give_a_hint_or_a_reason(args: list[Any], kwargs: dict[str, Any]) -> None:
    for task in (TASK, TOOL_TASK):
        found = result_or_reason(partial(work_in, task, args, kwargs))
        assert found
        if isinstance(found, Work):
            assert found.run_id.encode()
            assert 0 <= found.step < 2**31


def test_a_signed_message_is_let_through() -> None:
    unset = request(timelimit=[None, None], callbacks=None, chain=[], redelivered=1)
    for made in (request(), unset):
        assert result_or_reason(partial(GATE.check, TASK, ARGS, made)) is None


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (request(stepfleet_signature=None), "is not signed"),
        (request(stepfleet_signature="f" * 64), "no key of this worker"),
        (request(stepfleet_signature=["f"]), "no key of this worker"),
        (request("elsewhere"), "a queue that this worker does not read"),
        (request(delivery_info=None), "no key of this worker"),
        (request(timelimit=[1, 1]), "options that it has now"),
        (request(callbacks=[{"task": "x"}]), "options that it has now"),
        (request(errbacks=[{"task": "x"}]), "options that it has now"),
        (request(chain=[{"task": "x"}]), "options that it has now"),
        (request(chord={"task": "x"}), "options that it has now"),
        (request(eta="2050-01-01T00:00:00"), "options that it has now"),
        (Context(), "is not signed"),
    ],
)
def test_what_was_not_signed_as_it_is_is_refused(made: Any, says: str) -> None:
    with pytest.raises(Inadmissible, match=says):
        GATE.check(TASK, ARGS, made)


def test_a_signature_of_another_step_is_refused() -> None:
    with pytest.raises(Inadmissible, match="no key of this worker"):
        GATE.check(TASK, ["run", 1], request())
    with pytest.raises(Inadmissible, match="no key of this worker"):
        GATE.check("stepfleet.tool", ARGS, request())
