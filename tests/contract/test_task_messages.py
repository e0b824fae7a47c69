"""The message that scripts push equals what Celery itself puts on the wire."""

import base64
import json
from typing import Any

import pytest
import redis

from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.settings.settings import TASK, TOOL_TASK, load_settings
from stepfleet.orchestrator.settings.signing import HEADER, signing_keys
from stepfleet.orchestrator.store.dispatch import (
    TaskMessages,
    call_label,
    celery_app,
    step_label,
)

# Made anew for every message: ids, and who sent it.
OWN = ("id", "root_id", "origin", "correlation_id", "reply_to", "delivery_tag")


def celerys(redis_url: str) -> dict[str, Any]:
    app = celery_app(load_settings(redis_url=redis_url))
    app.send_task(
        TASK, args=["r1", 2], queue="stepfleet", shadow=step_label("solver", 2), ignore_result=True
    )
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        found: dict[str, Any] = json.loads(client.lindex("stepfleet", 0))
    app.close()
    return found


LABEL = step_label("solver", 2)


def without_own(message: dict[str, Any]) -> dict[str, Any]:
    message = json.loads(json.dumps(message))
    message["body"] = json.loads(base64.b64decode(message["body"]))
    for part in ("headers", "properties"):
        for name in OWN:
            message[part].pop(name, None)
    return message


def test_a_hand_built_message_equals_celerys_own(redis_url: str) -> None:
    ours = json.loads(TaskMessages("stepfleet").of(Work("r1", 2), LABEL))
    assert without_own(ours) == without_own(celerys(redis_url))


def test_a_hand_built_message_of_a_tool_call_equals_celerys_own(redis_url: str) -> None:
    """DIST-15: on the tool's queue."""
    app = celery_app(load_settings(redis_url=redis_url))
    label = call_label("solver", 2, "render")
    app.send_task(TOOL_TASK, args=["r1", 2, 0], queue="gpu", shadow=label, ignore_result=True)
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        celerys_own: dict[str, Any] = json.loads(client.lindex("gpu", 0))
    app.close()
    ours = json.loads(TaskMessages("gpu", TOOL_TASK).of(Work("r1", 2, 0), label))
    assert without_own(ours) == without_own(celerys_own)


def test_every_message_has_ids_of_its_own(redis_url: str) -> None:
    messages = TaskMessages("stepfleet")
    first, second = (json.loads(messages.of(Work("r1", 2), LABEL)) for _ in range(2))
    assert first["headers"]["id"] != second["headers"]["id"]
    assert first["properties"]["delivery_tag"] != second["properties"]["delivery_tag"]
    assert first["headers"]["id"] == first["headers"]["root_id"]
    assert first["headers"]["id"] == first["properties"]["correlation_id"]


def test_a_message_tells_agent_step_and_run_and_nothing_of_the_prompt() -> None:
    """DIST-02, SER-26: JSON, ids and numbers only."""
    text = TaskMessages("stepfleet").of(Work("r1", 2), LABEL)
    message = json.loads(text)
    assert message["headers"]["shadow"] == "solver: step 3"
    assert message["headers"]["argsrepr"] == "['r1', 2]"
    assert message["content-type"] == "application/json"
    assert len(text) < 1200


KEY = "a key of the fleet no. 1"


def test_a_signed_message_equals_what_celery_sends_with_the_signature(redis_url: str) -> None:
    signing = signing_keys(KEY)
    assert signing is not None
    app = celery_app(load_settings(redis_url=redis_url))
    signature = signing.sign(TASK, "stepfleet", ["r1", 2])
    app.send_task(
        TASK,
        args=["r1", 2],
        queue="stepfleet",
        shadow=step_label("solver", 2),
        ignore_result=True,
        headers={HEADER: signature},
    )
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        theirs = json.loads(client.lindex("stepfleet", 0))
    app.close()
    ours = json.loads(TaskMessages("stepfleet", signing=signing).of(Work("r1", 2), LABEL))
    assert without_own(ours) == without_own(theirs)
    assert ours["headers"][HEADER] == signature


def test_without_keys_nothing_is_signed() -> None:
    assert HEADER not in TaskMessages("stepfleet").of(Work("r1", 2), LABEL)


def test_making_a_message_touches_no_broker_that_the_environment_names(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`celery --broker` sets it; a message taken from that queue would be somebody's hint."""
    monkeypatch.setenv("CELERY_BROKER_URL", redis_url)
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        client.lpush("stepfleet", "of somebody else")
        TaskMessages("stepfleet")
        assert client.lrange("stepfleet", 0, -1) == ["of somebody else"]
        assert client.keys("*") == ["stepfleet"]
