"""A server of S3 as a real process: moto's, over HTTP."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

from support.servers.foreign import serving
from support.servers.redis_servers import free_port

KEY, SECRET = "made-up-key-of-tests", "made-up-secret-of-tests"


class ObjectStorage:
    """The server at `address`; `log` has a line for each of its answers."""

    def __init__(self, address: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.address = address
        self.process = process
        self.log = log

    def bucket(self, name: str) -> str:
        """Make a bucket, and return its name."""
        self._send("PUT", name)
        return name

    def url(self, path: str, **options: str) -> str:
        """Return the URL of an archive at `bucket/prefix`."""
        given = {"endpoint_url": self.address, "key": KEY, "secret": SECRET, **options}
        return f"s3://{path}?{'&'.join(f'{name}={one}' for name, one in given.items())}"

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Refuse every key, since none of them is of a user of this server."""
        self._send("POST", "moto-api/reset-auth", b"0")
        try:
            yield
        finally:
            self._send("POST", "moto-api/reset-auth", b"inf")

    def _send(self, method: str, path: str, body: bytes = b"") -> None:
        kind = {"Content-Type": "application/octet-stream"}
        request = Request(f"{self.address}/{path}", body, kind, method=method)  # noqa: S310 - ours
        urlopen(request, timeout=60).close()  # noqa: S310 - the same


@contextlib.contextmanager
def object_storage(folder: Path) -> Iterator[ObjectStorage]:
    """Run a server without buckets that takes every key; its log is in `folder`."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    log = folder / "moto.log"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with serving(command, address, log=log, env=os.environ) as process:
        yield ObjectStorage(address, process, log)
