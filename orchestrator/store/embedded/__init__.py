"""A private Redis for one machine: real, durable, without any set-up by the user."""

from stepfleet.orchestrator.store.embedded.folder import EmbeddedRedisError
from stepfleet.orchestrator.store.embedded.server import EmbeddedRedis

__all__ = ["EmbeddedRedis", "EmbeddedRedisError"]
