"""How does the content of an upload come in? In chunks that are appended to a part, until it is whole and verified.

A chunk is acknowledged when it is on the disk and its end is in the database. So what was acknowledged is there when a
client is cut off, the region is restarted or the power fails, and says where to go on; what is beyond it is cut off. A
part is held open between two chunks, because opening it means hashing what is there. What nobody continues expires.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from attrs import define, field, frozen
from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from region.database import DatabaseUnavailable
from region.images.disk import SPARE_BYTES, free_bytes, readable
from region.images.naming import UploadInvalid, UploadRequest
from region.images.uploads import NoSuchUpload, Upload, UploadStore
from rpc.blobs import BlobError, BlobStore, Part, PartBusy, State, WrongContent
from rpc.fetch import RunInThread
from rpc.manifest import ImageKey

log = Logger()

IDLE_SECONDS: Final = 60.0
"""How long a part is held open without a chunk."""

BEGINNINGS: Final = 3
"""How often an upload is begun that goes, because another of the same image is whole first, before it has begun."""

EXPIRE_SECONDS: Final = 600.0
"""How often it is looked for uploads that nobody continues."""

_DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class UploadElsewhere(Exception):
    """The content is kept by another region process; the text says which."""


class WrongOffset(Exception):
    """A chunk does not follow what has come; ``received`` is how many bytes that is."""

    def __init__(self, offset: int, received: int) -> None:
        super().__init__(f"The chunk begins at byte {offset}, but {received} bytes have come: go on from there.")
        self.received = received


class TooMuch(Exception):
    """There is more data than the upload was said to have."""


class WrongUpload(Exception):
    """All bytes have come, and they are others than was said; they are thrown away."""


class NoRoom(Exception):
    """The disk is full."""


class UploadBusy(Exception):
    """Somebody else writes the same content at this moment; ask again."""


@frozen
class Received:
    """How far an upload is: ``received`` of its bytes have come, and it is ``complete`` when all are there and right:
    then it can be part of the next generation."""

    upload: Upload
    received: int
    complete: bool


@define(eq=False)
class _Open:
    """An upload whose content is coming, with its part if that is open."""

    lock: DeferredLock = field(factory=DeferredLock)
    part: Part | None = None
    idle: IDelayedCall | None = None


@define(eq=False)
class Receiver:
    """Takes in what is uploaded to this region process. To be used in the reactor's thread.

    :param process: what this process is called.
    :param expire_hours: after so long without a chunk an upload that is not whole is forgotten.
    :param takes: whether uploads may begin here; not on a process that does not import.
    :param publish: asks for an import, which makes a generation of what has come.
    """

    store: UploadStore
    blobs: BlobStore
    process: str
    expire_hours: float
    clock: IReactorTime
    run_in_thread: RunInThread
    publish: Callable[[], Awaitable[object]]
    free_bytes: Callable[[Path], int] = free_bytes
    takes: bool = True
    _open: dict[int, _Open] = field(factory=dict, init=False)
    _lost: set[int] = field(factory=set, init=False)
    """Uploads that were whole once, and whose content is taken anew because it was damaged."""
    _again: set[int] = field(factory=set, init=False)
    """Uploads that were begun again after some of them had come, and of which nothing has come since."""
    _expiring: LoopingCall | None = field(default=None, init=False)

    async def start(self) -> None:
        """Keep from being thrown away what has come, and look for what has expired from now on."""
        for upload in await self.store.list():
            if upload.process == self.process:
                sha256, size = upload.request.sha256, upload.request.size
                self.blobs.pin(sha256)
                if upload.completed is None and await self.run_in_thread(self.blobs.is_verified, sha256, size):
                    await self._completed(upload)  # the process ended before it could say so
        self._expiring = LoopingCall(self._expire)
        self._expiring.clock = self.clock
        expiring = self._expiring.start(EXPIRE_SECONDS)
        expiring.addErrback(lambda reason: log.failure("Uploads do not expire any more", reason))

    async def stop(self) -> None:
        """Close what is open; it is gone on with after a start."""
        if self._expiring is not None and self._expiring.running:
            self._expiring.stop()
        for upload_id in list(self._open):
            await self._close(upload_id)

    async def begin(self, request: UploadRequest, username: str) -> Received:
        """Begin an upload, or find the one of this content that was begun already.

        :raises UploadInvalid: if its sha256 is that of a content of another size.
        :raises NoRoom: if the disk has no room for it.
        :raises UploadElsewhere: if this region process takes no uploads.
        :raises NoSuchUpload: if it was deleted, or replaced by one that became whole, again and again meanwhile.
        """
        if not self.takes:
            raise UploadElsewhere(
                f"Region process {self.process} imports no images ([images] here = false), so what is uploaded to it "
                "would not be published: upload to the one that does."
            )
        sha256, size = request.sha256, request.size
        there = await self.run_in_thread(self._size_of, sha256)
        if there is not None and there != size:
            raise UploadInvalid("size", f"the content with sha256 {sha256} has {there} bytes, not {size}.")
        if there is None:
            await self._require_room(sha256, size)
        for _ in range(BEGINNINGS - 1):
            try:
                return await self._begin(request, username, there is not None)
            except NoSuchUpload as error:
                log.info("An upload of {name} is begun anew: {reason}", name=request.name, reason=str(error))
        return await self._begin(request, username, there is not None)

    async def _begin(self, request: UploadRequest, username: str, is_there: bool) -> Received:
        sha256, size = request.sha256, request.size
        self.blobs.pin(sha256)
        upload, is_new = await self.store.create(request, self.process, username)
        if is_new:
            log.info(
                "Upload {id} of {name} ({arch}, {size} bytes) was begun by {username}.",
                id=upload.id, name=request.name, arch=request.arch, size=size, username=username,
            )  # fmt: skip
        if is_there and await self.run_in_thread(self.blobs.verify, sha256, size):
            return await self._completed(upload)
        if upload.completed is not None:
            log.warn("The content of upload {id} is lost; it is taken anew.", id=upload.id)
            self._lost.add(upload.id)
            await self.store.touch(upload, 0)
            upload = await self.store.get(upload.id)
        received = await self.progress(upload)
        if received.received:
            self._again.add(upload.id)
        if received.received == size:  # the process ended before it could look at it
            return await self.append(upload.id, b"", size)
        return received

    async def progress(self, upload: Upload) -> Received:
        """How far an upload is."""
        if upload.completed is not None and upload.id not in self._lost:
            return Received(upload, upload.request.size, True)
        known = self._open.get(upload.id)
        if known is not None and known.part is not None:
            return Received(upload, known.part.length, False)
        if upload.process != self.process:
            return Received(upload, 0, False)
        there = await self.run_in_thread(self.blobs.part_size, upload.request.sha256)
        return Received(upload, there if upload.received is None else min(there, upload.received), False)

    async def append(self, upload_id: int, data: bytes, offset: int | None = None) -> Received:
        """Append ``data`` to what has come of an upload; when that is all, verify it and ask for an import.

        :param offset: where it belongs; by default at the end of what has come, or when the upload was just begun again
            at its beginning: who says nothing of offsets, as clients of MAAS, knows of nothing that had come.
        :raises NoSuchUpload: if there is no such upload.
        :raises UploadElsewhere: if another region process has it.
        :raises WrongOffset: if it does not belong there.
        :raises TooMuch: if that is more than the upload has; nothing of it is kept.
        :raises WrongUpload: if it is all, and is wrong.
        :raises NoRoom: if the disk is full, but for what is left alone; nothing of it is kept.
        :raises UploadBusy: if it cannot be written at this moment.
        :raises DatabaseUnavailable: if it cannot be written down that it has come; then it has not.
        """
        known = self._open.setdefault(upload_id, _Open())
        async with known.lock:
            try:
                return await self._append(known, upload_id, data, offset)
            except OSError as error:
                await self._close_part(known)
                if error.errno in _DISK_FULL:
                    raise NoRoom(
                        f"The disk of region process {self.process} is full: make room, then go on with this upload."
                    ) from error
                raise
            except BaseException:
                await self._close_part(known)
                raise
            finally:
                if known.part is None and not known.lock.waiting:
                    self._open.pop(upload_id, None)

    async def _append(self, known: _Open, upload_id: int, data: bytes, offset: int | None) -> Received:
        upload = await self.store.get(upload_id)
        request = upload.request
        if upload.process != self.process:
            raise UploadElsewhere(
                f"The content of upload {upload_id} goes to region process {upload.process}, which began it; this one "
                f"is {self.process}."
            )
        if upload.completed is not None and upload_id not in self._lost:
            if offset is not None and offset + len(data) <= request.size:
                return Received(upload, request.size, True)  # the answer to its last chunk was lost
            raise TooMuch("Too much data received: all of this upload had come already.")
        part = await self._part(known, upload)
        is_first = offset is None and upload_id in self._again
        start = 0 if is_first else part.length
        if offset is not None and offset != start:
            raise WrongOffset(offset, start)
        if start + len(data) > request.size:
            raise TooMuch(
                f"Too much data received: {start} bytes have come and {len(data)} more would be over the size, "
                f"{request.size}. Nothing of this was kept; send what is missing, or delete the upload."
            )
        # What was begun while there was room for each alone may be too much together, or beside what an import fetches.
        await self._require_spare(len(data) - (part.length if is_first else 0))
        self._again.discard(upload_id)
        if is_first:
            await self.store.touch(upload, 0)
            await self.run_in_thread(part.restart)
        await self.run_in_thread(_keep, part, data)
        if not part.is_full:
            await self.store.touch(upload, part.length)
            self._idle(known, upload_id)
            return Received(upload, part.length, False)
        try:
            await self.run_in_thread(part.finish)
        except WrongContent as error:
            await self.store.touch(upload, 0)
            raise WrongUpload(
                f"Saved content does not match given SHA256 value: {error}. It was thrown away; upload it again from "
                "its beginning, or begin another upload with the right sha256."
            ) from error
        await self._close_part(known)
        return await self._completed(upload)

    async def delete(self, key: ImageKey) -> bool:
        """Delete an uploaded image, also what is under way of it; whether there was anything."""
        return await self._forget(await self.store.delete(key), publish=True)

    async def _completed(self, upload: Upload) -> Received:
        upload, replaced = await self.store.complete(upload.id)
        self._lost.discard(upload.id)
        log.info("Upload {id} of {name} is whole.", id=upload.id, name=upload.request.name)
        await self._forget([each for each in replaced if each.request.sha256 != upload.request.sha256])
        await self._publish()
        return Received(upload, upload.request.size, True)

    async def _publish(self) -> None:
        try:
            await self.publish()
        except DatabaseUnavailable as error:
            log.warn("What was uploaded waits for the next import: {reason}", reason=str(error))

    async def _forget(self, gone: Any, publish: bool = False) -> bool:
        """Let go of uploads whose rows are gone, and of their content unless another upload is of the same."""
        if not gone:
            return False
        left = {upload.request.sha256 for upload in await self.store.list() if upload.process == self.process}
        for upload in gone:
            await self._close(upload.id)
            self._again.discard(upload.id)
            if upload.process == self.process and upload.request.sha256 not in left:
                self.blobs.unpin(upload.request.sha256)
                if upload.completed is None:
                    await self.run_in_thread(self.blobs.discard_part, upload.request.sha256)
        if publish:
            await self._publish()
        return True

    # Parts

    async def _part(self, known: _Open, upload: Upload) -> Part:
        if known.idle is not None and known.idle.active():
            known.idle.cancel()
        if known.part is None:
            try:
                part = await self.run_in_thread(self.blobs.open_part, upload.request.sha256, upload.request.size)
            except PartBusy as error:
                raise UploadBusy(
                    f"The content of upload {upload.id} is being written for another upload, or fetched for an import, "
                    "at this moment; go on in a moment."
                ) from error
            known.part = part
            await self.run_in_thread(part.load, upload.received)
        return known.part

    def _idle(self, known: _Open, upload_id: int) -> None:
        known.idle = self.clock.callLater(IDLE_SECONDS, self._close_idle, upload_id)

    def _close_idle(self, upload_id: int) -> None:
        closing = Deferred.fromCoroutine(self._close(upload_id))
        closing.addErrback(lambda reason: log.failure("The part of an upload could not be closed", reason))

    async def _close(self, upload_id: int) -> None:
        known = self._open.get(upload_id)
        if known is not None:
            async with known.lock:
                await self._close_part(known)
                if not known.lock.waiting:
                    self._open.pop(upload_id, None)

    async def _close_part(self, known: _Open) -> None:
        if known.idle is not None and known.idle.active():
            known.idle.cancel()
        part, known.part = known.part, None
        if part is not None:
            await self.run_in_thread(part.close)

    async def _expire(self) -> None:
        try:
            expired = await self.store.expire(self.process, self.expire_hours)
            await self._forget(expired)
        except (DatabaseUnavailable, OSError, BlobError) as error:
            log.warn("Uploads that nobody continues are forgotten later: {reason}", reason=str(error))
            return
        for upload in expired:
            log.warn(
                "Upload {id} of {name} has expired: nothing of it came for {hours:g} hours.",
                id=upload.id, name=upload.request.name, hours=self.expire_hours,
            )  # fmt: skip

    # The disk

    def _size_of(self, sha256: str) -> int | None:
        try:
            size = self.blobs.path(sha256).lstat().st_size
        except FileNotFoundError:
            return None
        # What is there may be damaged; then it is set aside, and its size says nothing.
        return size if self.blobs.examine(sha256, size).state is State.VERIFIED else None

    async def _require_room(self, sha256: str, size: int) -> None:
        there = await self.run_in_thread(self.blobs.part_size, sha256)
        free = await self.run_in_thread(self.free_bytes, self.blobs.root)
        if free < size - there + SPARE_BYTES:
            raise NoRoom(
                f"The upload needs {readable(max(0, size - there))}, but the disk of region process {self.process} has "
                f"{readable(free)} free, and {readable(SPARE_BYTES)} of it are left alone: make room."
            )

    async def _require_spare(self, more: int) -> None:
        """:raises NoRoom: if ``more`` bytes would take of what is left alone: the database may be on the same disk."""
        free = await self.run_in_thread(self.free_bytes, self.blobs.root)
        if more > 0 and free < more + SPARE_BYTES:
            raise NoRoom(
                f"The disk of region process {self.process} has {readable(free)} free, and {readable(SPARE_BYTES)} of "
                "it are left alone: make room, then go on with this upload."
            )


def _keep(part: Part, data: bytes) -> None:
    """Append to a part, durably; of a part that is full now, what finishes it sees to that."""
    part.write(data)
    if not part.is_full:
        part.flush()
