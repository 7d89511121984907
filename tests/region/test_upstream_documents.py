"""Tests for :mod:`region.upstream.documents`, :mod:`region.upstream.products` and :mod:`region.upstream.merging`."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.upstream import Selection
from region.upstream.documents import IndexRead, ProductsRead, Unusable, date, read_index
from region.upstream.merging import merge
from region.upstream.products import MAX_TEXTS, read_products
from rpc.manifest import MANIFEST_NAME, MAX_FILE_SIZE
from tests.streams import EVERYTHING, IMAGES, LOADERS, NOW, Stream, content, rfc2822, sha256

ROOT = "http://images.example/"


def index(document: object, *, signed: bool = True) -> IndexRead:
    """The index read from a JSON value, or from bytes."""
    payload = document if isinstance(document, bytes) else json.dumps(document).encode()
    return read_index(payload, sha256=sha256(payload), root=ROOT, signed=signed)


def an_index(**entry: Any) -> dict[str, Any]:
    """An index that lists one document, with ``entry`` merged over what it says of it."""
    good = {"format": "products:1.0", "path": f"streams/v1/{IMAGES}.json", "updated": rfc2822(NOW), "products": ["a"]}
    return {"format": "index:1.0", "updated": rfc2822(NOW), "index": {IMAGES: {**good, **entry}}}


class IndexTests(SynchronousTestCase):
    """An index is believed as a whole or not; an entry of it may fail alone."""

    def unusable(self, document: object) -> str:
        """Why an index cannot be used."""
        return str(self.assertRaises(Unusable, index, document))

    def test_what_is_not_an_index_is_refused_with_the_reason(self) -> None:
        for document, reason in (
            (b"", "not JSON"),
            (b"<html><title>500</title>", "it begins with '<html>"),
            (b'{"format": "index:1.0"', "not JSON"),
            (b"\xff\xfe{}", "not UTF-8"),
            (b"[" * 100_000, "nested too deeply"),
            (b'{"format": "index:1.0", "n": ' + b"9" * 5000 + b"}", "not JSON"),
            (b'{"format": "index:1.0", "n": NaN}', "NaN is not JSON"),
            ([], "list, not an object"),
            ({"format": "products:1.0"}, "its format is 'products:1.0', not 'index:1.0'"),
            ({}, "its format is None"),
            ({"format": "index:1.0", "index": {}}, "no 'updated' date"),
            ({**an_index(), "updated": "yesterday"}, "'yesterday', which is not a date"),
            ({**an_index(), "updated": 20260101}, "no 'updated' date"),
            ({**an_index(), "updated": "Mon, 30 Nov 99999 12:00:00 +0000"}, "not a date"),
            ({**an_index(), "index": []}, "its 'index' is list"),
            ({**an_index(), "index": {}}, "lists no products document"),
            ({**an_index(), "index": {str(each): {} for each in range(1001)}}, "lists 1001 documents"),
        ):
            self.assertIn(reason, self.unusable(document))

    def test_a_name_given_twice_with_two_values_makes_an_index_ambiguous(self) -> None:
        text = json.dumps(an_index())
        self.assertIn("more than once", self.unusable(text.replace("{", '{"updated": "x", ', 1).encode()))
        entry = f'"{IMAGES}": {{"format": "products:1.0", "path": "other.json"}}, '
        self.assertIn(
            f"lists {IMAGES} more than once",
            self.unusable(text.replace('"index": {', '"index": {' + entry).encode()),
        )

    def test_an_entry_that_cannot_be_used_fails_alone(self) -> None:
        for entry, reason in (
            ({"path": "../x.json"}, "'..' part"),
            ({"path": None}, "path is None"),
            ({"path": "http://evil.example/x.json"}, "scheme"),
            ({"format": "products:2.0"}, "format is 'products:2.0'"),
            ({"format": None}, "format is None"),
            ({"products": {"a": 1}}, "not a list of names"),
            ({"updated": "never"}, "not a date"),
        ):
            document = an_index(**entry)
            document["index"]["good"] = {"format": "products:1.0", "path": "streams/v1/good.json"}
            read = index(document)
            self.assertEqual([listed.content_id for listed in read.listed], ["good"])
            self.assertEqual([failed.content_id for failed in read.failed], [IMAGES])
            self.assertIn(reason, read.failed[0].reason)

    def test_a_document_of_another_kind_is_not_our_business(self) -> None:
        document = an_index()
        document["index"]["mirrors"] = {"format": "mirrors:1.0", "path": "streams/v1/mirrors.json"}
        read = index(document)
        self.assertEqual([listed.content_id for listed in read.listed], [IMAGES])
        self.assertEqual(read.failed, ())

    def test_a_signed_index_leads_to_signed_documents_only(self) -> None:
        for path in (f"streams/v1/{IMAGES}.json", f"streams/v1/{IMAGES}.sjson"):
            [listed] = index(an_index(path=path)).listed
            self.assertEqual(listed.url, f"{ROOT}streams/v1/{IMAGES}.sjson")
        [listed] = index(an_index(), signed=False).listed
        self.assertEqual(listed.url, f"{ROOT}streams/v1/{IMAGES}.json")

    def test_dates_are_read_in_their_zone(self) -> None:
        noon = datetime(2026, 3, 4, 12, 0, tzinfo=UTC)
        for text in ("Wed, 04 Mar 2026 12:00:00 +0000", "Wed, 04 Mar 2026 13:00:00 +0100",
                     "Wed, 04 Mar 2026 12:00:00 -0000", "4 Mar 2026 12:00 GMT"):  # fmt: skip
            self.assertEqual(date(text, "it"), noon)

    @settings(deadline=None)
    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["format", "path", "updated", "products", "a"]), inner, max_size=4)
            ),
        )
    )
    def test_no_entry_whatever_breaks_more_than_itself(self, entry: object) -> None:
        document = an_index()
        document["index"]["odd"] = entry
        try:
            read = index(document)
        except Unusable as error:
            self.assertIn("not JSON", str(error))  # NaN or Infinity
            return
        self.assertIn(IMAGES, [listed.content_id for listed in read.listed])


class ProductsCase(SynchronousTestCase):
    """A stream to spoil and to read."""

    def setUp(self) -> None:
        self.stream = Stream(Path(self.mktemp()).absolute())
        self.product = self.stream.add()
        self.name = "com.example.stable:v3:boot:noble:amd64:ga"

    def read(self, content_id: str = IMAGES, edit: Callable[[str], str] = str, **source: Any) -> ProductsRead:
        """The document as it is read, its JSON text edited by ``edit``."""
        rendered = self.stream.rendered()[f"streams/v1/{content_id}.json"]
        payload = edit(rendered.decode()).encode()
        return read_products(
            payload, sha256=sha256(payload), root=ROOT, content_id=content_id, source=self.stream.source(**source)
        )

    def broken(self, reason: str, *, file: str = "", edit: Callable[[str], str] = str) -> None:
        """The one product is broken for this reason, and another one is not."""
        self.stream.add("jammy")
        read = self.read(edit=edit)
        self.assertEqual([offer.image.release for offer in read.images], ["jammy"])
        [entry] = read.broken
        self.assertEqual(entry.product, self.name)
        self.assertIn(reason, entry.reason)
        errors = [problem for problem in read.problems if problem.severity == "error"]
        self.assertEqual({(error.product, error.file) for error in errors}, {(self.name, file)})
        self.assertTrue(any(reason in error.reason for error in errors), errors)


class BadProductTests(ProductsCase):
    """One bad product is broken, and says where and why; the others are read."""

    def test_a_bad_entry_of_a_file_names_product_version_and_file(self) -> None:
        digest = "0" * 64
        for spoil, reason in (
            ({"sha256": None}, "sha256 is None"),
            ({"sha256": "abc"}, "sha256 is 'abc'"),
            ({"sha256": digest + "\n"}, "sha256 is "),
            ({"size": -1}, "its size is -1"),
            ({"size": MAX_FILE_SIZE + 1}, f"its size is {MAX_FILE_SIZE + 1}, not a number of bytes"),
            ({"size": 10**3000}, "its size is a number of 3001 digits"),
            ({"size": 1.5}, "its size is 1.5"),
            ({"size": 1e400}, "its size is"),
            ({"size": True}, "its size is True"),
            ({"size": "9" * 40}, "its size is 999"),
            ({"size": "-1"}, "its size is -1"),
            ({"size": None}, "its size is None"),
            ({"path": "/etc/shadow"}, "is absolute"),
            ({"path": "a/../../b"}, "'..' part"),
            ({"path": "a\\b"}, "backslash"),
            ({"path": "%2e%2e/b"}, "'..' part"),
            ({"path": "http://evil.example/x"}, "scheme"),
            ({"path": 5}, "path is 5, not text"),
            ({"ftype": "../x"}, "ftype is '../x'"),
            ({"ftype": None}, "ftype is None"),
            ({"kpackage": "a\0b"}, "control character"),
            ({"kpackage": "\ud800"}, "control character"),
            ({"kpackage": "k" * MAX_TEXTS}, f"more than {MAX_TEXTS}; the longest is 'kpackage'"),
        ):
            self.setUp()
            self.stream.item("squashfs").update(spoil)
            if spoil == {"size": 1e400}:
                self.assertRaises(Unusable, self.read)  # Infinity is not JSON
                continue
            self.broken(reason, file="squashfs")
            [entry] = self.read().broken
            self.assertEqual((entry.version, entry.key), ("20260101", entry.key))
            self.assertEqual(entry.key and entry.key.release, "noble")

    def test_every_field_that_makes_a_file_must_be_there(self) -> None:
        for field in ("sha256", "size", "path", "ftype"):
            self.setUp()
            del self.stream.item("squashfs")[field]
            self.broken(f"it has no '{field}'", file="squashfs")

    def test_every_bad_file_is_named(self) -> None:
        for name in ("boot-initrd", "squashfs"):
            del self.stream.item(name)["sha256"]
        read = self.read()
        self.assertEqual(sorted(problem.file for problem in read.problems), ["boot-initrd", "squashfs"])
        self.assertEqual(len(read.broken), 1)

    def test_a_product_that_does_not_say_what_it_is_is_broken(self) -> None:
        for field in ("os", "arch", "label"):
            self.setUp()
            del self.product[field]
            self.broken(f"it has no '{field}'")
            self.assertEqual([entry.key for entry in self.read().broken], [None])

    def test_a_product_without_release_that_is_no_boot_loader_is_broken(self) -> None:
        del self.product["release"]
        self.broken("neither a 'release' nor a 'bootloader-type'")

    def test_a_product_whose_names_cannot_be_directories_is_broken(self) -> None:
        for field, value in (("os", "../x"), ("release", "a/b"), ("arch", ".x"), ("label", "a b"), ("subarch", "\n")):
            self.setUp()
            self.product[field] = value
            self.broken(field)

    def test_a_product_that_no_rack_could_keep_is_broken(self) -> None:
        self.product["os"] = MANIFEST_NAME
        self.broken("its os is 'manifest.json', which racks call something else")

    def test_a_product_with_more_text_than_racks_can_tell_is_broken(self) -> None:
        self.product["release_title"] = "Noble" * MAX_TEXTS
        self.broken(f"more than {MAX_TEXTS}; the longest is 'release_title'")
        self.setUp()
        self.product |= {f"field-{number}": "" for number in range(MAX_TEXTS // 6)}
        self.broken(f"more than {MAX_TEXTS}")

    def test_a_product_of_the_wrong_shape_is_broken(self) -> None:
        def version(value: object) -> dict[str, object]:
            return {**self.product, "versions": {"20260101": value}}

        for make, reason in (
            (lambda: [], "it is list"),
            (lambda: "x", "it is str"),
            (lambda: {**self.product, "versions": []}, "'versions' is list"),
            (lambda: {**self.product, "versions": {}}, "lists no versions"),
            (lambda: version([]), "the version is list"),
            (lambda: version({}), "lists no files"),
            (lambda: version({"items": []}), "'items' is list"),
            (lambda: version({"items": {"squashfs": 7}}), "the entry is int"),
        ):
            self.setUp()
            self.stream.products()[self.name] = make()
            read = self.read()
            self.assertEqual((read.images, len(read.broken), len(read.problems)), ((), 1, 1))
            self.assertIn(reason, read.broken[0].reason)

    def test_aliases_that_lead_nowhere_break_their_product_only(self) -> None:
        self.product["crsn"] = "nowhere"
        self.stream.documents[IMAGES]["_aliases"] = {"crsn": {"here": {"region": "x"}}}
        self.broken("aliases cannot be expanded")

    def test_aliases_without_end_break_their_product_only(self) -> None:
        self.product["sub"] = {"loop": "a"}
        self.stream.documents[IMAGES]["_aliases"] = {"loop": {"a": {"inner": {"loop": "a"}}}}
        self.broken("aliases cannot be expanded")

    def test_a_name_given_twice_with_two_values_breaks_its_product_only(self) -> None:
        digest = self.stream.item("squashfs")["sha256"]

        def twice(text: str) -> str:
            return text.replace(f'"sha256": "{digest}"', f'"sha256": "{digest}", "sha256": "{"0" * 64}"')

        self.broken("gives 'sha256' more than once", file="squashfs", edit=twice)

    def test_a_version_given_twice_with_two_contents_breaks_its_product_only(self) -> None:
        def twice(text: str) -> str:
            return text.replace('"20260101": {', '"20260101": {"items": {}}, "20260101": {', 1)

        self.broken("version 20260101 is listed more than once", edit=twice)

    def test_a_name_given_twice_with_one_value_is_no_problem(self) -> None:
        read = self.read(edit=lambda text: text.replace('"os": "ubuntu"', '"os": "ubuntu", "os": "ubuntu"'))
        self.assertEqual((len(read.images), read.problems), (1, ()))

    def test_names_that_nobody_could_show_or_store_are_refused_and_shown_escaped(self) -> None:
        bad = "com.example\0\x1b[31m\ud800"
        self.stream.products()[bad] = self.stream.products().pop(self.name)
        read = self.read()
        [entry], [problem] = read.broken, read.problems
        self.assertEqual(problem.product, r"com.example\x00\x1b[31m\ud800")
        self.assertTrue(problem.reason.isprintable() and entry.reason.isprintable())

    def test_an_absurdly_long_name_is_refused_and_cut(self) -> None:
        self.stream.products()["x" * 5000] = self.stream.products().pop(self.name)
        read = self.read()
        self.assertIn("5000 characters long", read.broken[0].reason)
        self.assertLess(len(read.problems[0].product), 1000)

    def test_a_bad_product_that_is_not_selected_is_not_mentioned(self) -> None:
        del self.stream.item("squashfs")["sha256"]
        self.stream.add("jammy")
        read = self.read(selections=(Selection("ubuntu", "jammy"),))
        self.assertEqual((len(read.images), read.broken, read.problems), (1, (), ()))

    @settings(deadline=None, max_examples=300)
    @given(
        st.lists(st.sampled_from(["versions", "20260101", "items", "squashfs"]), max_size=4),
        st.sampled_from(["os", "arch", "versions", "20260101", "items", "squashfs", "size", "path", "sha256", "ftype"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=4),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(st.sampled_from(["items", "versions", "size", "x"]), inner, max_size=3)
            ),
            max_leaves=6,
        ),
    )
    def test_no_value_anywhere_breaks_more_than_its_product(self, where: list[str], name: str, value: object) -> None:
        self.setUp()
        self.stream.add("jammy")
        tree: Any = self.product
        for step in where:
            if isinstance(tree, dict) and isinstance(tree.get(step), dict):
                tree = tree[step]
        tree[name] = value
        read = self.read()
        releases = {offer.image.release for offer in read.images}
        self.assertIn("jammy", releases)
        for offer in read.images:
            self.assertEqual({digest for digest, _ in offer.urls}, {file.sha256 for file in offer.image.files})
            self.assertTrue(all(url.startswith(ROOT) for _, url in offer.urls))
        if "noble" not in releases and not read.broken:
            self.assertEqual(self.product.get("os", "ubuntu"), value)


class BadDocumentTests(ProductsCase):
    """A products document that cannot be believed is refused as a whole."""

    def test_what_is_not_a_products_document_is_refused(self) -> None:
        for change, reason in (
            ({"format": "index:1.0"}, "its format is 'index:1.0'"),
            ({"updated": None}, "no 'updated' date"),
            ({"updated": "soon"}, "not a date"),
            ({"products": []}, "'products' is list"),
            ({"products": None}, "'products' is NoneType"),
        ):
            self.setUp()
            self.stream.documents[IMAGES].update(change)
            self.assertIn(reason, str(self.assertRaises(Unusable, self.read)))

    def test_a_document_of_another_name_than_the_index_has_is_refused_and_worth_another_look(self) -> None:
        self.stream.documents[IMAGES]["content_id"] = "other"
        error = self.assertRaises(Unusable, self.read)
        self.assertIn("'other'", str(error))
        self.assertTrue(error.torn)


class GoodProductTests(ProductsCase):
    """What a document offers, as images."""

    def test_that_a_license_key_is_needed_is_kept_whether_it_is_said_as_a_text_or_as_a_truth_value(self) -> None:
        for said, text, needed in ((True, "True", True), (False, "False", False), ("true", "true", True),
                                   ("perhaps", "perhaps", None), (None, None, None), (3, "3", None)):  # fmt: skip
            for of in ("product", "version"):
                self.setUp()
                product = self.stream.documents[IMAGES]["products"][self.name]
                (product if of == "product" else product["versions"]["20260101"])["requires_license_key"] = said
                [offer] = self.read().images
                self.assertEqual(dict(offer.image.attributes).get("requires_license_key"), text)
                self.assertIs(offer.image.requires_license_key, needed)

    def test_an_image_has_everything_upstream_says_of_it(self) -> None:
        self.stream.item("boot-kernel").update(kpackage="linux-generic", md5="x", sha512="y")
        [offer] = self.read().images
        image = offer.image
        self.assertEqual(str(image.key), "ubuntu/noble amd64/ga-24.04/generic (stable)")
        self.assertEqual((image.version, image.product, image.content_id), ("20260101", self.name, IMAGES))
        self.assertEqual(image.source, self.stream.url)
        self.assertEqual(
            dict(image.attributes),
            {"release_title": "noble LTS", "subarches": "generic,ga-24.04", "support_eol": "2029-05-31",
             "version": "24.04"},
        )  # fmt: skip
        files = {file.name: file for file in image.files}
        self.assertEqual(set(files), {"boot-kernel", "boot-initrd", "squashfs"})
        kernel = content("noble amd64 20260101 boot-kernel")
        self.assertEqual((files["boot-kernel"].sha256, files["boot-kernel"].size), (sha256(kernel), len(kernel)))
        self.assertEqual(files["boot-kernel"].attributes, (("kpackage", "linux-generic"),))
        self.assertEqual(dict(offer.urls)[sha256(kernel)], f"{ROOT}noble/amd64/20260101/boot-kernel")

    def test_the_password_of_a_source_is_in_no_image_and_in_no_problem(self) -> None:
        self.stream.item("boot-kernel")["ftype"] = "strange"
        self.stream.add("jammy")["versions"]["20260101"]["items"] = {}
        read = self.read(url="http://someone:secret@images.example.com/stable/")
        [offer] = read.images
        self.assertEqual(offer.image.source, "http://images.example.com/stable/")
        self.assertEqual({problem.source for problem in read.problems}, {offer.image.source})

    def test_only_the_newest_version_in_the_order_of_strings_is_offered(self) -> None:
        for version in ("20260101.1", "20260101_01", "20251231", "9"):
            self.stream.add(version=version)
            [offer] = self.read().images
            self.assertEqual(offer.image.version, max(self.product["versions"]))
        self.assertEqual(offer.image.version, "9")

    def test_an_older_version_may_be_bad(self) -> None:
        del self.stream.item("squashfs")["sha256"]
        self.stream.add(version="20260202")
        read = self.read()
        self.assertEqual((len(read.images), read.broken, read.problems), (1, (), ()))

    def test_a_date_that_changed_makes_no_other_image(self) -> None:
        before = self.read()
        self.stream.updated = NOW.replace(hour=13)
        self.product["updated"] = rfc2822(self.stream.updated)
        self.assertEqual(self.read().images, before.images)
        self.assertNotEqual(self.read().updated, before.updated)

    def test_attributes_are_inherited_from_the_document_and_given_by_the_version(self) -> None:
        self.stream.documents[IMAGES]["os"] = self.product.pop("os")
        self.product["versions"]["20260101"]["label"] = "daily"
        [offer] = self.read().images
        self.assertEqual((offer.image.os, offer.image.label), ("ubuntu", "daily"))

    def test_aliases_are_expanded(self) -> None:
        self.product["place"] = "here"
        self.stream.documents[IMAGES]["_aliases"] = {"place": {"here": {"region": "north"}}}
        [offer] = self.read().images
        self.assertEqual(offer.image.attribute("region"), "north")

    def test_an_unknown_ftype_is_kept_and_reported(self) -> None:
        self.stream.item("squashfs")["ftype"] = "hologram"
        read = self.read()
        [offer], [problem] = read.images, read.problems
        self.assertIn("hologram", [file.ftype for file in offer.image.files])
        self.assertEqual((problem.severity, problem.product, problem.file), ("warning", self.name, "squashfs"))
        self.assertIn("'hologram' is not known", problem.reason)

    def test_sizes_as_text_and_digests_in_capitals_are_read(self) -> None:
        item = self.stream.item("squashfs")
        item.update(size=str(item["size"]), sha256=item["sha256"].upper())
        [offer] = self.read().images
        self.assertIn((item["sha256"].lower(), 300), [(file.sha256, file.size) for file in offer.image.files])

    def test_a_boot_loader_has_no_release(self) -> None:
        self.stream.add_loader()
        [offer] = self.read(LOADERS).images
        self.assertTrue(offer.image.is_bootloader)
        self.assertEqual(offer.image.attribute("bootloader-type"), "uefi")
        self.assertEqual(offer.image.attribute("arches"), "amd64, i386")

    def test_products_listed_and_read_are_told_so_that_they_can_be_compared(self) -> None:
        self.stream.add("jammy")
        read = self.read(selections=())
        self.assertEqual(read.images, ())
        self.assertEqual(len(read.products), 2)


class SelectionTests(ProductsCase):
    """Which products are kept."""

    def releases(self, *selections: Selection) -> set[tuple[str, str]]:
        """Release and architecture of what is kept."""
        images = [offer.image for offer in self.read(selections=selections).images]
        return {(image.release, image.arch) for image in images}

    def test_each_field_selects_exactly_or_with_a_star(self) -> None:
        self.stream.add("jammy", "arm64", subarch="ga-22.04", subarches="generic, ga-22.04", label="daily")
        noble, jammy = ("noble", "amd64"), ("jammy", "arm64")
        for selection, wanted in (
            (Selection("*", "*"), {noble, jammy}),
            (Selection("ubuntu", "noble"), {noble}),
            (Selection("ubuntu", "nob*"), set()),
            (Selection("centos", "*"), set()),
            (Selection("*", "*", arches=("arm64",)), {jammy}),
            (Selection("*", "*", arches=("arm64", "amd64")), {noble, jammy}),
            (Selection("*", "*", arches=()), set()),
            (Selection("*", "*", labels=("daily",)), {jammy}),
            (Selection("*", "*", subarches=("ga-24.04",)), {noble}),
            (Selection("*", "*", subarches=("ga-22.04",)), {jammy}),
            (Selection("*", "*", subarches=("generic",)), {noble, jammy}),
            (Selection("*", "*", subarches=("xgene",)), set()),
        ):
            self.assertEqual(self.releases(selection), wanted, selection)

    def test_any_of_several_selections_selects(self) -> None:
        self.stream.add("jammy")
        self.stream.add("focal")
        found = self.releases(Selection("ubuntu", "noble"), Selection("ubuntu", "focal"))
        self.assertEqual(found, {("noble", "amd64"), ("focal", "amd64")})

    def test_boot_loaders_come_with_the_architectures_that_are_selected(self) -> None:
        self.stream.add_loader("amd64")
        self.stream.add_loader("arm64")
        for arch, loaders in (("amd64", ["amd64"]), ("i386", ["amd64", "arm64"]), ("ppc64el", [])):
            read = self.read(LOADERS, selections=(Selection("ubuntu", "noble", arches=(arch,)),))
            self.assertEqual([offer.image.arch for offer in read.images], loaders)

    def test_an_image_is_selected_if_its_product_was(self) -> None:
        self.stream.add_loader()
        self.stream.add("jammy", "arm64", subarch="ga-22.04", subarches="generic, ga-22.04", label="daily")
        every = [offer.image for id_ in (IMAGES, LOADERS) for offer in self.read(id_).images]
        self.assertEqual(len(every), 3)
        for selection in (
            *EVERYTHING,
            Selection("ubuntu", "noble"),
            Selection("*", "*", arches=("i386", "arm64")),
            Selection("*", "*", subarches=("generic",), labels=("daily",)),
        ):
            source = self.stream.source(selections=(selection,))
            read = [
                offer.image for id_ in (IMAGES, LOADERS) for offer in self.read(id_, selections=(selection,)).images
            ]
            self.assertEqual([image for image in every if source.selects(image)], read)


class MergeTests(ProductsCase):
    """The same image offered more than once."""

    def test_the_newest_version_is_used_with_a_warning(self) -> None:
        self.stream.add(version="20260202", product="zz.other")
        images, broken, problems = merge(self.read().images)
        self.assertEqual([offer.image.product for offer in images], ["zz.other"])
        self.assertEqual(broken, [])
        [problem] = problems
        self.assertEqual((problem.severity, problem.product), ("warning", self.name))
        self.assertIn("zz.other has the newer version 20260202", problem.reason)

    def test_the_same_content_twice_is_no_problem(self) -> None:
        self.stream.add(product="zz.other")
        images, broken, problems = merge(self.read().images)
        self.assertEqual(([offer.image.product for offer in images], broken, problems), ([self.name], [], []))

    def test_two_contents_of_one_version_cannot_be_used(self) -> None:
        self.stream.add(product="zz.other", files={"squashfs": b"other"})
        images, broken, problems = merge(self.read().images)
        self.assertEqual(images, [])
        self.assertEqual([entry.product for entry in broken], [self.name, "zz.other"])
        self.assertEqual([problem.severity for problem in problems], ["error"])
        self.assertIn("with different files", problems[0].reason)

    def test_one_product_name_twice_in_a_document_is_both_read(self) -> None:
        def twice(text: str) -> str:
            product = json.dumps({**self.product, "versions": {"20270101": self.product["versions"]["20260101"]}})
            return text.replace('"products": {', f'"products": {{"{self.name}": {product}, ', 1)

        images, _, problems = merge(self.read(edit=twice).images)
        self.assertEqual([offer.image.version for offer in images], ["20270101"])
        self.assertEqual(len(problems), 1)

    def test_one_product_name_for_two_images_breaks_both(self) -> None:
        def twice(text: str) -> str:
            product = json.dumps({**self.product, "release": "zesty"})
            return text.replace('"products": {', f'"products": {{"{self.name}": {product}, ', 1)

        read = self.read(edit=twice)
        self.assertEqual(read.images, ())
        self.assertEqual({entry.key and entry.key.release for entry in read.broken}, {"noble", "zesty"})
        [problem] = read.problems
        self.assertEqual((problem.severity, problem.product), ("error", self.name))
        self.assertIn("listed more than once", problem.reason)

    @settings(deadline=None)
    @given(st.data())
    def test_the_order_of_the_offers_does_not_matter(self, data: st.DataObject) -> None:
        self.setUp()
        self.stream.add(version="20260202", product="zz.other")
        self.stream.add(version="20260202", product="aa.other", support_eol="2030-01-01")
        self.stream.add("jammy", product="jj", files={"squashfs": b"one"})
        self.stream.add("jammy", product="kk", files={"squashfs": b"two"})
        offers = list(self.read().images)
        self.assertEqual(merge(data.draw(st.permutations(offers))), merge(offers))
