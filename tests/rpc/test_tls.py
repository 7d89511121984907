"""Identity with real TLS on loopback: who gets in, who does not, and what each end is told."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID
from OpenSSL import SSL
from twisted.internet import reactor as real_reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.endpoints import TCP4ClientEndpoint, wrapClientTLS
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator
from twisted.internet.protocol import Factory, Protocol
from twisted.trial.unittest import TestCase
from zope.interface import implementer

from rpc import certificates
from rpc.certificates import (
    Credentials,
    create_authority,
    fingerprint,
    issue_rack,
    issue_region,
    load_certificate,
    load_credentials,
    make_request,
    new_key,
)
from rpc.commands import Enroll, EnrolmentRefused, ListImages, Ping, Register
from rpc.endpoints import connect_link, enrol, listen_tls, region_endpoint
from rpc.identity import TLS, JoinToken, client_tls, enrolling_tls, prove, proves, server_tls
from rpc.protocol import Life, Link, LinkLost, NotAllowed, Responders, link_factory
from rpc.testing import RecordingReporter

NOW = datetime.now(UTC)
AUTHORITY = create_authority(NOW)
OTHER_AUTHORITY = create_authority(NOW)
REGION = issue_region(AUTHORITY, NOW)

reactor: Any = real_reactor


def rack_credentials(authority=AUTHORITY, system_id="abc234", now=NOW) -> Credentials:
    key = new_key()
    return Credentials(key, issue_rack(authority, make_request(key), system_id, now))


RACK = rack_credentials()


@implementer(IOpenSSLClientConnectionCreator)
class AnyClient:
    """A client that verifies nothing, as an attacker's would, with whatever context."""

    def __init__(
        self, maximum: int | None = None, credentials: Credentials | None = None, mode: int = SSL.VERIFY_PEER
    ) -> None:
        self.context = SSL.Context(SSL.TLS_METHOD)
        self.context.set_verify(mode, lambda *found: True)
        if maximum is not None:
            self.context.set_max_proto_version(maximum)
        if credentials is not None:
            key, certificate = load_credentials(credentials)
            self.context.use_certificate(certificate)
            self.context.use_privatekey(key)

    def clientConnectionForTLS(self, tlsProtocol: object) -> SSL.Connection:
        return SSL.Connection(self.context, None)


class TlsTestCase(TestCase):
    """A region that listens, and links to it; all of it is gone at the end of the test."""

    timeout = 20

    def listen(self, table=(), tls=None) -> None:
        self.region_links: list[Link] = []
        self.reports = RecordingReporter()
        responders = Responders("region", dict(table))

        def make() -> Link:
            link = Link(responders, clock=reactor, reporter=self.reports)
            self.region_links.append(link)
            return link

        listening = listen_tls(
            reactor, 0, "127.0.0.1", tls or server_tls(REGION, AUTHORITY.certificate), link_factory(make)
        )
        self.port = listening.getHost().port  # type: ignore[attr-defined]  # it is a TCP port
        self.addCleanup(listening.stopListening)

    async def connect(self, tls, table=(), role="rack") -> Link:
        endpoint = (
            region_endpoint(reactor, "127.0.0.1", self.port, tls)
            if isinstance(tls, TLS)
            else wrapClientTLS(tls, TCP4ClientEndpoint(reactor, "127.0.0.1", self.port))
        )
        made: list[Link] = []

        def make() -> Link:
            made.append(Link(Responders(role, dict(table)), clock=reactor, reporter=RecordingReporter()))
            return made[0]

        try:
            link = await connect_link(endpoint, link_factory(make))
        finally:
            self.addCleanup(self.gone, *made)
        return link

    def gone(self, *links) -> Deferred[Any] | None:
        """Fires when these links and the region's have ended."""
        waiting: list[Deferred[None]] = []
        for link in (*links, *self.region_links):
            ended: Deferred[None] = Deferred()
            link.on_lost(lambda link, reason, ended=ended: ended.callback(None))
            link.abort("the test is over")
            waiting.append(ended)
        return gatherResults(waiting)

    async def refused(self, tls) -> str:
        """Why a link with ``tls`` comes to nothing. In TLS 1.3 a client learns it with its first call."""
        try:
            link = await self.connect(tls)
            await link.call(Ping)
        except LinkLost as error:
            return error.reason
        raise self.failureException("the link is up")

    async def region_reason(self) -> str:
        """Why the region's end of the last link ended."""
        ended: Deferred[str] = Deferred()
        self.region_links[-1].on_lost(lambda link, reason: ended.callback(reason))
        return await ended


class LinkTests(TlsTestCase):
    async def test_both_ends_know_each_other(self) -> None:
        async def list_images(link, known_digest):
            return {"state": "ready", "generation": 1, "digest": "", "inventory": b"x" * 1_000_000}

        self.listen()
        link = await self.connect(client_tls(RACK, AUTHORITY.certificate), {ListImages: list_images})
        await link.call(Ping)
        region = self.region_links[0]
        self.assertEqual((link.peer.role, link.peer.id), ("region", ""))
        self.assertEqual(link.peer.certificate, fingerprint(REGION.certificate))
        self.assertEqual((region.peer.role, region.peer.id), ("rack", "abc234"))
        self.assertEqual(region.peer.certificate, fingerprint(RACK.certificate))
        answer = await region.call(ListImages, known_digest="")
        self.assertEqual(len(answer["inventory"]), 1_000_000)

    async def test_both_ends_have_the_same_binding_and_no_other_channel_has_it(self) -> None:
        self.listen()
        tls = client_tls(RACK, AUTHORITY.certificate)
        one, two = await self.connect(tls), await self.connect(tls)
        await one.call(Ping)
        await two.call(Ping)
        bindings = [link.channel_binding() for link in (one, two, *self.region_links)]
        self.assertEqual(bindings[:2], bindings[2:])
        self.assertNotEqual(bindings[0], bindings[1])
        self.assertEqual(len(bindings[0]), 32)

    async def test_a_rack_of_another_authority_is_refused(self) -> None:
        self.listen()
        reason = await self.refused(client_tls(rack_credentials(OTHER_AUTHORITY), AUTHORITY.certificate))
        self.assertIn("the other end does not know our certificate's authority", reason)
        self.assertIn("another region's authority", await self.region_reason())

    async def test_a_region_of_another_authority_is_refused(self) -> None:
        self.listen()
        reason = await self.refused(client_tls(RACK, OTHER_AUTHORITY.certificate))
        self.assertEqual(
            reason, "the link is lost: the peer's certificate is refused: it is signed by another region's authority"
        )

    async def test_an_expired_rack_is_refused_and_told_so(self) -> None:
        self.listen()
        expired = rack_credentials(now=NOW - timedelta(days=731))
        reason = await self.refused(client_tls(expired, AUTHORITY.certificate))
        self.assertIn("the other end finds our certificate expired", reason)
        self.assertIn("it has expired", await self.region_reason())

    async def test_a_rack_that_poses_as_a_region_is_refused(self) -> None:
        self.listen(tls=server_tls(RACK, AUTHORITY.certificate))
        reason = await self.refused(client_tls(rack_credentials(), AUTHORITY.certificate))
        self.assertIn("the peer's certificate is refused: it is not meant for this end of a link", reason)

    async def test_a_server_that_is_certified_as_one_but_is_no_region_is_refused(self) -> None:
        key, _ = load_credentials(REGION)
        for uri, problem in (
            ("urn:stanchion:rack:abc234", "it is for a rack, not for a region"),
            ("urn:example:other", "the certificate is for urn:example:other, not for a region or a rack"),
        ):
            certificate = certificates._issue(
                AUTHORITY, key.public_key(), NOW, "server", uri, ExtendedKeyUsageOID.SERVER_AUTH
            )
            self.listen(tls=server_tls(Credentials(REGION.key, certificate), AUTHORITY.certificate))
            reason = await self.refused(client_tls(RACK, AUTHORITY.certificate))
            self.assertIn(f"the peer's certificate is refused: {problem}", reason)

    async def test_a_certificate_that_was_not_verified_names_nobody(self) -> None:
        self.listen()
        reason = await self.refused(AnyClient(credentials=RACK, mode=SSL.VERIFY_NONE))
        self.assertEqual(reason, "the link is lost: the peer's certificate was not verified")

    async def test_a_region_that_poses_as_a_rack_is_refused(self) -> None:
        self.listen()
        await self.refused(client_tls(REGION, AUTHORITY.certificate))
        self.assertIn("it is not meant for this end of a link", await self.region_reason())

    async def test_tls_1_2_is_refused(self) -> None:
        self.listen()
        reason = await self.refused(AnyClient(SSL.TLS1_2_VERSION, RACK))
        self.assertIn("the other end does not speak TLS 1.3", reason)

    async def test_a_region_that_speaks_only_tls_1_2_is_refused(self) -> None:
        old = server_tls(REGION, AUTHORITY.certificate)
        old._context.set_min_proto_version(SSL.TLS1_2_VERSION)
        old._context.set_max_proto_version(SSL.TLS1_2_VERSION)
        self.listen(tls=old)
        self.assertIn("TLS 1.3", await self.refused(client_tls(RACK, AUTHORITY.certificate)))

    async def test_a_peer_that_speaks_no_tls_is_refused_and_never_becomes_a_link(self) -> None:
        self.listen()
        lost: Deferred[None] = Deferred()

        class Plain(Protocol):
            def connectionMade(self) -> None:
                self.transport.write(b"GET / HTTP/1.1\r\nHost: region\r\n\r\n")  # type: ignore[union-attr]  # there is one

            def connectionLost(self, reason: object = None) -> None:
                lost.callback(None)

        await TCP4ClientEndpoint(reactor, "127.0.0.1", self.port).connect(Factory.forProtocol(Plain))
        await lost
        self.assertIn("the other end speaks HTTP", await self.region_reason())
        self.assertIs(self.region_links[0].life, Life.LOST)


class StrangerTests(TlsTestCase):
    async def test_a_peer_without_a_certificate_may_call_nothing_but_enroll(self) -> None:
        async def serve(link, **arguments):
            return {"version": 1, "region": "", "stream_urls": []}

        self.listen({Register: serve})
        link = await self.connect(AnyClient(), role="anonymous")
        for call in (link.call(Ping), link.call(Register, versions=[1], name="", software="")):
            try:
                await call
            except NotAllowed as error:
                self.assertIn("anonymous", str(error))
            else:
                self.fail("it was answered")
        self.assertEqual(self.region_links[0].peer.role, "anonymous")
        self.assertEqual(self.reports.kinds, ["NotAllowed", "NotAllowed"])


class EnrolTests(TlsTestCase):
    def setUp(self) -> None:
        self.token = JoinToken.create(AUTHORITY.certificate)
        self.enrolled: list[str] = []

    async def enroll(self, link, token_id, proof, csr, name):
        if token_id != self.token.id or not proves(self.token.key, proof, link.channel_binding(), csr):
            raise EnrolmentRefused("the token is not valid")
        self.enrolled.append(name)
        return {
            "certificate": issue_rack(AUTHORITY, csr, "xyz789", NOW),
            "ca": AUTHORITY.certificate,
            "system_id": "xyz789",
        }

    async def test_a_rack_with_a_token_enrols_and_then_links(self) -> None:
        self.listen({Enroll: self.enroll})
        self.addCleanup(self.gone)
        enrolled = await enrol(reactor, "127.0.0.1", self.port, self.token, "rack-1")
        self.assertEqual((enrolled.system_id, self.enrolled), ("xyz789", ["rack-1"]))
        link = await self.connect(client_tls(enrolled.credentials, enrolled.ca))
        await link.call(Ping)
        self.assertEqual(self.region_links[1].peer.id, "xyz789")

    async def test_a_rack_with_the_wrong_secret_is_refused(self) -> None:
        self.listen({Enroll: self.enroll})
        self.addCleanup(self.gone)
        wrong = JoinToken(self.token.ca_sha256, self.token.id, b"x" * 20)
        error = await self.failing(enrol(reactor, "127.0.0.1", self.port, wrong, "rack-1"), EnrolmentRefused)
        self.assertEqual(str(error), "the token is not valid")
        self.assertEqual(self.enrolled, [])

    async def test_a_proof_that_was_overheard_is_of_no_use_on_another_channel(self) -> None:
        self.listen({Enroll: self.enroll})
        request = make_request(new_key())
        victim = await self.connect(enrolling_tls(self.token.ca_sha256), role="anonymous")
        proof = prove(self.token.key, victim.channel_binding(), request)
        attacker = await self.connect(AnyClient(), role="anonymous")
        arguments: dict[str, Any] = {"token_id": self.token.id, "proof": proof, "csr": request, "name": "rack-1"}
        await self.failing(attacker.call(Enroll, **arguments), EnrolmentRefused)
        other: dict[str, Any] = {**arguments, "csr": make_request(new_key())}
        await self.failing(victim.call(Enroll, **other), EnrolmentRefused)
        self.assertEqual(self.enrolled, [])
        await victim.call(Enroll, **arguments)
        self.assertEqual(self.enrolled, ["rack-1"])

    async def test_another_region_gets_no_proof(self) -> None:
        self.listen({Enroll: self.enroll}, server_tls(issue_region(OTHER_AUTHORITY, NOW), OTHER_AUTHORITY.certificate))
        self.addCleanup(self.gone)
        error = await self.failing(enrol(reactor, "127.0.0.1", self.port, self.token, "rack-1"), LinkLost)
        self.assertIn("its authority is not the one that the token names", str(error))
        self.assertEqual(self.enrolled, [])

    async def test_an_impostor_that_sends_the_right_authority_along_gets_no_proof(self) -> None:
        # The impostor has an authority of its own with the very name and key identifier of the right one, and sends
        # the right certificate after its own: only the signature is wrong.
        genuine = load_certificate(AUTHORITY.certificate)
        real_leaf = load_certificate(REGION.certificate)
        forger, _ = load_credentials(OTHER_AUTHORITY)
        key, _ = load_credentials(REGION)
        builder = (
            x509.CertificateBuilder()
            .subject_name(real_leaf.subject)
            .issuer_name(genuine.subject)
            .public_key(key.public_key())
            .serial_number(7)
            .not_valid_before(NOW - timedelta(hours=1))
            .not_valid_after(NOW + timedelta(days=1))
        )
        for extension in real_leaf.extensions:
            builder = builder.add_extension(extension.value, extension.critical)
        forged = builder.sign(forger, hashes.SHA256()).public_bytes(Encoding.PEM)
        self.listen({Enroll: self.enroll}, server_tls(Credentials(REGION.key, forged), AUTHORITY.certificate))
        self.addCleanup(self.gone)
        error = await self.failing(enrol(reactor, "127.0.0.1", self.port, self.token, "rack-1"), LinkLost)
        self.assertIn("its signature is wrong", str(error))
        self.assertEqual(self.enrolled, [])

    async def test_a_rack_of_the_same_authority_cannot_pose_as_its_region_to_one_that_enrols(self) -> None:
        self.listen({Enroll: self.enroll}, server_tls(RACK, AUTHORITY.certificate))
        self.addCleanup(self.gone)
        error = await self.failing(enrol(reactor, "127.0.0.1", self.port, self.token, "rack-1"), LinkLost)
        self.assertIn("the peer's certificate is refused", str(error))
        self.assertEqual(self.enrolled, [])

    async def failing(self, awaitable, kind) -> Any:
        try:
            await awaitable
        except kind as error:
            return error
        raise self.failureException(f"no {kind.__name__}")
