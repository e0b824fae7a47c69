"""Ids of any shape: kept as they are or refused in words, never a wrong key and never a crash."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepfleet.orchestrator import Agent, AgentException, ConfigurationError, Fleet, tool
from stepfleet.orchestrator.protocol.claim import Refusal, Work
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.store import open_store

FUZZ = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# Everything that a message, a file or a caller can bring: also lone surrogates and NUL.
WEIRD = st.one_of(
    st.text(max_size=40),
    st.text(alphabet=st.characters(), max_size=300),
    st.sampled_from(
        [
            "*",
            "{s00}",
            "}:run:{",
            "sf:{s00}:due",
            "a:log",
            "a\nb",
            "a\r\nSET x y\r\n",
            "\x00",
            "\ud800",
            "../../etc/passwd",
            "' OR 1=1 --",
            "%s%n",
            "<script>",
            "0" * 513,
            "\u202e\u200b",
        ]
    ),
)
VALID = st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200)


@tool(read_only=True)
def look(what: str) -> str:
    """Look something up."""
    return what


AGENT = Agent("ids", model="openai:scripted", tools=[look])


@pytest.fixture
def fleet(redis_url: str) -> Iterator[Fleet]:
    with Fleet(redis_url) as opened:
        yield opened


@given(ids=st.lists(WEIRD | st.integers(), min_size=1, max_size=6, unique_by=str))
@FUZZ
def test_a_batch_s_ids_come_back_as_they_were_given_or_are_refused(
    fleet: Fleet, ids: list[str | int]
) -> None:
    rows = [{"id": one, "input": "question", "metadata": {"own": 1}} for one in ids]
    if not all(fits(one) for one in ids):
        with pytest.raises(AgentException, match="line"):
            fleet.submit_batch(rows, agent=AGENT)
        return
    batch = fleet.submit_batch(rows, agent=AGENT)
    batch.cancel()
    assert [result.line_id for result in batch.results(ordered=True)] == [str(one) for one in ids]


def fits(line_id: str | int) -> bool:
    """Whether a line may have this id: 1 to 512 characters of valid Unicode, or digits."""
    if isinstance(line_id, int):
        return len(str(line_id)) <= 512
    return 0 < len(line_id) <= 512 and is_unicode(line_id)


def is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


VERBS: list[Callable[[Fleet, str], Any]] = [
    lambda fleet, one: fleet.runs.show(one),
    lambda fleet, one: fleet.runs.result(one),
    lambda fleet, one: fleet.runs.cancel(one),
    lambda fleet, one: fleet.runs.pause(one),
    lambda fleet, one: fleet.runs.retry(one),
    lambda fleet, one: list(fleet.runs.events(one)),
    lambda fleet, one: fleet.batches.get(one).progress(),
    lambda fleet, one: fleet.submit(AGENT, "x", run_id=one),
]


@pytest.mark.parametrize("number", range(len(VERBS)))
@given(given_id=WEIRD)
@FUZZ
def test_an_id_that_is_nobody_s_is_said_to_be_so(
    fleet: Fleet, redis_url: str, number: int, given_id: str
) -> None:
    with pytest.raises(AgentException):
        VERBS[number](fleet, given_id)
    with redis.Redis.from_url(redis_url) as client:
        names = {key.decode() for key in client.scan_iter() if b":run:" in key}
    assert names == set()


def test_a_new_run_takes_a_uuid_as_its_text(fleet: Fleet) -> None:
    first, second, third = uuid4(), uuid4(), uuid4()
    assert fleet.submit(AGENT, "x", run_id=first) == str(first)
    assert fleet.submit(AGENT, "x", run_id=second, parent=first) == str(second)
    assert fleet.runs.show(str(second)).header["parent"] == str(first)
    checkpoint = fleet.history.checkpoint(str(first))
    assert fleet.history.restore(checkpoint, AGENT, run_id=third) == str(third)
    assert fleet.runs.show(str(third)).run_id == str(third)


@pytest.mark.parametrize("field", ["run_id", "parent"])
def test_a_new_run_names_the_field_of_an_id_that_is_none(fleet: Fleet, field: str) -> None:
    wrong: Any = {field: 5}
    with pytest.raises(ConfigurationError, match=f"{field} is of type int; write a UUID, or its"):
        fleet.submit(AGENT, "x", **wrong)


@pytest.mark.parametrize("number", range(len(VERBS)))
@pytest.mark.parametrize("wrong", [5, 1.5, b"x", ["x"], object()])
def test_an_id_that_is_no_text_is_refused_by_its_type(
    fleet: Fleet, number: int, wrong: Any
) -> None:
    with pytest.raises(ConfigurationError, match=f"is of type {type(wrong).__name__}; write"):
        VERBS[number](fleet, wrong)


@pytest.mark.parametrize("verb", VERBS[:-1])
def test_a_uuid_of_what_is_there_is_refused_with_the_fix(
    fleet: Fleet, verb: Callable[[Fleet, Any], Any]
) -> None:
    with pytest.raises(ConfigurationError, match=r"is of type UUID; write text, such as str\(id\)"):
        verb(fleet, uuid4())


async def test_a_claim_of_any_id_is_refused_and_writes_nothing(redis_url: str) -> None:
    """Hints come from the broker: whatever they name, the scripts find no run."""
    opened = await open_store(load_settings(redis_url=redis_url), worker="w")
    store = opened.steps
    examples: list[str] = []

    @given(VALID)
    @FUZZ
    def gather(one: str) -> None:
        examples.append(one)

    gather()
    with redis.Redis.from_url(redis_url) as client:
        before = sorted(client.scan_iter())
        for run_id in [*examples, "{s00}", "}:run:{", "sf:{s00}:due", "a\r\nSET x y\r\n"]:
            claimed = await store.claim(Work(run_id, 0), "token")
            assert str(getattr(claimed, "why", "")) == "unknown"
            taken = await store.calls.take(Work(run_id, 0, 0), "token")
            assert isinstance(taken, Refusal)
        assert sorted(client.scan_iter()) == before
    await opened.aclose()


def test_a_file_of_odd_ids_names_every_line_that_cannot_be_used(
    fleet: Fleet, tmp_path: Path
) -> None:
    file = tmp_path / "odd.jsonl"
    bad: list[Any] = ["", True, 1.5, [], {}, "x" * 513, "\ud800"]
    rows = [{"id": one, "input": "question"} for one in ["fine", *bad]]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(AgentException) as caught:
        fleet.submit_batch(str(file), agent=AGENT)
    said = str(caught.value)
    assert "7 of 8 lines cannot be used" in said
    for line in range(2, 9):
        assert f"line {line}:" in said
