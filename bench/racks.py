"""Many racks in one process, over real links: ``python -m bench.racks COUNT HOST PORT TOKEN MANIFEST GENERATION``.

Each enrols, registers, and answers ``ListImages`` as a rack that holds the manifest. They end when standard input does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed
from twisted.internet.defer import Deferred
from twisted.logger import globalLogBeginner

from rpc.commands import ListImages, Register, ReportInventory, SyncImages
from rpc.endpoints import enrol, reconnecting
from rpc.identity import JoinToken, client_tls
from rpc.logs import VARIABLE, observer
from rpc.manifest import parse_manifest
from rpc.protocol import Link, Responders


async def run(reactor: Any, count: int, host: str, port: int, token: str, manifest: Path, generation: int) -> None:
    """Bring ``count`` racks up and say so."""
    data = manifest.read_bytes()
    digest = parse_manifest(data).digest

    async def list_images(link: Link, known_digest: str) -> Mapping[str, Any]:
        answer: dict[str, Any] = {"state": "ready", "generation": generation, "digest": digest}
        return answer if known_digest == digest else answer | {"inventory": data}

    async def sync_images(link: Link, **assignment: Any) -> Mapping[str, Any]:
        return {
            "outcome": "unchanged", "generation": generation, "digest": digest, "reason": "", "bytes_fetched": 0,
            "files_fetched": 0,
        }  # fmt: skip

    responders = Responders("rack", {ListImages: list_images, SyncImages: sync_images})
    for number in range(count):
        enrolled = await enrol(reactor, host, port, JoinToken.parse(token), f"bench-{number}")
        ready: Deferred[None] = Deferred()

        async def prepare(link: Link, ready: Deferred[None] = ready, number: int = number) -> None:
            await link.call(Register, versions=[1], name=f"bench-{number}", software="bench")
            await link.call(ReportInventory, generation=generation, digest=digest, state="ready", progress={})
            if not ready.called:
                ready.callback(None)

        tls = client_tls(enrolled.credentials, enrolled.ca)
        reconnecting(reactor, host, port, tls, lambda: Link(responders, clock=reactor), prepare).startService()
        await ready
    sys.stdout.write("ready\n")
    sys.stdout.flush()


def main() -> None:
    """Run until standard input ends."""
    reactor: Any = installed
    globalLogBeginner.beginLoggingTo([observer(sys.stderr, {VARIABLE: "error"})], redirectStandardIO=False)
    count, host, port, token, manifest, generation = sys.argv[1:]

    def begin() -> None:
        starting = Deferred.fromCoroutine(
            run(reactor, int(count), host, int(port), token, Path(manifest), int(generation))
        )
        starting.addErrback(lambda failure: (sys.stderr.write(failure.getTraceback()), reactor.stop()))

    def read() -> None:
        sys.stdin.read()
        reactor.callFromThread(reactor.stop)

    reactor.callWhenRunning(begin)
    reactor.callInThread(read)
    reactor.run()


if __name__ == "__main__":
    main()
