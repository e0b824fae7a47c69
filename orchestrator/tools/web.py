"""The web tools: `http_get` for the public internet, `http_get_from` for hosts that you name.

Each hop resolves the host's name once, has every address judged (`Reach`), and connects to
the address that was judged, so that a name which changes its address in between (rebinding) gains
nothing. Redirects are followed here and not by the client, each as a hop of its own. Proxies of
the environment are not used: they would resolve names themselves.

httpx is imported on the first call: clients that only submit runs do not have it.
"""

import asyncio
import codecs
import functools
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from encodings import normalize_encoding
from encodings.aliases import aliases
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import SplitResult, urljoin, urlsplit

from pydantic import Field

from stepfleet.orchestrator.errors import ConfigurationError, ToolArgumentsError, ToolExecutionError
from stepfleet.orchestrator.tools.definition import Tool, tool

MAX_URL = 8192
"""Characters of an address."""
PORTS = {"http": 80, "https": 443}
"""The schemes that can be fetched, and their ports."""
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

# Networks that ipaddress (depending on Python's patch release) calls global although they lead to
# private networks, to this host, or to addresses embedded in others.
_CLOSED = tuple(
    ipaddress.ip_network(one)
    for one in (
        "168.63.129.16/32",  # Azure's virtual hosts: settings and secrets of the machine
        "192.0.0.0/24",
        "192.31.196.0/24",  # answers to private reverse names (AS112), as is 192.175.48.0/24
        "192.52.193.0/24",  # multicast tunnels
        "192.175.48.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "100.64.0.0/10",  # carriers' own networks
        "::ffff:0:0/96",  # IPv4 in IPv6
        "::/96",  # the same, deprecated
        "64:ff9b:1::/48",  # translation within a network
        "100::/64",
        "2001::/23",  # Teredo and other protocols
        "2002::/16",  # 6to4
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",
        "5f00::/16",
        "fec0::/10",  # site-local, deprecated
    )
)
_ISATAP = 0x00005EFE
"""The third quarter of an address that holds an IPv4 address behind it, but for one bit."""
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
_NUMBER = re.compile(r"\d+|0[xX][0-9a-fA-F]*")
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_.:\-]+")


def is_public(address: IPAddress) -> bool:
    """Return whether `address` belongs to the public internet."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            return False
        if address in _TRANSLATED:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if (int(address) >> 32) & 0xFDFFFFFF == _ISATAP:
            return False
    closed = (
        address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_reserved
        or address.is_unspecified
        or not address.is_global
    )
    return not closed and not any(
        address in network for network in _CLOSED if network.version == address.version
    )


def literal_address(host: str) -> IPAddress | None:
    """Return the address that `host` is, or None for a name.

    Raises `ToolArgumentsError` for the decimal, octal, hexadecimal and short forms of IPv4
    addresses, which resolvers read and people do not.
    """
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        last = host.rstrip(".").rpartition(".")[2]
        if _NUMBER.fullmatch(last) or ":" in host:
            raise ToolArgumentsError(
                f"the host {host[:100]!r} is not a plain address; write it as four decimal numbers"
            ) from None
    return None


@dataclass(frozen=True)
class Reach:
    """Where a tool may go: `hosts` (None: any), and whether those may be private addresses.

    Hosts are names, `*.name` for all names below one, or addresses.
    """

    hosts: tuple[str, ...] | None = None
    allow_private: bool = False

    def __post_init__(self) -> None:
        """Refuse lists that cannot be meant; raises `ConfigurationError`."""
        if self.allow_private and self.hosts is None:
            raise ConfigurationError(
                "allow_private needs hosts: name the hosts that may be private addresses"
            )
        for host in self.hosts or ():
            if not _HOST.fullmatch(host):
                raise ConfigurationError(
                    f"hosts: {host!r} is not a host; give names or addresses such as "
                    "api.example.com, *.example.com, 127.0.0.1 or ::1, without "
                    "scheme, port and path"
                )

    def check_host(self, host: str) -> None:
        """Raise `ToolArgumentsError` unless `host` is one of the hosts on the list."""
        if self.hosts is None:
            return
        given = host.lower().rstrip(".")
        if not any(_matches(given, one.lower()) for one in self.hosts):
            raise ToolArgumentsError(
                f"the host {host[:100]!r} is not allowed; allowed are {', '.join(self.hosts)}"
            )

    def check_addresses(self, host: str, addresses: Iterable[IPAddress]) -> None:
        """Raise `ToolArgumentsError` if any of the addresses of `host` may not be reached."""
        if self.allow_private:
            return
        for one in addresses:
            if not is_public(one):
                raise ToolArgumentsError(
                    f"the host {host[:100]!r} leads to {one}, which is not on the public internet"
                )


def checked_url(url: str) -> SplitResult:
    """Return the parts of `url`, its host in ASCII.

    Raises `ToolArgumentsError` unless it is an http or https address with a host.
    """
    if len(url) > MAX_URL:
        raise ToolArgumentsError(f"the address is longer than {MAX_URL} characters")
    if any(one <= " " or one in "\x7f\\" for one in url):
        raise ToolArgumentsError("the address holds spaces, control characters or backslashes")
    try:
        target = urlsplit(url)
        port = target.port
    except ValueError as error:
        raise ToolArgumentsError(f"the address {url[:100]!r} is not valid: {error}") from None
    if target.scheme not in PORTS or not target.hostname or port == 0:
        raise ToolArgumentsError(
            f"the address {url[:100]!r} cannot be fetched; give an http:// or https:// address"
        )
    if "@" in target.netloc:
        raise ToolArgumentsError("the address holds a user name or password; leave it out")
    try:
        host = target.hostname.encode("idna").decode() if not target.hostname.isascii() else None
    except UnicodeError:
        raise ToolArgumentsError(
            f"the host {target.hostname[:100]!r} is not a valid name"
        ) from None
    if host is None:
        return target
    return target._replace(netloc=host if port is None else f"{host}:{port}")


def pinned(target: SplitResult, address: IPAddress) -> str:
    """Return `target` with its host replaced by `address`, and without fragment."""
    host = f"[{address}]" if address.version == 6 else str(address)  # noqa: PLR2004 - IPv6
    netloc = host if target.port is None else f"{host}:{target.port}"
    return target._replace(netloc=netloc, fragment="").geturl()


def _matches(host: str, pattern: str) -> bool:
    if pattern.startswith("*."):
        return host.endswith(pattern[1:])
    return host == pattern


CHUNK = 32 * 1024
"""Bytes that are decoded at once: a few milliseconds in the slowest charset."""

_DEFAULT = "utf_8"
_MARKS = {
    codecs.BOM_UTF8: "utf_8_sig",
    codecs.BOM_UTF32_LE: "utf_32",
    codecs.BOM_UTF32_BE: "utf_32",
    codecs.BOM_UTF16_LE: "utf_16",
    codecs.BOM_UTF16_BE: "utf_16",
}
_WITHOUT_MARK = {"utf_16": "utf_16_le", "utf_32": "utf_32_le"}
_NAMED = re.compile(r"""charset\s*=\s*["']?([A-Za-z0-9._:-]{1,40})""", re.IGNORECASE)
_LONGEST_TYPE = 1000
_ALLOWED = frozenset(
    {
        *("ascii", "utf_8", "utf_8_sig", "latin_1"),
        *("utf_16_be", "utf_16_le", "utf_32_be", "utf_32_le"),
        *(f"iso8859_{part}" for part in range(1, 17) if part != 12),  # noqa: PLR2004 - there is none
        *(f"cp125{part}" for part in range(9)),
        *("cp437", "cp850", "cp852", "cp866", "cp874", "tis_620"),
        *("koi8_r", "koi8_u", "mac_roman", "mac_cyrillic"),
        *("shift_jis", "cp932", "euc_jp", "iso2022_jp"),
        *("gb2312", "gbk", "gb18030", "big5", "big5hkscs", "cp950"),
        *("euc_kr", "cp949"),
    }
)


def charset_of(content_type: str) -> str:
    """Return the codec of a Content-Type header: an allowed one, else that of UTF-8."""
    named = _NAMED.search(content_type[:_LONGEST_TYPE])
    if named is None:
        return _DEFAULT
    name = normalize_encoding(named.group(1)).lower()
    codec = aliases.get(name, name)
    codec = _WITHOUT_MARK.get(codec, codec)
    return codec if codec in _ALLOWED else _DEFAULT


async def decoded(body: bytes, charset: str) -> str:
    """Return the text of a body, with U+FFFD for unreadable bytes; a byte order mark decides.

    Yields to the event loop between chunks. `charset` is the result of `charset_of`.
    """
    marked = next((codec for mark, codec in _MARKS.items() if body.startswith(mark)), charset)
    decoder = codecs.getincrementaldecoder(marked)("replace")
    parts = []
    for at in range(0, len(body), CHUNK):
        parts.append(decoder.decode(body[at : at + CHUNK]))
        await asyncio.sleep(0)
    parts.append(decoder.decode(b"", True))  # noqa: FBT003 - the codec's own signature
    return "".join(parts).encode("utf-8", "replace").decode()


if TYPE_CHECKING:
    import httpx

MAX_REDIRECTS = 5
MAX_BODY = 1024 * 1024
"""Bytes of a response's body."""
MAX_CHARACTERS = 60_000
"""Characters of text that one call returns."""
TIMEOUT = 20.0
"""Seconds for the whole fetch, redirects included."""

_REDIRECTS = {301, 302, 303, 307, 308}
_TEXT_TYPES = (
    "application/json",
    "application/javascript",
    "application/x-javascript",
    "application/xml",
    "application/yaml",
    "application/x-yaml",
    "application/x-ndjson",
    "application/x-www-form-urlencoded",
)
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "stepfleet"}

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host, as text."""


@dataclass(frozen=True)
class WebPage:
    """A fetched page. `url` is the address after redirects."""

    status: int
    url: str
    content_type: str
    text: str


async def resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of `host`, as the system resolves it.

    Raises `ToolExecutionError` when it has none.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ToolExecutionError(
            f"the host {host[:100]!r} cannot be resolved: {error}", retryable=True
        ) from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


@dataclass(frozen=True)
class Fetcher:
    """Fetches within a `Reach`. `tls` replaces the default trust (a company's own authority)."""

    reach: Reach = field(default_factory=Reach)
    max_body: int = MAX_BODY
    timeout: float = TIMEOUT
    tls: ssl.SSLContext | None = None
    resolve: Resolve = resolve_host

    async def fetch(self, url: str) -> WebPage:
        """Return the page at `url`.

        Raises `ToolArgumentsError` for addresses that may not be fetched, `ToolExecutionError`
        for failures of the fetch.
        """
        scope = asyncio.timeout(self.timeout)
        try:
            async with scope:
                return await self._follow(url)
        except TimeoutError:
            if not scope.expired():
                raise
            raise ToolExecutionError(
                f"{url[:200]} was not fetched within {self.timeout:g} s", retryable=True
            ) from None

    async def _follow(self, url: str) -> WebPage:
        for _ in range(MAX_REDIRECTS + 1):
            answer = await self._hop(url)
            if isinstance(answer, WebPage):
                return answer
            url = answer
        raise ToolExecutionError(f"more than {MAX_REDIRECTS} redirects; last to {url[:200]}")

    async def _hop(self, url: str) -> WebPage | str:
        """Return the page, or the address to which the server redirects."""
        target = checked_url(url)
        host, port = str(target.hostname), target.port or PORTS[target.scheme]
        self.reach.check_host(host)
        literal = literal_address(host)
        found = [str(literal)] if literal else await self.resolve(host, port)
        addresses = [ipaddress.ip_address(one) for one in found]
        if not addresses:
            raise ToolExecutionError(f"the host {host[:100]!r} has no address")
        self.reach.check_addresses(host, addresses)
        return await self._get(target, addresses)

    async def _get(self, target: SplitResult, addresses: Sequence[IPAddress]) -> WebPage | str:
        httpx = _httpx()
        async with httpx.AsyncClient(
            verify=self.tls or _trust(), trust_env=False, timeout=self.timeout, headers=_HEADERS
        ) as client:
            failure: Exception | None = None
            for address in addresses:
                try:
                    return await self._request(client, target, address)
                except httpx.ConnectError as error:
                    failure = error
                except httpx.HTTPError as error:
                    failure = error
                    break
                except httpx.InvalidURL as error:
                    raise ToolArgumentsError(f"the address is not valid: {error}") from None
        raise ToolExecutionError(
            f"{target.geturl()[:200]} cannot be fetched: {_reason(failure)}", retryable=True
        ) from None

    async def _request(
        self, client: "httpx.AsyncClient", target: SplitResult, address: IPAddress
    ) -> WebPage | str:
        # The address in the URL, the name in Host, in SNI and in the check of the certificate.
        async with client.stream(
            "GET",
            pinned(target, address),
            headers={"Host": target.netloc},
            extensions={"sni_hostname": str(target.hostname)},
        ) as response:
            location = response.headers.get("location")
            if response.status_code in _REDIRECTS and location:
                return urljoin(target.geturl(), str(location))
            content_type = _text_type(response)
            _check_plain(response.headers.get("content-encoding", ""))
            body = await self._body(response)
            return WebPage(
                status=response.status_code,
                url=target.geturl(),
                content_type=content_type,
                text=await decoded(body, charset_of(str(response.headers.get("content-type", "")))),
            )

    async def _body(self, response: "httpx.Response") -> bytes:
        body = bytearray()
        async for chunk in response.aiter_raw(16_384):
            body += chunk
            if len(body) > self.max_body:
                raise ToolExecutionError(
                    f"the response is larger than the limit of {self.max_body} bytes"
                )
        return bytes(body)


def _httpx() -> Any:
    try:
        import httpx  # noqa: PLC0415 - clients do not have it
    except ImportError:
        raise ToolExecutionError(
            "http_get needs httpx, which a worker has; install stepfleet[worker]"
        ) from None
    return httpx


@functools.cache
def _trust() -> ssl.SSLContext:
    # Reading the certificates takes some 20 ms: once per process.
    context: ssl.SSLContext = _httpx().create_ssl_context(trust_env=False)
    return context


def _text_type(response: "httpx.Response") -> str:
    kind = str(response.headers.get("content-type", "")).partition(";")[0].strip().lower()
    if kind.startswith("text/") or kind.endswith(("+json", "+xml")) or kind in _TEXT_TYPES:
        return kind
    raise ToolExecutionError(
        f"the response (status {response.status_code}) is of type {kind[:100] or 'unknown'}; only "
        "text, JSON, XML, YAML and the like can be read"
    )


def _check_plain(encoding: str) -> None:
    if encoding.strip().lower() not in ("", "identity"):
        raise ToolExecutionError(
            f"the response is compressed ({encoding[:50]}), although the request excludes that"
        )


def _reason(error: Exception | None) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def http_get_from(
    hosts: Iterable[str] | None = None,
    *,
    allow_private: bool = False,
    name: str = "http_get",
    timeout: float = TIMEOUT,
    max_body: int = MAX_BODY,
    tls: ssl.SSLContext | None = None,
) -> Tool[..., Any]:
    """Return an `http_get` tool that reaches `hosts` only (None: every public host).

    Hosts are names, `*.name` for all names below one, or addresses. With `allow_private` they
    may be private addresses. `timeout` is in seconds, `max_body` in bytes, `tls` the trust in
    servers' certificates. Raises `ConfigurationError` that names the wrong host.
    """
    if isinstance(hosts, str):
        raise ConfigurationError(f"hosts must be a list; write hosts=[{hosts!r}]")
    reach = Reach(None if hosts is None else tuple(hosts), allow_private)
    fetcher = Fetcher(reach, max_body, timeout, tls)

    @tool(name=name, read_only=True, timeout=timeout + 5)
    async def get(
        url: str, max_characters: Annotated[int, Field(ge=1, le=MAX_CHARACTERS)] = 20_000
    ) -> dict[str, Any]:
        """Fetch a web page or another text by HTTP GET, and return its status and text.

        Args:
            url: An http or https address.
            max_characters: How much of the text to return; `truncated` says whether there is
                more.
        """
        page = await fetcher.fetch(url)
        return {
            "status": page.status,
            "url": page.url,
            "content_type": page.content_type,
            "text": page.text[:max_characters],
            "truncated": len(page.text) > max_characters,
        }

    return get


http_get = http_get_from()
