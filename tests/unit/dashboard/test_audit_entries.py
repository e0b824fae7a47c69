"""What the audit keeps of a request: of a text, the name of its field alone."""

from typing import Any

import pytest

from stepfleet.orchestrator.dashboard.api.entries import of_change, of_file, of_result
from stepfleet.orchestrator.dashboard.api.records import ActionResult, Change, SubmissionResult

SECRET = "sk-the customer's words"


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        ({"message": SECRET, "at": 2}, '{"at":2} and message'),
        ({"runs": ["a", "b"], "message": SECRET}, '{"runs":2,"ids":["a","b"]} and message'),
        ({"filter": {"agent": "a", "error": SECRET}}, '{"filter":{"agent":"a"}} and error'),
        ({"filter": {SECRET: SECRET}}, '{"filter":{}} and 1 more'),
        ({"where": "cause=ab12"}, '{"where":"cause=ab12"}'),
        ({"where": f"error~{SECRET}"}, "{} and where"),
        (
            {"overrides": {"usd": 2.5, "max_steps": 3, "tokens": SECRET, SECRET: 1}},
            '{"overrides":{"usd":2.5}} and max_steps, tokens, 1 more',
        ),
        ({"cursor": SECRET}, "{}"),
    ],
)
def test_a_body_is_kept_as_names_counts_and_conditions(body: dict[str, Any], kept: str) -> None:
    assert of_change(Change(**body)) == kept


def test_an_entry_is_small_whatever_is_sent() -> None:
    many = {f"field_{n}": SECRET for n in range(500)}
    body = Change(overrides=many, runs=("x" * 1000,) * 500, filter={"agent": "y" * 60_000})
    assert len(of_change(body)) < 3_000


def test_results_keep_counts_ids_and_limits_and_no_reasons() -> None:
    refused = {"run-1": SECRET}
    many = ActionResult(action="retry", runs=1, left_alone=1, refused=refused, next=SECRET)
    assert of_result(many) == '{"runs":1,"left_alone":1,"refused":["run-1"]}'
    one = ActionResult(action="send", runs=1, outcome="sent", detail=SECRET, text=SECRET)
    assert of_result(one) == '{"runs":1,"left_alone":0,"outcome":"sent"}'
    fork = ActionResult(action="fork", runs=1, outcome="created", detail="new-run")
    assert '"detail":"new-run"' in of_result(fork)
    assert '"batch_id":"b"' in of_result(SubmissionResult(batch_id="b", is_new=True, runs=1))


def test_of_a_file_its_names_are_kept() -> None:
    options = {"input_field": None, "id_field": "id", "tenant": "acme", "priority": None}
    given = {"name": "a.csv", "format": "csv", "agent": "a", "id": None, "skip_invalid": False}
    kept = '{"name":"a.csv","format":"csv","agent":"a","id_field":"id","tenant":"acme"}'
    assert of_file({**given, "text": SECRET, "options": {**options, "more": SECRET}}) == kept
