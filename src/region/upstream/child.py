"""The process that reads the documents of a source: verifies each, parses it, and answers with values.

Upstream's bytes are parsed here and not in the region, so that no document can block the region, exhaust its memory or
outlive a time-out. The process takes questions on its standard input and answers on its standard output (see
:mod:`region.upstream.exchange`); it dies with the region.
"""

from __future__ import annotations

import hashlib
from typing import Final

from region.upstream.documents import Unusable, read_index
from region.upstream.exchange import Answer, Question, Refused, decode_question, encode_answer
from region.upstream.products import read_products
from region.upstream.serving import serve
from region.upstream.signatures import BadSignature, is_signed, unverified_payload, verified_payload

MEMORY: Final = 1 << 30
"""Bytes of address space that the process may use: enough for a document of the largest size that is fetched."""


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


if __name__ == "__main__":
    serve(answer, MEMORY)
