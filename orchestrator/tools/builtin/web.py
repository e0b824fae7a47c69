"""The web tools: `http_get` for the public internet, `http_get_from` for hosts that you name."""

import ssl
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.tools.builtin.addresses import Reach
from stepfleet.orchestrator.tools.builtin.fetching import MAX_BODY, TIMEOUT, Fetcher
from stepfleet.orchestrator.tools.definition import Tool, tool

MAX_CHARACTERS = 60_000
"""Characters of text that one call returns."""


def http_get_from(
    hosts: Iterable[str] | None = None,
    *,
    allow_private: bool = False,
    name: str = "http_get",
    timeout: float = TIMEOUT,
    max_body: int = MAX_BODY,
    tls: ssl.SSLContext | None = None,
) -> Tool[..., Any]:
    """Return an `http_get` tool that reaches `hosts` only (None: every public host).

    Hosts are names, `*.name` for all names below one, or addresses. With `allow_private` they
    may be private addresses. `timeout` is in seconds, `max_body` in bytes, `tls` the trust in
    servers' certificates. Raises `ConfigurationError` that names the wrong host.
    """
    if isinstance(hosts, str):
        raise ConfigurationError(f"hosts must be a list; write hosts=[{hosts!r}]")
    reach = Reach(None if hosts is None else tuple(hosts), allow_private)
    fetcher = Fetcher(reach, max_body, timeout, tls)

    @tool(name=name, read_only=True, timeout=timeout + 5)
    async def get(
        url: str, max_characters: Annotated[int, Field(ge=1, le=MAX_CHARACTERS)] = 20_000
    ) -> dict[str, Any]:
        """Fetch a web page or another text by HTTP GET, and return its status and text.

        Args:
            url: An http or https address.
            max_characters: How much of the text to return; `truncated` says whether there is
                more.
        """
        page = await fetcher.fetch(url)
        return {
            "status": page.status,
            "url": page.url,
            "content_type": page.content_type,
            "text": page.text[:max_characters],
            "truncated": len(page.text) > max_characters,
        }

    return get


http_get = http_get_from()
