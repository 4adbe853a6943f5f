"""Ledger, credits and buffer together, in simulated time: what each staleness policy does to slow prompts."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from learner.buffer import Buffer
from learner.feeder import credits
from learner.ledger import Ledger
from learner.settings import LearnerSettings, StalenessPolicy
from tests.learner.test_buffer import closing, packed
from trajectories.schema import Closing, Pack

STEP_S, FAST_S, SLOW_S = 1.0, 2.0, 8.0


def slow(group: int) -> bool:
    return group % 10 == 3


@dataclass
class Outcome:
    busy: float
    ages: list[int] = field(default_factory=list)
    trained_slow: int = 0
    trained: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    discarded: int = 0


def simulate(settings: LearnerSettings, seconds: float = 300.0) -> Outcome:
    """An endless supply of slots, adapters that arrive at once, steps of one second."""
    ledger, buffer = Ledger(settings.max_attempts), Buffer(settings)
    ending: list[tuple[float, int, int, int]] = []  # (ends at, group, attempt, version)
    shared: dict[int, tuple[Closing, Pack]] = {}
    now, step, busy, outcome = 0.0, 0, 0.0, Outcome(0.0)

    def start(group: int, attempt: int) -> None:
        heapq.heappush(ending, (now + (SLOW_S if slow(group) else FAST_S), group, attempt, step))

    while now < seconds:
        for _ in range(credits(settings, step, step, ledger.outstanding)):
            start(ledger.issue(step), 0)
        in_flight = [group.issued_step for _, group in ledger.groups() if group.in_flight]
        choice = buffer.take(in_flight, step)
        for held in choice.discarded:
            outcome.discarded += 1
            again = ledger.discard(held.closing.group_id, held.closing.attempt, step)
            if again is not None:
                start(held.closing.group_id, again)
        if choice.chosen:
            ledger.train((held.closing.group_id, held.closing.closing_id) for held in choice.chosen)
            outcome.ages += [held.age(step) for held in choice.chosen]
            outcome.trained += len(choice.chosen)
            outcome.trained_slow += sum(slow(held.closing.group_id) for held in choice.chosen)
            now, step, busy = now + STEP_S, step + 1, busy + STEP_S
        elif not choice.discarded:
            now = ending[0][0]
        while ending and ending[0][0] <= now:
            _, group, attempt, version = heapq.heappop(ending)
            if version not in shared:
                shared[version] = (closing(0, version), packed(closing(0, version)))
            made = Closing("r", group, attempt, f"{group}.{attempt}", 2, shared[version][0].episodes)
            ledger.bind(group, attempt, made.closing_id, step)
            buffer.add(made, shared[version][1], step)
        ledger.counts()
    outcome.busy, outcome.counts = busy / now, ledger.counts()
    return outcome


def settings(bound: int, policy: StalenessPolicy) -> LearnerSettings:
    return LearnerSettings(groups_per_step=4, max_staleness=bound, staleness=policy, max_attempts=3)


def test_pacing_trains_slow_prompts_as_often_as_others_and_discards_nothing() -> None:
    found = simulate(settings(3, StalenessPolicy.PACE))
    assert max(found.ages) <= 3
    assert found.discarded == 0
    assert found.counts["expired"] == 0
    assert abs(found.trained_slow / found.trained - 0.1) < 0.02


def test_dropping_keeps_the_device_busier_and_starves_slow_prompts() -> None:
    pace, drop = (simulate(settings(3, policy)) for policy in (StalenessPolicy.PACE, StalenessPolicy.DROP))
    assert max(drop.ages) <= 3
    assert drop.busy > pace.busy
    assert drop.discarded > 0
    assert drop.trained_slow / drop.trained < 0.05


def test_a_bound_of_slow_time_over_step_time_needs_neither() -> None:
    """Little's law."""
    for policy in StalenessPolicy:
        found = simulate(settings(9, policy))
        assert found.busy > 0.95
        assert found.discarded == 0
        assert abs(found.trained_slow / found.trained - 0.1) < 0.02
