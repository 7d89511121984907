"""Machines are commissioned through two real region processes over one database, whatever becomes of one of them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final
from urllib.parse import quote

import psycopg2
from attrs import define
from psycopg2.extensions import parse_dsn
from twisted.trial.unittest import SynchronousTestCase

from tests.database import Server
from tests.region.test_hardware_commissioning import OUTPUTS
from tests.system.daemons import Region, make_directory, wait_for
from tests.system.nodes import Answer, FakeNode

MACHINES: Final = 8
SILENT: Final = 3

SETTINGS: Final = "[commissioning]\nheartbeat_timeout_minutes = 0.2\n"


def outputs(number: int, script: str) -> tuple[int, bytes]:
    """What the scripts of a machine print: each machine has disks and MAC addresses of its own."""
    printed = OUTPUTS.get(script, b"")
    return 0, printed.replace(b"02:00:00:00:00:", b"02:00:00:00:%02x:" % number)


@define
class RoamingNode(FakeNode):
    """A machine that asks another region process when one does not answer, or fails."""

    other: Region

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        """As of any machine, until there is an answer that is no failure of a region's."""

        def asked() -> Answer | None:
            try:
                answer = super(RoamingNode, self).request(method, path, body, **headers)
                if answer.status < 500:
                    return answer
            except OSError:
                pass  # it was killed, or not there
            self.region, self.other = self.other, self.region
            return None

        found: Answer = wait_for(asked, f"an answer to {method} {path}")
        return found

    def run(self, outputs: Callable[[str], tuple[int, bytes]]) -> None:
        """Run all there is to run, as ``outputs`` says, and say so; every answer is 200."""
        scripts = self.scripts()
        for script in scripts:
            exit_status, printed = outputs(script["name"])
            answer = self.report(script, printed, exit_status)
            assert answer.status == 200, answer
        answer = self.signal("OK", error=f"{len(scripts)} scripts have run")
        assert answer.status == 200, answer


class ProcessesTests(SynchronousTestCase):
    def setUp(self) -> None:
        server = Server.instance()
        name = server.make_database(template="template0")
        self.addCleanup(server.drop_database, name)
        parts = parse_dsn(server.dsn_of(name))
        host = quote(parts["host"], safe="")
        url = f"postgresql://{parts['user']}@/{parts['dbname']}?host={host}&port={parts.get('port', 5432)}"
        self.directory = make_directory()
        self.addCleanup(shutil.rmtree, self.directory)
        self.one, self.two = self.region("one", url), self.region("two", url)
        self.one.start()
        self.one.make_key()
        shutil.copytree(self.one.directory / "region" / "authority", self.two.directory / "region" / "authority")
        self.two.start()
        self.two.key = self.one.key
        self.connection = psycopg2.connect(server.dsn_of(name))
        self.connection.autocommit = True
        self.addCleanup(self.connection.close)

    def region(self, name: str, url: str) -> Region:
        directory = self.directory / name
        directory.mkdir()
        directory.chmod(0o755)
        region = Region(directory, SETTINGS, top=f'name = "{name}"\ndatabase = "{url}"')
        self.addCleanup(region.kill)
        return region

    def sql(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with self.connection.cursor() as cursor:
            cursor.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []

    def node(self, number: int, hostname: str) -> RoamingNode:
        """A machine that begins to be commissioned, and first speaks to one process or the other."""
        mac = f"02:00:00:00:{number:02x}:01"
        made = FakeNode.create((self.one, self.two)[number % 2], mac, hostname=hostname, testing_scripts="none")
        return RoamingNode(made.region, made.system_id, made.key, (self.two, self.one)[number % 2])

    def nodes(self, count: int) -> list[RoamingNode]:
        return [self.node(number, f"m{number}") for number in range(count)]

    def begin(self, work: Callable[[int, RoamingNode], object], nodes: list[RoamingNode]) -> Callable[[], object]:
        """Have every machine do its work at once; what is returned waits for that, and fails as it did."""
        pool = ThreadPoolExecutor(len(nodes))
        working = pool.map(work, range(len(nodes)), nodes, timeout=240)
        pool.shutdown(wait=False)
        return lambda: list(working)

    def statuses(self) -> list[int]:
        return [status for (status,) in self.sql("SELECT status FROM node ORDER BY id")]

    def wait_for_statuses(self, expected: list[int]) -> None:
        wait_for(lambda: self.statuses() == expected, f"statuses {expected}; there are {self.statuses()}")

    def test_what_machines_sent_is_stored_and_done_once_also_when_a_region_process_is_killed_in_the_middle(
        self,
    ) -> None:
        # Each step of one kind takes a while, so that there is a middle of it.
        self.sql(
            """CREATE FUNCTION take_a_while() RETURNS trigger LANGUAGE plpgsql AS
               $$ BEGIN PERFORM pg_sleep(0.2); RETURN NEW; END $$;
               CREATE TRIGGER take_a_while BEFORE UPDATE OF cpu_count ON node FOR EACH ROW
               EXECUTE FUNCTION take_a_while()"""
        )
        nodes = self.nodes(MACHINES)
        wait = self.begin(lambda number, node: node.run(lambda script: outputs(number, script)), nodes)
        [[owner]] = self.sql("SELECT id FROM region_process WHERE name = 'one'")
        wait_for(
            lambda: (
                self.sql("SELECT count(*) FROM signal")[0][0] > MACHINES * len(OUTPUTS) // 2
                and self.sql("SELECT id FROM processing WHERE claimed_by = %s", owner)
            ),
            "process one to be in the middle of it",
        )
        self.one.kill()
        wait()
        self.wait_for_statuses([4] * MACHINES)
        for table in ("processing", "step_failure", "late_result"):
            self.assertEqual(self.sql(f"SELECT count(*) FROM {table}"), [(0,)], table)
        for number, node in enumerate(nodes):
            stored = self.sql(
                """SELECT script_name, exit_status, content FROM script_output
                   JOIN script_result ON script_result.id = script_result_id
                   JOIN script_set ON script_set.id = script_set_id JOIN node ON node.id = node_id
                   WHERE system_id = %s AND script_output.name = 'stdout'""",
                node.system_id,
            )
            self.assertGreaterEqual({name for name, _, _ in stored}, set(OUTPUTS))
            for name, exit_status, content in stored:
                self.assertEqual((exit_status, bytes(content)), outputs(number, name), name)
            changes = self.sql(
                "SELECT description FROM event WHERE node = %s AND type = 'Node changed status' ORDER BY id",
                node.system_id,
            )
            self.assertEqual(changes, [("From 'New' to 'Commissioning'",), ("From 'Commissioning' to 'Ready'",)])
            [[cpus, disks]] = self.sql(
                "SELECT cpu_count, (SELECT count(*) FROM block_device WHERE node_id = node.id) FROM node"
                " WHERE system_id = %s",
                node.system_id,
            )
            self.assertEqual((cpus, disks), (63, 2))

    def test_of_each_failure_people_see_the_script_the_step_the_error_and_what_to_do(self) -> None:
        # A fault of the region's own: the database refuses what the hook writes.
        self.sql(
            """CREATE FUNCTION poison() RETURNS trigger LANGUAGE plpgsql AS
               $$ BEGIN RAISE EXCEPTION 'poisoned' USING ERRCODE = 'unique_violation'; END $$;
               CREATE TRIGGER poison BEFORE UPDATE OF cpu_count ON node FOR EACH ROW
               WHEN (OLD.hostname = 'm1') EXECUTE FUNCTION poison()"""
        )

        def printed(number: int, script: str) -> tuple[int, bytes]:
            if number == 2 and script == "20-block-devices":
                return 0, b'{"blockdevices": ['
            return (3, b"broken") if number == 3 and script == "12-virtuality" else outputs(number, script)

        nodes = self.nodes(4)
        self.begin(lambda number, node: node.run(lambda script: printed(number, script)), nodes)()
        silent = self.nodes_that_fall_silent()
        self.wait_for_statuses([4, 2, 2, 2] + [2] * SILENT)

        poisoned = self.shown("m1")
        for said in ("hook", "11-lscpu", "UniqueViolation", "poisoned", "Report it", "node output m1 11-lscpu"):
            self.assertIn(said, poisoned)
        [correlation] = set(re.findall(r"\b[0-9a-f]{32}\b", poisoned))
        logs = "".join(region.log.read_text() for region in (self.one, self.two))
        self.assertIn(correlation, self.two.command("events", "--level", "error"))
        self.assertEqual(logs.count(f"failed [{correlation}]"), 1)
        self.assertIn("poisoned", logs.partition(correlation)[2])

        unusable = self.shown("m2")
        for said in ("20-block-devices", "cannot be used", "did not print JSON, or it was cut", "node output m2"):
            self.assertIn(said, unusable)
        self.assertNotIn("Report it", unusable)
        self.assertIn("12-virtuality (failed, exit status 3)", self.shown("m3"))
        for node in silent:
            self.assertIn("It has said nothing for", self.shown(node.system_id))
            # Two monitors were there to fail it, and one did.
            self.assertEqual(
                self.sql("SELECT count(*) FROM event WHERE node = %s AND type = 'Marking node failed'", node.system_id),
                [(1,)],
            )
        for node in silent:
            # It goes on after all, and nothing of that is lost.
            self.assertEqual(node.signal("OK", error="late").status, 200)
            wait_for(lambda node=node: "kept as late" in self.shown(node.system_id), "the word of its end")  # type: ignore[misc]

    def nodes_that_fall_silent(self) -> list[RoamingNode]:
        silent = [self.node(0x80 + number, f"silent-{number}") for number in range(SILENT)]
        for node in silent:
            self.assertEqual(node.signal("WORKING").status, 200)
        return silent

    def shown(self, name: str) -> str:
        return self.two.command("node", "show", name)
