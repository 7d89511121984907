"""The same question for one kernel: published generations and racks' answers as if there were only its images.

A rack that does not answer may hold the kernel if a generation that it may hold listed it; where that cannot be read,
it may hold it if it may hold the release at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cached_property

from attrs import evolve, field, frozen

from region.answers.combine import Answers, Catalogue, Held, RackAnswer, Target, combine
from region.answers.past import Kernel, Past
from rpc.manifest import Image
from rpc.outcomes import Answered


@frozen(eq=False)
class KernelCatalogue(Catalogue):
    """Those images of a catalogue that are of one kernel. Its digest is still that of the whole."""

    kernel: str = field(kw_only=True)

    @cached_property
    def targets(self) -> Mapping[Target, tuple[Image, ...]]:
        """Each target that has an image of the kernel, with just those."""
        whole = Catalogue(self.manifest).targets
        of_kernel = {
            target: tuple(image for image in images if Kernel.of(image).is_called(self.kernel))
            for target, images in whole.items()
        }
        return {target: images for target, images in of_kernel.items() if images}


def narrowed(answers: Answers, os: str, release: str, kernel: str, past: Past | None) -> Answers:
    """The answers for ``kernel`` alone, from the same round; they are right for this release and no other.

    :param past: what became of the release, or None if that cannot be read at the moment.
    """
    catalogues: dict[int, KernelCatalogue] = {}

    def of(catalogue: Catalogue) -> KernelCatalogue:
        if id(catalogue) not in catalogues:
            catalogues[id(catalogue)] = KernelCatalogue(catalogue.manifest, kernel=kernel)
        return catalogues[id(catalogue)]

    published = answers.published
    listed = past.kernels(os, release, kernel, published.listed) if past is not None else published.listed
    racks = {rack.rack: _narrowed(rack, of) for rack in answers.racks}
    return combine(evolve(published, catalogue=of(published.catalogue), listed=listed), racks, answers.policy)


def _narrowed(rack: RackAnswer, of: Callable[[Catalogue], Catalogue]) -> RackAnswer:
    if isinstance(rack.outcome, Answered):
        held = rack.outcome.value
        only = Held(held.state, held.generation, of(held.catalogue))
        return evolve(rack, outcome=Answered(only, rack.outcome.seconds))
    if rack.last_catalogue is None:
        return rack
    last: Collection[Target] = of(rack.last_catalogue).targets
    return evolve(rack, last_targets=frozenset(last))


def kernels_of(answers: Answers, os: str, release: str, arch: str | None, past: Past | None) -> tuple[str, ...]:
    """Every kernel of a release that is published, held, or was listed by some generation, by name."""
    found: set[Kernel] = set()
    catalogues = [answers.published.catalogue]
    for rack in answers.racks:
        catalogues += [rack.held.catalogue] if rack.held is not None else []
        catalogues += [rack.last_catalogue] if rack.last_catalogue is not None else []
    for catalogue in {id(catalogue): catalogue for catalogue in catalogues}.values():
        found.update(
            Kernel.of(image)
            for target, images in catalogue.targets.items()
            if target[:2] == (os, release)
            for image in images
        )
    found = found.union(*past.listed.values()) if past is not None else found
    return tuple(sorted({str(kernel) for kernel in found if arch in (None, kernel.arch)}))
