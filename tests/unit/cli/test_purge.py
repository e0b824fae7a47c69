"""Times as the command line takes them; the command itself is tried in acceptance."""

import pytest

from stepfleet.orchestrator import ConfigurationError
from stepfleet.orchestrator.cli.inputs import seconds_of


@pytest.mark.parametrize(
    ("told", "seconds"),
    [("0", 0), ("90", 90), ("90s", 90), ("15m", 900), ("12H", 43_200), (" 2d", 172_800)],
)
def test_a_time_is_read(told: str, seconds: int) -> None:
    assert seconds_of(told, "--older-than") == seconds


@pytest.mark.parametrize("told", ["", "d", "-1d", "1.5h", "two days", "9" * 40, "1y"])
def test_what_is_no_time_is_refused(told: str) -> None:
    with pytest.raises(ConfigurationError, match="--older-than"):
        seconds_of(told, "--older-than")
