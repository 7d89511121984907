"""The twistd plugins ``region`` and ``rack``; each service is imported only when it is started."""

from twisted.application.service import ServiceMaker

region = ServiceMaker(
    "Stanchion region",
    "region.plugin",
    "Stanchion region: imports and publishes images, answers API clients.",
    "region",
)
rack = ServiceMaker(
    "Stanchion rack",
    "rack.plugin",
    "Stanchion rack: keeps a verified copy of the region's images.",
    "rack",
)
