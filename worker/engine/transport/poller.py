"""When a channel fetches: with credit after a wake-up or a due poll, or with acknowledgements.

Replaces the part of kombu's poller that keeps a blocking pop outstanding on every channel. Must
not know what a fetch does.
"""

from contextlib import suppress
from typing import Any

from redis.exceptions import ResponseError

from stepfleet.worker.engine.transport.kombu_types import StockPoller

FETCHING = "BRPOP"
WAKEUP = "WAKEUP"


class Poller(StockPoller):
    """Polls the fetching, the fanout and the wake-up connection of each channel."""

    def on_poll_start(self) -> None:
        """Send what is due; called before every poll."""
        for channel in tuple(self._channels):
            if channel.active_queues and not channel.backing_off:
                try:
                    self._send_due(channel)
                except ResponseError as error:  # unlike a lost connection: nothing was done
                    channel.back_off(error)
            if channel.active_fanout_queues:
                self._register_LISTEN(channel)

    def _send_due(self, channel: Any) -> None:
        channel.restore_pending()
        if channel.wants_to_fetch():
            self._fetch(channel)

    def _fetch(self, channel: Any) -> None:
        if not self._client_registered(channel, channel.client, FETCHING):
            channel.reset_connection()
            self._register(channel, channel.client, FETCHING)
            channel.prepare_connection()
        if channel.tracks_keys and not self._client_registered(channel, channel.wakeups, WAKEUP):
            self._register(channel, channel.wakeups, WAKEUP)
            channel.open_wakeups()
        channel.send_fetch()

    def _update_brpop_polling(self) -> None:
        """Nothing is paused: a fetch requests no more messages than there is credit for."""

    def maybe_restore_messages(self) -> None:
        """Restore messages of dead consumers; what Redis refuses is tried again next time."""
        with suppress(ResponseError):
            super().maybe_restore_messages()

    def on_readable(self, fileno: int) -> Any:
        """Read what has arrived, of whatever kind."""
        found = self._fd_to_chan.get(fileno)
        if found is None:
            return None
        channel, kind = found
        return channel.handlers[kind]()

    def get(self, callback: Any, timeout: float | None = None) -> Any:
        """Wait for one event without a hub, at most until the next poll of the queues."""
        longest = min((channel.poll_seconds for channel in self._channels), default=1.0)
        return super().get(callback, longest if timeout is None else min(timeout, longest))
