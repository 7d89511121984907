"""What ``twistd rack`` runs: its options, and the service that they make.

Settings that cannot be used, and a rack that has not joined, end the command before anything is started, with one line
on standard error and status 1.
"""

from __future__ import annotations

from typing import Any

from twisted.application.service import IService
from twisted.python.usage import Options as UsageOptions

from rack.config import RackConfig
from rack.identity import NotJoined, read_identity
from rpc.settings import SettingsError, load
from rpc.steady import be_steady


class Options(UsageOptions):
    """The command line of ``twistd rack``."""

    synopsis = "[--config FILE]"
    longdesc = (
        "Run a Stanchion rack: it keeps a verified copy of its region's images, and says what it holds. It must have "
        "joined a region (stanchion rack join). Stop it with SIGTERM, at any time."
    )
    optParameters = [["config", "c", "/etc/stanchion/rack.toml", "The file with the rack's settings."]]


def make_service(options: Options, reactor: Any) -> IService:
    """The service for ``options``.

    :raises SystemExit: with one line for standard error, if the settings cannot be used or the rack has not joined.
    """
    from rack import service

    try:
        config = load(RackConfig, options["config"])
        identity = read_identity(config.identity_directory)
    except (SettingsError, NotJoined) as error:
        raise SystemExit(f"stanchion rack: {error}") from error
    made: IService = service.make_service(config, identity, reactor)
    return made


def makeService(options: Options) -> IService:
    """What twistd calls."""
    from twisted.internet import reactor

    be_steady(reactor)
    return make_service(options, reactor)
