"""The built-in scripts, on this machine and on ones that lack a tool: what they print is what the hooks read."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from region.hardware.hooks import HOOKS, HookError
from region.scripts.builtin import read_builtins

Ended = subprocess.CompletedProcess[bytes]
DIRECTORY = Path(__file__).resolve().parents[2] / "src" / "node" / "builtin"
TOOLS = ("sh", "cat", "sed", "tr", "grep", "find", "sort", "uname", "hostname", "tail", "env")


def script(name: str) -> Path:
    return DIRECTORY / name


def is_python(path: Path) -> bool:
    return path.read_bytes().startswith(b"#!/usr/bin/env python3\n")


class BuiltinTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.bin = Path(self.mktemp()).resolve()
        self.bin.mkdir(parents=True)

    def tool(self, name: str, text: str) -> None:
        """A program of ours in the place of the real one."""
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def run_script(self, name: str, *, path: str | None = None, **environment: str) -> Ended:
        """Run it as the runner would; with our tools before those of ``path``, by default the machine's own."""
        return self.run_file(script(name), path=path, **environment)

    def run_file(self, file: Path, *, path: str | None = None, **environment: str) -> Ended:
        """As :meth:`run_script`, any file."""
        path = os.environ["PATH"] if path is None else path
        command = [sys.executable, str(file)] if is_python(file) else [str(file)]
        return subprocess.run(
            command, env={"PATH": f"{self.bin}:{path}".rstrip(":"), **environment}, stdin=subprocess.DEVNULL,
            capture_output=True, timeout=60, check=False,
        )  # fmt: skip

    def without(self, *names: str) -> str:
        """A search path of what every system has, and not of these."""
        for tool in TOOLS:
            found = shutil.which(tool)
            if found is not None:
                (self.bin / tool).symlink_to(found)
        elsewhere = "/usr/local/sbin:/usr/sbin:/sbin"  # scripts add these
        if any(shutil.which(name, path=elsewhere) for name in names):
            raise SkipTest(f"{names} cannot be hidden here: they are in {elsewhere}")
        return ""

    def parse(self, name: str, ended: Ended) -> Any:
        self.assertEqual(ended.returncode, 0, ended.stderr)
        return HOOKS[name].parse({"stdout": ended.stdout, "stderr": ended.stderr}, 0)


class ContentTests(BuiltinTests):
    def test_there_is_a_script_for_every_hook(self) -> None:
        self.assertEqual(set(read_builtins()), HOOKS.keys() | {"00-support-info"})

    def test_every_script_can_be_executed(self) -> None:
        for name in read_builtins():
            self.assertTrue(os.access(script(name), os.X_OK), name)

    def test_python_ones_are_of_a_version_that_old_images_have_and_need_no_package(self) -> None:
        for name in read_builtins():
            if not is_python(script(name)):
                continue
            tree = ast.parse(script(name).read_text(), feature_version=(3, 6))
            for one in ast.walk(tree):
                if isinstance(one, ast.Import):
                    self.assertLessEqual({alias.name for alias in one.names}, sys.stdlib_module_names, name)
                self.assertNotIsInstance(one, ast.ImportFrom)
                if isinstance(one, ast.keyword):
                    self.assertNotIn(one.arg, ("capture_output", "text"), f"{name}: Python 3.6 has no such argument")

    def test_shell_ones_are_well_formed(self) -> None:
        for name in read_builtins():
            if not is_python(script(name)):
                checked = subprocess.run(["sh", "-n", str(script(name))], capture_output=True, check=False)
                self.assertEqual((checked.returncode, checked.stderr), (0, b""), name)


class ThisMachineTests(BuiltinTests):
    """What the scripts find here is what Linux says otherwise."""

    def require(self, *tools: str) -> None:
        for tool in tools:
            if shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None:
                raise SkipTest(f"{tool} is not installed")

    def test_support_information_has_what_there_is_and_says_what_there_is_not(self) -> None:
        ended = self.run_script("00-support-info")
        self.assertEqual(ended.returncode, 0)
        self.assertIn(b"--- Kernel: uname -a ---\nLinux ", ended.stdout)
        ended = self.run_script("00-support-info", path=self.without("lspci"))
        self.assertIn(b"lspci is not installed.", ended.stdout)

    def memory(self, ended: Ended) -> None:
        found = self.parse("10-lshw", ended).memory
        kernel = int(re.findall(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text())[0]) >> 10
        self.assertTrue(kernel <= found <= kernel * 2 + 1024, f"{found} MiB, where the kernel has {kernel}")

    def test_the_memory_of_this_machine_is_found(self) -> None:
        self.require("lshw")
        self.memory(self.run_script("10-lshw"))

    def test_the_memory_of_this_machine_is_found_without_lshw(self) -> None:
        ended = self.run_script("10-lshw", path=self.without("lshw"))
        self.assertIn(b"lshw is not installed", ended.stderr)
        self.memory(ended)

    def test_the_processors_of_this_machine_are_found(self) -> None:
        self.require("lscpu")
        online = Path("/sys/devices/system/cpu/online").read_text().strip().split(",")
        count = sum(int(part.partition("-")[2] or part) - int(part.partition("-")[0]) + 1 for part in online)
        self.assertEqual(self.parse("11-lscpu", self.run_script("11-lscpu", LC_ALL="de_DE.UTF-8")).count, count)

    def test_without_lscpu_one_sentence_says_so(self) -> None:
        ended = self.run_script("11-lscpu", path=self.without("lscpu"))
        self.assertEqual((ended.returncode, ended.stdout), (1, b""))
        self.assertIn(b"lscpu is not installed on this machine", ended.stderr)

    def test_whether_this_machine_is_virtual_is_found_with_and_without_systemd(self) -> None:
        kind = self.parse("12-virtuality", self.run_script("12-virtuality")).kind
        other = self.parse("12-virtuality", self.run_script("12-virtuality", path=self.without("systemd-detect-virt")))
        is_guest = "hypervisor" in Path("/proc/cpuinfo").read_text()
        self.assertIn(kind == "none", (False, not is_guest))
        self.assertEqual(other.is_virtual, is_guest or (other.kind != "vm-other" and other.is_virtual))

    def test_what_systemd_says_is_used(self) -> None:
        for said, status in (("none", 1), ("kvm", 0)):
            self.tool("systemd-detect-virt", f"echo {said}; exit {status}")
            self.assertEqual(self.parse("12-virtuality", self.run_script("12-virtuality")).kind, said)

    def test_the_modaliases_of_this_machine_are_found(self) -> None:
        ended = self.run_script("13-modaliases")
        if ended.returncode != 0:
            self.assertIn(b"has a modalias", ended.stderr)
            return
        self.assertEqual(list(self.parse("13-modaliases", ended).names), ended.stdout.decode().split("\n")[:-1])

    def test_the_kernel_command_line_of_this_machine_is_found(self) -> None:
        found = self.parse("14-kernel-command-line", self.run_script("14-kernel-command-line"))
        self.assertEqual(found.text, Path("/proc/cmdline").read_text().strip()[:8192])
        self.assertEqual(found.boot_method == "uefi", Path("/sys/firmware/efi").exists())

    def test_the_disks_of_this_machine_are_found(self) -> None:
        found = self.parse("20-block-devices", self.run_script("20-block-devices"))
        self.assertEqual(found.problems, ())
        for disk in found.found:
            for name in disk.paths:
                directory = Path("/sys/block") / name
                self.assertEqual(disk.size, int((directory / "size").read_text()) * 512)
                self.assertTrue((directory / "device").exists() or name.startswith(("vd", "nvme", "pmem")), name)
        there = {path.name for path in Path("/sys/block").glob("[shv]d[a-z]") if (path / "ro").read_text() == "0\n"}
        named = {name for disk in found.found for name in disk.paths}
        self.assertLessEqual(
            {one for one in there if int((Path("/sys/block") / one / "size").read_text()) > 8192}, named
        )

    def test_the_network_interfaces_of_this_machine_are_found(self) -> None:
        self.require("ip")
        real = shutil.which("ip", path=os.environ["PATH"] + ":/usr/sbin:/sbin")
        self.tool("ip", f'case "$1" in link) echo "not here" >&2; exit 2 ;; esac\nexec {real} "$@"')
        ended = self.run_script("30-network-interfaces")
        found = self.parse("30-network-interfaces", ended)
        there = {path.name: path for path in Path("/sys/class/net").iterdir() if (path / "device").exists()}
        there = {name: path for name, path in there.items() if (path / "type").read_text() == "1\n"}
        self.assertEqual({one.name for one in found.found if one.mac}, set(there))
        for one in found.found:
            if one.mac and not (there[one.name] / "master").exists():
                self.assertEqual(one.mac, (there[one.name] / "address").read_text().strip())


class OtherMachineTests(BuiltinTests):
    """Machines whose tools are old, broken or missing."""

    TEXT = (
        "2: eth7: <BROADCAST,UP,LOWER_UP> mtu 1500 state UP\\n    link/ether 02:00:00:00:00:07 brd ff:ff:ff:ff:ff:ff\\n"
    )

    def test_an_ip_that_knows_no_json_is_read_as_text(self) -> None:
        for failing in ("echo 'Option \"-json\" is unknown' >&2; exit 255", "echo 'no json'"):
            self.tool("ip", f"case \"$1\" in -json) {failing} ;; link) exit 2 ;; *) printf '{self.TEXT}' ;; esac")
            found = self.parse("30-network-interfaces", self.run_script("30-network-interfaces"))
            self.assertEqual([(one.name, one.connected) for one in found.found], [("eth7", True)])

    def test_an_ip_that_does_not_work_is_said_in_one_sentence(self) -> None:
        self.tool("ip", "echo 'Cannot open netlink socket' >&2; exit 1")
        ended = self.run_script("30-network-interfaces")
        self.assertEqual((ended.returncode, ended.stdout), (1, b""))
        self.assertIn(b"Cannot open netlink socket", ended.stderr)
        self.assertIn(b"so the network interfaces are not known", ended.stderr)

    def test_interfaces_that_are_down_are_up_while_their_carrier_is_looked_at(self) -> None:
        net = self.bin / "net"
        for name, flags, carrier in (("up", "0x1003", "1"), ("cable", "0x1002", None), ("loose", "0x1002", None)):
            (net / name / "device").mkdir(parents=True)
            (net / name / "flags").write_text(flags)
            if carrier is not None:
                (net / name / "carrier").write_text(carrier)
        (net / "bridge").mkdir()
        (net / "bridge" / "flags").write_text("0x1002")
        listed = ", ".join(
            f'{{"ifname": "{name}", "address": "02:00:00:00:00:0{n}", "flags": []}}'
            for n, name in enumerate(("up", "cable", "loose", "bridge"))
        )
        self.tool(
            "ip",
            f"""case "$5" in
                up) echo "$4 up" >> {self.bin}/log; [ "$4" = cable ]; echo $((!$?)) > {net}/$4/carrier ;;
                down) echo "$4 down" >> {self.bin}/log ;;
                *) echo '[{listed}]' ;;
            esac""",
        )
        content = script("30-network-interfaces").read_text()
        content = content.replace('NET = "/sys/class/net"', f'NET = "{net}"').replace(
            "CARRIER_SECONDS = 8", "CARRIER_SECONDS = 0.3"
        )
        (self.bin / "copy").write_text(content)
        found = self.parse("30-network-interfaces", self.run_file(self.bin / "copy"))
        self.assertEqual(
            [(one.name, one.connected) for one in found.found], [("up", True), ("cable", True), ("loose", False)]
        )
        self.assertEqual(
            (self.bin / "log").read_text().split("\n"), ["cable up", "loose up", "cable down", "loose down", ""]
        )

    def test_udev_tells_what_a_disk_is_called(self) -> None:
        says = ("ID_SERIAL_SHORT=S1", "ID_MODEL_ENC='A\\x20model\\x20\\x20'", "ID_PATH=pci-1", "ID_WWN=0x5")
        self.tool("udevadm", "".join(f"echo {one}\n" for one in says))
        self.assert_udev(("A model", "S1", "0x5", "pci-1"))

    def test_a_udev_that_fails_or_prints_nonsense_leaves_the_disks(self) -> None:
        for text in ("exit 4", "printf '\\377\\376=\\n=\\n\\n'"):
            self.tool("udevadm", text)
            self.assert_udev(None)

    def assert_udev(self, expected: tuple[str, ...] | None) -> None:
        found = self.parse("20-block-devices", self.run_script("20-block-devices")).found
        if not found:
            raise SkipTest("this machine has no disk")
        if expected is not None:
            self.assertEqual((found[0].model, found[0].serial, found[0].wwn, found[0].id_path), expected)

    DOCUMENT = '<lldp><interface name=\\"eth0\\" via=\\"LLDP\\"/></lldp>'

    def neighbours(self, **tools: str) -> tuple[list[str], str]:
        """Their interfaces, and what the script says."""
        for name, text in {"ip": "echo 'not in a test' >&2; exit 1", **tools}.items():
            self.tool(name, text)
        ended = self.run_script("40-lldp", LLDP_LISTEN_SECONDS="0")
        found = self.parse("40-lldp", ended).found
        return [one.interface for one in found], ended.stderr.decode()

    def test_an_lldpd_that_runs_is_asked(self) -> None:
        self.assertEqual(
            self.neighbours(lldpcli=f'printf "{self.DOCUMENT}"', lldpd="echo started >&2; exit 9"), (["eth0"], "")
        )

    def test_where_none_runs_one_is_run(self) -> None:
        found, said = self.neighbours(
            lldpcli=f'[ "$1" = -u ] || exit 1; [ -e "$2" ] && printf "{self.DOCUMENT}"',
            lldpd='while [ "$1" != -u ]; do shift; done; : > "$2"; exec sleep 30',
        )
        self.assertEqual(found, ["eth0"])
        self.assertIn("one runs for 0 seconds", said)

    def test_where_none_can_run_there_are_no_neighbours_and_why_is_said(self) -> None:
        found, said = self.neighbours(lldpcli="exit 1", lldpd="echo 'no permission' >&2; exit 1")
        self.assertEqual(found, [])
        self.assertIn("lldpd does not work here: no permission", said)

    def test_what_an_lshw_of_no_use_prints_is_refused(self) -> None:
        self.tool("lshw", "echo Segmentation fault")
        with self.assertRaises(HookError):
            self.parse("10-lshw", self.run_script("10-lshw"))
