"""A real region evaluates tags: a definition without end stops nobody, and kill -9 in the middle loses nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import psycopg2
from psycopg2.extensions import parse_dsn
from twisted.trial.unittest import SynchronousTestCase

from tests.database import Server
from tests.region.test_tags_evaluator import ENDLESS, LARGE
from tests.system.daemons import Region, make_directory, wait_for

NODES = 14


class TagsTests(SynchronousTestCase):
    def setUp(self) -> None:
        server = Server.instance()
        name = server.make_database(template="template0")
        self.addCleanup(server.drop_database, name)
        directory = make_directory()
        self.addCleanup(shutil.rmtree, directory)
        parts = parse_dsn(server.dsn_of(name))
        url = f"postgresql://{parts['user']}@/{parts['dbname']}?host={parts['host']}&port={parts.get('port', 5432)}"
        settings = "[commissioning]\ntag_timeout_seconds = 2.0\n"
        self.region = Region(directory, settings, top=f'database = "{url}"')
        self.addCleanup(self.region.kill)
        self.region.start()
        self.region.make_key()
        self.connection = psycopg2.connect(server.dsn_of(name))
        self.connection.autocommit = True
        self.addCleanup(self.connection.close)

    def sql(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with self.connection.cursor() as cursor:
            cursor.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []

    def commission(self, system_id: str, document: bytes) -> None:
        """Make a machine that was commissioned with this output of lshw."""
        [[node]] = self.sql(
            "INSERT INTO node (system_id, hostname, architecture) VALUES (%s, %s, 'amd64/generic') RETURNING id",
            system_id, system_id,
        )  # fmt: skip
        [[run]] = self.sql("INSERT INTO script_set (node_id, result_type) VALUES (%s, 0) RETURNING id", node)
        self.sql("UPDATE node SET commissioning_set_id = %s WHERE id = %s", run, node)
        [[result]] = self.sql(
            "INSERT INTO script_result (script_set_id, script_name, status) VALUES (%s, '10-lshw', 2) RETURNING id", run
        )
        self.sql(
            "INSERT INTO script_output (script_result_id, name, content) VALUES (%s, 'stdout', %s)", result, document
        )

    def evaluated(self, name: str) -> Any:
        def there() -> Any:
            tag = self.region.get(f"tags/{name}/")
            return None if tag["evaluating"] else tag

        return wait_for(there, f"tag {name} to be evaluated")

    def test_it_evaluates_what_can_be_gives_up_what_cannot_and_goes_on_after_its_end(self) -> None:
        for number in range(NODES):
            self.commission(f"node{number:02}", LARGE)
        self.region.command("tag", "create", "all", "--definition", "count(//lshw:node) = 4000")
        self.assertEqual(self.evaluated("all")["machine_count"], NODES)

        self.region.command("tag", "create", "endless", "--definition", ENDLESS)
        wait_for(lambda: self.sql("SELECT id FROM tag WHERE position > 0 AND evaluated = 0"), "it to begin")
        children = evaluators_of(self.region.pid)
        self.region.kill()
        for child in children:
            wait_for(lambda child=child: not Path(f"/proc/{child}").exists(), "the child to end")  # type: ignore[misc]
        # What is left of it need not take so long.
        self.region.write_config(self.region.config.read_text().replace("= 2.0", "= 0.4"))
        self.region.start()
        tag = self.evaluated("endless")
        self.assertEqual(tag["machine_count"], 0)
        self.assertIn("evaluating it took longer than 0.4 seconds", tag["problem"])
        shown = self.region.command("tag", "show", "endless")
        self.assertIn("problem", shown)

        # What follows is evaluated as if nothing had been.
        self.region.command("tag", "change", "all", "--definition", "count(//a) = 1")
        self.assertEqual(self.evaluated("all")["machine_count"], 0)
        self.assertEqual(self.region.get("machines/?tags=all"), [])
        self.region.stop()
        self.assertNotIn("Traceback", self.region.log.read_text())


def evaluators_of(parent: int) -> list[int]:
    """The processes that evaluate definitions for the region with the process id ``parent``."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            line = (directory / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if b"region.tags.child\x00" + str(parent).encode() in line:
            found.append(int(directory.name))
    return found
