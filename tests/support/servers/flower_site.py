"""A running Flower as a browser sees it."""

import base64
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPMessage
from pathlib import Path
from typing import Any

import orjson
from celery import Celery
from support.deadlines import wait_until
from support.servers.redis_servers import free_port
from support.workers.command_line import CommandLine

AUTH = "me:flower-secret"
LONG = 180.0


class Site:
    """Gets pages, with the right password unless told otherwise."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str, auth: str | None = AUTH, host: str = "127.0.0.1") -> tuple[int, str]:
        """Return status and body of a page; status 0 while nobody listens."""
        return self.ask("GET", path, auth, host)

    def ask(
        self, verb: str, path: str, auth: str | None = AUTH, host: str = "127.0.0.1"
    ) -> tuple[int, str]:
        """Return status and body of an answer to any verb, as `get` does."""
        headers = {"Host": f"{host}:{self.port}"}
        if auth:
            headers["Authorization"] = f"Basic {base64.b64encode(auth.encode()).decode()}"
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(verb, path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        except ConnectionError:
            return 0, ""
        finally:
            connection.close()

    def is_up(self) -> bool:
        """Return whether it answers."""
        try:
            return self.get("/healthcheck", auth=None)[0] == 200
        except OSError:
            return False

    def line(self, path: str) -> str:
        """Return the first line of an answer of the JSON API, which may have no end."""
        headers = {"Authorization": f"Basic {base64.b64encode(AUTH.encode()).decode()}"}
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", self.address(path), headers=headers)
            return connection.getresponse().readline().decode()
        finally:
            connection.close()

    def file(self, path: str) -> tuple[int, HTTPMessage, str]:
        """Return status, headers and body of a file at an address."""
        known = {"Authorization": f"Basic {base64.b64encode(AUTH.encode()).decode()}"}
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path, headers=known)
            response = connection.getresponse()
            return response.status, response.headers, response.read().decode()
        finally:
            connection.close()

    def address(self, path: str) -> str:
        """Return the address of a path of the JSON API."""
        return f"/api/stepfleet{path}"

    def api(
        self, path: str, body: Any = None, *, auth: str | None = AUTH, **headers: str
    ) -> tuple[int, Any]:
        """Return status and data of the JSON API's answer; a `body` is posted."""
        known = (
            {"Authorization": f"Basic {base64.b64encode(auth.encode()).decode()}"} if auth else {}
        )
        if body is not None:
            known["Content-Type"] = "application/json"
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            given = None if body is None else orjson.dumps(body)
            verb = "GET" if body is None else "POST"
            connection.request(verb, self.address(path), given, {**known, **headers})
            response = connection.getresponse()
            assert response.headers["Content-Type"].startswith("application/json")
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert "Access-Control-Allow-Origin" not in response.headers
            return response.status, orjson.loads(response.read())
        finally:
            connection.close()

    def tasks(self) -> dict[str, dict[str, Any]]:
        """Return what Flower knows of tasks."""
        status, body = self.get("/api/tasks")
        assert status == 200, body
        found: dict[str, dict[str, Any]] = orjson.loads(body)
        return found

    def until_it_hears(self, broker: str) -> None:
        """Return when Flower shows what it is told: what came before that, nobody tells it again.

        That somebody subscribes says less: it may be another one than Flower.
        """
        with (
            Celery(broker=broker, set_as_current=False) as app,
            app.connection_for_write() as connection,
            app.events.Dispatcher(connection, hostname="a-probe") as teller,
        ):

            def is_shown() -> bool:
                teller.send("worker-heartbeat")
                return "a-probe" in self.get("/workers?json=1")[1]

            wait_until(is_shown, within=LONG, what="Flower to hear")


def started_flower(
    commands: CommandLine, redis_url: str, *, auth: str | None = AUTH, **environment: str
) -> Site:
    """Start `stepfleet flower`, with a password, and return when it has said its address."""
    port = free_port()
    given = {"STEPFLEET_REDIS_URL": redis_url, **environment}
    if auth:
        given["STEPFLEET_FLOWER_BASIC_AUTH"] = auth
    commands.start("flower", "--port", str(port), **given)
    commands.until_said("Flower: http", within=LONG)
    return Site(port)


def restart_flower(commands: CommandLine, site: Site, redis_url: str) -> None:
    """End the `stepfleet flower` of `commands`, and start it again on its port."""
    commands.stop(within=LONG)
    again = {"STEPFLEET_REDIS_URL": redis_url, "STEPFLEET_FLOWER_BASIC_AUTH": AUTH}
    commands.start("flower", "--port", str(site.port), **again)
    wait_until(lambda: site.get("/")[0] == 200, within=LONG, what="Flower again")


class Prefixed(Site):
    """Flower with `--url_prefix=ops`."""

    def ask(
        self, verb: str, path: str, auth: str | None = AUTH, host: str = "127.0.0.1"
    ) -> tuple[int, str]:
        """Do as a `Site`, with the prefix."""
        return super().ask(verb, f"/ops{path}", auth, host)

    def address(self, path: str) -> str:
        """Return the address of a path of the API."""
        return f"/ops{super().address(path)}"


CONFIG = "from stepfleet.orchestrator.dashboard import install\n\ninstall()\n"


@contextlib.contextmanager
def stock_flower(
    folder: Path, redis_url: str, *options: str, **environment: str
) -> Iterator[Prefixed]:
    """Run a stock `celery flower` with a `flowerconfig.py` of ours, below a prefix.

    `PORT` in options stands for its port.
    """
    (folder / "flowerconfig.py").write_text(CONFIG)
    site = Prefixed(free_port())
    given: tuple[str, ...] = (f"--port={site.port}", "--url_prefix=ops", "--address=127.0.0.1")
    given += tuple(one.replace("PORT", str(site.port)) for one in options)
    command = [sys.executable, "-m", "celery", f"--broker={redis_url}", "flower", *given]
    env = {**os.environ, "STEPFLEET_REDIS_URL": redis_url, **environment}
    with (
        (folder / "flower.log").open("w") as log,
        subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=env) as process,
    ):
        try:
            wait_until(site.is_up, within=LONG, what="Flower")
            yield site
        finally:
            process.terminate()
