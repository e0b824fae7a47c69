"""A server of object storage for the tests of archives."""

from collections.abc import Iterator

import pytest
from support.servers.object_storage import ObjectStorage, object_storage


@pytest.fixture(scope="session")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStorage]:
    """The session's server of S3; tests that stop one make one of their own."""
    with object_storage(tmp_path_factory.mktemp("moto")) as made:
        yield made
