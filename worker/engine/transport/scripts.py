"""The transport's Lua scripts, read once and called by their digest.

Decides nothing about messages.
"""

import functools
import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from redis.exceptions import NoScriptError


@dataclass(frozen=True, slots=True)
class Script:
    """One script: its text and the digest by which Redis knows it."""

    text: str
    sha: str

    def call(self, client: Any, keys: list[str], args: list[Any]) -> Any:
        """Run it and return the answer; loads it where the server has forgotten it."""
        try:
            return client.evalsha(self.sha, len(keys), *keys, *args)
        except NoScriptError:
            return client.eval(self.text, len(keys), *keys, *args)


@functools.cache
def script(name: str) -> Script:
    """Return the script of the file ``name.lua`` beside this module."""
    text = resources.files(__package__).joinpath(f"{name}.lua").read_text("utf-8")
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
