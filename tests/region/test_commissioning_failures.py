"""What is kept of an exception, and told to people."""

from __future__ import annotations

import psycopg2

from region.commissioning.failures import failure_of
from tests.database import DatabaseTestCase


class FailureTests(DatabaseTestCase):
    async def test_a_row_that_postgresql_refuses_is_not_shown_with_what_is_in_it(self) -> None:
        try:
            await self.database.execute(
                """INSERT INTO node (system_id, hostname, architecture, memory, power_parameters)
                   VALUES ('abc123', 'x', 'amd64/generic', -1, '{"power_pass": "secret"}')"""
            )
        except psycopg2.Error as error:
            failure = failure_of(error, "c")
            self.assertIn("secret", str(error))
        self.assertIn("CheckViolation", failure.error)
        self.assertIn('violates check constraint "node_memory_check"', failure.text)
        self.assertNotIn("secret", f"{failure.error} {failure.text}")
