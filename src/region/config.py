"""What an operator can set for the region, with its defaults. ``etc/region.toml`` explains each setting.

Values are checked here as far as one can without touching the machine; a bad one is a
:class:`~rpc.settings.SettingsError` that names the file and the key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from attrs import field, frozen

from rpc.addresses import split_address
from rpc.settings import at_least, between, satisfies


def _is_proxy(value: str) -> bool:
    if not value:
        return True
    from rpc.tunnels import ProxyAddress  # only who sets a proxy pays for loading an HTTP client

    try:
        ProxyAddress.parse(value)
        return True
    except ValueError:
        return False


def _is_stream_url(value: str) -> bool:
    try:
        parts = urlsplit(value)
        return not value or (parts.scheme in ("http", "https") and bool(parts.netloc) and parts.port != 0)
    except ValueError:
        return False


_port = between(0, 65535)
_proxy = satisfies(_is_proxy, "must be a proxy's address such as 'http://proxy.example.com:3128'")
_stream_url = satisfies(_is_stream_url, "must be a URL such as 'http://region.example.com/MAAS/images-stream'")


def _is_address(value: str) -> bool:
    try:
        return not value or bool(split_address(value))
    except ValueError:
        return False


_address = satisfies(_is_address, "must be HOST:PORT such as 'region.example.com:5250'")
_database = satisfies(
    lambda value: not value or value.startswith(("postgresql://", "postgres://")),
    "must begin with 'postgresql://', or be empty for a PostgreSQL that the region runs itself",
)


@frozen
class HttpConfig:
    """Where the API and the image stream are served. ``port`` 0 takes any free one."""

    listen: str = "0.0.0.0"
    port: int = field(default=5240, validator=_port)


@frozen
class RpcConfig:
    """Where racks connect, over TLS. ``advertise`` is the HOST:PORT that racks and people are told to use; empty: the
    address that a rack has connected to."""

    listen: str = "0.0.0.0"
    port: int = field(default=5250, validator=_port)
    advertise: str = field(default="", validator=_address)


@frozen
class ImportConfig:
    """How images are imported. ``here`` says whether by this region process, which then takes uploads as well;
    ``interval_minutes`` 0 imports on request only; ``proxy`` is an http proxy's URL. Uploads of which nothing came for
    ``upload_expire_hours`` are forgotten."""

    here: bool = True
    interval_minutes: float = field(default=60.0, validator=at_least(0))
    at_start: bool = True
    concurrency: int = field(default=4, validator=between(1, 64))
    upload_expire_hours: float = field(default=24.0, validator=between(0.01, 8760))
    connect_timeout_seconds: float = field(default=10.0, validator=between(0.001, 86400))
    idle_timeout_seconds: float = field(default=30.0, validator=between(0.001, 86400))
    proxy: str = field(default="", validator=_proxy)


@frozen
class VerifyConfig:
    """How all files on the disk are hashed again in the background: at most ``rate_mib_per_second``, beginning every
    ``interval_days``; 0 only when somebody asks."""

    rate_mib_per_second: float = field(default=12.0, validator=between(0.01, 100_000))
    interval_days: float = field(default=7.0, validator=between(0, 3650))


@frozen
class AskConfig:
    """How racks are asked: each must answer within ``deadline_seconds`` or counts as not having answered."""

    deadline_seconds: float = field(default=2.0, validator=between(0.001, 86400))


@frozen
class StreamConfig:
    """``url`` is where racks fetch images. Empty: this region's own stream, on the address the rack connected to."""

    url: str = field(default="", validator=_stream_url)


@frozen
class EventsConfig:
    """How long the racks' events are kept: none longer than ``keep_days``, and no more than ``keep_rows``."""

    keep_days: float = field(default=90.0, validator=at_least(0.01))
    keep_rows: int = field(default=1_000_000, validator=at_least(1))


@frozen
class CommissioningConfig:
    """How machines are commissioned: what they get by default, and after how long a silence means that one has failed.

    ``boot_timeout_minutes`` from being told to start to the first word; ``heartbeat_timeout_minutes`` since the last
    one; ``script_grace_minutes`` over a script's own limit; ``token_grace_minutes`` for which the token of a machine
    that is done is still good for what is on its way; ``keep_runs`` of each kind and machine; ``tag_timeout_seconds``
    for evaluating one tag's definition on one machine.
    """

    storage_layout: Literal["flat", "lvm", "blank"] = "flat"
    boot_timeout_minutes: float = field(default=20.0, validator=between(0.01, 10080))
    heartbeat_timeout_minutes: float = field(default=10.0, validator=between(0.01, 10080))
    script_grace_minutes: float = field(default=5.0, validator=between(0.01, 1440))
    token_grace_minutes: float = field(default=60.0, validator=between(0, 10080))
    keep_runs: int = field(default=10, validator=between(1, 1000))
    tag_timeout_seconds: float = field(default=5.0, validator=between(0.01, 3600))


@frozen
class RegionConfig:
    """All settings of a region. ``database`` empty runs a PostgreSQL of the region's own in ``state_directory``."""

    name: str = "region"
    state_directory: Path = Path("/var/lib/stanchion/region")
    database: str = field(default="", validator=_database)
    http: HttpConfig = HttpConfig()
    rpc: RpcConfig = RpcConfig()
    images: ImportConfig = ImportConfig()
    verify: VerifyConfig = VerifyConfig()
    ask: AskConfig = AskConfig()
    stream: StreamConfig = StreamConfig()
    events: EventsConfig = EventsConfig()
    commissioning: CommissioningConfig = CommissioningConfig()
