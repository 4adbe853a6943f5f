"""The results file: what is read is what was written, and nothing else is taken for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from learner.results import Figures, Result, Results, Spread, digest, figures
from trajectories.schema import Status, stream_seed


def result(group_id: int = 7, **changes: object) -> Result:
    plain: dict[str, object] = {
        "group_id": group_id,
        "attempt": 1,
        "question": 3,
        "sample": 1,
        "temperature": 1.0,
        "payload": digest({"q": 3}),
        "status": Status.COMPLETED,
        "success": True,
        "reward": 0.75,
        "parts": {"right": 1.0, "länge": -0.25},
        "tokens": 12,
        "turns": 2,
        "version": "0.1",
    }
    return Result(**{**plain, **changes})  # type: ignore[arg-type]


def opened(path: Path, said: list[str] | None = None, patience_s: float = 0.0) -> Results:
    return Results(path, 5, (said if said is not None else []).append, patience_s)


def test_results_come_back_as_they_were_and_a_line_cut_short_is_dropped_with_a_warning(tmp_path: Path) -> None:
    path, said = tmp_path / "deep" / "results.jsonl", list[str]()
    written = [result(), result(8, status=Status.TIMEOUT, success=False, version="", error="slow\nvery")]
    file = opened(path, said)
    assert file.ended == ()
    for one in written:
        file.append(one)
    with pytest.raises(ValueError, match="is being written by another evaluation"):
        opened(path)
    file.close()
    first = json.loads(path.read_text().splitlines()[0])
    assert (first["episode"], first["end"], first["seed"]) == ("eval-7.1/0", "solved", stream_seed(5, "eval-7.1/0"))

    whole = path.read_bytes()
    path.write_bytes(whole + b'{"episode":"eval-')
    file = opened(path, said)
    assert file.ended == tuple(written)
    assert len(said) == 1
    assert "cut short" in said[0]
    file.append(result(9))
    file.close()
    assert path.read_bytes().startswith(whole)
    assert [one.group_id for one in opened(path).ended] == [7, 8, 9]


@pytest.mark.parametrize("line", ["", "{}", "7", "nonsense", '{"group_id":'])
def test_a_whole_line_that_is_no_result_is_an_error_with_its_number(line: str, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    file = opened(path)
    file.append(result())
    file.close()
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match="line 2, is no result"):
        opened(path)


def test_figures_keep_ends_apart_and_parts_add_up() -> None:
    answers = [
        result(tokens=10, turns=1),
        result(tokens=20, turns=2, success=False, reward=0.0, parts={"right": 0.0}),
        result(tokens=30, turns=3, success=False, reward=0.0, parts={}, status=Status.MAX_TURNS),
    ]
    found = figures(answers, 2, {"timeout": 4})
    assert found.ends == {"solved": 1, "wrong": 1, "truncated": 1, "failed": 2}
    assert found.failures == {"timeout": 4}
    assert found.reward == 0.25
    assert sum(found.parts.values()) == pytest.approx(found.reward)
    assert (found.tokens, found.turns) == (Spread(20, 30, 30), Spread(2, 3, 3))
    assert figures(answers[::-1], 2, {"timeout": 4}) == found
    assert figures([], 1, {}) == Figures(ends={"solved": 0, "wrong": 0, "truncated": 0, "failed": 1})


def test_a_digest_tells_payloads_apart_whatever_the_order_of_their_keys() -> None:
    assert digest({"a": 1, "b": [2, "x"]}) == digest({"b": [2, "x"], "a": 1})
    assert len({digest({"a": 1}), digest({"a": 2}), digest({"b": 1}), digest({})}) == 4
