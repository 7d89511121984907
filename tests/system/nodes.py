"""A machine that a test plays: it fetches its scripts and reports over HTTP as a runner would, with what it is told."""

from __future__ import annotations

import io
import json
import os
import tarfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from attrs import define, frozen

from tests.system.daemons import Region, authorization


@frozen
class Answer:
    """What the region answered."""

    status: int
    body: bytes
    headers: Mapping[str, str]


@define
class FakeNode:
    """A machine of ``region``, with the token that it was given."""

    region: Region
    system_id: str
    key: str

    @classmethod
    def create(cls, region: Region, mac: str = "00:16:3e:00:00:01", **fields: Any) -> FakeNode:
        """Make a machine and begin to commission it."""
        status, body, _ = region.api(
            "machines/", "POST", {"architecture": "amd64/generic", "mac_addresses": mac, "commission": "true", **fields}
        )
        assert status == 200, f"making a machine: {status} {body}"
        return cls(region, body["system_id"], "").with_token()

    def with_token(self) -> FakeNode:
        """Take the token that it has now."""
        token = self.region.get(f"machines/{self.system_id}/?op=get_token")
        self.key = f"{token['consumer_key']}:{token['token_key']}:{token['token_secret']}"
        return self

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        """One request to the metadata service."""
        request = urllib.request.Request(
            f"{self.region.url}/metadata/{path}", method=method, data=body,
            headers={"Authorization": authorization(self.key), **{n.replace("_", "-"): v for n, v in headers.items()}},
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return Answer(answer.status, answer.read(), dict(answer.headers))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.read(), dict(error.headers))

    def scripts(self) -> list[dict[str, Any]]:
        """The scripts that it has to run, commissioning first; with ``content``."""
        answer = self.request("GET", "latest/maas-scripts")
        if answer.status == 204:
            return []
        assert answer.status == 200, answer
        with tarfile.open(fileobj=io.BytesIO(answer.body)) as archive:

            def member(name: str) -> bytes:
                found = archive.extractfile(name)
                assert found is not None
                return found.read()

            index = json.loads(member("index.json"))["1.0"]
            return [
                {**script, "content": member(script["path"])}
                for script in (*index["commissioning_scripts"], *index["testing_scripts"])
            ]

    def signal(self, status: str, files: Mapping[str, bytes] | None = None, **fields: Any) -> Answer:
        """Send one signal, as multipart."""
        boundary = os.urandom(12).hex()
        parts = [
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
            for name, value in {"op": "signal", "status": status, **fields}.items()
        ]
        parts += [
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"; filename="{name}"\r\n'.encode()
            + b"Content-Type: application/octet-stream\r\n\r\n" + content + b"\r\n"
            for name, content in (files or {}).items()
        ]  # fmt: skip
        body = b"".join(parts) + f"--{boundary}--\r\n".encode()
        return self.request("POST", "2012-03-01/", body, Content_Type=f"multipart/form-data; boundary={boundary}")

    def report(self, script: Mapping[str, Any], stdout: bytes = b"", exit_status: int = 0) -> Answer:
        """Say that a script has begun, and what it came to."""
        numbers = {"script_result_id": script["script_result_id"], "script_version_id": script["script_version_id"]}
        begun = self.signal("WORKING", error=f"Starting {script['name']}", **numbers)
        assert begun.status == 200, begun
        name = script["name"]
        return self.signal(
            "WORKING", {name: stdout, f"{name}.out": stdout, f"{name}.err": b""}, exit_status=exit_status,
            error=f"Finished {name}: {exit_status}", **numbers,
        )  # fmt: skip

    @property
    def status_name(self) -> str:
        name: str = self.region.get(f"machines/{self.system_id}/")["status_name"]
        return name

    def results(self, run: str = "current-commissioning", **query: Any) -> dict[str, dict[str, Any]]:
        """The results of a run by the scripts' names."""
        found = self.region.get(f"nodes/{self.system_id}/results/{run}/?include_output=true")
        (only,) = found if isinstance(found, list) else [found]
        return {result["name"]: result for result in only["results"]}

    def events(self) -> list[dict[str, Any]]:
        """Its events, newest first."""
        found: list[dict[str, Any]] = self.region.get(f"events/?op=query&id={self.system_id}&level=DEBUG&limit=1000")[
            "events"
        ]
        return found
