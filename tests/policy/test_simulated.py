import asyncio

import numpy as np
import pytest

from policy.client import FinishReason, PolicyError, SamplingParams
from policy.simulated import SimulatedPolicy
from trajectories.schema import Version, VersionSpan

PARAMS = SamplingParams(max_tokens=12, stop_token_ids=(3, 5), seed=7)


def test_turns_end_with_a_stop_token_and_repeat_with_their_seed() -> None:
    policy = SimulatedPolicy(10, (3, 5))
    first, again = (asyncio.run(policy.sample("a", [1, 2], PARAMS)) for _ in range(2))
    assert first.finish_reason is FinishReason.STOP
    assert first.token_ids_N[-1] in (3, 5)
    assert not set(first.token_ids_N[:-1].tolist()) & {3, 5}
    assert 6 <= len(first.token_ids_N) <= 12
    assert np.allclose(first.logprobs_N, -np.log(10))
    assert first.token_ids_N.tolist() == again.token_ids_N.tolist()
    assert asyncio.run(policy.sample("a", [1, 2, 9], PARAMS)).token_ids_N.tolist() != first.token_ids_N.tolist()


def test_versions_are_stamped_and_pins_wait() -> None:
    policy = SimulatedPolicy(10, (3,), clock=lambda: 5.0)
    wanted = Version(1, 2)

    async def pinned() -> object:
        waiting = asyncio.create_task(policy.sample("a", [1], PARAMS, version=wanted))
        await asyncio.sleep(0.06)
        assert not waiting.done()
        policy.swap(None, wanted)
        return (await waiting).version_spans

    assert asyncio.run(pinned()) == (VersionSpan(0, wanted),)
    assert policy.first_token_at == {wanted: 5.0}


def test_a_pin_to_a_version_that_is_gone_fails_at_once() -> None:
    policy = SimulatedPolicy(10, (3,), version=Version(1, 1))
    policy.swap(None, Version(1, 2))
    with pytest.raises(PolicyError, match=r"replaced by 1\.2"):
        asyncio.run(policy.sample("a", [1], PARAMS, version=Version(1, 1)))


def test_a_kept_version_answers_beside_the_one_in_force_until_it_is_dropped() -> None:
    kept = Version(1, 1)
    policy = SimulatedPolicy(10, (3,), version=kept)
    policy.keep(None, kept)
    policy.swap(None, Version(1, 2))
    for pinned, version in ((kept, kept), (None, Version(1, 2))):
        completion = asyncio.run(policy.sample("a", [1], PARAMS, version=pinned))
        assert completion.version_spans == (VersionSpan(0, version),)
    policy.drop(kept)
    with pytest.raises(PolicyError, match=r"replaced by 1\.2"):
        asyncio.run(policy.sample("a", [1], PARAMS, version=kept))


def test_a_full_context_and_a_closed_policy_say_so() -> None:
    policy = SimulatedPolicy(10, (3,), max_context=4)
    completion = asyncio.run(policy.sample("a", [1, 2], PARAMS))
    assert (completion.finish_reason, len(completion.token_ids_N)) == (FinishReason.CONTEXT, 2)
    policy.close()
    with pytest.raises(PolicyError, match="closed"):
        asyncio.run(policy.sample("a", [1], PARAMS))
    with pytest.raises(ValueError, match="stops no turn"):
        SimulatedPolicy(2, (0, 1))
