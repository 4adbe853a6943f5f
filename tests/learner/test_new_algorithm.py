"""docs/algorithms.md adds an algorithm: its lines, as they stand there, train a step by the paper's formula."""

import re
from pathlib import Path

import numpy as np
import pytest

from learner import algorithms, losses
from pipelines.config import load_run
from pipelines.learner import learner_spec
from tests.learner import papers
from tests.learner.test_losses import LENGTHS, value_and_gradient, whole_episodes
from tests.learner.test_step import build, closings, packed_rows

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"


def topr(e, s):
    """The paper's, an episode at a time."""
    ratio = np.prod([np.exp(a - b) for a, b in zip(e["still"], e["mu"], strict=True)])
    return [-(1.0 if a > 0 else min(ratio, 1.0)) * a * pi for pi, a in zip(e["pi"], e["advantage"], strict=True)]


@pytest.fixture
def added(monkeypatch):
    """The page's function and lines, in their tables."""
    page = PAGE.read_text()
    function, loss_line, algorithm_lines = re.findall(
        r"```python\n(.*?)```", page.split("## Adding an algorithm")[1], re.S
    )
    there = vars(losses) | vars(algorithms)
    exec(function, there)
    for table, lines in ((losses.POLICY_LOSSES, loss_line), (algorithms.ALGORITHMS, algorithm_lines)):
        for name, line in eval("{" + lines + "}", there).items():
            monkeypatch.setitem(table, name, line)
    monkeypatch.setattr(papers, "topr", topr, raising=False)


@pytest.mark.usefixtures("added")
def test_the_pages_algorithm_equals_its_formula_and_trains(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('name = "a"\nalgorithm = "topr"\n')
    spec = learner_spec(load_run(str(file)))
    assert (spec.loss.policy_loss, spec.advantages.estimator, spec.loss.needs_sequences) == ("topr", "dr_grpo", True)

    episodes, arrays = whole_episodes(seed=3)
    (total, _), grad_N = value_and_gradient(arrays, spec.loss)
    np.testing.assert_allclose(total / len(LENGTHS), papers.objective(episodes, spec.loss), rtol=1e-5)
    expected = papers.gradient(episodes, spec.loss)
    np.testing.assert_allclose(grad_N[arrays["mask_N"]] / len(LENGTHS), expected, rtol=2e-4, atol=1e-6)

    trainer = build(loss=spec.loss, buckets=(128,))
    trainer.compile()
    metrics = trainer.run(trainer.prepare(packed_rows(closings())))
    assert (metrics.updated, metrics.kept_fraction) == (True, 1.0)


def test_the_pages_tables_name_every_line_there_is():
    from trajectories.advantages import ESTIMATORS

    page = PAGE.read_text()
    for table in (algorithms.ALGORITHMS, ESTIMATORS, losses.POLICY_LOSSES, losses.CORRECTIONS):
        for name in table:
            assert f"\n| `{name}` |" in page, name
    for name in losses.KL_ESTIMATORS:
        assert f"`{name}` = " in page, name
    for mode in losses.Aggregation:
        assert f"\n| `{mode}` |" in page, mode
