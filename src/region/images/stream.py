"""The stream that racks and standard simplestreams clients read, below ``/MAAS/images-stream/``.

``streams/v1/index.json`` is the current generation's, under its digest as ETag. What it points to is named by the
generation's digest, or by a file's sha256, and stays right for as long as that generation is kept. While nothing is
published the answer is 503, for an empty index would tell clients that everything was removed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Final
from uuid import uuid4

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Request

from region.database import DatabaseUnavailable
from region.images.files import (
    UNSATISFIABLE,
    FileDamaged,
    OpenFile,
    Range,
    Sender,
    examine_and_open,
    open_verified,
    parse_range,
)
from region.images.rendering import Rendering, render
from region.images.repair import images_with, remedy
from region.images.store import Generation, GenerationMoved, GenerationStore
from region.images.threads import in_thread
from rpc.blobs import BlobError, BlobStore
from rpc.fetch import RunInThread
from rpc.http_errors import WITHHELD
from rpc.locks import FairLock
from rpc.manifest import is_sha256

log = Logger()

RETRY_SECONDS: Final = 10
"""What ``Retry-After`` says."""

REPAIR_RETRY_SECONDS: Final = 30
"""What it says of a file that has to be fetched again."""

_RETRY: Final = {"Retry-After": str(RETRY_SECONDS)}
_RENDERINGS_KEPT: Final = 4
_FOR_EVER: Final = "public, max-age=31536000, immutable"
_TEXT: Final = "text/plain; charset=utf-8"
_JSON: Final = "application/json"


class _Refusal(Exception):
    """An answer that is no success: its status, its text, and further headers."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers or {}


class StreamResource(Resource):
    """The tree below ``/MAAS/images-stream/``.

    A file that is known to be damaged, or that should be there and is not, is answered with 503 and what is wrong,
    which :data:`rpc.http_errors.WITHHELD` tells from every other 503.

    :param clock: for cutting connections of clients that stall.
    :param suspect: is told of a file that the disk did not give, and why, so that it is looked at.
    :param run_in_thread: for reading files and rendering documents.
    """

    isLeaf = True

    def __init__(
        self,
        generations: GenerationStore,
        blobs: BlobStore,
        clock: IReactorTime,
        *,
        run_in_thread: RunInThread = in_thread,
        suspect: Callable[[str, str], object] = lambda sha256, why: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Twisted has no types for it
        self._generations = generations
        self._blobs = blobs
        self._clock = clock
        self._run_in_thread = run_in_thread
        self._suspect = suspect
        self._renderings: OrderedDict[int, Rendering] = OrderedDict()
        self._rendering = FairLock()
        self._manifests: OrderedDict[str, bytes] = OrderedDict()
        self._examining = FairLock()

    def render_GET(self, request: Request) -> int:
        """Answer a GET, or a HEAD, for which Twisted leaves the body out."""
        answering = Deferred.fromCoroutine(self._answer(request))
        request.notifyFinish().addErrback(lambda _: answering.cancel())
        answering.addErrback(self._failed, request)
        return NOT_DONE_YET

    async def _answer(self, request: Request) -> None:
        try:
            segments = [segment.decode("ascii") for segment in request.postpath or []]
        except UnicodeDecodeError:
            segments = []
        match segments:
            case ["streams", "v1", "index.json"]:
                await self._index(request)
            case ["generations", digest, "manifest.json"]:
                await self._manifest(request, digest)
            case ["generations", digest, "streams", "v1", name]:
                await self._products(request, digest, name)
            case ["blobs", sha256]:
                await self._blob(request, sha256)
            case _:
                raise _Refusal(404, "There is nothing here; a client starts from streams/v1/index.json.")

    async def _index(self, request: Request) -> None:
        generation = await self._generations.current()
        if generation is None:
            raise _Refusal(
                503,
                "No images were published yet: an import has to succeed first.",
                {"Retry-After": str(RETRY_SECONDS)},
            )
        if not self._is_known(request, generation.digest):
            headers = {"Cache-Control": "no-cache", "Last-Modified": _http_date(generation.published)}
            _send(request, (await self._rendered(generation)).index, _JSON, generation.digest, headers)

    async def _manifest(self, request: Request, digest: str) -> None:
        generation = await self._generation(digest)
        if not self._is_known(request, digest):
            _send(request, await self._written(generation), _JSON, digest, {"Cache-Control": _FOR_EVER})

    async def _products(self, request: Request, digest: str, name: str) -> None:
        generation = await self._generation(digest)
        document = (await self._rendered(generation)).products.get(name)
        if document is None:
            raise _Refusal(404, f"Generation {digest} has no document of that name.")
        etag = f"{digest}-{generation.number}"  # its date is that of the newest generation with this digest
        if not self._is_known(request, etag):
            _send(request, document, _JSON, etag, {"Cache-Control": "public, max-age=3600"})

    async def _generation(self, digest: str) -> Generation:
        generation: Generation | None = None
        if is_sha256(digest):
            with suppress(GenerationMoved):  # retired this very moment, it is not kept any more
                generation = await self._generations.by_digest(digest)
        if generation is None:
            raise _Refusal(404, "There is no such generation, or it is not kept any more; read the index again.")
        return generation

    async def _written(self, generation: Generation) -> bytes:
        """The manifest as bytes. All racks want it at once: who comes when it is there needs no thread."""
        found = self._manifests.get(generation.digest)
        if found is None:
            found = await self._run_in_thread(lambda: generation.manifest.canonical)
            self._manifests[generation.digest] = found
            while len(self._manifests) > _RENDERINGS_KEPT:
                self._manifests.popitem(last=False)
        return found

    async def _rendered(self, generation: Generation) -> Rendering:
        async with self._rendering:
            found = self._renderings.get(generation.number)
            if found is None:
                found = await self._run_in_thread(render, generation.manifest, generation.published)
                self._renderings[generation.number] = found
            self._renderings.move_to_end(generation.number)
            while len(self._renderings) > _RENDERINGS_KEPT:
                self._renderings.popitem(last=False)
            return found

    async def _blob(self, request: Request, sha256: str) -> None:
        if not is_sha256(sha256):
            raise _Refusal(404, "A file is named by its sha256, 64 lower-case hexadecimal digits.")
        damages = self._blobs.times_damaged(sha256)
        file = await self._open(sha256)
        try:
            if not self._is_known(request, sha256):
                # That it was replaced meanwhile does not make right what is open here.
                await self._send_file(request, file, sha256, lambda: self._blobs.times_damaged(sha256) == damages)
        finally:
            file.file.close()

    async def _open(self, sha256: str) -> OpenFile:
        try:
            file = await self._run_in_thread(open_verified, self._blobs, sha256)
            if file is None:
                # Its stamp does not say that it is right, so it is read before a byte of it is sent; one at a time.
                async with self._examining:
                    file = await self._run_in_thread(examine_and_open, self._blobs, sha256)
        except FileNotFoundError:
            raise await self._missing(sha256) from None
        except OSError as error:
            if sha256 in self._blobs.damaged:  # it was to be moved away, and the disk takes no writes
                raise await self._missing(sha256) from error
            raise self._unreadable(sha256, error) from error
        except BlobError as error:
            raise _Refusal(503, f"{error}", _RETRY) from error
        except FileDamaged as error:
            log.error("The file {sha256} was damaged on the region's disk: {reason}", sha256=sha256, reason=str(error))
            raise await self._missing(sha256) from error
        return file

    def _unreadable(self, sha256: str, error: OSError) -> _Refusal:
        """The answer about a file that the disk does not give: nobody can tell whether it is right."""
        log.error("The file {sha256} cannot be read: {error}", sha256=sha256, error=str(error))
        self._suspect(sha256, f"it could not be read: {error.strerror or error}")
        return _Refusal(503, f"The file cannot be read now: {error.strerror or error}.", _RETRY)

    async def _missing(self, sha256: str) -> _Refusal:
        """The answer about a file that is not there, or not any more."""
        damaged = self._blobs.damaged.get(sha256)
        current = await self._generations.current()
        needing = [] if current is None else images_with(current.manifest, sha256)
        if damaged is not None:
            since = datetime.fromtimestamp(damaged.found, UTC)
            text = f"was found damaged at {since:%Y-%m-%d %H:%M:%S} UTC ({damaged.reason}); {remedy(needing)}"
        elif not needing:
            return _Refusal(404, "There is no such file, or only an older generation has it: read the index again.")
        else:
            size = current.manifest.blobs[sha256] if current is not None else 0
            if not await self._run_in_thread(self._blobs.note_missing, sha256, size):
                return _Refusal(503, "The file has come this very moment; ask again.", {"Retry-After": "1"})
            text = f"is published, but is missing on this region process's disk; {remedy(needing)}"
        headers = {"Retry-After": str(REPAIR_RETRY_SECONDS), WITHHELD: _phrase(text)}
        return _Refusal(503, f"The file {text}.", headers)

    async def _send_file(self, request: Request, file: OpenFile, sha256: str, is_good: Callable[[], bool]) -> None:
        part = Range(0, file.size)
        headers = {"Accept-Ranges": "bytes", "Cache-Control": _FOR_EVER}
        asked = request.getHeader("range")
        if asked is not None and request.getHeader("if-range") in (None, f'"{sha256}"'):
            found = parse_range(asked, file.size)
            if found is UNSATISFIABLE:
                raise _Refusal(416, f"The file has {file.size} bytes.", {"Content-Range": f"bytes */{file.size}"})
            if found is not None:
                part = found
                request.setResponseCode(206)
                headers["Content-Range"] = f"bytes {part.start}-{part.end - 1}/{file.size}"
        _set_headers(request, "application/octet-stream", part.end - part.start, sha256, headers)
        if request.method != b"HEAD":
            sender = Sender(request, file.file, self._clock, self._run_in_thread)
            try:
                await sender.send(part, is_good)
            except OSError as error:
                raise self._unreadable(sha256, error) from error
        request.finish()

    def _is_known(self, request: Request, etag: str) -> bool:
        """Answer 304 if the client says that it has what has this ETag."""
        known = (request.getHeader("if-none-match") or "").split(",")
        if not {f'"{etag}"', "*"}.intersection(value.strip().removeprefix("W/") for value in known):
            return False
        request.setResponseCode(304)
        request.setHeader("ETag", f'"{etag}"')
        request.finish()
        return True

    def _failed(self, failure: Failure, request: Request) -> None:
        """Say what went wrong, to the client and, unless it was the client's doing, in the log."""
        error = failure.value
        if isinstance(error, CancelledError):
            return  # the client is gone
        if isinstance(error, _Refusal):
            if request.startedWriting:
                request.loseConnection()  # the client must see that its body is cut short
            else:
                _refuse(request, error)
            return
        reference = uuid4().hex[:12]
        path = request.path.decode("ascii", "replace")
        if isinstance(error, DatabaseUnavailable):
            log.error("{path} [{reference}]: {reason}", path=path, reference=reference, reason=str(error))
            status, text = 503, "The region cannot reach its database now."
        elif isinstance(error, FileDamaged):
            log.error("{path} [{reference}]: {reason}", path=path, reference=reference, reason=str(error))
            status, text = 503, "The file was found damaged; ask again."
        else:
            log.failure("{path} [{reference}] failed", failure, path=path, reference=reference)
            status, text = 500, "The region failed; its log says why, under this reference."
        if request.startedWriting:
            request.loseConnection()  # the client must see that its body is cut short
            return
        headers = {"X-Correlation-Id": reference, **(_RETRY if status == 503 else {})}
        _refuse(request, _Refusal(status, f"{text} ({reference})", headers))


def _refuse(request: Request, refusal: _Refusal) -> None:
    request.setResponseCode(refusal.status)
    body = f"{refusal}\n".encode()
    for name in ("Cache-Control", "ETag", "Last-Modified", "Content-Range", "Accept-Ranges"):
        request.responseHeaders.removeHeader(name.encode())
    _set_headers(request, _TEXT, len(body), "", refusal.headers)
    request.write(body)
    request.finish()


def _send(request: Request, body: bytes, content_type: str, etag: str, headers: Mapping[str, str]) -> None:
    _set_headers(request, content_type, len(body), etag, headers)
    request.write(body)
    request.finish()


def _set_headers(request: Request, content_type: str, length: int, etag: str, headers: Mapping[str, str]) -> None:
    own = {"Content-Type": content_type, "Content-Length": str(length), **({"ETag": f'"{etag}"'} if etag else {})}
    for name, value in {**own, **headers}.items():
        request.setHeader(name, value)


def _phrase(text: str) -> str:
    """``text`` as a header may have it."""
    return " ".join(text.encode("ascii", "backslashreplace").decode("ascii").split())


def _http_date(moment: datetime) -> str:
    return format_datetime(moment, usegmt=True)
