"""Which certificate of a rack is good? The table of those that were issued, and the one rule for admitting a rack.

A certificate is good from when it is issued until a newer one of the same rack is used; so a rack that renews may be
cut off anywhere and still gets in, with the old one or the new one. What was replaced, or was never issued to that
rack, is refused although the authority has signed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attrs import frozen
from twisted.logger import Logger

from region.database import Database, Transaction
from region.racks import RackRefused
from rpc.certificates import expires, fingerprint, moment

log = Logger()

KEPT: Final = 16
"""How many certificates of one rack are remembered, besides the one that it uses and the one that it will use next."""

_STANDING: Final = """
SELECT rack.name, rack.revoked, issued.number, issued.used, issued.superseded,
       EXISTS (SELECT FROM rack_certificate older WHERE older.system_id = rack.system_id
               AND older.number < issued.number AND older.superseded IS NULL)
FROM rack LEFT JOIN rack_certificate issued ON issued.system_id = rack.system_id AND issued.sha256 = %s
WHERE rack.system_id = %s FOR UPDATE OF rack
"""

# A rack trusts what came with the newest certificate that it has stored: storing that replaced the whole identity.
_BEHIND: Final = """
SELECT rack.system_id, rack.name FROM rack
WHERE rack.revoked IS NULL AND NOT EXISTS (
    SELECT FROM (SELECT authorities FROM rack_certificate
                 WHERE system_id = rack.system_id AND superseded IS NULL AND coalesce(stored, used) IS NOT NULL
                 ORDER BY number DESC LIMIT 1) AS held
    WHERE held.authorities {comparison} %s::text[])
"""


@frozen
class Behind:
    """A rack that was not yet told, or has not yet stored, which authorities to trust."""

    system_id: str
    name: str


class IssuedCertificates:
    """The ``rack_certificate`` table."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(
        self, transaction: Transaction, system_id: str, certificate: bytes, authorities: Sequence[str], *, stored: bool
    ) -> None:
        """Note in the caller's transaction that a rack is given ``certificate`` (PEM), and which ``authorities``
        (sha256 of each) it is told to trust. ``stored``: there is no need to hear from it that it keeps it."""
        await transaction.execute(
            """INSERT INTO rack_certificate (system_id, sha256, authorities, expires, stored)
               VALUES (%s, %s, %s, %s, CASE WHEN %s THEN now() END)""",
            (system_id, fingerprint(certificate), list(authorities), expires(certificate), stored),
        )
        # However often a rack asks, what is kept for it has a bound; whatever it asks, what it will show next stays.
        await transaction.execute(
            """DELETE FROM rack_certificate WHERE system_id = %s AND (used IS NULL OR superseded IS NOT NULL)
               AND (expires < now() OR number NOT IN (
                   (SELECT number FROM rack_certificate WHERE system_id = %s ORDER BY number DESC LIMIT %s)
                   UNION ALL
                   (SELECT number FROM rack_certificate WHERE system_id = %s AND stored IS NOT NULL
                    AND superseded IS NULL ORDER BY number DESC LIMIT 1)))""",
            (system_id, system_id, KEPT, system_id),
        )

    async def admit(self, system_id: str, sha256: str) -> None:
        """Let the rack in with the certificate that it showed, which replaces its older ones from now on.

        :raises RackRefused: if it is not enrolled any more, is revoked, or this certificate is none of its good ones.
        """

        async def admitting(transaction: Transaction) -> tuple[str, bool]:
            row = await transaction.one(_STANDING, (sha256, system_id))
            if row is None:
                raise RackRefused(
                    f"rack {system_id} is not enrolled here, or was forgotten: join it again with a new token "
                    "(stanchion rack join --again)"
                )
            name, revoked, number, used, superseded, has_older = row
            again = (
                f"forget the rack (stanchion racks forget {name}), then join it again with a new token (stanchion rack "
                "join --again)"
            )
            if revoked is not None:
                raise RackRefused(
                    f"rack {name} ({system_id}) was revoked at {moment(revoked)} and is not served any more; if this "
                    f"machine is to be a rack again, {again}"
                )
            if number is None:
                raise RackRefused(
                    f"the certificate that rack {name} ({system_id}) shows, {_short(sha256)}, is not on record for it; "
                    f"if this is the right machine, {again}"
                )
            if superseded is not None:
                raise RackRefused(
                    f"the certificate that rack {name} ({system_id}) shows, {_short(sha256)}, was replaced at "
                    f"{moment(superseded)}, when the rack used its next one: another machine has this rack's identity, "
                    f"or an old copy of it was put back; if this is the right machine, {again}"
                )
            if used is None or has_older:
                await self._use(transaction, system_id, sha256, number)
            return name, used is None

        name, first = await self._database.transact(admitting)
        if first:
            log.info(
                "Rack {rack} ({name}) uses the certificate {sha256} from now on.",
                rack=system_id, name=name, sha256=_short(sha256),
            )  # fmt: skip

    async def _use(self, transaction: Transaction, system_id: str, sha256: str, number: int) -> None:
        await transaction.execute(
            "UPDATE rack_certificate SET used = coalesce(used, now()), stored = coalesce(stored, now()) "
            "WHERE number = %s",
            (number,),
        )
        await transaction.execute(
            "UPDATE rack_certificate SET superseded = now() "
            "WHERE system_id = %s AND number < %s AND superseded IS NULL",
            (system_id, number),
        )
        await transaction.execute("UPDATE rack SET certificate_sha256 = %s WHERE system_id = %s", (sha256, system_id))

    async def stored(self, system_id: str, sha256: str) -> bool:
        """Note that the rack has stored a certificate that it was given. Whether it was given that one."""
        return bool(
            await self._database.execute(
                "UPDATE rack_certificate SET stored = coalesce(stored, now()) WHERE system_id = %s AND sha256 = %s",
                (system_id, sha256),
            )
        )

    async def not_told(self, authorities: Sequence[str], system_id: str | None = None) -> list[Behind]:
        """The racks (or that one) that hold no certificate that came with just these ``authorities``, by name."""
        return await self._behind("=", authorities, system_id)

    async def not_trusting(self, authority: str) -> list[Behind]:
        """The racks that hold no certificate that came with ``authority``, by name: without the others they would be
        locked out."""
        return await self._behind("@>", [authority])

    async def _behind(self, comparison: str, authorities: Sequence[str], system_id: str | None = None) -> list[Behind]:
        only = "" if system_id is None else "AND rack.system_id = %s"
        rows = await self._database.query(
            f"{_BEHIND.format(comparison=comparison)} {only} ORDER BY rack.name",
            (list(authorities), *([] if system_id is None else [system_id])),
        )
        return [Behind(*row) for row in rows]


def _short(sha256: str) -> str:
    return f"{sha256[:16]}…"
