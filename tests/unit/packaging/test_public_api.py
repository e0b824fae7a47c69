"""Nothing that users may import goes away unnoticed."""

from support.documents.public_api import LIST, offered, public


def test_no_public_name_field_method_or_argument_has_gone() -> None:
    """QUAL-06: what is new may be added to the list at any time."""
    kept = LIST.read_text(encoding="utf-8").split("\n")[:-1]
    assert len(kept) > 1_000
    gone = sorted(set(kept) - set(offered()))
    assert gone == [], "removed on purpose? see tests/support/documents/public_api.py"


def test_the_list_names_every_public_name() -> None:
    """QUAL-06"""
    kept = set(LIST.read_text(encoding="utf-8").split("\n"))
    assert public().keys() - kept == set(), (
        "write the list anew: tests/support/documents/public_api.py"
    )


def test_a_method_that_loses_an_argument_is_seen() -> None:
    """QUAL-06: also methods of classes, and functions."""
    lines = set(offered())
    assert {
        "types.FleetHistory.fork(run_id)",
        "lazy_tool(schema)",
        "StopReason.GUARD",
        "StepResult.step",
    } <= lines
    assert "Agent.no_such_method" not in lines
