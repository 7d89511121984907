"""The process that reads the documents of a source: verifies each, parses it, and answers with values.

Upstream's bytes are parsed here and not in the region, so that no document can block the region, exhaust its memory or
outlive a time-out. The process takes questions on its standard input and answers on its standard output (see
:mod:`region.upstream.exchange`); it dies with the region.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import resource
import signal
import struct
import sys
from typing import Final

from region.upstream.documents import Unusable, read_index
from region.upstream.exchange import Answer, Question, Refused, decode_question, encode_answer
from region.upstream.products import read_products
from region.upstream.signatures import BadSignature, is_signed, unverified_payload, verified_payload

MEMORY: Final = 1 << 30
"""Bytes of address space that the process may use: enough for a document of the largest size that is fetched."""

_PR_SET_PDEATHSIG: Final = 1
_LENGTH: Final = struct.Struct(">Q")


def answer(data: bytes) -> bytes:
    """The answer to a question; both as bytes."""
    return encode_answer(examine(*decode_question(data)))


def examine(question: Question, document: bytes) -> Answer:
    """Verify and read a document, as the question says what it should be."""
    source = question.source
    sha256 = hashlib.sha256(document).hexdigest()
    try:
        if source.keyring:
            payload = verified_payload(document, source.keyring)
        elif not source.allow_unsigned:
            raise BadSignature("the source has no keyring to verify it with, and is not marked as unsigned")
        else:
            payload = unverified_payload(document) if is_signed(document) else document
        if not question.content_id:
            return read_index(payload, sha256=sha256, root=question.root, signed=bool(source.keyring))
        return read_products(payload, sha256=sha256, root=question.root, content_id=question.content_id, source=source)
    except Unusable as error:
        return Refused(str(error), error.torn)
    except BadSignature as error:
        return Refused(str(error))
    except MemoryError:
        return Refused(f"reading it needs more than {MEMORY >> 20} MiB of memory")


def die_with(parent: int) -> None:
    """Have this process killed when ``parent``, its parent, ends in whatever way (Linux, ``prctl(2)``)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit("the region ended before its child began")


def main() -> None:
    """Answer the questions on standard input until it ends; each, and each answer, comes after its length."""
    die_with(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    while length := questions.read(_LENGTH.size):
        said = answer(questions.read(*_LENGTH.unpack(length)))
        answers.write(_LENGTH.pack(len(said)) + said)
        answers.flush()


if __name__ == "__main__":
    main()
