"""How fast an import and a sync move bytes, and what they need, beside ``curl | openssl`` and ``sstream-mirror``.

Region and rack are real processes, the files come from nginx, and everything ends on disk. The yardstick reads the same
files from the same nginx, one after another, hashes them with openssl and writes them with tee.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psycopg2

from bench.servers import nginx, program
from bench.table import Figure
from region.cli.local import embedded_dsn
from tests.system.daemons import BIN, Rack, Region, wait_for

MIB = 1 << 20


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def yardstick(url: str, paths: list[str], target: Path) -> float:
    """Seconds for ``curl | tee | openssl dgst -sha256`` over each path, and then for the disk to have it all."""
    curl, tee, openssl = program("curl"), program("tee"), program("openssl")

    def fetch() -> None:
        target.mkdir()
        for number, path in enumerate(paths):
            fetching = subprocess.Popen([curl, "-sf", f"{url}/{path}"], stdout=subprocess.PIPE)
            writing = subprocess.Popen([tee, target / str(number)], stdin=fetching.stdout, stdout=subprocess.PIPE)
            hashing = subprocess.Popen([openssl, "dgst", "-sha256"], stdin=writing.stdout, stdout=subprocess.DEVNULL)
            for pipe in (fetching.stdout, writing.stdout):
                assert pipe is not None
                pipe.close()
            if fetching.wait() or writing.wait() or hashing.wait():
                raise RuntimeError(f"curl | openssl failed on {path}")
        subprocess.run(["sync", "-f", target], check=True)

    seconds = timed(fetch)
    shutil.rmtree(target)
    return seconds


def mirror(url: str, keyring: Path | None, target: Path) -> tuple[float, float]:
    """Seconds for sstream-mirror to copy the stream, and until the disk has it as well (it does not see to that)."""
    index = "streams/v1/index.sjson" if keyring else "streams/v1/index.json"
    trust = ["--keyring", str(keyring)] if keyring else ["--no-verify"]
    command: list[str | Path] = [BIN / "sstream-mirror", *trust, "--max", "1", f"{url}/{index}", target]
    seconds = timed(lambda: subprocess.run(command, check=True, capture_output=True))
    more = timed(lambda: subprocess.run(["sync", "-f", target], check=True))
    shutil.rmtree(target)
    return seconds, seconds + more


def job_seconds(region: Region, number: int) -> float:
    """From the begin of an import to its end, seconds: from the database, as the API's times are whole seconds."""
    with closing(psycopg2.connect(embedded_dsn(region.directory / "region" / "postgres"))) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT extract(epoch FROM ended - started) FROM import_job WHERE id = %s", (number,))
        [(seconds,)] = cursor.fetchall()
    return float(seconds)


def measure(stream: Path, keyring: Path | None, scratch: Path, rounds: int) -> Iterator[Figure]:
    """The figures for one stream on disk, which must be large for them to mean something."""
    files = [path for path in stream.rglob("*") if path.is_file() and _is_content(path.relative_to(stream))]
    paths = [str(path.relative_to(stream)) for path in files]
    size = sum(path.stat().st_size for path in files)
    stick: list[float] = []
    mirrored: list[tuple[float, float]] = []
    imported: list[float] = []
    synced: list[float] = []
    memory: list[tuple[int, int]] = []
    with nginx(scratch / "nginx", f"location / {{ root {stream}; }}") as upstream:
        for number in range(rounds):
            stick.append(yardstick(upstream, paths, scratch / "stick"))
            imports, syncs, grown = _import_and_sync(upstream, keyring, scratch / str(number))
            imported.append(imports)
            synced.append(syncs)
            memory.append(grown)
            mirrored.append(mirror(upstream, keyring, scratch / "mirror"))
            sys.stderr.write(
                f"  round {number + 1}: curl|openssl {stick[-1]:.2f} s, import {imports:.2f} s, sync {syncs:.2f} s, "
                f"sstream-mirror {mirrored[-1][1]:.2f} s (to the page cache {mirrored[-1][0]:.2f} s)\n"
            )
    base, amount = min(stick), f"{size / MIB:.0f} MiB, best of {rounds}"
    yield Figure("import / curl|openssl", base / min(imported), "x", 0.8, True, f"{amount}: {min(imported):.2f} s")
    yield Figure("sync / curl|openssl", base / min(synced), "x", 0.8, True, f"{amount}: {min(synced):.2f} s")
    cached, written = (min(each[kind] for each in mirrored) for kind in (0, 1))
    yield Figure("import / sstream-mirror", written / min(imported), "x", 1.5, True, f"{written:.2f} s until on disk")
    yield Figure(
        "import / sstream-mirror without its disk",
        cached / min(imported),
        "x",
        None,
        True,
        f"{cached:.2f} s, not on disk",
    )
    region, rack = (max(grown[who] for grown in memory) / MIB for who in (0, 1))
    yield Figure("region memory in the import", region, " MiB", 150, False, "the most beyond the start, resident")
    yield Figure("rack memory in the sync", rack, " MiB", 150, False, "the most beyond the start, resident")


def _is_content(path: Path) -> bool:
    return path.parts[0] != "streams" and not path.parts[0].startswith(".")


def _import_and_sync(upstream: str, keyring: Path | None, scratch: Path) -> tuple[float, float, tuple[int, int]]:
    scratch.mkdir()
    scratch.chmod(0o755)
    # As in etc/nginx: blobs from nginx, the rest from the region, whose port must be known before it runs.
    front = Region(scratch)
    blobs = scratch / "region" / "images" / "blobs"
    locations = (
        f"location ~ ^/MAAS/images-stream/blobs/([0-9a-f]+)$ {{ alias {blobs}/$1; }}\n"
        f"location / {{ proxy_pass http://127.0.0.1:{front.http}; }}"
    )
    with nginx(scratch / "front", locations) as url:
        front.write_config(front.config.read_text() + f'[stream]\nurl = "{url}/MAAS/images-stream"\n')
        rack = Rack(front, scratch)
        try:
            front.start()
            front.make_key()
            rack.join()
            front.add_source(upstream + "/", keyring.read_bytes() if keyring else b"")
            wait_for(lambda: not front.get("boot-resources/?op=is_importing"), "the import that an edit asks for")
            before = front.resident
            job = front.newest_job() or front.run_import(600)
            wait_for(lambda: front.job(job["id"])["ended"], "the import", 600)
            job = front.job(job["id"])
            if job["state"] != "done":
                raise RuntimeError(f"the import failed: {job['outcome']}")
            region_grew = front.peak - before
            rack.start()
            started = rack.resident
            rack.wait_in_step(600)
            seconds = _sync_seconds(rack)
            return job_seconds(front, job["id"]), seconds, (region_grew, rack.peak - started)
        finally:
            rack.kill()
            if front.process is not None:
                front.stop()
            shutil.rmtree(scratch)


def _sync_seconds(rack: Rack) -> float:
    found = re.findall(r"Sync to .* ended after ([0-9.]+) s: synced", rack.log.read_text())
    if len(found) != 1:
        raise RuntimeError(f"expected one sync in the rack's log, found {len(found)}")
    return float(found[0])
