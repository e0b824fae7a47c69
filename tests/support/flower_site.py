"""A running Flower as a browser sees it."""

import base64
from http.client import HTTPConnection

from command_line import CommandLine
from redis_servers import free_port

AUTH = "me:flower-secret"


class Site:
    """Gets pages, with the right password unless told otherwise."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str, auth: str | None = AUTH) -> tuple[int, str]:
        """Return status and body of a page; status 0 while nobody listens."""
        headers = {}
        if auth:
            headers["Authorization"] = f"Basic {base64.b64encode(auth.encode()).decode()}"
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        except ConnectionError:
            return 0, ""
        finally:
            connection.close()


def started_flower(commands: CommandLine, redis_url: str, **environment: str) -> Site:
    """Start `stepfleet flower` with a password and return when it has said its address."""
    port = free_port()
    given = {"STEPFLEET_REDIS_URL": redis_url, "STEPFLEET_FLOWER_BASIC_AUTH": AUTH, **environment}
    commands.start("flower", "--port", str(port), **given)
    commands.until_said("Flower: http")
    return Site(port)
