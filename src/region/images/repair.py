"""What does the region do about a file that is damaged on its disk? Tell, have it fetched again, and tell racks then.

Whoever finds it (the verifier, an import, somebody who asked for the file), the blob store moves it away first, so no
byte of it is served any more. Here an import is asked for, which fetches it from upstream; when upstream cannot give
it, again after a while, ever more seldom. What is published stays published: racks may hold it whole.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from attrs import define, field
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from region.database import DatabaseUnavailable
from region.upstream.values import UPLOADS
from rpc.blobs import BlobStore
from rpc.damage import Damaged
from rpc.events import DAMAGE_FOUND, DAMAGE_REPAIRED, Kind
from rpc.manifest import Image, Manifest

log = Logger()

FIRST_RETRY: Final = 60.0
LAST_RETRY: Final = 3600.0
"""Seconds from one import for a repair to the next, while something is damaged still: at first, and at most."""

SETTLE_SECONDS: Final = 1.0
"""How long after a finding the import follows, so that several findings are followed by one."""

TELL_SECONDS: Final = 10.0
"""How long a file that is there again waits for others, before racks are told."""

MAX_REFUSED: Final = 64
"""How many files a rack may say at once that it refused."""

_SHOWN: Final = 3


class Published(Protocol):
    """The part of :class:`region.images.store.GenerationStore` that is used here."""

    @property
    def latest(self) -> Any: ...


class Suspects(Protocol):
    """Who looks at a blob; :class:`rpc.verifying.Verifier` is one."""

    def suspect(self, sha256: str, why: str) -> bool:
        """Look at it at once, unless that was done a moment ago."""


@define(eq=False)
class Repairs:
    """Sees to it that what is damaged is fetched again. To be used in the reactor's thread.

    :param request: asks for an import; its Deferred, or coroutine, fails if the database is away.
    :param happened: is told of what people should find in the events. It must not raise.
    :param there_again: is called when what was damaged is there again: racks that wait for it can be told. While more
        is damaged still, at most every :data:`TELL_SECONDS`.
    """

    blobs: BlobStore
    generations: Published
    verifier: Suspects
    clock: IReactorTime
    request: Callable[[], Any]
    happened: Callable[[Kind, str], object]
    there_again: Callable[[], object]
    jitter: Callable[[], float] = random.random
    _retry: float = field(default=FIRST_RETRY, init=False)
    _timer: IDelayedCall | None = field(default=None, init=False)
    _telling: IDelayedCall | None = field(default=None, init=False)
    _stopped: bool = field(default=False, init=False)

    def start(self) -> None:
        """Begin; what was damaged when the region stopped is damaged still."""
        if self.blobs.damaged:
            log.warn("{count} files are damaged and not repaired yet.", count=len(self.blobs.damaged))
            self._later(SETTLE_SECONDS)

    def stop(self) -> None:
        """End."""
        self._stopped = True
        for timer in (self._timer, self._telling):
            if timer is not None and timer.active():
                timer.cancel()

    def found(self, damaged: Damaged) -> None:
        """A file was found damaged and moved away."""
        images = self._images_with(damaged.sha256)
        what = f"The file {damaged.sha256} ({damaged.size} bytes) of {_named(images)}: {damaged.reason}."
        self.happened(DAMAGE_FOUND, f"{what} It is not served any more; {remedy(images)}.")
        self._retry = FIRST_RETRY
        self._later(SETTLE_SECONDS)

    def repaired(self, damaged: Damaged) -> None:
        """It is there again."""
        images = _named(self._images_with(damaged.sha256))
        self.happened(DAMAGE_REPAIRED, f"The file {damaged.sha256} of {images} is there again, verified.")
        if self._telling is not None and self._telling.active():
            if self.blobs.damaged:
                return
            self._telling.cancel()
        if not self.blobs.damaged:
            self.there_again()
        elif not self._stopped:
            self._telling = self.clock.callLater(TELL_SECONDS, self.there_again)

    def refused(self, rack: str, refused: Sequence[str]) -> None:
        """A rack got bytes of these files whose sha256 was wrong: our copy may be, or what is between us.

        What is not of the current generation is nobody's to fetch any more, and not looked at.
        """
        current = self.generations.latest
        published = {} if current is None else current.manifest.blobs
        why = f"rack {rack} got wrong bytes of it"
        suspected = [
            sha256 for sha256 in refused[:MAX_REFUSED] if sha256 in published and self.verifier.suspect(sha256, why)
        ]
        if suspected:
            more = f" and {len(suspected) - _SHOWN} more files" if len(suspected) > _SHOWN else ""
            log.warn(
                "Rack {rack} got wrong bytes of {files}{more}; they are looked at.",
                rack=rack, files=", ".join(suspected[:_SHOWN]), more=more,
            )  # fmt: skip

    def _needed(self) -> bool:
        """Whether something that is damaged is of the current generation."""
        current = self.generations.latest
        return current is not None and not current.manifest.blobs.keys().isdisjoint(self.blobs.damaged)

    def _images_with(self, sha256: str) -> list[Image]:
        current = self.generations.latest
        return [] if current is None else images_with(current.manifest, sha256)

    def _later(self, seconds: float) -> None:
        if self._stopped:
            return
        if self._timer is not None and self._timer.active():
            if self._timer.getTime() <= self.clock.seconds() + seconds:
                return
            self._timer.cancel()
        self._timer = self.clock.callLater(seconds, self._import)

    def _import(self) -> None:
        if not self._needed():
            return  # what only older generations have cannot be fetched again, and goes with them
        asking = Deferred.fromCoroutine(self._ask())
        asking.addErrback(lambda failure: log.failure("A repair could not be asked for", failure))

    async def _ask(self) -> None:
        try:
            await self.request()
        except DatabaseUnavailable as error:
            log.warn("A repair is asked for later: {reason}", reason=str(error))
        seconds, self._retry = self._retry, min(self._retry * 2, LAST_RETRY)
        self._later(seconds * (1 + self.jitter() / 4))


def images_with(manifest: Manifest, sha256: str) -> list[Image]:
    """The images that need a file."""
    return [image for image in manifest.images if any(file.sha256 == sha256 for file in image.files)]


def remedy(images: Sequence[Image]) -> str:
    """What becomes of a damaged file that ``images`` of the current generation need: what ends a sentence about it."""
    if not images:
        return "nothing that is published now needs it"
    if all(image.source == UPLOADS for image in images):
        return "no source has it: upload it again (stanchion images upload)"
    return "it is being fetched again"


def _named(images: Sequence[Image]) -> str:
    if not images:
        return "no image of the current generation"
    more = f" and {len(images) - _SHOWN} more" if len(images) > _SHOWN else ""
    return ", ".join(f"{image.key} {image.version}" for image in images[:_SHOWN]) + more
