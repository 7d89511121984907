"""A region whose API also has the list of releases read from PostgreSQL: ``python -m bench.comparing CONFIG``.

It is the region's own service with one more operation, so that both lists go through the same API code.
"""

from __future__ import annotations

import sys
from typing import Any

from twisted.internet import reactor as installed
from twisted.logger import globalLogBeginner

from region.api.comparison import from_database
from region.api.routes import OPERATIONS
from region.config import RegionConfig
from region.service import RegionService
from rpc.logs import observer
from rpc.notify import Notifier
from rpc.settings import load


def main() -> None:
    """Run until SIGTERM."""
    reactor: Any = installed
    globalLogBeginner.beginLoggingTo([observer()], redirectStandardIO=False)
    service = RegionService(
        load(RegionConfig, sys.argv[1]),
        reactor,
        Notifier.from_environment(),
        operations=lambda database: (*OPERATIONS, from_database(database)),
    )
    reactor.callWhenRunning(service.startService)
    reactor.addSystemEventTrigger("before", "shutdown", service.stopService)
    reactor.run()


if __name__ == "__main__":
    main()
