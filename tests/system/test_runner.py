"""This very machine is commissioned, by a region and the runner as real processes, with the built-in scripts; and with
things going wrong between them."""

from __future__ import annotations

import email
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from glob import glob
from pathlib import Path
from typing import Any, ClassVar

import psycopg2
from psycopg2.extensions import parse_dsn
from twisted.trial.unittest import SynchronousTestCase

from region.metadata.userdata import runner_archive
from tests.database import Server
from tests.system.cutting import Cut, CuttingProxy
from tests.system.daemons import WAIT_SECONDS, Rack, Region, authorization, make_directory, wait_for

OLDEST = next(
    (path for version in ("3.6", "3.7", "3.8", "3.9")
     for path in glob(f"{os.path.expanduser('~')}/.pyenv/versions/{version}.*/bin/python3")),
    sys.executable,
)  # fmt: skip
"""The runner runs on old images: where an old Python is here, these tests use it."""

GATE = """\
#!/bin/sh
# --- Start MAAS 1.0 script metadata ---
# name: {name}
# script_type: commissioning
# hardware_type: {hardware}
# timeout: 00:05:00
# --- End MAAS 1.0 script metadata ---
echo $$ >> {directory}/{name}.begun
until [ -e {directory}/{name}.open ] || [ ! -e {directory} ]; do sleep 0.1; done
echo open
"""
DISK_TEST = """\
#!/bin/sh
# --- Start MAAS 1.0 script metadata ---
# name: disk-test
# script_type: testing
# hardware_type: storage
# parallel: instance
# parameters:
#   storage: {type: storage}
# --- End MAAS 1.0 script metadata ---
test -n "$1" && echo "$1" && printf 'status: passed\\n' > "$RESULT_PATH"
"""
FIRST, SECOND = "10-gate", "11-gate"
"""The first comes before what is about disks and interfaces, the second after it: between them is a third of a run."""


ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
    "LLDP_LISTEN_SECONDS": "0",
}
"""Without what is meant for the Python of the tests; and nobody is listened for, which would take a minute."""


class Node:
    """The runner of a machine, as a process."""

    def __init__(self, directory: Path, credentials: dict[str, str], port: int) -> None:
        self.directory = directory
        self.config = directory / "node.cfg"
        self.log = directory / "runner.log"
        self.archive = directory / "runner.pyz"
        self.archive.write_bytes(runner_archive())
        self.config.write_text(
            f"datasource:\n  MAAS: {{metadata_url: 'http://127.0.0.1:{port}/MAAS/metadata/',\n    "
            + ", ".join(f"{name}: {value}" for name, value in credentials.items())
            + "}\n"
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, command: list[str] | None = None) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [
                    *(command or [OLDEST, str(self.archive)]), "--config", str(self.config), "--heartbeat", "2",
                    "--directory", str(self.directory / "kept"),
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=ENVIRONMENT,
            )  # fmt: skip

    def kill(self) -> None:
        """kill -9 of the runner; what it runs goes on, as it would."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_SECONDS)

    def ended(self) -> int:
        """Wait for its end; the exit status."""
        assert self.process is not None
        process = self.process
        wait_for(lambda: process.poll() is not None, lambda: f"the runner to end:\n{self.text}")
        return process.wait()

    @property
    def text(self) -> str:
        return self.log.read_text("utf-8", "replace")


class RunnerTestCase(SynchronousTestCase):
    """A region over a database that the test can read, and this machine, which it commissions."""

    program: ClassVar[tuple[str, ...]] = ()
    """What is run as the region; the region itself if it is empty."""

    def setUp(self) -> None:
        server = Server.instance()
        name = server.make_database(template="template0")
        self.addCleanup(server.drop_database, name)
        self.directory = make_directory()
        self.addCleanup(shutil.rmtree, self.directory)
        parts = parse_dsn(server.dsn_of(name))
        url = f"postgresql://{parts['user']}@/{parts['dbname']}?host={parts['host']}&port={parts.get('port', 5432)}"
        self.region = Region(self.directory, top=f'database = "{url}"')
        self.region.program = self.program
        self.addCleanup(self.region.kill)
        self.region.start()
        self.region.make_key()
        self.connection = psycopg2.connect(server.dsn_of(name))
        self.connection.autocommit = True
        self.addCleanup(self.connection.close)
        self.gates_directory = self.directory / "gates"
        self.gates_directory.mkdir()

    def start_rack(self) -> None:
        """Have a rack take part, as it would."""
        rack = Rack(self.region, self.directory)
        self.addCleanup(rack.kill)
        rack.join()
        rack.start()

    def check_rack(self) -> None:
        """The rack is as it was, whatever went on beside it."""
        self.assertEqual([one["connected"] for one in self.region.get("rackcontrollers/")], [True])

    def add_script(self, content: str) -> None:
        status, body, _ = self.region.api("scripts/", "POST", {"script": content})
        self.assertEqual(status, 201, body)

    def make_node(self, scripts: tuple[str, ...] = (), tests: tuple[str, ...] = (), port: int = 0) -> Node:
        """This machine, to be commissioned."""
        for name, hardware in ((FIRST, "storage"), (SECOND, "node")):
            if name in scripts:
                self.add_script(GATE.format(name=name, hardware=hardware, directory=self.gates_directory))
        fields = {"mac_addresses": "52:54:00:00:00:01", "hostname": "this", "architecture": "amd64/generic"}
        if scripts:
            fields["commissioning_scripts"] = ",".join(scripts)
        fields["testing_scripts"] = ",".join(tests) or "none"
        status, body, _ = self.region.api("machines/", "POST", fields)
        self.assertEqual(status, 200, body)
        self.system_id = body["system_id"]
        self.credentials = self.region.get(f"machines/{self.system_id}/?op=get_token")
        node = Node(self.directory, self.credentials, port or self.region.http)
        self.addCleanup(node.kill)
        return node

    def machine(self) -> Any:
        return self.region.get(f"machines/{self.system_id}/")

    def wait_ready(self, node: Node) -> Any:
        """Wait until commissioning has ended; the machine, which is Ready."""
        seen = wait_for(
            lambda: (machine := self.machine())["status_name"] not in ("Commissioning", "Testing") and machine,
            "the end of commissioning",
        )
        self.assertEqual(seen["status_name"], "Ready", f"{seen['status_message']}\n{node.text}")
        return seen

    def gate(self, name: str) -> Path:
        return self.gates_directory / f"{name}.begun"

    def wait_gate(self, name: str, node: Node, times: int = 1) -> None:
        wait_for(
            lambda: self.gate(name).exists() and len(self.gate(name).read_text().split()) == times,
            lambda: f"{name} to begin:\n{node.text}",
        )

    def open_gate(self, name: str) -> None:
        (self.gates_directory / f"{name}.open").touch()

    def check_whole(self, node: Node, scripts: int) -> None:
        """Every script passed, and each told of itself once."""
        with self.connection.cursor() as cursor:
            cursor.execute("SELECT script_name, status FROM script_result ORDER BY script_name")
            found = cursor.fetchall()
            self.assertEqual({name for name, status in found if status != 2}, set(), node.text)
            self.assertEqual(len(found), scripts)
            cursor.execute("SELECT count(*) FROM script_output WHERE late_result_id IS NOT NULL")
            self.assertEqual(cursor.fetchall(), [(0,)])
            cursor.execute("SELECT count(*) FROM signal WHERE status IN ('OK', 'FAILED')")
            self.assertEqual(cursor.fetchall(), [(1,)])
        for secret in self.credentials.values():
            self.assertNotIn(secret, node.text)
        self.assertIn(f"summary: {scripts} passed, 0 failed, 0 undelivered; final signal OK", node.text)

    def user_data(self) -> Path:
        """The script that cloud-init would run, as the region gives it."""
        key = ":".join(self.credentials[name] for name in ("consumer_key", "token_key", "token_secret"))
        request = urllib.request.Request(
            f"{self.region.url}/metadata/2012-03-01/user-data", headers={"Authorization": authorization(key)}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            message = email.message_from_bytes(answer.read())
        [part] = [part for part in message.walk() if part.get_content_type() == "text/x-shellscript"]
        path = self.directory / "user_data.sh"
        content = part.get_payload(decode=True)
        assert isinstance(content, bytes)
        path.write_bytes(content)
        return path

    def builtins(self) -> list[str]:
        return [script["name"] for script in self.region.get("scripts/?type=commissioning")]

    def printed(self, script: str) -> str:
        with self.connection.cursor() as cursor:
            cursor.execute(
                """SELECT content FROM script_output JOIN script_result r ON r.id = script_result_id
                   WHERE script_name = %s AND name = 'stdout'""",
                (script,),
            )
            return b"".join(bytes(content) for (content,) in cursor.fetchall()).decode()


class RunnerTests(RunnerTestCase):
    def test_its_user_data_commissions_this_machine_and_the_region_knows_what_is_in_it(self) -> None:
        self.start_rack()
        self.add_script(DISK_TEST)
        node = self.make_node(tests=("disk-test",))
        node.start(["/bin/sh", str(self.user_data())])
        self.assertEqual(node.ended(), 0, node.text)
        machine = self.wait_ready(node)
        disks = {
            disk["name"]: disk["size"]
            for disk in json.loads(_output("lsblk", "--json", "--bytes", "--nodeps", "--output=NAME,TYPE,RO,SIZE"))[
                "blockdevices"
            ]
            if disk["type"] == "disk" and not disk["ro"] and int(disk["size"]) > 4 << 20
        }
        self.assertEqual({disk["name"]: disk["size"] for disk in machine["blockdevice_set"]}, disks)
        cards = {
            (link["ifname"], link["address"])
            for link in json.loads(_output("ip", "-json", "link"))
            if (Path("/sys/class/net") / link["ifname"] / "device").exists()
        }
        known = {(card["name"], card["mac_address"]) for card in machine["interface_set"]}
        self.assertTrue(cards <= known, f"{cards} {known}")
        processors = [line for line in _output("lscpu", "--parse").splitlines() if not line.startswith("#")]
        self.assertEqual(machine["cpu_count"], len(processors))
        total = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0])
        # The kernel keeps some of the memory for itself before it counts.
        self.assertTrue(total / 1024 <= machine["memory"] <= total / 1024 * 1.25 + 256, machine["memory"])
        self.assertEqual("virtual" in machine["tag_names"], _is_virtual())
        self.check_whole(node, len(self.builtins()) + len(disks))
        tested = [line.partition("--storage=")[2] for line in self.printed("disk-test").splitlines()]
        self.assertEqual(sorted(map(os.path.realpath, tested)), sorted(f"/dev/{name}" for name in disks))
        self.check_rack()

    def test_with_the_region_down_in_the_middle_nothing_waits_and_nothing_is_lost(self) -> None:
        node = self.make_node((FIRST, SECOND))
        node.start()
        self.wait_gate(FIRST, node)
        self.region.kill()
        self.open_gate(FIRST)
        self.wait_gate(SECOND, node)  # all that is between the two ran without a region
        wait_for(lambda: "heartbeat: attempt 1" in node.text, "a heartbeat that failed")
        self.region.start()
        self.open_gate(SECOND)
        self.assertEqual(node.ended(), 0, node.text)
        self.wait_ready(node)
        self.check_whole(node, len(self.builtins()))
        self.assertIn("Connection refused", node.text)
        if keep := os.environ.get("STANCHION_KEEP_LOG"):
            shutil.copy(node.log, keep)

    def test_killed_in_the_middle_and_behind_a_network_that_cuts_it_goes_on_where_it_was(self) -> None:
        cuts: tuple[Cut, ...] = ("", "before the answer", "", "in the request", "", "", "in the answer", "",
                                 "before the request")  # fmt: skip
        proxy = CuttingProxy(self.region.http, lambda number: cuts[number % len(cuts)])
        self.addCleanup(proxy.close)
        node = self.make_node((FIRST, SECOND), port=proxy.port)
        node.start()
        for name in (FIRST, SECOND):
            self.wait_gate(name, node)
            node.kill()
            left = int(self.gate(name).read_text())
            self.addCleanup(_kill, left)
            node.start()
            self.wait_gate(name, node, 2)
            self.open_gate(name)
        self.assertEqual(node.ended(), 0, node.text)
        self.wait_ready(node)
        self.check_whole(node, len(self.builtins()))
        self.assertGreater(proxy.cuts, 5)
        for name in (FIRST, SECOND):
            self.assertRegex(node.text, rf"{name}\.\d+ still ran; it was ended")


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it ended by itself, when its gate was opened


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_SECONDS).stdout


def _is_virtual() -> bool:
    return "hypervisor" in Path("/proc/cpuinfo").read_text()
