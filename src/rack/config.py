"""What an operator can set for a rack, with its defaults. ``etc/rack.toml`` explains each setting.

Values are checked here as far as one can without touching the machine; a bad one is a
:class:`~rpc.settings.SettingsError` that names the file and the key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from attrs import field, frozen

from rpc.addresses import split_address
from rpc.settings import at_least, between, satisfies


def _are_addresses(value: tuple[str, ...]) -> bool:
    try:
        return all(split_address(address) for address in value)
    except ValueError:
        return False


def _is_proxy(value: str) -> bool:
    try:
        parts = urlsplit(value)
    except ValueError:
        return False
    return not value or (parts.scheme == "http" and bool(parts.hostname))


_PROXY: Final = satisfies(_is_proxy, "must be a proxy's address such as 'http://proxy.example.com:3128'")
_ADDRESSES: Final = satisfies(_are_addresses, "must be HOST:PORT texts such as 'region.example.com:5250'")


@frozen
class SyncConfig:
    """How images are fetched.

    Every ``interval_minutes`` the rack looks through what it holds and, if something is missing or damaged or the last
    sync failed, tries again. ``proxy`` is an http proxy's URL; no environment variable is looked at.
    """

    interval_minutes: float = field(default=15.0, validator=at_least(0.1))
    concurrency: int = field(default=4, validator=between(1, 64))
    connect_timeout_seconds: float = field(default=10.0, validator=at_least(0.1))
    idle_timeout_seconds: float = field(default=30.0, validator=at_least(0.1))
    proxy: str = field(default="", validator=_PROXY)


@frozen
class VerifyConfig:
    """How all files on the disk are hashed again in the background: at most ``rate_mib_per_second``, beginning every
    ``interval_days``; 0 only when somebody asks."""

    rate_mib_per_second: float = field(default=12.0, validator=between(0.01, 100_000))
    interval_days: float = field(default=7.0, validator=between(0, 3650))


@frozen
class MetricsConfig:
    """Where the rack's numbers can be read (``/metrics``, over plain HTTP). ``port`` 0: nowhere."""

    listen: str = "127.0.0.1"
    port: int = field(default=5241, validator=between(0, 65535))


@frozen
class RackConfig:
    """All settings of a rack. ``regions`` empty means the region that the rack joined."""

    state_directory: Path = field(default=Path("/var/lib/stanchion/rack"))
    regions: tuple[str, ...] = field(default=(), validator=_ADDRESSES)
    sync: SyncConfig = SyncConfig()
    verify: VerifyConfig = VerifyConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def identity_directory(self) -> Path:
        """Where ``stanchion rack join`` puts the rack's key and certificate."""
        return self.state_directory / "identity"

    @property
    def images_directory(self) -> Path:
        """Where the snapshots and the cached blobs are; all of it on one file system."""
        return self.state_directory / "images"

    @property
    def verify_request_file(self) -> Path:
        """What ``stanchion rack verify`` writes for the rack that runs."""
        return self.state_directory / "verify.request"

    @property
    def events_directory(self) -> Path:
        """Where events wait until a region has them."""
        return self.state_directory / "events"

    @property
    def remembered_file(self) -> Path:
        """Where it is kept at which addresses the region's processes were."""
        return self.state_directory / "regions.json"
