"""Finds and reads the pricing file. Falls back with a warning, and never raises for a bad file.

Order: the variables STEPFLEET_PRICING_CONFIG and SPARK_PRICING_CONFIG, ./model_pricing.json,
~/.stepfleet/model_pricing.json, ~/.spark/model_pricing.json, the shipped table with the library
`genai-prices` for models that it does not have, and at last one price for everything. What a file
does not name, and has no default for, is looked for behind it.
"""

import functools
import json
import logging
import math
import os
import time
from dataclasses import replace
from importlib import resources
from pathlib import Path

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.models.pricing.known import known_price
from stepfleet.orchestrator.models.pricing.prices import Prices, parse_prices

_LOG = logging.getLogger(__name__)

VARIABLES = ("STEPFLEET_PRICING_CONFIG", "SPARK_PRICING_CONFIG")
FILE_NAME = "model_pricing.json"
FOLDERS = (".", "~/.stepfleet", "~/.spark")
SHIPPED = "default_prices.json"
RECENT_SECONDS = 1.0


def find_pricing_file() -> Path | None:
    """Return the first pricing file of the search order, or None for the shipped table.

    A file that a variable names is returned even if it does not exist, so that a wrong name
    is noticed instead of skipped.
    """
    for variable in VARIABLES:
        if named := os.environ.get(variable):
            return Path(named).expanduser()
    for folder in FOLDERS:
        candidate = os.path.join(os.path.expanduser(folder), FILE_NAME)  # noqa: PTH111, PTH118 - runs per call; pathlib takes ten times as long
        if os.path.isfile(candidate):  # noqa: PTH113 - the same
            return Path(candidate)
    return None


def load_prices(path: str | Path | None = None) -> Prices:
    """Read the prices of `path`, or of the first file that the search finds.

    A file that cannot be read or is invalid leaves a warning and gives the shipped table.
    """
    chosen = Path(path) if path is not None else find_pricing_file()
    if chosen is None:
        return shipped_prices()
    try:
        prices = parse_prices(json.loads(chosen.read_text(encoding="utf-8")), str(chosen))
    except (OSError, ValueError, RecursionError, ConfigurationError) as error:
        _LOG.warning(
            "the pricing file %s cannot be used (%s): using the shipped prices instead; "
            "correct the file or unset %s",
            chosen,
            error,
            VARIABLES[0],
        )
        return shipped_prices()
    return replace(prices, base=shipped_prices())


@functools.cache
def shipped_prices() -> Prices:
    """Return the table that comes with the package, and the library's prices for what it lacks.

    A single price if even that is unusable.
    """
    try:
        text = resources.files(__package__).joinpath(SHIPPED).read_text(encoding="utf-8")
        return replace(parse_prices(json.loads(text), "the shipped prices"), known=known_price)
    except (OSError, ValueError, ConfigurationError) as error:
        _LOG.warning("the shipped prices cannot be read (%s): one price for all models", error)
        return Prices()


def current_prices() -> Prices:
    """Return the prices that the search finds now; a file is read again only when it changed."""
    chosen = find_pricing_file()
    if chosen is None:
        return shipped_prices()
    try:
        status = chosen.stat()
    except OSError:
        return _read(chosen, 0, 0)
    return _read(chosen, status.st_mtime_ns, status.st_size)


class RecentPrices:
    """The current prices for callers at every step: the file is checked once a second at most."""

    def __init__(self) -> None:
        self._prices = Prices()
        self._looked = -math.inf

    def prices(self) -> Prices:
        """Return the prices as of a second ago or later."""
        now = time.monotonic()
        if now - self._looked > RECENT_SECONDS:
            self._prices, self._looked = current_prices(), now
        return self._prices


@functools.lru_cache(maxsize=8)
def _read(path: Path, _changed_ns: int, _size: int) -> Prices:
    return load_prices(path)
