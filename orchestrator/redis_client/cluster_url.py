"""Addresses of a Redis Cluster: `redis+cluster://h1:7000,h2:7000`, some of its nodes.

Decides what such an address means, and what it may say. Knows no client library.
"""

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote

PORT = 6379
EXAMPLE = "redis+cluster://HOST:7000,HOST2:7000"
_SCHEMES = {"redis+cluster": False, "rediss+cluster": True}
_PLACE = re.compile(r"(?P<host>\[[^\[\]]+\]|[^\[\]:]+)(:(?P<port>\d{1,5}))?")
_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_TLS_TEXTS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")
_TLS_FLAGS = ("ssl_check_hostname",)

Place = tuple[str, int]
"""Host and port of a node."""


@dataclass(frozen=True, slots=True)
class ClusterUrl:
    """A Redis Cluster: nodes to ask for the others, and credentials for all of them.

    `tls` holds redis-py's `ssl_...` options where the nodes are spoken to over TLS.
    """

    nodes: tuple[Place, ...]
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: dict[str, Any] | None = None

    @property
    def place(self) -> str:
        """Where it points to, for people: no credentials."""
        return f"cluster {', '.join(joined(one) for one in self.nodes)}"


def is_cluster(url: str) -> bool:
    """Return whether `url` has a scheme of a cluster's."""
    return url.partition("://")[0] in _SCHEMES


def parse_cluster(url: str) -> ClusterUrl:
    """Return what the address means; raises `ValueError` that says what is wrong with it.

    What it says repeats nothing of the address: a password that is not quoted may stand anywhere.
    """
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    rest, _, db = rest.partition("/")
    user, _, places = rest.rpartition("@")
    username, _, password = user.partition(":")
    if db not in ("", "0"):
        raise ValueError(f"a cluster has no databases but 0; write {EXAMPLE}")
    tls = _options_of(query)
    if tls and not _SCHEMES[scheme]:
        msg = f"{next(iter(tls))} is for TLS: begin with rediss+cluster:// (not redis+cluster://)"
        raise ValueError(msg)
    return ClusterUrl(
        nodes=tuple(dict.fromkeys(_place(one) for one in places.split(","))),
        username=unquote(username) or None,
        password=unquote(password) or None,
        tls=tls if _SCHEMES[scheme] else None,
    )


def joined(place: Place) -> str:
    """Return a node's address for people."""
    host, port = place
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _place(text: str) -> Place:
    found = _PLACE.fullmatch(text.strip())
    if found is None:
        msg = f"a node is no HOST:PORT (quote special characters); write {EXAMPLE}"
        raise ValueError(msg)
    return found["host"].strip("[]"), int(found["port"] or PORT)


def _options_of(query: str) -> dict[str, Any]:
    options: dict[str, Any] = dict(parse_qsl(query, keep_blank_values=True))
    for name, value in options.items():
        if name not in (*_TLS_TEXTS, *_TLS_FLAGS):
            known = ", ".join((*_TLS_TEXTS, *_TLS_FLAGS))
            raise ValueError(f"it has an unknown option; there are {known}")
        if name in _TLS_FLAGS:
            if value.lower() not in _FLAGS:
                raise ValueError(f"{name} is neither true nor false")
            options[name] = _FLAGS[value.lower()]
    return options
