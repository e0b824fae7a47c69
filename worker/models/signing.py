"""Keeps AWS's credentials of a worker fresh, and signs calls with them, off the event loop."""

import asyncio
from collections.abc import Mapping

from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.models.endpoint import ModelSetupError
from stepfleet.orchestrator.models.signing import Credentials
from stepfleet.orchestrator.records.errors import ModelErrorCode

_LARGE = 256 * 1024
"""Bodies from so many bytes on are signed on a thread."""


class Signer:
    """Signs the calls of one event loop. One refresh runs at once, however many calls wait."""

    def __init__(self) -> None:
        self._credentials = Credentials()
        self._refresh: asyncio.Task[None] | None = None

    async def signed(
        self, region: str, url: str, headers: Mapping[str, str], body: bytes
    ) -> Mapping[str, str]:
        """Return the headers of a signed POST.

        Raises `ModelSetupError` where there are no credentials, and a transient `ModelError` where
        their source fails.
        """
        if self._credentials.are_ageing:
            if self._refresh is None or self._refresh.done():
                self._refresh = asyncio.create_task(self._refreshed())
                self._refresh.add_done_callback(_seen)
            if self._credentials.are_late:
                await self._finished(self._refresh)
        if len(body) < _LARGE:
            return self._credentials.sign(region, url, headers, body)
        return await asyncio.to_thread(self._credentials.sign, region, url, headers, body)

    async def _refreshed(self) -> None:
        await asyncio.to_thread(self._credentials.refresh)

    @staticmethod
    async def _finished(refresh: asyncio.Task[None]) -> None:
        try:
            # The call may be cancelled; the refresh is every call's.
            await asyncio.shield(refresh)
        except ModelSetupError as error:
            raise ModelSetupError(error.message) from None  # one for each call that waits
        except ModelError as error:
            code = ModelErrorCode.CONNECTION_ERROR
            raise ModelError(error.message, retryable=True, code=code) from None


def _seen(refresh: asyncio.Task[None]) -> None:
    """Take the error of a refresh that no call waits for: the next call tries again."""
    if not refresh.cancelled():
        refresh.exception()
