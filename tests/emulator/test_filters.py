"""The filter language: its grammar, and that parsed filters mean what their parts mean."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.filters import FilterError, parse_filter

ATTRIBUTES = {"lang": "en", "iana.org/tag": "x", "empty": "", "colour-name_1": 'say "hi"\n'}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ("attributes:lang", True),
        ("attributes:absent", False),
        ("attributes:empty", True),
        ('attributes:"iana.org/tag"', True),
        ('attributes.lang = "en"', True),
        ('attributes.lang="EN"', False),
        ('attributes.absent = ""', False),
        ('attributes.lang != "de"', True),
        ('attributes.absent != "de"', True),
        ('attributes.lang != "en"', False),
        ('attributes."iana.org/tag" = "x"', True),
        (r'attributes.colour-name_1 = "say \"hi\"\n"', True),
        (r'attributes.lang = "\u0065\x6e"', True),
        ('hasPrefix(attributes.lang, "e")', True),
        ('hasPrefix(attributes.lang, "n")', False),
        ('hasPrefix(attributes.absent, "")', False),
        ("NOT attributes:absent", True),
        ("-attributes:lang", False),
        ("NOT NOT attributes:lang", True),
        ('NOT attributes:lang AND attributes.lang = "en"', False),
        ("attributes:lang OR attributes:absent", True),
        ("attributes:lang AND attributes:absent", False),
        ("attributes:absent OR (attributes:lang AND NOT attributes:absent)", True),
        ("NOT (attributes:lang OR attributes:absent)", False),
        ("attributes:lang\n AND  attributes:empty", True),
    ],
)
def test_meaning(text: str, expected: bool) -> None:
    assert parse_filter(text)(ATTRIBUTES) is expected


@pytest.mark.parametrize(
    "text",
    [
        "lang",
        "attributes",
        "attributes:",
        "attributes.lang",
        "attributes.lang = en",
        'attributes.lang == "en"',
        'attributes.lang = "en',
        "attributes:a AND",
        "attributes:a attributes:b",
        "attributes:a AND attributes:b OR attributes:c",
        "(attributes:a",
        "attributes:a)",
        "NOT",
        'hasPrefix(attributes.a "b")',
        'hasSuffix(attributes.a, "b")',
        "attributes:a & attributes:b",
        r'attributes.a = "\ud800"',
        "attributes:" + "k" * 250,
    ],
)
def test_what_is_no_filter(text: str) -> None:
    with pytest.raises(FilterError):
        parse_filter(text)


KEYS = st.sampled_from(["a", "b", "c"])
VALUES = st.sampled_from(["", "x", "xy"])


def atoms() -> st.SearchStrategy[tuple[str, object]]:
    """(text, what it should answer as a function of the attributes)."""
    return st.one_of(
        KEYS.map(lambda k: (f"attributes:{k}", lambda a: k in a)),
        st.tuples(KEYS, VALUES).map(lambda kv: (f'attributes.{kv[0]} = "{kv[1]}"', lambda a: a.get(kv[0]) == kv[1])),
        st.tuples(KEYS, VALUES).map(lambda kv: (f'attributes.{kv[0]} != "{kv[1]}"', lambda a: a.get(kv[0]) != kv[1])),
    )


EXPRESSIONS = st.recursive(
    atoms(),
    lambda inner: st.one_of(
        inner.map(lambda x: (f"NOT ({x[0]})", lambda a: not x[1](a))),
        st.tuples(inner, inner).map(lambda p: (f"({p[0][0]}) AND ({p[1][0]})", lambda a: p[0][1](a) and p[1][1](a))),
        st.tuples(inner, inner).map(lambda p: (f"({p[0][0]}) OR ({p[1][0]})", lambda a: p[0][1](a) or p[1][1](a))),
    ),
    max_leaves=5,
).filter(lambda x: len(x[0]) <= 256)


@given(EXPRESSIONS, st.dictionaries(KEYS, VALUES))
def test_any_expression(expression, attributes) -> None:
    text, meaning = expression
    assert parse_filter(text)(attributes) == meaning(attributes)


@given(st.text(max_size=80))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        predicate = parse_filter(text)
    except FilterError:
        return
    assert predicate({}) in (True, False)
