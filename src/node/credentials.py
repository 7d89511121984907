"""Where is the region, and with what does this machine prove who it is?

Looked for on the command line, in the environment, in cloud-init's configuration, and at the ``cloud-config-url=`` of
the kernel's command line, in this order. What is written there is YAML for which this machine may have no parser; the
four values are plain words in it, whichever of YAML's styles was used, and are read as such.
"""

import glob
import os
import re
import urllib.parse
from typing import Callable, List, Mapping, NamedTuple, Optional

CLOUD_CONFIG = "/etc/cloud/cloud.cfg.d/*cmdline*.cfg"
KERNEL_COMMAND_LINE = "/proc/cmdline"
ENVIRONMENT = "COMMISSIONING_CREDENTIALS_URL"
"""The variable that may name a file, or a URL, with the credentials."""

KEYS = ("metadata_url", "consumer_key", "token_key", "token_secret")


class Credentials(NamedTuple):
    """The region's metadata service, and this machine's OAuth token for it."""

    metadata_url: str
    consumer_key: str
    token_key: str
    token_secret: str

    def __repr__(self) -> str:
        return "Credentials({!r}, …)".format(self.metadata_url)


class NoCredentials(Exception):
    """They are nowhere; the text says where they were looked for, and what was wrong there."""


def parse(text: str) -> Credentials:
    """The credentials in the text of a configuration.

    :raises NoCredentials: which names what is missing.
    """
    found = {}
    for key in KEYS:
        # Block style ("key: value"), flow style ("{key: value, …}") and JSON, quoted or not; not "#key: value".
        match = re.search(
            r"""(?:^|[\s,{{])["']?{}["']?\s*:\s*(?:"([^"\n]*)"|'([^'\n]*)'|([^\s,}}"'#][^\s,}}]*))""".format(key),
            re.sub(r"(?m)^\s*#.*$", "", text),
        )
        value = next((group for group in match.groups() if group is not None), "") if match else ""
        if value:
            found[key] = value
    missing = [key for key in KEYS if key not in found]
    if missing:
        raise NoCredentials("lacks {}".format(", ".join(missing)))
    if not _is_url(found["metadata_url"]):
        raise NoCredentials("has the metadata_url {!r}, which is no http(s) URL".format(found["metadata_url"]))
    return Credentials(**found)


def _is_url(text: str) -> bool:
    """Whether requests can be sent there, as far as one can tell before."""
    try:
        parts = urllib.parse.urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        # Of its port, or of the brackets around an address.
        return False


def find(
    read_file: Callable[[str], str],
    fetch: Callable[[str], str],
    source: Optional[str] = None,
    environment: Mapping[str, str] = os.environ,
    pattern: str = CLOUD_CONFIG,
) -> Credentials:
    """The first credentials that there are.

    :param source: the file or URL that the command line names; then only that counts.
    :param read_file: gives a file's text, or raises ``OSError``.
    :param fetch: gives the text at a URL, or raises ``OSError``.
    :raises NoCredentials: if there are none.
    """
    tried: List[str] = []

    def attempt(where: str) -> Optional[Credentials]:
        try:
            return parse(fetch(where) if re.match(r"https?://", where) else read_file(where))
        except (OSError, ValueError, NoCredentials) as error:
            tried.append("{}: {}".format(where, error))
            return None

    if source is not None:
        places = [source]
    else:
        places = [environment[ENVIRONMENT]] if environment.get(ENVIRONMENT) else []
        places += sorted(glob.glob(pattern))
        places += _kernel_urls(read_file, tried)
    for place in places:
        found = attempt(place)
        if found is not None:
            return found
    looked = "; ".join(tried) or "there is no ${}, no {} and no cloud-config-url= on the kernel's command line".format(
        ENVIRONMENT, pattern
    )
    raise NoCredentials("no credentials for the region were found ({}); name them with --config".format(looked))


def _kernel_urls(read_file: Callable[[str], str], tried: List[str]) -> List[str]:
    try:
        line = read_file(KERNEL_COMMAND_LINE)
    except OSError as error:
        tried.append("{}: {}".format(KERNEL_COMMAND_LINE, error))
        return []
    # "url=" is how some network boot loaders call it.
    return re.findall(r"(?:^|\s)(?:cloud-config-url|cloud_config_url)=(\S+)", line)
