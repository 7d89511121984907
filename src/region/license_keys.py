"""The license keys that operators have given: one for each release that needs one."""

from __future__ import annotations

from typing import Final

from attrs import frozen

from region.database import Database

_SELECT: Final = "SELECT osystem, distro_series, license_key FROM license_key"


@frozen
class LicenseKey:
    """A key for a release of an operating system. It is a secret, and does not show in logs."""

    osystem: str
    distro_series: str
    license_key: str

    def __repr__(self) -> str:
        return f"LicenseKey({self.osystem!r}, {self.distro_series!r}, …)"


class LicenseKeyStore:
    """The ``license_key`` table. Every method raises DatabaseUnavailable if the database cannot be asked."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def list(self) -> list[LicenseKey]:
        """Every key, by operating system and release."""
        rows = await self._database.query(f"{_SELECT} ORDER BY osystem, distro_series")
        return [LicenseKey(*row) for row in rows]

    async def get(self, osystem: str, distro_series: str) -> LicenseKey | None:
        """The key for a release, or None."""
        row = await self._database.one(f"{_SELECT} WHERE osystem = %s AND distro_series = %s", (osystem, distro_series))
        return None if row is None else LicenseKey(*row)

    async def add(self, key: LicenseKey) -> bool:
        """Keep a key for a release that has none. Whether it had none."""
        added = await self._database.execute(
            "INSERT INTO license_key (osystem, distro_series, license_key) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING",
            (key.osystem, key.distro_series, key.license_key),
        )
        return added > 0

    async def replace(self, key: LicenseKey) -> bool:
        """Keep a key in place of the one that its release has. Whether it had one."""
        replaced = await self._database.execute(
            "UPDATE license_key SET license_key = %s, updated = now() WHERE osystem = %s AND distro_series = %s",
            (key.license_key, key.osystem, key.distro_series),
        )
        return replaced > 0

    async def delete(self, osystem: str, distro_series: str) -> bool:
        """Forget the key for a release. Whether there was one."""
        deleted = await self._database.execute(
            "DELETE FROM license_key WHERE osystem = %s AND distro_series = %s", (osystem, distro_series)
        )
        return deleted > 0
