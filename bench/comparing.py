"""A region whose API also has the list of releases read from PostgreSQL: ``python -m bench.comparing CONFIG``.

It is the region's own service with one more operation, so that both lists go through the same API code; and another,
that publishes as an import does that has found a newer version of some images, without the import.
"""

from __future__ import annotations

import sys
from typing import Any

from attrs import evolve
from twisted.internet import reactor as installed
from twisted.logger import globalLogBeginner

from region.api.comparison import from_database
from region.api.operations import Call, Operation, Reply, document
from region.api.parts import Parts
from region.api.routes import OPERATIONS
from region.config import RegionConfig
from region.database import Database, Session
from region.images.lock import try_lock
from region.service import RegionService
from rpc.logs import observer
from rpc.manifest import Manifest
from rpc.notify import Notifier
from rpc.settings import load


def publishing(database: Database) -> Operation:
    """The operation ``POST publish/``. It keeps its session: an import has had its own for long when it publishes."""
    kept: list[Session] = []

    async def opened() -> Session:
        session = await database.session().__aenter__()
        if not await try_lock(session):
            raise RuntimeError("an import is under way")
        return session

    async def publish(parts: Parts, call: Call) -> Reply:
        generations = parts.generations
        if not kept:
            kept.append(await opened())
        [session] = kept
        current = await generations.read_current(session)
        job = await session.one("SELECT max(id) FROM import_job")
        if current is None or job is None:
            raise RuntimeError("nothing was imported yet")
        changed = min(image.release for image in current.manifest.images)
        images = (
            evolve(image, version=f"{current.number + 1}") if image.release == changed else image
            for image in current.manifest.images
        )
        published = await generations.publish(session, Manifest(images), (), job[0], base=current.number)
        return document({"number": published.number, "digest": published.digest})

    return Operation("POST", "/publish/", "Publish", "create", publish, "A generation with some images changed.")


def main() -> None:
    """Run until SIGTERM."""
    reactor: Any = installed
    globalLogBeginner.beginLoggingTo([observer()], redirectStandardIO=False)
    service = RegionService(
        load(RegionConfig, sys.argv[1]),
        reactor,
        Notifier.from_environment(),
        operations=lambda database: (*OPERATIONS, from_database(database), publishing(database)),
    )
    reactor.callWhenRunning(service.startService)
    reactor.addSystemEventTrigger("before", "shutdown", service.stopService)
    reactor.run()


if __name__ == "__main__":
    main()
