"""The signal for autoscalers, each second of a burst and of a throttled fleet; and its cost.

python benchmarks/autoscaling.py                      # 10,000 runs of 3 steps, 2 workers
python benchmarks/autoscaling.py --runs 1000 --latency 0.5 --only throttled

`burst`: all runs at once, no limit. `throttled`: the same, and `--in-flight` calls at once; `queue`
is what a scaler by queue length would see. `wanted` is for workers of `--slots`. A reading takes
`ms`, of which Redis works `redis_ms`.
"""

import argparse
import time
from collections.abc import Iterator

from agents import runner
from loads import LONGEST, Setup, fleet, lines
from reports import Column, begin, finish, parser, show

from stepfleet import Fleet

SCENES = ("burst", "throttled")
MODEL = "openai:benchmark"
QUEUE = "stepfleet"
_MS = 1000
COLUMNS = (
    Column("scene", "scene"),
    Column("second", "second", 0),
    Column("queue", "queue", 0),
    Column("work", "work", 0),
    Column("in hand", "in_hand", 0),
    Column("wait for limits", "limits", 0),
    Column("wanted", "wanted", 0),
    Column("ms", "ms", 1),
    Column("Redis ms", "redis_ms", 1),
)


def arguments() -> argparse.Namespace:
    """Return the parsed arguments."""
    made = parser(__doc__)
    add = made.add_argument
    add("--only", choices=SCENES, nargs="*", default=SCENES)
    add("--runs", type=int, default=10_000)
    add("--steps", type=int, default=3)
    add("--latency", default="1", help="seconds of a model call, or FROM-TO")
    add("--workers", type=int, default=2)
    add("--slots", type=int, default=500)
    add("--in-flight", type=int, default=200)
    add("--every", type=float, default=1.0, metavar="SECONDS")
    return made.parse_args()


def scene(name: str, args: argparse.Namespace) -> Iterator[dict[str, float | str]]:
    """Yield a reading each second, until all runs have ended and a last one shows that."""

    def throttle(client: Fleet) -> None:
        if name == "throttled":
            client.limits.set(MODEL, in_flight=args.in_flight)

    setup = Setup(args.workers, args.slots, args.latency, stub=True)
    with fleet(setup, first=throttle) as running:
        running.warm()
        rows, began = lines(args.runs, args.steps), time.monotonic()
        batch = running.client.submit_batch(rows, agent=runner)
        is_over, at = False, 0.0
        while not is_over:
            is_over = batch.progress().done == args.runs
            used, start = running.store.info("cpu"), time.perf_counter()
            found = running.client.scale(slots_per_worker=args.slots)
            taken, after = time.perf_counter() - start, running.store.info("cpu")
            spent = sum(after[one] - used[one] for one in ("used_cpu_user", "used_cpu_sys"))
            row = {"scene": name, "second": round(time.monotonic() - began)}
            row |= {"queue": running.store.llen(QUEUE), "limits": found.waits.get("limits", 0)}
            row |= {"work": found.work, "in_hand": found.in_hand, "wanted": found.wanted}
            yield row | {"ms": taken * _MS, "redis_ms": spent * _MS}
            if at > LONGEST:
                raise RuntimeError(f"{name}: not all runs have ended: {batch.progress()}")
            at += args.every
            time.sleep(max(began + at - time.monotonic(), 0))


def main() -> None:
    """Show both scenes."""
    args = arguments()
    report = begin("autoscaling", args)
    for _ in range(args.repeat):
        for name in args.only:
            for row in scene(name, args):
                report.add(row)
    for name in args.only:
        shown = [row for row in report.rows if row["scene"] == name]
        show(f"{name}: the signal over time", shown, ("scene", "second"), COLUMNS)
    finish(report, args, list)


if __name__ == "__main__":
    main()
