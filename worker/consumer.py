"""Celery's consumer, with acknowledgements that outlive their connection forgiven.

A task that ends after its broker connection was lost acknowledges on a channel that is closed.
Celery lets the exception end the worker. Here it is said and dropped: the message is delivered
again, and the claim refuses it.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from celery.worker.consumer import Consumer

log = logging.getLogger(__name__)


class ForgivingConsumer(Consumer):
    """A consumer whose deferred calls cannot end the worker."""

    def call_soon(self, p: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `p` in the consumer's thread soon; its failure is logged."""
        return super().call_soon(partial(_forgiven, p), *args, **kwargs)

    def call_soon_ack(self, p: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Acknowledge or reject in the consumer's thread soon; its failure is logged."""
        return super().call_soon_ack(partial(_forgiven, p), *args, **kwargs)


def _forgiven(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - whatever a dead connection raises
        log.warning("an acknowledgement found its connection gone (%r); nothing is lost", error)
        return None
