from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pytest

from pipelines.settings import SettingsError, override, read, write


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    size: int = 3
    rate: float = 0.5
    sizes: tuple[int, ...] = (1, 2)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, found {self.size}")


@dataclass(frozen=True)
class Outer:
    name: str
    colour: Colour = Colour.RED
    limit: float | None = None
    inner: Inner = field(default_factory=Inner)


def test_settings_survive_writing_and_reading() -> None:
    settings = Outer("x", Colour.BLUE, 2.5, Inner(4, 1.0, (7,), {"a": [1, {"b": True}]}))
    assert read(Outer, write(settings)) == settings
    assert read(Outer, write(Outer("x"))) == Outer("x")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"name": "x", "inner": {"sise": 3}}, r"unknown key inner\.sise; did you mean inner\.size\?"),
        ({"name": "x", "size": 3}, r"unknown key size; did you mean inner\.size\?"),
        ({"name": "x", "inner": {"limit": 3}}, r"unknown key inner\.limit; did you mean limit\?"),
        ({"name": "x", "iner": {"size": 3}}, r"unknown key iner; did you mean inner\?"),
        ({"name": "x", "other": {"size": 3}}, r"unknown key other; the sections are inner$"),
        ({"name": "x", "inner": {"lr": 3}}, r"unknown key inner\.lr; the keys of \[inner\] are size, rate, sizes, opt"),
        ({"name": "x", "lr": 3}, r"unknown key lr; at the top stand name, colour, limit, all else in a section"),
        ({"name": "x", "colour": "green"}, r"colour must be one of 'red', 'blue'; found 'green'"),
        ({"name": "x", "inner": {"size": "3"}}, r"inner\.size must be a whole number, found '3'"),
        ({"name": "x", "inner": {"size": True}}, r"inner\.size must be a whole number, found True"),
        ({"name": "x", "inner": {"size": 1.5}}, r"inner\.size must be a whole number, found 1\.5"),
        ({"name": "x", "inner": {"sizes": [1, "a"]}}, r"inner\.sizes\[1\] must be a whole number"),
        ({"name": "x", "inner": {"sizes": 3}}, r"inner\.sizes must be a list"),
        ({"name": "x", "inner": 3}, r"inner must be a table"),
        ({"name": "x", "inner": {"size": 0}}, r"\[inner\] size must be at least 1, found 0"),
        ({}, r"name must be set"),
        ({"name": 3}, r"name must be a text in quotes"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_mend(values: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        read(Outer, values)


def test_overrides_are_read_as_toml_and_change_nothing_in_place() -> None:
    values = {"name": "x", "inner": {"size": 1}}
    found = override(
        values, ["inner.size=5", "colour=blue", "inner.sizes=[4, 5]", 'inner.options.deep="1"', "limit=1e-3"]
    )
    assert read(Outer, found) == Outer("x", Colour.BLUE, 1e-3, Inner(5, 0.5, (4, 5), {"deep": "1"}))
    assert values == {"name": "x", "inner": {"size": 1}}


@pytest.mark.parametrize("assignment", ["inner.size", "=3", ".=1", "name.first=2"])
def test_overrides_that_say_nothing_are_refused(assignment: str) -> None:
    with pytest.raises(SettingsError, match="--set"):
        override({"name": "x"}, [assignment])
