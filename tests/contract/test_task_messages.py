"""The message that scripts push equals what Celery itself puts on the wire."""

import base64
import json
from typing import Any

import redis

from stepfleet.orchestrator.dispatch import StepMessages, step_label
from stepfleet.orchestrator.protocol.claim import StepHint
from stepfleet.orchestrator.settings import TASK, load_settings
from stepfleet.orchestrator.store.opening import celery_app

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


def without_own(message: dict[str, Any]) -> dict[str, Any]:
    message = json.loads(json.dumps(message))
    message["body"] = json.loads(base64.b64decode(message["body"]))
    for part in ("headers", "properties"):
        for name in OWN:
            message[part].pop(name, None)
    return message


def test_a_hand_built_message_equals_celerys_own(redis_url: str) -> None:
    ours = json.loads(StepMessages("stepfleet").build(StepHint("r1", 2), "solver"))
    assert without_own(ours) == without_own(celerys(redis_url))


def test_every_message_has_ids_of_its_own(redis_url: str) -> None:
    messages = StepMessages("stepfleet")
    first, second = (json.loads(messages.build(StepHint("r1", 2), "solver")) for _ in range(2))
    assert first["headers"]["id"] != second["headers"]["id"]
    assert first["properties"]["delivery_tag"] != second["properties"]["delivery_tag"]
    assert first["headers"]["id"] == first["headers"]["root_id"]
    assert first["headers"]["id"] == first["properties"]["correlation_id"]


def test_a_message_tells_agent_step_and_run_and_nothing_of_the_prompt() -> None:
    """DIST-02, SER-26: JSON, ids and numbers only."""
    text = StepMessages("stepfleet").build(StepHint("r1", 2), "solver")
    message = json.loads(text)
    assert message["headers"]["shadow"] == "solver: step 3"
    assert message["headers"]["argsrepr"] == "['r1', 2]"
    assert message["content-type"] == "application/json"
    assert len(text) < 1200
