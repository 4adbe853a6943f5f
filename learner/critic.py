"""The critic of PPO: a value for every loss token, from an adapter and a head of its own on the actor's frozen base.

    V(n) = head . hidden(predecessor of n)                  the value before token n is drawn
    A, G = generalised advantage estimation of the episode  (see `trajectories.advantages.gae`)
    loss = 1/2 max((V - G)^2, (V_old + clip(V - V_old, -c, c) - G)^2), the mean over the step's loss tokens

Invariants: advantages and targets of a step come from the critic that the step starts from; advantages are whitened
over all loss tokens of the step; nothing depends on how closings were split into rows. Schulman et al. 2017 (PPO,
arXiv:1707.06347) and 2016 (GAE, arXiv:1506.02438).

Axes: as in `learner.step`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from learner.attention import RowLayout
from learner.losses import discounted
from learner.parallel import MeshModel
from learner.sharding import Sharding, abstract
from policy.lora import LoraSettings, init_adapter
from policy.settings import Remat
from policy.transformer import ModelConfig, Params
from trajectories.advantages import WHITEN_EPSILON

if TYPE_CHECKING:
    from learner.step import Batch, OptimizerSettings

Calls = Sequence[tuple[int, "Batch"]]


@dataclass(frozen=True)
class CriticSettings:
    """The `[critic]` section of the run file. It counts with the estimator `gae` alone."""

    rank: int = 16
    """Of the critic's adapter, which has the targets of [lora]."""
    alpha: float = 32.0
    """Its update is scaled by alpha / rank."""
    learning_rate: float = 1e-3
    """Of adapter and head; the rest is that of [optimizer]."""
    gamma: float = 1.0
    """Discount from one sampled token to the next."""
    lam: float = 0.95
    """GAE's lambda: 1 is the return less the value, 0 the temporal difference."""
    value_clip: float = 0.2
    """How far a value may profit from moving in one step, c above; 0 is no bound."""

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0 < self.alpha < math.inf:
            raise ValueError(f"rank and alpha must be above 0, found {self.rank} and {self.alpha}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be above 0, found {self.learning_rate}; the usual value is 0.001")
        if not 0 <= self.gamma <= 1 or not 0 <= self.lam <= 1:
            raise ValueError(f"gamma and lam must lie from 0 to 1, found {self.gamma} and {self.lam}")
        if not 0 <= self.value_clip < math.inf:
            raise ValueError(f"value_clip must be 0 or more, found {self.value_clip}; 0 turns it off")


class CriticState(NamedTuple):
    """What the critic learns, and its optimizer."""

    weights: Any
    """{"adapter": as the actor's, "head": [D], "bias": []}, float32."""
    optimizer: Any


class Targets(NamedTuple):
    """What one call's loss tokens are held against."""

    values_N: Any
    """By the critic that the step starts from."""
    returns_N: Any


class ValueSums(NamedTuple):
    """Sums over loss tokens, float32."""

    tokens: Any
    loss: Any
    returns: Any
    returns_squared: Any
    error: Any
    """Of return less value, at the step's start."""
    error_squared: Any

    @property
    def value_loss(self) -> float:
        return float(self.loss) / max(float(self.tokens), 1.0)

    @property
    def explained_variance(self) -> float:
        """1 - var(G - V) / var(G): 1 is a perfect critic, 0 one that knows the mean alone."""
        count = max(float(self.tokens), 1.0)
        spread = float(self.returns_squared) / count - (float(self.returns) / count) ** 2
        left = float(self.error_squared) / count - (float(self.error) / count) ** 2
        return 1 - left / spread if spread > 1e-12 else 0.0


class Critic:
    """The critic's functions, compiled. Its state is the trainer's."""

    def __init__(
        self,
        config: ModelConfig,
        lora: LoraSettings,
        optimizer: OptimizerSettings,
        settings: CriticSettings,
        sharding: Sharding,
        remat: bool | Remat,
    ) -> None:
        self._config, self._settings, self._sharding, self._remat = config, settings, sharding, remat
        self._lora = dataclasses.replace(lora, rank=settings.rank, alpha=settings.alpha)
        self._model = MeshModel(config, sharding)
        self._transformation = dataclasses.replace(optimizer, learning_rate=settings.learning_rate).transformation()
        self._estimate: dict[int, Callable[..., Any]] = {}
        self._whiten: dict[int, Callable[..., Any]] = {}
        self._accumulate: dict[int, Callable[..., Any]] = {}
        self._zeros: Callable[[], Any] | None = None
        self._apply: Callable[..., Any] | None = None

    def init(self, seed: int) -> CriticState:
        """Values of 0: a fresh adapter and a head of zeros."""
        place = self._sharding.put_replicated
        weights = {
            "adapter": self._sharding.put_adapter(init_adapter(self._config, self._lora, seed)),
            "head": place(np.zeros(self._config.embed_dim, np.float32)),
            "bias": place(np.zeros((), np.float32)),
        }
        optimizer = self._transformation.init(weights)
        return CriticState(weights, jax.tree.map(lambda x: x if np.ndim(x) else place(np.asarray(x)), optimizer))

    def compile(self, state: CriticState, params: Params, batches: dict[int, Batch]) -> None:
        """Compile for abstract `state` and `params` and one abstract batch of each bucket."""
        replicated = self._sharding.replicated
        at = jax.tree.map(lambda x: x.sharding, state)
        sums_at = ValueSums(*(replicated for _ in ValueSums._fields))
        zeros = jax.jit(self._nothing, out_shardings=(at.weights, sums_at, replicated))
        self._zeros = zeros.lower().compile()
        gradient, sums, moments = jax.tree.map(abstract, self._zeros())
        for bucket, batch in batches.items():
            list_at, listed = batch.behaviour_N.sharding, batch.behaviour_N
            targets = Targets(listed, listed)
            estimate = jax.jit(self.estimate, out_shardings=(list_at, Targets(list_at, list_at), replicated))
            self._estimate[bucket] = estimate.lower(moments, state.weights, params, batch).compile()
            whiten = jax.jit(self.whiten, out_shardings=list_at)
            self._whiten[bucket] = whiten.lower(listed, batch, moments).compile()
            accumulate = jax.jit(self.accumulate, donate_argnums=0, out_shardings=(at.weights, sums_at))
            arguments = (gradient, sums, state.weights, params, batch, targets)
            self._accumulate[bucket] = accumulate.lower(*arguments).compile()
        update = jax.jit(self._update, donate_argnums=1, out_shardings=at)
        count = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated)
        self._apply = update.lower(state, gradient, count).compile()

    # What a step asks for

    def judge(
        self, state: CriticState, params: Params, calls: Calls, interrupted: Callable[[], bool]
    ) -> tuple[list[Any], list[Targets]] | None:
        """Advantages, whitened over all the calls together, and targets, call by call; None if `interrupted`.

        The batches' `advantages_N` hold the rewards of their tokens.
        """
        assert self._zeros is not None
        _, _, moments = self._zeros()
        advantages, targets = [], []
        previous: Any = None
        for bucket, batch in calls:
            jax.block_until_ready(previous)
            if interrupted():
                return None
            previous = moments
            advantages_N, target, moments = self._estimate[bucket](moments, state.weights, params, batch)
            advantages.append(advantages_N)
            targets.append(target)
        white = [self._whiten[call[0]](x, call[1], moments) for x, call in zip(advantages, calls, strict=True)]
        return white, targets

    def learn(
        self,
        state: CriticState,
        params: Params,
        calls: Calls,
        targets: Sequence[Targets],
        tokens: Any,
        earlier: ValueSums | None,
        interrupted: Callable[[], bool],
    ) -> tuple[CriticState, ValueSums] | None:
        """One update towards the calls' targets, and `earlier` with its sums; None if `interrupted`.

        `tokens` is the number of loss tokens, on the device.
        """
        assert self._zeros is not None
        assert self._apply is not None
        gradient, sums, _ = self._zeros()
        sums = sums if earlier is None else earlier
        previous: Any = None
        for (bucket, batch), target in zip(calls, targets, strict=True):
            jax.block_until_ready(previous)
            if interrupted():
                return None
            previous = sums
            gradient, sums = self._accumulate[bucket](gradient, sums, state.weights, params, batch, target)
        return self._apply(state, gradient, tokens), sums

    # Traced functions

    def _nothing(self) -> tuple[Any, ValueSums, Any]:
        """No gradient, no sums, no moments."""
        shapes = jax.eval_shape(lambda: init_adapter(self._config, self._lora, 0))
        adapter = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
        gradient = {"adapter": adapter, "head": jnp.zeros(self._config.embed_dim), "bias": jnp.zeros(())}
        return gradient, ValueSums(*(jnp.zeros(()) for _ in ValueSums._fields)), jnp.zeros(3)

    def values(self, params: Params, weights: Any, batch: Batch) -> Any:
        """V before each loss token, [N]; 0 in unused entries."""
        layout = RowLayout(batch.segment_ids_BT, batch.parent_ids_BT, batch.positions_BT)
        scale = self._lora.scale
        hidden_BTD = self._model.hidden_states(
            params, weights["adapter"], scale, batch.tokens_BT, layout, remat=self._remat
        )
        values_BT = hidden_BTD.astype(jnp.float32) @ weights["head"] + weights["bias"]
        # Predecessors are counted within their share of the rows.
        shares = batch.counts_S.size
        of_share = jnp.take_along_axis(values_BT.reshape(shares, -1), batch.predecessors_N.reshape(shares, -1), axis=1)
        return jnp.where(batch.mask_N(), of_share.reshape(-1), 0.0)

    def estimate(self, moments: Any, weights: Any, params: Params, batch: Batch) -> tuple[Any, Targets, Any]:
        """(advantages_N, targets, moments and those of the advantages: their count, sum and sum of squares)."""
        gamma, lam = self._settings.gamma, self._settings.lam
        mask_N, sequences_N = batch.mask_N(), batch.sequences_N
        values_N = self.values(params, weights, batch)
        goes_on_N = jnp.append(sequences_N[1:] == sequences_N[:-1], False)
        ahead_N = jnp.where(goes_on_N, jnp.append(values_N[1:], 0.0), 0.0)
        rewards_N = jnp.where(mask_N & jnp.isfinite(batch.advantages_N), batch.advantages_N, 0.0)
        deltas_N = jnp.where(mask_N, rewards_N + gamma * ahead_N - values_N, 0.0)
        advantages_N = discounted(deltas_N, sequences_N, gamma * lam)
        more = jnp.stack([jnp.sum(mask_N), jnp.sum(advantages_N), jnp.sum(advantages_N**2)])
        return advantages_N, Targets(values_N, advantages_N + values_N), moments + more

    def whiten(self, advantages_N: Any, batch: Batch, moments: Any) -> Any:
        """(A - mean) / sqrt(var + 1e-8) where there is a loss token."""
        count = jnp.maximum(moments[0], 1.0)
        mean = moments[1] / count
        variance = jnp.maximum(moments[2] / count - mean**2, 0.0)
        return jnp.where(batch.mask_N(), (advantages_N - mean) * jax.lax.rsqrt(variance + WHITEN_EPSILON), 0.0)

    def accumulate(
        self, gradient: Any, sums: ValueSums, weights: Any, params: Params, batch: Batch, targets: Targets
    ) -> tuple[Any, ValueSums]:
        """Add one call's gradient (a sum over tokens) and sums."""
        mask_N = batch.mask_N()

        def loss(weights: Any) -> Any:
            values_N = self.values(params, weights, batch)
            squared_N = (values_N - targets.returns_N) ** 2
            if reach := self._settings.value_clip:
                near_N = targets.values_N + jnp.clip(values_N - targets.values_N, -reach, reach)
                squared_N = jnp.maximum(squared_N, (near_N - targets.returns_N) ** 2)
            return 0.5 * jnp.sum(jnp.where(mask_N, squared_N, 0.0))

        value, more = jax.value_and_grad(loss)(weights)
        returns_N = jnp.where(mask_N, targets.returns_N, 0.0)
        error_N = jnp.where(mask_N, targets.returns_N - targets.values_N, 0.0)
        here = [jnp.sum(mask_N), value, *(f(x) for x in (returns_N, error_N) for f in (jnp.sum, _squares))]
        return jax.tree.map(jnp.add, gradient, more), ValueSums(*(a + b for a, b in zip(sums, here, strict=True)))

    def _update(self, state: CriticState, gradient: Any, tokens: Any) -> CriticState:
        gradient = jax.tree.map(lambda x: x / jnp.maximum(tokens, 1.0), gradient)
        usable = jnp.isfinite(optax.global_norm(gradient)) & (tokens > 0)
        updates, optimizer = self._transformation.update(gradient, state.optimizer, state.weights)
        new = CriticState(optax.apply_updates(state.weights, updates), optimizer)
        kept: CriticState = jax.tree.map(lambda new, old: jnp.where(usable, new, old), new, state)
        return kept


def _squares(x_N: Any) -> Any:
    return jnp.sum(x_N**2)
