import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajectories.advantages import ESTIMATORS, AdvantageSettings, advantages, zero_variance

rewards = st.lists(st.floats(-100, 100), min_size=2, max_size=32)


@given(rewards)
def test_estimators_equal_their_formulas(values: list[float]) -> None:
    mean = sum(values) / len(values)
    std = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
    expected = {
        "grpo": [(value - mean) / (std + 1e-4) for value in values],
        "dr_grpo": [value - mean for value in values],
        "rloo": [value - (sum(values) - value) / (len(values) - 1) for value in values],
    }
    assert expected.keys() == ESTIMATORS.keys()
    for name, wanted in expected.items():
        found = advantages(values, AdvantageSettings(name))
        assert np.allclose(found, wanted, rtol=1e-6, atol=1e-6 * max(1.0, *map(abs, values)))


@given(st.floats(-100, 100), st.integers(2, 32))
def test_equal_rewards_are_zero_variance(value: float, members: int) -> None:
    assert zero_variance([value] * members)
    assert not zero_variance([value] * members + [value + 1])


def test_what_has_no_baseline_is_refused() -> None:
    with pytest.raises(ValueError, match="two members"):
        advantages([1.0], AdvantageSettings())
    with pytest.raises(ValueError, match="finite"):
        advantages([1.0, float("nan")], AdvantageSettings())
    with pytest.raises(ValueError, match="must be one of"):
        AdvantageSettings("grpq")
