"""The learner says when its rows are too far from its policy, what that means, and does not say it every step."""

from typing import Any

import pytest

from learner.alarms import Alarm, AlarmSettings


def record(step: int = 1, **changes: Any) -> dict[str, Any]:
    sound = {
        "step": step,
        "loss_tokens": 100,
        "invalid_tokens": 0,
        "staleness_mean": 0.0,
        "effective_sample_size": 0.99,
        "kept_fraction": 0.97,
        "mean_abs_log_ratio": 0.01,
        "behaviour_kl": 0.001,
    }
    return sound | changes


def test_a_sound_step_raises_no_alarm_and_neither_does_an_empty_one() -> None:
    alarm = Alarm(AlarmSettings())
    assert alarm.check(record(), 0.0) == []
    assert alarm.check(record(loss_tokens=0, effective_sample_size=0.0, kept_fraction=0.0), 0.0) == []


@pytest.mark.parametrize(
    ("name", "value", "side"),
    [
        ("effective_sample_size", 0.2, "below"),
        ("kept_fraction", 0.1, "below"),
        ("mean_abs_log_ratio", 0.9, "above"),
        ("behaviour_kl", 0.5, "above"),
    ],
)
def test_each_alarm_names_its_threshold(name: str, value: float, side: str) -> None:
    (text,) = Alarm(AlarmSettings()).check(record(**{name: value}), 0.0)
    assert f"{name} is {value:.3g}, {side} alarms.{name}" in text
    assert Alarm(AlarmSettings(**{name: 0.0 if side == "below" else 1e9})).check(record(**{name: value}), 0.0) == []


def test_the_mend_depends_on_what_is_wrong() -> None:
    def told(**changes: Any) -> str:
        (text,) = Alarm(AlarmSettings()).check(record(kept_fraction=0.1, **changes), 0.0)
        return text

    assert "lower learner.max_staleness" in told(staleness_mean=2.5)
    assert "compare model.dtype" in told()
    assert "same [model] and [sampling]" in told(invalid_tokens=90)


def test_a_cause_is_named_once_a_while_with_the_steps_that_it_held() -> None:
    alarm = Alarm(AlarmSettings(every_s=60.0))
    low = {"effective_sample_size": 0.1}
    assert len(alarm.check(record(1, **low), 0.0)) == 1
    assert all(alarm.check(record(step, **low), float(step)) == [] for step in range(2, 12))
    assert len(alarm.check(record(12, behaviour_kl=1.0), 12.0)) == 1  # another cause does not wait for the first
    (text,) = alarm.check(record(61, **low), 61.0)
    assert "in 11 step(s)" in text


@pytest.mark.parametrize(
    "change", [{"effective_sample_size": 1.5}, {"kept_fraction": -0.1}, {"behaviour_kl": 0.0}, {"every_s": -1.0}]
)
def test_impossible_thresholds_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        AlarmSettings(**change)
