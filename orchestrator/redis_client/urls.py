"""URLs of a Redis Cluster and of Sentinels, as users write them.

`redis+cluster://h1:7000,h2:7000` names some nodes of a cluster,
`sentinel://h1:26379,h2:26379/mymaster/0` the Sentinels of a service. Knows no client library.
Errors repeat nothing of a URL: a password that is not quoted may stand anywhere in it.
"""

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

NodeAddress = tuple[str, int]
"""Host and port of a server."""

_NODE = re.compile(r"(?P<host>\[[^\[\]]+\]|[^\[\]:]+)(:(?P<port>\d{1,5}))?")
_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_TLS_FLAGS = ("ssl_check_hostname",)
_TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", *_TLS_FLAGS)


@dataclass(frozen=True, slots=True)
class ClusterUrl:
    """Some nodes of a Redis Cluster, and the credentials for all of its nodes.

    `tls` holds redis-py's `ssl_...` options; None means plain connections.
    """

    nodes: tuple[NodeAddress, ...]
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: dict[str, Any] | None = None

    @property
    def location(self) -> str:
        """The address for people, without credentials."""
        return f"cluster {', '.join(map(host_port, self.nodes))}"


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """A Redis behind Sentinels: their addresses, the service, and the credentials of both.

    `tls` holds redis-py's `ssl_...` options for Redis and Sentinels; None means plain connections.
    """

    sentinels: tuple[NodeAddress, ...]
    service: str
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    tls: dict[str, Any] | None = None

    @property
    def location(self) -> str:
        """The address for people, without credentials."""
        return f"{self.service} (Sentinel {', '.join(map(host_port, self.sentinels))})"

    @property
    def credentials(self) -> str:
        """The part of a URL in front of the host; empty without any."""
        if self.password is None and self.username is None:
            return ""
        return f"{quote(self.username or '', safe='')}:{quote(self.password or '', safe='')}@"

    def one_by_one(self) -> list[str]:
        """Return one `sentinel://` URL per Sentinel, for libraries that accept one each."""
        nodes = map(host_port, self.sentinels)
        return [f"sentinel://{self.credentials}{node}/{self.db}" for node in nodes]


@dataclass(frozen=True, slots=True)
class _Kind:
    """What distinguishes the URLs of one kind. `options` are those of the query."""

    scheme: str
    tls_scheme: str
    port: int
    node: str
    example: str
    options: tuple[str, ...]


_CLUSTER = _Kind(
    scheme="redis+cluster",
    tls_scheme="rediss+cluster",
    port=6379,
    node="a node",
    example="redis+cluster://HOST:7000,HOST2:7000",
    options=_TLS_OPTIONS,
)
_SENTINEL = _Kind(
    scheme="sentinel",
    tls_scheme="sentinels",
    port=26_379,
    node="a Sentinel",
    example="sentinel://HOST:26379,HOST2:26379/SERVICE/0",
    options=("sentinel_username", "sentinel_password", *_TLS_OPTIONS),
)


def is_cluster(url: str) -> bool:
    """Return whether `url` has a scheme of Redis Cluster."""
    return _scheme(url) in (_CLUSTER.scheme, _CLUSTER.tls_scheme)


def is_sentinel(url: str) -> bool:
    """Return whether `url` has a scheme of Sentinel."""
    return _scheme(url) in (_SENTINEL.scheme, _SENTINEL.tls_scheme)


def parse_cluster(url: str) -> ClusterUrl:
    """Return a parsed cluster URL. Raises `ValueError` that names the mistake."""
    nodes, db, options = _parse(url, _CLUSTER)
    if db not in ("", "0"):
        raise ValueError(f"a cluster has no databases but 0; write {_CLUSTER.example}")
    return ClusterUrl(tuple(dict.fromkeys(nodes)), **options)


def parse_sentinel(url: str) -> SentinelUrl:
    """Return a parsed Sentinel URL. Raises `ValueError` that names the mistake."""
    nodes, path, options = _parse(url, _SENTINEL)
    service, _, db = path.rstrip("/").partition("/")
    if not service:
        raise ValueError(f"it names no service of the Sentinels; write {_SENTINEL.example}")
    if db and not db.isdigit():
        raise ValueError(f"the database is no number; write {_SENTINEL.example}")
    return SentinelUrl(nodes, unquote(service), int(db or 0), **options)


def host_port(node: NodeAddress) -> str:
    """Return an address as people and URLs write it."""
    host, port = node
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _scheme(url: str) -> str:
    return url.partition("://")[0]


def _parse(url: str, kind: _Kind) -> tuple[tuple[NodeAddress, ...], str, dict[str, Any]]:
    """Return a URL's nodes, its path, and its credentials and options by their fields' names."""
    rest, _, query = url.partition("://")[2].partition("?")
    rest, _, path = rest.partition("/")
    user, _, nodes = rest.rpartition("@")
    username, _, password = user.partition(":")
    options = _options(query, kind)
    tls = {name: options.pop(name) for name in _TLS_OPTIONS if name in options}
    has_tls = _scheme(url) == kind.tls_scheme
    if tls and not has_tls:
        begin = f"begin with {kind.tls_scheme}:// (not {kind.scheme}://)"
        raise ValueError(f"{next(iter(tls))} is for TLS: {begin}")
    options |= {"username": unquote(username) or None, "password": unquote(password) or None}
    options["tls"] = tls if has_tls else None
    return tuple(_node(one, kind) for one in nodes.split(",")), path, options


def _node(text: str, kind: _Kind) -> NodeAddress:
    found = _NODE.fullmatch(text.strip())
    if found is None:
        fix = f"(quote special characters); write {kind.example}"
        raise ValueError(f"{kind.node} is no HOST:PORT {fix}")
    return found["host"].strip("[]"), int(found["port"] or kind.port)


def _options(query: str, kind: _Kind) -> dict[str, Any]:
    options: dict[str, Any] = dict(parse_qsl(query, keep_blank_values=True))
    for name, value in options.items():
        if name not in kind.options:
            raise ValueError(f"it has an unknown option; there are {', '.join(kind.options)}")
        if name in _TLS_FLAGS:
            if value.lower() not in _FLAGS:
                raise ValueError(f"{name} is neither true nor false")
            options[name] = _FLAGS[value.lower()]
    return options
