"""Takes secrets of the environment out of texts that are stored or shown."""

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import orjson

HIDDEN = "[redacted]"
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|_URL$|_AUTH$", re.IGNORECASE)
_SHORTEST = 8
_SHORTEST_IN_DATA = 12
"""Data are worth more than messages: a common word that is also a secret stays in them."""


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return `text` with every secret of the environment replaced.

    A secret is the value of a variable whose name says so (a key, a token, a password), from
    8 characters on; of a URL it is the password.
    """
    for secret in _secrets(tuple((os.environ if environment is None else environment).items())):
        text = text.replace(secret, HIDDEN)
    return text


class Redactor:
    """Takes the secrets of one environment out of data; made once, since looking for them costs.

    A secret has at least 12 characters here, no spaces, and is not a path.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        found = _secrets(tuple(environment.items()))
        self._secrets = tuple(one for one in found if _is_unmistakable(one))
        self._looks = tuple(orjson.dumps(one)[1:-1] for one in self._secrets)

    def data(self, value: Any) -> Any:
        """Return JSON data without secrets: the same object where none is in it."""
        if isinstance(value, str):
            return self._without(value)
        if not self._looks or value is None:
            return value
        try:
            text = orjson.dumps(value)
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
def _secrets(environment: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    named = (value for name, value in environment if _SECRET_NAME.search(name))
    found = {one for value in named for one in _parts(value)}
    return tuple(sorted((one for one in found if len(one) >= _SHORTEST), key=len, reverse=True))


def _parts(value: str) -> tuple[str, ...]:
    """Return the secrets of a variable: itself, a URL's password, or each key of a list of keys."""
    if "://" in value:
        return (_password(value),)
    return (value, *(part.strip() for part in value.split(","))) if "," in value else (value,)


def _password(url: str) -> str:
    """Return the password of a URL; empty where there is none."""
    found = re.match(r"^[^:]+://[^/@]*:([^/@]+)@", url)
    return found.group(1) if found else ""
