from typing import Any

import pytest

from stepfleet.orchestrator.redaction import HIDDEN, Redactor, redact

ENVIRONMENT = {
    "OPENAI_API_KEY": "sk-canary-123456",
    "STEPFLEET_REDIS_URL": "redis://user:pass-word-9@host:6379/0",
    "PATH": "/usr/local/bin",
    "SHORT_TOKEN": "abc",
}


def test_secrets_of_the_environment_are_taken_out() -> None:
    """CONF-08, EVT-24"""
    text = "GET https://api/?key=sk-canary-123456 failed, redis://user:pass-word-9@host"
    shown = redact(text, ENVIRONMENT)
    assert "canary" not in shown
    assert "pass-word-9" not in shown
    assert shown.count(HIDDEN) == 2


def test_other_values_and_short_ones_stay() -> None:
    text = "/usr/local/bin abc host"
    assert redact(text, ENVIRONMENT) == text


def test_each_key_of_a_list_of_keys_is_a_secret() -> None:
    environment = {"STEPFLEET_SIGNING_KEY": "first-key-of-ours, second-key-of-ours"}
    assert redact("it was second-key-of-ours", environment) == f"it was {HIDDEN}"


DATA = ENVIRONMENT | {
    "QUOTED_SECRET": 'a"quoted\\secretü',
    "MODE_TOKEN": "production",
    "CERTIFICATE_KEY": "/etc/ssl/private/key.pem",
    "MOTTO_KEY": "one for all and all for one",
}


def test_secrets_are_taken_out_of_data_wherever_they_stand() -> None:
    hidden = Redactor(DATA).data(
        {
            "sk-canary-123456": ["my sk-canary-123456", {"deep": 'a"quoted\\secretü'}],
            "number": 10**30,
            "none": None,
        }
    )
    assert hidden == {
        HIDDEN: [f"my {HIDDEN}", {"deep": HIDDEN}],
        "number": 10**30,
        "none": None,
    }
    assert Redactor(DATA).data("sk-canary-123456") == HIDDEN
    assert Redactor(DATA).data(['x a"quoted\\secretü']) == [f"x {HIDDEN}"]


@pytest.mark.parametrize(
    "value",
    [
        None,
        "production",
        {"mode": "production", "key": "/etc/ssl/private/key.pem"},
        ["one for all and all for one", 10**30],
    ],
)
def test_data_without_secrets_and_with_common_words_stay_as_they_are(value: Any) -> None:
    """Paths, words of less than 12 characters and sentences are no secrets in data."""
    assert Redactor(DATA).data(value) == value
