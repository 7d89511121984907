"""``python -m bench``: measure, print a table, and end with status 1 if a target was missed."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from bench import answers, commissioning, links, swaps, transfer, unchanged, verifying
from bench.servers import NoProgram
from bench.table import Figure, render
from tests.streams import Stream
from tests.system.daemons import make_directory

SECTIONS = ("transfer", "unchanged", "answers", "swaps", "verifying", "links", "commissioning")
MIB = 1 << 20


def large_stream(directory: Path) -> Path:
    """An unsigned stream of ten large files, 320 MiB in all, of pseudo-random bytes."""
    stream = Stream(directory, signer=None)
    for number, arch in enumerate(("amd64", "arm64", "armhf", "i386", "ppc64el")):
        generator = random.Random(number)
        files = {"boot-kernel": generator.randbytes(8 * MIB), "boot-initrd": generator.randbytes(56 * MIB)}
        stream.add("bookworm", arch, files=files, os="debian")
    stream.write()
    return directory


def main() -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="what to measure (default: everything)")
    parser.add_argument("--stream", type=Path, help="a stream of large files (default: 320 MiB are made)")
    parser.add_argument("--keyring", type=Path, help="the keyring of --stream; without one it is taken as unsigned")
    parser.add_argument("--catalogue", type=Path, help="a stream of many products (default: 240 are made)")
    parser.add_argument("--catalogue-keyring", type=Path, help="the keyring of --catalogue")
    parser.add_argument("--rounds", type=int, default=3, help="how often transfers are repeated (default: 3)")
    arguments = parser.parse_args()
    scratch = make_directory()
    figures: list[Figure] = []
    failed = False
    try:
        sections = arguments.sections or SECTIONS
        stream, catalogue = arguments.stream or scratch / "stream", arguments.catalogue or scratch / "catalogue"
        if not arguments.stream and "transfer" in sections:
            large_stream(stream)
        if not arguments.catalogue and {"unchanged", "answers", "swaps"} & set(sections):
            many_products(catalogue)
        measures: dict[str, Callable[[], Iterator[Figure]]] = {
            "transfer": lambda: transfer.measure(stream.resolve(), arguments.keyring, scratch, arguments.rounds),
            "unchanged": lambda: unchanged.measure(catalogue.resolve(), arguments.catalogue_keyring, scratch),
            "answers": lambda: answers.measure(catalogue.resolve(), arguments.catalogue_keyring, scratch),
            "swaps": lambda: swaps.measure(catalogue.resolve(), arguments.catalogue_keyring, scratch),
            "verifying": lambda: verifying.measure(scratch),
            "links": lambda: links.measure(scratch),
            "commissioning": lambda: commissioning.measure(scratch),
        }
        for section in sections:
            sys.stderr.write(f"{section} …\n")
            try:
                figures += measures[section]()
            except NoProgram as error:
                sys.stderr.write(f"  not measured: {error}\n")
                failed = True
    finally:
        shutil.rmtree(scratch)
    sys.stdout.write(render(figures) + "\n")
    return 1 if failed or not all(figure.holds for figure in figures) else 0


def many_products(directory: Path) -> Path:
    """An unsigned catalogue of 240 products with small files."""
    stream = Stream(directory, signer=None)
    for release in ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"):
        for arch in ("amd64", "arm64", "armhf", "i386", "ppc64el", "s390x"):
            for subarch in ("ga", "hwe", "hwe-edge", "ga-low", "hwe-low"):
                product = f"com.example.stable:v3:boot:{release}:{arch}:{subarch}"
                stream.add(release, arch, subarch=subarch, product=product)
    stream.write()
    return directory


if __name__ == "__main__":
    sys.exit(main())
