"""Hypothesis strategies for the contract's types."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from trajectories.schema import (
    Closing,
    DeadLetter,
    Episode,
    Heartbeat,
    Kind,
    LeftOut,
    Outcome,
    Status,
    Task,
    Timings,
    Turn,
    Verdict,
    Version,
    VersionSpan,
)

names = st.text(max_size=12)
reals = st.floats(allow_nan=False, width=32)
counts = st.integers(0, 2**40)
ids = st.integers(0, 2**31 - 1)
versions = st.builds(Version, st.integers(0, 10**6), st.integers(0, 1000))
maybe_version = st.none() | versions
parts = st.dictionaries(names, reals, max_size=3)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | reals | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)

tasks = st.builds(
    Task,
    run_id=names,
    group_id=counts,
    attempt=st.integers(0, 9),
    kind=st.sampled_from(Kind),
    group_size=st.integers(1, 64),
    payload=st.dictionaries(names, json_values, max_size=4),
    version=maybe_version,
    temperature=st.none() | st.floats(0, 2),
)
verdicts = st.builds(
    Verdict,
    run_id=names,
    group_id=counts,
    attempt=st.integers(0, 9),
    outcome=st.sampled_from(Outcome),
    reason=names,
    closing_id=names,
    members=st.integers(0, 64),
    failed_members=st.integers(0, 64),
    reward_mean=reals,
    success_mean=reals,
    sampled_tokens=counts,
    duration_s=reals,
    oldest_version=maybe_version,
    truncated_members=st.lists(st.integers(0, 63), max_size=3).map(tuple),
)
heartbeats = st.builds(
    Heartbeat,
    run_id=names,
    worker_id=names,
    sent_at=reals,
    interval_s=reals,
    version=maybe_version,
    first_token_at=parts,
    slots=counts,
    running=counts,
    waiting=counts,
    holding=st.lists(names, max_size=4).map(tuple),
    started=counts,
    finished=counts,
    metrics=parts,
)
dead_letters = st.builds(
    DeadLetter, run_id=names, stage=names, reason=names, detail=names, payload=st.binary(max_size=64)
)


@st.composite
def episodes(
    draw: st.DrawFn,
    *,
    sample: int | None = None,
    prompt: np.ndarray | None = None,
    max_rest: int = 24,
    run_id: str = "run",
    group_id: int = 7,
) -> Episode:
    if prompt is None:
        prompt = np.asarray(draw(st.lists(ids, min_size=1, max_size=12)), np.int32)
    rest = draw(st.lists(ids, max_size=max_rest))
    mask = draw(st.lists(st.booleans(), min_size=len(rest), max_size=len(rest)))
    logprobs = draw(st.lists(st.floats(-50, 0, width=32), min_size=len(rest), max_size=len(rest)))
    size = len(prompt) + len(rest)
    # Of some episodes, all tokens of one, a part of them, or none were drawn from less than the whole vocabulary.
    most = draw(st.sampled_from([0, 0, 1, 3]))
    kept = [draw(st.lists(ids, max_size=most)) if sampled and most else [] for sampled in mask]
    return Episode(
        run_id=run_id,
        group_id=group_id,
        attempt=draw(st.integers(0, 3)),
        sample=draw(st.integers(0, 63)) if sample is None else sample,
        group_size=draw(st.integers(1, 64)),
        tokens_T=np.concatenate([prompt, np.asarray(rest, np.int32)]),
        loss_mask_T=np.concatenate([np.zeros(len(prompt), bool), np.asarray(mask, bool)]),
        logprobs_T=np.concatenate([np.zeros(len(prompt)), np.asarray(logprobs)]),
        prompt_length=len(prompt),
        version_spans=tuple(
            draw(st.lists(st.builds(VersionSpan, st.integers(0, size), versions), min_size=1, max_size=3))
        ),
        turns=tuple(draw(st.lists(st.builds(Turn, counts, counts, reals), max_size=3))),
        reward=draw(reals),
        reward_parts=draw(parts),
        success=draw(st.booleans()),
        status=draw(st.sampled_from([status for status in Status if not status.failed])),
        kind=draw(st.sampled_from(Kind)),
        temperature=draw(st.floats(0, 2)),
        error=draw(names),
        timings=draw(st.builds(Timings, reals, reals, reals, reals, reals)),
        metrics=draw(parts),
        kept_counts_T=np.asarray([0] * len(prompt) + [len(found) for found in kept], np.int32),
        kept_ids_K=np.asarray([token for found in kept for token in found], np.int32),
    )


left_out = st.builds(
    LeftOut,
    sample=st.integers(0, 63),
    reward=reals,
    success=st.booleans(),
    status=st.sampled_from([status for status in Status if status.truncated]),
    sampled_tokens=counts,
    timings=st.builds(Timings, reals, reals, reals, reals, reals),
)


@st.composite
def closings(draw: st.DrawFn, *, number: int = 0, max_members: int = 6) -> Closing:
    prompts = [
        np.asarray(prompt, np.int32)
        for prompt in draw(st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=12), min_size=1, max_size=2))
    ]
    members = draw(st.integers(1, max_members))
    found = tuple(
        draw(episodes(sample=index, prompt=draw(st.sampled_from(prompts)), group_id=number)) for index in range(members)
    )
    return Closing(
        run_id="run",
        group_id=number,
        attempt=draw(st.integers(0, 3)),
        closing_id=f"closing-{number}",
        group_size=members,
        episodes=found,
        failed_members=draw(st.integers(0, 3)),
        missing_members=draw(st.integers(0, 3)),
        advantages=tuple(draw(st.lists(st.floats(-5, 5, width=32), min_size=members, max_size=members))),
        left_out=tuple(draw(st.lists(left_out, max_size=2))),
    )


@st.composite
def closing_sets(draw: st.DrawFn) -> list[Closing]:
    return [draw(closings(number=number)) for number in range(draw(st.integers(1, 5)))]
