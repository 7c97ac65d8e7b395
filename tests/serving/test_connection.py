"""HTTP/1.1 without a socket: requests are the same however they are cut, and each is answered in its turn."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st
from uvicorn import Config
from uvicorn.server import ServerState

from eet_lab.serving.body_framing import MOST_HEAD
from eet_lab.serving.connection import Connection
from eet_lab.serving.exchange import head_of
from eet_lab.serving.options import Options

OPTIONS = Options(header_s=1, body_s=10, request_s=100)


class Wire(asyncio.Transport):
    """What a client would read. `unread` are the bytes that it leaves in the server's buffer."""

    def __init__(self):
        super().__init__()
        self.sent, self.reads, self.unread = b"", True, 0
        self.has_eof = self.is_closed = self.is_aborted = False

    def write(self, data):
        assert not self.has_eof and not self.is_closed
        self.sent += data

    def write_eof(self):
        self.has_eof = True

    def close(self):
        self.is_closed = True

    def abort(self):
        self.is_closed = self.is_aborted = True

    def is_closing(self):
        return self.is_closed

    def get_write_buffer_size(self):
        return self.unread

    def pause_reading(self):
        self.reads = False

    def resume_reading(self):
        self.reads = True

    @property
    def is_ended(self):
        return self.has_eof or self.is_closed


async def echo(scope, receive, send):
    """What came, as it was understood; `/stream` in two pieces, without telling how many bytes there will be."""
    body = b""
    if scope["path"] != "/early":
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
    assert (b"host", b"a") in scope["headers"]
    told = f"{scope['method']} {scope['path']} {scope['query_string'].decode()} ".encode() + body
    headers = [] if scope["path"] == "/stream" else [(b"content-length", b"%d" % len(told))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": told[:3], "more_body": True})
    await send({"type": "http.response.body", "body": told[3:]})


class Clock:
    """A loop whose time passes as it is told."""

    def __init__(self):
        self.now, self.timers = 0.0, list[asyncio.TimerHandle]()
        self.create_task = asyncio.get_running_loop().create_task

    def call_later(self, seconds, then):
        self.timers.append(asyncio.TimerHandle(self.now + seconds, then, (), asyncio.get_running_loop()))
        return self.timers[-1]

    def wait(self, seconds):
        end = self.now + seconds
        while due := [each for each in self.timers if each.when() <= end and not each.cancelled()]:
            first = min(due, key=asyncio.TimerHandle.when)
            self.timers.remove(first)
            self.now = first.when()
            first._run()
        self.now = end


def connect(app=echo, clock=None):
    """A connection, what its client reads, and the refusals that are counted."""
    config, refused = Config(app, lifespan="off", log_config=None), Counter[int]()
    config.load()
    connection, wire = Connection(config, ServerState(), {}, clock, options=OPTIONS, refused=refused), Wire()
    connection.connection_made(wire)
    return connection, wire, refused


async def turns(number=20):
    for _ in range(number):
        await asyncio.sleep(0)


async def talk(pieces, app=echo):
    """A connection to which these were sent, and what it answered."""
    connection, wire, refused = connect(app)
    for piece in pieces:
        if not wire.is_closed:
            connection.data_received(piece)
        await asyncio.sleep(0)
    await turns()
    connection.connection_lost(None)
    return wire, refused


def answers(sent, *methods):
    """Status, headers and body of all answers, as h11 reads them."""
    client, found = h11.Connection(h11.CLIENT), []
    client.receive_data(sent)
    for method in methods:
        client.send(h11.Request(method=method, target="/", headers=[("host", "a")]))
        client.send(h11.EndOfMessage())
        event = client.next_event()
        assert isinstance(event, h11.Response), event
        headers, body = dict(event.headers), b""
        while isinstance(event := client.next_event(), h11.Data):
            body += event.data
        assert isinstance(event, h11.EndOfMessage)
        found.append((headers, body))
        if client.our_state is h11.DONE and client.their_state is h11.DONE:
            client.start_next_cycle()
    assert not client.trailing_data[0]
    return found


def request(method, target, body, is_chunked, more=b""):
    head = f"{method} {target} HTTP/1.1\r\nHost: a \t\r\n".encode() + more
    if not is_chunked:
        return head + (b"content-length: %d \r\n" % len(body) if body else b"") + b"\r\n" + body
    chunks = b"".join(b"%X;a=b\r\n%c\r\n" % (1, byte) for byte in body)
    return head + b"Transfer-Encoding:Chunked \r\n\r\n" + chunks + b"0\r\nx-trailer: 1\r\ny: 2\r\n\r\n"


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(["GET", "POST", "OPTIONS", "HEAD"]),
        st.sampled_from(["/", "/stream", "/a%20b?c=d%20e", "http://a/b?c"]),
        st.binary(max_size=8) | st.just(b"\r\n\r\nGET / HTTP/1.1\r\n\r\n"),
        st.booleans(),
        st.sampled_from([b"", OFFER]),
    ),
    min_size=1,
    max_size=4,
)
PATHS = {"/": "/ ", "/stream": "/stream ", "/a%20b?c=d%20e": "/a b c=d%20e", "http://a/b?c": "/b c"}


@given(REQUESTS, st.lists(st.integers(0, 900), max_size=60), st.sampled_from([b"", b"\r\n"]))
def test_requests_are_the_same_however_they_are_cut(requests, cuts, between):
    """Also many at once, behind one another, with empty lines between them as old clients send."""
    raw = b"".join(request(*each) + between for each in requests)
    places = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    wire, refused = asyncio.run(talk([raw[begin:end] for begin, end in pairwise(places)]))
    found = answers(wire.sent, *(method for method, *_ in requests))
    for (method, target, body, *_), (_, told) in zip(requests, found, strict=True):
        assert told == (b"" if method == "HEAD" else f"{method} {PATHS[target]} ".encode() + body)
    assert not refused and not wire.is_ended


@pytest.mark.parametrize("target", ["/", "/stream"])
@pytest.mark.parametrize("more", [b"", b"connection: keep-alive\r\n"])
def test_a_client_of_http_1_0_gets_no_chunks(target, more):
    """A proxy such as nginx asks so, unless it is told otherwise; where no length is told, the end is the end."""
    wire, _ = asyncio.run(talk([f"GET {target} HTTP/1.0\r\nhost: a\r\n".encode() + more + b"\r\n"]))
    head, _, body = wire.sent.partition(b"\r\n\r\n")
    assert body == f"GET {target}  ".encode() and wire.is_ended
    assert b"transfer-encoding" not in head and b"connection: close" in head


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: +5\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999999999999\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST / RTSP/1.1\r\nhost: a\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nhost: a\r\nhost: a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\n folded: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost : a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\x00\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nhost: a\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nhost: a\n\n", 400),
        (b"\x16\x03\x01\x02", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * MOST_HEAD, 431),
        *((b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" + chunk, 400) for chunk in (
            b"0x1\r\na\r\n0\r\n\r\n", b"-1\r\n", b"+1\r\na\r\n", b"1_0\r\n", b" 1\r\na", b"\r\n", b"1\na\r\n",
            b"1;\na\r\n", b"1\r\nab\r\n", b"f" * 16 + b"\r\n", b"0" * (MOST_HEAD + 2),
            b"0\r\n" + b"x: y\r\n" * (MOST_HEAD // 6 + 1) + b"\r\n", b"1;" + b"a" * MOST_HEAD + b"\r\nb\r\n0\r\n\r\n",
            b"0\r\nGET / HTTP/1.1\r\nhost: b\r\n\r\n", b"0\r\nx: y\n\nGET / HTTP/1.1\r\nhost: b\r\n\r\n",
            b"1;\x00\r\na\r\n",
        )),
    ],
)  # fmt: skip
def test_what_two_servers_could_read_in_two_ways_is_refused(raw, status):
    wire, refused = asyncio.run(talk([raw, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"]))
    assert wire.sent.startswith(b"HTTP/1.1 %d " % status) and b"HTTP/1.1 200" not in wire.sent
    assert wire.is_ended and refused == {status: 1}


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("more", [b"", b"content-length: 0\r\n", b"content-length: 2\r\n"])
@pytest.mark.parametrize("asked", [b"close", b"keep-alive, Close"])
def test_a_client_may_ask_for_the_end_of_its_connection(method, more, asked):
    raw = b"%s / HTTP/1.1\r\nhost: a\r\nconnection: %s\r\n%s\r\n" % (method.encode(), asked, more)
    wire, _ = asyncio.run(talk([raw + b"ab" * (b"2" in more) + b"\r\n", request("GET", "/", b"", False)]))
    assert wire.is_closed and wire.sent.count(b"HTTP/1.1 200 ") == 1 and b"\r\nconnection: close\r\n" in wire.sent


def test_a_client_that_asks_whether_to_send_is_told_to_go_on():
    head = b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-Continue\r\ncontent-length: 2\r\n\r\n"
    wire, _ = asyncio.run(talk([head, b"", b"", b"ab"]))
    assert wire.sent.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n") and wire.sent.endswith(b"/  ab")
    wire, _ = asyncio.run(talk([head + b"ab"]))
    assert wire.sent.startswith(b"HTTP/1.1 200 "), "it has sent already"
    wire, _ = asyncio.run(talk([head.replace(b"/ ", b"/early ")]))
    assert b"connection: close" in wire.sent and wire.is_ended, "it need not send any more"


def test_a_body_that_nobody_reads_waits_in_the_clients_socket():
    async def hang(scope, receive, send):
        await asyncio.sleep(60)

    async def run():
        head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 900000\r\n\r\n"
        connection_and_wire = await talk([head, b"a" * 60_000, b"a" * 60_000], hang)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        return connection_and_wire

    wire, _ = asyncio.run(run())
    assert not wire.reads and not wire.sent


GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
UNREAD = {
    "idle for long": GET,
    "the last answer": GET.replace(b"1.1", b"1.0"),
    "before a body that does not come": b"POST /early HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n",
    "in front of what is no HTTP": GET + b"\x16\r\n\r\n",
    "an answer to what is no HTTP": b"\x16\r\n\r\n",
    "its client sends no more": None,
}


@pytest.mark.parametrize("raw", UNREAD.values(), ids=UNREAD)
@pytest.mark.parametrize("reads", [False, True])
def test_answers_that_a_client_leaves_unread_end_with_the_connection(raw, reads):
    """Unless the client reads slowly: something, each time that the server looks."""

    async def run():
        clock = Clock()
        connection, wire, _ = connect(clock=clock)
        wire.unread = 100
        connection.data_received(raw or GET)
        await turns()
        if raw is None:
            connection.eof_received()
        for _ in range(20):
            wire.unread -= reads
            clock.wait(4)
        assert wire.is_aborted is not reads and wire.is_ended
        wire.unread = 0
        clock.wait(20)
        assert wire.is_aborted
        connection.connection_lost(None)

    asyncio.run(run())


@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_reads_nothing_holds_no_answer_up(reads):
    """An answer that waits for its client holds a place in the queue."""

    async def run():
        clock = Clock()
        connection, wire, _ = connect(clock=clock)
        connection.pause_writing()
        connection.data_received(GET)
        await turns()
        assert not wire.sent
        clock.wait(99)
        if reads:
            connection.resume_writing()
            await turns()
        clock.wait(2)
        assert wire.is_aborted is not reads and bool(wire.sent) is reads
        connection.connection_lost(None)

    asyncio.run(run())


def test_what_the_end_of_a_server_leaves_of_its_connections():
    """An answer is complete first, and its request has come whole: what comes to a closed connection resets it."""
    body = b"POST /early HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n"

    async def run():
        states = {}
        for name, raw in {"idle": b"", "answering": GET, "behind": body, "refused": b"\x16"}.items():
            connection, wire, _ = connect()
            connection.data_received(raw)
            await turns(0 if name == "answering" else 20)
            connection.shutdown()
            states[name] = wire.has_eof, wire.is_closed
            await turns()
            states[name] += (wire.is_closed, b"200" in wire.sent)
            connection.connection_lost(None)
        return states

    found = asyncio.run(run())
    assert found["idle"] == (False, True, True, False)
    assert found["answering"] == (False, False, True, True)
    assert found["behind"] == (True, False, False, True)
    assert found["refused"] == (True, False, False, False)


@pytest.mark.parametrize(
    "order", [["body"], ["start", "start"], ["start", "last", "body"], ["start", "last", "start"]], ids=str
)
def test_an_answer_in_another_order_reaches_no_other_request(order):
    messages = {
        "start": {"type": "http.response.start", "status": 200, "headers": iter([(b"Content-Length", b"2")])},
        "body": {"type": "http.response.body", "body": b"ab", "more_body": True},
        "last": {"type": "http.response.body", "body": b"ab"},
    }
    raised = []

    async def wrong(scope, receive, send):
        try:
            for each in order:
                await send(dict(messages[each]))
        except RuntimeError as error:
            raised.append(str(error))

    wire, _ = asyncio.run(talk([GET], wrong))
    assert len(raised) == 1 and wire.sent.count(b"HTTP/1.1 ") <= 1 and wire.is_aborted is ("last" not in order)


@pytest.mark.parametrize("body", [b"ab", b"abcd"])
def test_an_answer_of_another_length_than_it_says_ends_the_connection(body):
    async def lying(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
        await send({"type": "http.response.body", "body": body})

    wire, _ = asyncio.run(talk([b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"], lying))
    assert wire.is_ended and not wire.sent.endswith(body)


def test_a_header_that_would_be_two_is_none():
    with pytest.raises(ValueError, match="end of a line"):
        head_of(200, [(b"x-request-id", b"a\r\nset-cookie: b")])


def test_a_status_without_a_phrase():
    assert head_of(499, []).startswith(b"HTTP/1.1 499 ")
