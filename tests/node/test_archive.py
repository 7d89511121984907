"""What the region's archive can do to a machine: nothing but give it scripts. And in which order they run."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

import node.archive
from node.archive import BadArchive, Script, plan, safe_name, unpack


def entry(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name, "path": f"commissioning/{name}", "script_result_id": 1, "script_version_id": 2,
        "timeout_seconds": 60, "parallel": 0, "hardware_type": 0, "parameters": {}, "packages": {}, **changes,
    }  # fmt: skip


def archive(index: Any, *members: tuple[str, bytes] | tarfile.TarInfo) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for member in (("index.json", json.dumps(index).encode()), *members):
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
    return packed.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


class UnpackTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = self.mktemp()
        self.complaints: list[str] = []

    def unpack(self, data: bytes) -> tuple[Script, ...]:
        return unpack(data, self.directory, self.complaints.append)

    def test_scripts_are_there_and_executable(self) -> None:
        index = {"1.0": {"commissioning_scripts": [entry("a")], "testing_scripts": [entry("b", path="testing/b")]}}
        scripts = self.unpack(archive(index, ("commissioning/a", b"#!/bin/sh\n"), ("testing/b", b"x")))
        self.assertEqual([(script.kind, script.name) for script in scripts], [("commissioning", "a"), ("testing", "b")])
        self.assertEqual(Path(scripts[0].path).read_bytes(), b"#!/bin/sh\n")
        self.assertTrue(os.access(scripts[0].path, os.X_OK))

    def test_nothing_leads_out_of_the_directory(self) -> None:
        index: Any = {"1.0": {"commissioning_scripts": []}}
        hostile: list[tuple[str, bytes] | tarfile.TarInfo] = [
            ("../outside", b"x"), ("/absolute", b"x"), ("a/../../b", b"x"), ("a\\b", b"x"),
            special("link", tarfile.SYMTYPE, "/etc"), special("hard", tarfile.LNKTYPE, "index.json"),
            special("device", tarfile.CHRTYPE), special("pipe", tarfile.FIFOTYPE), ("link/passwd", b"x"),
        ]  # fmt: skip
        self.unpack(archive(index, *hostile))
        self.assertEqual(len(self.complaints), 8)
        found = [os.path.relpath(os.path.join(where, name), self.directory) for where, _, names in
                 os.walk(self.directory) for name in names]  # fmt: skip
        self.assertEqual(found, ["link/passwd"])
        self.assertFalse(os.path.islink(os.path.join(self.directory, "link")))

    def test_a_link_that_is_there_already_is_not_written_through(self) -> None:
        os.makedirs(os.path.join(self.directory, "commissioning"))
        outside = Path(self.mktemp())
        outside.write_text("mine")
        os.symlink(outside.resolve(), os.path.join(self.directory, "commissioning", "a"))
        self.unpack(archive({"1.0": {"commissioning_scripts": [entry("a")]}}, ("commissioning/a", b"theirs")))
        self.assertEqual(outside.read_text(), "mine")

    def test_an_entry_that_makes_no_sense_is_left_out_and_said(self) -> None:
        wrong = [
            {}, "x", None, entry("a/b"), entry("c", path="/etc/passwd"), entry("d", path="../x"), entry("", path="x"),
            entry("e", script_result_id="x"), entry("f", parameters=[1]), entry("g", timeout_seconds="long"),
        ]  # fmt: skip
        scripts = self.unpack(archive({"1.0": {"commissioning_scripts": [*wrong, entry("right")]}}))
        self.assertEqual([script.name for script in scripts], ["right"])
        self.assertEqual(len(self.complaints), len(wrong))

    def test_a_number_that_is_none_or_has_no_end_and_a_name_that_no_file_has_are_left_out_too(self) -> None:
        huge, endless = 10**400, float("inf")
        wrong = [
            entry("a", timeout_seconds=float("nan")), entry("b", timeout_seconds=endless),
            entry("c", timeout_seconds=huge), entry("d", script_result_id=endless), entry("e", parallel=endless),
            entry("f", parameters={"runtime": {"type": "runtime", "value": float("nan")}}), entry("\ud800"),
            entry("g", path="\ud800"), entry(".."), entry("."),
        ]  # fmt: skip
        right = [entry("-1", timeout_seconds=-1), entry("long", timeout_seconds=1e308)]
        scripts = self.unpack(archive({"1.0": {"commissioning_scripts": [*wrong, *right]}}))
        self.assertEqual([(script.name, script.timeout_seconds) for script in scripts], [("-1", 0.0), ("long", 1e308)])
        self.assertEqual(len(self.complaints), len(wrong))

    def test_a_complaint_about_an_entry_is_no_longer_than_a_line(self) -> None:
        self.unpack(archive({"1.0": {"commissioning_scripts": [{"name": "x" * 1_000_000}]}}))
        self.assertLess(len(self.complaints[0]), 500)

    def test_a_file_with_holes_that_is_larger_than_the_archive_is_left_out(self) -> None:
        info = tarfile.TarInfo("commissioning/a")
        size = str(1 << 40)
        info.pax_headers = {"GNU.sparse.realsize": size, "GNU.sparse.size": size, "GNU.sparse.map": "0,0"}
        data = archive({"1.0": {"commissioning_scripts": [entry("right")]}}, info)
        self.assertEqual([script.name for script in self.unpack(data)], ["right"])
        self.assertEqual(len(self.complaints), 1)
        self.assertIn("'commissioning/a' is left out", self.complaints[0])
        info.pax_headers = {"size": size}
        self.assertRaises(BadArchive, self.unpack, archive({"1.0": {}}, info))

    def test_a_script_may_have_the_longest_name_that_the_region_allows(self) -> None:
        name = "n" * 255
        index = {"1.0": {"commissioning_scripts": [entry(name), entry(name, script_result_id=2)]}}
        one, other = self.unpack(archive(index, (f"commissioning/{name}", b"x")))
        self.assertEqual(Path(one.path).read_bytes(), b"x")
        self.assertNotEqual(one.file_name, other.file_name)
        Path(self.directory, one.file_name + ".yaml").write_bytes(b"")
        self.assertEqual(one._replace(name="short").file_name, "short.1")

    def test_an_archive_of_more_than_any_machine_has_scripts_is_none(self) -> None:
        self.patch(node.archive, "MOST_MEMBERS", 5)
        many = [(f"commissioning/{number}", b"") for number in range(5)]
        error = self.assertRaises(BadArchive, self.unpack, archive({"1.0": {}}, *many))
        self.assertIn("more than 5 members", str(error))
        self.patch(node.archive, "LARGEST_INDEX", 100)
        error = self.assertRaises(BadArchive, self.unpack, archive({"1.0": {"x": "y" * 100}}))
        self.assertIn("more than 100 bytes", str(error))

    def test_what_is_no_archive_says_why(self) -> None:
        for data, words in (
            (b"<html>", "no tar archive"), (b"", "no tar archive"), (archive([]), "version 1.0"),
            (archive({"1.0": {"commissioning_scripts": 3}}), "no list"),
            (archive({}, )[:600], "tar"),
        ):  # fmt: skip
            self.assertIn(words, str(self.assertRaises(BadArchive, self.unpack, data)), data[:20])

    @settings(max_examples=60)
    @given(st.binary(max_size=1200) | st.builds(lambda text: archive({}, (text or "x", b"y")), st.text(max_size=40)))
    def test_any_bytes_are_an_archive_or_refused(self, data: bytes) -> None:
        try:
            self.unpack(data)
        except BadArchive:
            return

    @given(st.text(max_size=40))
    def test_a_safe_name_stays_below(self, name: str) -> None:
        found = safe_name(name)
        if found is not None:
            self.assertTrue(os.path.normpath(os.path.join("/d", found)).startswith("/d/"))

    def test_a_runtime_parameter_is_the_limit(self) -> None:
        parameters = {"runtime": {"type": "runtime", "value": 30}}
        found = self.unpack(archive({"1.0": {"testing_scripts": [entry("a", parameters=parameters)]}}))
        self.assertEqual(found[0].timeout_seconds, 30.0)


def script(name: str, hardware: int = 0, parallel: int = 0, result: int = 1, **more: Any) -> Script:
    return Script("testing", name, "/x", result, hardware_type=hardware, parallel=parallel, **more)


class PlanTests(SynchronousTestCase):
    def names(self, *scripts: Script) -> list[list[str]]:
        return [[each.name for each in batch] for batch in plan(scripts)]

    def test_by_hardware_then_name_and_the_machine_as_a_whole_last(self) -> None:
        found = self.names(script("node"), script("disk", 3), script("z-cpu", 1), script("a-cpu", 1), script("ram", 2))
        self.assertEqual(found, [["a-cpu"], ["z-cpu"], ["ram"], ["disk"], ["node"]])

    def test_instances_of_one_script_run_together(self) -> None:
        found = self.names(*(script("smart", 3, 1, number) for number in range(3)), script("badblocks", 3, 1, 9))
        self.assertEqual(found, [["badblocks"], ["smart", "smart", "smart"]])

    def test_what_may_run_with_anything_runs_last_and_fewest_packages_first(self) -> None:
        found = self.names(script("b", 1, 2, packages={"apt": ["x", "y"]}), script("c", 1, 2), script("alone", 3))
        self.assertEqual(found, [["alone"], ["c", "b"]])

    @given(
        st.lists(st.builds(script, st.sampled_from("abc"), st.integers(0, 4), st.integers(0, 2), st.integers(1, 99)))
    )
    def test_every_script_is_in_exactly_one_batch_and_what_runs_alone_is_alone(self, scripts: list[Script]) -> None:
        batches = plan(tuple(scripts))
        self.assertEqual(sorted(map(str, (each for batch in batches for each in batch))), sorted(map(str, scripts)))
        for batch in batches:
            if any(each.parallel == 0 for each in batch):
                self.assertEqual(len(batch), 1)
            if any(each.parallel == 1 for each in batch):
                self.assertEqual(len({each.name for each in batch}), 1)
