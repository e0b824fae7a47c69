"""Which peers there are: the script, the environment and the services of each. Pure data."""

from dataclasses import dataclass
from typing import Literal

Service = Literal["redis", "postgres", "restate"]

OPENAI = "openai[aiohttp]"
FAST = ("aiohttp", "uvloop")


@dataclass(frozen=True)
class Environment:
    """A virtual environment's name, and the packages that it is made of (none: our own)."""

    name: str
    packages: tuple[str, ...]
    shown: tuple[str, ...]


@dataclass(frozen=True)
class Peer:
    """One way to do the job.

    `kind` and `client` are arguments of the script (see peers/job.py); `most` is the highest
    concurrency that is worth a try, and `why` says what stands against more.
    """

    name: str
    script: str
    environment: Environment
    kind: str
    client: Literal["own", "fast"] = "own"
    service: Service | None = None
    most: int | None = None
    why: str = ""


OURS = Environment("stepfleet", (), ("celery", "redis", "aiohttp", "uvloop"))
CELERY = Environment(
    "celery",
    ("celery[redis]", "openai", "urllib3", "gevent"),
    ("celery", "redis", "openai", "httpx2", "urllib3", "gevent"),
)
LANGGRAPH = Environment(
    "langgraph",
    (
        *("langgraph", "langgraph-checkpoint-sqlite", "langgraph-checkpoint-postgres"),
        *("psycopg[binary,pool]", "langchain-openai", OPENAI, *FAST),
    ),
    (
        *("langgraph", "langgraph-checkpoint-sqlite", "langgraph-checkpoint-postgres"),
        *("langchain-openai", "openai", "httpx2", *FAST),
    ),
)
DBOS = Environment("dbos", ("dbos", OPENAI, *FAST), ("dbos", "sqlalchemy", "openai", *FAST))
RESTATE = Environment(
    "restate", ("restate-sdk", "hypercorn", OPENAI, *FAST), ("restate-sdk", "hypercorn", *FAST)
)
PYDANTIC = Environment(
    "pydantic-ai",
    ("pydantic-ai-slim[openai,dbos]", OPENAI, *FAST),
    ("pydantic-ai-slim", "dbos", "openai", *FAST),
)

STEPFLEET = Peer("stepfleet", "stepfleet_fleet.py", OURS, "everysec", service="redis")
PEERS = (
    STEPFLEET,
    Peer("stepfleet-always", "stepfleet_fleet.py", OURS, "always", service="redis"),
    Peer(
        *("celery-prefork", "celery_task.py", CELERY, "prefork"),
        service="redis",
        most=200,
        why="a process per run in flight",
    ),
    Peer("celery-threads", "celery_task.py", CELERY, "threads", service="redis"),
    Peer("celery-threads+urllib3", "celery_task.py", CELERY, "threads", "fast", "redis"),
    Peer("celery-gevent", "celery_task.py", CELERY, "gevent", service="redis"),
    Peer("celery-gevent+urllib3", "celery_task.py", CELERY, "gevent", "fast", "redis"),
    Peer("langgraph-sqlite", "langgraph_graph.py", LANGGRAPH, "sqlite"),
    Peer("langgraph-sqlite+aiohttp", "langgraph_graph.py", LANGGRAPH, "sqlite", "fast"),
    Peer("langgraph-postgres", "langgraph_graph.py", LANGGRAPH, "postgres", service="postgres"),
    Peer(
        *("langgraph-postgres+aiohttp", "langgraph_graph.py", LANGGRAPH),
        *("postgres", "fast", "postgres"),
    ),
    Peer("dbos-sqlite", "dbos_workflow.py", DBOS, "sqlite"),
    Peer("dbos-sqlite+aiohttp", "dbos_workflow.py", DBOS, "sqlite", "fast"),
    Peer("dbos-postgres", "dbos_workflow.py", DBOS, "postgres", service="postgres"),
    Peer("dbos-postgres+aiohttp", "dbos_workflow.py", DBOS, "postgres", "fast", "postgres"),
    Peer("restate", "restate_service.py", RESTATE, "http2", service="restate"),
    Peer("restate+aiohttp", "restate_service.py", RESTATE, "http2", "fast", "restate"),
    Peer("pydantic-ai-dbos", "pydantic_agent.py", PYDANTIC, "postgres", service="postgres"),
    Peer(
        *("pydantic-ai-dbos+aiohttp", "pydantic_agent.py", PYDANTIC),
        *("postgres", "fast", "postgres"),
    ),
)


def chosen(names: str | None) -> list[Peer]:
    """Return the peers of a comma-separated list, Stepfleet first; all without a list.

    A name stands for its variants too: `dbos` for dbos-sqlite, dbos-sqlite+aiohttp and so on.
    Raises `ValueError` for a name that fits none.
    """
    if names is None:
        return list(PEERS)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if not any(_fits(peer, name) for peer in PEERS):
            known = ", ".join(peer.name for peer in PEERS)
            raise ValueError(f"--only: no peer {name!r}; there are {known}")
    kept = [peer for peer in PEERS if any(_fits(peer, name) for name in wanted)]
    return kept if STEPFLEET in kept else [STEPFLEET, *kept]


def without_slower(peers: list[Peer]) -> list[Peer]:
    """Return the peers without those that are there with a faster client, too."""
    faster = {(peer.script, peer.kind) for peer in peers if peer.client == "fast"}
    return [p for p in peers if p.client == "fast" or (p.script, p.kind) not in faster]


def _fits(peer: Peer, name: str) -> bool:
    if name in {each.name for each in PEERS}:
        return peer.name == name
    return peer.name.startswith((f"{name}-", f"{name}+"))
