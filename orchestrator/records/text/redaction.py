"""Takes secrets of the environment out of texts that are stored or shown.

A secret is the value of a variable whose name says so, or that a configuration names
(`name_secret`), and the credentials in any address. It is found as it is, and in the forms in
which errors quote it: escaped, percent-encoded and in base64.
"""

import base64
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from stepfleet.orchestrator.records import exact_json

HIDDEN = "[redacted]"
_SECRET_NAME = re.compile(
    r"KEY|TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTHORIZATION|BEARER|COOKIE|DSN"
    r"|(?:^|_)(?:AUTH|PWD|PW|PAT|URL|URI|CONN|SAS|JWT)$|(?:^|_)CREDS?(?:_|$)"
    r"|PASS\d*$|SESSION(?:_?ID)?$|CONN(?:ECTION)?_?STR(?:ING)?|WEBHOOKS?$",
    re.IGNORECASE,
)
_PLACES = frozenset({"PWD", "OLDPWD", "DESKTOP_SESSION", "GDMSESSION", "XDG_SESSION_ID"})
"""Names that look like those of secrets, and are of folders and desktops."""
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,31}://[^\s\"'<>\[\],]+")
_ENDS = re.compile(r"[/?#\[\]]")
"""What ends the part of an address in which a password stands."""
_SETTING = re.compile(
    r"(?:password|passwd|pwd|secret|token|accountkey|sharedaccesskey)\s*=\s*('[^']*'|[^;\s&]+)",
    re.IGNORECASE,
)
_SHORTEST = 8
_SHORTEST_IN_DATA = 12
"""Data are worth more than messages: a common word that is also a secret stays in them."""
_LONG_LINE = 32
"""Characters from which a line of a secret, such as that of a PEM file, is one itself."""
LONGEST = 64 * 1024
"""Characters of a text that `redact_error` keeps."""


@dataclass(frozen=True)
class _Known:
    """What configurations of this process have named so far: variables, and settings' values."""

    names: frozenset[str] = frozenset()
    settings: tuple[tuple[str, str], ...] = ()


class _Configured:
    """The latest `_Known`; it only grows. Workers have one environment, and so one of these."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.known = _Known()

    def add_name(self, name: str) -> None:
        with self._lock:
            self.known = replace(self.known, names=self.known.names | {name})

    def add_setting(self, name: str, value: str) -> None:
        with self._lock:
            kept = {**dict(self.known.settings), name: value}
            self.known = replace(self.known, settings=tuple(kept.items()))


_configured = _Configured()


def name_secret(variable: str) -> None:
    """Note that the variable's value is a secret of this process, whatever its name says.

    It stays in texts where it could be a common word: such a secret has at least 12 characters,
    no spaces, and is not a path.
    """
    if variable not in _configured.known.names:
        _configured.add_name(variable)


def keep_secret(setting: str, value: str) -> None:
    """Note the value of a secret setting, which need not come from the environment."""
    if (setting, value) not in _configured.known.settings:
        _configured.add_setting(setting, value)


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return `text` with every secret of the environment replaced.

    Secrets have at least 8 characters; of an address they are its credentials.
    """
    given = os.environ if environment is None else environment
    for secret in _forms(tuple(given.items()), _configured.known):
        if secret in text:
            text = text.replace(secret, HIDDEN)
    return text


def redact_error(text: str) -> str:
    """Return what is stored of an error's text: without secrets, and not longer than 64 K."""
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]} ... ({len(text) - LONGEST} more characters)"
    return redact(text)


class Redactor:
    """Takes the secrets of one environment out of data; made once, since looking for them costs.

    A secret has at least 12 characters here, no spaces, and is not a path.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = tuple(environment.items())
        self._find(_configured.known)

    def _find(self, known: _Known) -> None:
        found = _forms(self._environment, known)
        self._known = known
        self._secrets = tuple(one for one in found if _is_unmistakable(one))
        self._looks = tuple(exact_json.dumps(one)[1:-1] for one in self._secrets)

    def data(self, value: Any) -> Any:
        """Return JSON data without secrets: the same object where none is in it."""
        if self._known is not _configured.known:
            self._find(_configured.known)
        if isinstance(value, str):
            return self._without(value)
        if not self._looks or value is None:
            return value
        try:
            text = exact_json.dumps(value)
        except TypeError:  # integers beyond 64 bits
            return self._without(value)
        return self._without(value) if any(look in text for look in self._looks) else value

    def _without(self, value: Any) -> Any:
        if isinstance(value, str):
            for secret in self._secrets:
                if secret in value:
                    value = value.replace(secret, HIDDEN)
            return value
        if isinstance(value, dict):
            return {self._without(key): self._without(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self._without(one) for one in value]
        return value


def _is_unmistakable(secret: str) -> bool:
    is_path = secret.startswith(("/", "./", "~"))
    return len(secret) >= _SHORTEST_IN_DATA and not is_path and not re.search(r"\s", secret)


@lru_cache(maxsize=4)
def _forms(environment: tuple[tuple[str, str], ...], known: _Known) -> tuple[str, ...]:
    """Return every form of every secret, the longest first."""
    given = (*environment, *known.settings)
    secrets = {one for name, value in given for one in _secrets(name, value, known.names)}
    found = {form for one in secrets if len(one) >= _SHORTEST for form in _written(one)}
    return tuple(sorted(found, key=len, reverse=True))


def _secrets(name: str, value: str, named: frozenset[str]) -> Iterator[str]:
    """Yield the secrets of a variable."""
    is_named = name in named and _is_unmistakable(value)
    says_so = _SECRET_NAME.search(name) is not None and name not in _PLACES
    for address in _ADDRESS.findall(value):
        yield from _credentials(address, all_of_it=is_named or says_so)
    if is_named or says_so:
        yield from _settings(value)
        yield from _broken(value)
    if is_named or (says_so and "://" not in value):
        yield value
        yield from (part.strip() for part in value.split(","))
        yield from (line for line in value.splitlines() if len(line) >= _LONG_LINE)


def _settings(value: str) -> Iterator[str]:
    """Yield the passwords of a connection string (`host=db password=...`)."""
    for one in _SETTING.findall(value):
        yield one.strip("'")


def _broken(value: str) -> Iterator[str]:
    """Yield the password of an address in which it is not percent-encoded, and parts of it.

    Errors of those who read the address quote what they took for its port or path.
    """
    between = value.partition("://")[2].rpartition("@")[0]
    password = between.partition(":")[2]
    if _ENDS.search(password):
        yield from {password, *_ENDS.split(password)}


def _credentials(address: str, *, all_of_it: bool) -> Iterator[str]:
    """Yield the password of an address, or what stands in its place; of a named one also tokens."""
    try:
        parts = urlsplit(address)
        user, password = parts.username, parts.password
    except ValueError:
        parts, user, password = urlsplit(""), None, None
    if password:
        yield from {password, unquote(password)}
    elif user and all_of_it:
        yield from {user, unquote(user)}
    for name, given in parse_qsl(parts.query)[:100] if all_of_it else ():
        if _SECRET_NAME.search(name) or name.lower() in ("sig", "signature", "code"):
            yield given


def _written(secret: str) -> Iterator[str]:
    """Yield a secret as texts may quote it."""
    yield secret
    yield from {
        quote(secret, safe=""),
        repr(secret)[1:-1],
        exact_json.text(_sound(secret))[1:-1],
    }
    if len(secret) >= _SHORTEST_IN_DATA:
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            yield from _in_base64(_sound(secret).encode(), encode)


def _sound(secret: str) -> str:
    """Return the text without what UTF-8 does not have: variables may hold any bytes."""
    return secret.encode(errors="replace").decode()


def _in_base64(secret: bytes, encode: Any) -> Iterator[str]:
    """Yield what base64 makes of the secret wherever it begins in a longer text."""
    for before in range(3):
        whole = encode(b"\0" * before + secret).decode().rstrip("=")
        # The first characters hold bits of what stands before, the last one of what follows.
        first = (before * 8 + 5) // 6
        last = len(whole) - (1 if (before + len(secret)) % 3 else 0)
        yield whole[first:last]
