"""An upstream in a world: what it offers, well or badly; and whose signatures the region was told to trust.

What is listed under a signature that the region did not trust at the time is no offer: nothing of it may ever be
published, and nothing may go because of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from attrs import define, evolve, field

from region.answers.combine import Target
from region.images.sources import SourceStore
from region.upstream import Selection
from tests import streams
from tests.streams import Signer, Stream

CHANGES: Final[tuple[Callable[..., None], ...]] = (
    streams.new_version, streams.same_version, streams.drop_product, streams.corrupt_file, streams.truncate_file,
    streams.missing_file,
)  # fmt: skip
"""All kinds of changes that upstreams make, as ``mkstream change`` has them."""

OFFERED: Final = (
    (("noble", "amd64"), ("noble", "arm64"), ("jammy", "amd64")),
    (("noble", "amd64"), ("focal", "amd64")),
)  # fmt: skip
"""What each upstream offers at first; the first is the one that is preferred."""

TARGETS: Final = tuple(Target("ubuntu", *each) for each in sorted({*OFFERED[0], *OFFERED[1]}))
UNHEARD_OF: Final = Target("ubuntu", "warty", "amd64")
UPLOADED: Final = (Target("custom", "mine", "amd64"), Target("custom", "mine", "arm64"), Target("centos", "9", "amd64"))
"""What is uploaded."""

EVERYTHING: Final = (*TARGETS, *UPLOADED, UNHEARD_OF)

NARROW: Final = Selection("ubuntu", "noble")
WIDE: Final = Selection("*", "*")

KEYS: Final = ("First of the stream", "Second of the stream")
"""The keys that a signed upstream signs with, one after the other."""

STRANGER: Final = "Stranger to the stream"
FORGERIES: Final = ("another key", "altered", "unsigned")
FORGED: Final = "66660606"
"""The version of what is listed in what nobody may trust; newer than everything."""


@define(eq=False)
class Upstream:
    """An upstream, and what the region was told of it: whether it ``is_wanted``, with which selection, and the key
    that it is to trust (none: it need not be signed).

    ``dropped`` are the (release, arch) that it ever dropped, ``was_narrowed`` is whether its selection ever was
    :data:`NARROW`, and ``was_removed`` whether it ever was no source. ``offered_files`` are the sha256 of all that was
    listed under a signature that was trusted then.
    """

    stream: Stream
    offered: tuple[tuple[str, str], ...]
    priority: int
    is_wanted: bool = True
    selection: Selection = WIDE
    trusted: Signer | None = None
    dropped: set[tuple[str, str]] = field(factory=set)
    was_narrowed: bool = False
    was_removed: bool = False
    offered_files: set[str] = field(factory=set)
    _lately: list[Signer] = field(factory=list)

    def products(self) -> dict[str, Any]:
        """What it lists at this moment, by name."""
        return self.stream.products()

    @property
    def trust(self) -> dict[str, Any]:
        """How the region is to trust it, as fields of its source."""
        return {"allow_unsigned": True} if self.trusted is None else {"keyring_data": self.trusted.keyring}

    # Trust

    def is_offered(self, sha256: str) -> bool:
        """Whether a file was ever listed under a signature that was trusted; every file is of one that is unsigned."""
        return self.trusted is None or sha256 in self.offered_files

    def wrote(self) -> None:
        """What it lists was written, or what is trusted has changed."""
        signer = self.stream.signer
        if self.trusted is not None and self.trusted not in self._lately:
            self._lately.append(self.trusted)
        if signer is None or signer not in self._lately:
            return
        for document in self.stream.documents.values():
            for product in document["products"].values():
                for version in product["versions"].values():
                    self.offered_files.update(item["sha256"] for item in version["items"].values())

    def trusts_only(self, keyring: bytes) -> None:
        """No import is under way any more that read another keyring than this one, which is stored."""
        self._lately = [signer for signer in self._lately if signer is self.trusted or signer.keyring == keyring]

    def sign_with(self, number: int) -> None:
        """Sign with one of its keys from now on."""
        self.stream.signer = streams.signer(KEYS[number])
        self.stream.updated += timedelta(minutes=1)
        self.write()

    def trust_key(self, number: int) -> None:
        """Have the region told of one of its keys, which takes the place of the other."""
        self.trusted = streams.signer(KEYS[number])
        self.wrote()

    # Changes

    def write(self) -> None:
        """Write what it lists, signed as it signs."""
        self.stream.write()
        self.wrote()

    def change(self, how: Callable[..., None], name: str) -> None:
        """Have one product changed, well or badly."""
        product = self.products()[name]
        if how in (streams.missing_file, streams.corrupt_file, streams.truncate_file):
            _, items = max(product["versions"].items())
            if not (self.stream.root / items["items"][min(items["items"])]["path"]).exists():
                return  # it is gone already
        if how is streams.drop_product:
            self.dropped.add((product["release"], product["arch"]))
        self.stream.change(how, name)
        self.wrote()

    def list_again(self, product: int) -> None:
        """List again what it offered at first, with other files."""
        release, arch = self.offered[product % len(self.offered)]
        version = f"2027{len(self.stream.documents):04}.{int(self.stream.updated.timestamp())}"
        name = f"{self.priority} {release} {arch} {version}"
        files = {each: streams.content(f"{name} {each}") for each in ("boot-kernel", "squashfs")}
        self.stream.add(release, arch, version, files)
        self.stream.updated += timedelta(minutes=1)
        self.write()

    def break_documents(self, how: str) -> None:
        """Not be readable until it changes again, or is mended."""
        directory = self.stream.root / "streams" / "v1"
        suffix = self.stream.suffix
        index, document = directory / f"index.{suffix}", directory / f"{streams.IMAGES}.{suffix}"
        match how:
            case "gone":
                index.unlink(missing_ok=True)
            case "garbage":
                index.write_bytes(b"<html>Please log in</html>")
            case "document gone":
                document.unlink(missing_ok=True)
            case "document garbage":
                document.write_bytes(document.read_bytes()[:100] if document.exists() else b"{}")

    def forge(self, how: str, product: int) -> None:
        """Have somebody put other documents in place of its own, who cannot sign them: one product has a newer version
        in them, and the others are not listed any more. What its own say is the same as before."""
        products = self.products()
        if not products:
            return
        name = sorted(products)[product % len(products)]
        documents = copy.deepcopy(self.stream.documents)
        listed = documents[streams.IMAGES]["products"]
        _, items = max(listed[name]["versions"].items())
        files = {
            each: {**item, **self.stream.file(f"forged/{name}/{each}", b"forged " + each.encode(), item["ftype"])}
            for each, item in items["items"].items()
        }
        documents[streams.IMAGES]["products"] = {name: {**listed[name], "versions": {FORGED: {"items": files}}}}
        later = self.stream.updated + timedelta(days=1)
        forged = evolve(self.stream, documents=documents, updated=later)
        match how:
            case "another key":
                forged.signer = streams.signer(STRANGER)
                written = forged.rendered()
            case "altered":
                # What was signed is as it was, and what is read is not.
                payloads = evolve(forged, signer=None).rendered()
                written = {
                    path: _replaced(data, payloads[path.replace(".sjson", ".json")])
                    for path, data in self.stream.rendered().items()
                }
            case _:
                written = {
                    path.replace(".json", ".sjson"): data.replace(b".json", b".sjson")
                    for path, data in evolve(forged, signer=None).rendered().items()
                }
        for path, data in written.items():
            (self.stream.root / path).write_bytes(data)

    def mend_files(self) -> None:
        """Have new versions of the products whose files are not what they are said to be."""
        for name, product in sorted(self.products().items()):
            _, newest = max(product["versions"].items())
            for item in newest["items"].values():
                path = self.stream.root / item["path"]
                if not path.exists() or streams.sha256(path.read_bytes()) != item["sha256"]:
                    self.change(streams.new_version, name)
                    break


def _replaced(signed: bytes, payload: bytes) -> bytes:
    """A clear-signed document with another text, under the signature that it had."""
    head, _, _ = signed.partition(b"\n\n")
    signature = signed[signed.index(b"-----BEGIN PGP SIGNATURE-----") :]
    return head + b"\n\n" + payload.replace(b".json", b".sjson") + b"\n" + signature


def upstreams(root: Path) -> list[Upstream]:
    """The upstreams of a world, in directories below ``root``; the last one signs."""
    found = []
    for number, (offered, signer) in enumerate(zip(OFFERED, (None, streams.signer(KEYS[0])), strict=True)):
        name = f"upstream-{number}"
        stream = Stream(root / name, signer)
        for release, arch in offered:
            files = {each: streams.content(f"{name} {release} {arch} {each}") for each in ("boot-kernel", "squashfs")}
            stream.add(release, arch, files=files)
        stream.add_loader()
        upstream = Upstream(stream, offered, 2 - number, trusted=signer)
        upstream.write()
        found.append(upstream)
    return found


async def set_up(sources: SourceStore, *wanted: Upstream) -> None:
    """Have upstreams be sources, or not, as they are wanted."""
    there = {source.url: source.id for source in await sources.list()}
    for upstream in wanted:
        url, selection = upstream.stream.url, upstream.selection
        if url not in there and upstream.is_wanted:
            await sources.create(url, **upstream.trust, priority=upstream.priority, selections=[selection])
        elif url in there and not upstream.is_wanted:
            await sources.delete(there[url])
        elif url in there:
            if upstream.trusted is not None:
                await sources.update(there[url], **upstream.trust)
            for found in await sources.selections(there[url]):
                await sources.update_selection(there[url], found.id, selection)
