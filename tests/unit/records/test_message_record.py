import pytest
from pydantic import ValidationError

from stepfleet.orchestrator import Message, Role, ToolCall

TESTS = {
    "is_user": {Role.USER},
    "is_assistant": {Role.ASSISTANT},
    "is_tool": {Role.TOOL},
    "is_developer": {Role.DEVELOPER},
    "is_system": {Role.SYSTEM, Role.DEVELOPER},
}
CALL = ToolCall(id="c1", name="add", arguments={"a": 1})


def stored(message: Message) -> Message:
    return Message.from_json(message.to_json())


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("test", TESTS)
def test_a_role_test_is_true_exactly_for_its_roles(test: str, role: Role) -> None:
    """MSG-03, MSG-04: over messages that were stored and read back."""
    assert getattr(stored(Message(role=role)), test)() is (role in TESTS[test])


@pytest.mark.parametrize("role", list(Role))
def test_has_role_is_true_when_the_role_is_any_of_those_given(role: Role) -> None:
    """MSG-05"""
    message = stored(Message(role=role))
    assert message.has_role("user", "assistant") is (role in {Role.USER, Role.ASSISTANT})
    assert message.has_role(role)
    assert not message.has_role()


def test_there_are_five_roles_and_developer_survives_storage() -> None:
    """MSG-01, MSG-02"""
    assert [role.value for role in Role] == ["system", "developer", "user", "assistant", "tool"]
    assert stored(Message(role=Role.DEVELOPER, content="x")).role is Role.DEVELOPER


def test_an_unknown_role_is_refused() -> None:
    """MSG-01"""
    with pytest.raises(ValidationError, match="role"):
        Message.from_json('{"role": "narrator", "content": "x"}')


@pytest.mark.parametrize("field", sorted(Message.model_fields))
def test_no_field_of_a_message_can_be_assigned(field: str) -> None:
    """MSG-01"""
    message = stored(Message.tool(CALL, "3"))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(message, field, getattr(message, field))


def test_a_tool_message_carries_its_calls_id_and_the_tools_name() -> None:
    """MSG-11, MSG-01"""
    message = Message.tool(CALL, "3")
    assert (message.role, message.tool_call_id, message.name) == (Role.TOOL, "c1", "add")


def test_the_text_of_an_assistant_message_never_holds_the_arguments_of_its_calls() -> None:
    """MSG-12, MSG-13, MSG-14"""
    assert Message.assistant("", (CALL,)).text == ""
    assert Message.assistant("I'll look it up", (CALL,)).text == "I'll look it up"


def test_the_text_of_blocks_is_that_of_the_text_blocks() -> None:
    """MSG-06"""
    image = {"image": {"format": "png", "source": {"bytes": "..."}}}
    message = stored(Message.user([{"text": "What "}, image, {"text": "is this?"}]))
    assert message.text == "What is this?"
    assert message.content[1] == image
