"""Celery's consumer, with tolerance for acknowledgements that outlive their connection.

A task that ends after its broker connection was lost acknowledges on a channel that is closed.
Celery lets the exception end the worker. Here it is logged and dropped: the message is delivered
again, and the claim refuses it.

The worker waits for an unreachable broker without limit and logs that once, instead of Celery's
line per attempt. Attempts are at least a part of a second apart, even where the broker accepts
every connection and then ends it.

Task events travel in larger and fewer bundles than Celery's, which sends one after each round of
its hub: each bundle is a round trip to the broker that the consumer's thread waits for.
"""

import logging
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import signals
from celery.events.dispatcher import EventDispatcher
from celery.utils.time import utcoffset
from celery.worker.consumer import Consumer
from celery.worker.state import maybe_shutdown

from stepfleet.orchestrator.redis_client.transient_errors import OutageLog, TransientError
from stepfleet.worker.engine.pool import Pool

log = logging.getLogger(__name__)

CELERYS_LOG = "celery.worker.consumer.consumer"
KOMBUS_LOG = "kombu.transport.redis"
REQUESTS_LOG = "celery.worker.request"
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 3.0
STEADY_SECONDS = 5.0
"""A connection that lasted this long was good: the next pause begins small again."""

TASKS = "task"
TASKS_EVENT = "task-"
CELERYS_EVENTS = "celery.events.dispatcher:EventDispatcher"
EVENTS_PER_BUNDLE = 500
EVENTS_SECONDS = 0.25
"""How long a task event waits for others."""


class TaskEvents(EventDispatcher):
    """Celery's dispatcher of events; a task's cost less, as a worker sends three for each."""

    _utcoffset = 0

    def send(self, type: str, **fields: Any) -> Any:  # noqa: A002 Celery's name
        """Send an event, those of tasks with the next bundle."""
        if not type.startswith(TASKS_EVENT) or TASKS not in self.buffer_group or self.groups:
            return super().send(type, **fields)
        if not self.enabled:
            return None
        bundle = self._group_buffer[TASKS]
        if not bundle:
            self._utcoffset = utcoffset()
        fields.update(
            type=type,
            timestamp=time.time(),
            hostname=self.hostname,
            utcoffset=self._utcoffset,
            pid=self.pid,
            clock=self.clock.forward(),
        )
        bundle.append(fields)
        if len(bundle) >= self.buffer_limit:
            self.flush()
        elif self.on_send_buffered:
            self.on_send_buffered()
        return None

    def keep(self) -> None:
        """Leave what is not sent to the dispatcher of the next connection."""
        bundle = self._group_buffer[TASKS]
        if bundle:
            self._outbound_buffer.append((list(bundle), f"{TASKS}.multi"))
            bundle.clear()


class ResilientConsumer(Consumer):
    """A consumer that waits for its broker, and whose deferred calls cannot end the worker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._watch = OutageLog("The broker")
        self._pause = 0.0
        self._lost_at = 0.0
        self._logged_failure = False
        self._events_are_due = False
        for name in (KOMBUS_LOG, REQUESTS_LOG):
            logging.getLogger(name).addFilter(is_worth_logging)
        events = kwargs["app"].events
        if events.dispatcher_cls == CELERYS_EVENTS:
            events.dispatcher_cls = TaskEvents
        super().__init__(*args, **kwargs)

    def on_ready(self) -> None:
        """Prepare a new connection before its first message."""
        if self.event_dispatcher is not None:
            self.event_dispatcher.buffer_limit = EVENTS_PER_BUNDLE
        if self._watch.current is not None:
            self._is_steady()
        super().on_ready()

    def ensure_connected(self, conn: Any) -> Any:
        """Return `conn` once it is connected; raises only when the worker is to stop."""
        if self._pause and time.monotonic() - self._lost_at < STEADY_SECONDS:
            _wait(self._pause)
        while True:
            maybe_shutdown()
            try:
                conn.ensure_connection(
                    self._cannot_connect,
                    None,
                    FIRST_PAUSE,
                    FIRST_PAUSE,
                    LONGEST_PAUSE,
                    callback=maybe_shutdown,
                    reraise_as_library_errors=False,
                )
            except conn.channel_errors as error:  # a server that answers, and refuses
                self._cannot_connect(error, LONGEST_PAUSE)
                _wait(LONGEST_PAUSE)
            else:
                self.first_connection_attempt = False
                return conn

    def on_connection_error_before_connected(self, exc: Exception) -> None:
        """Log once that the broker cannot be reached."""
        self._lost(exc)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Close the connection, and log once that it was lost."""
        self._lost(exc)
        if isinstance(self.event_dispatcher, TaskEvents):
            self.event_dispatcher.keep()
        celerys = logging.getLogger(CELERYS_LOG)
        celerys.addFilter(_is_no_warning)
        try:
            with warnings.catch_warnings():  # of what a later Celery will do with running tasks
                warnings.simplefilter("ignore", PendingDeprecationWarning)
                super().on_connection_error_after_connected(exc)
        except Exception:  # kombu stumbles over what it closes; it is closed
            log.debug("while a broken connection was closed", exc_info=True)
        finally:
            celerys.removeFilter(_is_no_warning)

    def _tolerant(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever a dead connection raises
            level = logging.DEBUG if self._logged_failure else logging.WARNING
            self._logged_failure = True
            log.log(
                level, "acknowledgements found their connection gone (%r); nothing is lost", error
            )
            return None

    def _cannot_connect(self, error: Exception, _: float) -> None:
        self._watch.failed(TransientError.AWAY, error, time.monotonic())

    def _lost(self, error: Exception) -> None:
        now = time.monotonic()
        self._pause = min(max(self._pause * 2, FIRST_PAUSE), LONGEST_PAUSE)
        self._lost_at = now
        self._logged_failure = False
        self._watch.failed(TransientError.AWAY, error, now)

    def _is_steady(self) -> None:
        """Log that the broker is back, unless the connection was lost again meanwhile."""
        self._watch.answered(time.monotonic())
        if self._watch.current is None:
            self._pause = 0.0
        elif self.hub is not None:
            self.hub.call_later(FIRST_PAUSE, self._is_steady)

    def on_send_event_buffered(self) -> None:
        """Send a task event soon, with those of the next moment."""
        if self.hub is not None and not self._events_are_due:
            self._events_are_due = True
            self.hub.call_later(EVENTS_SECONDS, self._flush_events)

    def _flush_events(self) -> None:
        self._events_are_due = False
        super()._flush_events()

    def shutdown(self) -> None:
        """Send the last events, and close everything."""
        self._tolerant(self._flush_events)
        super().shutdown()

    def call_soon(self, p: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `p` in the consumer's thread soon; its failure is logged."""
        return super().call_soon(partial(self._tolerant, p), *args, **kwargs)

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """Drop a message that cannot be decoded, and send `task_rejected`."""
        super().on_decode_error(message, exc)
        signals.task_rejected.send(sender=self, message=message, exc=exc)

    def call_soon_ack(self, p: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Acknowledge or reject in the consumer's thread; its failure is logged once.

        At once where the pool reports in that thread, soon where it does so in others.
        """
        if self.hub is not None and isinstance(self.pool, Pool):
            return self._tolerant(p, *args, **kwargs)
        call = partial(self._tolerant, p)
        # While a pool drains, Celery makes only those calls that it knows as acknowledgements.
        vars(call).update(
            __self__=getattr(p, "__self__", None), __name__=getattr(p, "__name__", "")
        )
        return super().call_soon_ack(call, *args, **kwargs)


def _wait(seconds: float) -> None:
    """Wait in the consumer's thread, which has nothing else to do without its broker."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        maybe_shutdown()
        time.sleep(min(FIRST_PAUSE, seconds))


def is_worth_logging(record: logging.LogRecord) -> bool:
    """Return whether to keep a log record about the broker; a traceback per message is noise.

    A refusal to refresh bindings also meets other commands, which log it once. The lost connection
    is logged already, and a message that could not be acknowledged is delivered again.
    """
    noise = ("maybe_refresh_binding_expiry", "Couldn't ack")
    return not record.getMessage().startswith(noise)


def _is_no_warning(record: logging.LogRecord) -> bool:
    return record.levelno < logging.WARNING
