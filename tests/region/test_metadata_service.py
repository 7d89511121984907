"""The metadata service over HTTP: who is let in, what is answered when, and that no failure of ours is a 4xx."""

from __future__ import annotations

import base64
import email
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.resource import Resource

from region.commissioning.intake import SignalRefused, TooMuch, UnknownNode, UnknownResult
from region.commissioning.signals import Signal, SignalStatus, StatusMessage
from region.database import CommitUnknown, DatabaseUnavailable
from region.metadata.service import Known, MetadataParts, MetadataResource
from region.metadata.userdata import runner_archive, user_data
from region.nodes.statuses import NodeStatus
from region.nodes.values import NodeName, Standing
from region.scripts.archive import DevicesUnknown
from tests.region.web import AUTHORIZATION, Connection, Response, form

P = ParamSpec("P")
T = TypeVar("T")

NODE = NodeName(1, "abc123", "node-1.maas")
STANDING = Standing(NodeStatus.COMMISSIONING, stop=False)


class Fakes:
    """A node, its scripts, and a store that keeps what it is given or fails as it is told."""

    def __init__(self) -> None:
        self.status = NodeStatus.COMMISSIONING
        self.expired = False
        self.retired = self.retired_seen = False
        self.finds = 0
        self.token = ""
        self.token_seen: str | None = None
        self.pings: list[str] = []
        self.archive: bytes | None = b"tar"
        self.devices_are_known = True
        self.stored: list[Signal | StatusMessage] = []
        self.standing_now = STANDING
        self.storing: Callable[[], Deferred[None]] = lambda: succeed(None)

    async def find(self, consumer_key: str, token_key: str) -> Known | None:
        if (consumer_key, token_key) != ("consumer", "token"):
            return None
        self.finds += 1
        return Known(NODE, self.status, "secret", self.retired, self.expired, self.token)

    async def signal(self, node: NodeName, signal: Signal, *, retired: bool = False, token: str = "") -> Standing:
        self.retired_seen, self.token_seen = retired, token
        if token and self.expired:
            raise UnknownNode("The token has expired")
        await self.storing()
        self.stored.append(signal)
        return self.standing_now

    async def message(self, node: NodeName, message: StatusMessage, *, retired: bool = False) -> None:
        await self.storing()
        self.stored.append(message)

    async def ping(self, node: NodeName, heard: str) -> None:
        self.pings.append(heard)

    async def standing(self, node: NodeName, *, retired: bool = False) -> Standing:
        return self.standing_now

    async def pending(self, node_id: int) -> bytes | None:
        if not self.devices_are_known:
            raise DevicesUnknown("not yet")
        return self.archive


def _now(function: Callable[P, T], /, *arguments: P.args, **options: P.kwargs) -> Deferred[T]:
    return succeed(function(*arguments, **options))


class ServiceTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.fakes = Fakes()
        parts = MetadataParts(self.fakes, self.fakes, self.fakes, _now)
        self.connection = Connection(Resource(), Clock(), MetadataResource(parts))

    def ask(self, path: str, method: str = "GET", **options: Any) -> Response:
        self.connection.send(method, f"/MAAS/metadata/{path}", **options)
        return self.connection.response(method)

    def signal(self, path: str = "2012-03-01/", headers: Any = (), **fields: Any) -> Response:
        return self.ask(path, "POST", **form(**{"op": "signal", "status": "WORKING", **fields}), **dict(headers))


class RememberedTests(ServiceTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.fakes.token = "token"

    def test_signals_are_stored_without_asking_again_whose_token_it_is(self) -> None:
        for _ in range(3):
            self.assertEqual(self.signal().status, 200)
        self.assertEqual((self.fakes.finds, self.fakes.token_seen), (1, "token"))

    def test_whether_it_is_good_still_and_retired_is_for_the_transaction_to_say(self) -> None:
        self.fakes.retired = True
        self.signal()
        self.signal()
        self.assertEqual((self.fakes.retired_seen, self.fakes.token_seen), (False, "token"))
        self.fakes.expired = True
        answer = self.signal()
        self.assertEqual((answer.status, self.fakes.finds), (401, 1))
        self.assertIn("has expired", answer.text)

    def test_a_wrong_secret_is_no_better_for_a_token_that_is_remembered(self) -> None:
        self.signal()
        wrong = AUTHORIZATION.replace("%26secret", "%26wrong")
        self.assertEqual(self.signal(headers={"Authorization": wrong}).status, 401)

    def test_everything_else_is_asked_for_anew(self) -> None:
        self.signal()
        self.fakes.expired = True
        self.assertEqual(self.ask("latest/meta-data/instance-id").status, 401)
        self.assertEqual(self.ask("latest/maas-scripts").status, 401)


class ReadingTests(ServiceTestCase):
    def test_a_node_reads_what_it_is(self) -> None:
        for version in ("latest", "2012-03-01"):
            self.assertEqual(self.ask(f"{version}/meta-data/instance-id").body, b"abc123")
            self.assertEqual(self.ask(f"{version}/meta-data/local-hostname").body, b"node-1.maas")
            self.assertEqual(self.ask(f"{version}/meta-data/public-keys").body, b"")
            self.assertEqual(
                self.ask(f"{version}/meta-data/").text.split(),
                ["instance-id", "local-hostname", "public-keys", "vendor-data"],
            )

    def test_repeated_slashes_are_one(self) -> None:
        self.connection.send("GET", "//MAAS//metadata///2012-03-01//meta-data//instance-id")
        self.assertEqual(self.connection.response().body, b"abc123")

    def test_versions_are_told_to_anybody_and_others_are_404(self) -> None:
        self.assertEqual(self.ask("", key=False).text.split(), ["2012-03-01", "latest"])
        for path in ("2009-04-04/meta-data/", "latest/nothing", "latest/meta-data/x", "latest/meta-data/a/b"):
            self.assertEqual(self.ask(path).status, 404, path)

    def test_a_wrong_method_says_which_is_right(self) -> None:
        answer = self.ask("latest/user-data", "PUT", body=b"x")
        self.assertEqual((answer.status, answer.headers["Allow"]), (405, "GET"))

    def test_scripts_are_an_archive_or_204_and_say_where_the_node_stands(self) -> None:
        answer = self.ask("latest/maas-scripts")
        self.assertEqual(
            (answer.status, answer.headers["Content-Type"], answer.body), (200, "application/x-tar", b"tar")
        )
        self.assertEqual(answer.headers["X-Stanchion-Status"], "Commissioning")
        self.fakes.archive = None
        self.assertEqual((self.ask("latest/maas-scripts").status), 204)
        self.fakes.devices_are_known = False
        answer = self.ask("latest/maas-scripts")
        self.assertEqual((answer.status, answer.headers["Retry-After"]), (503, "2"))
        self.assertEqual(answer.headers["X-Stanchion-Status"], "Commissioning")
        self.fakes.devices_are_known = True

    def test_fetching_scripts_counts_as_being_heard_of_unless_the_token_is_retired(self) -> None:
        self.ask("latest/maas-scripts")
        self.assertEqual(self.fakes.pings, ["fetched its scripts"])
        self.fakes.retired = True
        self.ask("latest/maas-scripts")
        self.assertEqual(len(self.fakes.pings), 1)

    def test_a_node_that_has_to_stop_gets_no_scripts(self) -> None:
        self.fakes.standing_now = Standing(NodeStatus.BROKEN, stop=True)
        answer = self.ask("latest/maas-scripts")
        self.assertEqual((answer.status, answer.headers["X-Stanchion-Stop"]), (204, "true"))

    def test_head_has_no_body(self) -> None:
        answer = self.ask("latest/meta-data/instance-id", "HEAD")
        self.assertEqual((answer.status, answer.headers["Content-Length"], answer.body), (200, "6", b""))


class AuthenticationTests(ServiceTestCase):
    PATHS = (
        "latest/", "latest/meta-data/", "latest/meta-data/instance-id", "latest/user-data", "latest/maas-scripts",
        "latest/nothing",
    )  # fmt: skip

    def test_nothing_is_given_out_without_a_token(self) -> None:
        for path in self.PATHS:
            answer = self.ask(path, key=False)
            self.assertEqual(answer.status, 401, path)
            self.assertNotIn(b"abc123", answer.body)
            self.assertIn("OAuth", answer.headers["WWW-Authenticate"])
        self.assertEqual(self.ask("latest/", "POST", key=False, **form(op="signal", status="OK")).status, 401)
        self.assertEqual(self.ask("status/abc123", "POST", key=False, body=b"{}").status, 401)
        self.assertEqual(self.fakes.stored, [])

    def test_a_refusal_has_the_date_that_clocks_are_set_by(self) -> None:
        answer = self.ask("latest/", key=False)
        self.assertIsNotNone(parsedate_to_datetime(answer.headers["Date"]))
        self.assertTrue(answer.headers["Date"].endswith("GMT"))

    def test_a_wrong_secret_and_an_unknown_token_read_alike(self) -> None:
        header = (
            'OAuth oauth_signature_method="PLAINTEXT", oauth_consumer_key="consumer", oauth_token="{}", '
            'oauth_signature="%26{}"'
        )
        answers = [
            self.ask("latest/", key=False, Authorization=header.format(token, secret))
            for token, secret in (("token", "wrong"), ("another", "secret"), ("another", "-"))
        ]
        self.assertEqual({answer.status for answer in answers}, {401})
        self.assertEqual(len({answer.body for answer in answers}), 1)

    def test_a_token_that_has_expired_is_refused_and_says_so(self) -> None:
        self.fakes.expired = True
        answer = self.signal()
        self.assertEqual(answer.status, 401)
        self.assertIn("expired", answer.text)
        self.assertEqual(self.fakes.stored, [])

    def test_a_node_tells_of_itself_alone(self) -> None:
        answer = self.ask("status/zzz999", "POST", body=b"{}")
        self.assertEqual(answer.status, 403)


class SignalTests(ServiceTestCase):
    def test_a_signal_is_answered_with_ok_and_where_the_node_stands(self) -> None:
        answer = self.signal(error="x")
        self.assertEqual((answer.status, answer.body), (200, b"OK"))
        self.assertEqual(answer.headers["X-Stanchion-Status"], "Commissioning")
        self.assertEqual(answer.headers["X-Stanchion-Stop"], "false")
        self.assertEqual(self.fakes.stored, [Signal(SignalStatus.WORKING, "x")])

    def test_who_asks_for_json_gets_it(self) -> None:
        self.fakes.standing_now = Standing(NodeStatus.FAILED_COMMISSIONING, stop=True)
        answer = self.signal(headers={"Accept": "application/json"})
        self.assertEqual(answer.json, {"status": 2, "status_name": "Failed commissioning", "stop": True})

    def test_fields_may_be_in_the_query(self) -> None:
        self.assertEqual(self.ask("latest/?op=signal&status=OK", "POST").status, 200)
        self.assertEqual(self.fakes.stored, [Signal(SignalStatus.OK)])

    def test_it_is_not_answered_before_it_is_stored(self) -> None:
        storing: Deferred[None] = Deferred()
        self.fakes.storing = lambda: storing
        self.connection.send("POST", "/MAAS/metadata/latest/?op=signal&status=OK")
        self.assertFalse(self.connection.is_answered)
        storing.callback(None)
        self.assertEqual(self.connection.response("POST").status, 200)

    def test_a_node_that_hangs_up_does_not_take_back_what_it_sent(self) -> None:
        storing: Deferred[None] = Deferred()
        self.fakes.storing = lambda: storing
        self.connection.send("POST", "/MAAS/metadata/latest/?op=signal&status=OK")
        self.connection.hang_up()
        storing.callback(None)
        self.assertEqual(len(self.fakes.stored), 1)

    def test_a_wrong_request_is_400_and_says_what_is_wrong(self) -> None:
        self.assertEqual(self.signal(status="DONE").status, 400)
        self.assertIn("op=other", self.ask("latest/", "POST", **form(op="other", status="OK")).text)
        self.assertIn("op=none", self.ask("latest/", "POST", **form(status="OK")).text)
        self.assertEqual(self.fakes.stored, [])

    def test_a_signal_about_what_is_not_the_nodes_is_400(self) -> None:
        def refuse() -> Deferred[None]:
            raise UnknownResult("77 is no script result of node x")

        self.fakes.storing = refuse
        answer = self.signal(script_result_id="77")
        self.assertEqual(answer.status, 400)
        self.assertIn("77 is no script result", answer.text)

    def test_what_comes_with_a_retired_token_is_stored_as_such(self) -> None:
        self.fakes.retired = True
        self.assertEqual(self.signal().status, 200)
        self.assertTrue(self.fakes.retired_seen)

    def test_no_failure_of_ours_is_a_4xx(self) -> None:
        for error in (
            ValueError("x"),
            KeyError("x"),
            MemoryError(),
            TypeError("x"),
            UnicodeDecodeError("a", b"", 0, 1, "x"),
        ):

            def fail(error: BaseException = error) -> Deferred[None]:
                raise error

            self.fakes.storing = fail
            answer = self.signal()
            self.assertEqual(answer.status, 500, error)
            logged = self.flushLoggedErrors(type(error))
            self.assertEqual(len(logged), 1)
            self.assertIn(answer.headers["X-Correlation-Id"], answer.text)

    def test_a_database_that_is_away_is_503_with_retry_after(self) -> None:
        for error in (DatabaseUnavailable("gone"), CommitUnknown("who knows")):

            def fail(error: BaseException = error) -> Deferred[None]:
                raise error

            self.fakes.storing = fail
            answer = self.signal()
            self.assertEqual((answer.status, answer.headers["Retry-After"]), (503, "5"))


class StatusTests(ServiceTestCase):
    BODY = json.dumps(
        {"event_type": "start", "origin": "cloudinit", "name": "init-network", "description": "x", "timestamp": 1.0}
    ).encode()

    def test_a_message_without_a_content_type_is_204_once_it_is_stored(self) -> None:
        answer = self.ask("status/abc123", "POST", body=self.BODY)
        self.assertEqual((answer.status, answer.body), (204, b""))
        self.assertEqual(self.fakes.stored, [StatusMessage("start", "cloudinit", "init-network", "x", 1.0)])

    def test_a_message_that_is_none_is_400_and_one_that_cannot_be_stored_500(self) -> None:
        self.assertEqual(self.ask("status/abc123", "POST", body=b"{").status, 400)

        def fail() -> Deferred[None]:
            raise RuntimeError("x")

        self.fakes.storing = fail
        self.assertEqual(self.ask("status/abc123", "POST", body=self.BODY).status, 500)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_what_there_is_no_room_for_says_so_and_when_there_may_be_some(self) -> None:
        for error, status, wait in (
            (TooMuch("it has enough", is_rate=False), 400, None), (TooMuch("it has enough", is_rate=True), 429, "600"),
        ):  # fmt: skip

            def refuse(error: SignalRefused = error) -> Deferred[None]:
                raise error

            self.fakes.storing = refuse
            for answer in (self.signal(op="signal", status="OK"), self.ask("status/abc123", "POST", body=self.BODY)):
                self.assertEqual((answer.status, answer.headers["Retry-After"]), (status, wait))
                self.assertIn("cannot be stored: it has enough", answer.text)


class UserDataTests(ServiceTestCase):
    def test_only_a_node_with_something_to_run_has_user_data(self) -> None:
        self.assertEqual(self.ask("latest/user-data").body, user_data())
        self.fakes.status = NodeStatus.READY
        answer = self.ask("latest/user-data")
        self.assertEqual(answer.status, 404)
        self.assertIn("Ready", answer.text)

    def test_it_is_multipart_with_one_shell_script_that_carries_the_runner(self) -> None:
        message = email.message_from_bytes(user_data())
        (part,) = [part for part in message.walk() if not part.is_multipart()]
        self.assertEqual((part.get_content_type(), part.get_filename()), ("text/x-shellscript", "user_data.sh"))
        script = part.get_payload(decode=True)
        assert isinstance(script, bytes)
        self.assertTrue(script.startswith(b"#!/bin/sh\n"))
        encoded = script.split(b"<<'STANCHION_RUNNER'\n")[1].split(b"\nSTANCHION_RUNNER\n")[0]
        self.assertEqual(base64.b64decode(encoded), runner_archive())
        path = Path(self.mktemp())
        path.write_bytes(script)
        self.assertEqual(subprocess.run(["sh", "-n", path], capture_output=True).stderr, b"")

    def run_with(self, python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run user-data on a machine whose Python is a shell script; nothing on it takes a while."""
        (part,) = [part for part in email.message_from_bytes(user_data()).walk() if not part.is_multipart()]
        directory = Path(self.mktemp()).resolve()
        directory.mkdir()
        for name, text in (("python3", python), ("sleep", "exit 0")):
            (directory / name).write_text(f"#!/bin/sh\n{text}\n")
            (directory / name).chmod(0o755)
        content = part.get_payload(decode=True)
        assert isinstance(content, bytes)
        (directory / "user_data.sh").write_bytes(content)
        return subprocess.run(
            ["/bin/sh", "user_data.sh", *arguments], cwd=directory, capture_output=True, text=True, timeout=60,
            env={"PATH": f"{directory}:{os.environ['PATH']}"},
        )  # fmt: skip

    def test_a_runner_that_is_killed_is_started_again_and_its_exit_status_is_that_of_all(self) -> None:
        counting = 'echo "$2" >> calls; '
        ended = self.run_with(counting + '[ "$(wc -l < calls)" -gt 2 ] && exit 1; kill -9 $$', "--given")
        self.assertEqual((ended.returncode, ended.stderr.count("was killed (exit status 137)")), (1, 2))
        ended = self.run_with(counting + "kill -9 $$")
        self.assertEqual((ended.returncode, ended.stderr.count("it is started again")), (137, 19))
        for status, python in [(number, f"exit {number}") for number in range(4)] + [(143, "kill -TERM $$")]:
            ended = self.run_with(python)
            self.assertEqual((ended.returncode, "it is started again" in ended.stderr), (status, False))

    def test_what_keeps_the_runner_from_starting_is_said(self) -> None:
        message = email.message_from_bytes(user_data())
        (part,) = [part for part in message.walk() if not part.is_multipart()]
        script = part.get_payload(decode=True)
        assert isinstance(script, bytes)
        programs = Path(self.mktemp()).resolve()
        programs.mkdir()
        for name, status, words in (
            ("mktemp", 1, "no directory for the runner"), ("base64", 1, "the runner cannot be written")
        ):  # fmt: skip
            broken = programs / name
            broken.write_text("#!/bin/sh\nexit 1\n")
            broken.chmod(0o755)
            ran = subprocess.run(
                ["sh", "-s"], input=script, capture_output=True, env={"PATH": f"{programs}:/usr/bin:/bin"}, timeout=60
            )
            broken.unlink()
            self.assertEqual(ran.returncode, status, name)
            self.assertIn(words.encode(), ran.stderr)

    def test_the_runner_is_the_package_node_alone_and_the_same_each_time(self) -> None:
        names = zipfile.ZipFile(io.BytesIO(runner_archive())).namelist()
        self.assertIn("node/__init__.py", names)
        self.assertTrue(all(name.startswith("node/") or name == "__main__.py" for name in names), names)
        self.assertFalse(any("__pycache__" in name for name in names))
        fresh = subprocess.run(
            [sys.executable, "-c", "import sys; from region.metadata.userdata import user_data; "
             "sys.stdout.buffer.write(user_data())"],
            capture_output=True, check=True, env={"PYTHONPATH": ":".join(sys.path)},
        )  # fmt: skip
        self.assertEqual(fresh.stdout, user_data())
