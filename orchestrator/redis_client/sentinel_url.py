"""Addresses of a Redis behind Sentinel: `sentinel://h1:26379,h2:26379/mymaster/0`.

Decides what such an address means, and what it may say. Knows no client library.
"""

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

PORT = 26_379
EXAMPLE = "sentinel://HOST:26379,HOST2:26379/SERVICE/0"
_SCHEMES = {"sentinel": False, "sentinels": True}
_PLACE = re.compile(r"(?P<host>\[[^\[\]]+\]|[^\[\]:]+)(:(?P<port>\d{1,5}))?")
_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_TLS_TEXTS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")
_TLS_FLAGS = ("ssl_check_hostname",)
_SENTINELS_OWN = ("sentinel_username", "sentinel_password")
_OPTIONS = (*_SENTINELS_OWN, *_TLS_TEXTS, *_TLS_FLAGS)


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """A Redis that Sentinels name: who to ask, for which service, with which credentials.

    `tls` holds redis-py's `ssl_...` options where Redis and Sentinels are spoken to over TLS.
    """

    sentinels: tuple[tuple[str, int], ...]
    service: str
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    tls: dict[str, Any] | None = None

    @property
    def place(self) -> str:
        """Where it points to, for people: no credentials."""
        return f"{self.service} (Sentinel {', '.join(_joined(one) for one in self.sentinels)})"

    @property
    def credentials(self) -> str:
        """The part of a URL in front of the host; empty without any."""
        if self.password is None and self.username is None:
            return ""
        return f"{quote(self.username or '', safe='')}:{quote(self.password or '', safe='')}@"

    def one_by_one(self) -> list[str]:
        """Return a `sentinel://` URL of each Sentinel, as libraries want them that take one."""
        return [f"sentinel://{self.credentials}{_joined(one)}/{self.db}" for one in self.sentinels]


def is_sentinel(url: str) -> bool:
    """Return whether `url` has a scheme of Sentinel's."""
    return url.partition("://")[0] in _SCHEMES


def parse_sentinel(url: str) -> SentinelUrl:
    """Return what the address means; raises `ValueError` that says what is wrong with it.

    What it says repeats nothing of the address: a password that is not quoted may stand anywhere.
    """
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    rest, _, path = rest.partition("/")
    user, _, places = rest.rpartition("@")
    username, _, password = user.partition(":")
    service, _, db = path.rstrip("/").partition("/")
    if not service:
        raise ValueError(f"it names no service of the Sentinels; write {EXAMPLE}")
    if db and not db.isdigit():
        raise ValueError(f"the database is no number; write {EXAMPLE}")
    options = _options_of(query)
    tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
    if tls and not _SCHEMES[scheme]:
        raise ValueError(f"{next(iter(tls))} is for TLS: begin with sentinels:// (not sentinel://)")
    return SentinelUrl(
        sentinels=tuple(_place(one) for one in places.split(",")),
        service=unquote(service),
        db=int(db or 0),
        username=unquote(username) or None,
        password=unquote(password) or None,
        sentinel_username=options.get("sentinel_username"),
        sentinel_password=options.get("sentinel_password"),
        tls=tls if _SCHEMES[scheme] else None,
    )


def _place(text: str) -> tuple[str, int]:
    found = _PLACE.fullmatch(text.strip())
    if found is None:
        msg = f"a Sentinel is no HOST:PORT (quote special characters); write {EXAMPLE}"
        raise ValueError(msg)
    return found["host"].strip("[]"), int(found["port"] or PORT)


def _joined(place: tuple[str, int]) -> str:
    host, port = place
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _options_of(query: str) -> dict[str, Any]:
    options: dict[str, Any] = dict(parse_qsl(query, keep_blank_values=True))
    for name, value in options.items():
        if name not in _OPTIONS:
            raise ValueError(f"it has an unknown option; there are {', '.join(_OPTIONS)}")
        if name in _TLS_FLAGS:
            if value.lower() not in _FLAGS:
                raise ValueError(f"{name} is neither true nor false")
            options[name] = _FLAGS[value.lower()]
    return options
