"""Secrets of the environment, and where they must not be: a fleet with a canary in every place."""

import os
import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
import pytest
import redis
from support.deadlines import wait_until
from support.runs.packed_records import hidden
from support.servers.flower_site import started_flower
from support.servers.redis_servers import RedisServer, free_port
from support.workers.command_line import CommandLine
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Fleet
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Fault, Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
FILE = Path(__file__).parents[1] / "agent_modules" / "hostile_agents.py"
LEAKY = load_agents(str(FILE))["leaky"]
LONG = 180.0
# The tasks in Flower are counted: a busy worker's hint must not be sent once more.
GRACE = 600.0
MODEL_KEY = "sk-canary-model-0002"
PAYMENT_KEY = "pay-canary-tool-0003"
REDIS_PASSWORD = "redis-canary-0004"
SIGNING_KEY = "signing-canary-0005"
OLD_SIGNING_KEY = "signing-canary-0006"
WEBHOOK_SECRET = "webhook-canary-0007"
WEBHOOK_TOKEN = "address-canary-0008"
BROWSER_PASSWORD = "flower-secret"

ENVIRONMENTS = (
    MODEL_KEY,
    PAYMENT_KEY,
    REDIS_PASSWORD,
    SIGNING_KEY,
    OLD_SIGNING_KEY,
    WEBHOOK_SECRET,
    WEBHOOK_TOKEN,
    BROWSER_PASSWORD,
)
INSTRUCTIONS, QUESTION = "PROMPT-CANARY-0001", "QUESTION-CANARY-0009"


def gives_away(request: RequestRecord) -> Reply:
    """Have the tool return, keep and raise the secret; then answer."""
    ways = ("return", "state", "raise")
    if request.turn <= len(ways):
        return Reply(tool_calls=(ToolCallReply("leak", {"how": ways[request.turn - 1]}),))
    return Reply("answer")


@pytest.fixture
def server(own_redis: Callable[..., RedisServer]) -> RedisServer:
    return own_redis(requirepass=REDIS_PASSWORD, appendfsync="always")


@pytest.fixture
def url(server: RedisServer) -> str:
    return server.url.replace("redis://", f"redis://:{REDIS_PASSWORD}@")


@pytest.fixture
def env() -> dict[str, str]:
    hook = f"http://127.0.0.1:{free_port()}/hook?token={WEBHOOK_TOKEN}"
    return {
        "OPENAI_API_KEY": MODEL_KEY,
        "PAYMENT_API_KEY": PAYMENT_KEY,
        "STEPFLEET_AGENTS": str(FILE),
        "STEPFLEET_GRACE": str(GRACE),
        "STEPFLEET_SIGNING_KEY": f"{SIGNING_KEY},{OLD_SIGNING_KEY}",
        "STEPFLEET_WEBHOOKS": orjson.dumps([hook]).decode(),
        "STEPFLEET_WEBHOOK_SECRET": WEBHOOK_SECRET,
    }


@pytest.mark.timeout(900)
@pytest.mark.parametrize("pool", ["asyncio", pytest.param("prefork", marks=pytest.mark.long)])
def test_secrets_of_the_environment_are_nowhere(
    pool: str,
    model: ModelServer,
    start_worker: Start,
    server: RedisServer,
    url: str,
    env: dict[str, str],
    commands: CommandLine,
) -> None:
    """CONF-08, EVT-24: Redis, its file, logs, events, traces and Flower; the model alone has one.

    Prompts are in the store, where they belong, and in no log, task event or page.
    """
    model.follow(gives_away)
    model.fail(
        Fault("unauthorized", message=f"Incorrect API key provided: {MODEL_KEY}."), key="refused"
    )
    options = () if pool == "asyncio" else ("-P", "prefork", "-c", "2")
    site = started_flower(commands, url)
    wait_until(lambda: site.get("/")[0] == 200, within=LONG, what="Flower's first page")
    with redis.Redis.from_url(url) as client, client.pubsub() as told:
        site.until_it_hears(url)
        told.psubscribe("*")
        worker = start_worker(url, options=options, env=env)
        keys = f"{SIGNING_KEY},{OLD_SIGNING_KEY}"
        settings = load_settings(redis_url=url, signing_key=keys, grace=GRACE)
        with Fleet(settings=settings) as fleet:
            result = fleet.runs.wait(fleet.submit(LEAKY, QUESTION), timeout=LONG)
            refused = fleet.runs.wait(fleet.submit(LEAKY, "refused"), timeout=LONG)
            assert result.output == "answer"
            assert "provided: [key]." in str(refused.error)
            events = [list(fleet.runs.events(one.run_id)) for one in (result, refused)]
        returned, kept, raised = (step.tool_calls[0] for step in result.steps[:3])
        assert returned.result["lines"] == ["key=[redacted]"]
        assert kept.custom_state == {"seen": ["[redacted]"]}
        assert raised.error is not None
        assert raised.error.message.endswith("payment refused for key [redacted]")
        shown = [str(events), result.model_dump_json(), refused.model_dump_json()]
        shown += said(commands, url, result.run_id, refused.run_id)

        def seen() -> bool:
            states = [one["state"] for one in orjson.loads(site.get("/api/tasks")[1]).values()]
            return len(states) == 5 and not {"STARTED", "RECEIVED"} & set(states)

        wait_until(seen, within=LONG, what="all steps in Flower")
        pages = flower_pages(site)
        worker_log = worker.log
        heard = b"".join(published(told))
        stored = b"".join(everything(client))
    assert heard
    file = append_only(server)
    flower_log = commands.said
    for secret in ENVIRONMENTS:
        for place, text in {
            "the store": stored,
            "the append-only file": file,
            "what was published": heard,
            "the worker's log": worker_log.encode(),
            "results, events and traces": "".join(shown).encode(),
            "Flower's pages": "".join(pages).encode(),
            "Flower's log": flower_log.encode(),
        }.items():
            assert secret.encode() not in text, f"{secret} is in {place}"
    asked = model.requests
    assert asked
    assert all("authorization" in map(str.lower, request.headers) for request in asked)
    assert not any(PAYMENT_KEY in str(request.body) for request in asked)
    for prompt in (INSTRUCTIONS, QUESTION):
        assert prompt.encode() in stored, "the search finds nothing"
        assert prompt.encode() in file, "the search finds nothing"
        for quiet in (worker_log, flower_log, "".join(pages), heard.decode(errors="replace")):
            assert prompt not in quiet
    assert os.environ.get("OPENAI_API_KEY") != MODEL_KEY


LEAKING = Path(__file__).parents[1] / "agent_modules" / "leaking_agents.py"
VAULT_PASS = "vault-canary/0010"


@pytest.mark.timeout(300)
def test_secrets_in_failures_of_others_code_are_nowhere(
    start_worker: Start, own_redis: Callable[..., RedisServer]
) -> None:
    """CONF-08: models, strategies, memories, criteria, handlers, chained errors, shown media."""
    server = own_redis(appendfsync="always")
    env = {"STEPFLEET_AGENTS": str(LEAKING), "VAULT_PASS": VAULT_PASS}
    worker = start_worker(server.url, options=("-l", "DEBUG"), env=env)
    with Fleet(server.url) as fleet, redis.Redis.from_url(server.url) as client:
        agents = load_agents(str(LEAKING))
        runs = {name: fleet.submit(one, QUESTION) for name, one in agents.items()}
        results = {name: fleet.runs.wait(run, timeout=LONG) for name, run in runs.items()}
        shown = [one.model_dump_json() for one in results.values()]
        shown += [str(list(fleet.runs.events(one.run_id))) for one in results.values()]
        stored = b"".join(everything(client))
    file = append_only(server)
    for place, text in {
        "the store": stored,
        "the append-only file": file,
        "the worker's log": worker.log.encode(),
        "results and events": "".join(shown).encode(),
    }.items():
        for form in (
            VAULT_PASS,
            quote(VAULT_PASS, safe=""),
            b64encode(VAULT_PASS.encode()).decode(),
        ):
            assert form.encode() not in text, f"{form} is in {place}"
    for name in agents:
        written = results[name].model_dump_json()
        assert "[redacted]" in written, f"{name} failed in another way: {written}"
        if name != "of_media":
            assert '"traceback":"Traceback (most recent call last):' in written, name
            assert "leaking_agents.py" in written, name
    assert "/leaking_agents.py" in worker.log


def said(commands: CommandLine, url: str, *run_ids: str) -> list[str]:
    """Return what the commands about runs and about the fleet print."""
    texts = []
    asked: list[tuple[str, ...]] = [("doctor",), ("status",)]
    asked += [(verb, run) for verb in ("show", "explain", "events") for run in run_ids]
    for arguments in asked:
        done = commands(*arguments, "--json", STEPFLEET_REDIS_URL=url)
        texts += [done.stdout, done.stderr]
    assert any(QUESTION in text for text in texts), "no command shows the run"
    return texts


def flower_pages(site: Any) -> list[str]:
    """Return Flower's pages about workers, tasks, the broker and the quarantine, and its API."""
    tasks = orjson.loads(site.get("/api/tasks")[1])
    workers = orjson.loads(site.get("/api/workers?refresh=1")[1])
    paths = ["/", "/tasks", "/broker", "/workers", "/metrics", "/quarantine", "/api/tasks"]
    paths += ["/api/workers?refresh=1", "/api/quarantine", "/api/task/types"]
    paths += [f"/task/{one}" for one in tasks] + [f"/api/task/info/{one}" for one in tasks]
    paths += [f"/worker/{one}" for one in workers]
    found = [site.get(path) for path in paths]
    assert [status for status, _ in found] == [200] * len(paths)
    assert workers
    return [text for _, text in found]


def published(told: Any) -> list[bytes]:
    """Return everything that was published until now."""
    found = []
    while (message := told.get_message(timeout=1.0)) is not None:
        if message["type"] == "pmessage":
            found += [message["channel"], message["data"]]
    return found


def append_only(server: RedisServer) -> bytes:
    """Return the append-only files, and what is packed in them."""
    file = b"".join(one.read_bytes() for one in server.folder.rglob("*.aof"))
    return file + hidden(re.findall(rb"\r\n(a[A-Za-z0-9+/=]+)\r\n", file)).encode()


def everything(client: redis.Redis) -> Iterator[bytes]:
    """Yield every key and value of the store as they are, and what is packed in them.

    DUMP would compress them.
    """
    for key in client.scan_iter():
        kind = bytes(client.type(key)).decode()  # type: ignore[arg-type]
        reads: dict[str, Callable[[bytes], Any]] = {
            "string": client.get,
            "hash": client.hgetall,
            "list": lambda key: client.lrange(key, 0, -1),
            "set": client.smembers,
            "zset": lambda key: client.zrange(key, 0, -1, withscores=True),
            "stream": client.xrange,
            "none": lambda _: None,  # it has expired since
        }
        found = reads[kind](key)
        yield key + repr(found).encode()
        yield hidden(found).encode()
