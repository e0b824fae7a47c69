import base64
import json
import logging
import sys
from typing import Any
from urllib.parse import quote

import pytest

from stepfleet.orchestrator import ErrorInfo, ErrorType
from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.records.text.redaction import (
    HIDDEN,
    LONGEST,
    Redactor,
    keep_secret,
    name_secret,
    redact,
    redact_error,
)
from stepfleet.worker.telemetry.logs import CleanLines

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


FORMS = {
    "SMTP_PASS": "smtp-canary-1",
    "GITHUB_PAT": "ghp_canary0123",
    "MYSQL_PWD": "mysql-canary",
    "PWD": "/srv/somewhere",
    "SENTRY_DSN": "https://canary0123456789@o0.example.com/1",
    "PG_DSN": "host=db password=pg-canary-0 user=x",
    "MONGO_URI": "mongodb://me:mongo%2Fcanary@db:1/x",
    "BROKER": "amqp://me:rabbit@canary@host//",
    "WEBHOOKS": '["https://h.example/x?token=hook-canary-01"]',
    "PEM_KEY": "-----BEGIN-----\n" + "c" * 64 + "\n-----END-----",
    "DOCS": "https://example.com/a/page?token=no-secret-of-ours",
}


@pytest.mark.parametrize(
    "secret",
    [
        "smtp-canary-1",
        "ghp_canary0123",
        "mysql-canary",
        "canary0123456789",
        "pg-canary-0",
        "mongo%2Fcanary",
        "mongo/canary",
        "rabbit@canary",
        "hook-canary-01",
        "c" * 64,
    ],
)
def test_a_secret_is_known_by_many_names_and_in_addresses(secret: str) -> None:
    """CONF-08"""
    assert redact(f"it was {secret}.", FORMS) == f"it was {HIDDEN}."


@pytest.mark.parametrize("word", ["/srv/somewhere", "no-secret-of-ours", "example.com"])
def test_folders_and_plain_addresses_stay(word: str) -> None:
    assert redact(word, FORMS) == word


@pytest.mark.parametrize("before", ["", "u", "us", "user:"])
def test_a_secret_is_found_in_the_forms_in_which_errors_quote_it(before: str) -> None:
    secret = "quoted/canary\n0123456"
    environment = {"QUOTED_SECRET": secret}
    whole = f"{before}{secret} and more".encode()
    encoded = {base64.b64encode(whole).decode(), base64.urlsafe_b64encode(whole).decode()}
    for form in (*encoded, quote(secret, safe=""), repr(secret), json.dumps(secret)):
        assert HIDDEN in redact(form, environment)
    assert "canary" not in redact(repr(secret) + quote(secret, safe="") + secret, environment)


def test_what_a_configuration_names_is_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {
        "ODDLY_NAMED": "oddly-named-canary",
        "COMMON": "production",
        "HOME_OF": "/a/b/c/d/e/f",
    }
    redactor = Redactor(environment)
    assert redactor.data(["oddly-named-canary"]) == ["oddly-named-canary"]
    for name in environment:
        name_secret(name)
    keep_secret("STEPFLEET_SIGNING_KEY", "setting-canary-01,setting-canary-02")
    text = "oddly-named-canary production /a/b/c/d/e/f setting-canary-02"
    assert redact(text, environment) == f"{HIDDEN} production /a/b/c/d/e/f {HIDDEN}"
    assert redactor.data(["oddly-named-canary"]) == [HIDDEN]


def test_an_error_becomes_a_record_without_secrets_and_of_bounded_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RECORD_TOKEN", "record-canary-01")
    info = ErrorInfo(type=ErrorType.MODEL, code="X", message="with record-canary-01")
    assert info.message == f"with {HIDDEN}"
    assert ModelError("with record-canary-01").to_info().message == f"with {HIDDEN}"
    assert len(redact_error("x" * (10 * LONGEST))) < LONGEST + 100


def test_log_lines_are_without_secrets_tracebacks_included(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOGGED_TOKEN", "logged-canary-01")
    lines = CleanLines(logging.Formatter("%(message)s"))
    record = None
    try:
        int("logged-canary-01")
    except ValueError:
        record = logging.LogRecord("n", 40, "f", 1, "%s", ("logged-canary-01",), sys.exc_info())
    assert record is not None
    written = lines.format(record)
    assert "canary" not in written
    assert written.count(HIDDEN) == 3  # the message, the line of code, the error


@pytest.mark.parametrize(
    "name",
    ["AWS_SESSION", "PGPASS", "CRED", "GCP_CREDS", "CREDS_JSON", "DB_PASS2", "SMTP_PW", "MY_JWT"],
)
def test_short_names_of_secrets_say_so_too(name: str) -> None:
    """EVT-24"""
    assert redact("it said hunter2hunter2", {name: "hunter2hunter2"}) == f"it said {HIDDEN}"


@pytest.mark.parametrize("name", ["DESKTOP_SESSION", "SACRED_NAME", "COMPASSES", "PASSENGERS"])
def test_names_that_only_sound_so_are_left(name: str) -> None:
    assert redact("it said ubuntu-wayland", {name: "ubuntu-wayland"}) == "it said ubuntu-wayland"


@pytest.mark.parametrize("sign", "#?/[")
def test_a_password_that_is_not_encoded_is_found_whole_and_in_parts(sign: str) -> None:
    url = f"redis://user:firstpart{sign}secondpart@h/0"
    environment = {"STORE_URL": url}
    for text in (url, "port is 'firstpart'", "path is 'secondpart'"):
        assert "stpart" not in redact(text, environment)
        assert "ndpart" not in redact(text, environment)
