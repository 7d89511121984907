"""Certificates with real processes: renewal, a change of the authority, revocation, and copies of an identity."""

from __future__ import annotations

import base64
import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from rpc.certificates import fingerprint
from rpc.identity import JoinToken
from tests.system.daemons import BIN, WAIT_SECONDS, Rack, Region, make_directory, wait_for

DEBUG = {"STANCHION_LOG_LEVEL": "debug"}


class IdentityTestCase(SynchronousTestCase):
    """A region, and a rack that is linked with it; everything is logged."""

    def setUp(self) -> None:
        self.directory = make_directory()
        self.addCleanup(shutil.rmtree, self.directory)
        self.region = Region(self.directory)
        self.addCleanup(self.end_region)
        self.region.start(environment=DEBUG)
        self.region.make_key()
        self.tokens: list[str] = []
        self.rack = self.make_rack("rack-1")
        self.start(self.rack)

    def end_region(self) -> None:
        # In order, because PostgreSQL outlives a region that was killed by a moment, and the directory is removed now.
        if self.region.process is not None:
            self.region.stop()

    def make_rack(self, name: str) -> Rack:
        """A rack that has joined and does not run."""
        directory = self.directory / name
        directory.mkdir()
        rack = Rack(self.region, directory, name)
        self.addCleanup(rack.kill)
        self.join(rack)
        return rack

    def join(self, rack: Rack, *more: str) -> None:
        token = self.region.join_token_for(1)
        self.tokens.append(token)
        self.region.command(
            "rack", "join", "--config", str(rack.config), "--region", f"127.0.0.1:{self.region.rpc}",
            "--name", rack.rack_name, *more, token,
        )  # fmt: skip

    def start(self, rack: Rack) -> None:
        rack.start(environment=DEBUG)
        wait_for(lambda: self.shown(rack)["connected"], f"{rack.rack_name} to be linked")

    def shown(self, rack: Rack) -> Any:
        [found] = [one for one in self.region.get("rackcontrollers/") if one["hostname"] == rack.rack_name]
        return found

    def rotate(self, *more: str, status: int = 0) -> Any:
        output = self.region.command(
            "region", "rotate-ca", "--json", "--config", str(self.region.config), *more, status=status
        )
        return json.loads(output) if output else None

    def identity(self, rack: Rack) -> Any:
        return json.loads((rack.directory / "rack" / "identity" / "identity.json").read_bytes())

    def in_log(self, daemon: Rack | Region, text: str) -> bool:
        return text in daemon.log.read_text("utf-8", "replace")


class ChangeTests(IdentityTestCase):
    def test_the_authority_is_changed_while_racks_are_linked_and_no_key_is_ever_logged(self) -> None:
        away = self.make_rack("rack-2")
        # Who has joined leaves in order: nothing in the log looks as if that had failed.
        self.assertFalse(self.in_log(self.region, "broke off"))
        before, connected = self.identity(self.rack), self.shown(self.rack)["last_connected"]
        authority = self.directory / "region" / "authority"
        secrets = [before["key"], (authority / "ca.key").read_text(), (authority / "region.key").read_text()]

        begun = self.rotate(status=1)
        self.assertEqual((begun["begun"], begun["waiting_for"]), (True, ["rack-1", "rack-2"]))
        wait_for(lambda: self.rotate(status=1)["waiting_for"] == ["rack-2"], "rack-1 to have renewed")
        after = self.identity(self.rack)
        self.assertNotEqual((after["key"], after["certificate"]), (before["key"], before["certificate"]))
        self.assertEqual(after["ca"].count("BEGIN CERTIFICATE"), 2)
        secrets += [after["key"], (authority / "next.key").read_text(), self.identity(away)["key"]]

        with self.assertRaises(AssertionError) as refused:
            self.rotate("--finish")
        self.assertIn("would be locked out: rack-2", str(refused.exception))
        self.region.join_token_for(1)
        ended = self.rotate("--finish", "--anyway")
        tokens = self.region.command("region", "join-token", "--list", "--json", "--config", str(self.region.config))
        self.assertEqual({one["state"] for one in json.loads(tokens)}, {"revoked", "used up"})
        self.assertEqual(ended["authorities"], [fingerprint((authority / "ca.crt").read_bytes())])
        wait_for(lambda: self.identity(self.rack)["ca"].count("BEGIN CERTIFICATE") == 1, "the old one to be dropped")
        # All that time the rack's link was the same.
        self.assertEqual(self.shown(self.rack)["last_connected"], connected)
        self.assertEqual(self.rack.log.read_text().count("Registered with region"), 1)

        self.rack.kill()
        self.start(self.rack)
        secrets += [self.identity(self.rack)["key"], (authority / "region.key").read_text()]

        # A rack that was away for the whole change is told what to do, and so is whoever reads the region's log.
        away.start(environment=DEBUG)
        wait_for(lambda: self.in_log(away, "or by one that is not this region's any more"), "rack-2 to be refused")
        self.assertTrue(self.in_log(away, "stanchion rack join --again"))
        wait_for(
            lambda: self.in_log(self.region, "away while the region changed its authority"), "the region to say so"
        )
        away.kill()
        self.region.command("racks", "forget", "rack-2")
        self.join(away, "--again")
        self.start(away)

        self.assert_not_logged(secrets, self.rack, away)

    def assert_not_logged(self, keys: list[str], *racks: Rack) -> None:
        logged = "".join(each.log.read_text("utf-8", "replace") for each in (self.region, *racks))
        self.assertIn("Enrolled rack", logged)
        self.assertIn("was given a new certificate", logged)
        self.assertNotIn("PRIVATE KEY", logged)
        for key in keys:
            lines = [line for line in key.splitlines() if line and not line.startswith("-----")]
            self.assertGreater(len(lines), 1)
            for line in lines:
                self.assertNotIn(line, logged)
        for text in self.tokens:
            token = JoinToken.parse(text)
            for form in (text, token.secret.hex(), token.key.hex(), base64.b64encode(token.secret).decode("ascii")):
                self.assertNotIn(form, logged)

    def test_private_keys_are_their_owner_s_only_at_every_step(self) -> None:
        self.rotate(status=1)
        wait_for(lambda: not self.waiting_for(), "the rack to renew")
        files = [*(self.directory / "region" / "authority").glob("*.key"),
                 self.rack.directory / "rack" / "identity" / "identity.json"]  # fmt: skip
        self.assertEqual(len(files), 4)
        for path in files:
            self.assertEqual(path.stat().st_mode & 0o777, 0o600, path)

    def waiting_for(self) -> Any:
        run = subprocess.run(
            [BIN / "stanchion", "region", "rotate-ca", "--json", "--config", self.region.config],
            capture_output=True, text=True, timeout=WAIT_SECONDS, check=False,
        )  # fmt: skip
        found = json.loads(run.stdout)["waiting_for"]
        self.assertEqual(run.returncode, 1 if found else 0)
        return found


class RefusalTests(IdentityTestCase):
    def test_a_revoked_rack_is_cut_off_and_cannot_come_back(self) -> None:
        self.region.command("racks", "revoke", "rack-1")
        wait_for(lambda: self.in_log(self.rack, "was revoked at"), "the rack to be told")
        shown = self.shown(self.rack)
        self.assertTrue(shown["revoked"])
        self.assertFalse(shown["connected"])
        self.assertTrue(self.in_log(self.region, "Closing the link of rack"))
        self.rack.kill()
        told = self.rack.log.stat().st_size
        self.rack.start(environment=DEBUG)
        wait_for(lambda: "was revoked at" in self.rack.log.read_text()[told:], "the rack to be told again")
        self.assertFalse(self.shown(self.rack)["connected"])
        self.assertTrue(self.in_log(self.region, "was not answered: RegistrationRefused"))
        self.rack.kill()
        self.region.command("racks", "forget", "rack-1")
        self.join(self.rack, "--again")
        self.start(self.rack)

    def test_a_rack_s_new_name_is_shown_and_its_link_stays(self) -> None:
        self.region.command("racks", "rename", "rack-1", "cellar")
        self.rack.rack_name = "cellar"
        self.assertTrue(self.shown(self.rack)["connected"])

    def test_a_token_that_was_revoked_is_of_no_use(self) -> None:
        token = self.region.join_token_for(1)
        config = str(self.region.config)
        number = JoinToken.parse(token).id
        self.region.command("region", "join-token", "--config", config, "--revoke", number)
        listed = json.loads(self.region.command("region", "join-token", "--config", config, "--list", "--json"))
        self.assertEqual({one["id"]: one["state"] for one in listed}[number], "revoked")
        self.region.command("region", "join-token", "--config", config, "--revoke", "0" * 16, status=1)
        directory = self.directory / "other"
        directory.mkdir()
        other = Rack(self.region, directory, "other")
        self.region.command(
            "rack", "join", "--config", str(other.config), "--region", f"127.0.0.1:{self.region.rpc}", "--name",
            "other", token, status=1,
        )  # fmt: skip
        self.assertTrue(self.in_log(self.region, "the join token was revoked at"))

    def test_a_copy_of_an_identity_is_refused_while_the_first_is_alive_and_not_when_it_hangs(self) -> None:
        directory = self.directory / "copy"
        directory.mkdir()
        copy = Rack(self.region, directory, "copy")
        self.addCleanup(copy.kill)
        identity = Path("rack") / "identity"
        shutil.copytree(self.rack.directory / identity, copy.directory / identity)
        copy.start(environment=DEBUG)
        said = "is linked already, from 127.0.0.1:"
        wait_for(lambda: self.in_log(copy, said), "the second one to be told")
        wait_for(lambda: self.in_log(self.region, said), "the region to say so")
        self.assertEqual(self.rack.log.read_text().count("Registered with region"), 1)
        self.assertFalse(self.in_log(copy, "Registered with region"))
        self.rack.send(signal.SIGSTOP)  # its machine is up and acknowledges, but nobody answers
        wait_for(lambda: self.in_log(copy, "Registered with region"), "the other to be let in")
        self.rack.send(signal.SIGCONT)
