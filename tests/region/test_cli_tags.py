"""``stanchion tag``: what people see, and what the region is asked."""

from __future__ import annotations

from tests.region.test_cli_answers import CommandCase
from tests.rpc.region_server import Told

TAG = {
    "name": "big", "definition": "//node", "comment": "", "kernel_opts": "quiet", "evaluating": False, "problem": "",
    "machine_count": 2, "resource_uri": "/x",
}  # fmt: skip
MACHINE = {"system_id": "abc234", "hostname": "node-1", "status_name": "Ready"}


class TagTests(CommandCase):
    def test_the_tags_are_shown_with_how_their_evaluation_goes(self):
        self.region.answers["GET", "tags/"] = [
            TAG, TAG | {"name": "new", "evaluating": True}, TAG | {"name": "bad", "problem": "on node-1: slow"},
            TAG | {"name": "mine", "definition": ""},
        ]  # fmt: skip
        for argv in (("tag",), ("tag", "list")):
            status, output, _ = self.stanchion(*argv)
            self.assertEqual(status, 0)
            self.assertEqual(
                [line.split() for line in output.splitlines()],
                [
                    ["TAG", "MACHINES", "STATE", "DEFINITION"], ["big", "2", "evaluated", "//node"],
                    ["new", "2", "evaluating", "//node"], ["bad", "2", "problem", "//node"],
                    ["mine", "2", "by", "hand", "-"],
                ],
            )  # fmt: skip
        self.region.answers["GET", "tags/"] = []
        self.assertIn("no tag", self.stanchion("tag")[1])

    def test_a_tag_is_shown_with_its_problem_and_its_machines(self):
        self.region.answers["GET", "tags/big/"] = (TAG | {"problem": "on node-2: too slow"}, [MACHINE])
        status, output, _ = self.stanchion("tag", "show", "big")
        self.assertEqual(status, 0)
        for words in ("//node", "quiet", "on node-2: too slow", "node-1", "abc234", "Ready"):
            self.assertIn(words, output)
        self.assertEqual(self.region.seen[1].query, {"op": ["machines"]})
        self.region.answers["GET", "tags/big/"] = (TAG | {"definition": ""}, [])
        output = self.stanchion("tag", "show", "big")[1]
        self.assertIn("people say which machines have it", output)
        self.assertIn("no machine has it", output)

    def test_a_tag_is_made_and_changed_with_what_is_given(self):
        self.region.answers["POST", "tags/"] = TAG | {"evaluating": True}
        status, output, _ = self.stanchion("tag", "create", "big", "--definition", "//node", "--comment", "c")
        self.assertEqual(status, 0)
        self.assertIn("big is made; it is being evaluated on all machines", output)
        self.assertEqual(self.region.seen[0].form, {"name": ["big"], "definition": ["//node"], "comment": ["c"]})
        self.region.answers["PUT", "tags/big/"] = TAG | {"name": "large"}
        self.assertEqual(self.stanchion("tag", "change", "big", "--name", "large")[1], "tag large is changed\n")
        self.assertEqual(self.region.seen[1].form, {"name": ["large"]})
        status, _, errors = self.stanchion("tag", "change", "big")
        self.assertEqual(status, 2)
        self.assertIn("say what to change", errors)

    def test_why_a_definition_is_refused_is_said_in_its_own_words(self):
        self.region.answers["POST", "tags/"] = Told({"definition": ["Invalid XPath expression: x"]}, 400)
        status, _, errors = self.stanchion("tag", "create", "big", "--definition", "//[")
        self.assertEqual(status, 2)
        self.assertIn("definition: Invalid XPath expression: x", errors)

    def test_machines_are_named_by_either_name(self):
        self.region.answers["GET", "machines/node-1/"] = MACHINE
        self.region.answers["POST", "tags/mine/"] = ({"added": 1, "removed": 0}, {"added": 0, "removed": 2})
        status, output, _ = self.stanchion("tag", "add", "mine", "node-1")
        self.assertEqual((status, output), (0, "1 machine got the tag mine\n"))
        self.assertEqual(
            (self.region.seen[1].query, self.region.seen[1].form), ({"op": ["update_nodes"]}, {"add": ["abc234"]})
        )
        self.assertEqual(self.stanchion("tag", "remove", "mine", "node-1")[1], "2 machines lost the tag mine\n")
        self.assertEqual(self.region.seen[3].form, {"remove": ["abc234"]})
        status, _, errors = self.stanchion("tag", "add", "mine", "nobody")
        self.assertEqual(status, 1)
        self.assertIn("nobody", errors)

    def test_a_tag_is_evaluated_anew_or_removed(self):
        self.region.answers["POST", "tags/big/"] = {"rebuilding": "big"}
        self.region.answers["DELETE", "tags/big/"] = Told("", 204)
        self.assertIn("being evaluated", self.stanchion("tag", "rebuild", "big")[1])
        self.assertIn("is removed", self.stanchion("tag", "delete", "big")[1])
        self.assertEqual([seen.query for seen in self.region.seen], [{"op": ["rebuild"]}, {}])
        self.assertEqual(self.stanchion("tag", "delete", "none")[0], 1)
