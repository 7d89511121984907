"""What was this rack last told to hold? An :class:`Assignment`, kept on disk so that a restart needs no region."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen
from twisted.logger import Logger

from rack.files import Files
from rpc.manifest import is_sha256

log = Logger()

_LARGEST: Final = (1 << 63) - 1


class InvalidAssignment(ValueError):
    """A request to sync makes no sense; the text says what is wrong with which value."""


def _generation(instance: object, attribute: Any, value: Any) -> None:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise InvalidAssignment(f"generation is {value!r}, not a whole number from 0 on")


def _digest(instance: object, attribute: Any, value: Any) -> None:
    if not is_sha256(value):
        raise InvalidAssignment(f"digest is {value!r}, not a sha256 as 64 hexadecimal digits")


def _url(instance: object, attribute: Any, value: Any) -> None:
    if not isinstance(value, str) or not value.startswith(("http://", "https://")):
        raise InvalidAssignment(f"url is {value!r}, not the http or https URL of an image stream")


def _without_slash(url: str) -> str:
    return url.rstrip("/") if isinstance(url, str) else url


@frozen
class Assignment:
    """A generation to hold, and the URL of the image stream to fetch it from (without a slash at its end)."""

    generation: int = field(validator=_generation)
    digest: str = field(validator=_digest)
    url: str = field(validator=_url, converter=_without_slash)

    def wants_same(self, other: Assignment) -> bool:
        """Whether ``other`` asks for the same generation with the same content, from wherever."""
        return (self.generation, self.digest) == (other.generation, other.digest)

    @property
    def manifest_url(self) -> str:
        """Where the generation's manifest is."""
        return f"{self.url}/generations/{self.digest}/manifest.json"

    def blob_url(self, sha256: str) -> str:
        """Where the content with this sha256 is."""
        return f"{self.url}/blobs/{sha256}"

    def __str__(self) -> str:
        return f"generation {self.generation} ({self.digest[:8]})"


class AssignmentFile:
    """The file ``path``, which holds the last assignment. Its methods block: call them in threads."""

    def __init__(self, path: Path, files: Files | None = None) -> None:
        self._path = path
        self._files = files or Files()

    def write(self, assignment: Assignment) -> None:
        """Replace what is remembered, durably and in one step. :raises OSError: if the disk fails or is full."""
        document = {"generation": assignment.generation, "digest": assignment.digest, "url": assignment.url}
        temporary = self._path.with_name(self._path.name + ".new")
        self._files.write(temporary, json.dumps(document).encode("utf-8"))
        self._files.sync(temporary)
        self._files.rename(temporary, self._path)
        self._files.sync(self._path.parent)

    def read(self) -> Assignment | None:
        """What is remembered; None if nothing is, or if it cannot be used, which is logged."""
        try:
            document = json.loads(self._files.read(self._path))
            return Assignment(document["generation"], document["digest"], document["url"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.error(
                "{path}, which says what this rack should hold, cannot be used: {error}. The region says it again.",
                path=str(self._path), error=error,
            )  # fmt: skip
            return None
