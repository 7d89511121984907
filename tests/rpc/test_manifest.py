"""Tests of a manifest's canonical form: the bytes that its digest names."""

from __future__ import annotations

import json
import random as randomness
from hashlib import sha256

from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from rpc.manifest import FORMAT, Image, ImageFile, Manifest, parse_manifest

_WORDS = st.sampled_from(["a", "B", "a-b", "a.b", "a0", "zz"])
_TEXTS = st.sampled_from(["", "plain", 'a "quoted" name', "Žluťoučký", "\u2028", "\x00", "a\\b"])
_ATTRIBUTES = st.dictionaries(_TEXTS, _TEXTS, max_size=3)
_FILES = st.builds(
    ImageFile,
    name=_WORDS,
    ftype=_WORDS,
    sha256=st.sampled_from([sha256(bytes([number])).hexdigest() for number in range(3)]),
    size=st.integers(0, 1 << 40),
    attributes=_ATTRIBUTES,
)
_IMAGES = st.builds(
    Image,
    os=_WORDS, release=_WORDS | st.just(""), arch=_WORDS, subarch=_WORDS | st.just(""), kflavor=st.just(""),
    label=_WORDS, version=_WORDS, product=_TEXTS, content_id=_TEXTS, source=_TEXTS,
    files=st.lists(_FILES, min_size=1, max_size=3, unique_by=lambda file: file.name),
    attributes=_ATTRIBUTES,
)  # fmt: skip
_MANY = st.lists(_IMAGES, max_size=5, unique_by=lambda image: image.key)


def _written_whole(manifest: Manifest) -> bytes:
    """The canonical form by its definition: one JSON document, keys sorted, no white space, ASCII alone."""
    texts = "os", "release", "arch", "subarch", "kflavor", "label", "version", "product", "content_id", "source"
    images = [
        {name: getattr(image, name) for name in texts}
        | {"attributes": dict(image.attributes)}
        | {
            "files": [
                {"name": file.name, "ftype": file.ftype, "sha256": file.sha256, "size": file.size}
                | {"attributes": dict(file.attributes)}
                for file in image.files
            ]
        }
        for image in manifest.images
    ]
    return json.dumps({"format": FORMAT, "images": images}, sort_keys=True, separators=(",", ":")).encode("ascii")


class CanonicalTests(SynchronousTestCase):
    """What is put together from the images' parts is what would be written at once."""

    @given(_MANY)
    @settings(max_examples=100, deadline=None)
    def test_a_manifest_put_together_from_parts_is_the_document_written_whole(self, images: list[Image]) -> None:
        manifest = Manifest(images)
        self.assertEqual(manifest.canonical, _written_whole(manifest))
        self.assertEqual(parse_manifest(manifest.canonical, manifest.digest), manifest)

    @given(_MANY, st.randoms())
    @settings(max_examples=50, deadline=None)
    def test_images_and_files_are_in_the_order_of_their_values_whatever_order_they_come_in(
        self, images: list[Image], random: randomness.Random
    ) -> None:
        shuffled = [evolve(image, files=reversed(image.files)) for image in images]
        random.shuffle(shuffled)
        manifest = Manifest(shuffled)
        self.assertEqual(manifest, Manifest(images))
        self.assertEqual(list(manifest.images), sorted(images))
        for image in manifest.images:
            self.assertEqual(list(image.files), sorted(image.files))

    @given(_IMAGES, _WORDS)
    @settings(max_examples=30, deadline=None)
    def test_a_changed_image_is_written_as_it_is_now(self, image: Image, version: str) -> None:
        before = Manifest([image])
        self.assertEqual(before.canonical, _written_whole(before))
        after = Manifest([evolve(image, version=version)])
        self.assertEqual(after.canonical, _written_whole(after))
