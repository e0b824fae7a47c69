"""Signs task messages and checks signatures: HMAC-SHA256 over task, queue and arguments. Pure.

A signature proves that the owner of a key of the fleet requested this task on this queue. It holds
no time: a repeated message is harmless, because the claim refuses it. Must not know Celery, nor the
fate of refused messages.
"""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

HEADER = "stepfleet_signature"
"""The header of a task message that holds its signature."""
SHORTEST_KEY = 16
"""Characters of a key."""

_VERSION = "stepfleet-task-1"


@dataclass(frozen=True, slots=True)
class SigningKeys:
    """The keys of a fleet: the first one signs, all of them are accepted."""

    keys: tuple[bytes, ...] = field(repr=False)

    def sign(self, task: str, queue: str, args: Sequence[Any]) -> str:
        """Return the signature of a task's message. `args` are JSON data."""
        return _digest(self.keys[0], _signed(task, queue, args))

    def accepts(self, signature: object, task: str, queue: object, args: object) -> bool:
        """Return whether one of the keys made `signature`. Accepts data of any type."""
        if not isinstance(signature, str) or not signature.isascii():
            return False
        try:
            signed = _signed(task, queue, args)
        except (TypeError, ValueError):  # not JSON data: nobody can have signed it
            return False
        return any(hmac.compare_digest(_digest(key, signed), signature) for key in self.keys)


def signing_keys(setting: str | None) -> SigningKeys | None:
    """Return the keys of a setting, separated by commas; None where it has none.

    Raises `ValueError` that names the fix for a key that is too short to be a secret.
    """
    if setting is None or not setting.strip():
        return None
    keys = [one for part in setting.split(",") if (one := part.strip())]
    if not keys or any(len(one) < SHORTEST_KEY for one in keys):
        raise ValueError(
            f"every signing key needs at least {SHORTEST_KEY} characters; make one with "
            "`openssl rand -hex 32`, and separate several by commas"
        )
    return SigningKeys(tuple(one.encode() for one in keys))


def _signed(task: str, queue: object, args: object) -> bytes:
    return orjson.dumps([_VERSION, task, queue, args])


def _digest(key: bytes, signed: bytes) -> str:
    return hmac.digest(key, signed, "sha256").hex()
