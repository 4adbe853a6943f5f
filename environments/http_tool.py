"""The tool with which the policy fetches web pages, from an allow-list.

Invariant: a request goes only to an address that was checked, for a URL that the list allows, after a redirect too, and
carries nothing of this process: no cookies, credentials, proxies or environment. What comes back is bounded in time and
size, before and after it is unpacked.
"""

from __future__ import annotations

import asyncio
import codecs
import ipaddress
import re
import socket
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from environments.tools import Limits, Tool, ToolError, run_blocking

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class HttpSettings(Limits):
    section: ClassVar[str] = "http"
    allow: tuple[str, ...] = ()
    """URLs that may be fetched, with all whose path begins so: `https://example.com/wiki/`. `*.` before a host stands
    for every host below it. Without a port, the scheme's own."""
    networks: tuple[str, ...] = ()
    """Networks, such as 10.1.0.0/16, that names may lead to though they are not public. An address that stands in
    `allow` needs none."""
    post: bool = False
    """Whether requests may carry a body. Episodes are repeated after a crash, so the servers must bear repetition."""
    max_kb: int = 512
    """Most KiB of a response, unpacked; the rest is not read."""
    redirects: int = 3
    """Most redirects that one call follows."""
    content_types: tuple[str, ...] = ("text/", "application/json", "application/xml", "application/xhtml+xml")
    """How the types of responses that are shown begin."""
    slots: int = 16
    """Requests at once in one worker process; the others wait."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(bool(self.allow), "allow", "list at least one URL")
        self.require(self.max_kb >= 1, "max_kb", "be at least 1")
        self.require(0 <= self.redirects <= 20, "redirects", "lie between 0 and 20")
        self.require(1 <= self.slots <= 1024, "slots", "lie between 1 and 1024")
        for entry in self.allow:
            Allowed.parse(entry)
        for entry in self.networks:
            try:
                ipaddress.ip_network(entry)
            except ValueError as error:
                raise ValueError(
                    f"http.networks must list networks like 10.1.0.0/16, found {entry!r}: {error}"
                ) from error


@dataclass(frozen=True, slots=True)
class Allowed:
    """One entry of the list."""

    scheme: str
    host: str
    """In lower case; begins with "." where any host below it is meant."""
    port: int
    path: str

    @classmethod
    def parse(cls, entry: str) -> Allowed:
        """Raises ValueError."""
        below = re.sub(r"^(https?://)\*\.", r"\1", entry)
        try:
            url = URL(below)
            fits = url.scheme in ("http", "https") and url.host and not (url.user or url.password or url.query_string)
            port = url.port
        except ValueError:
            fits = port = None
        if not fits or port is None:
            raise ValueError(f"http.allow must list URLs like https://example.com/wiki/, found {entry!r}")
        return cls(url.scheme, ("." if below != entry else "") + _host(url), port, url.raw_path)

    def covers(self, url: URL) -> bool:
        host = _host(url)
        below = self.host.startswith(".") and not _is_address(host) and host.endswith(self.host)
        fits = below or host == self.host
        if not fits or url.scheme != self.scheme or url.port != self.port:
            return False
        path = url.raw_path
        inside = path.startswith(self.path if self.path.endswith("/") else f"{self.path}/")
        # Servers differ in what they make of these, so they are no part of a path below a folder.
        crooked = re.search(r"%2f|%5c|\\|(^|/)(\.|%2e){1,2}(/|;|$)|//", path, re.IGNORECASE)
        return self.path == "/" or path == self.path or (inside and not crooked)


def _is_address(host: str) -> bool:
    return ":" in host or re.fullmatch(r"[\d.]+", host) is not None


def _host(url: URL) -> str:
    return (url.raw_host or "").lower().rstrip(".")


class HttpTool:
    """Makes the tool. No connection, cookie or answer is kept between two calls."""

    def __init__(self, settings: HttpSettings) -> None:
        self.settings = settings
        self._allowed = tuple(map(Allowed.parse, settings.allow))
        self._networks = tuple(map(ipaddress.ip_network, settings.networks))
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    def tool(self) -> Tool:
        """For any number of episodes."""
        return self.described()

    def described(self) -> Tool:
        """The tool as the policy is shown it; nothing has to be started."""
        settings = self.settings
        body = {"body": {"type": "string", "description": "sent by POST, as JSON"}} if settings.post else {}

        async def http(url: str, body: str | None = None) -> str:
            async with self._place():
                return await self._fetch(url, body)

        tool = Tool(
            name="http",
            description="Fetches a URL. It may begin with " + ", ".join(settings.allow) + ".",
            parameters={
                "type": "object",
                "properties": {"url": {"type": "string"}, **body},
                "required": ["url"],
            },
            function=http,
        )
        return tool.limited(settings)

    def _place(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:
            self._places = (loop, asyncio.Semaphore(self.settings.slots))
        return self._places[1]

    async def _fetch(self, address: str, body: str | None) -> str:
        """Raises ToolError, and what aiohttp does."""
        url = self._checked(address)
        connector = aiohttp.TCPConnector(
            resolver=_CheckedResolver(self._networks), use_dns_cache=False, force_close=True, limit=1
        )
        headers = {"User-Agent": "headrace", "Accept-Encoding": "gzip"}
        async with aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            auto_decompress=False,
            trust_env=False,
            timeout=aiohttp.ClientTimeout(total=self.settings.timeout_s + 1.0),
        ) as session:
            for _ in range(self.settings.redirects + 1):
                method: Literal["GET", "POST"] = "GET" if body is None else "POST"
                more = {} if body is None else {"Content-Type": "application/json"}
                data = None if body is None else body.encode("utf-8", "replace")
                async with session.request(method, url, data=data, headers=more, allow_redirects=False) as response:
                    target = response.headers.get("Location")
                    if response.status not in (301, 302, 303, 307, 308) or target is None or body is not None:
                        return await self._shown(response)
                try:
                    url = self._checked(str(url.join(URL(target))))
                except ValueError as error:
                    raise ToolError(f"a redirect leads to {target[:200]!r}: {error}") from error
        raise ToolError(f"more than {self.settings.redirects} redirects")

    def _checked(self, address: str) -> URL:
        """The URL as it will be asked for. Raises ToolError if the list does not allow it."""
        try:
            url = URL(address).with_fragment(None)
            allowed = not (url.user or url.password) and any(one.covers(url) for one in self._allowed)
        except (ValueError, TypeError) as error:
            raise ToolError(f"{address[:200]!r} is no URL") from error
        if not allowed:
            raise ToolError(f"{address[:200]!r} is not allowed; a URL may begin with {', '.join(self.settings.allow)}")
        return url

    async def _shown(self, response: aiohttp.ClientResponse) -> str:
        kind = response.content_type.lower()
        head = f"{response.status} {kind}"
        if not kind.startswith(tuple(self.settings.content_types)):
            return f"{head}\n(content of this type is not shown)"
        data, more = await self._body(response)
        encoding = response.charset or "utf-8"
        try:
            slow = codecs.lookup(encoding).name in ("idna", "punycode")  # no charsets of pages; they take n² time
            text = data.decode("utf-8" if slow else encoding, "replace")
        except (LookupError, UnicodeError):  # the second is what the charset "undefined" raises for any text
            text = data.decode("utf-8", "replace")
        room = max(0, self.settings.output_chars - len(head) - len(_MORE) - 1)
        return f"{head}\n{text}" if not more and len(text) <= room else f"{head}\n{text[:room]}{_MORE}"

    async def _body(self, response: aiohttp.ClientResponse) -> tuple[bytes, bool]:
        """The unpacked body as far as it is wanted, and whether there was more."""
        limit = self.settings.max_kb << 10
        coding = response.headers.get("Content-Encoding", "identity").lower()
        if coding not in ("identity", "gzip"):
            raise ToolError(f"the answer is packed as {coding[:50]!r}, which is not supported")
        unpack = zlib.decompressobj(31) if coding == "gzip" else None
        data = bytearray()
        async for piece in response.content.iter_chunked(1 << 14):
            data += piece if unpack is None else unpack.decompress(piece, limit + 1 - len(data))
            if len(data) > limit:
                return bytes(data[:limit]), True
            if unpack is not None and unpack.eof:  # a server may go on for ever
                break
        return bytes(data), unpack is not None and bool(data) and not unpack.eof


_MORE = "\n(only its beginning)"


class _CheckedResolver(AbstractResolver):
    """Names become addresses once, each of which is checked; the connection is made to those.

    aiohttp does not ask it about hosts that are addresses: those stand in the allow-list as they are.
    """

    def __init__(self, networks: Sequence[_Network]) -> None:
        self._networks = networks

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        try:
            found = await run_blocking(lambda: socket.getaddrinfo(host, port, family, socket.SOCK_STREAM))
        except UnicodeError as error:  # a part of it is empty or too long
            raise ToolError(f"{host[:200]!r} is no name of a host") from error
        numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        allowed = [
            ResolveResult(hostname=host, host=str(address[0]), port=port, family=kind, proto=protocol, flags=numeric)
            for kind, _, protocol, _, address in found
            if public(str(address[0]), self._networks)
        ]
        if not allowed:
            raise ToolError(f"{host} leads to an address that is not public")
        return allowed

    async def close(self) -> None:
        """Nothing is kept."""


_CARRYING_IPV4 = [ipaddress.ip_network(one) for one in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")]
"""NAT64, 6to4 and Teredo: behind such an address may be any IPv4 address."""


def public(address: str, networks: Sequence[_Network] = ()) -> bool:
    """Whether an address is on the public internet or in one of `networks`."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped:
        found = found.ipv4_mapped
    if any(found in network for network in networks):
        return True
    return found.is_global and not found.is_multicast and not any(found in one for one in _CARRYING_IPV4)
