"""Addresses of Redis and of brokers, as users write them.

`redis://`, `rediss://` and `unix://` name one server, `redis+cluster://h1:7000,h2:7000` some nodes
of a cluster, `sentinel://h1:26379,h2:26379/mymaster/0` the Sentinels of a service. redis-py and
kombu read the first three in two ways, so `usable_url` writes them in the one form that both read
alike. Knows no client library.
Errors repeat nothing of a URL: a password that is not quoted may stand anywhere in it.
"""

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

NodeAddress = tuple[str, int]
"""Host and port of a server."""

_NODE = re.compile(r"(?P<host>\[[^\[\]]+\]|[^\[\]:]+)(:(?P<port>\d{1,5}))?")
_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_TLS_FLAGS = ("ssl_check_hostname",)
_TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", *_TLS_FLAGS)
_CERTIFICATES = ("required", "optional", "none")
_OF_KOMBU = ("redis-batch", "rediss-batch", "redis+socket", "redis-batch+socket")
_PLAIN = ("redis", "rediss", "unix")
_HOST = re.compile(r"(?P<host>\[[^\[\]]+\]|[^\[\]:]*)(:(?P<port>\d{0,5}))?")
_LAST_PORT = 65_535
_EXAMPLE = "redis://USER:PASSWORD@HOST:6379/0"
_QUOTE = (
    "a special character ends a part of it too early: percent-encode those of user and password"
    f" (# is %23, / is %2F, ? is %3F, @ is %40), then write {_EXAMPLE}"
)


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


def usable_url(url: str) -> str:
    """Return the address of a Redis in the one form that all clients read alike.

    Raises `ValueError` that names the mistake and the fix, and nothing of the address.
    """
    scheme, mark, rest = url.strip().partition("://")
    scheme = scheme.lower()
    url = f"{scheme}{mark}{rest}"
    if mark and scheme in _PLAIN:
        return _usable(scheme, rest)
    if is_sentinel(url):
        parse_sentinel(url)
    elif is_cluster(url):
        parse_cluster(url)
    else:
        kinds = "redis, rediss, unix, sentinel, sentinels, redis+cluster or rediss+cluster"
        raise ValueError(f"it must begin with {kinds} and ://; write {_EXAMPLE}")
    return url


def usable_broker(url: str) -> str:
    """Return a broker's address, which need be no Redis, in the form that all clients read alike.

    Raises `ValueError` that names the mistake and the fix, and nothing of the address.
    """
    scheme, mark, rest = url.strip().partition("://")
    if mark and scheme in _OF_KOMBU:
        return _usable(scheme, rest)
    if scheme.lower() in _PLAIN or is_sentinel(url.strip().lower()):
        return usable_url(url)
    for one in url.strip().split(";"):  # kombu's alternatives
        _, mark, rest = one.partition("://")
        if not mark:
            raise ValueError(_QUOTE if ";" in url else f"it must begin as {_EXAMPLE} does")
        authority, tail = _parts(rest)
        host = authority.rpartition("@")[2]
        if "@" in tail or ("," not in host and not _is_host(host)):
            raise ValueError(_QUOTE)
    return url.strip()


def _usable(scheme: str, rest: str) -> str:
    is_socket = scheme == "unix" or scheme.endswith("+socket")
    return _usable_socket(scheme, rest) if is_socket else _usable_host(scheme, rest)


def _usable_host(scheme: str, rest: str) -> str:
    authority, tail = _parts(rest)
    if "@" in tail or "#" in tail:
        raise ValueError(_QUOTE)
    user, at, place = authority.rpartition("@")
    if not _is_host(place):
        raise ValueError(f"it has no HOST:PORT, or a port above {_LAST_PORT}; {_QUOTE}")
    path, _, query = tail.partition("?")
    options = _plain_options(query, is_tls=scheme.startswith("rediss"))
    db = _database(unquote(path).strip("/"), options.pop("db", ""))
    written = f"?{urlencode(options)}" if options else ""
    return f"{scheme}://{_quoted(user)}{at}{place.rstrip(':')}{'/' if db else ''}{db}{written}"


def _usable_socket(scheme: str, rest: str) -> str:
    authority, tail = _parts(rest)
    user, at, place = authority.rpartition("@")
    if place or "#" in tail:
        raise ValueError(f"it names no file; write unix:///PATH?db=0, and {_QUOTE}")
    path, _, query = tail.partition("?")
    named = "db" if scheme == "unix" else "virtual_host"
    options = _plain_options(query.replace(f"{named}=", "db="), is_tls=False)
    db = _database("", options.pop("db", ""))
    written = f"?{named}={db}" if db else ""
    return f"{scheme}://{_quoted(user)}{at}{path}{written}"


def _parts(rest: str) -> tuple[str, str]:
    """Return what stands before the first `/`, `?` or `#`, and what follows."""
    end = next((place for place, sign in enumerate(rest) if sign in "/?#"), len(rest))
    return rest[:end], rest[end:]


def _is_host(place: str) -> bool:
    found = _HOST.fullmatch(place)
    return found is not None and int(found["port"] or 1) in range(1, _LAST_PORT + 1)


def _quoted(user: str) -> str:
    """Return credentials with every special character percent-encoded, once."""
    return ":".join(quote(unquote(one), safe="") for one in user.split(":", 1))


def _database(path: str, option: str) -> str:
    if path and option and path != option:
        raise ValueError(f"it names two databases; write {_EXAMPLE}")
    db = path or option
    if db and not (db.isascii() and db.isdigit()):
        raise ValueError(f"the database must be a number; write {_EXAMPLE}")
    return db


def _plain_options(query: str, *, is_tls: bool) -> dict[str, str]:
    options = _named_options(query, ("db", "protocol", *_TLS_OPTIONS))
    if options.pop("protocol", "2") != "2":
        raise ValueError("it asks for another protocol than RESP2; leave 'protocol' out of it")
    tls = next((name for name in options if name != "db"), None)
    if tls and not is_tls:
        raise ValueError(f"{tls} is for TLS: begin with rediss:// (not redis://)")
    flags = {name: str(options[name]).lower() for name in _TLS_FLAGS if name in options}
    return options | flags


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
        raise ValueError(f"the database must be a number; write {_SENTINEL.example}")
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
    options = _named_options(query, kind.options)
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
        fix = f"(percent-encode special characters of user and password); write {kind.example}"
        raise ValueError(f"{kind.node} must be HOST:PORT {fix}")
    return found["host"].strip("[]"), int(found["port"] or kind.port)


def _named_options(query: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return a query's options, which are of `names`, in redis-py's words."""
    options: dict[str, Any] = dict(parse_qsl(query, keep_blank_values=True))
    for name, value in options.items():
        if name not in names:
            raise ValueError(f"it has an unknown option; there are {', '.join(names)}")
        if name in _TLS_FLAGS:
            if value.lower() not in _FLAGS:
                raise ValueError(f"{name} is neither true nor false")
            options[name] = _FLAGS[value.lower()]
        if name == "ssl_cert_reqs":
            options[name] = value.lower().removeprefix("cert_")  # Python's name is CERT_NONE
            if options[name] not in _CERTIFICATES:
                raise ValueError(f"{name} is not one of {', '.join(_CERTIFICATES)}")
    return options
