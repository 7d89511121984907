"""One request, over a real connection to a server that behaves as badly as it can: an answer, or why there is none."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from email.utils import formatdate

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

import node.client
from node.client import Answer, Client, File, NoAnswer, encode_form
from node.credentials import Credentials
from region.api.forms import FileValue, parse_body
from tests.examples import examples
from tests.node.hostile import reset

SECONDS = 0.3
Serve = Callable[[socket.socket], object]


def read_request(peer: socket.socket) -> bytes:
    """All of a request whose Content-Length is right."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += peer.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
    while len(body) < length:
        body += peer.recv(65536)
    return head + b"\r\n\r\n" + body


def answering(data: bytes) -> Serve:
    def serve(peer: socket.socket) -> None:
        read_request(peer)
        peer.sendall(data)

    return serve


class ClientTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.said: list[str] = []
        self.now = 1_000_000.0

    def request(self, *serving: Serve, body: bytes = b"", url: str = "", scheme: str = "http") -> Answer:
        """One request to a server that serves its connections so, one after the other."""
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()

            def serve() -> None:
                for each in serving:
                    peer, _ = server.accept()
                    with peer:
                        try:
                            each(peer)
                        except OSError:
                            return  # the client hung up

            thread = threading.Thread(target=serve, daemon=True)
            thread.start()
            url = url or f"{scheme}://127.0.0.1:{server.getsockname()[1]}/MAAS/metadata/"
            self.client = client = Client(
                Credentials(url, "ck", "tk", "t&s"), 2.0, SECONDS, 3 * SECONDS, lambda: self.now, self.said.append
            )
            try:
                return client.request("POST" if body else "GET", "2012-03-01/", body, "text/x")
            finally:
                if serving:
                    thread.join(10)

    def why(self, *serving: Serve, body: bytes = b"", url: str = "", scheme: str = "http") -> str:
        return str(self.assertRaises(NoAnswer, self.request, *serving, body=body, url=url, scheme=scheme))

    def test_an_answer_with_its_headers_in_lower_case(self) -> None:
        answer = self.request(answering(b"HTTP/1.1 409 Oh no\r\nRetry-After: 3\r\nContent-Length: 2\r\n\r\nhi"))
        self.assertEqual(answer, Answer(409, "Oh no", {"retry-after": "3", "content-length": "2"}, b"hi"))

    def test_it_says_who_it_is(self) -> None:
        seen: list[bytes] = []

        def serve(peer: socket.socket) -> None:
            seen.append(read_request(peer))
            peer.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

        self.request(serve, body=b"data")
        self.assertTrue(seen[0].startswith(b"POST /MAAS/metadata/2012-03-01/ HTTP/1.1\r\n"), seen)
        for part in (b'oauth_signature="%26t%26s"', b'oauth_timestamp="1000000"', b"Content-Type: text/x"):
            self.assertIn(part, seen[0])
        self.assertTrue(seen[0].endswith(b"\r\n\r\ndata"))

    def test_an_answer_that_never_ends_is_none(self) -> None:
        self.patch(node.client, "LARGEST_ANSWER", 200_000)

        def serve(peer: socket.socket) -> None:
            read_request(peer)
            peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                peer.sendall(bytes(50_000))

        self.assertEqual(self.why(serve), "the answer has more than 200000 bytes")
        long = bytes(range(256)) * 700
        answer = self.request(answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(long) + long))
        self.assertEqual(answer.body, long)

    def test_what_is_no_answer_says_why(self) -> None:
        self.assertIn("reset by peer", self.why(lambda peer: read_request(peer) and reset(peer)))
        self.assertIn("closed before an answer came", self.why(read_request))
        self.assertIn("no HTTP answer: 'SSH-2.0", self.why(answering(b"SSH-2.0-OpenSSH\r\n\r\n")))
        self.assertIn("cut off", self.why(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi")))
        chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhi"
        self.assertIn("cut off", self.why(answering(chunked)))
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{nobody.getsockname()[1]}/"
            self.assertIn("Connection refused", self.why(url=url))
        self.assertIn("gaierror", self.why(url="http://no-such-host.invalid/"))

    def test_a_server_that_says_nothing_or_byte_by_byte_does_not_hold_it(self) -> None:
        self.assertIn("timed out", self.why(lambda peer: (read_request(peer), peer.recv(1))))

        def trickle(peer: socket.socket) -> None:
            read_request(peer)
            for byte in b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1000:
                peer.sendall(bytes([byte]))
                threading.Event().wait(SECONDS / 5)

        self.assertIn("no whole answer within", self.why(trickle))

    def test_names_that_are_not_looked_up_and_handshakes_that_do_not_end_do_not_hold_it(self) -> None:
        let_go, ended = threading.Event(), threading.Event()
        self.addCleanup(let_go.set)

        def look_up(*arguments: object, **more: object) -> list[object]:
            let_go.wait(60)
            ended.set()
            return []

        def shake(peer: socket.socket) -> None:
            peer.recv(65536)
            peer.sendall(b"\x16\x03\x03\x40\x00")
            for _ in range(400):
                peer.sendall(b"\x02")
                threading.Event().wait(SECONDS / 5)
            ended.set()

        self.assertIn("no whole answer", self.why(shake, scheme="https"))
        self.patch(socket, "getaddrinfo", look_up)
        self.assertIn("no whole answer within", self.why(url="http://region.invalid/"))
        self.assertFalse(ended.is_set())

    def test_an_answer_to_what_is_told_is_short(self) -> None:
        self.patch(node.client, "LARGEST_REPLY", 1000)
        self.assertIn("more than 1000 bytes", self.why(answering(b"HTTP/1.1 200 OK\r\n\r\n" + bytes(2000)), body=b"x"))

    def test_what_would_take_all_memory_or_time_is_no_answer(self) -> None:
        for head, words in (
            (b"".join(b"X-%d: y\r\n" % number for number in range(200)), "more than 100 headers"),
            (b"X: " + b"x" * 10_000_000, "more than 65536 bytes"),
            (b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 30 + b"\r\nx", "cut off"),
            (b"Transfer-Encoding: chunked\r\n\r\n-5\r\nx", ""),
            (b"Content-Length: " + b"9" * 4000 + b"\r\n\r\nx", "cut off"),
        ):
            self.assertIn(words, self.why(answering(b"HTTP/1.1 200 OK\r\n" + head)), head[:40])

    def test_a_body_that_is_refused_before_it_was_read_has_its_answer_read(self) -> None:
        def refuse(peer: socket.socket) -> None:
            peer.recv(100)
            peer.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(65536):
                continue

        self.assertEqual(self.request(refuse, body=bytes(4_000_000)).status, 413)

    def test_no_redirect_and_no_proxy_is_followed(self) -> None:
        self.patch(os, "environ", {**os.environ, "http_proxy": "http://127.0.0.1:1/", "no_proxy": ""})
        answer = self.request(answering(b"HTTP/1.1 302 Found\r\nLocation: http://other/\r\nContent-Length: 0\r\n\r\n"))
        self.assertEqual(answer.status, 302)

    def test_a_clock_that_is_wrong_is_learned_from_a_refusal_and_the_request_sent_once_more(self) -> None:
        date = formatdate(self.now + 7200, usegmt=True)
        refusal = answering(f"HTTP/1.1 401 No\r\nDate: {date}\r\nContent-Length: 0\r\n\r\n".encode())
        seen: list[bytes] = []

        def serve(peer: socket.socket) -> None:
            seen.append(read_request(peer))
            peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        self.assertEqual(self.request(refusal, serve).status, 200)
        self.assertIn(b'oauth_timestamp="1007200"', seen[0])
        self.assertIn("its clock is 7200 s ahead", self.said[0])

    def test_what_was_refused_while_another_request_learned_the_time_is_sent_once_more_too(self) -> None:
        date = formatdate(self.now + 7200, usegmt=True)
        head = f"HTTP/1.1 401 No\r\nDate: {date}\r\nContent-Length: 0\r\n\r\n".encode()

        def refuse(peer: socket.socket) -> None:
            read_request(peer)
            # As if the heartbeat had been refused a moment before.
            self.client.learn_clock(Answer(401, "No", {"date": date}, b""), self.now)
            peer.sendall(head)

        self.assertEqual(self.request(refuse, answering(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")).status, 200)

    def test_a_clock_that_is_set_while_a_request_is_on_its_way_is_none_that_is_right(self) -> None:
        date = formatdate(self.now, usegmt=True)
        head = f"HTTP/1.1 401 No\r\nDate: {date}\r\nContent-Length: 0\r\n\r\n".encode()
        right = self.now
        self.now += 7200

        def refuse(peer: socket.socket) -> None:
            read_request(peer)
            self.now = right
            peer.sendall(head)

        self.assertEqual(self.request(refuse, answering(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")).status, 200)

    def test_a_refusal_with_the_right_time_is_a_refusal(self) -> None:
        for date in (formatdate(self.now, usegmt=True), "yesterday", ""):
            head = f"HTTP/1.1 401 No\r\nDate: {date}\r\nContent-Length: 0\r\n\r\n"
            self.assertEqual(self.request(answering(head.encode())).status, 401)
        self.assertEqual(self.said, [])


class FormTests(SynchronousTestCase):
    @examples(40)
    @given(
        st.fixed_dictionaries({"op": st.text(max_size=20)}, optional={"error": st.text(max_size=20)}),
        # Names as scripts may have them; the region takes no others.
        st.dictionaries(st.text("ABCxyz019._-", min_size=1, max_size=9), st.binary(max_size=40)),
    )  # fmt: skip
    def test_the_region_reads_what_it_says(self, fields: dict[str, str], files: dict[str, bytes]) -> None:
        files = {name: content for name, content in files.items() if name not in fields}
        body, content_type = encode_form(fields.items(), (File(name, content) for name, content in files.items()))
        read = parse_body(content_type, body)
        found = {name: values[0].data if isinstance(values[0], FileValue) else values[0].encode("utf-8", "replace")
                 for name, values in read.items()}  # fmt: skip
        self.assertEqual({name: value for name, value in found.items() if name in files}, files)
        for name, value in fields.items():
            self.assertEqual(found[name].decode("utf-8", "replace"), value.encode("utf-8", "backslashreplace").decode())
