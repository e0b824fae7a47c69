"""Who may reach the dashboard. Pure."""

import ipaddress
from typing import Any

from stepfleet.orchestrator.errors import ConfigurationError

MOST_EXACT = 2**53 - 1
"""The largest whole number that JavaScript does not round."""


def exact_in_browsers(value: Any) -> Any:
    """Return JSON data whose whole numbers a browser would round as text; a copy.

    A person who approves a payment reads its amount.
    """
    if isinstance(value, dict):
        return {name: exact_in_browsers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [exact_in_browsers(one) for one in value]
    is_rounded = isinstance(value, int) and abs(value) > MOST_EXACT
    return str(value) if is_rounded else value


def visible(text: str) -> str:
    """Return a text whose characters can all be seen, as the command line shows it.

    Others could hide words, or turn around those next to them.
    """
    return "".join(
        one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in text
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to `host`."""
    name = host.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def check_access(address: str, basic_auth: str | None) -> None:
    """Raise `ConfigurationError` for an address that others can reach without a password."""
    if basic_auth is not None:
        user, colon, password = basic_auth.partition(":")
        if not user or not colon or not password:
            raise ConfigurationError("--basic-auth must be USER:PASSWORD, both not empty")
        return
    if not is_loopback(address):
        msg = (
            f"--address {address or '(all)'} is open to others: add --basic-auth USER:PASSWORD "
            "(or set STEPFLEET_FLOWER_BASIC_AUTH), or listen on 127.0.0.1"
        )
        raise ConfigurationError(msg)


def is_rebindable(host: str) -> bool:
    """Return whether the DNS of strangers may say to which machine the name `host` leads."""
    name = host.strip("[]").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name != "localhost" and "." in name
    return False


def host_of(header: str) -> str:
    """Return the name in a request's Host header, without the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]
