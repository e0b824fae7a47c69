"""Reads the addresses that a model gave; decides only whether they are well-formed."""

from urllib.parse import SplitResult, urlsplit

from stepfleet.orchestrator.errors import ToolArgumentsError
from stepfleet.orchestrator.tools.builtin.addresses import IPAddress

MAX_URL = 8192
"""Characters of an address."""
PORTS = {"http": 80, "https": 443}
"""The schemes that can be fetched, and their ports."""


def checked_url(url: str) -> SplitResult:
    """Return the parts of `url`, its host in ASCII.

    Raises `ToolArgumentsError` unless it is an http or https address with a host.
    """
    if len(url) > MAX_URL:
        raise ToolArgumentsError(f"the address is longer than {MAX_URL} characters")
    if any(one <= " " or one in "\x7f\\" for one in url):
        raise ToolArgumentsError("the address holds spaces, control characters or backslashes")
    try:
        target = urlsplit(url)
        port = target.port
    except ValueError as error:
        raise ToolArgumentsError(f"the address {url[:100]!r} is not valid: {error}") from None
    if target.scheme not in PORTS or not target.hostname or port == 0:
        raise ToolArgumentsError(
            f"the address {url[:100]!r} cannot be fetched; give an http:// or https:// address"
        )
    if "@" in target.netloc:
        raise ToolArgumentsError("the address holds a user name or password; leave it out")
    try:
        host = target.hostname.encode("idna").decode() if not target.hostname.isascii() else None
    except UnicodeError:
        raise ToolArgumentsError(f"the host {target.hostname[:100]!r} is no valid name") from None
    if host is None:
        return target
    return target._replace(netloc=host if port is None else f"{host}:{port}")


def pinned(target: SplitResult, address: IPAddress) -> str:
    """Return `target` with its host replaced by `address`, and without fragment."""
    host = f"[{address}]" if address.version == 6 else str(address)  # noqa: PLR2004 - IPv6
    netloc = host if target.port is None else f"{host}:{target.port}"
    return target._replace(netloc=netloc, fragment="").geturl()
