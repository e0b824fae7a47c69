"""The same job on Stepfleet and on what one would pick instead: speed, CPU and memory side by side.

python benchmarks/peers.py                                   # all peers, under ten minutes
python benchmarks/peers.py --only langgraph,dbos-postgres --concurrency 200 --latency 0 1
python benchmarks/peers.py --list

Every run is five model calls over HTTP to the same model server with a trivial tool call between
them, its state kept durably after each step. Every peer is written as its own documentation does
(peers/*.py say what they chose), runs one worker process, and comes twice where it matters: with
the HTTP client that it ships with, and with a faster one (only that at 1,000 at a time, unless
--own-up-to says more). Each gets an environment of its own, made by uv and kept in the cache
folder. Redis flushes its log each second, Postgres and SQLite at each commit; `stepfleet-always`
flushes at each commit too. CPU and memory are those of the peer and its server, submission
included; the model server's are not. Ratios (x) are to Stepfleet's median in the same setting: it
is measured first and last, and with --pairs before every peer. Needs uv; Redis; Postgres under
/usr/lib/postgresql or on PATH (apt-get install postgresql); npm for the Restate server.
"""

import argparse
import importlib
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from peers_catalog import PEERS, STEPFLEET, Peer, chosen, without_slower
from peers_environments import default_cache, python_of, restate_program, versions
from peers_measure import Figures, Setting, measure
from peers_report import draw, rows, show, write_json
from peers_services import postgres_programs
from rich.console import Console

WIDTH = 100

console = Console(stderr=True, soft_wrap=True)


def main() -> None:
    """Measure, print, and write the files."""
    args = _arguments()
    try:
        peers = chosen(args.only)
        pythons = {peer.name: python_of(peer.environment, args.cache) for peer in peers}
        _check_services(peers, args.cache)
        if args.plot:
            importlib.import_module("matplotlib")
    except (ImportError, LookupError, ValueError) as error:
        sys.exit(f"peers: {error}")
    machine = _machine(peers, pythons)
    console.print(machine["platform"], f"{machine['cpus']} CPUs", f"Python {machine['python']}")
    for name, found in machine["versions"].items():
        console.print(f"{name}:", ", ".join(f"{key} {value}" for key, value in found.items()))
    measured: list[Figures] = []
    for setting in settings(args):
        part = peers if setting.concurrency <= args.own_up_to else without_slower(peers)
        for peer in order(part, pairs=args.pairs, repeat=args.repeat):
            one = measure(peer, pythons[peer.name], setting, args.cache)
            measured.append(one)
            console.print(_line(one), markup=False, highlight=False)
    found_rows = rows(measured)
    show(found_rows, Console(width=WIDTH))
    if args.json:
        write_json(args.json, machine, measured)
    if args.plot:
        draw(args.plot, found_rows)


def settings(args: argparse.Namespace) -> Iterator[Setting]:
    """Return the settings to measure: every latency with every concurrency."""
    for latency in args.latency:
        for concurrency in args.concurrency:
            runs = args.runs or concurrency
            yield Setting(runs, args.steps, concurrency, latency, args.deadline)


def order(peers: list[Peer], *, pairs: bool, repeat: int) -> Iterator[Peer]:
    """Return the peers in the order of measuring: Stepfleet around them, or before each."""
    for _ in range(repeat):
        others = [peer for peer in peers if peer != STEPFLEET]
        if pairs:
            for peer in others:
                yield STEPFLEET
                yield peer
        else:
            yield STEPFLEET
            yield from others
            if others:
                yield STEPFLEET


def _check_services(peers: list[Peer], cache: Path) -> None:
    needed = {peer.service for peer in peers}
    if "postgres" in needed:
        postgres_programs()
    if "restate" in needed:
        restate_program(cache)


def _machine(peers: list[Peer], pythons: dict[str, str]) -> dict[str, Any]:
    environments = {peer.environment.name: peer for peer in peers}
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "versions": {
            name: versions(peer.environment, pythons[peer.name])
            for name, peer in environments.items()
        },
    }


def _line(one: Figures) -> str:
    what = f"{one.peer}, {one.concurrency} at a time, latency {one.latency:g} s:"
    if one.wall is None:
        return f"{what} {one.problem}"
    done = f"{one.steps_done} steps in {one.wall:.1f} s, {one.rate or 0:.0f}/s"
    return f"{what} {done}, {one.cpu_ms or 0:.2f} CPU ms/step {one.problem}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", help="names, or what they begin with, divided by commas; Stepfleet always comes")
    add("--runs", type=int, help="default: as many as run at a time")
    add("--steps", type=int, default=5, help="model calls of a run (default: 5)")
    add("--latency", type=float, nargs="+", default=[1.0], help="of the model, in seconds")
    add("--concurrency", type=int, nargs="+", default=[200, 1000], help="runs at a time")
    add(
        "--own-up-to",
        type=int,
        default=200,
        help="above so many at a time, only the faster client of a peer is measured (default: 200)",
    )
    add("--deadline", type=float, default=30.0, help="seconds of one measurement (default: 30)")
    add("--repeat", type=int, default=1, help="rounds; medians are shown")
    add("--pairs", action="store_true", help="measure Stepfleet before every peer")
    add("--cache", type=Path, default=default_cache(), help="folder of the environments")
    add("--json", help="file to write everything to")
    add("--plot", help="SVG or PNG file to draw to (needs matplotlib)")
    add("--list", action="store_true", help="list the peers and end")
    args = parser.parse_args()
    if args.list:
        print("\n".join(peer.name for peer in PEERS))
        sys.exit()
    return args


if __name__ == "__main__":
    main()
