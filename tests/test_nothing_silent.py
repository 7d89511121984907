"""Nothing in our code fails without anybody being told. What is silent on purpose is listed, each with the reason."""

from __future__ import annotations

import ast
import textwrap
from functools import cache
from pathlib import Path
from typing import Final

from twisted.trial.unittest import SynchronousTestCase

from tests.silence import Finding, silent_in, sources

ROOT: Final = Path(__file__).resolve().parents[1]

ALLOWED: Final[dict[tuple[str, str, str], str]] = {
    ("src/node/__main__.py", "start", "AlreadyRunning"): "said, and the exit status",
    (
        "src/node/client.py",
        "Client.learn_clock",
        "TypeError, ValueError, IndexError, OverflowError",
    ): "a Date that cannot be read teaches nothing; the refusal is reported as it is",
    ("src/node/client.py", "_close", "OSError"): "the connection is closed already, which is what was wanted",
    (
        "src/node/console.py",
        "standard_writers",
        "OSError, ValueError, AttributeError",
    ): "then it may be said twice",
    (
        "src/node/console.py",
        "_stream_writer.write",
        "OSError, ValueError",
    ): "nobody is left to tell",
    ("src/node/clock.py", "start", "RuntimeError"): "tried again, and raised when it has lasted",
    ("src/node/console.py", "_console_writer.write", "OSError"): "nobody is left to tell",
    ("src/node/console.py", "_syslog_writer", "OSError"): "there is no syslog; the console and stderr have all of it",
    ("src/node/delivery.py", "read_standing", "ValueError, RecursionError"): "the caller reports what came instead",
    (
        "src/node/delivery.py",
        "retry_after",
        "TypeError, ValueError, IndexError, OverflowError",
    ): "what cannot be read asks for nothing",
    ("src/node/priority.py", "Priority.release", "ProcessLookupError"): "it has ended, and has no priority any more",
    ("src/node/results.py", "_status_of_json", "ValueError, RecursionError"): "it is read as YAML instead",
    (
        "src/node/running.py",
        "_left_over",
        "OSError",
    ): "a process that has ended meanwhile, or is not ours, is not left over",
    ("src/node/running.py", "_left_over", "OSError, ValueError"): "there is nothing that was left",
    ("src/node/running.py", "_start_of", "OSError"): "how the kernel says that there is no such process",
    ("src/node/running.py", "_has_ended", "TimeoutExpired"): "how subprocess says that it has not",
    (
        "src/node/running.py",
        "_signal",
        "ProcessLookupError, PermissionError",
    ): "how the kernel says: nobody",
    ("src/node/spool.py", "Spool._sync", "OSError"): "raised, but for file systems that cannot sync directories",
    ("src/node/spool.py", "Spool._unlink", "FileNotFoundError"): "it was kept in memory alone, and that was said",
    ("src/node/state.py", "State._read", "FileNotFoundError"): "a first start has none",
    ("src/rack/eventfile.py", "EventFile._mend", "FileNotFoundError"): "said at debug; there is nothing to take back",
    (
        "src/rack/eventfile.py",
        "_checked",
        "ValueError, RecursionError",
    ): "the reader counts it as damaged, and says so",
    ("src/rack/eventfile.py", "_record", "KeyError, TypeError"): "the reader counts it as damaged, and says so",
    ("src/rack/events.py", "Events._ask", "CancelledError"): "only stopping cancels it; the events are kept on disk",
    ("src/region/cli/events.py", "run", "KeyboardInterrupt"): "Ctrl-C ends it, with a status of its own",
    ("src/region/cli/events.py", "follow", "Unreachable"): "said once, and tried again",
    (
        "src/region/metrics.py",
        "RegionMetrics.refresh",
        "DatabaseUnavailable, Error, TimeoutError",
    ): "said once, when it begins; the metrics are absent meanwhile",
    ("src/rpc/blobs.py", "BlobStore.sizes", "FileNotFoundError"): "it was removed meanwhile, and counts no more",
    (
        "src/rpc/certificates.py",
        "is_issued_by",
        "ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, InvalidVersion",
    ): "how cryptography says no",
    ("src/rack/joining.py", "_check_not_joined", "NotJoined"): "that is what is checked for",
    ("src/rack/regions.py", "Regions.stop", "gatherResults"): "a service that is stopped gives no error",
    ("src/rack/regions.py", "Regions._prepare", "UnknownCommand"): "an older region has no Endpoints; its one is used",
    ("src/rack/regions.py", "_read", "ValueError, AttributeError"): "all of an answer are said at once, in one line",
    ("src/rack/remembered.py", "RememberedRegions.read", "FileNotFoundError"): "a first start remembers none",
    ("src/region/nodes/life.py", "_takes", "NoTransition"): "how automat says no",
    ("src/region/processes.py", "Processes._written", "addBoth lambda"): "the writer reports its own end",
    ("src/region/answers/asking.py", "Asker.ask", "addBoth _ended"): "logs, or gives it to all who wait, in a loop",
    (
        "src/region/api/responding.py",
        "respond",
        "addBoth passed",
    ): "for a client that hung up; _failed came before",
    (
        "src/region/cli/images.py",
        "_again",
        "Unreachable",
    ): "the upload is tried again, and that raises when it has lasted",
    ("src/region/metadata/parsing.py", "_power", "ValueError, RecursionError"): "the client is refused, with a 400",
    ("src/region/metadata/service.py", "MetadataResource.render", "addErrback lambda"): (
        "a client that hung up; what it sent goes on being stored, and respond() has logged what failed"
    ),
    ("src/region/api/app.py", "_Addressed.render", "UnicodeDecodeError, BadHost"): "the client is refused, with a 4xx",
    (
        "src/region/api/oauth.py",
        "Authenticator._find",
        "addBoth _found",
    ): "logs, or gives it to all who wait, in a loop",
    ("src/region/cli/nodes.py", "_begin", "KeyboardInterrupt"): "Ctrl-C ends it, with a status of its own",
    ("src/region/cli/nodes.py", "wait", "Unreachable"): "said once, and tried again",
    ("src/region/cli/imports.py", "follow", "Unreachable"): "tried again, and raised when it has lasted",
    ("src/region/cli/processes.py", "Daemon.processEnded", "stopListening"): "closing a datagram socket does not fail",
    ("src/region/cli/processes.py", "Daemon._signal", "ProcessExitedAlready"): "who runs it is told in the next line",
    ("src/region/cli/state.py", "_ports_before", "SettingsError"): "the file is written anew in a moment",
    ("src/region/cli/up.py", "Up.main", "CancelledError"): "that is how Ctrl-C arrives",
    ("src/region/cli/up.py", "Up._start_region", "CommandFailed"): "tried again with other ports, and that is said",
    ("src/region/cli/up.py", "Up._start", "end"): "it fires with a text, and has no error",
    ("src/region/cli/up.py", "Up._client", "Refused"): "an old key is no good any more: a new one is made",
    ("src/region/database/child.py", "Child.send", "ProcessExitedAlready"): "who is gone needs no signal",
    (
        "src/region/database/connection.py",
        "_closing_when_cancelled",
        "addBoth finished",
    ): "handed on, unless cancelled",
    ("src/region/database/leftovers.py", "processes_in", "FileNotFoundError"): "nothing works in what is not there",
    ("src/region/database/leftovers.py", "_processes_in", "OSError"): "the process has ended, or is another user's",
    ("src/region/database/leftovers.py", "send", "ProcessLookupError"): "who is gone needs no signal",
    ("src/region/database/leftovers.py", "remove_stale_files", "FileNotFoundError"): "it is to be gone, and is",
    (
        "src/region/database/listening.py",
        "Listener._add",
        "DatabaseUnavailable",
    ): "it connects anew and says so",
    (
        "src/region/database/pool.py",
        "_SessionContext.__aexit__",
        "DatabaseUnavailable",
    ): "what has ended has no lock",
    (
        "src/region/commissioning/gathering.py",
        "Gathering._begin",
        "addErrback _failed",
    ): "given to all who wait, in a loop",
    (
        "src/region/commissioning/gathering.py",
        "one",
        "TransactionRollbackError, ForeignKeyViolation",
    ): "tried again, and then raised",
    (
        "src/region/commissioning/worker.py",
        "Worker._begin",
        "addErrback _did_not_work",
    ): "cancelled by stopping, which hands it back; else logged",
    (
        "src/region/commissioning/worker.py",
        "Worker._is_to_blame",
        "DatabaseUnavailable, Error",
    ): "whether the database is there is what was asked",
    ("src/region/database/pool.py", "_retried", "TransactionRollbackError"): "tried again, and the last one is raised",
    (
        "src/region/hardware/interfaces.py",
        "_addresses",
        "ValueError",
    ): "a tunnel's 'any', say: nobody reaches it by that",
    ("src/region/images/files.py", "_read", "ValueError, OSError"): "read ahead for a client that is gone, else raised",
    ("src/region/images/stream.py", "StreamResource._generation", "suppress GenerationMoved"): "the client gets a 404",
    ("src/region/upstream/child.py", "examine", "MemoryError"): "refused, with the limit that was reached",
    (
        "src/region/upstream/process.py",
        "_Child._kill",
        "suppress ProcessExitedAlready",
    ): "who is gone needs no signal",
    (
        "src/region/upstream/products.py",
        "_Reader.product",
        "_Unfit",
    ): "nobody selected that product",
    ("src/region/upstream/reader.py", "_all", "gatherResults"): "the others end because the first cancelled them",
    ("src/rpc/blobs.py", "BlobStore.sweep", "FileNotFoundError"): "it is to be gone, and is",
    ("src/rpc/blobs.py", "BlobStore._remove_unfinished", "FileNotFoundError"): "its process gave it its name just now",
    ("src/rpc/certificates.py", "remove_unfinished", "FileNotFoundError"): "its process gave it its name just now",
    ("src/rpc/blobs.py", "BlobStore._unused", "OSError"): "a symbolic link, say: no writer of ours has it",
    ("src/rpc/cli.py", "build_parser", "ModuleNotFoundError"): "an installation without that part lacks its commands",
    ("src/rpc/cli.py", "main", "BrokenPipeError"): "who read has had enough; the exit status says it",
    ("src/rpc/fetch.py", "_Run.run", "DeferredList"): "how the workers ended is looked at after it",
    ("src/rpc/fetch.py", "_refused", "OSError"): "more about an error that is reported without it",
    (
        "src/rpc/http_client.py",
        "HttpClient._drain",
        "FetchError",
    ): "only the head was wanted; it is closed",
    ("src/rpc/records.py", "LinkTLS.dataReceived", "WantReadError"): "it was TLS's own, and OpenSSL has dealt with it",
    ("src/rpc/records.py", "LinkTLS.dataReceived", "ZeroReturnError"): "the link is told that its peer has closed it",
    ("src/rpc/records.py", "LinkTLS.dataReceived", "Error"): "the link is cut, and told the reason",
    ("src/rpc/records.py", "LinkTLS.write", "WantReadError"): "Twisted keeps what was not taken",
    ("src/rpc/records.py", "LinkTLS.write", "Error"): "the link is cut, and told the reason",
    ("src/rpc/records.py", "_Usual.flush", "WantReadError"): "there is nothing to send",
    ("src/rpc/records.py", "PromptServer.write", "OSError"): "the buffer takes what was not sent, or finds the error",
    ("src/rpc/waking.py", "Core._go", "Exception"): "the owner is told of it, and logs it",
}
"""By file, function and what is silent there: why it may be."""


@cache
def ours() -> dict[str, str]:
    return sources(ROOT, "src", "twisted")


@cache
def silent() -> tuple[Finding, ...]:
    return tuple(silent_in(ours()))


class OurCodeTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.sources = ours()

    def test_nothing_fails_without_anybody_being_told(self) -> None:
        found = [finding for finding in silent() if finding.key not in ALLOWED]
        self.assertEqual(found, [], "\n" + "\n".join(map(str, found)))

    def test_every_exception_to_the_rule_is_still_there(self) -> None:
        found = {finding.key for finding in silent()}
        self.assertEqual(sorted(ALLOWED.keys() - found), [])

    def test_all_of_our_code_is_read(self) -> None:
        for path in (
            "src/rpc/protocol.py",
            "src/region/service.py",
            "src/rack/service.py",
            "twisted/plugins/stanchion.py",
        ):
            self.assertIn(path, self.sources)

    def test_calls_are_made_and_reported_in_one_place(self) -> None:
        allowed = {
            "callRemote": set(),
            "report": {"src/rpc/protocol.py", "src/rpc/rounds.py"},
            "failed": {"src/rpc/protocol.py"},
        }
        for path, text in self.sources.items():
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    of = ast.unparse(node.func.value)
                    if (
                        node.func.attr == "callRemote"
                        or "reporter" in of
                        or (node.func.attr == "report" and "link" in of)
                    ):
                        self.assertIn(path, allowed[node.func.attr], f"{path}:{node.lineno}")


class Snippets(SynchronousTestCase):
    def silent(self, text: str) -> list[str]:
        """What is silent in a module with this text."""
        return [finding.what for finding in silent_in({"snippet.py": textwrap.dedent(text)})]

    def handler(self, body: str, kinds: str = "Exception as error", tried: str = "work()") -> list[str]:
        """What is silent in a function with a ``try`` whose handler is ``body``."""
        block = textwrap.indent(textwrap.dedent(body).strip(), " " * 8)
        attempt = textwrap.indent(textwrap.dedent(tried).strip(), " " * 8)
        return self.silent(f"def f():\n    try:\n{attempt}\n    except {kinds}:\n{block}\n")


class ExceptionTests(Snippets):
    def test_a_handler_that_does_nothing_swallows(self) -> None:
        for body in ("pass", "...", "return", "return None", "result = None", "work()", "log.debug('x')", "'said'"):
            self.assertEqual(self.handler(body), ["Exception"], body)
        for kinds in ("", "BaseException", "OSError", "(OSError, KeyError)", "errors.Failed"):
            self.assertEqual(len(self.handler("return None", kinds)), 1, kinds)

    def test_a_handler_that_raises_reports_or_hands_on_does_not(self) -> None:
        for body in (
            "raise", "raise Other() from error", "log.failure('x')", "self._log.warn('{e}', e=error)", "return error",
            "return Failed(str(error))", "outcome = Failed(reason=error)", "problems.append(f'{error}')",
            "waiting.errback(error)", "waiting.errback()", "reason = str(error)", "complain(str(error))",
            "return f'cannot: {error}'", "self.reason = error.reason",
        ):  # fmt: skip
            self.assertEqual(self.handler(body), [], body)

    def test_every_path_counts(self) -> None:
        for body in (
            "if x:\n    raise",
            "if x:\n    return\nraise",
            "if x:\n    log.error('x')\nelse:\n    pass",
            "for one in many:\n    log.error('x')",
            "while x:\n    raise",
            "try:\n    other()\nexcept KeyError:\n    raise",
            "def later():\n    raise error",
            "if isinstance(error, KeyError):\n    return",
        ):
            self.assertIn("Exception", self.handler(body), body)
        for body in (
            "if x:\n    raise\nelse:\n    log.error('x')",
            "if x:\n    raise\nlog.error('x')",
            "with x:\n    raise",
            "try:\n    other()\nfinally:\n    log.failure('x')",
            "if error.errno != 2:\n    raise\nreturn None",
        ):
            self.assertEqual(self.handler(body), [], body)

    def test_looking_at_an_exception_does_not_deal_with_it(self) -> None:
        for body in ("return isinstance(error, KeyError)", "kind = type(error)", "log.debug('{e}', e=error)"):
            self.assertEqual(self.handler(body), ["Exception"], body)

    def test_an_exception_that_is_an_answer_may_be_answered(self) -> None:
        for body in ("return None", "return False", "value = 0", "yield False"):
            self.assertEqual(self.handler(body, "FileNotFoundError"), [], body)
        self.assertEqual(self.handler("return None", "(ValueError, KeyError)"), [])

    def test_but_not_dropped_nor_around_more_than_the_question(self) -> None:
        for body in ("pass", "return", "tidy()"):
            self.assertEqual(self.handler(body, "FileNotFoundError"), ["FileNotFoundError"], body)
        self.assertEqual(self.handler("return None", "(ValueError, OSError)"), ["ValueError, OSError"])
        self.assertEqual(self.handler("return None", "ValueError", "a()\nb()\nc()"), ["ValueError"])

    def test_other_ways_to_swallow(self) -> None:
        self.assertEqual(self.silent("with suppress(OSError):\n    work()"), ["suppress OSError"])
        self.assertEqual(self.silent("with contextlib.suppress(A, B):\n    work()"), ["suppress A, B"])
        self.assertEqual(self.silent("def f():\n    try:\n        work()\n    finally:\n        return 1"), ["finally"])
        self.assertEqual(
            self.silent("class A:\n    def __exit__(self, *what):\n        self.close()\n        return True"),
            ["__exit__"],
        )
        self.assertEqual(self.silent("try:\n    work()\nexcept* OSError:\n    pass"), ["OSError"])

    def test_a_finding_says_where(self) -> None:
        text = (
            "class A:\n    async def b(self):\n        try:\n            c()\n"
            "        except OSError:\n            d()\n"
        )
        [finding] = silent_in({"a.py": text})
        self.assertEqual(finding.key, ("a.py", "A.b", "OSError"))
        self.assertEqual(str(finding), "a.py:5: in A.b: an exception is swallowed [OSError]")


class ErrbackTests(Snippets):
    def test_an_errback_that_does_nothing_swallows(self) -> None:
        for errback in ("lambda _: None", "lambda failure: None", "lambda _: tidy()", "quiet", "self.quiet"):
            text = f"def quiet(failure):\n    tidy()\n\nwaiting.addErrback({errback})\n"
            self.assertEqual(len(self.silent(text)), 1, errback)
        self.assertEqual(self.silent("waiting.addCallbacks(go, lambda _: None)"), ["addCallbacks lambda"])
        self.assertEqual(self.silent("waiting.addBoth(lambda _: stop())"), ["addBoth lambda"])

    def test_one_that_reports_or_hands_on_does_not(self) -> None:
        for errback in (
            "lambda failure: log.failure('x', failure)", "other.errback", "loud", "self.loud", "lambda one: one",
            "lambda failure: done.errback(failure)", "lambda failure: failure.trap(KeyError)",
        ):  # fmt: skip
            text = (
                "def loud(failure):\n    if not failure.check(CancelledError):\n        log.failure('x', failure)\n\n"
            )
            self.assertEqual(self.silent(text + f"waiting.addErrback({errback})"), [], errback)

    def test_what_comes_after_an_errback_has_no_failure_to_look_at(self) -> None:
        text = """
            def f():
                waiting.addErrback(log.failure)
                waiting.addBoth(lambda _: stop())
        """
        self.assertEqual(self.silent(text), [])
        self.assertEqual(self.silent("request.notifyFinish().addErrback(lambda _: answering.cancel())"), [])


class DeferredTests(Snippets):
    def test_a_deferred_or_coroutine_that_is_dropped(self) -> None:
        for statement in (
            "Deferred.fromCoroutine(work())", "ensureDeferred(work())", "deferToThread(work)", "deferLater(reactor, 1)",
            "deferToThreadPool(reactor, pool, work)", "port.stopListening()", "maybeDeferred(work)", "work()",
            "run_in_thread(work)", "Deferred.fromCoroutine(work()).addCallback(print)", "annotated()", "self.method()",
            "deferToThread(work).addCallbacks(print)", "await DeferredList(many)",
        ):  # fmt: skip
            text = f"""
                async def work(): ...
                def annotated() -> Deferred[None]: ...
                class A:
                    async def method(self): ...
                    async def f(self):
                        {statement}
            """
            self.assertEqual(len(self.silent(text)), 1, statement)

    def test_one_that_is_awaited_returned_stored_or_given_an_errback_is_not(self) -> None:
        for statement in (
            "await work()", "return work()", "self.working = Deferred.fromCoroutine(work())", "all.append(work())",
            "Deferred.fromCoroutine(work()).addErrback(log.failure)", "transport.loseConnection()", "self.plain()",
            "Deferred.fromCoroutine(work()).addCallback(print).addErrback(log.failure)", "x = work(); await x",
            "self.later.cancel()", "table.update(other)", "results = await DeferredList(many)", "reports_itself()",
            "d = deferToThread(work); d.addErrback(log.failure)", "super().stopService()",
        ):  # fmt: skip
            text = f"""
                async def work(): ...
                def reports_itself() -> Deferred[None]:
                    return Deferred.fromCoroutine(work()).addErrback(log.failure)
                class Store:
                    async def update(self, what): ...
                class A:
                    def plain(self): ...
                    async def f(self):
                        {statement}
            """
            self.assertEqual(self.silent(text), [], statement)

    def test_one_that_is_only_given_a_name(self) -> None:
        for statement in ("d = work()", "d = work(); d.addCallback(print)", "d = deferToThread(work); d.cancel()"):
            text = f"async def work(): ...\ndef f():\n    {statement}\n"
            self.assertEqual(self.silent(text), ["d"], statement)

    def test_a_looping_call_whose_end_nobody_hears_of(self) -> None:
        text = "class A:\n    def f(self):\n        self.loop = LoopingCall(print)\n        self.loop.start(1){}\n"
        self.assertEqual(self.silent(text.format("")), ["start"])
        self.assertEqual(self.silent(text.format(".addErrback(log.failure)")), [])

    def test_a_coroutine_that_is_called_by_what_ignores_it(self) -> None:
        text = "class A:\n    async def work(self): ...\n    def plain(self): ...\n    def f(self):\n        {}\n"
        for statement in ("reactor.callLater(1, self.work)", "link.on_lost(self.work)", "d.addCallback(self.work)"):
            self.assertEqual(len(self.silent(text.format(statement))), 1, statement)
            self.assertEqual(self.silent(text.format(statement.replace("work", "plain"))), [], statement)

    def test_a_name_that_many_have_is_told_apart_by_what_it_is_of(self) -> None:
        text = """
            class Job:
                async def end(self): ...
            class Timer:
                def end(self): ...
            def f(job: Job, timer: Timer):
                {}
        """
        self.assertEqual(self.silent(text.format("job.end()")), ["end"])
        self.assertEqual(self.silent(text.format("timer.end()")), [])

    def test_a_method_that_is_inherited_is_known(self) -> None:
        text = """
            class Base:
                async def end(self): ...
            class Job(Base):
                def f(self):
                    self.end()
        """
        self.assertEqual(self.silent(text), ["end"])

    def test_gathering_that_consumes_errors(self) -> None:
        self.assertEqual(
            self.silent("async def f():\n    return await gatherResults(x, consumeErrors=True)"), ["gatherResults"]
        )
        self.assertEqual(self.silent("async def f():\n    return await gatherResults(x)"), [])
