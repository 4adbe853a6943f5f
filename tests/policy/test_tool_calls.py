"""Tool-call formats: what is written is read back, and whatever else a policy writes becomes an error that says why."""

import keyword
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from policy.tool_calls import FORMATS, ToolCall, detect_format

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "n": {"type": "integer"},
                    "x": {"type": "number"},
                    "on": {"type": "boolean"},
                    "deep": {"type": "object"},
                    "list": {"type": ["array", "null"]},
                    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                    "word": {"type": ["string", "null"]},
                    "pick": {"enum": ["1", 2, "two"]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}},
]


def parse(name, text):
    return FORMATS[name].parse(text, TOOLS)


READ = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>', [("f", {"n": 1})]),
    ("hermes", 'So: <tool_call>{"arguments": {}, "name": "g"}</tool_call> and more', [("g", {})]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"text": "</tool_call> é 日"}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        [("f", {"text": "</tool_call> é 日"}), ("g", {})],
    ),
    ("hermes", "no call", []),
    ("llama3", '{"name": "f", "parameters": {"n": 1}}', [("f", {"n": 1})]),
    ("llama3", '\n\n{"type": "function", "name": "g", "parameters": {}}', [("g", {})]),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {"deep": {"a": [1]}}}', [("f", {"deep": {"a": [1]}})]),
    ("llama3", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', [("f", {}), ("g", {})]),
    ("llama3", '{"name": "f", "arguments": {"n": 1}}', [("f", {"n": 1})]),
    ("llama3", '<|python_tag|>brave_search.call(query="cats")', [("brave_search", {"query": "cats"})]),
    ("llama3", 'It is {"name": "f", "parameters": {}}', []),
    ("llama3", '{"answer": 42}', []),
    ("llama3", "{not json, and no call", []),
    ("pythonic", "```tool_code\nf(n=1, text='é \"q\"', on=True)\n```", [("f", {"n": 1, "text": 'é "q"', "on": True})]),
    (
        "pythonic",
        "I look.\n```tool_code\nprint(api.f(deep={'a': (1, None)}))\ng()\n```",
        [
            ("api.f", {"deep": {"a": [1, None]}}),
            ("g", {}),
        ],
    ),
    ("pythonic", "[f(n=-1), g()]", [("f", {"n": -1}), ("g", {})]),
    ("pythonic", "```tool_code\n[f(n=1), g()]\n```", [("f", {"n": 1}), ("g", {})]),
    ("pythonic", "[1, 2]", []),
    ("pythonic", "f(n=1)", []),
    ("gemma4", '<|tool_call>call:f{n:1,text:<|"|>a,}b:<|"|>}<tool_call|>', [("f", {"n": 1, "text": "a,}b:"})]),
    (
        "gemma4",
        '<|tool_call>call:f{deep:{a:[1,-2.5,true,null],<|"|>k<|"|>:{}},on:False}<tool_call|><|tool_call>call:g{}<tool_call|>',
        [("f", {"deep": {"a": [1, -2.5, True, None], "k": {}}, "on": False}), ("g", {})],
    ),
    ("gemma4", "call:f{}", []),
    (
        "qwen3-coder",
        "<tool_call>\n<function=f>\n<parameter=text>\n1\n\n</parameter>\n<parameter=n>\n1\n</parameter>\n"
        '<parameter=deep>\n{"a": [1]}\n</parameter>\n</function>\n</tool_call>',
        [("f", {"text": "1\n", "n": 1, "deep": {"a": [1]}})],
    ),
    ("qwen3-coder", "<tool_call>\n<function=g>\n</function>\n</tool_call>\n", [("g", {})]),
    (
        "qwen3-coder",
        "<tool_call><function=f><parameter=on>True</parameter><parameter=x>2</parameter><parameter=list>null</parameter>"
        "<parameter=maybe>None</parameter><parameter=word>null</parameter></function></tool_call>",
        [("f", {"on": True, "x": 2, "list": None, "maybe": None, "word": None})],
    ),
    (
        "qwen3-coder",
        "<tool_call><function=f><parameter=n>one</parameter><parameter=pick>2</parameter><parameter=other>3</parameter>"
        "<parameter=word>7</parameter></function></tool_call>",
        [("f", {"n": "one", "pick": 2, "other": "3", "word": "7"})],
    ),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}}, {"name": "g", "arguments": {}}]',
        [
            ("f", {"n": 1}),
            ("g", {}),
        ],
    ),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"n": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}', [("f", {"n": 1}), ("g", {})]),
]


@pytest.mark.parametrize(("name", "text", "calls"), READ)
def test_calls_are_read(name, text, calls):
    assert [(call.name, call.arguments) for call in parse(name, text)] == calls


def test_a_models_own_names_of_calls_are_kept():
    assert parse("mistral", '[TOOL_CALLS] [{"name": "g", "arguments": {}, "id": "abc"}]')[0].id == "abc"
    assert parse("mistral", "[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}")[0].id == "abc"


MALFORMED = [
    ("hermes", "<tool_call>{", "", "</tool_call> is missing"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1}}', "", "</tool_call> is missing"),
    ("hermes", "<tool_call>not json</tool_call>", "", "no JSON"),
    ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "", "no JSON"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "", "NaN"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', "", "finite"),
    ("hermes", "<tool_call>[]</tool_call>", "", "must be"),
    ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "f", "arguments must be a JSON object"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}} so</tool_call>', "", "</tool_call> must follow"),
    ("llama3", '{"name": "f", "parameters": ', "", "no JSON"),
    ("llama3", '{"name": "f"}', "f", "parameters must be"),
    ("llama3", "<|python_tag|>", "", "no call"),
    ("llama3", "<|python_tag|>x = 1", "", "function call"),
    ("pythonic", "```tool_code\nf(n=1)", "", "closing ```"),
    ("pythonic", "```tool_code\n```", "", "no call"),
    ("pythonic", "```tool_code\nf(1)\n```", "f", "by name"),
    ("pythonic", "```tool_code\nf(n=open('x'))\n```", "f", "argument n must be a literal"),
    ("pythonic", "```tool_code\nf(n={1})\n```", "f", "literal"),
    ("pythonic", "```tool_code\nf(n=1e999)\n```", "f", "literal"),
    ("pythonic", "```tool_code\nimport os\n```", "", "function call"),
    ("pythonic", "[f(n=1), g(", "", "no Python"),
    ("pythonic", "```tool_code\n" + "-" * 100_000 + "1\n```", "", "MemoryError"),
    ("gemma4", "<|tool_call>f{}<tool_call|>", "", "call:name"),
    ("gemma4", "<|tool_call>call:f{n:1", "f", "commas"),
    ("gemma4", "<|tool_call>call:f{n:1}", "f", "<tool_call|> is missing"),
    ("gemma4", "<|tool_call>call:f{text:hello}<tool_call|>", "f", "text must stand between"),
    ("gemma4", '<|tool_call>call:f{text:<|"|>hello}<tool_call|>', "f", "closing"),
    ("gemma4", "<|tool_call>call:f{deep:" + "[" * 100_000 + "<tool_call|>", "f", "nested"),
    ("qwen3-coder", "<function=f></function>", "", "between <tool_call>"),
    ("qwen3-coder", "<tool_call><function=f><parameter=n>1</function></tool_call>", "f", "</parameter> is missing"),
    ("qwen3-coder", "<tool_call><function=f>so</function></tool_call>", "f", "</function> is missing"),
    ("qwen3-coder", "<tool_call><function=f></function>", "f", "</tool_call> is missing"),
    ("qwen3-coder", '<tool_call>{"name": "f"}</tool_call>', "", "<function=name>"),
    ("mistral", "[TOOL_CALLS]", "", "no JSON"),
    ("mistral", '[TOOL_CALLS][{"name": "f"}]', "f", "arguments must be"),
    ("mistral", "[TOOL_CALLS]f[ARGS][1]", "f", "arguments must be"),
]


@pytest.mark.parametrize(("name", "text", "tool", "says"), MALFORMED, ids=lambda value: repr(value)[:50])
def test_malformed_calls_say_what_is_wrong(name, text, tool, says):
    (call,) = parse(name, text)
    assert (call.name, call.arguments) == (tool, None)
    assert call.error.startswith("malformed tool call: ")
    assert says in call.error


def test_a_malformed_call_does_not_hide_its_neighbours():
    good = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    calls = parse("hermes", f"<tool_call>{{</tool_call>{good}<tool_call>{good}")
    assert [call.arguments for call in calls] == [None, {}, None, {}]


KEYS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(lambda key: not keyword.iskeyword(key))
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.builds(ToolCall, st.sampled_from(["f", "look_up"]), st.dictionaries(KEYS, VALUES, max_size=3)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(sorted(FORMATS)), calls=CALLS)
def test_what_a_format_writes_it_reads(name, calls):
    assume(not (name == "gemma4" and '<|"|>' in str(calls)))
    if name == "qwen3-coder":  # its values are text: only a schema tells a number from its digits
        calls = [ToolCall(call.name, {key: str(value) for key, value in call.arguments.items()}) for call in calls]
        assume("</parameter>" not in str(calls))
    assert FORMATS[name].parse(FORMATS[name].render(calls), ()) == tuple(calls)


MARKS = [
    "<tool_call>", "</tool_call>", "<function=", "<function=f>", "</function>", "<parameter=a>", "</parameter>",
    "<|tool_call>", "<tool_call|>", "call:f{", '<|"|>', "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```tool_code\n",
    "```", "f(", "print(", "x=", '{"name": "f", ', '"arguments": {', '"parameters": ', '"', "'", "{", "}", "[", "]",
    "(", ")", ":", ",", ";", "\\", "\n", " ", "1", "-", "1e999", "é", "\x00", "\ud800", "lambda:", "True", "None",
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(name=st.sampled_from(sorted(FORMATS)), pieces=st.lists(st.sampled_from(MARKS), max_size=30))
def test_whatever_is_written_parsing_never_raises(name, pieces):
    for call in parse(name, "".join(pieces)):
        assert isinstance(call, ToolCall)
        assert (call.arguments is None) == bool(call.error)


@pytest.mark.parametrize(
    "schema", [None, 5, [], {"type": 5}, {"type": [5, "integer"]}, {"enum": 5}, {"anyOf": {}}, {"oneOf": [5, None]}]
)
def test_a_schema_that_is_none_types_nothing(schema):
    tools = [{"function": {"name": "f", "parameters": {"properties": {"x": schema}}}}]
    text = "<tool_call><function=f><parameter=x>one</parameter></function></tool_call>"
    assert FORMATS["qwen3-coder"].parse(text, tools) == (ToolCall("f", {"x": "one"}),)


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(sorted(FORMATS)), pieces=st.lists(st.sampled_from(MARKS), min_size=1, max_size=4))
def test_the_time_grows_with_the_text_and_not_faster(name, pieces):
    """A hundred times the text takes at most a few hundred times as long, never ten thousand."""

    def seconds(count):
        text = "".join(pieces) * count
        began = time.process_time()
        parse(name, text)
        return time.process_time() - began

    small = max(min(seconds(50) for _ in range(3)), 2e-4)
    assert seconds(5_000) < small * 2000


def test_formats_are_found_by_their_signs():
    for template, name in {
        "… <|tool_call>call:": "gemma4",
        "<tool_call>\n<function=": "qwen3-coder",
        "<|start_header_id|> <tool_call>": "hermes",
        "[TOOL_CALLS]": "mistral",
        "<|start_header_id|>": "llama3",
        "<start_of_turn>": "pythonic",
        "<|im_start|>": "hermes",
    }.items():
        assert detect_format(template).name == name
