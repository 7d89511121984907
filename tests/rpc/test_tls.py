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
from twisted.internet.task import deferLater
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
    moment,
    new_key,
)
from rpc.commands import Enroll, EnrolmentRefused, ListImages, Ping, Register
from rpc.endpoints import Reconnecting, connect_link, enrol, listen_tls, region_endpoint
from rpc.identity import TLS, JoinToken, client_tls, enrolling_tls, prove, proves, server_tls
from rpc.protocol import Life, Link, LinkLost, NotAllowed, Responders, link_factory
from rpc.testing import RecordingReporter
from tests.logs import Logs

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
            waiting.append(self.ended(link))
            link.abort("the test is over")
        return gatherResults(waiting)

    def ended(self, link: Link) -> Deferred[None]:
        """Fires when ``link`` has ended."""
        ended: Deferred[None] = Deferred()
        link.on_lost(lambda link, reason: ended.callback(None))
        return ended

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
        async def list_images(link, known_digest, newest_digest):
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

    async def test_neither_end_keeps_what_it_writes_until_the_other_has_acknowledged_what_it_wrote_before(self) -> None:
        self.listen()
        link = await self.connect(client_tls(RACK, AUTHORITY.certificate))
        await link.call(Ping)
        ends: list[Any] = [end.transport for end in (link, *self.region_links)]
        self.assertEqual([bool(each.getTcpNoDelay()) for each in ends], [True, True])

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
        self.assertIn("the link is lost: the peer's certificate is refused: it is signed by another region's", reason)
        self.assertIn("stanchion rack join --again", reason)
        self.assertIn("does not know our certificate's authority: the rack joined another", await self.region_reason())

    async def test_an_expired_rack_is_refused_and_told_so(self) -> None:
        self.listen()
        expired = rack_credentials(now=NOW - timedelta(days=731))
        reason = await self.refused(client_tls(expired, AUTHORITY.certificate))
        self.assertIn("the other end finds our certificate expired", reason)
        told = await self.region_reason()
        self.assertIn("it has expired", told)
        for text in (reason, told):
            self.assertIn("compare the clocks of both machines", text)
            self.assertIn(moment(NOW - timedelta(days=1)), text)
            self.assertIn(f"the clock here says {NOW:%Y-%m-}", text)

    async def test_a_rack_whose_certificate_begins_later_is_refused_and_both_ends_say_both_times(self) -> None:
        self.listen()
        begins = NOW + timedelta(hours=5)
        reason = await self.refused(client_tls(rack_credentials(now=begins), AUTHORITY.certificate))
        told = await self.region_reason()
        self.assertIn("it is not valid yet", told)
        self.assertIn("the other end refuses our certificate", reason)
        for text in (reason, told):
            self.assertIn("compare the clocks of both machines", text)
            self.assertIn(moment(begins - certificates.BACKDATED), text)
            self.assertIn(f"the clock here says {NOW:%Y-%m-}", text)

    async def test_a_region_whose_certificate_begins_later_or_has_ended_is_refused_and_both_ends_say_so(self) -> None:
        for now, said, alert in (
            (NOW + timedelta(hours=5), "it is not valid yet", "refuses our certificate"),
            (NOW - timedelta(days=731), "it has expired", "finds our certificate expired"),
        ):
            self.listen(tls=server_tls(issue_region(AUTHORITY, now), AUTHORITY.certificate))
            reason = await self.refused(client_tls(RACK, AUTHORITY.certificate))
            self.assertIn(said, reason)
            told = await self.region_reason()
            self.assertIn(alert, told)
            for text in (reason, told):
                self.assertIn("compare the clocks of both machines", text)

    async def test_what_is_refused_for_its_certificate_is_told_from_what_broke_off(self) -> None:
        self.listen()
        distrusted = []
        for tls in (
            client_tls(rack_credentials(OTHER_AUTHORITY), AUTHORITY.certificate),
            client_tls(RACK, OTHER_AUTHORITY.certificate),
            client_tls(rack_credentials(now=NOW - timedelta(days=731)), AUTHORITY.certificate),
            client_tls(REGION, AUTHORITY.certificate),
            AnyClient(SSL.TLS1_2_VERSION, RACK),
        ):
            distrusted.append((await self.failing_link(tls)).distrusted)
        self.assertEqual(distrusted, [True, True, True, True, False])

    async def test_a_rack_that_is_refused_for_its_certificate_backs_off(self) -> None:
        self.listen()
        for tls in (
            client_tls(rack_credentials(OTHER_AUTHORITY), AUTHORITY.certificate),
            client_tls(RACK, OTHER_AUTHORITY.certificate),
            client_tls(rack_credentials(now=NOW - timedelta(days=731)), AUTHORITY.certificate),
            client_tls(rack_credentials(now=NOW + timedelta(hours=5)), AUTHORITY.certificate),
            client_tls(REGION, AUTHORITY.certificate),
        ):
            logs = Logs(self, "rpc.patience")
            waits: Deferred[int] = Deferred()

            def wait(attempt: int, waits: Deferred[int] = waits) -> float:
                waits.callback(attempt)
                return 3600.0

            def soon(attempt: int) -> float:
                raise self.failureException("it takes that for a failure that may soon be over")

            links: list[Link] = []

            def make(links: list[Link] = links) -> Link:
                links.append(Link(Responders("rack", {}), clock=reactor, reporter=RecordingReporter()))
                return links[-1]

            endpoint = region_endpoint(reactor, "127.0.0.1", self.port, tls)
            service = Reconnecting(
                endpoint, "region:5250", make, lambda link: link.call(Ping), clock=reactor, retry=soon, refused=wait
            )
            service.startService()
            self.assertEqual(await waits, 1)
            await deferLater(reactor, 0)  # the service is not to be stopped from within its own question
            await service.stopService()
            await gatherResults([self.ended(link) for link in (*links, *self.region_links)])
            self.region_links.clear()
            [said] = logs.texts
            self.assertIn("No link with the region at region:5250: the link is lost: ", said)
            self.assertIn("Until that is mended", said)

    async def failing_link(self, tls) -> LinkLost:
        try:
            link = await self.connect(tls)
            await link.call(Ping)
        except LinkLost as error:
            return error
        raise self.failureException("the link is up")

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
        reason = await self.refused(client_tls(REGION, AUTHORITY.certificate))
        self.assertIn("the other end refuses our certificate: it is not meant for this end", reason)
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


class ChangeTests(TlsTestCase):
    """One certificate, or authority, in place of another, while links are up."""

    def bundle(self, *authorities: Credentials) -> bytes:
        return b"".join(one.certificate for one in authorities)

    async def test_a_region_s_new_certificate_is_shown_to_new_connections_and_the_old_ones_go_on(self) -> None:
        tls = server_tls(REGION, AUTHORITY.certificate)
        self.listen(tls=tls)
        before = await self.connect(client_tls(RACK, AUTHORITY.certificate))
        await before.call(Ping)
        renewed = issue_region(AUTHORITY, NOW)
        tls.become(server_tls(renewed, AUTHORITY.certificate))
        after = await self.connect(client_tls(RACK, AUTHORITY.certificate))
        await after.call(Ping)
        await before.call(Ping)
        self.assertEqual(before.peer.certificate, fingerprint(REGION.certificate))
        self.assertEqual(after.peer.certificate, fingerprint(renewed.certificate))

    async def test_a_rack_s_new_certificate_is_shown_by_new_connections_and_the_old_ones_go_on(self) -> None:
        self.listen()
        tls = client_tls(RACK, AUTHORITY.certificate)
        before = await self.connect(tls)
        await before.call(Ping)
        renewed = rack_credentials()
        tls.become(client_tls(renewed, AUTHORITY.certificate))
        after = await self.connect(tls)
        await after.call(Ping)
        await before.call(Ping)
        self.assertEqual(
            [link.peer.certificate for link in self.region_links],
            [fingerprint(RACK.certificate), fingerprint(renewed.certificate)],
        )

    async def test_while_an_authority_is_changed_racks_of_both_get_in_and_afterwards_only_those_of_the_new_one(
        self,
    ) -> None:
        old, new = AUTHORITY, OTHER_AUTHORITY
        tls = server_tls(REGION, self.bundle(old, new))
        self.listen(tls=tls)
        by_old = client_tls(RACK, old.certificate)
        by_new = client_tls(rack_credentials(new), self.bundle(old, new))
        for each in (by_old, by_new):
            await (await self.connect(each)).call(Ping)
        tls.become(server_tls(issue_region(new, NOW), new.certificate))
        await (await self.connect(by_new)).call(Ping)
        # The rack that was away for the whole change knows the old authority only, and is told what to do.
        reason = await self.refused(by_old)
        self.assertIn("or by one that is not this region's any more: join the rack again", reason)
        self.assertIn("away while the region changed its authority", await self.region_reason())

    async def test_a_token_from_before_the_change_is_good_until_it_ends(self) -> None:
        async def enroll(link, token_id, proof, csr, name):
            return {
                "certificate": issue_rack(OTHER_AUTHORITY, csr, "xyz789", NOW),
                "ca": self.bundle(AUTHORITY, OTHER_AUTHORITY),
                "system_id": "xyz789",
            }

        tls = server_tls(REGION, self.bundle(AUTHORITY, OTHER_AUTHORITY))
        self.listen({Enroll: enroll}, tls)
        self.addCleanup(self.gone)
        token = JoinToken.create(AUTHORITY.certificate)
        enrolled = await enrol(reactor, "127.0.0.1", self.port, token, "rack-1")
        await (await self.connect(client_tls(enrolled.credentials, enrolled.ca))).call(Ping)
        tls.become(server_tls(issue_region(OTHER_AUTHORITY, NOW), OTHER_AUTHORITY.certificate))
        await (await self.connect(client_tls(enrolled.credentials, enrolled.ca))).call(Ping)
        try:
            await enrol(reactor, "127.0.0.1", self.port, token, "rack-2")
        except LinkLost as error:
            self.assertIn("was the token made after the region last changed its authority?", str(error))
        else:
            self.fail("it enrolled")


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
