"""Loads rules by reference: `package.module:attribute` or `path/to/file.py:attribute`."""

from typing import cast

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.references import load_file, load_module
from stepfleet.worker.testing.rules import Rules


class RulesNotFoundError(Exception):
    """The rules cannot be loaded; the message names the reference and the fix."""


def load_rules(reference: str) -> Rules:
    """Return the rules that `reference` names. Raises `RulesNotFoundError`.

    A file is imported by its path, with its folder importable, as for a script.
    """
    place, colon, attribute = reference.rpartition(":")
    if not colon or not place or not attribute:
        raise RulesNotFoundError(
            f"{reference!r} names no rules; write module:attribute or file.py:attribute"
        )
    try:
        load = load_file if place.endswith(".py") else load_module
        rules = getattr(load(place, "rules"), attribute, None)
    except ConfigurationError as error:
        raise RulesNotFoundError(error.message) from error
    if not callable(rules):
        raise RulesNotFoundError(
            f"{place} has no callable {attribute!r}; define a function from a request to a reply"
        )
    return cast("Rules", rules)
