"""Something about a set-up that is not right, and what to do about it. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Worry:
    """What was found to be wrong, and its fix; `about` names the thing."""

    about: str
    found: str
    fix: str

    @property
    def text(self) -> str:
        """The worry as one message."""
        return f"{self.found}. Fix: {self.fix}"
