"""Fixtures for every test: real Redis servers. They fail, and never skip, where none can start."""

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator

import hypothesis
import pytest
from support.servers.redis_servers import RedisServer, short_folder

# No test may reach a real model; loopback servers are allowed.
os.environ["STEPFLEET_ALLOW_MODEL_REQUESTS"] = "0"

# Imports make millions of objects, none of them garbage: nothing looks for it until they are done.
gc.disable()

# An example is as slow as the machine is busy: its time says nothing.
EXAMPLES = int(os.environ.get("EXAMPLES", "40"))
"""Of each property, where a test does not say how many; `tests/check long` tries hundreds."""
hypothesis.settings.register_profile("untimed", deadline=None, max_examples=EXAMPLES)
hypothesis.settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """Look for garbage among what the tests make, and not among what they import."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def default_data_folder() -> None:
    """Forget the `--data` of commands that tests before this one ran in this process."""
    if (options := sys.modules.get("stepfleet.orchestrator.cli.options")) is not None:
        options._data.set(options.DATA_FOLDER)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """The session's private server; tests that end or reconfigure a server take ``own_redis``."""
    with short_folder() as folder:
        server = RedisServer(folder).start()
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """Address of the session's server, emptied before each test."""
    redis_server.flush()
    return redis_server.url


@pytest.fixture
def own_redis() -> Iterator[Callable[..., RedisServer]]:
    """Make started servers of a test's own: ``own_redis(appendfsync="always")``."""
    with contextlib.ExitStack() as cleanup:

        def make(**settings: str) -> RedisServer:
            folder = cleanup.enter_context(short_folder())
            server = RedisServer(folder, **settings)
            cleanup.callback(server.kill)
            return server.start()

        yield make
