"""``stanchion import``: start an import, follow it, and say with the exit status what came of it."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from region.cli import progress
from region.cli.api import client_of, start_import
from rpc.client import Client, Unreachable
from rpc.console import Status, complain, size, write, write_json, write_table

POLL_SECONDS: Final = 0.5

PATIENCE: Final = 60
"""A region that did not answer so many times in a row, at intervals of a second or more, is given up."""


_NEVER: Final = threading.Event()


def run(arguments: argparse.Namespace) -> int:
    """``stanchion import`` in all its forms."""
    client = client_of(arguments)
    if arguments.list:
        return _list(arguments, client)
    if arguments.stop:
        return _stop(arguments, client)
    job_id = start_import(client) if arguments.follow is None else arguments.follow
    if arguments.no_wait:
        job = client.get(f"import-jobs/{job_id}/")
        if arguments.json:
            write_json(job)
        else:
            write(f"import {job_id} is {job['state']}")
        return Status.YES
    display = progress.Display(time.monotonic)
    try:
        job = follow(client, job_id, display.show)
    except KeyboardInterrupt:
        display.close()
        complain(f"no longer watching; the import goes on (stanchion import --follow {job_id}, or --stop)")
        return Status.INTERRUPTED
    finally:
        display.close()
    if arguments.json:
        write_json(job)
    else:
        write(progress.summary(job))
    return Status.YES if progress.succeeded(job) else Status.NO


def follow(
    client: Client,
    job_id: int,
    show: Callable[[Any], None],
    pause: Callable[[float], object] = _NEVER.wait,
) -> Any:
    """Wait for the end of import ``job_id``, showing it now and then; the import at its end.

    A region that is away for a while, because it is restarted, is waited for.

    :param pause: waits so many seconds.
    :raises Unreachable: if it stays away.
    """
    missed = 0
    while True:
        try:
            job = client.get(f"import-jobs/{job_id}/")
        except Unreachable:
            missed += 1
            if missed >= PATIENCE:
                raise
            pause(1.0)
            continue
        missed = 0
        show(job)
        if progress.ended(job):
            return job
        pause(POLL_SECONDS)


def _list(arguments: argparse.Namespace, client: Client) -> int:
    jobs = client.get("import-jobs/")
    if arguments.json:
        write_json(jobs)
        return Status.YES
    rows = [
        (
            job["id"],
            job["state"],
            job["trigger"],
            job["started"] or job["requested"],
            size(job["bytes_done"] or 0),
            "" if job["generation"] is None else job["generation"],
            job["outcome"] or job["fetching"],
        )
        for job in jobs
    ]
    if rows:
        write_table(("ID", "STATE", "ASKED BY", "STARTED", "FETCHED", "GENERATION", "OUTCOME"), rows)
    else:
        write("nothing was imported yet; `stanchion import` begins")
    return Status.YES


def _stop(arguments: argparse.Namespace, client: Client) -> int:
    if not client.get("boot-resources/", op="is_importing"):
        answer = "no import is running, and none is queued"
    else:
        answer = client.post("boot-resources/", op="stop_import")
    if arguments.json:
        write_json({"answer": answer})
    else:
        write(str(answer).strip())
    return Status.YES
