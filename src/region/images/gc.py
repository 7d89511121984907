"""What may be thrown away: generations that nobody needs any more, and then files that no generation needs.

Kept are the current generation, the one before it, and every one that a rack holds or is fetching. All of it is read
again, and the generations are retired, in one transaction on the session that holds the import's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from attrs import frozen
from twisted.logger import Logger

from region.database import Session, Transaction
from region.images.lock import require_lock
from region.images.uploads import contents
from rpc.blobs import STALE, BlobStore, Swept
from rpc.fetch import RunInThread
from rpc.manifest import parse_manifest

log = Logger()


def retained(numbers: Collection[int], current: int | None, *held: Mapping[str, int]) -> frozenset[int]:
    """Which of the generations ``numbers`` must be kept.

    :param current: the current generation's number, None if nothing was published.
    :param held: mappings of a rack to a generation that it needs: the one it holds, the one it is fetching.
    """
    needed = {generation for racks in held for generation in racks.values()}
    if current is not None:
        needed |= {number for number in numbers if number >= current}
        needed |= set(sorted(number for number in numbers if number < current)[-1:])
    else:
        needed |= set(numbers)
    return frozenset(needed.intersection(numbers))


@frozen
class Collected:
    """What a collection did: the generations it retired, and how many files of how many bytes it removed."""

    retired: tuple[int, ...]
    files: int
    bytes: int


_HELD: Final = """
SELECT system_id, generation FROM rack_inventory JOIN rack USING (system_id)
WHERE revoked IS NULL AND generation IS NOT NULL
"""

FETCHING_SECONDS: Final = 6 * 3600
"""How long a rack that last reported that it was fetching is believed to do so still. While it is linked it reports
every few seconds; without a link it goes on by itself."""

# What a rack says that it is fetching, to whichever region process: this one knows only of those that it told itself.
_FETCHING: Final = """
SELECT system_id, fetching::bigint
FROM (SELECT system_id, progress->>'generation' AS fetching FROM rack_inventory JOIN rack USING (system_id)
      WHERE revoked IS NULL AND state = 'syncing' AND reported > now() - make_interval(secs => %s)) AS reporting
WHERE fetching ~ '^[0-9]{1,18}$'
"""


async def collect(
    session: Session,
    blobs: BlobStore,
    run_in_thread: RunInThread,
    syncing: Callable[[], Mapping[str, int]],
    also_keep: Iterable[str] = (),
    *,
    stale_after: float = STALE,
    retire: bool = True,
) -> Collected:
    """Retire generations and remove files that nothing needs.

    :param session: the session that holds the import's lock, so that no import is fetching or publishing.
    :param syncing: for each rack that this process told to fetch a generation, which.
    :param also_keep: the sha256 of files that the next import will want, although no generation has them.
    :param stale_after: seconds after which what was fetched in part is removed, if it is not to be kept.
    :param retire: whether to retire generations. Without that nothing is written into the database.
    :raises ImportLockLost: if ``session`` does not hold the lock; then nothing was removed.
    """

    async def write(transaction: Transaction) -> tuple[tuple[int, ...], list[tuple[bytes, str]], frozenset[str]]:
        await require_lock(transaction)
        current = await transaction.one("SELECT generation FROM current_generation")
        numbers = [row[0] for row in await transaction.query("SELECT number FROM generation WHERE retired IS NULL")]
        reported = dict(await transaction.query(_HELD))
        fetching = dict(await transaction.query(_FETCHING, (FETCHING_SECONDS,)))
        keep = retained(numbers, None if current is None else current[0], reported, fetching, syncing())
        retiring = tuple(sorted(set(numbers) - keep)) if retire else ()
        if retiring:
            await transaction.execute(
                "UPDATE generation SET manifest = NULL, retired = now() WHERE number = ANY(%s)", (list(retiring),)
            )
        rows = await transaction.query("SELECT manifest, digest FROM generation WHERE retired IS NULL")
        return retiring, [(bytes(manifest), digest) for manifest, digest in rows], await contents(transaction)

    retiring, manifests, uploaded = await session.transact(write)
    keep = {*also_keep, *uploaded}
    swept = await run_in_thread(_sweep, blobs, manifests, keep, stale_after)
    collected = Collected(retiring, swept.blobs + swept.partials, swept.bytes)
    if collected.retired or collected.files:
        log.info(
            "Retired generations {retired} and removed {files} files of {bytes} bytes that nothing needs any more",
            retired=list(collected.retired), files=collected.files, bytes=collected.bytes,
        )  # fmt: skip
    return collected


def _sweep(blobs: BlobStore, manifests: Collection[tuple[bytes, str]], keep: set[str], stale_after: float) -> Swept:
    for manifest, digest in manifests:
        keep.update(parse_manifest(manifest, digest).blobs)
    return blobs.sweep(keep, stale_after=stale_after)
