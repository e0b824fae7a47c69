"""Bearer tokens from a function of the user's, as of azure-identity; a worker alone has them.

The function returns a token as text, or an object with `token` and `expires_on` (seconds since
1970), as the SDK's do. It may be a coroutine function; a plain one runs in a thread.
"""

import asyncio
import base64
import inspect
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from typing import Any

import orjson

from stepfleet.orchestrator.errors import AgentException, ModelError
from stepfleet.orchestrator.models.endpoint import Endpoint, ModelSetupError
from stepfleet.orchestrator.models.failures import redact
from stepfleet.orchestrator.records.errors import ModelErrorCode
from stepfleet.orchestrator.references import load_reference

ENTRY_POINTS = "stepfleet.tokens"
_AGEING_SECONDS = 300.0
"""A token that expires sooner is renewed while calls use it still."""
_LATE_SECONDS = 30.0
"""A token that expires sooner is not used."""
_UNKNOWN_SECONDS = 360.0
"""For how long a token is good that says nothing of itself."""


class Tokens:
    """The token of one service and event loop. One renewal runs at once, however many calls wait.

    `clock` gives seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._function: Callable[[], Any] | None = None
        self._token = ""
        self._expires = 0.0
        self._renewal: asyncio.Task[None] | None = None

    async def opened(self, endpoint: Endpoint) -> Endpoint:
        """Return the endpoint with a token.

        Raises `ModelSetupError` where there is no such function or it returns no token, and a
        transient `ModelError` where it fails.
        """
        left = self._expires - self._clock()
        if left < _AGEING_SECONDS:
            if self._renewal is None or self._renewal.done():
                self._renewal = asyncio.create_task(self._renew(endpoint))
                self._renewal.add_done_callback(_seen)
            if left < _LATE_SECONDS:
                await self._finished(self._renewal)
        headers = {**endpoint.headers, "authorization": f"Bearer {self._token}"}
        return replace(endpoint, headers=headers, key=self._token)

    async def _renew(self, endpoint: Endpoint) -> None:
        where = f"{endpoint.variable}={endpoint.tokens}"
        try:
            if self._function is None:
                self._function = await asyncio.to_thread(_function, endpoint)
            given = await asyncio.to_thread(self._function)
            given = await given if inspect.isawaitable(given) else given
        except ModelError:
            raise
        except AgentException as error:
            raise ModelSetupError(error.message) from None
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            msg = f"no token from {where}: {redact(f'{type(error).__name__}: {error}', None)}"
            code = ModelErrorCode.CONNECTION_ERROR
            raise ModelError(msg, retryable=True, code=code) from None
        token = given if isinstance(given, str) else getattr(given, "token", None)
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise ModelSetupError(f"{where} returned a {type(given).__name__}: return the token")
        if not token:
            raise ModelSetupError(f"{where} returned an empty token")
        expires = getattr(given, "expires_on", None) or _expiry_in(token)
        self._token, self._expires = token, expires or self._clock() + _UNKNOWN_SECONDS

    @staticmethod
    async def _finished(renewal: "asyncio.Task[None]") -> None:
        try:
            # The call may be cancelled; the renewal is every call's.
            await asyncio.shield(renewal)
        except ModelSetupError as error:
            raise ModelSetupError(error.message) from None  # one for each call that waits
        except ModelError as error:
            code = ModelErrorCode.CONNECTION_ERROR
            raise ModelError(error.message, retryable=True, code=code) from None


def _function(endpoint: Endpoint) -> Callable[[], Any]:
    name, variable = endpoint.tokens, endpoint.variable
    if ":" in name:
        found = load_reference(name, variable)
    else:
        points = list(metadata.entry_points(group=ENTRY_POINTS, name=name))
        if not points:
            msg = (
                f"{variable}: {name!r} is not an entry point in {ENTRY_POINTS!r}; name one, or a "
                "function as module:name"
            )
            raise ModelSetupError(msg)
        found = points[0].load()
    if not callable(found):
        raise ModelSetupError(f"{variable}: {name} must be a function that returns a token")
    function: Callable[[], Any] = found
    return function


def _expiry_in(token: str) -> float | None:
    """Return when a JSON web token expires; None for another one."""
    parts = token.split(".")
    try:
        claims = orjson.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        return float(claims["exp"])
    except (IndexError, KeyError, TypeError, ValueError):
        return None


def _seen(renewal: "asyncio.Task[None]") -> None:
    """Take the error of a renewal that no call waits for: the next call tries again."""
    if not renewal.cancelled():
        renewal.exception()
