"""The message that shows a model the images of its tools."""

from datetime import UTC, datetime
from typing import Any

from stepfleet.orchestrator import Role, ToolCallRecord
from stepfleet.orchestrator.records.conversation.messages import media_messages

IMAGE = {"image": {"format": "png", "source": {"bytes": "AAAA"}}}


def record(name: str, *media: dict[str, Any]) -> ToolCallRecord:
    return ToolCallRecord(
        tool_name=name,
        call_id=f"c-{name}",
        result="drawn",
        timestamp=datetime(2026, 1, 1, tzinfo=UTC),
        media=media,
    )


def test_results_without_images_add_no_message() -> None:
    assert media_messages([record("plot")]) == ()


def test_all_images_of_a_turn_stand_in_one_message_that_is_no_prompt() -> None:
    (message,) = media_messages([record("plot", IMAGE), record("add"), record("map", IMAGE)])
    assert message.role is Role.USER
    assert not message.is_prompt()
    assert message.content == [
        {"text": "Shown by tool plot (call c-plot):"},
        IMAGE,
        {"text": "Shown by tool map (call c-map):"},
        IMAGE,
    ]


def test_a_record_without_images_is_stored_as_before() -> None:
    assert "media" not in record("plot").to_json()
    assert "version" not in record("plot").to_json()
    assert ToolCallRecord.from_json(record("plot", IMAGE).to_json()) == record("plot", IMAGE)
