"""Advantages: each closing is given its members' advantages; one that teaches nothing is filtered, with a verdict.

Invariant: what leaves here has one finite number per episode.
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
from trajectories.advantages import AdvantageSettings, advantages, filtered
from trajectories.schema import Closing, DeadLetter, Outcome, Verdict
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
        rewards_N = [episode.reward for episode in closing.episodes]
        try:
            advantages_N = advantages(
                rewards_N, self.settings, [episode.sampled_tokens for episode in closing.episodes]
            )
        except ValueError as error:
            yield TaggedOutput(VERDICTS, verdict(closing, Outcome.FAILED, str(error)))
            yield TaggedOutput(DEAD, dead_letter(closing.run_id, "Advantages", type(error).__name__, str(error)))
            return
        if filtered(rewards_N, self.settings):
            metrics.count("groups/filtered")
            yield TaggedOutput(VERDICTS, verdict(closing, Outcome.FILTERED, f"every reward is {rewards_N[0]:g}"))
            return
        yield dataclasses.replace(closing, advantages=advantages_N)
