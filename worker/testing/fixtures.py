"""A pytest fixture: `pytest_plugins = ["stepfleet.worker.testing.fixtures"]`."""

from collections.abc import Iterator

import pytest

from stepfleet.worker.testing.server import ModelServer


@pytest.fixture
def model_server() -> Iterator[ModelServer]:
    """A running `ModelServer` without replies: use `script`, `follow` and `fail`.

    The test fails when a client broke the protocol or a rule raised, unless it has called
    `model_server.log.clear()` after looking at `model_server.violations`.
    """
    with ModelServer() as server:
        yield server
        violations = server.violations
    if violations:
        pytest.fail("the model server refused requests:\n" + "\n".join(violations))
