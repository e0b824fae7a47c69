"""What stands in front of a Flower: a reverse proxy, a provider of OAuth logins, a browser."""

import contextlib
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from http.cookiejar import CookieJar
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.error import HTTPError
from urllib.parse import parse_qs, urlencode, urlsplit
from urllib.request import HTTPCookieProcessor, Request, build_opener

import orjson

PUBLIC = "fleet.example"


class _Quiet(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Write no log."""


@contextlib.contextmanager
def _served(handler: type[BaseHTTPRequestHandler], **given: Any) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    vars(server).update(given)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Proxy(_Quiet):
    def do_GET(self) -> None:
        """Forward a request, from `https://fleet.example/...` to this machine."""
        server: Any = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {
            **self.headers,
            "Host": PUBLIC if server.keeps_host else f"127.0.0.1:{server.target}",
            "X-Forwarded-For": "192.0.2.7",
            "X-Forwarded-Proto": "https",
            "X-Forwarded-Host": PUBLIC,
        }
        connection = HTTPConnection("127.0.0.1", server.target, timeout=60)
        try:
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
        finally:
            connection.close()

    def do_POST(self) -> None:
        """Do the same."""
        self.do_GET()


@contextlib.contextmanager
def proxied(port: int, *, keeps_host: bool = True) -> Iterator[int]:
    """Forward requests to a port of this machine; yield the port of the proxy."""
    with _served(_Proxy, target=port, keeps_host=keeps_host) as server:
        yield server.server_address[1]


class _Provider(_Quiet):
    """The part of Okta's interface that Flower uses."""

    def do_GET(self) -> None:
        """Send a browser back with a code, or say whose a token is."""
        server, where = self.server, urlsplit(self.path)
        user = str(server.user)  # type: ignore[attr-defined]
        if where.path.endswith("/userinfo"):
            known = self.headers["Authorization"] == f"Bearer token-of-{user}"
            self._answer({"email": user, "email_verified": known})
            return
        query = {name: one[0] for name, one in parse_qs(where.query).items()}
        back = urlencode({"code": f"code-of-{user}", "state": query["state"]})
        self.send_response(302)
        self.send_header("Location", f"{query['redirect_uri']}?{back}")
        self.end_headers()

    def do_POST(self) -> None:
        """Give a token for a code."""
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        right = form["client_secret"] == ["flower-oauth-secret"]
        self._answer({"access_token": form["code"][0].replace("code-", "token-") if right else ""})

    def _answer(self, data: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(orjson.dumps(data))


@contextlib.contextmanager
def oauth_provider() -> Iterator[Any]:
    """Run a provider that logs its `user` in; yield it, with its address as `url`."""
    with _served(_Provider, user="nobody@example.com") as server:
        server.url = f"http://127.0.0.1:{server.server_address[1]}/oauth2"
        yield server


class Browser:
    """Follows redirects and keeps cookies."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._cookies = CookieJar()
        self._opener = build_opener(HTTPCookieProcessor(self._cookies))

    @property
    def token(self) -> str:
        """The XSRF token, as Flower's scripts read it."""
        return next((one.value or "" for one in self._cookies if one.name == "_xsrf"), "")

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
        """Return status and body; a `body` is posted as JSON."""
        data = None if body is None else orjson.dumps(body)
        given = {"Content-Type": "application/json"} if data is not None else {}
        request = Request(f"{self.root}{path}", data, {**given, **headers})  # noqa: S310 - ours
        try:
            with self._opener.open(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as refused:
            with refused:
                return refused.code, refused.read().decode()
