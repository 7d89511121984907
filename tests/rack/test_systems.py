"""What a rack says of releases: titles, uses and license keys; and that it never says that one is not there."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from rack.systems.describing import describe, validate
from rack.systems.drivers import (
    COMMISSIONING,
    DISKLESS,
    INSTALL,
    SYSTEMS,
    XINSTALL,
    IOperatingSystem,
    system_of,
)
from rpc.manifest import EMPTY, Image, ImageFile, Manifest

KEY = "AAAAA-BBBBB-CCCCC-DDDDD-12345"


def image(os: str, release: str, *files: str, **attributes: str) -> Image:
    """An image with these files; ``name=ftype`` where they differ."""
    named = [file.partition("=") for file in files or ("root-tgz",)]
    return Image(
        os=os, release=release, arch="amd64", subarch="generic", kflavor="generic", label="stable", version="20260101",
        product=f"test:{os}:{release}", content_id="test:images", source="http://upstream.example/",
        files=tuple(ImageFile(name, ftype or name, "ab" * 32, 5) for name, _, ftype in named), attributes=attributes,
    )  # fmt: skip


class TestDrivers(SynchronousTestCase):
    def test_there_is_one_for_each_system_that_the_field_knows(self) -> None:
        names = {"ubuntu", "debian", "centos", "rhel", "suse", "windows", "esxi", "custom"}
        self.assertEqual({system.name for system in SYSTEMS}, names)
        for name in [*names, "never-heard-of"]:
            self.assertTrue(verifyObject(IOperatingSystem, system_of(name)))
            self.assertEqual(system_of(name).name, name)

    def test_releases_have_the_titles_that_people_know(self) -> None:
        for os, release, title in (
            ("ubuntu", "noble", "24.04 LTS"),
            ("debian", "bookworm", "Debian 12"),
            ("centos", "centos7", "CentOS 7"),
            ("centos", "centos66", "CentOS 6.6"),
            ("rhel", "rhel8", "Red Hat Enterprise Linux 8"),
            ("rhel", "9.4", "Red Hat Enterprise Linux 9.4"),
            ("suse", "opensuse13", "openSUSE 13"),
            ("suse", "sles15-sp5", "SUSE Linux Enterprise Server 15.5"),
            ("windows", "win2012", "Windows Server 2012"),
            ("windows", "win2012hvr2", "Hyper-V Server 2012 R2"),
            ("windows", "win2016-core", "Windows Server 2016 (Core)"),
            ("windows", "win2022", "Windows Server 2022"),
            ("windows", "win11", "Windows 11"),
            ("esxi", "6.7", "VMware ESXi 6.7"),
            ("esxi", "esxi8", "VMware ESXi 8"),
            ("custom", "my-image", "my-image"),
            ("ubuntu", "zebra", "zebra"),
            ("windows", "winter", "winter"),
            ("never-heard-of", "1", "1"),
        ):
            self.assertEqual(describe(EMPTY, os, release).title, title)

    def test_what_an_image_may_be_used_for_is_told_by_its_files(self) -> None:
        live = {COMMISSIONING, DISKLESS, XINSTALL}
        for os, files, purposes in (
            ("ubuntu", ("boot-kernel", "boot-initrd", "squashfs"), live),
            ("ubuntu", ("boot-kernel", "boot-initrd", "root-image.gz"), live),
            ("ubuntu", ("boot-kernel", "boot-initrd"), {INSTALL}),
            ("ubuntu", ("boot-kernel", "squashfs"), {XINSTALL}),
            ("ubuntu", ("root-tgz",), {XINSTALL}),
            ("ubuntu", ("manifest",), set()),
            ("centos", ("root-tgz",), {XINSTALL}),
            ("centos", ("boot-kernel", "boot-initrd", "squashfs"), {XINSTALL}),
            ("windows", ("root-dd.gz",), {XINSTALL}),
            ("windows", ("pxeboot.0=bootloader", "boot.sdi=other"), {INSTALL}),
            ("esxi", ("root-dd.raw",), {XINSTALL}),
            ("custom", ("root-txz",), {XINSTALL}),
            ("never-heard-of", ("squashfs",), {XINSTALL}),
            ("never-heard-of", ("tape",), set()),
        ):
            self.assertEqual(system_of(os).purposes(image(os, "x", *files)), purposes, (os, files))


class TestDescribing(SynchronousTestCase):
    def test_what_the_stream_says_goes_before_what_a_driver_says(self) -> None:
        held = Manifest([image("ubuntu", "noble", release_title="Numbat"), image("windows", "win2022")])
        self.assertEqual(describe(held, "ubuntu", "noble").title, "Numbat")
        self.assertFalse(describe(held, "ubuntu", "noble").requires_license_key)
        self.assertTrue(describe(held, "windows", "win2022").requires_license_key)
        for said, expected in (("true", True), ("True", True), ("no", False), ("perhaps", None)):
            for os, driver in (("ubuntu", False), ("windows", True)):
                held = Manifest([image(os, "x", requires_license_key=said)])
                told = describe(held, os, "x").requires_license_key
                self.assertEqual(told, driver if expected is None else expected)

    def test_every_image_that_is_held_is_described_and_none_of_another_release(self) -> None:
        noble = image("ubuntu", "noble", "boot-kernel", "boot-initrd", "squashfs")
        described = describe(Manifest([noble, image("ubuntu", "jammy")]), "ubuntu", "noble")
        self.assertEqual(described.uses, ((noble, (COMMISSIONING, DISKLESS, XINSTALL)),))
        self.assertEqual(described.system, "Ubuntu")
        self.assertEqual(describe(EMPTY, "ubuntu", "noble").uses, ())

    names = st.text(max_size=20) | st.sampled_from([system.name for system in SYSTEMS])

    @settings(deadline=None, max_examples=60)
    @given(names, st.text(max_size=20), st.text(max_size=40))
    def test_whatever_is_asked_about_is_answered(self, os, release, key) -> None:
        described = describe(EMPTY, os, release)
        self.assertEqual(bool(described.title), bool(release))
        outcome, reason = validate(EMPTY, os, release, key)
        self.assertIn(outcome, ("valid", "invalid", "not-needed"))
        self.assertEqual(reason == "", outcome == "valid")


class TestLicenseKeys(SynchronousTestCase):
    def test_a_key_of_windows_is_five_groups_of_five(self) -> None:
        self.assertEqual(validate(EMPTY, "windows", "win2022", KEY), ("valid", ""))
        for wrong in ("", KEY[:-1], KEY + "6", KEY.replace("-", ""), KEY.replace("1", "_"), KEY + "\n", "A" * 1000):
            outcome, reason = validate(EMPTY, "windows", "win2022", wrong)
            self.assertEqual(outcome, "invalid")
            self.assertIn("five groups of five", reason)

    def test_what_needs_no_key_says_so(self) -> None:
        for os, release in (("ubuntu", "noble"), ("windows", "win2012hv"), ("esxi", "7.0")):
            self.assertEqual(validate(EMPTY, os, release, KEY), ("not-needed", f"{os}/{release} needs no license key."))

    def test_where_only_the_stream_says_that_a_key_is_needed_any_word_is_one(self) -> None:
        held = Manifest([image("appliance", "5", requires_license_key="true")])
        self.assertEqual(validate(held, "appliance", "5", "0815")[0], "valid")
        for wrong in ("", "two words", "x" * 129, "a\x00"):
            self.assertEqual(validate(held, "appliance", "5", wrong)[0], "invalid")

    def test_the_stream_can_say_that_none_is_needed(self) -> None:
        held = Manifest([image("windows", "win2022", requires_license_key="false")])
        self.assertEqual(validate(held, "windows", "win2022", KEY)[0], "not-needed")

    def test_no_reason_has_the_key_in_it(self) -> None:
        for os in ("windows", "ubuntu", "custom"):
            self.assertNotIn("s3cret", validate(EMPTY, os, "x", "s3cret")[1])
