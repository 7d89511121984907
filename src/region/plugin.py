"""What ``twistd region`` runs: its options, and the service that they make.

Settings that cannot be used end the command before anything is started, with one line on standard error and status 1.
"""

from __future__ import annotations

from typing import Any

from twisted.application.service import IService
from twisted.python.usage import Options as UsageOptions

from region.config import RegionConfig
from rpc.notify import Notifier
from rpc.settings import SettingsError, load
from rpc.steady import be_steady


class Options(UsageOptions):
    """The command line of ``twistd region``."""

    synopsis = "[--config FILE]"
    longdesc = (
        "Run a Stanchion region: it imports images, publishes them as generations, serves them to racks, and answers "
        "API clients. Stop it with SIGTERM; it finishes what it is answering."
    )
    optParameters = [["config", "c", "/etc/stanchion/region.toml", "The file with the region's settings."]]


def make_service(options: Options, reactor: Any) -> IService:
    """The service for ``options``.

    :raises SystemExit: with one line for standard error, if the settings cannot be used.
    """
    from region.service import RegionService

    try:
        config = load(RegionConfig, options["config"])
    except SettingsError as error:
        raise SystemExit(f"stanchion region: {error}") from error
    service: IService = RegionService(config, reactor, Notifier.from_environment())
    return service


def makeService(options: Options) -> IService:
    """What twistd calls."""
    from twisted.internet import reactor

    be_steady(reactor)
    return make_service(options, reactor)
