import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfleet.orchestrator import SigningKeys
from stepfleet.orchestrator.settings.signing import signing_keys

OLD, NEW = "old key of the fleet no. 1", "new key of the fleet no. 2"
ARGS = ["run-1", 3]


def keys(setting: str) -> SigningKeys:
    found = signing_keys(setting)
    assert found is not None
    return found


def test_what_a_key_signed_is_accepted_with_that_key_and_no_other() -> None:
    signature = keys(OLD).sign("stepfleet.step", "stepfleet", ARGS)
    assert keys(OLD).accepts(signature, "stepfleet.step", "stepfleet", ARGS)
    assert not keys(NEW).accepts(signature, "stepfleet.step", "stepfleet", ARGS)


def test_of_several_keys_the_first_signs_and_all_are_accepted() -> None:
    both = keys(f"{NEW}, {OLD}")
    assert both.sign("t", "q", ARGS) == keys(NEW).sign("t", "q", ARGS)
    assert both.accepts(keys(OLD).sign("t", "q", ARGS), "t", "q", ARGS)
    assert both.accepts(keys(NEW).sign("t", "q", ARGS), "t", "q", ARGS)


@pytest.mark.parametrize(
    ("task", "queue", "args"),
    [
        ("stepfleet.tool", "stepfleet", ARGS),
        ("stepfleet.step", "gpu", ARGS),
        ("stepfleet.step", None, ARGS),
        ("stepfleet.step", "stepfleet", ["run-2", 3]),
        ("stepfleet.step", "stepfleet", ["run-1", 4]),
        ("stepfleet.step", "stepfleet", ["run-1", 3, 0]),
        ("stepfleet.step", "stepfleet", ["run-1", "3"]),
        ("stepfleet.step", "stepfleet", ["run-1", 10**30]),
        ("stepfleet.step", "stepfleet", ["\ud800", 3]),
        ("stepfleet.step", "stepfleet", object()),
    ],
)
def test_a_signature_fits_no_other_message(task: str, queue: object, args: object) -> None:
    signature = keys(OLD).sign("stepfleet.step", "stepfleet", ARGS)
    assert not keys(OLD).accepts(signature, task, queue, args)


@given(st.one_of(st.none(), st.text(), st.binary(), st.integers(), st.lists(st.text())))
def test_nothing_that_a_stranger_sends_as_a_signature_raises(signature: object) -> None:
    assert not keys(OLD).accepts(signature, "t", "q", ARGS)


@pytest.mark.parametrize("setting", [None, "", "  "])
def test_no_key_means_no_signing(setting: str | None) -> None:
    assert signing_keys(setting) is None


@pytest.mark.parametrize("setting", ["short", f"{OLD},short", ","])
def test_a_short_key_is_refused_with_the_fix_and_without_the_key(setting: str) -> None:
    with pytest.raises(ValueError, match="openssl rand -hex 32") as raised:
        signing_keys(setting)
    assert "short" not in str(raised.value)


def test_keys_are_not_shown() -> None:
    assert OLD not in repr(keys(OLD))
