"""Takes secrets of the environment out of texts that are stored or shown."""

import os
import re
from collections.abc import Mapping
from functools import lru_cache

HIDDEN = "[redacted]"
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|_URL$|_AUTH$", re.IGNORECASE)
_SHORTEST = 8


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return `text` with every secret of the environment replaced.

    A secret is the value of a variable whose name says so (a key, a token, a password), from
    8 characters on; of a URL it is the password.
    """
    for secret in _secrets(tuple((os.environ if environment is None else environment).items())):
        text = text.replace(secret, HIDDEN)
    return text


@lru_cache(maxsize=4)
def _secrets(environment: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    named = (value for name, value in environment if _SECRET_NAME.search(name))
    found = {_password(value) if "://" in value else value for value in named}
    return tuple(sorted((one for one in found if len(one) >= _SHORTEST), key=len, reverse=True))


def _password(url: str) -> str:
    """Return the password of a URL; empty where there is none."""
    found = re.match(r"^[^:]+://[^/@]*:([^/@]+)@", url)
    return found.group(1) if found else ""
