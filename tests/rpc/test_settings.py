"""Settings: what fits is loaded exactly, and what does not is one line that names file and key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from attrs import field, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from rpc.settings import SettingsError, at_least, between, keys, load, parse, satisfies


@frozen
class Listen:
    address: str = "127.0.0.1"
    port: int = field(default=5240, validator=between(1, 65535))


@frozen
class Import:
    minutes: float = field(default=60.0, validator=at_least(1))
    proxy: str = field(default="", validator=satisfies(lambda url: not url or "://" in url, "must be a URL"))
    auto: bool = True


@frozen
class Example:
    state: Path
    name: str = "region"
    mode: Literal["any", "all"] = "any"
    racks: tuple[str, ...] = ()
    keyring: Path | None = None
    http: Listen = Listen()
    import_: Import = Import()


class TestLoading(SynchronousTestCase):
    def problem(self, text: str) -> str:
        error = self.assertRaises(SettingsError, parse, Example, text, "/etc/example.toml")
        line = str(error)
        self.assertNotIn("\n", line)
        self.assertTrue(line.startswith("/etc/example.toml: "), line)
        return line.removeprefix("/etc/example.toml: ")

    def test_a_file_with_every_key_is_loaded_as_it_stands(self):
        loaded = parse(
            Example,
            """
            state = "/var/lib/x"
            name = "r"
            mode = "all"
            racks = ["a", "b"]
            keyring = "/usr/share/k.gpg"
            http = {address = "::", port = 80}
            [import]
            minutes = 5
            proxy = "http://p:3128"
            auto = false
            """,
        )
        self.assertEqual(
            loaded,
            Example(
                Path("/var/lib/x"),
                "r",
                "all",
                ("a", "b"),
                Path("/usr/share/k.gpg"),
                Listen("::", 80),
                Import(5.0, "http://p:3128", False),
            ),
        )
        self.assertIsInstance(loaded.import_.minutes, float)

    def test_what_is_not_set_has_its_default(self):
        self.assertEqual(parse(Example, 'state = "/s"'), Example(Path("/s")))

    def test_a_relative_path_is_relative_to_the_directory_of_the_file(self):
        self.assertEqual(parse(Example, 'state = "../s"', "/etc/stanchion/region.toml").state, Path("/etc/s"))

    def test_an_unknown_key_is_named_with_the_one_that_is_meant(self):
        self.assertEqual(
            self.problem('state = "/s"\nhttp = {prot = 1}'), "http.prot is not a setting (did you mean http.port?)"
        )

    def test_a_key_outside_its_table_is_told_where_it_belongs(self):
        self.assertEqual(self.problem('state = "/s"\nproxy = "x"'), "proxy is not a setting (it belongs in [import])")

    def test_an_unknown_key_that_resembles_none_is_answered_with_the_list(self):
        self.assertEqual(
            self.problem('state = "/s"\nzzz = 1'),
            "zzz is not a setting (the settings here are http, import, keyring, mode, name, racks, state)",
        )

    def test_the_key_with_the_trailing_underscore_of_the_attribute_is_unknown(self):
        self.assertIn("import_ is not a setting (did you mean import?)", self.problem('state = "/s"\nimport_ = {}'))

    def test_a_missing_key_is_named(self):
        self.assertEqual(self.problem(""), "state is missing")

    def test_every_type_is_taken_at_its_word(self):
        for text, problem in [
            ("name = 5", "name must be text, not the number 5"),
            ("http = {port = '80'}", "http.port must be a whole number, not the text '80'"),
            ("http = {port = true}", "http.port must be a whole number, not true"),
            ("http = {port = 80.0}", "http.port must be a whole number, not the number 80.0"),
            ("import = {auto = 1}", "import.auto must be true or false, not the number 1"),
            ("import = {minutes = true}", "import.minutes must be a number, not true"),
            ("http = 80", "http must be a table, not the number 80"),
            ("racks = 'a'", "racks must be a list, not the text 'a'"),
            ("racks = ['a', 5]", "racks must be text, not the number 5"),
            ("mode = 'some'", "mode must be one of 'any', 'all', not the text 'some'"),
            ("keyring = []", "keyring must be a path, not a list"),
            ("keyring = ''", "keyring must be a path, not the text ''"),
            ("name = 1979-05-27", "name must be text, not the date 1979-05-27"),
        ]:
            with self.subTest(text):
                self.assertEqual(self.problem(f'state = "/s"\n{text}'), problem)

    def test_a_value_out_of_bounds_is_named_with_its_table(self):
        for text, problem in [
            ("http = {port = 0}", "http.port must be from 1 to 65535, not 0"),
            ("import = {minutes = 0.5}", "import.minutes must be 1 or more, not 0.5"),
            ("import = {proxy = 'p'}", "import.proxy must be a URL, not 'p'"),
        ]:
            with self.subTest(text):
                self.assertEqual(self.problem(f'state = "/s"\n{text}'), problem)

    def test_a_password_in_a_wrong_value_is_not_shown(self):
        problem = self.problem("state = '/s'\nimport = {proxy = 'http:/someone:p@ss@proxy.example.com:3128'}")
        self.assertEqual(problem, "import.proxy must be a URL, not '…@proxy.example.com:3128'")

    def test_all_that_is_wrong_is_said_at_once(self):
        problem = self.problem("name = 5\nhttp = {port = 'x', prot = 1}")
        for part in ("state is missing", "name must be text", "http.port must be", "http.prot is not a setting"):
            self.assertIn(part, problem)

    def test_what_is_not_toml_is_said_with_its_line(self):
        self.assertIn("is not TOML: ", self.problem("state = \n"))
        self.assertIn("line 1", self.problem("state = \n"))

    @settings(deadline=None)
    @given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda s: st.lists(s, max_size=3)))
    def test_any_value_is_loaded_or_refused_in_one_line(self, value):
        shown = {None: "1e400", True: "true", False: "false"}.get(value) if not isinstance(value, list) else None
        text = shown or (str(value) if isinstance(value, int) else repr(value).replace("'", '"'))
        try:
            loaded = parse(Example, f'state = "/s"\nname = {text}', "/etc/example.toml")
        except SettingsError as error:
            self.assertNotIn("\n", str(error))
        else:
            self.assertIsInstance(loaded.name, str)

    def test_the_keys_of_a_class_are_listed_with_their_tables(self):
        self.assertEqual(
            list(keys(Example)),
            [
                "state",
                "name",
                "mode",
                "racks",
                "keyring",
                "http.address",
                "http.port",
                "import.minutes",
                "import.proxy",
                "import.auto",
            ],
        )


class TestFiles(SynchronousTestCase):
    def setUp(self):
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.path = self.directory / "region.toml"

    def test_a_file_is_read(self):
        self.path.write_text('state = "state"')
        self.assertEqual(load(Example, self.path).state, self.directory.absolute() / "state")

    def test_a_file_that_is_not_there_is_named_with_what_to_do(self):
        self.assertEqual(
            str(self.assertRaises(SettingsError, load, Example, self.path)),
            f"{self.path}: there is no such file; write one, or name another with --config",
        )

    def test_a_file_that_cannot_be_read_is_named_with_the_reason(self):
        os.mkdir(self.path)
        self.assertEqual(
            str(self.assertRaises(SettingsError, load, Example, self.path)),
            f"{self.path}: cannot be read: Is a directory",
        )

    def test_a_file_that_is_not_text_is_named(self):
        self.path.write_bytes(b'state = "\xff"')
        self.assertIn(
            "is not UTF-8 text: byte 9 is 0xff", str(self.assertRaises(SettingsError, load, Example, self.path))
        )
