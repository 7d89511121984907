"""Which commands the wire has: who may call each, who answers it, with what, how long it may take, how it may fail.

This table is the contract between region and rack, and gating is derived from it: a command is answered only by the
role that it names, and only for a peer whose role it names. ``docs/protocol.rst`` is checked against it.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

from twisted.protocols import amp

from rpc.arguments import KIB, MIB, Blob, Boolean, Bytes, Integer, Json, Schema, Text

PROTOCOL_VERSION: Final = 1
"""The version of this table. Peers agree on the highest that both have, when a rack registers."""

Role = Literal["rack", "region", "anonymous"]
"""What a peer is by its certificate; anonymous is one that showed none."""

REGION: Final[frozenset[Role]] = frozenset({"region"})
RACK: Final[frozenset[Role]] = frozenset({"rack"})
BOTH: Final[frozenset[Role]] = REGION | RACK
ANONYMOUS: Final[frozenset[Role]] = frozenset({"anonymous"})


class DeclaredError(Exception):
    """An error that a command says it may answer with. Its one argument is a sentence for people."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class EnrolmentRefused(DeclaredError):
    """The region does not enrol this rack: the token is wrong, used up or expired, or the request is no good."""


class RegistrationRefused(DeclaredError):
    """The region does not serve this rack: it was revoked, or is not enrolled there."""


class AlreadyLinked(DeclaredError):
    """The rack is linked already, and its other link is alive: two machines use one identity, or one tries twice."""


class RenewalRefused(DeclaredError):
    """The region does not renew this rack's certificate."""


class ReportRefused(DeclaredError):
    """What a rack reports is no report, for its values contradict each other or mean nothing here; or it is no rack."""


class EventsRefused(DeclaredError):
    """Of what a rack sent as events, one is none. Nothing was stored."""


class VersionMismatch(DeclaredError):
    """Rack and region have no version of the protocol in common."""


class Command(amp.Command):
    """A command. ``deadline`` is how long the caller waits for the answer, in seconds, unless the caller says else.

    ``since`` is the version of the protocol that it came with: a peer that is older is never sent it. A rack may call
    it only when it has registered, unless it is ``unregistered``.

    :raises TypeError: when the class is made, if it does not say who calls it and who answers it.
    """

    called_by: ClassVar[frozenset[Role]] = frozenset()
    answered_by: ClassVar[frozenset[Role]] = frozenset()
    deadline: ClassVar[float] = 30.0
    since: ClassVar[int] = 1
    unregistered: ClassVar[bool] = False

    argument_schema: ClassVar[Schema]
    answer_schema: ClassVar[Schema]
    declared: ClassVar[dict[bytes, type[DeclaredError]]]
    """The errors by the code under which they travel."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.argument_schema = Schema(cls.arguments)
        cls.answer_schema = Schema(cls.response)
        cls.declared = {code: kind for kind, code in cls.errors.items() if issubclass(kind, DeclaredError)}
        if len(cls.declared) != len(cls.errors):
            raise TypeError(f"{cls.__name__} declares an error that is no DeclaredError, or a code twice")
        if not cls.called_by or not cls.answered_by:
            raise TypeError(f"{cls.__name__} does not say who calls it (called_by) and who answers it (answered_by)")


class Ping(Command):
    """Answer at once. Each end asks the other at intervals, and drops a link on which no answer comes."""

    called_by = BOTH
    answered_by = BOTH
    deadline = 5.0
    unregistered = True


class Enroll(Command):
    """Ask for a client certificate, with the proof that the caller knows a join token's secret.

    ``proof`` is the HMAC that ``rpc.identity.prove`` computes, over this TLS channel and ``csr`` (a PEM certificate
    signing request). The answer has the rack's certificate and the CA's, both PEM, and the rack's ``system_id``.
    """

    arguments = [(b"token_id", Text()), (b"proof", Bytes()), (b"csr", Bytes()), (b"name", Text())]
    response = [(b"certificate", Bytes()), (b"ca", Bytes()), (b"system_id", Text())]
    errors = {EnrolmentRefused: b"ENROLMENT_REFUSED"}
    called_by = ANONYMOUS
    answered_by = REGION
    unregistered = True


class Endpoints(Command):
    """Ask which region processes there are, so that the rack links with each.

    ``process`` is the id of the one that answers. ``endpoints`` is an object: for each process that lives, by its id,
    the list of the HOST:PORT at which it can be reached, perhaps empty; a host ``*`` stands for the address that the
    rack connected to. A rack asks before it registers, so that it registers once with each process, and at intervals.
    """

    response = [(b"process", Text()), (b"endpoints", Json(64 * KIB))]
    called_by = RACK
    answered_by = REGION
    unregistered = True


class Register(Command):
    """What lets the region use a rack's link: agree on a version.

    ``versions`` is the list of protocol versions that the rack has, ``name`` its name for people, ``software`` the
    version of its program. ``instance`` is of the rack's choice and new at each of its starts, and ``attempt`` a number
    that grows with each of its links: of two links of one instance, the higher number is the later, in whatever order
    they register. The answer has the ``version`` to use, the ``region``'s name, and, as a list of text, the
    URLs under which the region's image stream can be read. When the link is lost, the rack is to come back at a random
    moment within ``spread`` seconds: the more racks a region has, the longer.
    """

    arguments = [
        (b"versions", Json(4 * KIB)),
        (b"name", Text()),
        (b"software", Text()),
        (b"instance", Text(optional=True)),
        (b"attempt", Integer(optional=True)),
    ]
    response = [
        (b"version", Integer()),
        (b"region", Text()),
        (b"stream_urls", Json(64 * KIB, optional=True)),
        (b"spread", Integer(optional=True)),
    ]
    errors = {
        VersionMismatch: b"VERSION_MISMATCH",
        RegistrationRefused: b"REGISTRATION_REFUSED",
        AlreadyLinked: b"ALREADY_LINKED",
    }
    called_by = RACK
    answered_by = REGION
    unregistered = True


class ReportInventory(Command):
    """Tell the region what the rack holds; answered when that is stored.

    ``generation`` is -1 and ``digest`` empty when it holds none. ``state`` is ``empty``, ``ready``, ``partial``,
    ``syncing`` or ``failed``. ``progress`` is an object whose fields are for display. ``refused`` lists the sha256 of
    files, at most 64, that came from the region's stream with other bytes, so that the region looks at its copies.
    """

    arguments = [
        (b"generation", Integer()),
        (b"digest", Text()),
        (b"state", Text()),
        (b"progress", Json(64 * KIB)),
        (b"refused", Json(16 * KIB, optional=True)),
    ]
    errors = {ReportRefused: b"REPORT_REFUSED"}
    called_by = RACK
    answered_by = REGION


class SendEvents(Command):
    """Tell the region what happened on the rack; answered when that is committed.

    ``events`` is a list of objects as :attr:`rpc.events.Event.document` has them, in order. ``committed`` lists the ids
    of those that the region has for certain; the rack keeps the others, and sends them again. An event that the region
    had already is not stored again, and is in the answer.
    """

    arguments = [(b"events", Json(256 * KIB))]
    response = [(b"committed", Json(64 * KIB))]
    errors = {EventsRefused: b"EVENTS_REFUSED"}
    called_by = RACK
    answered_by = REGION


class Renew(Command):
    """Ask for a new certificate for the rack that calls, over its registered link.

    ``csr`` is a PEM certificate signing request with a fresh key. The answer has the ``certificate`` and, in ``ca``,
    every authority that the rack is to trust from now on, all PEM. The certificate that the rack has stays good until
    the rack has registered with the new one.
    """

    arguments = [(b"csr", Bytes())]
    response = [(b"certificate", Bytes()), (b"ca", Bytes())]
    errors = {RenewalRefused: b"RENEWAL_REFUSED"}
    called_by = RACK
    answered_by = REGION


class Renewed(Command):
    """Tell the region that the rack has stored a certificate that it got by ``Renew``, and will use it from now on.

    ``certificate`` is its sha256, as 64 hexadecimal digits.
    """

    arguments = [(b"certificate", Text())]
    called_by = RACK
    answered_by = REGION


class RenewSoon(Command):
    """Have the rack call ``Renew`` within half a minute, because of ``reason``; answered at once."""

    arguments = [(b"reason", Text())]
    called_by = REGION
    answered_by = RACK
    deadline = 10.0


class ListImages(Command):
    """Ask what the rack holds right now.

    ``inventory`` is the canonical manifest of the verified images, as bytes, and is left out when ``known_digest`` or
    ``newest_digest`` is the digest of just that: what the caller knows of the rack, and what was published last.
    ``generation`` is -1 and ``digest`` empty when the rack holds none.
    """

    arguments = [(b"known_digest", Text()), (b"newest_digest", Text(optional=True))]
    response = [
        (b"state", Text()),
        (b"generation", Integer()),
        (b"digest", Text()),
        (b"inventory", Blob(optional=True)),
    ]
    called_by = REGION
    answered_by = RACK


class SyncImages(Command):
    """Make the rack hold a generation; answered when the sync has *ended*, so it may take hours.

    ``url`` is where the region's stream is; a host ``*`` in it stands for the address that the rack connected to. A
    second call for the same generation shares the result of the first. ``outcome`` says how it ended
    (``synced``, ``unchanged``, ``partial``, ``failed``, ``superseded``, ``cancelled``), ``generation`` and ``digest``
    what the rack holds now, ``reason`` is a sentence if it did not end well.
    """

    arguments = [(b"generation", Integer()), (b"digest", Text()), (b"url", Text())]
    response = [
        (b"outcome", Text()),
        (b"generation", Integer()),
        (b"digest", Text()),
        (b"reason", Text()),
        (b"bytes_fetched", Integer()),
        (b"files_fetched", Integer()),
    ]
    called_by = REGION
    answered_by = RACK
    deadline = 6 * 3600.0
    # A rack that died meanwhile is noticed by the pings; the deadline only bounds a sync that never ends.


class SyncProgress(Command):
    """Ask how far the sync under way is. ``progress`` is an object whose fields are for display; empty if none is."""

    response = [(b"progress", Json(64 * KIB))]
    called_by = REGION
    answered_by = RACK


class CancelSync(Command):
    """Stop the sync under way, keeping what was fetched. ``cancelled`` is False if there was none."""

    response = [(b"cancelled", Boolean())]
    called_by = REGION
    answered_by = RACK


class DescribeRelease(Command):
    """Ask what the rack knows of a release, whether it holds it or not.

    ``title`` is what people call it and ``system`` what they call the operating system: the stream's own words, if it
    has any, else the rack's. ``requires_license_key`` says whether it must not be installed without a key. ``uses`` is
    a list with an object for each image of it that is held: ``arch``, ``subarch``, ``kflavor``, ``label``, ``version``,
    and ``purposes``, a list of what it may be used for (``commissioning``, ``diskless``, ``install``, ``xinstall``).
    """

    arguments = [(b"os", Text()), (b"release", Text())]
    response = [
        (b"title", Text()),
        (b"system", Text()),
        (b"requires_license_key", Boolean()),
        (b"uses", Json(1 * MIB)),
    ]
    called_by = REGION
    answered_by = RACK
    deadline = 10.0


class ValidateLicenseKey(Command):
    """Ask whether ``key`` can be a license key for a release.

    ``outcome`` is ``valid``, ``invalid`` or ``not-needed`` (the release needs no key); ``reason`` says why, in a
    sentence that does not have the key in it, and is empty if it is valid.
    """

    arguments = [(b"os", Text()), (b"release", Text()), (b"key", Text())]
    response = [(b"outcome", Text()), (b"reason", Text())]
    called_by = REGION
    answered_by = RACK
    deadline = 10.0


COMMANDS: Final[tuple[type[Command], ...]] = (
    Ping, Enroll, Endpoints, Register, Renew, Renewed, RenewSoon, ReportInventory, SendEvents, ListImages, SyncImages,
    SyncProgress, CancelSync, DescribeRelease, ValidateLicenseKey,
)  # fmt: skip

BY_NAME: Final[dict[bytes, type[Command]]] = {command.commandName: command for command in COMMANDS}
