"""The one exception of the private server; its message names the cause and the fix."""

from stepfleet.orchestrator.errors import ConfigurationError


class EmbeddedRedisError(ConfigurationError):
    """The private Redis server cannot start, be joined or end."""

    code = "EMBEDDED_REDIS_ERROR"
