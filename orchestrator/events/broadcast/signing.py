"""Signs the bodies of webhooks and checks signatures: HMAC-SHA256 over time and body. Pure."""

import hashlib
import hmac

from stepfleet.orchestrator.errors import ConfigurationError

HEADER = "stepfleet-signature"
TOLERANCE = 300


class SignatureError(ConfigurationError):
    """A webhook's body was not sent by the fleet, or long ago."""


def signature(secret: str, body: bytes, timestamp: int) -> str:
    """Return the header's value for a body sent at `timestamp` (seconds since 1970, UTC)."""
    return f"t={timestamp},v1={_digest(secret, body, timestamp)}"


def verify(secret: str, body: bytes, header: str, now: float, tolerance: float = TOLERANCE) -> None:
    """Return if `header` signs `body`; a receiver calls this with the body's exact bytes.

    Raises `SignatureError` for a wrong signature, and for one that is more than `tolerance`
    seconds away from `now`: a recorded request cannot be sent again later.
    """
    fields = dict(part.partition("=")[::2] for part in header.split(","))
    stamp = fields.get("t", "")
    if not stamp.isascii() or not stamp.isdigit():
        raise SignatureError(f"the header {HEADER} has no time: it reads t=SECONDS,v1=HEX")
    expected = _digest(secret, body, int(stamp))
    if not hmac.compare_digest(expected.encode(), fields.get("v1", "").encode()):
        raise SignatureError("the signature is wrong: compare the secrets of fleet and receiver")
    if abs(now - int(stamp)) > tolerance:
        raise SignatureError(f"the signature is older than {tolerance:g} s; check the clocks")


def _digest(secret: str, body: bytes, timestamp: int) -> str:
    return hmac.new(secret.encode(), b"%d." % timestamp + body, hashlib.sha256).hexdigest()
