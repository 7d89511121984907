"""The main job with real processes: import, publish, sync, ask, answer; and what kill -9 and bad upstreams do to it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tests import streams
from tests.streams import Stream
from tests.system.daemons import BIN, WAIT_SECONDS, Daemon, Rack, Region, make_directory, wait_for
from tests.system.gates import GatedServer, directory_reader, forwarding_reader


class SystemTestCase(SynchronousTestCase):
    """A region and a rack that joined it, with a signed stream of two releases; nothing is imported yet."""

    def setUp(self) -> None:
        self.directory = make_directory()
        self.addCleanup(shutil.rmtree, self.directory)
        signer = streams.signer()
        self.stream = Stream(self.directory / "upstream", signer)
        for release in ("noble", "jammy"):
            for arch in ("amd64", "arm64"):
                self.stream.add(release, arch)
        self.stream.add_loader()
        self.stream.write()
        self.keyring = signer.keyring
        self.upstream = GatedServer(directory_reader(self.stream.root))
        self.addCleanup(self.upstream.close)
        self.region = Region(self.directory)
        self.front = GatedServer(forwarding_reader(lambda: f"http://127.0.0.1:{self.region.http}"))
        self.addCleanup(self.front.close)
        self.region.write_config(
            self.region.config.read_text() + f'[stream]\nurl = "{self.front.url}/MAAS/images-stream"\n'
        )
        self.addCleanup(self.region.kill)
        self.region.start()
        self.region.make_key()
        self.rack = Rack(self.region, self.directory)
        self.addCleanup(self.rack.kill)
        self.rack.join()
        self.rack.start()

    def add_source(self) -> None:
        self.region.add_source(self.upstream.url + "/", self.keyring)

    def import_and_sync(self) -> Any:
        """Import what upstream has now; the job."""
        self.add_source()
        wait_for(lambda: self.region.get("image-generations/"), "the first generation")
        self.rack.wait_in_step()
        return self.region.newest_job()

    def why(self, release: str, arch: str = "amd64") -> tuple[int, Any]:
        status, body, headers = self.region.api(f"releases/ubuntu/{release}/?arch={arch}")
        self.assertEqual("Retry-After" in headers, status in (409, 503), headers)
        return status, body

    def assert_whole(self, rack: Rack) -> None:
        """Every file of the snapshot that the rack serves from is what the manifest says."""
        manifest = json.loads((rack.snapshot / "manifest.json").read_bytes())
        found = {
            hashlib.sha256(path.read_bytes()).hexdigest()
            for path in rack.snapshot.rglob("*")
            if path.is_file() and path.name != "manifest.json"
        }
        listed = {file["sha256"] for image in manifest["images"] for file in image["files"]}
        self.assertEqual(found, listed)
        self.assertTrue(listed)


class SpineTests(SystemTestCase):
    def test_from_a_signed_stream_to_a_right_answer_and_on_through_upstream_s_changes(self) -> None:
        status, body = self.why("noble")
        self.assertEqual(status, 503, body)  # nothing was published, which is not the client's fault
        job = self.import_and_sync()
        self.assertEqual((job["state"], job["generation"]), ("done", 1), job)
        self.assertEqual(self.why("noble")[0], 200)
        self.assert_whole(self.rack)
        status, body = self.why("trusty")
        self.assertEqual(status, 400)
        self.assertEqual(
            body,
            {
                "distro_series": [
                    "'ubuntu/trusty' is not a valid distro_series.  "
                    "It should be one of: 'ubuntu/jammy', 'ubuntu/noble'."
                ]
            },
        )

        # A new version of which one file is corrupt: the old one stays, and the job says which file of what and why.
        self.stream.change(streams.new_version, "noble:amd64").change(streams.corrupt_file, "noble:amd64").write()
        job = self.region.run_import()
        [problem] = [each for each in job["problems"] if each["severity"] == "error"]
        self.assertIn("noble:amd64", problem["product"])
        self.assertEqual(problem["file"], "boot-initrd")
        self.assertIn("sha256", problem["reason"])
        self.assertIn(problem["product"], self.region.log.read_text())
        status, body = self.why("noble")
        self.assertEqual((status, body["architectures"][0]["version"]), (200, "20260101"))

        # The same version name with other content is picked up.
        self.stream.change(streams.same_version, "jammy:arm64").write()
        before = self.rack.snapshot
        self.region.run_import()
        self.rack.wait_in_step()
        self.assertNotEqual(self.rack.snapshot, before)
        self.assert_whole(self.rack)

        # What upstream drops goes, and only that.
        for arch in ("amd64", "arm64"):
            self.stream.change(streams.drop_product, f"jammy:{arch}")
        self.stream.write()
        self.region.run_import()
        self.rack.wait_in_step()
        self.assertEqual(self.why("jammy")[0], 400)
        self.assertEqual(self.why("noble")[0], 200)

    def test_standard_clients_read_the_region_s_stream(self) -> None:
        self.import_and_sync()
        index = f"{self.region.url}/images-stream/streams/v1/index.json"
        query: list[str | Path] = [
            BIN / "python",
            BIN / "sstream-query",
            "--no-verify",
            "--output-format=%(release)s %(ftype)s",
            index,
        ]
        listed = subprocess.run(query, capture_output=True, text=True, timeout=WAIT_SECONDS, check=True).stdout
        self.assertEqual(
            sorted(set(listed.split("\n")[:-1]))[:3], ["jammy boot-initrd", "jammy boot-kernel", "jammy squashfs"]
        )
        target = self.directory / "mirror"
        copy: list[str | Path] = [BIN / "python", BIN / "sstream-mirror", "--no-verify", index, target]
        subprocess.run(copy, capture_output=True, timeout=WAIT_SECONDS, check=True)
        blobs = list((target / "blobs").iterdir())
        self.assertEqual(
            {path.name for path in blobs}, {hashlib.sha256(path.read_bytes()).hexdigest() for path in blobs}
        )
        self.assertGreater(len(blobs), 4)

    def test_sigterm_answers_what_was_asked_and_ends_well(self) -> None:
        self.import_and_sync()
        self.rack.send(signal.SIGSTOP)  # so that an answer takes until the deadline of the round
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(self.region.api("releases/ubuntu/noble/")))
        unread = self._unread()
        asking.start()
        # A connection alone may be one that nobody has asked anything on yet. A ping has not half as many bytes.
        wait_for(lambda: self._unread() > unread + 150, "the rack to be asked")
        self.region.stop()
        asking.join(WAIT_SECONDS)
        self.assertEqual(answers[0][0], 503, answers)
        self.assertIn("did not answer", str(answers[0][1]))
        self.assert_ended_by_sigterm(self.region)
        self.rack.send(signal.SIGCONT)
        self.rack.stop()
        self.assert_ended_by_sigterm(self.rack)

    def assert_ended_by_sigterm(self, daemon: Daemon) -> None:
        # twistd stops in order and then ends itself by the signal that it was sent; systemd takes that for success.
        self.assertEqual(daemon.process and daemon.process.returncode, -signal.SIGTERM)
        self.assertIn("Server Shut Down", daemon.tail())

    def _unread(self) -> int:
        """Bytes that the region has sent over its link, and the rack, which is stopped, has not read."""
        peers = subprocess.run(["ss", "-tnH", "state", "established"], capture_output=True, text=True).stdout
        lines = [line.split() for line in peers.splitlines()]
        return sum(int(waiting) for waiting, _, _, peer, *_ in lines if peer.endswith(f":{self.region.rpc}"))


class KillTests(SystemTestCase):
    def test_a_region_killed_in_an_import_goes_on_with_it_and_serves_the_old_state_meanwhile(self) -> None:
        self.import_and_sync()
        self.stream.change(streams.new_version, "noble:amd64").write()
        self.upstream.hold("boot-initrd")
        number = self.region.start_import()
        self.assertTrue(self.upstream.held.wait(WAIT_SECONDS))
        self.region.kill()
        self.upstream.let_go()
        self.region.start()
        job = wait_for(lambda: (job := self.region.job(number))["ended"] and job, "the killed import's end")
        self.assertEqual(job["state"], "failed")
        wait_for(lambda: self.region.api("releases/ubuntu/noble/")[0] == 200, "the rack to be back")
        self.assertEqual(self.why("noble")[1]["architectures"][0]["version"], "20260101")
        self.assertEqual(self.region.run_import()["state"], "done")
        self.rack.wait_in_step()
        self.assertEqual(self.why("noble")[1]["architectures"][0]["version"], "20260101.1")
        self.assert_whole(self.rack)

    def test_a_rack_killed_in_a_sync_holds_the_old_snapshot_and_then_the_new_one(self) -> None:
        self.import_and_sync()
        self.stream.change(streams.new_version, "noble:amd64").write()
        self.front.hold("/blobs/")
        self.region.run_import()
        self.assertTrue(self.front.held.wait(WAIT_SECONDS))
        self.rack.kill()
        self.assertEqual(self.why("noble")[0], 503)
        self.assert_whole(self.rack)
        self.front.let_go()
        self.rack.start()
        self.rack.wait_in_step()
        self.assert_whole(self.rack)
        self.assertEqual(self.why("noble")[1]["architectures"][0]["version"], "20260101.1")

    def test_a_rack_that_starts_without_its_region_serves_its_snapshot_when_that_is_back(self) -> None:
        self.import_and_sync()
        self.region.stop()
        self.rack.kill()
        self.rack.start()
        self.assert_whole(self.rack)
        asked = len(self.front.paths)
        self.region.start()
        wait_for(lambda: self.region.api("releases/ubuntu/noble/")[0] == 200, "the rack to be back")
        self.rack.wait_in_step()
        self.assertEqual(len(self.front.paths), asked)  # nothing was fetched again

    def test_postgresql_killed_comes_back_and_nothing_is_lost(self) -> None:
        self.import_and_sync()
        data = self.directory / "region" / "postgres" / "data"
        postmaster = int((data / "postmaster.pid").read_text().split()[0])
        os.kill(postmaster, signal.SIGKILL)
        wait_for(lambda: self.region.api("import-jobs/")[0] == 200, "the database to be back")
        # PostgreSQL may still be refusing other connections, which is said and ends.
        wait_for(lambda: self.region.api("boot-resources/?op=import", "POST", {})[0] == 200, "an import to be taken")

        def ended() -> Any:
            status, jobs, _ = self.region.api("import-jobs/")
            return status == 200 and jobs[0]["ended"] and jobs[0]

        job = wait_for(ended, "the import")
        self.assertEqual(job["state"], "done", job)
        self.assertEqual(self.why("noble")[0], 200)


class StartTests(SynchronousTestCase):
    def test_a_region_that_cannot_listen_says_so_and_ends_with_a_failure(self) -> None:
        directory = make_directory()
        self.addCleanup(shutil.rmtree, directory)
        holder = GatedServer(lambda path: None)
        self.addCleanup(holder.close)
        region = Region(directory)
        port = holder.url.rpartition(":")[2]
        region.write_config(region.config.read_text().replace(f"port = {region.http}", f"port = {port}"))
        self.addCleanup(region.kill)
        error = self.assertRaises(AssertionError, region.start)
        self.assertIn("ended with 1", str(error))
        self.assertIn("the region could not start", str(error))
        self.assertIn(port, str(error))

    def test_a_region_whose_database_is_not_there_says_so_and_ends_with_a_failure(self) -> None:
        directory = make_directory()
        self.addCleanup(shutil.rmtree, directory)
        region = Region(directory, top='database = "postgresql://me:secret@127.0.0.1:1/none"')
        self.addCleanup(region.kill)
        text = str(self.assertRaises(AssertionError, region.start))
        self.assertIn("ended with 1", text)
        self.assertIn("127.0.0.1", text)
        self.assertNotIn("secret", text)
