"""The client's side of HTTP/1.1: an answer is the same however it is cut, and what is none is told."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eet_lab.serving.body_framing import MOST_HEAD, BadHttp
from eet_lab.serving.load.http1 import Answer


class Noted:
    def __init__(self):
        self.status, self.headers, self.body = 0, {}, b""

    def headed(self, status, headers):
        self.status, self.headers = status, dict(headers)

    def got(self, data):
        self.body += data

    def completed(self):
        raise AssertionError("the connection's to call")

    def lost(self, reason, was_silent):
        raise AssertionError("the connection's to call")


def chunked(*pieces: bytes) -> bytes:
    body = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces if piece)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\nx-trailer: 1\r\n\r\n"


def counted(body: bytes) -> bytes:
    return b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body


@given(st.lists(st.binary(max_size=40), max_size=5), st.lists(st.integers(0, 400), max_size=99), st.booleans())
def test_an_answer_is_the_same_however_it_is_cut(pieces, cuts, is_chunked):
    raw = chunked(*pieces) if is_chunked else counted(b"".join(pieces))
    noted = Noted()
    answer = Answer(noted)
    places = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    for begin, end in pairwise(places):
        assert not answer.is_complete
        answer.feed(raw[begin:end])
    assert answer.is_complete and answer.keeps_alive
    assert noted.status == 200 and noted.body == b"".join(pieces)


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 %b\r\n\r\n" % (b"2" * 5000),
        b"HTTP/1.1 200 OK\r\ncontent-length: %b\r\n\r\n" % (b"2" * 5000),
        b"x" * (MOST_HEAD + 1),
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-2\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1" * (MOST_HEAD + 1),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabcd",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nab",
    ],
)
def test_what_is_no_answer_is_told(raw):
    with pytest.raises(BadHttp):
        Answer(Noted()).feed(raw)


@pytest.mark.parametrize(
    ("head", "keeps_alive"),
    [
        (b"HTTP/1.1 204 None\r\n", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\nconnection: keep-alive\r\n", True),
    ],
)
def test_empty_answers_and_what_becomes_of_their_connection(head, keeps_alive):
    answer = Answer(Noted())
    answer.feed(head + b"\r\n")
    assert answer.is_complete and answer.keeps_alive is keeps_alive


def test_a_body_may_end_with_its_connection():
    noted = Noted()
    answer = Answer(noted)
    answer.feed(b"HTTP/1.1 200 OK\r\n\r\nab")
    assert not answer.is_complete
    assert answer.closed() and noted.body == b"ab" and not answer.keeps_alive
    cut = Answer(Noted())
    cut.feed(counted(b"abc")[:-1])
    assert not cut.closed()
