"""How many processors lscpu says there are, in each of the forms that it prints."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from region.hardware.outputs import HookError
from region.hardware.processors import Processors, read_processors
from tests.examples import examples

TABLE = """Architecture:                         x86_64
CPU op-mode(s):                       32-bit, 64-bit
CPU(s):                               8
On-line CPU(s) list:                  0-3,6
Off-line CPU(s) list:                 4,5,7
Vendor ID:                            GenuineIntel
Model name:                           Intel(R) Xeon(R) Gold 6130 CPU @ 2.10GHz
Thread(s) per core:                   2
Core(s) per socket:                   4
Socket(s):                            1
NUMA node(s):                         1
NUMA node0 CPU(s):                    0-3,6
"""
PARSABLE = "# The following is the parsable format\n# CPU,Core,Socket,Node,,L1d\n0,0,0,0,,0\n1,1,0,0,,1\n"


def read(text: str) -> Processors:
    return read_processors({"stdout": text.encode()})


def as_json(table: str, *, nested: bool) -> str:
    parts = [line.partition(":") for line in table.splitlines()]
    fields = [{"field": f"{name}:", "data": value.strip()} for name, _, value in parts]
    if nested:
        first, *others = fields
        return json.dumps({"lscpu": [{**first, "children": [{"field": "x", "data": None, "children": others}]}]})
    return json.dumps({"lscpu": fields})


class ReadTests(SynchronousTestCase):
    def test_processors_that_are_offline_do_not_count(self) -> None:
        found = read(TABLE)
        self.assertEqual(found.count, 5)
        self.assertEqual(
            found.facts,
            {
                "architecture": "x86_64", "vendor": "GenuineIntel", "offline": "4,5,7", "sockets": 1, "numa_nodes": 1,
                "model": "Intel(R) Xeon(R) Gold 6130 CPU @ 2.10GHz", "cores_per_socket": 4, "threads_per_core": 2,
            },
        )  # fmt: skip

    def test_json_says_the_same_nested_or_not(self) -> None:
        self.assertEqual(read(as_json(TABLE, nested=False)), read(TABLE))
        self.assertEqual(read(as_json(TABLE, nested=True)), read(TABLE))

    def test_each_row_of_the_parsable_format_is_a_processor(self) -> None:
        self.assertEqual(read(PARSABLE), Processors(2, {}))

    def test_without_a_list_of_those_online_all_count(self) -> None:
        self.assertEqual(read("CPU(s): 4\nOn-line CPU(s) list: \n").count, 4)
        for listed in ("0-", "3-1", "0,0", "a", "0-3:", "1-2,2"):
            self.assertEqual(read(f"CPU(s): 4\nOn-line CPU(s) list: {listed}\n").count, 4, listed)

    def test_a_table_in_another_language_is_refused_unless_it_says_how_many(self) -> None:
        with self.assertRaisesRegex(HookError, "LC_ALL=C"):
            read("Architecture : x86_64\nProcesseur(s) : 8\nListe de processeur(s) en ligne : 0-7\n")
        self.assertEqual(read("Architektur: x86_64\nCPU(s): 8\nListe der Online-CPU(s): 0-7\n").count, 8)

    def test_no_processors_and_more_than_can_be_are_refused(self) -> None:
        for text in ("CPU(s): 0", "CPU(s): many", "CPU(s): -1", "CPU(s): 99999999999", '{"lscpu": null}', '{"a": 1}'):
            with self.assertRaises(HookError):
                read(text)
        with self.assertRaisesRegex(HookError, "which cannot be"):
            read("CPU(s): 4\nOn-line CPU(s) list: 0-7\n")
        with self.assertRaisesRegex(HookError, "which cannot be"):
            read("On-line CPU(s) list: 0-9999999\n")

    @examples(50)
    @given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=10))
    def test_a_list_of_ranges_names_as_many_as_are_in_it(self, ranges: list[tuple[int, int]]) -> None:
        listed, last, count = [], -1, 0
        for gap, more in ranges:
            first = last + gap
            last = first + more
            count += more + 1
            listed.append(f"{first}-{last}" if more else str(first))
        self.assertEqual(read(f"On-line CPU(s) list: {','.join(listed)}\n").count, count)
