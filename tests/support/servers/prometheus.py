"""A real Prometheus that scrapes every second, and what it answers."""

import contextlib
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
from support.deadlines import wait_until
from support.servers.redis_servers import free_port

CONFIG = """\
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: fleet
    static_configs: [{{targets: {targets}}}]
"""


class Prometheus:
    """What a Prometheus on this machine answers, at `port`."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str, **given: str) -> Any:
        """Return the data of an answer of its API; raises `AssertionError` with its error."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(given)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as reply:
                body = orjson.loads(reply.read())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{given}: {error.read().decode()}") from None
        assert body["status"] == "success", body
        return body["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return the series that answer a query now: labels and value."""
        found = self.get("query", query=expression)
        return [(one["metric"], float(one["value"][1])) for one in found["result"]]

    def is_ready(self) -> bool:
        """Return whether it answers."""
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5).close()
            return True
        return False


@contextlib.contextmanager
def prometheus(folder: Path, rules: Path, ports: Sequence[int]) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes these ports of this machine as one job, with these rules."""
    port = free_port()
    targets = orjson.dumps([f"127.0.0.1:{one}" for one in ports]).decode()
    config = folder / "prometheus.yml"
    config.write_text(CONFIG.format(rules=rules, targets=targets))
    log = folder / "prometheus.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=out,
            stderr=out,
        )
    server = Prometheus(port)
    try:
        wait_until(
            lambda: server.is_ready() or process.poll() is not None, within=60, what="Prometheus"
        )
        assert process.poll() is None, log.read_text()
        yield server
    finally:
        process.kill()
        process.wait()
