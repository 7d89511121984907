"""How a rack gets its identity and its settings, and what is said when either is no good."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Coroutine
from contextlib import redirect_stdout
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

from attrs import evolve
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from rack import joining
from rack.config import RackConfig
from rack.identity import Identity, NotJoined, read_identity, write_identity
from rack.plugin import Options, make_service
from rack.service import RackService
from rpc.addresses import split_address
from rpc.certificates import CertificateInvalid, create_authority, issue_rack, make_request, new_key
from rpc.cli import build_parser
from rpc.commands import EnrolmentRefused
from rpc.console import CommandFailed, Status
from rpc.failures import LinkLost
from rpc.identity import JoinToken
from rpc.settings import SettingsError, load, parse

NOW = datetime.now(UTC)
AUTHORITY = create_authority(NOW)


def an_identity(region: str = "region.example:5250", system_id: str = "abc234") -> Identity:
    """An identity with real keys."""
    key = new_key()
    certificate = issue_rack(AUTHORITY, make_request(key), system_id, NOW)
    return Identity(
        system_id, "rack-1", region, certificate.decode("ascii"), AUTHORITY.certificate.decode("ascii"),
        key.decode("ascii"),
    )  # fmt: skip


class FilesTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.root.mkdir(parents=True)
        self.settings = self.root / "rack.toml"
        self.settings.write_text(f'state_directory = "{self.root}/state"\n')
        self.directory = self.root / "state" / "identity"


class TestIdentity(FilesTestCase):
    def test_what_was_written_is_read_and_only_its_owner_may(self) -> None:
        identity = an_identity()
        path = write_identity(self.directory, identity)
        self.assertEqual(read_identity(self.directory), identity)
        self.assertEqual(path.stat().st_mode & 0o777, 0o600)
        self.assertEqual(self.directory.stat().st_mode & 0o777, 0o700)
        again = an_identity(system_id="xyz789")
        write_identity(self.directory, again)
        self.assertEqual(read_identity(self.directory), again)
        self.assertEqual(os.listdir(self.directory), ["identity.json"])

    def test_without_one_the_command_to_run_is_said(self) -> None:
        with self.assertRaises(NotJoined) as caught:
            read_identity(self.directory)
        self.assertIn("stanchion rack join --region HOST:PORT TOKEN", str(caught.exception))

    def test_a_key_is_never_shown(self) -> None:
        self.assertNotIn("PRIVATE", repr(an_identity()))

    def test_one_that_is_no_good_is_named_with_what_is_wrong(self) -> None:
        good, other = an_identity(), an_identity()
        path = write_identity(self.directory, good)
        document = json.loads(path.read_bytes())
        for changes, said in (
            ({"key": other.key}, "not for this rack's key"),
            ({"key": "-"}, "key"),
            ({"certificate": "-"}, "certificate"),
            ({"certificate": AUTHORITY.certificate.decode("ascii")}, "certificate"),
            ({"ca": create_authority(NOW).certificate.decode("ascii")}, "not signed by its authority"),
            ({"system_id": "other1"}, "for rack abc234, not other1"),
            ({"region": "nowhere"}, "nowhere"),
            ({"name": 5}, "name"),
            ({"name": "n\u00e4", "ca": "\u00e4"}, "no good"),
        ):
            path.write_text(json.dumps({**document, **changes}))
            with self.assertRaises(NotJoined) as caught:
                read_identity(self.directory)
            self.assertIn(said, str(caught.exception))
            self.assertIn("stanchion rack join", str(caught.exception))
            self.assertIn(str(path), str(caught.exception))
        for text in ("", "{", "[]", "[" * 100_000):
            path.write_text(text)
            with self.assertRaises(NotJoined):
                read_identity(self.directory)


class TestSettings(FilesTestCase):
    def refused(self, text: str) -> str:
        with self.assertRaises(SettingsError) as caught:
            parse(RackConfig, text, "rack.toml")
        message = str(caught.exception)
        self.assertNotIn("\n", message)
        return message

    def test_the_file_that_is_installed_has_the_defaults_and_every_setting(self) -> None:
        path = Path(__file__).parents[2] / "etc" / "rack.toml"
        self.assertEqual(load(RackConfig, path), RackConfig())

    def test_a_wrong_setting_is_named(self) -> None:
        for text, said in (
            ('state_dir = "/x"', "state_dir"),
            ("regions = 5", "regions"),
            ('regions = ["region"]', "regions"),
            ('regions = ["region:0"]', "regions"),
            ('regions = ["fd00::1:5250"]', "regions"),
            ("[sync]\nconcurrency = 0", "sync.concurrency"),
            ("[sync]\nconcurrency = 4.5", "sync.concurrency"),
            ("[sync]\ninterval_minutes = -1", "sync.interval_minutes"),
            ('[sync]\nproxy = "ftp://proxy"', "sync.proxy"),
            ('[sync]\nproxy = "http://[::1"', "sync.proxy"),
            ("[sync]\nidle_timeout_seconds = 0", "sync.idle_timeout_seconds"),
        ):
            self.assertIn(said, self.refused(text))

    def test_addresses(self) -> None:
        self.assertEqual(split_address("region.example:5250"), ("region.example", 5250))
        self.assertEqual(split_address("[fd00::1]:5250"), ("fd00::1", 5250))
        for wrong in ("", ":", "host:", ":5", "host:x", "host:65536", "host:٣", "::1:5", "[]:5"):
            with self.assertRaises(ValueError) as caught:
                split_address(wrong)
            self.assertIn(repr(wrong), str(caught.exception))


class TestPlugin(FilesTestCase):
    def exits_with(self, path: Path) -> str:
        options = Options()
        options.parseOptions(["--config", str(path)])
        with self.assertRaises(SystemExit) as caught:
            make_service(options, None)
        message = caught.exception.code
        assert isinstance(message, str)  # which Python writes to standard error, and exits with 1
        self.assertNotIn("\n", message)
        return message

    def test_settings_that_are_wrong_end_the_command_with_one_line(self) -> None:
        self.settings.write_text("[sync]\nconcurency = 4\n")
        self.assertIn(
            "sync.concurency is not a setting (did you mean sync.concurrency?)", self.exits_with(self.settings)
        )
        self.assertIn("nowhere.toml", self.exits_with(self.root / "nowhere.toml"))

    def test_a_rack_that_has_not_joined_ends_with_the_command_to_run(self) -> None:
        self.assertIn("stanchion rack join --region HOST:PORT TOKEN", self.exits_with(self.settings))

    def test_a_rack_that_has_joined_is_made(self) -> None:
        write_identity(self.directory, an_identity())
        options = Options()
        options.parseOptions(["--config", str(self.settings)])
        self.assertIsInstance(make_service(options, None), RackService)


class TestJoining(FilesTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.token = JoinToken.create(AUTHORITY.certificate)
        self.asked: list[tuple[str, str]] = []

    def join(self, *more: str, token: str | None = None) -> int:
        arguments = build_parser(["rack.cli"]).parse_args(
            ["rack", "join", "--config", str(self.settings), "--region", "region.example:5250", *more,
             token or self.token.format()]
        )  # fmt: skip
        status: int = arguments.run(arguments)
        return status

    def enrol_gives(self, identity: Identity) -> None:
        async def join(reactor: object, region: str, token: JoinToken, name: str) -> Identity:
            self.assertEqual(token, self.token)
            self.asked.append((region, name))
            return evolve(identity, region=region, name=name)

        def run_in_reactor(work: Callable[[object], Coroutine[Deferred[object], object, Identity]]) -> Identity:
            return self.successResultOf(Deferred.fromCoroutine(work(Clock())))

        self.patch(joining, "join", join)
        self.patch(joining, "run_in_reactor", run_in_reactor)

    def test_what_the_region_issued_is_kept_and_said(self) -> None:
        identity = an_identity()
        self.enrol_gives(identity)
        output = StringIO()
        with redirect_stdout(output):
            self.assertEqual(self.join("--name", "rack-9"), Status.YES)
        self.assertIn("joined region.example:5250 as rack-9 (abc234)", output.getvalue())
        self.assertEqual(read_identity(self.directory), evolve(identity, name="rack-9"))

    def test_json_is_printed_for_programs(self) -> None:
        self.enrol_gives(an_identity())
        output = StringIO()
        with redirect_stdout(output):
            self.assertEqual(self.join("--json"), Status.YES)
        printed = json.loads(output.getvalue())
        self.assertEqual((printed["system_id"], printed["name"]), ("abc234", joining.default_name()))

    def fails(self, status: Status, *more: str, token: str | None = None) -> str:
        with self.assertRaises(CommandFailed) as caught:
            self.join(*more, token=token)
        self.assertEqual(caught.exception.status, status)
        return str(caught.exception)

    def test_a_rack_that_has_joined_does_not_join_again_by_mistake(self) -> None:
        write_identity(self.directory, an_identity())
        self.enrol_gives(an_identity())
        self.assertIn("--again", self.fails(Status.USAGE))
        self.assertEqual(self.asked, [])
        remembered = self.directory.parent / "regions.json"
        remembered.write_text('{"addresses": ["the-other-region.example:5250"]}')
        output = StringIO()
        with redirect_stdout(output):
            self.assertEqual(self.join("--again"), Status.YES)
        self.assertIn("systemctl restart stanchion-rack", output.getvalue())  # it may run, with what it was
        self.assertFalse(remembered.exists())

    def test_a_token_is_not_used_up_when_the_key_could_not_be_kept(self) -> None:
        self.enrol_gives(an_identity())
        (self.root / "state").write_bytes(b"a file where the directory should be")
        self.assertIn(str(self.directory), self.fails(Status.USAGE))
        self.assertEqual(self.asked, [])

    def test_what_is_wrong_on_the_command_line_is_said(self) -> None:
        self.enrol_gives(an_identity())
        self.assertIn("token", self.fails(Status.USAGE, token="stanchion-xyz"))
        self.assertIn("HOST:PORT", self.fails(Status.USAGE, "--region", "region.example"))

    def test_how_enrolling_fails_decides_what_is_said_and_the_exit_status(self) -> None:
        for error, status in (
            (EnrolmentRefused("the token was used already"), Status.NO),
            (CertificateInvalid("not for this key"), Status.NO),
            (LinkLost("its authority is not the one that the token names", 0.0), Status.UNREACHABLE),
            (ConnectionRefusedError(), Status.UNREACHABLE),
        ):

            async def refuse(*arguments: Any, error: Exception = error) -> None:
                raise error

            self.patch(joining, "enrol", refuse)
            failure = self.failureResultOf(
                Deferred.fromCoroutine(joining.join(None, "region.example:5250", self.token, "rack-1")), CommandFailed
            )
            self.assertEqual(failure.value.status, status)
            self.assertIn("region.example:5250", str(failure.value))
            self.assertIn(str(error), str(failure.value))
