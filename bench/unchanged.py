"""What happens when nothing changed: an import of the same catalogue, and a sync to the generation that is held."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench.servers import nginx
from bench.table import Figure
from bench.transfer import job_seconds
from tests.system.daemons import Rack, Region, wait_for


def measure(catalogue: Path, keyring: Path | None, scratch: Path) -> Iterator[Figure]:
    """The figures, with the stream in ``catalogue``."""
    directory = scratch / "unchanged"
    directory.mkdir()
    directory.chmod(0o755)
    region = Region(directory)
    locations = f"location / {{ proxy_pass http://127.0.0.1:{region.http}; }}"
    upstream_log = directory / "upstream" / "access.log"
    with (
        nginx(directory / "upstream", f"location / {{ root {catalogue}; }}") as upstream,
        nginx(directory / "front", locations) as front,
    ):
        region.write_config(region.config.read_text() + f'[stream]\nurl = "{front}/MAAS/images-stream"\n')
        rack = Rack(region, directory)
        try:
            region.start()
            region.make_key()
            rack.join()
            rack.start()
            region.add_source(upstream + "/", keyring.read_bytes() if keyring else b"")
            wait_for(lambda: region.get("image-generations/"), "the import")
            rack.wait_in_step()
            seconds, files = [], 0
            for _ in range(3):
                before = _lines(upstream_log)
                seconds.append(job_seconds(region, region.run_import()["id"]))
                files += sum("/streams/v1/" not in line for line in _lines(upstream_log)[len(before) :])
            yield Figure("import of an unchanged catalogue", min(seconds), " s", 2.0, False, "best of 3")
            yield Figure("files fetched by it", files, "", 0, False, "requests in nginx's log, 3 imports")
            yield from _sync(region, rack, directory / "front" / "access.log")
        finally:
            rack.kill()
            if region.process is not None:
                region.stop()


def _sync(region: Region, rack: Rack, log: Path) -> Iterator[Figure]:
    [known] = region.get("rackcontrollers/")
    before = _lines(log)
    status, body, _ = region.api(f"rackcontrollers/{known['system_id']}/?op=import_boot_images", "POST", {})
    if status not in (200, 202):
        raise RuntimeError(f"telling the rack to sync: {status} {body}")
    wait_for(lambda: "unchanged, 0 files" in rack.log.read_text(), "a sync that changes nothing")
    asked = len(_lines(log)) - len(before)
    yield Figure("HTTP requests of an unchanged sync", asked, "", 0, False, "requests in nginx's log")
    yield Figure(
        "calls of an unchanged sync", rack.log.read_text().count("unchanged, 0 files"), "", 1, False, "its log"
    )


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
