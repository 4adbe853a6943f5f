"""Actor and reference are one set of base weights, measured: in live buffers, and by XLA for the compiled step."""

import dataclasses
import gc

import jax
import numpy as np

from learner.critic import CriticSettings
from learner.losses import KlPlace, LossSettings
from learner.step import OptimizerSettings, Trainer
from policy.lora import LoraSettings
from tests.learner.test_step import CONFIG, closings, packed_rows, random_params
from trajectories.advantages import AdvantageSettings

LARGE = dataclasses.replace(CONFIG, vocab_size=2048, embed_dim=256, num_heads=8, head_dim=32, mlp_dim=1024)
BASE_BYTES = 4 * sum(
    [
        *(int(np.prod(shape)) for shape in LARGE.model_shapes().values()),
        *(LARGE.num_layers * int(np.prod(shape)) for shape in LARGE.layer_shapes().values()),
    ]
)


def trainer(loss: LossSettings, estimator: str = "grpo") -> Trainer:
    return Trainer(
        LARGE,
        random_params(config=LARGE),
        LoraSettings(rank=1),
        OptimizerSettings(),
        loss,
        buckets=(64,),
        rows_per_call=1,
        temperature=1.0,
        seed=0,
        advantages=AdvantageSettings(estimator),
        critic=CriticSettings(rank=1),
    )


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_the_reference_is_the_base_that_the_actor_stands_on() -> None:
    before = live_bytes()
    with_reference = trainer(LossSettings(kl_coefficient=0.1, kl_in=KlPlace.LOSS))
    with_reference.compile()
    rows = packed_rows(
        [dataclasses.replace(closings()[0], episodes=closings()[0].episodes[:2], advantages=(1.0, -1.0))], 64
    )
    metrics = with_reference.run(with_reference.prepare(rows))
    assert metrics is not None
    assert metrics.updated
    held = live_bytes() - before
    assert BASE_BYTES > 10e6
    assert BASE_BYTES <= held < 1.1 * BASE_BYTES

    without = trainer(LossSettings())
    without.compile()
    one, none = (t._compiled[64].memory_analysis() for t in (with_reference, without))  # type: ignore[attr-defined]
    assert one.argument_size_in_bytes == none.argument_size_in_bytes < 1.1 * BASE_BYTES
    # What the reference costs is its activations.
    assert one.temp_size_in_bytes - none.temp_size_in_bytes < 0.1 * BASE_BYTES
    assert one.output_size_in_bytes < 0.1 * BASE_BYTES


def test_the_critic_stands_on_the_same_base() -> None:
    before = live_bytes()
    actor = trainer(LossSettings(policy_loss="ppo", correction="none"), "gae")
    assert actor.state().critic is not None
    assert live_bytes() - before < 1.1 * BASE_BYTES
