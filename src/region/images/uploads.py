"""Which images are uploaded: rows in PostgreSQL, from when an upload is begun until somebody deletes the image.

What counts for the next generation is, of each image, the newest upload whose content has come whole. To an import
these are one more source, which is always read and always believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from attrs import define, frozen

from region.database import Database, Session, Transaction
from region.images.naming import UploadRequest, image_of
from region.upstream.values import ANY, UPLOADS, Selection, Source, SourceRead, UpstreamImage
from rpc.manifest import Image, ImageKey

SOURCE: Final = Source(
    id=0, url=UPLOADS, keyring=b"", allow_unsigned=True, priority=1 << 31, selections=(Selection(ANY, ANY),)
)
"""The source that all uploads together are."""


class NoSuchUpload(LookupError):
    """There is no such upload (any more)."""


@frozen
class Upload:
    """An upload. ``process`` is the region process on whose disk its content is, or is to be; ``touched`` is when some
    of it last came, ``completed`` when all of it had come, verified. ``received`` is how many bytes have come that will
    be there after a loss of power, too; None if that is not known."""

    id: int
    request: UploadRequest
    process: str
    username: str
    created: datetime
    touched: datetime
    completed: datetime | None
    received: int | None = 0

    @property
    def version(self) -> str:
        """The image's version: the newer upload has the greater text."""
        return f"{self.created.astimezone(UTC):%Y%m%d}.{self.id:06}"

    @property
    def image(self) -> Image:
        """The image that it is, or is to be."""
        return image_of(self.request, self.version)


_COLUMNS: Final = (
    "id, os, release, arch, subarch, title, filetype, base_image, sha256, size, process, username, created, touched, "
    "completed, received"
)


def _upload(row: Sequence[Any]) -> Upload:
    return Upload(row[0], UploadRequest(*row[1:10]), *row[10:])


@define
class UploadStore:
    """The uploads in PostgreSQL."""

    _database: Database

    async def create(self, request: UploadRequest, process: str, username: str) -> tuple[Upload, bool]:
        """Begin an upload; and whether it is new: the same content for the same image, on the same process, is the
        upload that there is, so that one that was cut goes on."""

        async def insert(transaction: Transaction) -> tuple[Upload, bool]:
            await transaction.execute("LOCK TABLE boot_upload IN SHARE ROW EXCLUSIVE MODE")
            row = await transaction.one(
                f"""UPDATE boot_upload SET touched = now(), title = %s, base_image = %s
                    WHERE id = (SELECT max(id) FROM boot_upload WHERE (os, release, arch, subarch) = (%s, %s, %s, %s))
                      AND filetype = %s AND sha256 = %s AND size = %s AND process = %s
                    RETURNING {_COLUMNS}""",
                (request.title, request.base_image, request.os, request.release, request.arch, request.subarch,
                 request.filetype, request.sha256, request.size, process),
            )  # fmt: skip
            if row is not None:
                return _upload(row), False
            row = await transaction.one(
                f"""INSERT INTO boot_upload (os, release, arch, subarch, title, filetype, base_image, sha256, size,
                                             process, username, received)
                    VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s,
                            (SELECT coalesce(max(received), 0) FROM boot_upload WHERE sha256 = %s AND process = %s))
                    RETURNING {_COLUMNS}""",
                (request.os, request.release, request.arch, request.subarch, request.title, request.filetype,
                 request.base_image, request.sha256, request.size, process, username, request.sha256, process),
            )  # fmt: skip
            assert row is not None, "INSERT … RETURNING gives one row"
            return _upload(row), True

        return await self._database.transact(insert)

    async def get(self, upload_id: int) -> Upload:
        """One upload.

        :raises NoSuchUpload: if there is none with that id.
        """
        row = await self._database.one(f"SELECT {_COLUMNS} FROM boot_upload WHERE id = %s", (upload_id,))
        if row is None:
            raise NoSuchUpload(f"there is no upload {upload_id}: it was deleted, replaced, or has expired")
        return _upload(row)

    async def list(self) -> tuple[Upload, ...]:
        """All uploads, the oldest first."""
        rows = await self._database.query(f"SELECT {_COLUMNS} FROM boot_upload ORDER BY id")
        return tuple(map(_upload, rows))

    async def touch(self, upload: Upload, received: int) -> None:
        """Of the content so many bytes are on the disk now, whichever uploads it is the content of."""
        await self._database.execute(
            "UPDATE boot_upload SET touched = now(), received = %s WHERE sha256 = %s AND process = %s",
            (received, upload.request.sha256, upload.process),
        )

    async def complete(self, upload_id: int) -> tuple[Upload, tuple[Upload, ...]]:
        """All of the content is there, verified; the upload, and the older ones of its image, which are gone now.

        :raises NoSuchUpload: if it was deleted meanwhile.
        """

        async def change(transaction: Transaction) -> tuple[Upload, tuple[Upload, ...]]:
            row = await transaction.one(
                f"""UPDATE boot_upload SET touched = now(), completed = coalesce(completed, now()) WHERE id = %s
                    RETURNING {_COLUMNS}""",
                (upload_id,),
            )
            if row is None:
                raise NoSuchUpload(f"upload {upload_id} was deleted while its content came")
            upload = _upload(row)
            key = upload.image.key
            rows = await transaction.query(
                f"""DELETE FROM boot_upload WHERE (os, release, arch, subarch) = (%s, %s, %s, %s) AND id < %s
                    RETURNING {_COLUMNS}""",
                (key.os, key.release, key.arch, key.subarch, upload_id),
            )
            return upload, tuple(map(_upload, rows))

        return await self._database.transact(change)

    async def delete(self, key: ImageKey) -> tuple[Upload, ...]:
        """Delete all uploads of an image, also those under way; those that there were."""
        rows = await self._database.query(
            f"""DELETE FROM boot_upload WHERE (os, release, arch, subarch) = (%s, %s, %s, %s) RETURNING {_COLUMNS}""",
            (key.os, key.release, key.arch, key.subarch),
        )
        return tuple(map(_upload, rows))

    async def expire(self, process: str, hours: float) -> tuple[Upload, ...]:
        """Delete the uploads to ``process`` of which nothing has come for so long; those that there were."""
        rows = await self._database.query(
            f"""DELETE FROM boot_upload WHERE process = %s AND completed IS NULL
                  AND touched < now() - make_interval(secs => %s) RETURNING {_COLUMNS}""",
            (process, hours * 3600.0),
        )
        return tuple(map(_upload, rows))

    async def read(self, session: Session | Database | None = None) -> SourceRead:
        """The images of the uploads that are whole, as an import reads a source."""
        rows = await (session or self._database).query(
            f"""SELECT DISTINCT ON (os, release, arch, subarch) {_COLUMNS} FROM boot_upload
                WHERE completed IS NOT NULL ORDER BY os, release, arch, subarch, id DESC"""
        )
        images = [_upload(row).image for row in rows]
        offers = tuple(
            UpstreamImage(image, tuple((file.sha256, f"{UPLOADS}{file.sha256}") for file in image.files))
            for image in images
        )
        return SourceRead(SOURCE, offers)


async def contents(transaction: Transaction) -> frozenset[str]:
    """The sha256 of every upload's content, whole or not: what must not be thrown away."""
    return frozenset(row[0] for row in await transaction.query("SELECT sha256 FROM boot_upload"))
