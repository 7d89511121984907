"""What a definition is evaluated on: one XML document made of what lshw and lldp said; and what comes of it.

Run in the child process alone (:mod:`region.tags.child`): both the documents, which come from machines, and the
definitions may be made to take all memory, or time without end.

The merged document is what MAAS has: its root is that of lshw, so ``//node[@id="cpu"]`` finds what it says; below that
root stands each document once more, with its elements in the namespace ``lshw`` or ``lldp``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from lxml import etree

MAX_DEFINITION: Final = 8192
"""Characters of a definition."""

SOURCES: Final = ("lshw", "lldp")
"""The documents, in the order in which they are merged; each name is its prefix and its namespace."""

NAMESPACES: Final = {name: name for name in SOURCES}

_NOT_XML: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
_LITERAL: Final = re.compile(r""""[^"]*"|'[^']*'""")
_PREFIX: Final = re.compile(r"([^\W\d][\w.-]*):(?!:)")
_CALLED: Final = re.compile(r"([^\W\d][\w.-]*)\s*\(")

# Section 4 of https://www.w3.org/TR/1999/REC-xpath-19991116/, and what may stand before a bracket and is no function.
_FUNCTIONS: Final = frozenset(
    {
        "last", "position", "count", "id", "local-name", "namespace-uri", "name", "string", "concat", "starts-with",
        "contains", "substring-before", "substring-after", "substring", "string-length", "normalize-space", "translate",
        "boolean", "not", "true", "false", "lang", "number", "sum", "floor", "ceiling", "round",
    }
)  # fmt: skip
_NO_FUNCTIONS: Final = frozenset({"comment", "text", "processing-instruction", "node", "and", "or", "div", "mod"})


class InvalidDefinition(Exception):
    """It is no XPath that could ever be evaluated; the text says why."""


class CannotEvaluate(Exception):
    """The definition cannot be evaluated on this document; the text says why."""


def merge(documents: Mapping[str, bytes]) -> tuple[Any, Mapping[str, str]]:
    """The merged document's root element, and why documents could not be read, by name.

    :param documents: by name, any of :data:`SOURCES`.
    """
    roots, problems = dict[str, Any](), dict[str, str]()
    for name in SOURCES:
        if documents.get(name, b"").strip():
            try:
                roots[name] = _parse(documents[name])
            except etree.XMLSyntaxError as error:
                problems[name] = f"it is no XML: {' '.join(error.msg.split())}"
            except ValueError as error:
                problems[name] = str(error)
    copies = [_in_namespace(root, name) for name, root in roots.items()]
    merged = roots.get("lshw")
    if merged is None:
        merged = etree.Element("list")
    merged.extend(copies)
    return merged, problems


def _parse(data: bytes) -> Any:
    """The root of what the hooks (:mod:`region.hardware.documents`) would read too: a document in UTF-8, in which
    characters that XML does not have, which firmware is fond of, become U+FFFD."""
    text = _NOT_XML.sub("\ufffd", data.decode("utf-8", "replace"))
    # A parser is good for one document; nothing outside of it is ever read, and no entity replaced.
    parser = etree.XMLParser(
        encoding="utf-8", resolve_entities=False, no_network=True, load_dtd=False, dtd_validation=False,
        huge_tree=False, remove_comments=True, remove_pis=True,
    )  # fmt: skip
    root = etree.fromstring(text[max(text.find("<"), 0) :].strip().encode(), parser)
    if root.getroottree().docinfo.doctype:
        raise ValueError("it has a document type declaration, which neither lshw nor lldp writes")
    return root


def _in_namespace(root: Any, name: str) -> Any:
    """A copy of the element with it and all below it in the namespace."""
    copied = etree.fromstring(etree.tostring(root))
    for element in copied.iter(etree.Element):
        element.tag = f"{{{name}}}{etree.QName(element).localname}"
    return copied


def compile_definition(definition: str) -> Any:
    """The definition, to be called with a document; its value is true or false.

    :raises InvalidDefinition: if it is no XPath.
    """
    if len(definition) > MAX_DEFINITION:
        raise InvalidDefinition(f"it has {len(definition)} characters; at most {MAX_DEFINITION} are accepted")
    try:
        # First by itself: what is not whole could become so between the brackets.
        etree.XPath(definition, namespaces=NAMESPACES, regexp=False)
        return etree.XPath(f"boolean({definition})", namespaces=NAMESPACES, regexp=False)
    except (etree.XPathError, ValueError) as error:
        raise InvalidDefinition(str(error)) from error


def check(definition: str) -> None:
    """Find out whether the definition can be evaluated.

    :raises InvalidDefinition: if not: it is no XPath, or it uses a prefix, a function or a variable that there is not.
    """
    compiled = compile_definition(definition)
    # libxml2 notices these only when it comes to them, which may be on some machine alone.
    text = _LITERAL.sub("''", definition)
    for prefix in _PREFIX.findall(text):
        if prefix not in NAMESPACES:
            raise InvalidDefinition(f"there is no prefix {prefix!r}; there are {', '.join(SOURCES)}")
    for name in _CALLED.findall(text):
        if name not in _FUNCTIONS | _NO_FUNCTIONS:
            raise InvalidDefinition(f"there is no function {name}() in XPath 1.0")
    if "$" in text:
        raise InvalidDefinition("there are no variables")
    empty, _ = merge({"lshw": b"<list/>", "lldp": b"<lldp/>"})
    try:
        compiled(empty)
    except etree.XPathError as error:
        raise InvalidDefinition(str(error)) from error


def evaluate(definition: str, document: Any) -> bool:
    """Whether the definition is true of the merged document.

    :raises CannotEvaluate: if that cannot be told.
    """
    try:
        return bool(compile_definition(definition)(document))
    except (InvalidDefinition, etree.XPathError) as error:
        # That is all that libxml2 says when it has no memory.
        text = str(error).replace("unknown error", "an unknown error of libxml2, most likely too little memory for it")
        raise CannotEvaluate(text) from error
