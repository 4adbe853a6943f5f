"""Advantages: each closing is given its members' advantages; one that teaches nothing is filtered, with a verdict.

Invariants: what leaves here has one finite number per episode; members that `advantages.truncated` keeps from training
are not among them, and still count in the closing's statistics.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import TaggedOutput
from apache_beam.typehints import with_input_types, with_output_types

import transforms.coders  # noqa: F401 (registers the coders)
from trajectories.advantages import AdvantageSettings, Truncated, advantages, filtered
from trajectories.schema import Closing, DeadLetter, LeftOut, Outcome, Verdict
from transforms import metrics
from transforms.dead_letters import DEAD, VERDICTS, dead_letter
from transforms.groups import verdict


class Advantages(beam.PTransform):
    """Closing → Closing with advantages, and verdicts, and dead letters."""

    def __init__(self, settings: AdvantageSettings) -> None:
        super().__init__()
        self.settings = settings

    def expand(self, closings: Any) -> Any:
        return closings | "Estimate" >> beam.ParDo(_Estimate(self.settings)).with_outputs(
            VERDICTS, DEAD, main="closings"
        )


@with_input_types(Closing)
@with_output_types(Closing, verdicts=Verdict, dead_letters=DeadLetter)
class _Estimate(beam.DoFn):
    def __init__(self, settings: AdvantageSettings) -> None:
        self.settings = settings

    def process(self, closing: Closing) -> Iterator[Any]:
        try:
            result = estimate(closing, self.settings)
        except ValueError as error:
            yield TaggedOutput(VERDICTS, verdict(closing, Outcome.FAILED, str(error)))
            yield TaggedOutput(DEAD, dead_letter(closing.run_id, "Advantages", type(error).__name__, str(error)))
            return
        if isinstance(result, Verdict):
            metrics.count("groups/filtered")
            yield TaggedOutput(VERDICTS, result)
            return
        yield result


def estimate(closing: Closing, settings: AdvantageSettings) -> Closing | Verdict:
    """The closing with advantages, or its verdict if it teaches nothing. Raises ValueError for rewards that the
    estimator cannot take."""
    cut = [episode for episode in closing.episodes if episode.status.truncated]
    voting = [
        episode
        for episode in closing.episodes
        if settings.truncated is not Truncated.DROP or not episode.status.truncated
    ]
    if len(voting) < 2 and cut:
        reason = f"{len(cut)} of {len(closing.episodes)} members are truncated, and those are dropped"
        return verdict(closing, Outcome.FILTERED, reason)
    rewards_N = [episode.reward for episode in voting]
    advantages_N = advantages(rewards_N, settings, [episode.sampled_tokens for episode in voting])
    if filtered(rewards_N, settings):
        return verdict(closing, Outcome.FILTERED, f"every reward is {rewards_N[0]:g}")
    if settings.truncated is Truncated.TRAIN or not cut:
        return dataclasses.replace(closing, advantages=advantages_N)
    of_sample = {episode.sample: value for episode, value in zip(voting, advantages_N, strict=True)}
    trained = tuple(episode for episode in closing.episodes if not episode.status.truncated)
    if not trained:
        return verdict(closing, Outcome.FILTERED, "every member is truncated, and those do not train")
    return dataclasses.replace(
        closing,
        episodes=trained,
        advantages=tuple(of_sample[episode.sample] for episode in trained),
        left_out=tuple(LeftOut(e.sample, e.reward, e.success, e.status, e.sampled_tokens, e.timings) for e in cut),
    )
