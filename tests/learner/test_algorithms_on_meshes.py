"""Loss and gradient of every algorithm on eight devices are those of one.

One compilation a mesh holds all algorithms: their losses share one forward pass, and the backward pass runs once for
each of them. That a whole step of the trainer does not depend on the mesh is in `test_sharding.py`.
"""

from pathlib import Path

from tests.learner.elsewhere import run_elsewhere

TESTS = Path(__file__).parent
ROWS_AND_TRAINER = """
import sys
sys.path[:0] = [{repository!r}, {tests!r}]
import dataclasses
import jax, jax.numpy as jnp, numpy as np, optax
from learner.algorithms import ALGORITHMS
from learner.critic import CriticSettings
from learner.losses import LossSettings, policy_loss
from learner.sharding import ShardingSettings
from learner.step import OptimizerSettings, Trainer
from test_losses import variants
from test_step import CONFIG, LORA, closings, packed_rows, plain_logprobs, random_adapter, random_params

LOSSES = list(dict.fromkeys([*(algorithm.settings()[1] for algorithm in ALGORITHMS.values()), *variants()]))


def make(mesh):
    # Of one loss that looks at whole episodes, so that its batches say which token is of which.
    return Trainer(CONFIG, random_params(), LORA, OptimizerSettings(), ALGORITHMS["gspo"].settings()[1], buckets=(64,),
                   rows_per_call=8, temperature=1.0, seed=0, sharding=mesh)


ADAPTER = random_adapter(make(None).adapter)


def rows():
    # Sampled by a policy near the one that learns: some ratios leave each band, some do not.
    groups = closings()
    near = iter(np.asarray(jax.jit(lambda adapter: plain_logprobs(adapter, groups))(ADAPTER)))
    noise = np.random.default_rng(0)

    def sampled(episode):
        logprobs_T = np.concatenate([[0], next(near)[: len(episode) - 1]]) + 0.2 * noise.normal(size=len(episode))
        return dataclasses.replace(episode, logprobs_T=np.where(episode.loss_mask_T, logprobs_T, 0))

    groups = [dataclasses.replace(c, episodes=tuple(map(sampled, c.episodes))) for c in groups]
    return packed_rows(groups, bucket=64)[:8]


ROWS = rows()
assert len(jax.devices()) == len(ROWS) == 8
"""
LOSSES_ON_MESHES = """
def on(mesh, given=None):
    trainer = make(mesh)
    trainer.restore(trainer.state()._replace(adapter=ADAPTER))
    prepared = trainer.prepare(ROWS)
    ((_, batch),) = prepared.calls
    program = trainer._program

    @jax.jit
    def everything(adapter, params, batch, given):
        def of(logprobs, base, loss):
            return policy_loss(logprobs, batch.behaviour_N, batch.advantages_N, batch.mask_N(), loss,
                               reference_N=base if loss.kl_coefficient else None, sequences_N=batch.sequences_N)

        logprobs, pull = jax.vjp(lambda adapter: program._logprobs(params, adapter, batch), adapter)
        base = program._logprobs(params, None, batch)
        known = (logprobs, base) if given is None else given
        found = [jax.value_and_grad(of, has_aux=True)(*known, loss) for loss in LOSSES]
        gradients = jax.lax.map(lambda slope: pull(slope)[0], jnp.stack([slope for _, slope in found]))
        return (logprobs, base), gradients, found

    # The loss tokens of all rows are in their order, whatever shares of the rows a mesh has.
    mask = np.asarray(batch.mask_N())
    placed = None
    if given is not None:
        placed = np.zeros((2, *mask.shape), np.float32)
        placed[:, mask] = given
        placed = jax.device_put(tuple(placed), batch.behaviour_N.sharding)
    logprobs, gradients, found = everything(trainer.adapter, trainer._params, batch, placed)
    scale = 1 / np.array([loss.denominator(prepared.loss_tokens, prepared.sequences) for loss in LOSSES])
    gradients = np.concatenate([np.asarray(x).reshape(len(LOSSES), -1) for x in jax.tree.leaves(gradients)], 1)
    values = np.array([value for (value, _), _ in found]) * scale
    slopes = np.array([np.asarray(slope)[mask] for _, slope in found]) * scale[:, None]
    sums = np.array([sums for (_, sums), _ in found])
    return np.array(logprobs)[:, mask], gradients * scale[:, None], values, slopes, sums


def size(x):
    return np.linalg.norm(x, axis=1)


logprobs, gradient, value, slope, sums = on(None)
assert (size(gradient) > 1e-3).all()
for mesh in (dict(data=2, fsdp=2, tensor=2), dict(fsdp=2, tensor=4)):
    found, other_gradient, other_value, other_slope, other_sums = on(ShardingSettings(**mesh), logprobs)
    # Of the same log-probs: what an algorithm makes of them.
    np.testing.assert_allclose(other_value, value, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(other_slope, slope, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(other_sums, sums, rtol=1e-5, atol=1e-5)
    # By the model in float32, whose sums have another order on each mesh.
    np.testing.assert_allclose(found, logprobs, rtol=0, atol=1e-5)
    assert (size(other_gradient - gradient) <= 1e-5 * size(gradient)).all()
    print(mesh, (size(other_gradient - gradient) / size(gradient)).max(), np.abs(found - logprobs).max())

print("equal")
"""
CRITIC_ON_MESHES = """
def judged(mesh):
    advantages, loss = ALGORITHMS["ppo"].settings()
    trainer = Trainer(CONFIG, random_params(), LORA, OptimizerSettings(), loss, buckets=(64,), rows_per_call=8,
                      temperature=1.0, seed=0, sharding=mesh, advantages=advantages,
                      critic=CriticSettings(rank=2, alpha=3.0))
    trainer.compile()
    critic = trainer.state().critic
    weights = dict(critic.weights, adapter=random_adapter(critic.weights["adapter"]),
                   head=np.linspace(-0.4, 0.5, CONFIG.embed_dim, dtype=np.float32))
    trainer.restore(trainer.state()._replace(adapter=ADAPTER, critic=critic._replace(weights=weights)))
    gradient, _ = trainer.gradient(trainer.prepare(ROWS))
    metrics = trainer.run(trainer.prepare(ROWS))
    slope = optax.tree.get(trainer.state().critic.optimizer, "mu")  # Adam's first moment: in proportion to the gradient
    return jax.tree.leaves(gradient), jax.tree.leaves(jax.tree.map(np.asarray, slope)), metrics


one, many = judged(None), judged(ShardingSettings(data=2, fsdp=2, tensor=2))
for a, b in zip([*many[0], *many[1]], [*one[0], *one[1]], strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
np.testing.assert_allclose(many[2].value_loss, one[2].value_loss, rtol=1e-5)
np.testing.assert_allclose(many[2].explained_variance, one[2].explained_variance, rtol=1e-4)
print("equal")
"""


def run(code: str) -> None:
    code = (ROWS_AND_TRAINER + code).format(repository=str(TESTS.parents[1]), tests=str(TESTS))
    assert "equal" in run_elsewhere("-c", code, timeout_s=280, devices=8)


def test_every_algorithm_on_every_mesh() -> None:
    run(LOSSES_ON_MESHES)


def test_the_critic_on_a_mesh() -> None:
    """Its own forward passes, the advantages that it whitens over all devices, and its update."""
    run(CRITIC_ON_MESHES)
