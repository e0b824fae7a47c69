"""How a step waits for a service that is out, and when it gives up. Pure.

A service is out while its circuit is open (see `store.circuits`). The step holds no slot and no
message then: it lies in the shard's set of the circuit, until that wakes it.
"""

from datetime import datetime, timedelta
from hashlib import sha256

from stepfleet.orchestrator.protocol.attempt import Failed
from stepfleet.orchestrator.protocol.claim import Claim, Outage
from stepfleet.orchestrator.records.errors import ErrorInfo

LONGEST_WAIT = 3600.0
"""Seconds after which a step looks by itself, in case that its circuit was lost."""


def circuit_id(service: str) -> str:
    """Return the id of a service's circuit."""
    return sha256(service.encode(errors="replace")).hexdigest()[:12]


def parked(
    claim: Claim, failed: Failed, now: datetime, jitter: float, patience: float
) -> tuple[Outage, float]:
    """Return the wait of the step, and the seconds after which it ends by itself."""
    since = claim.outage.since if claim.outage else now
    left = (since + timedelta(seconds=patience) - now).total_seconds()
    return Outage(since, failed.outage), max(0.0, min(LONGEST_WAIT * (0.5 + jitter / 2), left))


def gave_up(claim: Claim, failed: Failed, now: datetime, patience: float) -> ErrorInfo | None:
    """Return the error of a step that has waited for too long; None while it may wait."""
    waited = (now - claim.outage.since).total_seconds() if claim.outage else 0.0
    if waited < patience:
        return None
    text = (
        f"the step has waited {waited:.0f} s for a model that is out (outage_patience is "
        f"{patience:g} s): {failed.error.message}"
    )
    return failed.error.model_copy(update={"message": text, "retryable": False})
