"""Upstream: what simplestreams sources offer, read and checked in a child process.

Only the values are importable from here; :class:`region.upstream.reader.SourceReader` reads. (The child process imports
this package too, and must not pay for Twisted.)
"""

from region.upstream.values import (
    Broken,
    DocumentFailed,
    DocumentSeen,
    Problem,
    Selection,
    Source,
    SourceFailed,
    SourceRead,
    UpstreamImage,
)

__all__ = [
    "Broken",
    "DocumentFailed",
    "DocumentSeen",
    "Problem",
    "Selection",
    "Source",
    "SourceFailed",
    "SourceRead",
    "UpstreamImage",
]
