"""How is it written where a process listens? As HOST:PORT, in settings, tokens, and what a region tells its racks."""

from __future__ import annotations


def split_address(value: str) -> tuple[str, int]:
    """The host and the port of ``HOST:PORT`` or ``[IPV6]:PORT``.

    :raises ValueError: with a sentence that says what is wrong with ``value``.
    """
    host, colon, port = value.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or (":" in bare and bare == host) or not port.isascii() or not port.isdigit():
        raise ValueError(f"{value!r} is not HOST:PORT, such as 'region.example.com:5250' or '[fd00::1]:5250'")
    if not 0 < int(port) <= 65535:
        raise ValueError(f"{value!r} has port {port}, which is not from 1 to 65535")
    return bare, int(port)


def join_address(host: str, port: int) -> str:
    """``HOST:PORT``, or ``[IPV6]:PORT``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
