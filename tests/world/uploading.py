"""Somebody in a world who uploads an image, in chunks, and what they may be told."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from attrs import define

from region.answers.combine import Target
from rpc.manifest import ImageKey
from tests.examples import CHECKED
from tests.region.web import Response, form

if TYPE_CHECKING:
    from tests.world.operators import Operators

CHUNK: Final = 200
"""Bytes that are uploaded at a time."""


@define(eq=False)
class Uploading:
    """Somebody who uploads an image, in chunks, and goes on where it ended when an answer was lost.

    ``content`` is what is sent, and ``said`` the sha256 that it is said to have. ``id`` is what the region calls the
    upload, ``received`` how much of it the region has said that it has.
    """

    operators: Operators
    target: Target
    content: bytes
    said: str
    begun: int = 0
    id: int | None = None
    uri: str = ""
    received: int = 0
    is_complete: bool = False
    is_over: bool = False
    is_waiting: bool = False

    @property
    def is_honest(self) -> bool:
        """Whether it sends what it said."""
        return hashlib.sha256(self.content).hexdigest() == self.said

    @property
    def key(self) -> ImageKey:
        """The image that it is to be."""
        return key_of(self.target)

    def go_on(self) -> None:
        """Send what comes next, unless an answer is waited for."""
        if self.is_waiting or self.is_over or self.is_complete or self.operators.region is None:
            return
        self.is_waiting = True
        if self.id is None:
            self.begun = self.begun or self.operators.turns.steps
            fields = {
                "name": self.target.name,
                "architecture": self.target.arch,
                "sha256": self.said,
                "size": len(self.content),
            }
            self._send("POST", "boot-resources/", self._began, **form(**fields))
        else:
            chunk = self.content[self.received : self.received + CHUNK]
            path = f"{self.uri}?offset={self.received}"
            sent = partial(self._took, self.received + len(chunk))
            self._send("PUT", path, sent, body=chunk, Content_Type="application/octet-stream")

    def _send(self, method: str, path: str, answered: Callable[[Response], None], **given: Any) -> None:
        def then(response: Response) -> None:
            self.is_waiting = False
            answered(response)

        self.operators.send(method, path, then, self._lost, **given)

    def _lost(self) -> None:
        """The answer does not come; how far it is is asked anew."""
        self.is_waiting, self.id = False, None

    def _began(self, response: Response) -> None:
        if response.status == 503:
            return
        if response.status == 400 and self.operators.is_taken(self.key):
            self.is_over = True
            return
        assert response.status == 201, f"{self.target}: {response.status}: {response.text}"
        [found] = response.json["sets"].values()
        [file] = found["files"].values()
        assert file["sha256"] == self.said, response.text
        self.id = int(response.json["sets"].popitem()[0].rpartition(".")[2])
        if found["complete"]:
            self._complete()
            return
        self.uri, self.received = file["upload_uri"], file["received"]
        kept = self.operators.acknowledged.get(self.id, 0)
        # Who uploads the same may have sent more since this was answered.
        excused = self.operators.is_spoiled(self.said) or self.operators.twins(self)
        assert self.received >= kept or excused, f"{kept} bytes of it had come: {self.received}"

    def _took(self, expected: int, response: Response) -> None:
        assert self.id is not None
        if response.status == 200:
            CHECKED["chunks uploaded"] += 1
            [found] = response.json["sets"].values()
            if found["complete"]:
                self._complete()
                return
            [file] = found["files"].values()
            assert file["received"] == expected, f"{expected} bytes were sent: {response.text}"
            self.received = expected
            self._acknowledge(expected)
        elif response.status == 400:
            assert not self.is_honest, response.text
            assert "SHA256" in response.text, response.text
            self.is_over = True
        elif response.status == 404:
            assert self.operators.is_replaced(self), f"upload {self.id} is gone: {response.text}"
            self.is_over = True
        elif response.status == 409:
            assert self.operators.twins(self), f"nobody else uploads it: {response.text}"
            CHECKED["conflicts"] += 1
            self.id = None
        else:
            assert response.status == 503, response.text
            assert int(response.headers["Retry-After"]) > 0

    def _acknowledge(self, received: int) -> None:
        """The region has said that it has so much. What is wrong it throws away when it has all."""
        assert self.id is not None
        known = self.operators.acknowledged
        if self.is_honest:
            known[self.id] = max(received, known.get(self.id, 0))

    def _complete(self) -> None:
        assert self.id is not None
        assert self.is_honest or self.operators.twins(self), f"{self.target} was taken, and is another content"
        self.is_complete = True
        self._acknowledge(len(self.content))
        self.operators.completed[self.id] = self


def key_of(target: Target) -> ImageKey:
    """The image that is uploaded to be deployed as ``target``."""
    return ImageKey(target.os, target.release, target.arch, "generic", "generic", "uploaded")


def resource_of(key: ImageKey) -> int:
    """The number that the API has for an image, by its own rule in docs/api.rst: the same in every generation."""
    named = "\x00".join((key.os, key.release, key.arch, key.subarch, key.kflavor, key.label))
    return int.from_bytes(hashlib.sha256(named.encode()).digest()[:6], "big")
