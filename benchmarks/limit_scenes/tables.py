"""The tables of limits.py: each has a goal in its title, and the scenes whose rows it shows."""

from collections.abc import Sequence
from typing import NamedTuple

from reports import Column

LIMITED = ("requests", "tokens", "unknown", "blind")
CHANGED = ("changed", "changed_blind")


class Shown(NamedTuple):
    """A table: its title, the scenes, what makes rows one, and its columns."""

    title: str
    scenes: Sequence[str]
    by: Sequence[str]
    columns: Sequence[Column]


TABLES = (
    Shown(
        "One limit (goals: used >= 0.95, refused < 0.01, unknown 0.05; overshoot <= 0.02)",
        LIMITED,
        ("scene", "workers"),
        (
            Column("scene", "scene"),
            Column("workers", "workers"),
            Column("used", "used", 3, spread=True),
            Column("refused", "refused", 4, spread=True),
            Column("overshoot", "overshoot", 3, spread=True),
            Column("calls", "calls", 0),
            Column("seconds", "seconds", 1),
        ),
    ),
    Shown(
        "A limit that changes (goal: back within 120 s, no failed run)",
        CHANGED,
        ("scene", "workers"),
        (
            Column("scene", "scene"),
            Column("workers", "workers"),
            Column("halved s", "halved", 1, spread=True),
            Column("doubled s", "doubled", 1, spread=True),
            Column("refused", "refused", 4, spread=True),
            Column("failed", "failed", 0),
            Column("calls", "calls", 0),
        ),
    ),
    Shown(
        "Ten runs of a small tenant (goal: ratio 1.2 at most)",
        ("tenants",),
        ("scene", "workers"),
        (
            Column("flood", "runs"),
            Column("alone s", "alone", 1, spread=True),
            Column("flood comes s", "coming", 1, spread=True),
            Column("beside s", "beside", 1, spread=True),
            Column("ratio", "ratio", 2, spread=True),
            Column("flood left", "flood_left", 0),
        ),
    ),
    Shown(
        "Cost of a step (goal: with ample limits 1.1 times that without)",
        ("cost",),
        ("scene", "limits"),
        (
            Column("limits", "limits"),
            Column("worker CPU ms", "worker_ms", 3, spread=True),
            Column("Redis CPU ms", "redis_ms", 3, spread=True),
            Column("commands", "commands", 2, spread=True),
        ),
    ),
    Shown(
        "Steps that wait (goal: the same cost of a step, within 20%)",
        ("waiting",),
        ("scene", "waiting"),
        (
            Column("waiting", "waiting", 0),
            Column("worker CPU ms", "worker_ms", 3, spread=True),
            Column("Redis CPU ms", "redis_ms", 3, spread=True),
            Column("commands", "commands", 1, spread=True),
            Column("slowest ms", "slowest_ms", 1),
            Column("bytes/waiting", "bytes", 0),
            Column("to enter: commands", "enter_commands", 1),
            Column("s", "enter_seconds", 0),
            Column("rebuilt s", "rebuild_seconds", 0),
        ),
    ),
    Shown(
        "A budget (goals: over by estimates only; ledger <= server <= ledger + ambiguous)",
        ("budget",),
        ("scene", "workers"),
        (
            Column("workers", "workers"),
            Column("USD", "budget", 2),
            Column("spent", "spent", 4),
            Column("over", "over", 4),
            Column("server", "server", 4),
            Column("ledger", "ledger", 4),
            Column("ambiguous", "ambiguous", 4),
            Column("calls", "calls", 0),
            Column("stopped", "stopped", 0),
            Column("seconds", "seconds", 1),
        ),
    ),
    Shown(
        "Peers, one process each (goal: ahead of them in what is used and in what is refused)",
        ("peers",),
        ("scene", "what"),
        (
            Column("what", "what"),
            Column("used", "used", 3, spread=True),
            Column("refused", "refused", 4, spread=True),
            Column("overshoot", "overshoot", 3, spread=True),
            Column("in all", "whole", 3, spread=True),
            Column("calls", "calls", 0),
            Column("seconds", "seconds", 1),
            Column("done", "ended"),
        ),
    ),
)
