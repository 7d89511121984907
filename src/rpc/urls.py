"""How is a URL shown? Without the user's name and password that it may hold, for many read logs and manifests."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit


def public(url: str) -> str:
    """The URL without the user's name and password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if "@" in parts.netloc else url
