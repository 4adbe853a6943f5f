"""Subscription filters: the attribute language of Pub/Sub, parsed into a pure function of a message's attributes.

    attributes:key                         the key is present
    attributes.key = "value"               present with exactly this value
    attributes.key != "value"              anything else, absent included
    hasPrefix(attributes.key, "prefix")    present with a value that starts so
    NOT x, -x, x AND y, x OR y, (x)

A key is a word of letters, digits, "-" and "_", or a quoted string. AND and OR mix only through parentheses, as in the
service, so a reader never needs to know which binds tighter.
"""

import re
from collections.abc import Callable, Mapping

MAX_FILTER_BYTES = 256
"""Longest filter the service takes."""

Attributes = Mapping[str, str]
Filter = Callable[[Attributes], bool]


class FilterError(ValueError):
    """The text is not a filter; says what stands where."""


_TOKEN = re.compile(
    r"""\s*(?:
        (?P<string>"(?:[^"\\]|\\.)*")
      | (?P<not_equal>!=)
      | (?P<symbol>[()=:.,])
      | (?P<minus>-(?=\s*[A-Za-z(]))
      | (?P<word>[A-Za-z0-9_][A-Za-z0-9_-]*)
    )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|[0-7]{3}|.)", re.DOTALL)
_SIMPLE_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}


def parse_filter(text: str) -> Filter:
    """The predicate that `text` writes down; an empty text takes every message. Raises FilterError."""
    if len(text.encode()) > MAX_FILTER_BYTES:
        raise FilterError(f"a filter must have at most {MAX_FILTER_BYTES} bytes, found {len(text.encode())}")
    if not text.strip():
        return lambda attributes: True
    return _Parser(text).parse()


def _unquote(literal: str) -> str:
    def replace(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] in "uUx" and len(code) > 1:
            number = int(code[1:], 16)
        elif len(code) == 3:
            number = int(code, 8)
        else:
            return _SIMPLE_ESCAPES.get(code, code)
        if number > 0x10FFFF or 0xD800 <= number < 0xE000:
            raise FilterError(f"{match[0]} in {literal} is no character")
        return chr(number)

    return _ESCAPE.sub(replace, literal[1:-1])


class _Parser:
    """Recursive descent over the tokens of one filter."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str, int]] = []
        position = 0
        end = len(text.rstrip())
        while position < end:
            match = _TOKEN.match(text, position)
            if not match or match.lastgroup is None:
                raise FilterError(f"unexpected {text[position:].lstrip()[:1]!r} at column {position + 1} of {text!r}")
            self._tokens.append((match.lastgroup, match[match.lastgroup], match.start(match.lastgroup)))
            position = match.end()
        self._next = 0

    def parse(self) -> Filter:
        condition = self._condition()
        if self._next < len(self._tokens):
            raise self._error("the end of the filter")
        return condition

    def _peek(self) -> tuple[str, str]:
        if self._next == len(self._tokens):
            return ("end", "")
        kind, text, _ = self._tokens[self._next]
        return (kind, text)

    def _take(self, kind: str, text: str | None = None) -> str:
        found_kind, found = self._peek()
        if found_kind != kind or (text is not None and found != text):
            raise self._error(repr(text) if text is not None else f"a {kind}")
        self._next += 1
        return found

    def _error(self, expected: str) -> FilterError:
        if self._next == len(self._tokens):
            return FilterError(f"expected {expected} where {self._text!r} ends")
        _, found, start = self._tokens[self._next]
        return FilterError(f"expected {expected}, found {found!r} at column {start + 1} of {self._text!r}")

    def _condition(self) -> Filter:
        terms = [self._term()]
        joiner = ""
        while self._peek() in (("word", "AND"), ("word", "OR")):
            word = self._peek()[1]
            if joiner and word != joiner:
                raise FilterError(f"AND and OR side by side in {self._text!r}: put one of them in parentheses")
            joiner = self._take("word")
            terms.append(self._term())
        if len(terms) == 1:
            return terms[0]
        if joiner == "AND":
            return lambda attributes: all(term(attributes) for term in terms)
        return lambda attributes: any(term(attributes) for term in terms)

    def _term(self) -> Filter:
        if self._peek() == ("word", "NOT") or self._peek()[0] == "minus":
            self._next += 1
            inner = self._term()
            return lambda attributes: not inner(attributes)
        if self._peek() == ("symbol", "("):
            self._next += 1
            condition = self._condition()
            self._take("symbol", ")")
            return condition
        if self._peek() == ("word", "hasPrefix"):
            return self._prefix()
        return self._comparison()

    def _prefix(self) -> Filter:
        self._take("word", "hasPrefix")
        self._take("symbol", "(")
        self._take("word", "attributes")
        self._take("symbol", ".")
        key = self._key()
        self._take("symbol", ",")
        prefix = _unquote(self._take("string"))
        self._take("symbol", ")")
        return lambda attributes: key in attributes and attributes[key].startswith(prefix)

    def _comparison(self) -> Filter:
        self._take("word", "attributes")
        if self._peek() == ("symbol", ":"):
            self._next += 1
            present = self._key()
            return lambda attributes: present in attributes
        self._take("symbol", ".")
        key = self._key()
        if self._peek()[0] == "not_equal":
            self._next += 1
            other = _unquote(self._take("string"))
            return lambda attributes: attributes.get(key) != other
        self._take("symbol", "=")
        value = _unquote(self._take("string"))
        return lambda attributes: attributes.get(key) == value

    def _key(self) -> str:
        if self._peek()[0] == "string":
            return _unquote(self._take("string"))
        return self._take("word")
