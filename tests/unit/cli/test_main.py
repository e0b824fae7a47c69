"""What the command line says of errors."""

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.cli.main import _message


def test_a_message_that_quotes_a_model_cannot_move_the_cursor() -> None:
    error = ConfigurationError("the answer is none of the options: \x1b[31mred\x07, \x9bblue")
    message = _message(error)
    assert message is not None
    assert "red" in message
    assert all(one.isprintable() for one in message)


def test_an_error_that_is_nobodys_fault_has_no_message() -> None:
    assert _message(ValueError("x")) is None
