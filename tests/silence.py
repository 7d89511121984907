"""What in a module's syntax tree can fail without anybody being told?

**A swallowed exception.** Every path through an ``except`` must do one of these:

* raise;
* report: log at ``info`` or above, or call one of :data:`REPORTS`;
* hand the exception on: return it, assign it, or pass it to a call, by the name that ``as`` gives it;
* answer: return, yield or assign a value that is what the exception means (``FileNotFoundError``: there is none). That
  goes only for :data:`ANSWERS`, around one or two statements; and for what is left of an exception when an ``if`` has
  looked at it and raised it otherwise.

So must every path through a function that is given to ``addErrback`` or ``addBoth``, with its first argument; but being
cancelled is no failure, and a client that hangs up (``notifyFinish``) none of ours. ``contextlib.suppress`` swallows,
and so do a ``return``, ``break`` or ``continue`` in a ``finally`` and an ``__exit__`` that returns true.

**A dropped Deferred or coroutine.** A call that is known to give one (:data:`GIVES`, an ``async def`` of ours, a
function of ours that is annotated so, a LoopingCall's ``start``) must not be a statement of its own, unless what was
added to it last is an errback. Assigned to a local name, that name must be used. What gives one must not be called by
what ignores what it gives (:data:`IGNORES`). ``DeferredList`` must not be awaited for nothing, and ``gatherResults``
must not consume the errors but the first.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from attrs import define, field, frozen

LOGS: Final = frozenset({"info", "warn", "error", "critical", "failure"})
REPORTS: Final = frozenset({"report", "complain", "give_up", "errback"})
"""Functions, other than a logger's, that make a failure known."""

ANSWERS: Final = frozenset(
    {
        "FileNotFoundError", "NotADirectoryError", "FileExistsError", "BlockingIOError", "ProcessLookupError",
        "ProcessExitedAlready", "KeyError", "ValueError", "UnicodeDecodeError", "TimeoutError", "InvalidSignature",
    }
)  # fmt: skip
"""Exceptions that say no to one question, where one question was asked."""

GIVES: Final = frozenset(
    {
        "Deferred", "DeferredList", "deferLater", "deferToThread", "deferToThreadPool", "ensureDeferred",
        "fromCoroutine", "gatherResults", "maybeDeferred", "notifyFinish", "run_in_thread", "_run_in_thread",
        "stopListening", "stopService", "when_ready", "whenConnected",
    }
)  # fmt: skip
"""Functions, not ours or stored under that name, that give a Deferred."""

IGNORES: Final = frozenset(
    {
        "addSystemEventTrigger", "callFromThread", "callInThread", "callLater", "callWhenRunning",
        "on_change", "on_lost", "on_ready", "subscribe",
    }
)  # fmt: skip
"""Functions that call what they are given, and ignore a coroutine that it gives."""

COMMON: Final = frozenset(dir(dict) + dir(list) + dir(set) + dir(str)) | {"register", "end"}
"""Methods that so many things have that the name alone says nothing."""

ADDS: Final = frozenset({"addErrback", "addBoth", "addCallback", "addCallbacks", "addTimeout"})
AWAITABLE: Final = frozenset({"Deferred", "Awaitable", "Coroutine"})
Function = ast.FunctionDef | ast.AsyncFunctionDef


@frozen
class Finding:
    """Something silent: where, in which function, what (for an exception, its names), and in words."""

    path: str
    line: int
    function: str
    what: str
    text: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What an entry of an allow-list names; lines come and go."""
        return self.path, self.function, self.what

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: in {self.function}: {self.text} [{self.what}]"


@define
class Names:
    """What the functions of all modules give, by their names."""

    methods: dict[str, dict[str, bool]] = field(factory=dict)
    """By class, whether each method gives a Deferred or a coroutine."""
    bases: dict[str, list[str]] = field(factory=dict)
    functions: dict[str, set[bool]] = field(factory=dict)
    """The same by function or method, of all classes."""

    def method(self, kind: str, name: str) -> bool | None:
        """Whether the method of class ``kind``, or what it inherits, gives one; None if that is not known."""
        if name in self.methods.get(kind, {}):
            return self.methods[kind][name]
        found = (self.method(base, name) for base in self.bases.get(kind, []) if base != kind)
        return next((one for one in found if one is not None), None)


def names_of(trees: Iterable[ast.Module]) -> Names:
    """Collect from all modules what their functions give."""
    names = Names()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names.bases[node.name] = [last(base) for base in node.bases]
                table = names.methods.setdefault(node.name, {})
                for each in node.body:
                    if isinstance(each, Function) and not _is_property(each):
                        table[each.name] = gives(each)
            if isinstance(node, Function) and not _is_property(node):
                names.functions.setdefault(node.name, set()).add(gives(node))
    return names


def _is_property(function: Function) -> bool:
    return any(last(one) in ("property", "cached_property") for one in function.decorator_list)


def gives(function: Function) -> bool:
    """Whether calling ``function`` gives a Deferred, to which nobody has added an errback, or a coroutine."""
    if isinstance(function, ast.AsyncFunctionDef):
        return not any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function))
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    if returned and all(isinstance(value, ast.Call) and last(value.func) == "addErrback" for value in returned):
        return False
    annotation = function.returns
    while isinstance(annotation, ast.Subscript):
        annotation = annotation.value
    if isinstance(annotation, ast.BinOp):  # Deferred[None] | None
        sides = [annotation.left, annotation.right]
        return any(last(side.value if isinstance(side, ast.Subscript) else side) in AWAITABLE for side in sides)
    return last(annotation) in AWAITABLE


def last(node: ast.AST | None) -> str:
    """The last name of a dotted one; nothing if it is none."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=function):
            return last(function)
        case ast.Subscript(value=value):
            return last(value)
        case ast.Constant(value=str() as text):
            return text
    return ""


# Swallowing.


def uses(node: ast.AST, name: str) -> bool:
    """Whether ``name`` is read anywhere in ``node``."""
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))


def hands_on(node: ast.AST, name: str) -> bool:
    """Whether the value of ``node`` has something of what ``name`` is, more than of which kind it is."""
    if isinstance(node, ast.Compare) or (isinstance(node, ast.Call) and last(node.func) in ("isinstance", "type")):
        return False
    if isinstance(node, ast.Name):
        return node.id == name
    return any(hands_on(each, name) for each in ast.iter_child_nodes(node))


def is_report(call: ast.Call) -> bool:
    """Whether ``call`` makes something known."""
    if isinstance(call.func, ast.Attribute) and call.func.attr in LOGS:
        return last(call.func.value).strip("_") == "log"
    return last(call.func) in REPORTS


def _is_debug(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "debug"


def deals(node: ast.AST, name: str) -> bool:
    """Whether the expression or simple statement ``node`` reports, or hands on what ``name`` is."""
    value = node.value if isinstance(node, ast.Return | ast.Assign | ast.AnnAssign | ast.AugAssign) else None
    if name and value is not None and not _is_debug(value) and hands_on(value, name):
        return True
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and not _is_debug(each):
            if is_report(each):
                return True
            arguments = [*each.args, *(keyword.value for keyword in each.keywords)]
            if name and last(each.func) not in ("isinstance", "type") and any(hands_on(one, name) for one in arguments):
                return True
            if name and last(each.func) in ("raiseException", "trap") and uses(each.func, name):
                return True
    return False


def answers(node: ast.AST) -> bool:
    """Whether a simple statement gives a value."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Yield) and node.value.value is not None
    return isinstance(node, ast.Return | ast.Assign | ast.AnnAssign) and node.value is not None


def is_cancelled(test: ast.expr) -> bool:
    """Whether ``test`` asks if a failure is that somebody cancelled."""
    return isinstance(test, ast.Call) and last(test.func) == "check" and "CancelledError" in map(last, test.args)


def silent_paths(body: Iterable[ast.stmt], name: str, may_answer: bool) -> tuple[bool, bool]:
    """Whether some path through ``body`` gets to its end, and whether some leaves it before, without dealing with the
    exception."""
    leaves = False
    for statement in body:
        match statement:
            case ast.Raise():
                return False, leaves
            case ast.If(test=test):
                then, gone = silent_paths(statement.body, name, may_answer)
                other, gone_too = silent_paths(statement.orelse, name, may_answer)
                if is_cancelled(test):
                    then, gone = False, False
                elif isinstance(test, ast.UnaryOp) and is_cancelled(test.operand):
                    other, gone_too = False, False
                leaves |= gone or gone_too
                if name and uses(test, name) and isinstance(statement.body[-1], ast.Raise):
                    may_answer = True
                if not (then or other):
                    return False, leaves
            case ast.With() | ast.AsyncWith():
                then, gone = silent_paths(statement.body, name, may_answer)
                leaves |= gone
                if not then:
                    return False, leaves
            case ast.Try():
                then, gone = silent_paths([*statement.body, *statement.orelse], name, may_answer)
                end, gone_end = silent_paths(statement.finalbody, name, may_answer)
                leaves |= gone or gone_end
                if not then or (statement.finalbody and not end):
                    return False, leaves
            case ast.For() | ast.While() | ast.AsyncFor() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if any(isinstance(each, ast.Return) for each in ast.walk(statement)):
                    leaves = True
            case _:
                if deals(statement, name) or (may_answer and answers(statement)):
                    return False, leaves
                if isinstance(statement, ast.Return | ast.Break | ast.Continue):
                    return False, True
    return True, leaves


def is_silent(body: Iterable[ast.stmt], name: str, may_answer: bool = False) -> bool:
    """Whether an exception called ``name`` can get lost in ``body``."""
    return any(silent_paths(body, name, may_answer))


def exceptions(handler: ast.ExceptHandler) -> list[str]:
    """The names of what ``handler`` catches."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return [last(kind) or "everything" for kind in kinds]


# Dropping.


class Module(ast.NodeVisitor):
    """Reads one module, and collects what is silent in it."""

    def __init__(self, path: str, tree: ast.Module, names: Names) -> None:
        self.path = path
        self.names = names
        self.findings: list[Finding] = []
        self._where: list[str] = []
        self._classes: list[str] = []
        self._functions: list[Function] = []
        self._defined: dict[str, list[Function]] = {}
        self._types: dict[str, set[str]] = {}
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
        self._imported = {alias.asname or alias.name.split(".")[0] for node in imports for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, Function):
                self._defined.setdefault(node.name, []).append(node)
            self._learn(node)
        self.visit(tree)

    def _learn(self, node: ast.AST) -> None:
        """What types names and attributes have, as far as annotations and plain calls say."""
        match node:
            case ast.arg(arg=name, annotation=annotation) if annotation is not None:
                self._types.setdefault(name, set()).update(_kinds(annotation))
            case ast.AnnAssign(target=target, annotation=annotation):
                self._types.setdefault(last(target), set()).update(_kinds(annotation))
            case ast.Assign(targets=[target], value=ast.Call(func=function)):
                kind = last(function)
                if kind[:1].isupper() or kind in self.names.methods:
                    self._types.setdefault(last(target), set()).add(kind)
            case ast.Assign(targets=[target], value=ast.Name(id=name)) if name in self._types:
                self._types.setdefault(last(target), set()).update(self._types[name])

    def _found(self, node: ast.AST, what: str, text: str) -> None:
        line = getattr(node, "lineno", 0)
        self.findings.append(Finding(self.path, line, ".".join(self._where) or "(module)", what, text))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._where.append(node.name)
        self._classes.append(node.name)
        self.generic_visit(node)
        self._where.pop()
        self._classes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def _function(self, node: Function) -> None:
        self._where.append(node.name)
        self._functions.append(node)
        if node.name in ("__exit__", "__aexit__"):
            for each in ast.walk(node):
                if isinstance(each, ast.Return) and isinstance(each.value, ast.Constant) and each.value.value is True:
                    self._found(each, "__exit__", "it swallows whatever is raised")
        self.generic_visit(node)
        self._functions.pop()
        self._where.pop()

    def visit_Try(self, node: ast.Try) -> None:
        for handler in node.handlers:
            kinds = exceptions(handler)
            may_answer = len(node.body) <= 2 and set(kinds) <= ANSWERS
            if is_silent(handler.body, handler.name or "", may_answer):
                self._found(handler, ", ".join(kinds), "an exception is swallowed")
        for statement in node.finalbody:
            for each in ast.walk(statement):
                if isinstance(each, ast.Return | ast.Break | ast.Continue):
                    self._found(each, "finally", "leaving a finally swallows whatever is raised")
        self.generic_visit(node)

    visit_TryStar = visit_Try  # type: ignore[assignment]  # the same fields

    def visit_Call(self, node: ast.Call) -> None:
        name = last(node.func)
        if name == "suppress":
            self._found(node, "suppress " + ", ".join(last(one) for one in node.args), "an exception is swallowed")
        elif name in ("addErrback", "addBoth") and node.args:
            self._errback(node, name, node.args[0])
        elif name == "addCallbacks" and len(node.args) > 1:
            self._errback(node, name, node.args[1])
        elif name == "gatherResults" and any(keyword.arg == "consumeErrors" for keyword in node.keywords):
            self._found(node, name, "every error but the first is swallowed")
        for one in node.args:
            if not isinstance(one, ast.Name | ast.Attribute):
                continue
            adds = name in ("addCallback", "addCallbacks")  # a Deferred is waited for, a coroutine is not
            coroutines = [each for each in self._defined.get(last(one), []) if isinstance(each, ast.AsyncFunctionDef)]
            if (name in IGNORES and self._gives(one)) or (adds and coroutines):
                self._found(node, f"{name} {last(one)}", "the Deferred or coroutine of what it calls is dropped")
        self.generic_visit(node)

    def _errback(self, node: ast.Call, how: str, function: ast.expr) -> None:
        receiver = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        if last(receiver) == "notifyFinish" or (how == "addBoth" and self._has_errback(receiver, node.lineno)):
            return
        if isinstance(function, ast.Lambda):
            argument = function.args.args[0].arg if function.args.args else ""
            body: list[ast.stmt] = [ast.Return(value=function.body)]
            candidates = [(argument, body)]
        else:
            candidates = [
                (arguments[0], each.body)
                for each in self._defined.get(last(function), [])
                if (arguments := [one.arg for one in each.args.args if one.arg != "self"])
            ]
        if any(is_silent(body, argument) for argument, body in candidates):
            self._found(node, f"{how} {last(function) or 'lambda'}", "a failure is swallowed")

    def _has_errback(self, receiver: ast.expr, line: int) -> bool:
        """Whether an errback was added to ``receiver`` on a line before, in this function."""
        if not self._functions:
            return False
        text = ast.unparse(receiver)
        return any(
            isinstance(each, ast.Call) and each.lineno < line and last(each.func) in ("addErrback", "addBoth")
            and isinstance(each.func, ast.Attribute) and ast.unparse(each.func.value) == text
            for each in ast.walk(self._functions[-1])
        )  # fmt: skip

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value
        if isinstance(value, ast.Await) and last(value.value) == "DeferredList":
            self._found(node, "DeferredList", "nobody looks at how they ended")
        if isinstance(value, ast.Call):
            root, outermost = value, ""
            while (
                isinstance(root.func, ast.Attribute)
                and root.func.attr in ADDS
                and isinstance(root.func.value, ast.Call)
            ):
                outermost = outermost or root.func.attr
                root = root.func.value
            if self._gives(root.func) and outermost not in ("addErrback", "addBoth"):
                self._found(node, last(root.func), "its Deferred or coroutine is dropped")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=function)) if self._functions:
                if self._gives(function) and not self._is_used(name):
                    self._found(node, name, "nobody uses this Deferred or coroutine")
        self.generic_visit(node)

    def _is_used(self, name: str) -> bool:
        """Whether a local name is read, other than to add a callback that no errback follows."""
        nodes = list(ast.walk(self._functions[-1]))
        idle = {
            id(node.value.func.value)
            for node in nodes
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Attribute) and node.value.func.attr in ("addCallback", "cancel")
        }  # fmt: skip
        reads = (node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
        return any(node.id == name and id(node) not in idle for node in reads)

    def _gives(self, function: ast.expr) -> bool:
        """Whether what ``function`` names gives a Deferred or a coroutine, as far as can be told."""
        name = last(function)
        if name in GIVES:
            of_service = isinstance(function, ast.Attribute) and last(function.value) == "super"
            return not of_service  # Service's own stopService gives None
        if isinstance(function, ast.Name):
            return any(gives(each) for each in self._defined.get(name, [])) or (
                name not in self._defined and self.names.functions.get(name) == {True}
            )
        if not isinstance(function, ast.Attribute):
            return False
        receiver = last(function.value)
        if receiver in self._imported:
            return False
        if name == "start" and "LoopingCall" in self._types.get(receiver, set()):
            return True
        kinds = set(self._classes[-1:]) if receiver == "self" else self._types.get(receiver, set())
        known = [found for kind in kinds if (found := self.names.method(kind, name)) is not None]
        if known:
            return any(known)
        return name not in COMMON and self.names.functions.get(name) == {True}


def _kinds(annotation: ast.expr) -> set[str]:
    """The classes that an annotation names, without what is in brackets."""
    match annotation:
        case ast.BinOp(left=left, right=right):
            return _kinds(left) | _kinds(right)
        case ast.Constant(value=str() as text):
            return _kinds(ast.parse(text, mode="eval").body)
        case ast.Subscript(value=value):
            return _kinds(value)
    return {last(annotation)} - {""}


def silent_in(sources: Mapping[str, str]) -> Iterator[Finding]:
    """What is silent in modules, given their source texts by path."""
    trees = {path: ast.parse(text, path) for path, text in sources.items()}
    names = names_of(trees.values())
    for path, tree in trees.items():
        yield from Module(path, tree, names).findings


def sources(root: Path, *directories: str) -> dict[str, str]:
    """The source text of every module below ``directories``, by path from ``root``."""
    paths = sorted(path for directory in directories for path in (root / directory).rglob("*.py"))
    return {str(path.relative_to(root)): path.read_text("utf-8") for path in paths}
