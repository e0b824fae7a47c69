"""Makes a dictionary for `orchestrator/store/compression.py` from the records of real runs.

python benchmarks/dictionary.py --out records-b.zdict

Lets a worker do runs of several kinds of agents (limits, errors, answers, memory, whole traces in
their events), takes what Redis holds of them, and trains. A dictionary that records were written
with is never made anew: the result gets the next letter, beside those that are there.
"""

import argparse
import random
import socket
from pathlib import Path

import redis
import zstandard
from loads import Setup, environment, lines, servers
from processes import until, workers

from stepfleet import Agent, ErrorPolicy, Fleet, MemoryPolicy, tool
from stepfleet.orchestrator.store.compression import LEVEL, unpacked

SIZE = 16_384
LENGTHS = (1, 2, 5, 9)
RUNS_OF_EACH = 6
LONGEST_SAMPLE = 4000
KEPT = ("slim", "outcome")
LONGEST = 300.0


@tool(read_only=True, thread=False)
def look(step: int) -> str:
    """Return a short sentence."""
    return f"result {step}"


@tool(name="look", thread=False)
def stumble(step: int) -> int:
    """Raise an error now and then."""
    if step % 2:
        msg = f"no entry {step}"
        raise LookupError(msg)
    return step


MODEL = "openai:gpt-4o-mini"
plain = Agent("plain", model=MODEL, tools=[look])
bounded = Agent(
    "bounded", model=MODEL, tools=[look], max_steps=4, budget_usd=1, cumulative_timeout=120
)
stumbling = Agent(
    "stumbling", model=MODEL, tools=[stumble], error_policy=ErrorPolicy.retry_tool_errors(3)
)
ignoring = Agent(
    "ignoring", model=MODEL, tools=[stumble], error_policy=ErrorPolicy.ignore_tool_errors()
)
strict = Agent("strict", model=MODEL, tools=[stumble], token_limit=None)
telling = Agent("telling", model=MODEL, tools=[look], broadcast="debug")
answering = Agent("answering", model=MODEL, tools=[look], require_final_answer=True, max_steps=6)
forgetting = Agent("forgetting", model=MODEL, tools=[look], memory=MemoryPolicy(max_messages=6))
AGENTS = (plain, bounded, stumbling, ignoring, strict, telling, answering, forgetting)


def samples() -> list[bytes]:
    """Return the records of some runs of every agent."""
    with servers(Setup(stub=True)) as (url, model), Fleet(url) as client:
        variables = {**environment(url, model.url, 50), "STEPFLEET_AGENTS": str(Path(__file__))}
        with workers(1, variables):
            batches = [
                client.submit_batch(lines(RUNS_OF_EACH, steps), agent=agent)
                for agent in AGENTS
                for steps in LENGTHS
            ]
            until(lambda: all(not batch.progress().open for batch in batches), within=LONGEST)
        with redis.Redis.from_url(url, decode_responses=True) as store:
            return [record.encode() for record in _records(store) if record]


def _records(store: redis.Redis) -> list[str]:
    found: list[str] = []
    for key in store.scan_iter("sf:*:run:*", count=1000):
        part = key.split(":")[4:]
        if part == ["events"]:
            events = [fields["events"] for _, fields in store.xrange(key)]
            found += [one for one in events if not one.startswith("s")]  # a script's
        elif part in (["log"], ["outcomes"]):
            found += [value for name, value in store.hgetall(key).items() if name.isdigit()]
        elif not part:
            found += [value or "" for value in store.hmget(key, KEPT)]
    # A dictionary is for all machines: the name of this one is of no use to others.
    here = f'"{socket.gethostname()}:'
    return [unpacked(one).decode().replace(here, '"worker:') for one in found]


def trained(records: list[bytes]) -> bytes:
    """Return a dictionary of what these records have in common."""
    chosen = [one for one in records if len(one) <= LONGEST_SAMPLE]
    random.Random(0).shuffle(chosen)  # noqa: S311 - an order, not a secret
    made = zstandard.train_dictionary(SIZE, chosen, level=LEVEL)
    return made.as_bytes()


def main() -> None:
    """Collect, train, write, and say what the records come down to."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", required=True, type=Path)
    args = made.parse_args()
    if args.out.exists():
        made.error(f"{args.out} is there; a dictionary never changes: take the next letter")
    records = samples()
    known, tried = records[::2], records[1::2]
    args.out.write_bytes(trained(known))
    dictionary = zstandard.ZstdCompressionDict(args.out.read_bytes())
    packer = zstandard.ZstdCompressor(level=LEVEL, dict_data=dictionary, write_dict_id=False)
    before, after = sum(map(len, tried)), sum(len(packer.compress(one)) for one in tried)
    print(f"{len(records)} records; of those not trained on: {before} bytes become {after}")


if __name__ == "__main__":
    main()
