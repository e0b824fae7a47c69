"""Who may reach the dashboard, and who may do what there. Pure."""

import hmac
import ipaddress
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from string import ascii_lowercase, ascii_uppercase
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


def users_of(basic_auth: str | None) -> list[str]:
    """Return the `USER:PASSWORD`s of `--basic-auth`, one a line."""
    return [line for line in (basic_auth or "").splitlines() if line]


def check_access(address: str, basic_auth: str | None) -> None:
    """Raise `ConfigurationError` for an address that others can reach without a password."""
    if basic_auth is not None:
        for one in users_of(basic_auth) or [""]:
            user, colon, password = one.partition(":")
            if not user or not colon or not password:
                raise ConfigurationError("--basic-auth must be USER:PASSWORD, both not empty")
            if not one.isascii():
                msg = (
                    f"--basic-auth: user {ascii(user)[:70]} or the password has characters that "
                    "are not ASCII, which Flower cannot compare; use A to Z, digits and signs"
                )
                raise ConfigurationError(msg)
            if ":" in password.partition(",")[2]:
                msg = (
                    f"--basic-auth: the password of {user!r} would go on after a comma with what "
                    "looks like another user; write one USER:PASSWORD a line in "
                    "STEPFLEET_FLOWER_BASIC_AUTH, or a password without , and :"
                )
                raise ConfigurationError(msg)
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


class AccessRole(IntEnum):
    """What somebody may do: look; also approve, deny and answer; or everything."""

    VIEWER = 1
    APPROVER = 2
    OPERATOR = 3

    def __str__(self) -> str:
        """Return the name, as pages and errors have it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class AccessRoles:
    """Who has which role: names, `*@domain`, or `*`, without regard to the case of A to Z.

    Where nobody has one, everybody whom Flower knows is an operator. Otherwise the highest counts,
    and who is in none of the lists is refused.
    """

    operators: Sequence[str] = ()
    approvers: Sequence[str] = ()
    viewers: Sequence[str] = ()

    @property
    def are_set(self) -> bool:
        """Whether anybody has a role."""
        return bool(self.operators or self.approvers or self.viewers)

    def of(self, user: str | None) -> AccessRole | None:
        """Return a user's role; None for one who has none, or where no user is known."""
        if not self.are_set:
            return AccessRole.OPERATOR
        lists = (self.operators, self.approvers, self.viewers)
        for role, named in zip(sorted(AccessRole, reverse=True), lists, strict=True):
            if user and any(_means(one, user) for one in named):
                return role
        return None

    def check(self, basic_auth: str | None) -> None:
        """Raise `ConfigurationError` where these users could not use their roles."""
        users = [one.partition(":")[0] for one in users_of(basic_auth)]
        if self.are_set and not users:
            msg = (
                "roles need users: add --basic-auth USER:PASSWORD, or remove flower_operators, ..."
            )
            raise ConfigurationError(msg)
        if lacking := [one for one in users if self.of(one) is None]:
            msg = (
                f"user {lacking[0]!r} of --basic-auth has no role: add the name to "
                "flower_operators, flower_approvers or flower_viewers"
            )
            raise ConfigurationError(msg)


_LOWER = str.maketrans(ascii_uppercase, ascii_lowercase)
"""Of ASCII alone: other alphabets have letters that become one of its own, as the Kelvin sign."""


def _means(named: str, user: str) -> bool:
    named, user = named.translate(_LOWER), user.translate(_LOWER)
    if named.startswith("*@"):
        name, _, domain = user.partition("@")
        return bool(name) and domain == named[2:]
    return named in {"*", user}


def known_user(handler: Any) -> str | None:
    """Return who makes a request of Flower, as it has checked; None where it knows no users.

    Raises Flower's error 401 for a wrong password.
    """
    user = handler.current_user
    if not user or isinstance(user, str):
        return user or None
    found = credentials_of(handler)
    return None if found is None else found.partition(":")[0]


def credentials_of(handler: Any) -> str | None:
    """Return which of Flower's `USER:PASSWORD`s a request has, in any alphabet; None for none.

    By what is stored, and not by what is sent: the name is the one that the password is of.
    """
    try:
        basic, given = handler.request.headers.get("Authorization", "").split()
        credentials = b64decode(given).decode()
    except ValueError:
        return None
    for stored in handler.application.options.basic_auth or ():
        if basic == "Basic" and hmac.compare_digest(stored.encode(), credentials.encode()):
            return str(stored)
    return None
