"""Dataclasses of which a step makes many: type checkers keep them frozen, nothing else does.

A frozen dataclass fills itself around its own lock, which takes seven times as long: a claim and a
verdict have fifty fields.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as value_class
else:
    from collections.abc import Callable
    from dataclasses import dataclass

    def value_class(*, frozen: bool, slots: bool) -> Callable[[type], type]:
        """Make a dataclass with the equality and the hash of a frozen one."""
        return dataclass(unsafe_hash=frozen, slots=slots)


__all__ = ["value_class"]
