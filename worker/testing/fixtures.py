"""Pytest fixtures; pytest finds them by itself where Stepfleet is installed.

Elsewhere: `pytest_plugins = ["stepfleet.worker.testing.fixtures"]`. Nothing is imported before a
test uses one.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from stepfleet.worker.testing.scripted import Scripted
    from stepfleet.worker.testing.server import ModelServer


@pytest.fixture
def model_server() -> "Iterator[ModelServer]":
    """A running `ModelServer` without replies: use `script`, `follow` and `fail`.

    The test fails when a client broke the protocol or a rule raised, unless it has called
    `model_server.log.clear()` after looking at `model_server.violations`.
    """
    from stepfleet.worker.testing.server import ModelServer  # noqa: PLC0415 - not at each start of pytest

    with ModelServer() as server:
        yield server
        violations = server.violations
    if violations:
        pytest.fail("the model server refused requests:\n" + "\n".join(violations))


@pytest.fixture(scope="session")
def scripted_session() -> "Iterator[Scripted]":
    """What the `scripted` of all tests of a process share: a private server, made once."""
    from stepfleet.worker.testing.scripted import Scripted  # noqa: PLC0415 - not at each start of pytest

    with Scripted() as made:
        yield made


@pytest.fixture
def scripted(scripted_session: "Scripted") -> "Scripted":
    """Runs an agent against a script: `scripted.run(clerk, "How many?", ["There are 12."])`."""
    return scripted_session.anew()
