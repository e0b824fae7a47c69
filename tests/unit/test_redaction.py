from stepfleet.orchestrator.redaction import HIDDEN, redact

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
