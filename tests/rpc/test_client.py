"""The command line's HTTP client: the key goes where it was meant to go, and every failure says what it was."""

from __future__ import annotations

import socket

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from rpc.client import Client, Refused, Unreachable
from rpc.console import CommandFailed, Status
from rpc.profile import Profile, base_url
from tests.rpc.region_server import RegionServer, Told


class TestClient(SynchronousTestCase):
    def setUp(self):
        self.region = RegionServer()
        self.region.start()
        self.addCleanup(self.region.stop)
        self.client = Client(Profile(self.region.url, "con:tok:sec"), timeout=5)

    def refused(self, told: Told) -> Refused:
        self.region.answers["GET", "racks/"] = told
        error: Refused = self.assertRaises(Refused, self.client.get, "racks/")
        return error

    def test_json_is_decoded_and_text_is_text(self):
        self.region.answers["GET", "a/"] = {"x": ["ü"]}
        self.region.answers["GET", "b/"] = "begun"
        self.assertEqual(self.client.get("a/"), {"x": ["ü"]})
        self.assertEqual(self.client.get("b/"), "begun")

    def test_the_key_is_sent_as_oauth_plaintext(self):
        self.region.answers["GET", "a/"] = []
        self.client.get("a/")
        header = self.region.seen[0].headers["Authorization"]
        self.assertTrue(header.startswith("OAuth "))
        for part in (
            'oauth_signature_method="PLAINTEXT"',
            'oauth_consumer_key="con"',
            'oauth_token="tok"',
            'oauth_signature="%26sec"',
        ):
            self.assertIn(part, header)

    def test_without_a_key_nothing_is_sent(self):
        self.region.answers["GET", "version/"] = {}
        Client(Profile(self.region.url)).get("version/")
        self.assertNotIn("Authorization", self.region.seen[0].headers)

    def test_query_and_form_carry_lists_and_leave_out_what_is_not_set(self):
        self.region.answers["GET", "r/"] = []
        self.region.answers["POST", "s/"] = {}
        self.client.get("r/", arch="amd64", rack=["a", "b"], policy=None)
        self.client.post("s/", {"os": "ubuntu", "arches": ["amd64", "arm64"]}, op="make")
        self.assertEqual(self.region.seen[0].query, {"arch": ["amd64"], "rack": ["a", "b"]})
        self.assertEqual(self.region.seen[1].query, {"op": ["make"]})
        self.assertEqual(self.region.seen[1].form, {"os": ["ubuntu"], "arches": ["amd64", "arm64"]})

    def test_a_redirect_is_not_followed_because_the_key_would_go_along(self):
        error = self.refused(Told("", 302, {"Location": "http://elsewhere.example/"}))
        self.assertIn("redirects to 'http://elsewhere.example/'", str(error))
        self.assertEqual(len(self.region.seen), 1)

    def test_no_proxy_of_the_environment_is_used(self):
        self.patch(
            __import__("os"), "environ", {"http_proxy": "http://127.0.0.1:1", "HTTP_PROXY": "http://127.0.0.1:1"}
        )
        self.region.answers["GET", "a/"] = []
        self.assertEqual(self.client.get("a/"), [])

    def test_messages_by_field_become_a_sentence(self):
        error = self.refused(Told({"distro_series": ["'x' is not valid."], "arch": ["no."]}, 400))
        self.assertIn("): distro_series: 'x' is not valid.; arch: no", str(error))
        self.assertEqual(error.status, Status.USAGE)

    def test_a_fault_of_the_region_names_where_its_log_tells_more(self):
        error = self.refused(Told("broken", 500, {"X-Correlation-Id": "abc123"}))
        self.assertIn("under abc123", str(error))
        self.assertEqual(error.status, Status.UNREACHABLE)

    def test_the_exit_status_follows_the_code(self):
        error = self.refused(Told("rack-1 has not said.", 503, {"X-Correlation-Id": "abc123", "Retry-After": "10"}))
        self.assertIn("the region cannot do that now (503 to GET ", str(error))
        self.assertTrue(str(error).endswith(": rack-1 has not said; try again in 10 s"), str(error))
        for code, status in [(401, 2), (400, 2), (404, 1), (409, 1), (500, 3), (503, 3)]:
            with self.subTest(code):
                self.assertEqual(self.refused(Told("no", code)).status, status)

    def test_an_error_cannot_write_to_the_terminal(self):
        self.assertNotIn("\x1b", str(self.refused(Told("\x1b[2Jgone", 500))))

    def test_json_that_is_none_is_an_error(self):
        self.region.answers["GET", "a/"] = Told("{", 200, {"Content-Type": "application/json"})
        error = self.assertRaises(CommandFailed, self.client.get, "a/")
        self.assertIn("answered with JSON that is none", str(error))
        self.assertEqual(error.status, Status.UNREACHABLE)

    def test_another_server_is_not_taken_for_a_region_whatever_it_answers(self):
        documents: list[object] = [[], {}, "<html>welcome</html>"]
        for document in documents:
            self.region.answers["GET", "a/"] = Told(document, headers={"X-MAAS-API-Hash": ""})
            error = self.assertRaises(CommandFailed, self.client.get, "a/")
            self.assertIn("not as a Stanchion region does", str(error))
            self.assertEqual(error.status, Status.UNREACHABLE)

    def test_a_key_without_three_parts_is_refused_before_it_is_sent(self):
        for key in ("a:b", "a:b:c:d", "a::c", "abc"):
            with self.subTest(key):
                error = self.assertRaises(CommandFailed, Client(Profile(self.region.url, key)).get, "a/")
                self.assertEqual(error.status, Status.USAGE)
        self.assertEqual(self.region.seen, [])


class TestUnreachable(SynchronousTestCase):
    def test_a_closed_port_is_said(self):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        error = self.assertRaises(Unreachable, Client(Profile(f"http://127.0.0.1:{port}"), timeout=5).get, "a/")
        self.assertIn(f"http://127.0.0.1:{port}: the connection is refused", str(error))
        self.assertEqual(error.status, Status.UNREACHABLE)

    def test_a_server_that_closes_without_a_word_is_an_error(self):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            sock.listen()
            import threading

            def close():
                sock.accept()[0].close()

            thread = threading.Thread(target=close)
            thread.start()
            self.assertRaises(Unreachable, Client(Profile(f"http://127.0.0.1:{sock.getsockname()[1]}")).get, "a/")
            thread.join()


class TestBaseUrl(SynchronousTestCase):
    def test_what_people_write_becomes_the_root(self):
        for text, url in [
            ("region:5240", "http://region:5240"),
            ("http://region:5240/", "http://region:5240"),
            ("http://region:5240/MAAS", "http://region:5240"),
            ("http://region:5240/MAAS/api/2.0/", "http://region:5240"),
            ("https://proxy.example/tenant/MAAS/", "https://proxy.example/tenant"),
            ("http://[::1]:5240", "http://[::1]:5240"),
        ]:
            with self.subTest(text):
                self.assertEqual(base_url(text), url)

    def test_what_is_no_address_of_a_region_is_refused(self):
        for text in ("ftp://region", "http://", "http://user@region", "http://region:port", "http://[::1", "file:///x"):
            with self.subTest(text):
                self.assertEqual(self.assertRaises(CommandFailed, base_url, text).status, Status.USAGE)

    @settings(deadline=None)
    @given(st.text(max_size=30))
    def test_any_text_is_a_root_or_refused(self, text):
        try:
            url = base_url(text)
        except CommandFailed:
            return
        self.assertEqual(base_url(url), url)
