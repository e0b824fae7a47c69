from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from stepfleet.orchestrator import current_time
from stepfleet.orchestrator.errors import ToolArgumentsError


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "Asia/Kathmandu"])
async def test_the_time_is_now_with_the_offset_of_the_zone(zone: str) -> None:
    """TOOL-24"""
    before = datetime.now(UTC).replace(microsecond=0)
    told = datetime.fromisoformat(await current_time.execute(timezone=zone))
    assert before <= told <= datetime.now(UTC)
    assert told.utcoffset() == datetime.now(ZoneInfo(zone)).utcoffset()


async def test_utc_is_the_default() -> None:
    """TOOL-24"""
    assert (await current_time.execute()).endswith("+00:00")


@pytest.mark.parametrize("zone", ["Nowhere/City", "Europe", "../../etc/passwd", "", "a\x00b", "/"])
async def test_an_unknown_zone_is_refused_with_an_example(zone: str) -> None:
    """TOOL-24: folders and paths are no zones either."""
    with pytest.raises(ToolArgumentsError, match="such as Europe/Berlin"):
        await current_time.execute(timezone=zone)
