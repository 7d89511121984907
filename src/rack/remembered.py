"""Where were the region processes when the rack last heard of them? One file, for a start while the configured one is
down."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, DeferredLock
from twisted.logger import Logger

from rack.files import Files
from rpc.addresses import split_address

log = Logger()


class RememberedRegions:
    """The file ``path``, with the HOST:PORT of each region process.

    :param run_in_thread: runs what blocks.
    """

    def __init__(self, path: Path, run_in_thread: Callable[..., Deferred[Any]], files: Files | None = None) -> None:
        self._path = path
        self._run_in_thread = run_in_thread
        self._files = files or Files()
        self._order = DeferredLock()
        self._wanted: tuple[str, ...] = ()

    def read(self) -> tuple[str, ...]:
        """What is remembered; nothing if that cannot be used, which is logged. Blocks."""
        try:
            addresses = json.loads(self._files.read(self._path))["addresses"]
            for address in addresses:
                split_address(address)
            return tuple(addresses)
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.error(
                "{path}, which says where the region's processes were, cannot be used: {error}. The regions in the "
                "settings tell again.",
                path=str(self._path), error=error,
            )  # fmt: skip
            return ()

    def remember(self, addresses: tuple[str, ...]) -> None:
        """Replace what is remembered, in a while. What fails is logged: the rack runs on without it."""
        self._wanted = addresses
        if not self._order.waiting:
            writing = self._order.run(self._write_newest)
            writing.addErrback(
                lambda reason: log.failure(
                    "Could not remember the region's processes in {path}", reason, path=self._path
                )
            )

    def _write_newest(self) -> Deferred[None]:
        return self._run_in_thread(self._write, self._wanted)

    def _write(self, addresses: tuple[str, ...]) -> None:
        temporary = self._path.with_name(self._path.name + ".new")
        self._files.write(temporary, json.dumps({"addresses": list(addresses)}).encode("ascii"))
        self._files.sync(temporary)
        self._files.rename(temporary, self._path)
        self._files.sync(self._path.parent)
