"""The API's edges: dispatch, authentication, bodies as real clients send them, and errors; over fake parts."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from attrs import evolve
from twisted.internet.defer import Deferred, execute
from twisted.internet.task import Clock
from twisted.logger import ILogObserver, globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase

from region.api import Api, Authenticator, Parts
from region.api.keys import ApiKey
from region.api.operations import Call, Operation, Parameter, Reply, document
from region.api.routes import OPERATIONS
from region.api.site import BODY_LIMIT, DISCARDED, limit_of
from region.database import DatabaseUnavailable
from tests.region.fakes import EPOCH, Keys
from tests.region.web import AUTHORIZATION, Connection, Response, form

P = ParamSpec("P")
T = TypeVar("T")


async def echo(parts: Parts, call: Call) -> Reply:
    shown = {name: repr(value) if not isinstance(value, str) else value for name, value in call.values.items()}
    return document({"path": dict(call.path), "values": shown, "who": call.key.name if call.key else None})


class Boom(Exception):
    """What a broken handler raises."""


class ApiTestCase(SynchronousTestCase):
    """An API of a few operations."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(EPOCH)
        self.keys = Keys()
        self.waiting: list[Deferred[Reply]] = []
        self.done = 0
        self.raises: Exception = Boom("boom")

        async def broken(parts: Parts, call: Call) -> Reply:
            raise self.raises

        async def slow(parts: Parts, call: Call) -> Reply:
            waiting: Deferred[Reply] = Deferred()
            self.waiting.append(waiting)
            reply = await waiting
            self.done += 1
            return reply

        fields = (
            Parameter("name", "A name."),
            Parameter("many", "Names.", many=True),
            Parameter("count", "A number.", kind="integer", minimum=1, maximum=9),
            Parameter("flag", "A truth value.", kind="boolean"),
            Parameter("data", "Bytes.", kind="file"),
            Parameter("choice", "One of two.", choices=("a", "b")),
        )
        operations = (
            Operation("GET", "/things/", "Things", "read", echo, "", parameters=fields),
            Operation("POST", "/things/", "Things", "create", echo, "", parameters=fields),
            Operation("POST", "/things/", "Things", "act", echo, "", op="act", parameters=fields),
            Operation("POST", "/scripts/", "Scripts", "create", echo, "", parameters=fields),
            Operation("PUT", "/things/{id}/", "Thing", "update", echo, "", parameters=fields),
            Operation("GET", "/open/", "Open", "read", echo, "", anonymous=True),
            Operation("GET", "/broken/", "Broken", "read", broken, ""),
            Operation("GET", "/slow/", "Slow", "read", slow, ""),
            Operation("POST", "/slow/", "Slow", "create", slow, ""),
        )
        self.authenticator = Authenticator(self.keys, self.clock)
        self.threads = 0
        self.api = Api(cast(Parts, None), self.authenticator, operations, run_in_thread=self.run_in_thread)
        self.connection = Connection(self.api.resource(), self.clock)

    def run_in_thread(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        self.threads += 1
        return execute(function, *args, **kwargs)

    def ask(self, method: str, path: str, *arguments: Any, **keywords: Any) -> Response:
        self.connection.send(method, path, *arguments, **keywords)
        return self.connection.response(method)


class Dispatch(ApiTestCase):
    """Which operation a request is for."""

    def test_the_op_may_be_in_the_query_or_in_the_body(self) -> None:
        for response in (self.ask("POST", "things/?op=act"), self.ask("POST", "things/", **form(op="act"))):
            self.assertEqual((response.status, response.json["values"]), (200, {}))

    def test_an_unknown_op_is_named(self) -> None:
        response = self.ask("POST", "things/?op=x")
        self.assertEqual((response.status, response.headers["Content-Type"]), (400, "text/plain; charset=utf-8"))
        self.assertEqual(response.text.splitlines()[0], "Unrecognised signature: method=POST op=x")
        self.assertIn("act", response.text)

    def test_two_different_ops_are_refused(self) -> None:
        response = self.ask("POST", "things/?op=act", **form(op="other"))
        self.assertEqual((response.status, response.text), (400, "The request names more than one op: act, other."))

    def test_a_wrong_method_is_405_and_says_which_are_right(self) -> None:
        response = self.ask("DELETE", "things/")
        self.assertEqual((response.status, response.headers["Allow"]), (405, "GET, POST"))
        self.assertEqual(response.text, "DELETE cannot be used here; use GET or POST.")

    def test_an_unknown_path_is_404(self) -> None:
        response = self.ask("GET", "nothing/here/")
        self.assertEqual((response.status, response.text), (404, "There is nothing at /MAAS/api/2.0/nothing/here/."))

    def test_an_address_that_cannot_be_one_is_400_and_is_no_error_of_the_region(self) -> None:
        # Anybody can send that, so it must not fill the log with tracebacks.
        for path, host in (("%ff/", "x"), ("", "\xff.example.com"), ("", "a..b"), ("", "x" * 300)):
            with self.subTest(path=path, host=host):
                response = self.ask("GET", f"things/{path}", Host=host)
                self.assertEqual(response.status, 400)
                self.assertEqual(response.headers.get_content_type(), "text/plain")
                self.assertIn("Host header", response.text)
                self.assertIsNotNone(response.headers["X-Correlation-Id"])
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_the_trailing_slash_may_be_left_out(self) -> None:
        self.assertEqual(self.ask("GET", "things").status, 200)

    def test_names_in_the_path_reach_the_operation(self) -> None:
        self.assertEqual(self.ask("PUT", "things/a%20b/").json["path"], {"id": "a b"})

    def test_head_is_answered_as_get_without_the_body(self) -> None:
        response = self.ask("HEAD", "things/")
        self.assertEqual((response.status, response.body), (200, b""))
        self.assertGreater(int(response.headers["Content-Length"]), 0)

    def test_every_response_has_a_correlation_id_and_the_hash_of_the_description(self) -> None:
        responses = [self.ask("GET", path) for path in ("things/", "things/?x=1", "nothing/")]
        for response in responses:
            self.assertTrue(re.fullmatch("[0-9a-f]{40}", response.headers["X-MAAS-API-Hash"]))
            self.assertTrue(re.fullmatch("[0-9a-f]{32}", response.headers["X-Correlation-Id"]))
        self.assertEqual(len({response.headers["X-Correlation-Id"] for response in responses}), 3)


class Bodies(ApiTestCase):
    """Bodies as clients send them."""

    def test_one_nameless_empty_part_says_nothing(self) -> None:
        # What libmaas sends with a POST that has no parameters.
        boundary = "===============6203829938388274412=="
        for body in (f"--{boundary}\r\n\r\n\r\n--{boundary}--\r\n", f"--{boundary}\n\n--{boundary}--\n"):
            response = self.ask(
                "POST", "things/?op=act", body.encode(), Content_Type=f'multipart/form-data; boundary="{boundary}"'
            )
            self.assertEqual((response.status, response.body and response.json["values"]), (200, {}))

    def test_base64_parts_are_decoded(self) -> None:
        # What maas and libmaas send for each parameter.
        body = "".join(
            f'--B\r\nContent-Transfer-Encoding: base64\r\nContent-Disposition: form-data; name="{name}"{more}\r\n'
            f"MIME-Version: 1.0\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n"
            f"{base64.b64encode(value).decode()}\r\n"
            for name, value, more in (("name", "nöble".encode(), ""), ("data", b"\x00\xff\r\n", '; filename="k"'))
        )
        response = self.ask(
            "POST", "things/", f"{body}--B--\r\n".encode(), Content_Type="multipart/form-data; boundary=B"
        )
        self.assertEqual(response.json["values"]["name"], "nöble")
        self.assertEqual(response.json["values"]["data"], repr_of_file(b"\x00\xff\r\n"))

    def test_plain_parts_keep_their_bytes(self) -> None:
        body = b'--B\r\nContent-Disposition: form-data; name="data"; filename="k"\r\n\r\n\x00\r\xff\n\r\n\r\n--B--\r\n'
        response = self.ask("POST", "things/", body, Content_Type="multipart/form-data; boundary=B")
        self.assertEqual(response.json["values"]["data"], repr_of_file(b"\x00\r\xff\n\r\n"))

    def test_bytes_without_a_file_name_are_a_file(self) -> None:
        # libmaas sends them so.
        for kind, data in (("application/octet-stream", b"text"), ("text/plain", b"\xff")):
            body = b'--B\r\nContent-Disposition: form-data; name="data"\r\nContent-Type: %s\r\n\r\n%s\r\n--B--\r\n'
            response = self.ask(
                "POST", "things/", body % (kind.encode(), data), Content_Type="multipart/form-data; boundary=B"
            )
            self.assertEqual(response.json["values"]["data"], repr_of_file(data))

    def test_bytes_where_text_belongs_are_refused(self) -> None:
        body = b'--B\r\nContent-Disposition: form-data; name="name"\r\n\r\n\xff\r\n--B--\r\n'
        response = self.ask("POST", "things/", body, Content_Type="multipart/form-data; boundary=B")
        self.assertEqual((response.status, response.json), (400, {"name": ["This is not UTF-8 text."]}))

    def test_an_urlencoded_form_may_repeat_a_name(self) -> None:
        response = self.ask("POST", "things/", **form(many=["a", "b"], count="3", flag="true"))
        self.assertEqual(response.json["values"], {"many": "('a', 'b')", "count": "3", "flag": "True"})

    def test_json_is_understood(self) -> None:
        body = json.dumps({"many": ["a", "b"], "count": 3, "flag": False, "name": None}).encode()
        response = self.ask("PUT", "things/1/", body, Content_Type="application/json")
        self.assertEqual(response.json["values"], {"many": "('a', 'b')", "count": "3", "flag": "False"})

    def test_a_body_without_a_type_is_a_form(self) -> None:
        self.assertEqual(self.ask("POST", "things/", b"name=x").json["values"], {"name": "x"})

    def test_a_malformed_body_is_400_and_says_what_is_wrong_with_it(self) -> None:
        for content_type, body, words in (
            ("application/json", b"{", "not JSON"),
            ("application/json", b"[1]", "must be a JSON object"),
            ("application/json", b"[" * 100_000, "not JSON"),
            ("application/json", b'{"name": {"a": 1}}', "'name' must be text"),
            ("application/json", b'{"many": [' + b"1," * 1000 + b"1]}", "1001 values; at most 1000"),
            ("multipart/form-data", b"name=x", "not multipart/form-data"),
            ("multipart/form-data; boundary=B", b"--C\r\n\r\nx\r\n--C--", "not multipart/form-data"),
            ("multipart/form-data; boundary=B", b"--B\r\n\r\nx\r\n--B--\r\n", "without a name"),
            ("application/x-www-form-urlencoded", b"name=%ff", "not a form"),
            ("application/x-www-form-urlencoded", b"&".join([b"name=x"] * 1001), "not a form"),
            ("text/xml", b"<a/>", "Content-Type 'text/xml' is not understood"),
        ):
            response = self.ask("POST", "things/", body, Content_Type=content_type)
            self.assertEqual(response.status, 400, body[:40])
            self.assertIn(words, response.text)

    def test_a_large_body_is_read_in_a_thread(self) -> None:
        self.ask("POST", "things/", b'{"name": "small"}', Content_Type="application/json")
        self.assertEqual(self.threads, 0)
        body = json.dumps({"name": "x" * (64 << 10)}).encode()
        response = self.ask("POST", "things/", body, Content_Type="application/json")
        self.assertEqual((response.status, self.threads), (200, 1))

    def test_a_body_over_the_limit_is_413(self) -> None:
        response = self.ask("POST", "things/", b"x" * (BODY_LIMIT + 1))
        self.assertEqual(response.status, 413)
        self.assertIn("at most 1048576 bytes", response.text)
        self.assertEqual(self.ask("GET", "things/").status, 200)

    def test_uploads_may_be_larger_where_there_are_any(self) -> None:
        for path, limit in (
            (b"/MAAS/api/2.0/scripts/", 4 << 20), (b"/MAAS/api/2.0/scripts", 4 << 20),
            (b"/MAAS/api/2.0/scripts/a/?op=x", 4 << 20), (b"/MAAS/metadata/latest/", 16 << 20),
            (b"//MAAS///metadata/latest", 16 << 20), (b"/MAAS/api/2.0/scripts-of-others/", BODY_LIMIT),
            (b"/MAAS/api/2.0/machines/?next=/MAAS/metadata/", BODY_LIMIT), (b"", BODY_LIMIT),
        ):  # fmt: skip
            self.assertEqual(limit_of(path), limit, path)
        body = json.dumps({"name": "x" * BODY_LIMIT}).encode()
        self.assertEqual(self.ask("POST", "scripts/", body, Content_Type="application/json").status, 200)
        self.assertEqual(self.ask("POST", "things/", body, Content_Type="application/json").status, 413)
        self.connection.send("POST", "scripts/", Content_Length=str(DISCARDED + 1))
        self.assertEqual(self.connection.response().status, 413)

    def test_a_body_over_the_limit_that_comes_in_chunks_is_413(self) -> None:
        self.connection.send("POST", "things/", Transfer_Encoding="chunked", Content_Length="0")
        self.connection = Connection(self.api.resource(), self.clock)
        head = f"POST /MAAS/api/2.0/things/ HTTP/1.1\r\nHost: x\r\nAuthorization: {AUTHORIZATION}\r\n"
        self.connection.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(17):
            self.connection.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
        self.connection.write(b"0\r\n\r\n")
        self.assertEqual(self.connection.response().status, 413)

    def test_an_absurd_body_is_refused_before_it_is_read(self) -> None:
        self.connection.send("POST", "things/", Content_Length=str(DISCARDED + 1))
        response = self.connection.response()
        self.assertEqual((response.status, response.headers["Connection"]), (413, "close"))
        self.assertTrue(self.connection.transport.disconnecting)


def repr_of_file(data: bytes) -> str:
    return f"FileValue(data={data!r})"


class Parameters(ApiTestCase):
    """What the table says of parameters holds."""

    def test_every_wrong_parameter_is_named_with_what_is_wrong(self) -> None:
        response = self.ask("GET", "things/?count=many&flag=perhaps&choice=c&name=a&name=b&nmae=x")
        self.assertEqual((response.status, response.headers["Content-Type"]), (400, "application/json; charset=utf-8"))
        self.assertEqual(
            response.json,
            {
                "count": ["'many' is not a whole number."],
                "flag": ["'perhaps' is neither true nor false."],
                "choice": ["'c' is not a valid choice.  It should be one of: 'a', 'b'."],
                "name": ["This is given 2 times; give it once."],
                "nmae": ["GET things/ has no such parameter; it has name, many, count, flag, data, choice."],
            },
        )

    def test_numbers_have_bounds(self) -> None:
        for text, words in (("0", "less than 1"), ("10", "more than 9"), ("9" * 30, "too many digits")):
            self.assertIn(words, self.ask("GET", f"things/?count={text}").json["count"][0])

    def test_nul_is_refused(self) -> None:
        self.assertEqual(self.ask("GET", "things/?name=a%00b").status, 400)


class Authentication(ApiTestCase):
    """Who may call."""

    def test_the_parts_of_the_header_may_come_in_any_order_with_any_realm(self) -> None:
        parts = ['oauth_signature="%26secret"', 'oauth_token="token"', 'oauth_consumer_key="consumer"',
                 'oauth_signature_method="PLAINTEXT"']  # fmt: skip
        for realm in ("", 'realm="OAuth", ', 'realm="MAAS+API",'):
            for order in (parts, parts[::-1]):
                response = self.ask("GET", "things/", key=False, Authorization=f"OAuth {realm}{','.join(order)}")
                self.assertEqual((response.status, response.json["who"]), (200, "someone"))

    def test_a_request_without_a_good_key_is_401_and_says_why(self) -> None:
        good = AUTHORIZATION
        for header, words in (
            (None, "No Authorization header"),
            ("Basic eDp5", "not one of OAuth 1.0"),
            ("OAuth", "not one of OAuth 1.0"),
            ("OAuth nonsense", "not one of OAuth 1.0"),
            (good.replace("PLAINTEXT", "HMAC-SHA1"), "only PLAINTEXT"),
            (good.replace("%26secret", "%26wrong"), "Invalid API key"),
            (good.replace("%26secret", ""), "Invalid API key"),
            (good.replace("%26secret", "secret"), "Invalid API key"),
            (good.replace('"token"', '"other"'), "Invalid API key"),
            (good.replace('"consumer"', '"other"'), "Invalid API key"),
            (good.replace('oauth_token="token",', ""), "lacks oauth_consumer_key or oauth_token"),
        ):
            headers = {"Authorization": header} if header is not None else {}
            response = self.ask("GET", "things/", key=False, **headers)
            self.assertEqual(response.status, 401, header)
            self.assertIn(words, response.text)
            self.assertTrue(response.text.startswith("Authorization Error: "))
            self.assertIn("OAuth realm=", response.headers["WWW-Authenticate"])
            self.assertTrue(response.headers["Date"].endswith("GMT"))

    def test_an_anonymous_operation_needs_no_key(self) -> None:
        self.assertEqual(self.ask("GET", "open/", key=False).json["who"], None)

    def test_without_a_key_nobody_learns_which_ops_there_are(self) -> None:
        self.assertEqual(self.ask("POST", "things/?op=x", key=False).status, 401)

    def test_a_good_key_is_looked_up_once_in_five_seconds(self) -> None:
        for _ in range(3):
            self.ask("GET", "things/")
        self.assertEqual(self.keys.looked_up, [("consumer", "token")])
        self.clock.advance(4.9)
        self.assertEqual(self.ask("GET", "things/").status, 200)
        self.keys.known.clear()
        self.clock.advance(0.2)
        self.assertEqual(self.ask("GET", "things/").status, 401)

    def test_a_revoked_key_is_refused_at_once_when_that_is_heard_of(self) -> None:
        self.ask("GET", "things/")
        self.keys.known.clear()
        self.assertEqual(self.ask("GET", "things/").status, 200)
        self.authenticator.forget()
        self.assertEqual(self.ask("GET", "things/").status, 401)

    def test_a_key_that_is_revoked_while_it_is_looked_up_is_not_remembered(self) -> None:
        self.keys.pending = Deferred()
        connection = Connection(self.api.resource(), self.clock)
        connection.send("GET", "things/")
        self.authenticator.forget()
        self.keys.pending.callback(None)
        self.assertEqual(connection.response().status, 200)  # it was good when it was looked up
        self.keys.known.clear()
        self.assertEqual(self.ask("GET", "things/").status, 401)

    def test_a_look_up_that_fails_when_nobody_waits_any_more_is_logged(self) -> None:
        self.keys.pending, self.keys.error = Deferred(), ZeroDivisionError("division by zero")
        connection = Connection(self.api.resource(), self.clock)
        connection.send("GET", "things/")
        connection.hang_up()
        self.keys.pending.callback(None)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_a_bad_key_is_never_remembered_as_good(self) -> None:
        self.keys.known.clear()
        self.assertEqual(self.ask("GET", "things/").status, 401)
        self.keys.add()
        self.assertEqual(self.ask("GET", "things/").status, 200)

    def test_clients_that_come_together_share_one_look_up(self) -> None:
        self.keys.pending = Deferred()
        connections = [Connection(self.api.resource(), self.clock) for _ in range(10)]
        for connection in connections:
            connection.send("GET", "things/")
        connections[0].hang_up()
        self.assertEqual(len(self.keys.looked_up), 1)
        self.keys.pending.callback(None)
        self.assertEqual({connection.response().status for connection in connections[1:]}, {200})

    def test_a_database_that_is_away_makes_no_key_wrong(self) -> None:
        self.keys.error = DatabaseUnavailable("cannot connect to database x: refused")
        response = self.ask("GET", "things/")
        self.assertEqual((response.status, response.headers["Retry-After"]), (503, "5"))


class Errors(ApiTestCase):
    """What is the region's own fault is 5xx, logged under the correlation id, and told without details."""

    def test_an_unforeseen_error_is_500_and_logged_once_under_the_correlation_id(self) -> None:
        response = self.ask("GET", "broken/")
        self.assertEqual((response.status, response.headers["Content-Type"]), (500, "text/plain; charset=utf-8"))
        self.assertIn(response.headers["X-Correlation-Id"], response.text)
        self.assertNotIn("boom", response.text)
        self.assertEqual(len(self.flushLoggedErrors(Boom)), 1)

    def test_the_log_names_the_request_and_the_correlation_id(self) -> None:
        events: list[Any] = []
        observer = cast(ILogObserver, events.append)
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)
        response = self.ask("GET", "broken/")
        self.flushLoggedErrors(Boom)
        (event,) = [event for event in events if "log_failure" in event]
        self.assertEqual(event["correlation"], response.headers["X-Correlation-Id"])
        self.assertEqual(event["path"], "/MAAS/api/2.0/broken/")

    def test_a_lost_database_is_503_with_retry_after(self) -> None:
        self.raises = DatabaseUnavailable("lost the connection to database x: terminated")
        response = self.ask("GET", "broken/")
        self.assertEqual((response.status, response.headers["Retry-After"]), (503, "5"))
        self.assertIn(response.headers["X-Correlation-Id"], response.text)

    def test_a_client_that_hangs_up_ends_what_it_waited_for_quietly(self) -> None:
        self.connection.send("GET", "slow/")
        self.connection.hang_up()
        self.assertTrue(self.waiting[0].called)
        self.assertEqual((self.done, self.flushLoggedErrors()), (0, []))

    def test_a_client_that_hangs_up_does_not_take_back_what_it_asked_for(self) -> None:
        self.connection.send("POST", "slow/")
        self.connection.hang_up()
        self.waiting[0].callback(Reply())
        self.assertEqual((self.done, self.flushLoggedErrors()), (1, []))


class Table(SynchronousTestCase):
    """The table of routes itself."""

    def test_names_of_operations_are_unique(self) -> None:
        names = [operation.name for operation in OPERATIONS]
        self.assertEqual(len(set(names)), len(names))

    def test_only_what_describes_the_api_is_anonymous(self) -> None:
        self.assertEqual(
            {operation.path for operation in OPERATIONS if operation.anonymous},
            {"/version/", "/openapi.json", "/describe/"},
        )

    def test_the_documentation_has_every_operation_and_no_other(self) -> None:
        text = (Path(__file__).parents[2] / "docs" / "api.rst").read_text()
        documented = re.findall(r"``((?:GET|POST|PUT|DELETE) [a-z][^`]*)``", text)
        self.assertEqual(sorted(documented), sorted(operation.signature for operation in OPERATIONS))

    def test_the_documentation_has_every_parameter(self) -> None:
        text = (Path(__file__).parents[2] / "docs" / "api.rst").read_text()
        for operation in OPERATIONS:
            for parameter in operation.parameters:
                self.assertIn(f"``{parameter.name}``", text, operation.name)

    def test_a_key_never_shows_its_secret(self) -> None:
        key = evolve(Keys.default())
        self.assertIsInstance(key, ApiKey)
        self.assertNotIn(key.token_secret, repr(key))
        self.assertEqual(key.text, "consumer:token:secret")
