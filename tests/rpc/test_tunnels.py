"""Proxies and TLS: plain requests go through a proxy whole, https goes through a tunnel and is verified inside it."""

from __future__ import annotations

import base64
import datetime
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from twisted.internet import reactor as _reactor
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.ssl import Certificate, PrivateCertificate, trustRootFromCertificates
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.trial.unittest import SynchronousTestCase, TestCase
from twisted.web.client import BrowserLikePolicyForHTTPS

from rpc.http_client import HttpClient
from rpc.http_errors import FetchError
from rpc.tunnels import ProxyAddress
from tests.rpc import hostile
from tests.rpc.hostile import HostileServer, LittleProxy, MemoryNetwork, redirect, serve

BODY = b"through and through\n" * 1000
reactor: Any = _reactor


def certificate(host: str) -> PrivateCertificate:
    """A certificate for ``host`` that it signed itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + made.public_bytes(serialization.Encoding.PEM)
    loaded: PrivateCertificate = PrivateCertificate.loadPEM(pem)
    return loaded


MIRROR = certificate("mirror.test")
TRUSTING = BrowserLikePolicyForHTTPS(trustRootFromCertificates([Certificate.loadPEM(MIRROR.dumpPEM())]))


class MemoryTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.network = MemoryNetwork()
        self.server = HostileServer(self.network)
        self.network.put(self.server, "mirror.test")
        self.serve_tls(MIRROR)
        self.proxy = LittleProxy(self.network)
        self.network.put(self.proxy, "proxy.test", 3128)

    def serve_tls(self, own: PrivateCertificate) -> None:
        factory: Any = TLSMemoryBIOFactory(own.options(), False, self.server, self.network)
        self.network.put(factory, "mirror.test", 443)

    def reading(self, url: str, *, proxy: str = "", limit: int = 100_000) -> Deferred[bytes]:
        client = HttpClient(self.network, proxy=proxy, tls_policy=TRUSTING)
        reading = Deferred.fromCoroutine(client.read(url, limit=limit))
        self.network.spin()
        return reading

    def assert_fails(self, reading: Deferred[bytes], *texts: str) -> None:
        problem: Any = self.failureResultOf(reading, FetchError).value
        for text in texts:
            self.assertIn(text, problem.reason)

    def connections(self) -> list[tuple[str, int]]:
        return [(host, port) for host, port, *_ in self.network.tcpClients]


class TlsTests(MemoryTestCase):
    def test_https_is_read(self) -> None:
        self.server.script("/x", serve(BODY))
        self.assertEqual(self.successResultOf(self.reading("https://mirror.test/x")), BODY)

    def test_a_certificate_of_another_host_is_refused(self) -> None:
        other = certificate("other.test")
        self.serve_tls(other)
        policy = BrowserLikePolicyForHTTPS(trustRootFromCertificates([Certificate.loadPEM(other.dumpPEM())]))
        client = HttpClient(self.network, tls_policy=policy)
        reading = Deferred.fromCoroutine(client.read("https://mirror.test/x", limit=9))
        self.network.spin()
        self.assert_fails(reading, "TLS failed: the server's certificate is for another host")

    def test_an_untrusted_certificate_is_refused(self) -> None:
        other = certificate("mirror.test")
        self.serve_tls(other)
        self.assert_fails(self.reading("https://mirror.test/x"), "TLS failed: certificate verify failed")

    def test_http_where_tls_was_expected_is_told(self) -> None:
        self.network.put(self.server, "mirror.test", 443)
        reading = self.reading("https://mirror.test/x")
        self.network.pass_time(41)
        self.assert_fails(reading, "did not answer within 40 seconds")

    def test_a_redirect_from_https_to_http_is_refused(self) -> None:
        self.server.script("/x", redirect("http://mirror.test/y"))
        self.assert_fails(self.reading("https://mirror.test/x"), "from https to http://mirror.test/y")

    def test_a_redirect_from_http_to_https_is_followed(self) -> None:
        self.server.script("/x", redirect("https://mirror.test/y"))
        self.server.script("/y", serve(BODY))
        self.assertEqual(self.successResultOf(self.reading("http://mirror.test/x")), BODY)


class ProxyTests(MemoryTestCase):
    def test_http_is_asked_of_the_proxy_with_the_whole_url(self) -> None:
        self.server.script("/x", serve(BODY))
        self.assertEqual(
            self.successResultOf(self.reading("http://mirror.test/x", proxy="http://proxy.test:3128")), BODY
        )
        self.assertEqual([seen.target for seen in self.proxy.requests], ["http://mirror.test/x"])
        self.assertEqual(self.server.requests[0].headers["host"], "mirror.test")
        self.assertEqual(self.connections()[0], ("proxy.test", 3128))

    def test_https_goes_through_a_tunnel(self) -> None:
        self.server.script("/x", serve(BODY))
        reading = self.reading("https://mirror.test/x", proxy="http://proxy.test:3128")
        self.assertEqual(self.successResultOf(reading), BODY)
        self.assertEqual(
            [(seen.method, seen.target, seen.headers["host"]) for seen in self.proxy.requests],
            [("CONNECT", "mirror.test:443", "mirror.test:443")],
        )
        self.assertEqual(self.connections()[0], ("proxy.test", 3128))

    def test_the_server_is_verified_inside_the_tunnel(self) -> None:
        other = certificate("mirror.test")
        self.serve_tls(other)
        reading = self.reading("https://mirror.test/x", proxy="http://proxy.test:3128")
        self.assert_fails(reading, "certificate verify failed")

    def test_the_proxy_gets_user_and_password_and_the_server_does_not(self) -> None:
        self.server.script("/x", serve(BODY))
        for scheme in ("http", "https"):
            self.successResultOf(self.reading(f"{scheme}://mirror.test/x", proxy="http://me:p%40ss@proxy.test"))
        value = "Basic " + base64.b64encode(b"me:p@ss").decode()
        self.assertEqual([seen.headers["proxy-authorization"] for seen in self.proxy.requests], [value] * 2)
        self.assertNotIn("proxy-authorization", {**self.server.requests[1].headers})

    def answered(self, answer: bytes) -> Deferred[bytes]:
        self.proxy.answer = answer
        return self.reading("https://mirror.test/x", proxy="http://proxy.test:3128")

    def test_a_refused_tunnel_is_told(self) -> None:
        reading = self.answered(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
        self.assert_fails(reading, "the proxy refused a tunnel to mirror.test:443: 407 Proxy Authentication Required")

    def test_a_proxy_that_cannot_reach_the_server_is_told(self) -> None:
        reading = self.reading("https://elsewhere.test/x", proxy="http://proxy.test:3128")
        self.assert_fails(reading, "refused a tunnel to elsewhere.test:443: 502 Bad Gateway")

    def test_a_proxy_that_is_none_is_told(self) -> None:
        self.assert_fails(self.answered(b"SSH-2.0-x\r\n\r\n"), "the proxy answered b'SSH-2.0-x', which is not HTTP")

    def test_a_proxy_whose_answer_has_no_end_is_cut_off(self) -> None:
        self.assert_fails(self.answered(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 5000), "has no end in 16384 bytes")

    def test_a_proxy_that_is_silent_is_given_up(self) -> None:
        reading = self.answered(b"")
        self.network.pass_time(11)
        self.assert_fails(reading, "the proxy did not answer within 10 seconds")
        self.assertEqual(self.network.getDelayedCalls(), [])

    def test_waiting_for_a_tunnel_can_be_cancelled(self) -> None:
        reading = self.answered(b"")
        reading.cancel()
        self.failureResultOf(reading, CancelledError)
        self.network.spin()
        self.assertEqual(self.network.getDelayedCalls(), [])

    def test_a_proxy_that_is_not_there_is_told(self) -> None:
        for scheme in ("http", "https"):
            reading = self.reading(f"{scheme}://mirror.test/x", proxy="http://nobody.test:1")
            self.network.pass_time(1, step=0.3)
            self.assert_fails(reading, "no connection: Connection was refused")

    def test_the_end_of_the_server_ends_the_tunnel(self) -> None:
        self.server.script("/x", hostile.cut(BODY, 100))
        reading = self.reading("https://mirror.test/x", proxy="http://proxy.test:3128")
        self.assert_fails(reading, f"ended after 100 of {len(BODY)} bytes")

    def test_what_is_no_proxy_url_is_refused_without_telling_the_password(self) -> None:
        for url in ("https://h:1", "proxy:3128", "http://", "http://me:secret@h:port", "http://me:secret@h/path"):
            with self.assertRaises(ValueError) as caught:
                HttpClient(self.network, proxy=url)
            self.assertNotIn("secret", str(caught.exception))

    def test_the_port_is_3128_if_none_is_given(self) -> None:
        self.assertEqual(ProxyAddress.parse("http://proxy.test"), ProxyAddress("proxy.test", 3128, b""))


class SocketTests(TestCase):
    """The same over loopback sockets."""

    def setUp(self) -> None:
        own = certificate("localhost")
        self.policy = BrowserLikePolicyForHTTPS(trustRootFromCertificates([Certificate.loadPEM(own.dumpPEM())]))
        self.server = HostileServer().listen()
        self.proxy = LittleProxy()
        self.port = reactor.listenTCP(0, self.proxy, interface="127.0.0.1")
        self.tls = reactor.listenSSL(0, self.server, own.options(), interface="127.0.0.1")

        self.addCleanup(lambda: Deferred.fromCoroutine(self.close()))

    async def close(self) -> None:
        await self.client.close()
        await self.port.stopListening()
        await self.tls.stopListening()
        await self.server.stop()

    async def read(self, url: str, limit: int = 10_000_000) -> bytes:
        proxy = f"http://127.0.0.1:{self.port.getHost().port}"
        self.client = HttpClient(reactor, proxy=proxy, tls_policy=self.policy)
        return await self.client.read(url, limit=limit)

    async def test_http_goes_through_a_proxy(self) -> None:
        self.assertEqual(await self.read(self.server.script("/x", serve(BODY * 50))), BODY * 50)
        self.assertEqual([seen.method for seen in self.proxy.requests], ["GET"])

    async def test_https_goes_through_a_tunnel(self) -> None:
        self.server.script("/x", serve(BODY * 50))
        self.assertEqual(await self.read(f"https://localhost:{self.tls.getHost().port}/x"), BODY * 50)
        self.assertEqual([seen.method for seen in self.proxy.requests], ["CONNECT"])

    async def test_a_server_that_goes_on_for_ever_is_left_at_once(self) -> None:
        self.server.script("/x", hostile.endless)
        for scheme, port in (("http", self.server.port), ("https", self.tls.getHost().port)):
            with self.assertRaises(FetchError) as caught:
                await self.read(f"{scheme}://localhost:{port}/x")
            self.assertIn("more than the 10000000 bytes", caught.exception.reason)
            await self.server.all_gone()
