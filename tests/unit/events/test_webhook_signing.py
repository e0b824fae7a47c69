"""Signatures of webhooks: what is signed, and what a receiver refuses."""

import pytest

from stepfleet.orchestrator.events.broadcast import SignatureError, signature, verify

BODY = b'{"events":[]}'
SENT = 1_700_000_000
OPENSSL = "3947de27ec923573170fccda604ddfb25583ff98dc51e96cca2e11c59545026a"


def test_a_signature_is_hmac_sha256_over_time_and_body() -> None:
    """EVT-01: the documented form, with a value computed by openssl."""
    header = signature("secret", BODY, SENT)
    assert header == f"t={SENT},v1={OPENSSL}"
    verify("secret", BODY, header, now=SENT + 10)


@pytest.mark.parametrize(
    ("body", "header", "now", "said"),
    [
        (b"{}", signature("secret", BODY, SENT), SENT, "wrong"),
        (BODY, signature("other", BODY, SENT), SENT, "wrong"),
        (BODY, signature("secret", BODY, SENT), SENT + 301, "older"),
        (BODY, signature("secret", BODY, SENT), SENT - 301, "older"),
        (BODY, signature("secret", BODY, SENT).replace(str(SENT), str(SENT + 900)), SENT, "wrong"),
        (BODY, "", SENT, "no time"),
        (BODY, f"t={SENT}", SENT, "wrong"),
    ],
)
def test_a_receiver_refuses_what_was_changed_or_kept(
    body: bytes, header: str, now: float, said: str
) -> None:
    """EVT-01"""
    with pytest.raises(SignatureError, match=said):
        verify("secret", body, header, now=now)
