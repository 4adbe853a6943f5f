"""Which tasks a job takes."""

from __future__ import annotations

import math

import pytest

from trajectories.schema import Task
from transforms.tasks import BadTask, check


@pytest.mark.parametrize("temperature", [math.nan, math.inf, -1.0, 2e-38])
def test_a_task_cannot_bring_an_impossible_temperature_to_the_shared_policy(temperature: float) -> None:
    with pytest.raises(BadTask, match="temperature"):
        check(Task("r", 1, temperature=temperature), "r")


@pytest.mark.parametrize("temperature", [None, 0.0, 1.0])
def test_greedy_and_the_run_s_own_temperature_are_taken(temperature: float | None) -> None:
    check(Task("r", 1, temperature=temperature), "r")
