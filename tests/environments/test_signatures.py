"""What the policy is shown of a typed function, and what becomes of the arguments that it writes."""

import asyncio
import enum
import functools
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest

from environments.signatures import coerced, mismatch, signature_of
from environments.tools import Tool, ToolContext, tool


class Order(enum.Enum):
    NEW = "new"
    OLD = "old"


class Depth(enum.Enum):
    FLAT = object()


@dataclass
class Range:
    low: int
    high: int = 9

    def __post_init__(self):
        if self.low > self.high:
            raise ValueError(f"low must not exceed high, found {self.low} and {self.high}")


class Filter(TypedDict):
    field: str
    value: NotRequired[int]


@tool(timeout_s=2.0, max_output=500)
def search(
    query: str,
    limit: int = 3,
    order: Order = Order.NEW,
    kind: Literal["a", "b"] = "a",
    within: Range | None = None,
    filters: list[Filter] | None = None,
    weights: dict[str, float] | None = None,
    exact: Annotated[bool, "no fuzzy matches"] = False,
    context: ToolContext = ToolContext(),
) -> dict[str, Any]:
    """Search the corpus.

    Matches are ranked.

    Args:
        query: What to look for; words
            in any order.
        limit (int): Most results.
        context: of the episode.

    Returns:
        The matches.
    """
    return {"limit": limit, "order": order.name, "within": within, "weights": weights, "turn": context.turn}


def run(arguments, one=search):
    return asyncio.run(one.run(arguments))


def test_the_docstring_and_the_annotations_are_what_the_policy_reads():
    shown = search.schema["function"]
    assert (shown["name"], search.timeout_s, search.max_output) == ("search", 2.0, 500)
    assert shown["description"] == "Search the corpus.\n\nMatches are ranked."
    properties = shown["parameters"]["properties"]
    assert properties["query"] == {"type": "string", "description": "What to look for; words in any order."}
    assert properties["limit"] == {"type": "integer", "description": "Most results.", "default": 3}
    assert properties["order"] == {"type": "string", "enum": ["new", "old"]}
    assert properties["kind"] == {"type": "string", "enum": ["a", "b"], "default": "a"}
    assert properties["within"]["anyOf"][0] == {
        "type": "object",
        "properties": {"low": {"type": "integer"}, "high": {"type": "integer"}},
        "required": ["low"],
    }
    assert properties["filters"]["anyOf"][0]["items"]["required"] == ["field"]
    assert properties["weights"]["anyOf"][0] == {"type": "object", "additionalProperties": {"type": "number"}}
    assert properties["exact"]["description"] == "no fuzzy matches"
    assert "context" not in properties
    assert shown["parameters"]["required"] == ["query"]
    assert search("x")["order"] == "NEW"  # the function itself


def test_arguments_reach_the_function_as_its_annotations_say():
    seen = {}

    def keep(order: Order, within: Range, weights: dict[str, float], many: list[Order], nothing: int | None = 5) -> str:
        seen.update(order=order, within=within, weights=weights, many=many, nothing=nothing)
        return "ok"

    arguments = {"order": "old", "within": {"low": 2}, "weights": {"a": 1}, "many": ["new"], "nothing": None}
    assert run(arguments, Tool.of(keep)).counts == {"tool_calls": 1}
    assert seen == {
        "order": Order.OLD,
        "within": Range(2, 9),
        "weights": {"a": 1.0},
        "many": [Order.NEW],
        "nothing": None,
    }
    assert type(seen["weights"]["a"]) is float


@pytest.mark.parametrize(
    "written",
    [
        {"query": "x", "limit": "7"},
        {"query": "x", "limit": "7.0"},
        {"query": "x", "limit": 7, "within": '{"low": 1}'},
        {"query": "x", "limit": 7, "within": {"low": "1", "high": "3"}},
        {"query": "x", "limit": 7, "exact": "True"},
        {"query": "x", "limit": 7, "filters": '[{"field": "a"}]'},
        {"query": "x", "limit": 7, "weights": {"a": "0.5"}},
        {"query": "x", "limit": 7, "within": "null"},
    ],
)
def test_the_same_value_written_another_way_is_mended_and_counted(written):
    result = run(written)
    assert result.counts == {"tool_calls": 1, "mended_calls": 1}
    assert '"limit": 7' in result.text


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ({}, "arguments lacks query"),
        ({"query": 7}, "arguments.query must be of type string, found int 7"),
        ({"query": "x", "limit": "many"}, 'arguments.limit must be of type integer, found str "many"'),
        ({"query": "x", "limit": 7.5}, "arguments.limit must be of type integer, found float 7.5"),
        ({"query": "x", "limit": True}, "arguments.limit must be of type integer, found bool true"),
        ({"query": "x", "limit": "NaN"}, "must be of type integer"),
        ({"query": "x", "order": "newest"}, "arguments.order must be one of 'new', 'old', found str \"newest\""),
        ({"query": "x", "filters": [{"value": 1}]}, "arguments.filters[0] lacks field"),
        ({"query": "x", "weights": {"a": "heavy"}}, "arguments.weights.a must be of type number"),
        ({"query": "x", "within": {"low": 3, "high": 1}}, "low must not exceed high, found 3 and 1"),
        ({"query": "x", "colour": "red"}, "unknown colour; it may have query, limit"),
    ],
)
def test_what_does_not_fit_is_told_to_the_policy_and_runs_nothing(written, says):
    result = run(written)
    assert result.text.startswith("error: search: ")
    assert says in result.text
    assert result.counts == {"malformed_calls": 1}


def nested(depth, kind=dict):
    value = "x"
    for _ in range(depth):
        value = {"a": value} if kind is dict else [value]
    return value


@dataclass
class Share:
    part: float

    def __post_init__(self):
        assert 1 / self.part >= 1, "part must be at most 1"


def test_what_the_policy_writes_never_raises():
    def take(anything: dict | None = None, text: str = "", share: Share | None = None, number: float = 0.0) -> str:
        return "ok"

    for written in (
        {"anything": nested(2000)},
        {"other": nested(2000)},
        {"text": nested(2000, list)},
        {"text": nested(2000)},
        {"number": 10**400},
        {"share": {"part": 0}},
        {"share": {"part": 2}},
    ):
        result = run(written, Tool.of(take))
        assert result.counts == {"malformed_calls": 1}, list(written)
        assert len(result.text) < 1100
    assert run({"share": {"part": 0.5}, "anything": nested(50)}, Tool.of(take)).text == "ok"


def test_functions_that_cannot_be_tools_are_refused_where_they_are_written():
    def lost(query: str) -> str:
        """.

        Args:
            qeury: typed in haste
        """
        return query

    def starred(*queries: str) -> str:
        """."""
        return ""

    def opaque(file: Depth) -> str:
        """."""
        return file.name

    with pytest.raises(TypeError, match=r"describes qeury, which is no parameter; is it query\?"):
        signature_of(lost)
    with pytest.raises(TypeError, match=r"a tool must have a name.*name=\.\.\."):
        Tool.of(functools.partial(opaque, Depth.FLAT))
    with pytest.raises(TypeError, match="parameter queries must be given by name"):
        signature_of(starred)
    assert signature_of(opaque).parameters["properties"]["file"]["enum"] == ["FLAT"]
    assert run({"file": "FLAT"}, Tool.of(opaque)).text == "FLAT"


def test_schemas_of_other_peoples_tools_may_name_several_types():
    schema = {"type": "object", "properties": {"n": {"type": ["integer", "null"]}}}
    assert mismatch({"n": None}, schema) == mismatch({"n": 3}, schema) == ""
    assert "integer" in mismatch({"n": "x"}, schema)
    assert coerced({"n": "4"}, schema) == {"n": 4}


def test_a_parameter_without_annotation_is_named_with_what_to_write():
    def price(item, days=3):
        return ""

    says = (
        r"tool price: parameter item has no annotation: say what it holds, for example `item: str`; there are str, int"
    )
    with pytest.raises(TypeError, match=says):
        Tool.of(price)
    price.__annotations__["item"] = str
    with pytest.raises(TypeError, match=r"parameter days has no annotation.*`days: int`"):
        Tool.of(price)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), "5"])
def test_a_limit_that_lets_no_call_through_is_refused_when_the_tool_is_made(timeout_s):
    with pytest.raises(ValueError, match=r"tool price: timeout_s must be more than 0 seconds .*found"):

        @tool(timeout_s=timeout_s)
        def price(item: str) -> str:
            return item
