"""The wait of a run as it lies in Redis."""

from typing import Any

import orjson
from support.runs.stored_runs import Bench


async def wait_of(desk: Bench, run_id: str) -> dict[str, Any]:
    """Return the header's `wait`; {} for none."""
    return dict(orjson.loads((await desk.header(run_id)).get("wait", "{}")))


async def awaited(desk: Bench, run_id: str) -> list[str]:
    """Return the calls that a run waits for, each as `<index>:<queue>:<tool>`."""
    return [":".join(map(str, one)) for one in (await wait_of(desk, run_id)).get("calls", ())]


async def let_pass(desk: Bench, run_id: str, milliseconds: int | None = None) -> None:
    """Move the wait so far into the past; without a number, only its end, before all times."""
    wait = await wait_of(desk, run_id)
    if not wait:
        return
    if milliseconds is None:
        wait["deadline"] = 1
    else:
        wait |= {name: wait[name] - milliseconds for name in ("since", "deadline")}
    key = desk.opened.keys.run(run_id)
    await desk.opened.connection.execute("HSET", key, "wait", orjson.dumps(wait).decode())
