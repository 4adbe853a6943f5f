"""What each failure policy makes of a group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajectories.failures import (
    Decision,
    FailFast,
    FailureKind,
    FailurePolicy,
    FailureSettings,
    MinViableGroup,
    RetryOnFailure,
    Standing,
)


@pytest.mark.parametrize(
    ("policy", "group", "decision"),
    [
        (FailFast(), Standing(4, usable=3), Decision.WAIT),
        (FailFast(), Standing(4, usable=4), Decision.CLOSE),
        (FailFast(), Standing(4, usable=1, failed=1, retries=0), Decision.FAIL),
        (FailFast(), Standing(4, usable=3, over=True), Decision.FAIL),
        (RetryOnFailure(2), Standing(4, failed=1, retries=1), Decision.RETRY),
        (RetryOnFailure(2), Standing(4, failed=1, retries=2), Decision.FAIL),
        (RetryOnFailure(2), Standing(4, failed=1, retries=None), Decision.FAIL),
        (RetryOnFailure(2), Standing(4, usable=4), Decision.CLOSE),
        (MinViableGroup(2), Standing(4, usable=2, failed=1, retries=0), Decision.WAIT),
        (MinViableGroup(2), Standing(4, usable=2, failed=2), Decision.CLOSE),
        (MinViableGroup(2), Standing(4, usable=2, over=True), Decision.CLOSE),
        (MinViableGroup(3), Standing(4, usable=2, failed=2), Decision.FAIL),
    ],
)
def test_decisions(policy: FailurePolicy, group: Standing, decision: Decision) -> None:
    assert policy.decide(group) is decision


@given(
    policy=st.one_of(
        st.just(FailFast()), st.builds(RetryOnFailure, st.integers(1, 3)), st.builds(MinViableGroup, st.integers(2, 5))
    ),
    size=st.integers(2, 6),
    data=st.data(),
)
def test_a_group_that_nobody_else_comes_to_is_closed_or_failed(
    policy: FailurePolicy, size: int, data: st.DataObject
) -> None:
    usable = data.draw(st.integers(0, size))
    failed = data.draw(st.integers(0, size - usable))
    over = data.draw(st.booleans()) or usable + failed < size
    assert policy.decide(Standing(size, usable, failed, over=over)) in (Decision.CLOSE, Decision.FAIL)


def test_settings_make_the_policy_and_refuse_what_makes_no_sense() -> None:
    assert FailureSettings().make() == MinViableGroup(2)
    assert FailureSettings(FailureKind.RETRY, retries=5).make() == RetryOnFailure(5)
    assert FailureSettings(FailureKind.FAIL_FAST).make().ends_run
    with pytest.raises(ValueError, match=r"failures\.min_members must be at least 2"):
        FailureSettings(min_members=1)
    with pytest.raises(ValueError, match=r"failures\.retries must be at least 1"):
        FailureSettings(retries=0)
