"""What a signed document says: the payload that ``gpgv`` emits once it has verified a clear-signed text (RFC 4880, §7).

Only that payload is ever parsed. Cutting the text out of the document by other rules than those of the verifier is how
unsigned words get in: before the message, after it, or in its armour headers.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import subprocess
from typing import BinaryIO, Final

from simplestreams.util import read_signed

GPGV_SECONDS: Final = 60

_ARMOUR = re.compile(
    rb"-----BEGIN PGP PUBLIC KEY BLOCK-----[ \t]*\r?\n(?P<body>.*?)-----END PGP PUBLIC KEY BLOCK-----", re.DOTALL
)
_CLEAR_SIGNED: Final = b"-----BEGIN PGP SIGNED MESSAGE-----"

_REFUSED: Final = {
    "BADSIG": "the signature is bad: the document was changed after {who} signed it",
    "NO_PUBKEY": "it is signed with key {who}, which is not in the keyring",
    "EXPSIG": "the signature by {who} has expired",
    "EXPKEYSIG": "it is signed with a key that has expired: {who}",
    "REVKEYSIG": "it is signed with a key that was revoked: {who}",
    "ERRSIG": "the signature by {who} cannot be checked",
}


class BadSignature(ValueError):
    """The document is not signed with a key of the keyring, or not verifiably; the text says why."""


def is_signed(data: bytes) -> bool:
    """Whether the document is a clear-signed message, good or bad."""
    return data.lstrip().startswith(_CLEAR_SIGNED)


def verified_payload(data: bytes, keyring: bytes) -> bytes:
    """The signed text of a clear-signed document, as ``gpgv`` emits it after verifying.

    :param data: the whole document.
    :param keyring: public keys, binary or ASCII-armoured.
    :raises BadSignature: if there is no good signature by one of the keys, or the document is not exactly one message.
    """
    if not is_signed(data):
        raise BadSignature("it is not a clear-signed document, and the source has a keyring")
    with _memory_file(binary_keyring(keyring)) as keys, _memory_file(b"") as status_file:
        # Files in memory, so that nothing is left behind however this process ends.
        command = ["gpgv", "--homedir", "/nonexistent", "--keyring", f"/proc/self/fd/{keys.fileno()}",
                   "--status-fd", str(status_file.fileno()), "--output", "-", "-"]  # fmt: skip
        try:
            run = subprocess.run(
                command,
                input=data,
                capture_output=True,
                timeout=GPGV_SECONDS,
                env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"},
                pass_fds=(keys.fileno(), status_file.fileno()),
            )
        except FileNotFoundError as error:
            raise BadSignature("gpgv is not installed, which verifies signatures: install the package gpgv") from error
        except subprocess.TimeoutExpired as error:
            raise BadSignature(f"gpgv did not end within {GPGV_SECONDS} seconds") from error
        status_file.seek(0)
        status = _status(status_file.read())
    for word, text in _REFUSED.items():
        if word in status:
            raise BadSignature(text.format(who=status[word] or "an unknown key"))
    if run.returncode != 0 or "GOODSIG" not in status or "VALIDSIG" not in status:
        said = run.stderr.decode("utf-8", "replace").strip().splitlines()
        detail = said[-1].removeprefix("gpgv: ") if said else f"gpgv ended with status {run.returncode}"
        if b"multiple plaintexts" in run.stderr:
            detail = "it holds more than one signed message"
        raise BadSignature(f"the signature could not be verified: {detail}")
    return run.stdout


def _memory_file(data: bytes) -> BinaryIO:
    file = os.fdopen(os.memfd_create("stanchion-gpgv"), "w+b")
    file.write(data)
    file.flush()
    return file


def _status(output: bytes) -> dict[str, str]:
    """The words of gpgv's machine-readable status, each with the key id, and the name if one is given."""
    words = {}
    for line in output.decode("utf-8", "replace").split("\n"):
        if line.startswith("[GNUPG:] "):
            word, _, rest = line.removeprefix("[GNUPG:] ").partition(" ")
            words[word] = rest.split(" ")[0] if word in ("ERRSIG", "VALIDSIG") else rest.strip()
    return words


def unverified_payload(data: bytes) -> bytes:
    """The text of a clear-signed document of a source that the operator allows to be unsigned: nothing is verified.

    :raises BadSignature: if it is not formed like a clear-signed document.
    """
    try:
        payload: str = read_signed(data.decode("utf-8").lstrip(), checked=False)
    except (UnicodeDecodeError, UnboundLocalError) as error:
        raise BadSignature(f"it begins like a clear-signed document, but is not one: {error}") from error
    return payload.encode("utf-8")


def binary_keyring(keyring: bytes) -> bytes:
    """The keyring in the binary form that gpgv reads.

    :param keyring: binary, or one or more ASCII-armoured public key blocks.
    :raises BadSignature: if it is empty, or armoured and damaged.
    """
    if not keyring.strip():
        raise BadSignature("the source's keyring is empty")
    if b"-----BEGIN PGP" not in keyring:
        return keyring
    blocks = [_dearmoured(match["body"]) for match in _ARMOUR.finditer(keyring)]
    if not blocks:
        raise BadSignature("the source's keyring has no complete PGP PUBLIC KEY BLOCK")
    return b"".join(blocks)


def _dearmoured(body: bytes) -> bytes:
    """The bytes of one armoured block: after its headers and an empty line, base64, then perhaps ``=`` and a CRC."""
    lines = [line.strip() for line in body.splitlines()]
    start = lines.index(b"") + 1 if b"" in lines else 0
    text = b"".join(line for line in lines[start:] if not (line.startswith(b"=") and len(line) == 5))
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise BadSignature(f"the source's keyring is armoured but damaged: {error}") from error
