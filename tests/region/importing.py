"""What tests of imports share: images made of bytes, a reader and a fetcher that do exactly what a test says, and a
whole importer on a database of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.task import Clock

from region.images.importer import Importer
from region.images.job import ImportJob
from region.images.plan import Change
from region.images.sources import SourceStore
from region.images.store import Generation, GenerationStore
from region.upstream import DocumentSeen, Problem, Selection, Source, SourceFailed, SourceRead, UpstreamImage
from rpc.blobs import BlobStore
from rpc.fetch import Fetched, FetchFailed, Progress, Wanted
from rpc.manifest import Image, ImageFile, Manifest
from tests.database import DatabaseTestCase

reactor: Any = installed_reactor

SOURCE = "http://images.example.com/stable"
UPDATED = datetime(2026, 1, 1, tzinfo=UTC)
EVERYTHING = (Selection("*", "*"),)


def inline(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Deferred[Any]:
    """A thread that is none: the result is there at once."""
    return maybeDeferred(function, *args, **kwargs)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def file(name: str, content: bytes, ftype: str = "", **attributes: str) -> ImageFile:
    return ImageFile(name, ftype or name, sha256(content), len(content), attributes)


def image(
    release: str = "noble",
    *,
    os: str = "ubuntu",
    arch: str = "amd64",
    version: str = "20260101",
    source: str = SOURCE,
    content: bytes = b"",
    **attributes: str,
) -> Image:
    """An image of two files, a kernel of its own and a root file system that depends on ``content``."""
    name = f"{os}/{release}/{arch}/{version}".encode()
    return Image(
        os=os,
        release=release,
        arch=arch,
        subarch="generic",
        kflavor="generic",
        label="stable",
        version=version,
        product=f"com.example:{release}:{arch}",
        content_id="com.example:download",
        source=source,
        files=tuple(file(each, data) for each, data in contents_of(name, content).items()),
        attributes={"release_title": release.title(), "support_eol": "2030-01-01", **attributes},
    )


def contents_of(name: bytes, content: bytes) -> Mapping[str, bytes]:
    return {"boot-kernel": b"kernel of " + name, "squashfs": b"root of " + name + content}


def loader(arch: str = "amd64", version: str = "20260101.0") -> Image:
    attributes = {"bootloader-type": "uefi"}
    files = (file("grub2-signed", b"grub " + version.encode(), "archive.tar.xz", src_package="grub2-signed"),)
    return Image(
        "grub-efi-signed", "", arch, "", "", "stable", version, f"com.example:grub:{arch}",
        "com.example:bootloader-download", SOURCE, files, attributes,
    )  # fmt: skip


def changes(*images: Image) -> list[Change]:
    return [Change("added", each, "upstream lists it") for each in images]


class FakeReader:
    """Says what each source offers: ``offers`` has an answer, or a function that gives one, for each URL."""

    def __init__(self) -> None:
        self.offers: dict[str, Any] = {}
        self.read_with: list[tuple[Source, Mapping[str, datetime]]] = []

    def offer(self, *images: Image, url: str = SOURCE, problems: Sequence[Problem] = ()) -> None:
        """From now on ``url`` lists these images."""
        documents = DocumentSeen("index", UPDATED, "0" * 64), DocumentSeen("com.example:download", UPDATED, "1" * 64)
        self.offers[url] = lambda source: SourceRead(
            source,
            tuple(UpstreamImage(each, tuple((f.sha256, f"{url}/{f.sha256}") for f in each.files)) for each in images),
            documents=documents,
            problems=tuple(problems),
        )

    def fail(self, reason: str, url: str = SOURCE) -> None:
        """From now on ``url`` cannot be read."""
        self.offers[url] = lambda source: SourceFailed(source, reason)

    async def read(self, source: Source, accepted: Mapping[str, datetime]) -> SourceRead | SourceFailed:
        self.read_with.append((source, accepted))
        answer = self.offers[source.url](source)
        end: SourceRead | SourceFailed = await answer if isinstance(answer, Awaitable) else answer
        return end


class FakeFetcher:
    """Has every content that was made known to it, and brings it into the store unless it was told to fail."""

    def __init__(self, blobs: BlobStore) -> None:
        self.blobs = blobs
        self.contents: dict[str, bytes] = {}
        self.broken: dict[str, str] = {}
        self.fetched: list[str] = []
        self.held: Deferred[None] | None = None
        self.waiting: Deferred[None] = Deferred()
        self.cancelled = False

    def know(self, image: Image, content: bytes = b"") -> Image:
        """Have the files of an image that :func:`image` made with this ``content``."""
        name = f"{image.os}/{image.release}/{image.arch}/{image.version}".encode()
        for data in contents_of(name, content).values():
            self.contents[sha256(data)] = data
        return image

    def hold(self) -> Deferred[None]:
        """Stop in the middle of the next fetch, until the result fires; :attr:`waiting` fires when it stopped."""
        self.waiting = Deferred()
        self.held = Deferred()
        return self.held

    async def fetch(
        self, wanted: Sequence[Wanted], progress: Callable[[Progress], object]
    ) -> Mapping[str, Fetched | FetchFailed]:
        ends: dict[str, Fetched | FetchFailed] = {}
        for number, one in enumerate(wanted):
            progress(Progress(len(wanted), number, 0, 0, number * 10, 0, (one.label,)))
            if self.held is not None:
                held, self.held = self.held, None
                reactor.callLater(0, self.waiting.callback, None)  # when this waits, not before
                try:
                    await held
                except BaseException:
                    self.cancelled = True
                    raise
            self.fetched.append(one.sha256)
            if one.sha256 in self.broken or one.sha256 not in self.contents:
                reason = self.broken.get(one.sha256, "the server answered 404 Not Found")
                ends[one.sha256] = FetchFailed(one.sha256, one.url, reason)
                continue
            put(self.blobs, self.contents[one.sha256])
            ends[one.sha256] = Fetched(one.sha256, one.size, one.size, 0.1)
        return ends


def put(blobs: BlobStore, content: bytes) -> str:
    """Put a content into the store, as fetching it does."""
    name = sha256(content)
    part = blobs.open_part(name, len(content))
    try:
        part.load()
        part.restart()
        part.write(content)
        part.finish()
    finally:
        part.close()
    return name


class ImportTestCase(DatabaseTestCase):
    """A test with an importer, :attr:`importer`, that runs when the test says so."""

    def setUp(self) -> Deferred[None]:  # type: ignore[override]  # trial waits for what setUp returns
        self.clock = Clock()
        self.blobs = BlobStore(Path(self.mktemp()))
        self.addCleanup(self.blobs.close)
        self.reader = FakeReader()
        self.fetcher = FakeFetcher(self.blobs)
        self.free = 1 << 40
        self.syncing: dict[str, int] = {}
        return super().setUp().addCallback(self._set_up_importer)

    def _set_up_importer(self, _: None) -> None:
        self.sources = SourceStore(self.database, run_in_thread=inline)
        self.generations = GenerationStore(self.database, run_in_thread=inline)
        self.importer = self.make_importer()
        self.addCleanup(lambda: self.run_async(self.importer.stop()))

    def make_importer(self, generations: GenerationStore | None = None, **options: Any) -> Importer:
        """One more importer on the same database."""
        settings: dict[str, Any] = {
            "interval": 0, "at_start": False, "free_bytes": lambda path: self.free, **options
        }  # fmt: skip
        return Importer(
            self.database, self.sources, generations or self.generations, self.reader, self.fetcher, self.blobs,
            self.clock, run_in_thread=inline, syncing=lambda: self.syncing, **settings,
        )  # fmt: skip

    async def add_source(self, url: str = SOURCE, **options: Any) -> int:
        options.setdefault("keyring_data", b"\x99keys")
        options.setdefault("selections", EVERYTHING)
        return (await self.sources.create(url, **options)).id

    async def import_now(self, importer: Importer | None = None) -> ImportJob:
        """Run an import and return how it ended."""
        chosen = importer or self.importer
        if not chosen.is_started:
            chosen.start()
        return await self.end_of(await chosen.request(), chosen)

    async def end_of(self, job_id: int, importer: Importer | None = None) -> ImportJob:
        """The import when it has ended, and all that follows it."""
        await (importer or self.importer).when_idle()
        job = await self.importer.jobs.get(job_id)
        assert job is not None, f"there is no import {job_id}"
        self.assertIsNotNone(job.ended, f"the importer is idle, but import {job_id} is {job.state}")
        return job

    async def publish(self, *images: Image) -> Generation:
        """Publish these images as an import would, with their files in the store."""
        self.reader.offer(*(self.fetcher.know(each) for each in images))
        await self.import_now()
        generation = await self.generations.current()
        assert generation is not None
        return generation

    async def problems_of(self, job: ImportJob) -> tuple[Problem, ...]:
        return await self.importer.jobs.problems(job.id)

    async def manifest(self) -> Manifest:
        generation = await self.generations.current()
        assert generation is not None, "nothing was published"
        return generation.manifest
