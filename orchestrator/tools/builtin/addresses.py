"""Decides which URLs are well-formed, and which hosts and addresses a network tool may reach.

Pure: names are resolved elsewhere, and every address that a name resolved to is judged here.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from stepfleet.orchestrator.errors import ConfigurationError, ToolArgumentsError

MAX_URL = 8192
"""Characters of an address."""
PORTS = {"http": 80, "https": 443}
"""The schemes that can be fetched, and their ports."""
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

# Networks that ipaddress (depending on Python's patch release) calls global although they lead to
# private networks, to this host, or to addresses embedded in others.
_CLOSED = tuple(
    ipaddress.ip_network(one)
    for one in (
        "168.63.129.16/32",  # Azure's virtual hosts: settings and secrets of the machine
        "192.0.0.0/24",
        "192.31.196.0/24",  # answers to private reverse names (AS112), as is 192.175.48.0/24
        "192.52.193.0/24",  # multicast tunnels
        "192.175.48.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "100.64.0.0/10",  # carriers' own networks
        "::ffff:0:0/96",  # IPv4 in IPv6
        "::/96",  # the same, deprecated
        "64:ff9b:1::/48",  # translation within a network
        "100::/64",
        "2001::/23",  # Teredo and other protocols
        "2002::/16",  # 6to4
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",
        "5f00::/16",
        "fec0::/10",  # site-local, deprecated
    )
)
_ISATAP = 0x00005EFE
"""The third quarter of an address that holds an IPv4 address behind it, but for one bit."""
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
_NUMBER = re.compile(r"\d+|0[xX][0-9a-fA-F]*")
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_.:\-]+")


def is_public(address: IPAddress) -> bool:
    """Return whether `address` belongs to the public internet."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            return False
        if address in _TRANSLATED:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if (int(address) >> 32) & 0xFDFFFFFF == _ISATAP:
            return False
    closed = (
        address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_reserved
        or address.is_unspecified
        or not address.is_global
    )
    return not closed and not any(
        address in network for network in _CLOSED if network.version == address.version
    )


def literal_address(host: str) -> IPAddress | None:
    """Return the address that `host` is, or None for a name.

    Raises `ToolArgumentsError` for the decimal, octal, hexadecimal and short forms of IPv4
    addresses, which resolvers read and people do not.
    """
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        last = host.rstrip(".").rpartition(".")[2]
        if _NUMBER.fullmatch(last) or ":" in host:
            raise ToolArgumentsError(
                f"the host {host[:100]!r} is no plain address; write it as four decimal numbers"
            ) from None
    return None


@dataclass(frozen=True)
class Reach:
    """Where a tool may go: `hosts` (None: any), and whether those may be private addresses.

    Hosts are names, `*.name` for all names below one, or addresses.
    """

    hosts: tuple[str, ...] | None = None
    allow_private: bool = False

    def __post_init__(self) -> None:
        """Refuse lists that cannot be meant; raises `ConfigurationError`."""
        if self.allow_private and self.hosts is None:
            raise ConfigurationError(
                "allow_private needs hosts: name the hosts that may be private addresses"
            )
        for host in self.hosts or ():
            if not _HOST.fullmatch(host):
                raise ConfigurationError(
                    f"hosts: {host!r} is no host; give names or addresses such as api.example.com, "
                    "*.example.com, 127.0.0.1 or ::1, without scheme, port and path"
                )

    def check_host(self, host: str) -> None:
        """Raise `ToolArgumentsError` unless `host` is one of the hosts on the list."""
        if self.hosts is None:
            return
        given = host.lower().rstrip(".")
        if not any(_matches(given, one.lower()) for one in self.hosts):
            raise ToolArgumentsError(
                f"the host {host[:100]!r} is not allowed; allowed are {', '.join(self.hosts)}"
            )

    def check_addresses(self, host: str, addresses: Iterable[IPAddress]) -> None:
        """Raise `ToolArgumentsError` if any of the addresses of `host` may not be reached."""
        if self.allow_private:
            return
        for one in addresses:
            if not is_public(one):
                raise ToolArgumentsError(
                    f"the host {host[:100]!r} leads to {one}, which is not on the public internet"
                )


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


def _matches(host: str, pattern: str) -> bool:
    if pattern.startswith("*."):
        return host.endswith(pattern[1:])
    return host == pattern
