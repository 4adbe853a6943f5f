"""GroupEpisodes: the members of one attempt at a group meet, and close once.

A group closes when all its members have ended, at a deadline with those it has, or with the first member that failed
where the failure policy gives it up then. It is a Closing, or a failed Verdict where the policy says so. A mark that
outlives it drops duplicates and late members, which are counted.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators
# ruff: noqa: B008 (Beam's way to ask for state and timers)

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.coders import BooleanCoder, VarIntCoder
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import BagStateSpec, ReadModifyWriteStateSpec, TimerSpec, on_timer
from apache_beam.typehints import with_input_types, with_output_types

from trajectories.failures import Decision, FailurePolicy, Standing
from trajectories.schema import Closing, End, Episode, Outcome, Verdict, end_of
from transforms import metrics
from transforms.coders import EpisodeCoder
from transforms.dead_letters import VERDICTS
from transforms.settings import RolloutSettings


def usable(member: Episode) -> bool:
    """Whether a member may train: it did not fail, and the policy sampled in it."""
    return not member.status.failed and member.sampled_tokens > 0


def close(
    members: Sequence[Episode], closing_id: str, policy: FailurePolicy, *, over: bool = False
) -> Closing | Verdict:
    """The closing of a group from the members that ended (distinct, one or more), or the verdict `policy` asks for.

    `over`: nobody else is waited for, as the deadline has passed.
    """
    first = members[0]
    alive = tuple(sorted(filter(usable, members), key=lambda member: member.sample))
    failed = len(members) - len(alive)
    missing = max(0, first.group_size - len(members))
    closing = Closing(
        run_id=first.run_id,
        group_id=first.group_id,
        attempt=first.attempt,
        closing_id=closing_id,
        group_size=first.group_size,
        episodes=alive,
        failed_members=failed,
        missing_members=missing,
    )
    standing = Standing(first.group_size, len(alive), failed, over=over)
    if policy.decide(standing) is Decision.CLOSE:
        return closing
    others = "did not end in time" if over else "were not waited for"
    reason = f"{len(alive)} of {first.group_size} members are usable, {failed} failed, {missing} {others}"
    broken = next((member for member in members if member.status.failed), None)
    if broken is not None:
        reason += f"; {broken.episode_id}: {broken.status}: {broken.error}"
    return verdict(closing, Outcome.FAILED, reason)


def verdict(closing: Closing, outcome: Outcome, reason: str) -> Verdict:
    """A closing's end without rows, with the statistics of its usable members."""
    episodes = closing.ended
    return Verdict(
        run_id=closing.run_id,
        group_id=closing.group_id,
        attempt=closing.attempt,
        outcome=outcome,
        reason=reason,
        closing_id=closing.closing_id,
        members=len(episodes),
        failed_members=closing.failed_members,
        reward_mean=float(np.mean([episode.reward for episode in episodes])) if episodes else 0.0,
        success_mean=float(np.mean([episode.success for episode in episodes])) if episodes else 0.0,
        sampled_tokens=sum(episode.sampled_tokens for episode in episodes),
        duration_s=max((episode.timings.duration_s for episode in episodes), default=0.0),
        oldest_version=closing.oldest_version,
        truncated_members=tuple(
            episode.sample for episode in episodes if end_of(episode.status, episode.success) is End.TRUNCATED
        ),
    )


class GroupEpisodes(beam.PTransform):
    """Episode → Closing, and verdicts."""

    def __init__(self, settings: RolloutSettings, policy: FailurePolicy) -> None:
        super().__init__()
        self.settings, self.policy = settings, policy

    def expand(self, episodes: Any) -> Any:
        return (
            episodes
            | "ByGroup" >> beam.Map(_by_group).with_output_types(tuple[str, Episode])
            | "Gather" >> beam.ParDo(_Gather(self.settings, self.policy)).with_outputs(VERDICTS, main="closings")
        )


def _by_group(episode: Episode) -> tuple[str, Episode]:
    return episode.key, episode


@with_input_types(tuple[str, Episode])
@with_output_types(Closing, verdicts=Verdict)
class _Gather(beam.DoFn):
    MEMBERS = BagStateSpec("members", EpisodeCoder())
    SAMPLES = BagStateSpec("samples", VarIntCoder())
    CLOSED = ReadModifyWriteStateSpec("closed", BooleanCoder())
    DEADLINE = TimerSpec("deadline", TimeDomain.REAL_TIME)
    CLEANUP = TimerSpec("cleanup", TimeDomain.REAL_TIME)

    def __init__(self, settings: RolloutSettings, policy: FailurePolicy) -> None:
        self.settings, self.policy = settings, policy

    def process(
        self,
        keyed: tuple[str, Episode],
        members: Any = beam.DoFn.StateParam(MEMBERS),
        samples: Any = beam.DoFn.StateParam(SAMPLES),
        closed: Any = beam.DoFn.StateParam(CLOSED),
        deadline: Any = beam.DoFn.TimerParam(DEADLINE),
        cleanup: Any = beam.DoFn.TimerParam(CLEANUP),
    ) -> Iterator[Any]:
        _, episode = keyed
        if closed.read():
            metrics.count("groups/late_members")
            return
        ended = set(samples.read())
        if episode.sample in ended:
            metrics.count("groups/duplicate_members")
            return
        members.add(episode)
        samples.add(episode.sample)
        if not ended:
            deadline.set(time.time() + self.settings.group_deadline_s)
        given_up = not usable(episode) and self.policy.decide(Standing(episode.group_size, failed=1)) is Decision.FAIL
        if given_up or len(ended) + 1 >= episode.group_size:
            deadline.clear()
            yield self._close(members, samples, closed, cleanup)

    @on_timer(DEADLINE)
    def on_deadline(
        self,
        members: Any = beam.DoFn.StateParam(MEMBERS),
        samples: Any = beam.DoFn.StateParam(SAMPLES),
        closed: Any = beam.DoFn.StateParam(CLOSED),
        cleanup: Any = beam.DoFn.TimerParam(CLEANUP),
    ) -> Iterator[Any]:
        if not closed.read() and any(True for _ in samples.read()):
            metrics.count("groups/at_deadline")
            yield self._close(members, samples, closed, cleanup, over=True)

    @on_timer(CLEANUP)
    def on_cleanup(self, closed: Any = beam.DoFn.StateParam(CLOSED)) -> None:
        closed.clear()

    def _close(self, members: Any, samples: Any, closed: Any, cleanup: Any, *, over: bool = False) -> Any:
        result = close(tuple(members.read()), uuid.uuid4().hex, self.policy, over=over)
        members.clear()
        samples.clear()
        closed.write(True)
        cleanup.set(time.time() + self.settings.closed_mark_s)
        if isinstance(result, Verdict):
            metrics.count("groups/failed")
            return TaggedOutput(VERDICTS, result)
        metrics.count("groups/closed")
        return result
