import gzip
import json
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.servers.redis_servers import free_port

from stepfleet.orchestrator import ConfigurationError, http_get, http_get_from
from stepfleet.orchestrator.errors import ToolArgumentsError, ToolExecutionError
from stepfleet.orchestrator.tools import Tool
from stepfleet.orchestrator.tools.web import Fetcher, Reach


class Site(BaseHTTPRequestHandler):
    """Answers by path; remembers what it was asked, and with which Host."""

    server: "WebServer"

    def do_GET(self) -> None:
        self.server.asked.append((self.headers["Host"], self.path))
        kind, _, rest = self.path[1:].partition("/")
        getattr(self, f"answer_{kind}")(rest)

    def reply(self, body: bytes, content_type: str = "text/plain", **headers: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def answer_text(self, _: str) -> None:
        self.reply("Grüße".encode("latin-1"), "text/html; charset=latin-1")

    def answer_json(self, _: str) -> None:
        self.reply(b'{"a": 1}', "application/ld+json")

    def answer_strange(self, _: str) -> None:
        self.reply(b"ok\xff", "text/plain; charset=rot13")

    def answer_slow(self, charset: str) -> None:
        self.reply(SLOW, f"text/plain; charset={charset}")

    def answer_image(self, _: str) -> None:
        self.reply(b"\x89PNG", "image/png")

    def answer_size(self, size: str) -> None:
        self.reply(b"x" * int(size))

    def answer_endless(self, _: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        try:
            while not self.server.ending.is_set():
                self.wfile.write(b"x" * 65_536)
        except OSError:
            self.server.hung_up.set()

    def answer_silent(self, _: str) -> None:
        self.server.ending.wait(60)

    def answer_zipped(self, _: str) -> None:
        self.reply(gzip.compress(b"x" * 100), Content_Encoding="gzip")

    def answer_missing(self, _: str) -> None:
        self.send_response(404)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        self.wfile.write(b"not here")

    def answer_broken(self, _: str) -> None:
        self.wfile.write(b"this is not HTTP\r\n\r\n")

    def answer_to(self, address: str) -> None:
        self.send_response(302)
        self.send_header("Location", address)
        self.end_headers()

    def answer_again(self, count: str) -> None:
        left = int(count)
        self.answer_to(f"/again/{left - 1}" if left else "/json")

    def log_message(self, *_: Any) -> None:
        """Keep the test's output clean."""


SLOW = b"a-" * 500_000


class WebServer(ThreadingHTTPServer):
    """A real server on loopback."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Site)
        self.asked: list[tuple[str, str]] = []
        self.ending = threading.Event()
        self.hung_up = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def web() -> Iterator[WebServer]:
    with WebServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.ending.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def local_get() -> Tool[..., Any]:
    """The tool with loopback opted in."""
    return http_get_from(["127.0.0.1", "localhost"], allow_private=True)


async def test_a_page_s_text_is_fetched(web: WebServer, local_get: Tool[..., Any]) -> None:
    """TOOL-24"""
    assert await local_get.execute(url=f"{web.url}/text#part") == {
        "status": 200,
        "url": f"{web.url}/text#part",
        "content_type": "text/html",
        "text": "Grüße",
        "truncated": False,
    }
    assert web.asked == [(f"127.0.0.1:{web.server_port}", "/text")]


async def test_the_text_is_shortened_only_with_a_word_about_it(
    web: WebServer, local_get: Tool[..., Any]
) -> None:
    """TOOL-24"""
    page = await local_get.execute(url=f"{web.url}/json", max_characters=3)
    assert (page["text"], page["truncated"]) == ('{"a', True)


async def test_an_unknown_charset_falls_back_to_utf_8(
    web: WebServer, local_get: Tool[..., Any]
) -> None:
    """TOOL-24"""
    assert (await local_get.execute(url=f"{web.url}/strange"))["text"] == "ok\ufffd"


@pytest.mark.parametrize("charset", ["punycode", "idna", "utf-7", "unicode_escape", "hz"])
async def test_a_page_does_not_choose_a_codec_that_keeps_the_worker_busy(
    web: WebServer, local_get: Tool[..., Any], charset: str
) -> None:
    """TOOL-24: 1 MB of `punycode` took 90 s."""
    page = await local_get.execute(url=f"{web.url}/slow/{charset}")
    assert page["text"] == SLOW[:20_000].decode()


async def test_a_page_that_is_missing_is_an_answer_too(
    web: WebServer, local_get: Tool[..., Any]
) -> None:
    """TOOL-24"""
    page = await local_get.execute(url=f"{web.url}/missing")
    assert (page["status"], page["text"]) == (404, "not here")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "0.0.0.0"])  # noqa: S104
async def test_the_stock_tool_does_not_reach_this_machine(web: WebServer, host: str) -> None:
    """TOOL-24: private addresses are refused, by name and by number, and nothing is sent."""
    with pytest.raises(ToolArgumentsError, match="which is not on the public internet"):
        await http_get.execute(url=f"http://{host}:{web.server_port}/json")
    assert web.asked == []


async def test_a_name_that_resolves_to_a_private_address_is_refused(web: WebServer) -> None:
    """TOOL-24: judged after resolution."""

    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    with pytest.raises(ToolArgumentsError, match=r"'fine.example' leads to 127.0.0.1"):
        await Fetcher(resolve=resolve).fetch(f"http://fine.example:{web.server_port}/json")
    assert web.asked == []


async def test_the_connection_goes_to_the_address_that_was_judged(web: WebServer) -> None:
    """TOOL-24: one resolution per hop, so that rebinding gains nothing; Host is the name."""
    answers = [["127.0.0.1"], ["10.9.9.9"]]

    async def resolve(host: str, port: int) -> list[str]:
        return answers.pop(0)

    fetcher = Fetcher(Reach(("name.example",), allow_private=True), resolve=resolve)
    page = await fetcher.fetch(f"http://name.example:{web.server_port}/json")
    assert page.text == '{"a": 1}'
    assert web.asked == [(f"name.example:{web.server_port}", "/json")]
    assert answers == [["10.9.9.9"]]


async def test_the_next_address_is_tried_where_one_does_not_answer(web: WebServer) -> None:
    """TOOL-24: a host's IPv6 address without a listener, for example."""

    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.2", "127.0.0.1"]

    fetcher = Fetcher(Reach(("name.example",), allow_private=True), resolve=resolve)
    assert (await fetcher.fetch(f"http://name.example:{web.server_port}/json")).status == 200


async def test_redirects_are_followed_up_to_five(web: WebServer, local_get: Tool[..., Any]) -> None:
    """TOOL-24"""
    page = await local_get.execute(url=f"{web.url}/again/4")
    assert page["url"] == f"{web.url}/json"
    with pytest.raises(ToolExecutionError, match="more than 5 redirects"):
        await local_get.execute(url=f"{web.url}/again/5")


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("http://169.254.169.254/latest/meta-data/", "is not on the public internet"),
        ("http://[::ffff:169.254.169.254]/", "is not on the public internet"),
        ("http://2852039166/", "is not a plain address"),
        ("file:///etc/passwd", "give an http:// or https:// address"),
        ("//user@127.0.0.1/", "user name or password"),
    ],
)
async def test_every_redirect_is_judged_like_the_first_address(
    web: WebServer, target: str, says: str
) -> None:
    """TOOL-24: a public page cannot send the tool inside."""

    class Public(Reach):
        """Takes the test's server, and nothing else, for public."""

        def check_addresses(self, host: str, addresses: Any) -> None:
            if host != "public.example":
                super().check_addresses(host, addresses)

    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    fetcher = Fetcher(Public(), resolve=resolve)
    with pytest.raises(ToolArgumentsError) as caught:
        await fetcher.fetch(f"http://public.example:{web.server_port}/to/{target}")
    assert says in caught.value.message
    assert len(web.asked) == 1


async def test_a_redirect_off_the_list_of_hosts_is_refused(web: WebServer) -> None:
    """TOOL-24"""
    get = http_get_from(["127.0.0.1"], allow_private=True)
    with pytest.raises(ToolArgumentsError, match="'localhost' is not allowed"):
        await get.execute(url=f"{web.url}/to/http://localhost:{web.server_port}/json")


async def test_a_body_above_the_limit_is_an_error_and_is_not_read_to_its_end(
    web: WebServer, local_get: Tool[..., Any]
) -> None:
    """TOOL-24: streamed; 1 MiB is the last size that is read."""
    fits = await local_get.execute(url=f"{web.url}/size/{2**20}")
    assert (len(fits["text"]), fits["truncated"]) == (20_000, True)
    for path in (f"size/{2**20 + 1}", "endless"):
        with pytest.raises(ToolExecutionError, match="larger than the limit of 1048576 bytes"):
            await local_get.execute(url=f"{web.url}/{path}")
    assert web.hung_up.wait(60)


async def test_a_server_that_says_nothing_is_given_up(web: WebServer) -> None:
    """TOOL-24"""
    get = http_get_from(["127.0.0.1"], allow_private=True, timeout=1)
    with pytest.raises(ToolExecutionError, match=r"not fetched within 1 s|ReadTimeout") as caught:
        await get.execute(url=f"{web.url}/silent")
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("image", r"\(status 200\) is of type image/png; only text, JSON"),
        ("zipped", r"is compressed \(gzip\)"),
        ("broken", "cannot be fetched: RemoteProtocolError"),
    ],
)
async def test_what_is_no_text_is_an_error(
    web: WebServer, local_get: Tool[..., Any], path: str, says: str
) -> None:
    """TOOL-24"""
    with pytest.raises(ToolExecutionError, match=says):
        await local_get.execute(url=f"{web.url}/{path}")


async def test_a_port_without_listener_is_an_error(local_get: Tool[..., Any]) -> None:
    """TOOL-24"""
    with pytest.raises(ToolExecutionError, match="cannot be fetched: ConnectError"):
        await local_get.execute(url=f"http://127.0.0.1:{free_port()}/")


async def test_a_name_that_does_not_exist_is_an_error() -> None:
    """TOOL-24"""
    with pytest.raises(ToolExecutionError, match=r"'no-such-host\.invalid' cannot be resolved"):
        await http_get.execute(url="http://no-such-host.invalid/")


async def test_proxies_of_the_environment_are_not_used(
    web: WebServer, local_get: Tool[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TOOL-24: a proxy would resolve the name itself."""
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("ALL_PROXY", f"http://127.0.0.1:{free_port()}")
    assert (await local_get.execute(url=f"{web.url}/json"))["status"] == 200


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a self-signed certificate for `name`."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            f"/CN={name}",
            "-addext",
            f"subjectAltName=DNS:{name}",
            "-keyout",
            str(key),
            "-out",
            str(cert),
        ],
        check=True,
        capture_output=True,
    )
    return key, cert


async def test_over_tls_the_certificate_is_checked_for_the_name_and_not_the_address(
    web: WebServer, tmp_path: Path
) -> None:
    """TOOL-24: pinning does not weaken TLS."""
    key, cert = certificate(tmp_path, "name.example")
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(cert, key)
    names: list[str | None] = []
    served.sni_callback = lambda _socket, name, _context: names.append(name)
    web.socket = served.wrap_socket(web.socket, server_side=True)

    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    trust = ssl.create_default_context(cafile=str(cert))
    reach = Reach(("name.example", "other.example"), allow_private=True)
    fetcher = Fetcher(reach, tls=trust, resolve=resolve)
    page = await fetcher.fetch(f"https://name.example:{web.server_port}/json")
    assert (page.text, names) == ('{"a": 1}', ["name.example"])
    with pytest.raises(ToolExecutionError, match=r"other.example.* CERTIFICATE_VERIFY_FAILED"):
        await fetcher.fetch(f"https://other.example:{web.server_port}/json")
    untrusting = Fetcher(reach, resolve=resolve)
    with pytest.raises(ToolExecutionError, match="CERTIFICATE_VERIFY_FAILED"):
        await untrusting.fetch(f"https://name.example:{web.server_port}/json")


def test_hosts_must_be_a_list() -> None:
    """TOOL-24"""
    with pytest.raises(ConfigurationError, match=r"write hosts=\['example.com'\]"):
        http_get_from("example.com")


def test_neither_httpx_nor_celery_nor_redis_is_imported_with_the_tools() -> None:
    """Agents' modules are loaded by clients that have none of the workers' packages."""
    code = (
        "import sys, json, stepfleet.orchestrator.tools.builtin;"
        "print(json.dumps([m for m in ('httpx', 'celery', 'redis', 'jsonschema', 'aiohttp')"
        " if m in sys.modules]))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert json.loads(ended.stdout) == []
