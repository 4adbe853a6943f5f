"""The HTTP tool against a real server on loopback that does what it should not."""

import asyncio
import contextlib
import gzip
import socket
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from yarl import URL

from environments.http_tool import Allowed, HttpSettings, HttpTool, public


class Handler(BaseHTTPRequestHandler):
    asked: ClassVar = Counter()
    headers_seen: ClassVar = []

    def do_GET(self):
        path = self.path.partition("?")[0]
        Handler.asked[path] += 1
        Handler.headers_seen.append(dict(self.headers))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the tool has what it wanted
            self.answer(path)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send(b"got " + body)

    def send(self, body, kind="text/plain; charset=utf-8", status=200, **headers):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def answer(self, path):
        port = self.server.server_address[1]
        match path:
            case "/ok/":
                self.send("héllo".encode(), Set_Cookie="a=b")
            case "/ok/to-private":
                self.send(b"", status=302, Location=f"http://127.0.0.1:{port}/private/secret")
            case "/ok/to-port":
                self.send(b"", status=302, Location="http://127.0.0.1:1/")
            case "/ok/to-file":
                self.send(b"", status=302, Location="file:///etc/passwd")
            case "/ok/to-metadata":
                self.send(b"", status=302, Location="http://169.254.169.254/latest")
            case "/ok/around":
                self.send(b"", status=302, Location="/ok/around")
            case "/ok/once":
                self.send(b"", status=307, Location="../ok/")
            case "/ok/big":
                self.send(b"x" * (8 << 20))
            case "/ok/bomb":
                self.send(gzip.compress(bytes(64 << 20)), Content_Encoding="gzip")
            case "/ok/broken":
                self.send(b"no gzip", Content_Encoding="gzip")
            case "/ok/punycode":
                self.send(b"page" * (1 << 17) + b"-" + b"a" * (1 << 17), kind="text/plain; charset=punycode")
            case "/ok/undefined":
                self.send("héllo".encode(), kind="text/plain; charset=undefined")
            case "/ok/half":
                self.send(gzip.compress(b"page" * 100 + bytes(range(256)))[:-40], Content_Encoding="gzip")
            case "/ok/tail":
                self.send_response(200)
                self.send_header("Content-Type", "text/plain")
                self.send_header("Content-Encoding", "gzip")
                self.end_headers()
                self.wfile.write(gzip.compress(b"page"))
                while True:
                    self.wfile.write(b"tail" * 1000)
            case "/ok/brotli":
                self.send(b"...", Content_Encoding="br")
            case "/ok/image":
                self.send(b"...", kind="image/png")
            case "/ok/header":
                self.send(b"", X="h" * (1 << 20))
            case "/ok/headers":
                self.wfile.write(b"HTTP/1.1 200 OK\r\n")
                for _ in range(200_000):
                    self.wfile.write(b"X: yyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n")
            case "/ok/drip":
                self.send_response(200)
                self.send_header("Content-Type", "text/plain")
                self.end_headers()
                for _ in range(50):
                    self.wfile.write(b"x")
                    time.sleep(0.1)
            case "/ok/nonsense":
                self.wfile.write(b"\x00\x01\x02 nonsense\r\n\r\n")
            case _:
                self.send(b"secret")

    def log_message(self, *_):
        """Quiet."""


@pytest.fixture(scope="module")
def port():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def fetch(settings, *urls, **more):
    tool = HttpTool(settings).tool()

    async def main():
        return [await tool.run({"url": url, **more}) for url in urls]

    results = asyncio.run(main())
    return results[0] if len(urls) == 1 else results


def allowing(port, **more):
    return HttpSettings(allow=(f"http://127.0.0.1:{port}/ok/",), timeout_s=5.0, **more)


def test_it_fetches_and_keeps_nothing(port, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    base = f"http://127.0.0.1:{port}"
    Handler.headers_seen.clear()
    first, second = fetch(allowing(port), f"{base}/ok/", f"{base}/ok/once?q=1#part")
    assert first.text == second.text == "200 text/plain\nhéllo"
    assert first.counts == {"tool_calls": 1}
    for headers in Handler.headers_seen:
        assert set(headers) == {"Host", "User-Agent", "Accept-Encoding", "Accept", "Connection"}


@pytest.mark.parametrize(
    "path",
    [
        "/private/secret",
        "/ok/../private/secret",
        "/ok/%2e%2e/private/secret",
        "/ok/..%2fprivate",
        "/ok//x",
        "/ok/..;/x",
    ],
)
def test_a_path_beside_the_allowed_one_is_not_asked_for(port, path):
    Handler.asked.clear()
    result = fetch(allowing(port), f"http://127.0.0.1:{port}{path}")
    assert "is not allowed; a URL may begin with" in result.text
    assert result.counts["refused_calls"] == 1
    assert not Handler.asked


@pytest.mark.parametrize("where", ["to-private", "to-port", "to-file", "to-metadata"])
def test_a_redirect_is_checked_like_any_url(port, where):
    Handler.asked.clear()
    result = fetch(allowing(port), f"http://127.0.0.1:{port}/ok/{where}")
    assert result.text.startswith("error: a redirect leads to")
    assert sum(Handler.asked.values()) == 1


def test_redirects_end(port):
    Handler.asked.clear()
    assert "more than 3 redirects" in fetch(allowing(port), f"http://127.0.0.1:{port}/ok/around").text
    assert Handler.asked["/ok/around"] == 4


@pytest.mark.parametrize(
    "url",
    [
        "http://user:pass@127.0.0.1:{port}/ok/",
        "http://localhost:{port}/ok/",
        "http://2130706433:{port}/ok/",
        "http://127.1:{port}/ok/",
        "http://[::ffff:127.0.0.1]:{port}/ok/",
        "https://127.0.0.1:{port}/ok/",
        "http://127.0.0.1/ok/",
        "http://127.0.0.1:{port}@evil.example/ok/",
        "http://127.0.0.1:{port}\\@evil.example/ok/",
        "ftp://127.0.0.1:{port}/ok/",
        "file:///etc/passwd",
        "//127.0.0.1/ok/",
        "http://[::1",
        "",
    ],
)
def test_what_is_not_on_the_list_is_refused(port, url):
    Handler.asked.clear()
    result = fetch(allowing(port), url.format(port=port))
    assert result.counts.get("refused_calls") == 1, result
    assert not Handler.asked


def test_a_name_that_leads_to_this_machine_is_refused_unless_its_network_is_listed(port, monkeypatch):
    """Whatever a name server says, and however often it changes its mind: the name is asked for once."""
    asked, real = [], socket.getaddrinfo

    def rebinding(host, *rest):
        if host != "rebind.example":
            return real(host, *rest)
        asked.append(host)
        return real("127.0.0.1", *rest)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    url, listed = f"http://rebind.example:{port}/ok/", (f"http://*.example:{port}/ok/",)
    result = fetch(HttpSettings(allow=listed), url)
    assert result.text == "error: rebind.example leads to an address that is not public"
    assert fetch(HttpSettings(allow=listed, networks=("127.0.0.0/8",)), url).text.endswith("héllo")
    assert len(asked) == 2
    nameless = fetch(HttpSettings(allow=listed), f"http://..example:{port}/")
    assert nameless.counts == {"tool_calls": 1, "refused_calls": 1}
    localhost = HttpSettings(allow=(f"http://localhost:{port}/",))
    assert "is not public" in fetch(localhost, f"http://localhost:{port}/ok/").text


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "0.0.0.0",
        "10.1.2.3",
        "169.254.169.254",
        "100.64.0.1",
        "224.0.0.1",
        "::1",
        "fe80::1%eth0",
        "fd00:ec2::254",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
    ],
)
def test_addresses_that_are_not_public(address):
    assert not public(address)
    assert public("8.8.8.8")
    assert public("2606:4700::1111")


def test_answers_are_bounded(port):
    base = f"http://127.0.0.1:{port}/ok/"
    settings = allowing(port, max_kb=64, output_chars=1000)
    big, bomb = fetch(settings, f"{base}big", f"{base}bomb")
    for result in (big, bomb):
        assert result.text.startswith("200 text/plain\n")
        assert result.text.endswith("\n(only its beginning)")
        assert len(result.text) == 1000
        assert result.counts == {"tool_calls": 1}
    assert fetch(settings, f"{base}image").text == "200 image/png\n(content of this type is not shown)"
    began = time.monotonic()
    assert fetch(allowing(port, max_kb=1024), f"{base}punycode").text.startswith("200 text/plain\npagepage")
    assert time.monotonic() - began < 3
    assert "packed as 'br'" in fetch(settings, f"{base}brotli").text
    assert fetch(settings, f"{base}tail").text == "200 text/plain\npage"
    half = fetch(settings, f"{base}half").text
    assert half.startswith("200 text/plain\npagepage")
    assert half.endswith("\n(only its beginning)")
    assert fetch(settings, f"{base}undefined").text == "200 text/plain\nhéllo"


@pytest.mark.parametrize("path", ["broken", "header", "headers", "nonsense"])
def test_an_answer_that_is_none_is_the_tools_error_and_the_next_call_works(port, path):
    base = f"http://127.0.0.1:{port}/ok/"
    bad, good = fetch(allowing(port), base + path, base)
    assert bad.counts == {"tool_calls": 1, "tool_errors": 1}
    assert len(bad.text) < 5000
    assert good.text.endswith("héllo")


def test_a_server_that_drips_is_left_in_time(port):
    base = f"http://127.0.0.1:{port}/ok/"
    began = time.monotonic()
    slow, good = fetch(HttpSettings(allow=(base,), timeout_s=0.3), f"{base}drip", base)
    assert time.monotonic() - began < 4
    assert slow.counts == {"tool_calls": 1, "tool_errors": 1, "tool_timeouts": 1}
    assert good.text.endswith("héllo")


def test_a_body_only_where_it_is_allowed(port):
    url = f"http://127.0.0.1:{port}/ok/"
    assert fetch(allowing(port), url, body="{}").counts == {"malformed_calls": 1}
    assert fetch(allowing(port, post=True), url, body='{"a": 1}').text.endswith('got {"a": 1}')


def test_the_list():
    below = Allowed.parse("https://*.example.com/wiki")
    for url in ("https://en.example.com/wiki", "https://EN.example.com/wiki/x?y", "https://en.example.com./wiki/x"):
        assert below.covers(URL(url))
    for url in (
        "https://example.com/wiki",
        "https://enexample.com/wiki",
        "https://en.example.com/wikis",
        "https://en.example.com.evil.org/wiki",
        "http://en.example.com/wiki",
        "https://en.example.com:8443/wiki",
    ):
        assert not below.covers(URL(url))
    assert not Allowed("http", ".0.0.1", 80, "/").covers(URL("http://127.0.0.1/"))
    for wrong in ("example.com", "ftp://example.com", "https://a:b@example.com/", "https:///x", "https://x:y/"):
        with pytest.raises(ValueError, match=r"http\.allow must list URLs"):
            HttpSettings(allow=(wrong,))
