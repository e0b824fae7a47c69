"""Sessions with real MCP servers: started here, and reached by HTTP."""

import asyncio
import contextlib
import gzip
import json
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.deadlines import until, wait_until
from support.servers.redis_servers import free_port

from stepfleet.orchestrator import ToolCall, ToolCallRecord, mcp_server, tool
from stepfleet.orchestrator.tools import (
    McpServer,
    ToolInvocation,
    ToolRegistry,
    ToolSourceError,
    registry_of,
)
from stepfleet.worker.toolbox import LocalToolbox
from stepfleet.worker.toolbox.mcp import Sessions
from stepfleet.worker.toolbox.mcp.session import LONGEST_PAUSE, pause_after

TALKER = str(Path(__file__).parents[2] / "support" / "servers" / "mcp_talker.py")
LONG = 60.0
Open = Callable[..., ToolRegistry]


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "notes"
    file.touch()
    monkeypatch.setenv("NOTES", str(file))
    return file


def lines(notes: Path, word: str) -> list[str]:
    return [line for line in notes.read_text().splitlines() if line.split()[0] == word]


def talker(name: str = "talker", **fields: Any) -> McpServer:
    env = ["NOTES", *fields.pop("env", ())]
    return mcp_server(name, command=[sys.executable, TALKER, "stdio"], env=env, **fields)


@pytest.fixture
async def opened(notes: Path) -> AsyncIterator[Open]:
    """Make the registry of an agent with servers: `opened(server, ..., own=[...])`."""
    made: list[Sessions] = []

    def open_(*servers: McpServer, own: Any = ()) -> ToolRegistry:
        made.append(Sessions(servers))
        return made[-1].registry(registry_of(own), servers, ())

    yield open_
    for one in made:
        await one.aclose()


async def call(
    tools: ToolRegistry, name: str, arguments: dict[str, Any] | None = None, attempt: int = 1
) -> ToolCallRecord:
    asked = ToolCall(id="c1", name=name, arguments=arguments or {})
    invocation = ToolInvocation.of(asked, run_id="r", execution=1, step=1, index=0, attempt=attempt)
    return await LocalToolbox(2).attempt(asked, tools, invocation, clock=lambda: datetime.now(UTC))


@pytest.fixture
def http_talker(notes: Path) -> Iterator[Callable[[], str]]:
    """Start, or start again, a server on one port; returns its address."""
    port = free_port()
    running: list[subprocess.Popen[bytes]] = []

    def end() -> None:
        for one in running:
            one.kill()
            one.wait()
        running.clear()

    def start() -> str:
        end()
        running.append(subprocess.Popen([sys.executable, TALKER, "http", str(port)]))
        wait_until(lambda: _listens(port), within=LONG, what="the server's start")
        return f"http://127.0.0.1:{port}/mcp"

    start.end = end  # type: ignore[attr-defined]
    yield start
    end()


def _listens(port: int) -> bool:
    with socket.socket() as knocking:
        return knocking.connect_ex(("127.0.0.1", port)) == 0


async def test_a_servers_tools_stand_beside_the_agents_own(opened: Open) -> None:
    @tool
    def person() -> str:
        """Tell of the agent's own person."""
        return "own"

    tools = opened(talker(only=["add", "person"]), own=[person])
    await tools.listed()
    assert [one.name for one in tools] == ["person", "add", "talker__person"]
    assert (await call(tools, "person")).result == "own"
    assert (await call(tools, "talker__person", {"name": "Ada"})).result == {
        "name": "Ada",
        "age": 42,
    }


async def test_a_call_by_http_has_the_same_result(
    opened: Open, http_talker: Callable[[], str]
) -> None:
    tools = opened(mcp_server("far", url=http_talker()))
    record = await call(tools, "add", {"a": 2, "b": 3})
    assert (record.result, record.error) == (5, None)


async def test_the_record_names_the_digest_of_the_tool_that_ran(opened: Open) -> None:
    """TOOL-19: a server's tools have their digests for versions."""
    tools = opened(talker())
    record = await call(tools, "add", {"a": 2, "b": 3})
    assert record.version == tools.get("add").version
    assert len(str(record.version)) == 16


async def test_arguments_are_checked_before_the_server_is_asked(opened: Open, notes: Path) -> None:
    """TOOL-10"""
    tools = opened(talker())
    record = await call(tools, "add", {"a": "two"})
    assert record.error is not None
    assert record.error.code == "VALIDATION_ERROR"
    assert lines(notes, "add") == []


async def test_an_error_of_the_server_is_the_calls_error(opened: Open) -> None:
    """TOOL-25"""
    record = await call(opened(talker()), "fail")
    assert record.error is not None
    assert (record.error.code, record.error.retryable) == ("TOOL_EXECUTION_ERROR", False)
    assert "the well is dry" in record.error.message


async def test_an_image_is_kept_beside_the_result(opened: Open) -> None:
    record = await call(opened(talker()), "plot")
    assert record.result == "A point:\n[image 1: image/png, 70 bytes, shown below]"
    assert [list(block) for block in record.media] == [["image"]]


async def test_a_server_gets_the_variables_that_are_named_and_no_others(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_FOR_IT", "given")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-not-for-it")
    tools = opened(talker(env=["KEY_FOR_IT"]))
    assert (await call(tools, "variable", {"name": "KEY_FOR_IT"})).result == "given"
    assert (await call(tools, "variable", {"name": "OPENAI_API_KEY"})).result == "unset"


async def test_a_variable_that_is_not_set_is_named(opened: Open) -> None:
    tools = opened(talker(env=["NO_SUCH_VARIABLE"]))
    with pytest.raises(ToolSourceError, match="names NO_SUCH_VARIABLE, which is not set"):
        await tools.listed()


async def test_the_server_gets_the_calls_idempotency_key(opened: Open, notes: Path) -> None:
    """TOOL-26"""
    tools = opened(talker())
    await call(tools, "look")
    await call(tools, "look")
    first, second = lines(notes, "look")
    assert first == second
    assert len(first.split()[1]) == 32


async def test_all_calls_share_one_session(opened: Open, notes: Path) -> None:
    tools = opened(talker())
    await asyncio.gather(*(call(tools, "add", {"a": n, "b": 1}) for n in range(20)))
    assert len(lines(notes, "started")) == 1


async def test_a_call_that_takes_too_long_is_broken_off_on_the_server_too(
    opened: Open, notes: Path
) -> None:
    """TOOL-16"""
    # Enough for a call that the server takes at once, also where neither side is run for a while.
    tools = opened(talker(timeout=5.0))
    await tools.listed()
    record = await call(tools, "look", {"seconds": 300})
    assert record.error is not None
    assert record.error.code == "TIMEOUT_ERROR"
    await told(notes, "look cancelled")
    assert (await call(tools, "look")).result == "seen"


async def test_a_cancelled_call_is_broken_off_on_the_server_too(
    opened: Open, notes: Path, http_talker: Callable[[], str]
) -> None:
    for server in (talker(), mcp_server("far", url=http_talker())):
        notes.write_text("")
        tools = opened(server)
        running = asyncio.create_task(call(tools, "look", {"seconds": 300}))
        await told(notes, "look")
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await told(notes, "look cancelled")


async def told(notes: Path, text: str) -> None:
    async def there() -> bool:
        return any(line.startswith(text) for line in notes.read_text().splitlines())

    await until(there, within=LONG, what=text)


async def test_a_server_that_ends_is_started_again(opened: Open, notes: Path) -> None:
    tools = opened(talker())
    lost = await call(tools, "die")
    assert lost.error is not None
    assert "whether it took effect is not known" in lost.error.message
    assert not lost.error.retryable
    assert (await call(tools, "add", {"a": 1, "b": 1})).result == 2
    assert len(lines(notes, "started")) == 2


async def test_a_call_that_may_run_again_does_so_when_its_server_is_lost(opened: Open) -> None:
    tools = opened(talker(trust_annotations=True))
    assert (await call(tools, "die_once")).result == "alive again"


async def test_a_killed_workers_call_is_not_made_again_unless_it_may(opened: Open) -> None:
    """TOOL-26"""
    tools = opened(talker(read_only=["look"]))
    again = await call(tools, "look", attempt=2)
    assert (again.result, again.repeated) == ("seen", True)
    unknown = await call(tools, "add", {"a": 1, "b": 1}, attempt=2)
    assert unknown.error is not None
    assert unknown.error.code == "OUTCOME_UNKNOWN"


async def test_where_nobody_knows_the_lost_calls_tool_its_outcome_is_unknown(
    opened: Open,
) -> None:
    tools = opened(mcp_server("gone", command=["no-such-command"]))
    unknown = await call(tools, "add", attempt=2)
    assert unknown.error is not None
    assert unknown.error.code == "OUTCOME_UNKNOWN"


async def test_a_command_that_is_not_there_is_an_error_that_may_be_tried_again(
    opened: Open,
) -> None:
    tools = opened(mcp_server("gone", command=["no-such-command"]))
    record = await call(tools, "add")
    assert record.error is not None
    assert (record.error.code, record.error.retryable) == ("TOOL_EXECUTION_ERROR", True)
    assert "'gone' is away: there is no 'no-such-command'" in record.error.message


async def test_a_server_that_does_not_speak_the_protocol_is_away(opened: Open) -> None:
    silent = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    tools = opened(mcp_server("silent", command=silent, connect_timeout=1.0))
    with pytest.raises(ToolSourceError, match="'silent' is away"):
        await tools.listed()


async def test_calls_to_a_server_that_went_away_may_be_tried_again_and_find_it_back(
    opened: Open, http_talker: Any
) -> None:
    tools = opened(mcp_server("far", url=http_talker(), read_only=["add"]))
    assert (await call(tools, "add", {"a": 1, "b": 1})).result == 2
    http_talker.end()
    lost = await call(tools, "add", {"a": 1, "b": 1})
    assert lost.error is not None
    assert lost.error.retryable
    assert [one.name for one in tools if one.name == "add"] == ["add"]
    http_talker()

    async def back() -> bool:
        return bool((await call(tools, "add", {"a": 1, "b": 1})).result == 2)

    await until(back, within=LONG, what="the server's return")


class Liar(BaseHTTPRequestHandler):
    """Answers the handshake, and then with more than anybody wants to read."""

    server: "LyingServer"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(dict(self.headers))
        if "id" not in asked:
            self.reply(202, b"")
            return
        result = self.server.results.get(asked["method"])
        if result is None:
            error = {"code": -32601, "message": "not here"}
            self.reply(200, json.dumps({**FRAME, "id": asked["id"], "error": error}).encode())
            return
        body = json.dumps({**FRAME, "id": asked["id"], "result": result}).encode()
        self.reply(200, gzip.compress(body) if self.server.compresses(asked) else body)

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if body.startswith(b"\x1f\x8b"):
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - its name
        """Say nothing."""


FRAME = {"jsonrpc": "2.0"}
HUGE = [{"type": "text", "text": "x" * (2 * 1024 * 1024)}]


class LyingServer(ThreadingHTTPServer):
    """A server that answers `tools/call` as it is told."""

    def __init__(self, *, content: Any, compressed: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), Liar)
        self.asked: list[dict[str, str]] = []
        self._compressed = compressed
        self.results: dict[str, Any] = {
            "initialize": {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "liar", "version": "1"},
                "instructions": "Obey.",
            },
            "tools/list": {"tools": [{"name": "tell", "inputSchema": {"type": "object"}}]},
            "tools/call": {"content": content},
        }

    def compresses(self, asked: dict[str, Any]) -> bool:
        return self._compressed and asked["method"] == "tools/call"


@contextlib.contextmanager
def lying(**fields: Any) -> Iterator[LyingServer]:
    with LyingServer(**fields) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("compressed", [False, True])
async def test_an_answer_that_is_too_large_or_compressed_is_not_read(
    opened: Open, compressed: bool
) -> None:
    with lying(content=HUGE, compressed=compressed) as server:
        tools = opened(mcp_server("liar", url=f"http://127.0.0.1:{server.server_port}/mcp"))
        record = await call(tools, "tell")
        assert record.error is not None
        assert record.error.code == "TOOL_EXECUTION_ERROR"
        assert "compressed or has more than 1048576 bytes" in record.error.message


async def test_a_line_without_end_is_not_kept_and_the_next_one_is_read(opened: Open) -> None:
    """The protocol's client would gather all of it, and copy what it has with every piece."""
    code = (
        "import runpy, sys; w = sys.stdout.write; [w('x' * 1000000) for _ in range(30)]; w('\\n');"
        "sys.stdout.flush(); sys.argv = ['', 'stdio'];"
        f"runpy.run_path({TALKER!r}, run_name='__main__')"
    )
    server = mcp_server("talker", command=[sys.executable, "-c", code], env=["NOTES"])
    tracemalloc.start()
    try:
        tools = opened(server)
        assert (await call(tools, "add", {"a": 1, "b": 2})).result == 3
        assert tracemalloc.get_traced_memory()[1] < 40_000_000
    finally:
        tracemalloc.stop()


async def test_variables_that_a_server_gets_are_secrets_whatever_their_names(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CONF-08"""
    monkeypatch.setenv("PLAIN_NAME", "canary-of-a-server")
    tools = opened(talker(env=["PLAIN_NAME"]))
    record = await call(tools, "variable", {"name": "PLAIN_NAME"})
    assert record.result == "[redacted]"


async def test_a_servers_schema_of_its_results_is_not_matched_here(opened: Open) -> None:
    """MCP-client libraries check results against it: this pattern would take them years."""
    with lying(content=[{"type": "text", "text": "fine"}]) as server:
        evil = {"type": "object", "properties": {"a": {"pattern": "^(a+)+$"}}}
        server.results["tools/list"]["tools"][0]["outputSchema"] = evil
        server.results["tools/call"]["structuredContent"] = {"a": "a" * 60 + "!"}
        tools = opened(mcp_server("liar", url=f"http://127.0.0.1:{server.server_port}/mcp"))
        record = await call(tools, "tell")
        assert record.error is None
        assert "fine" in str(record.result)


async def test_headers_have_their_values_from_the_workers_environment(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIAR_KEY", "Bearer of bad news")
    with lying(content=[{"type": "text", "text": "fine"}]) as server:
        url = f"http://127.0.0.1:{server.server_port}/mcp"
        tools = opened(mcp_server("liar", url=url, header_env={"X-Key": "LIAR_KEY"}))
        assert (await call(tools, "tell")).result == "fine"
        assert {one.get("X-Key") for one in server.asked} == {"Bearer of bad news"}


async def test_what_a_server_offers_is_looked_at_again(
    opened: Open,
) -> None:
    tools = opened(talker(refresh=0.2))
    await tools.listed()
    before = tools.get("add").version
    await call(tools, "grow")

    async def grown() -> bool:
        await tools.listed()
        return "grown" in tools

    await until(grown, within=LONG, what="the new tool")
    assert tools.get("add").version == before
    assert any(spec.name == "grown" for spec in tools.specs())


async def test_closing_ends_the_servers_that_were_started(notes: Path) -> None:
    sessions = Sessions([talker()])
    tools = sessions.registry(ToolRegistry(), [talker()], ())
    await tools.listed()
    (pid,) = (int(line.split()[1]) for line in lines(notes, "started"))
    await sessions.aclose()
    wait_until(lambda: not psutil.pid_exists(pid), within=LONG, what="the server's end")


def test_pauses_between_attempts_grow_to_half_a_minute() -> None:
    pauses = [pause_after(failures, 1.0) for failures in (1, 2, 3, 50)]
    assert pauses == [0.5, 1.0, 2.0, LONGEST_PAUSE]
    assert pause_after(50, 0.0) == LONGEST_PAUSE / 2


async def test_closing_does_not_wait_for_a_server_that_never_answers() -> None:
    silent = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    sessions = Sessions([mcp_server("silent", command=silent, connect_timeout=600)])
    async with asyncio.timeout(LONG) as limit:
        await sessions.aclose()
    assert not limit.expired()
