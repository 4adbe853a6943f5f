"""The optimizer step: rows in, one LoRA update out.

Invariants: every shape is compiled by `compile()` and none later; an interrupted step leaves the state as it was, bit
for bit; the gradient is a sum over loss tokens divided by one global denominator, so it does not depend on how closings
were packed, bucketed or chunked; a step without loss tokens or with a gradient that is not finite changes no parameter.

The hidden state of a token's predecessor predicts it. `prepare` gathers the loss tokens of the rows of a call into a
flat list, so that the vocabulary head, the dearest layer of a small model, runs on them alone. On a mesh, each share of
the rows has a list of its own, so that hidden states stay where their row lies.

Axes: B rows of a call, T tokens of a row (the bucket), N = B T (capacity of the list of loss tokens), S shares that the
mesh spreads rows in, D embedding.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from learner.attention import RowLayout
from learner.critic import Critic, CriticSettings, Targets, ValueSums
from learner.losses import LossSettings, LossSums, add_sums, no_sums, policy_loss
from learner.parallel import MeshModel
from learner.sharding import Sharding, ShardingSettings, abstract, place
from policy.lora import Adapter, LoraSettings, adapter_shapes, init_adapter
from policy.settings import Quantization, Remat
from policy.transformer import ModelConfig, Params, stack_layers
from policy.weights import Weights
from trajectories.advantages import AdvantageSettings, whitened
from trajectories.schema import Row, kept_offsets, stream_seed

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class _CompileCount:
    """Counts XLA compilations of this process, whoever asks for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_s: float, **_: object) -> None:
        if event == _COMPILE_EVENT:
            with self._lock:
                self._count += 1

    def __call__(self) -> int:
        with self._lock:
            return self._count


_compiles = _CompileCount()


@dataclass(frozen=True)
class OptimizerSettings:
    """The `[optimizer]` section of the run file: AdamW behind a clip of the global gradient norm."""

    learning_rate: float = 5e-4
    """Constant after the warm-up."""
    b1: float = 0.9
    """Decay of the gradient's running mean."""
    b2: float = 0.99
    """Decay of the squared gradient's running mean. Runs are short: 0.999 would still be warming up at their end."""
    weight_decay: float = 0.0
    """Decoupled, multiplied by the learning rate."""
    clip_norm: float = 1.0
    """The gradient is scaled down to this global norm if it is larger."""
    warmup_steps: int = 0
    """Updates over which the learning rate rises linearly. A step makes epochs × minibatches of them, see [learner]."""

    def __post_init__(self) -> None:
        for name, usual in (("learning_rate", 5e-4), ("clip_norm", 1.0)):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0, found {value}; the usual value is {usual}")
        for name, usual in (("b1", 0.9), ("b2", 0.99)):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, found {value}; the usual value is {usual}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be 0 or more, found {self.weight_decay}; 0 turns it off")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be 0 or more, found {self.warmup_steps}; 0 turns the warm-up off")

    def transformation(self) -> optax.GradientTransformation:
        rate: Any = self.learning_rate
        if self.warmup_steps:
            rate = optax.linear_schedule(rate / (self.warmup_steps + 1), rate, self.warmup_steps)
        adamw = optax.adamw(rate, b1=self.b1, b2=self.b2, weight_decay=self.weight_decay)
        return optax.chain(optax.clip_by_global_norm(self.clip_norm), adamw)


class Batch(NamedTuple):
    """What one call of the accumulate function reads. Share s of the rows has the entries of share s of N = B T, of
    which the first `counts_S[s]` are used."""

    tokens_BT: Any
    segment_ids_BT: Any
    parent_ids_BT: Any
    positions_BT: Any
    predecessors_N: Any
    """Flat index into the tokens [B / S, T] of its share: of the token whose hidden state predicts loss token n."""
    targets_N: Any
    behaviour_N: Any
    advantages_N: Any
    counts_S: Any
    kept_NK: Any = None
    """Ids that each target was drawn from, -1 behind them; a row of -1 means the whole vocabulary. None in a run that
    truncates no draw: its compiled functions have no such input."""
    proximal_N: Any = None
    """log pi_prox, of the policy that the step starts from. None where a step makes one update, and in `prepare`."""
    sequences_N: Any = None
    """Which episode of the call a loss token belongs to, from 0; N - 1 where there is none. None in a run whose loss
    looks at tokens alone."""

    def mask_N(self) -> Any:
        """Which entries are used."""
        used_SN = jnp.arange(self.targets_N.size // self.counts_S.size) < self.counts_S[:, None]
        return used_SN.reshape(self.targets_N.shape)


class TrainState(NamedTuple):
    """Everything that a step changes. The step draws no random numbers, so there is no random state."""

    adapter: Any
    optimizer: Any
    step: Any
    """int32 scalar."""
    critic: Any = None
    """`learner.critic.CriticState`; None in a run without a critic."""


class _Accumulated(NamedTuple):
    gradient: Any
    sums: LossSums


@dataclass(frozen=True)
class PreparedUpdate:
    """The calls of one update, on the device."""

    calls: tuple[tuple[int, Batch], ...]
    """(bucket, batch), every batch of shape (rows_per_call, bucket)."""
    loss_tokens: int
    sequences: int
    """Episodes with loss tokens."""
    denominator: float
    """What the sum over the calls is divided by, see `learner.losses.Aggregation`."""


@dataclass(frozen=True)
class PreparedStep:
    """One optimizer step, on the device."""

    updates: tuple[PreparedUpdate, ...]
    """Of one pass over the step's rows: one for each minibatch."""
    rows: int
    row_tokens: int
    """Tokens of the rows, padding included."""
    used_tokens: int
    """Tokens of the rows that are no padding."""
    call_tokens: int
    """Tokens that the device computes in one pass: `row_tokens` and the empty rows that fill up a call."""

    @property
    def calls(self) -> tuple[tuple[int, Batch], ...]:
        return tuple(call for update in self.updates for call in update.calls)

    @property
    def loss_tokens(self) -> int:
        return sum(update.loss_tokens for update in self.updates)

    @property
    def sequences(self) -> int:
        return sum(update.sequences for update in self.updates)

    @property
    def denominator(self) -> float:
        """Of one pass: of its minibatches together."""
        return sum(update.denominator for update in self.updates)


@dataclass(frozen=True)
class StepMetrics:
    """What one optimizer step did. Means and fractions are over its valid loss tokens where nothing else is said, and
    over all its updates."""

    step: int
    """The step number after it."""
    updated: bool
    """False if an update had no loss tokens or its gradient was not finite: it left the parameters as they were."""
    updates: int
    """Updates that changed the parameters."""
    loss: float
    """As the run aggregates it."""
    gradient_norm: float
    """Before the clip; the mean over the updates."""
    loss_tokens: int
    sequences: int
    """Episodes with loss tokens."""
    invalid_tokens: int
    """Loss tokens with a non-finite log-prob or advantage, or outside their kept ids; they contribute nothing."""
    rows: int
    row_tokens: int
    used_tokens: int
    calls: int
    clipped_fraction: float
    capped_fraction: float
    """Tokens whose importance weight was truncated."""
    masked_fraction: float
    """Tokens that the off-policy correction left out."""
    kept_fraction: float
    """Of all loss tokens, those that trained: valid, not clipped and not masked."""
    mean_abs_log_ratio: float
    """Of learner to behaviour policy, as is the next."""
    max_abs_log_ratio: float
    behaviour_kl: float
    """Estimate of KL(behaviour || learner), nats per token."""
    effective_sample_size: float
    """As a fraction of the loss tokens: 1 when every token weighs the same."""
    reference_kl: float
    """Estimate of KL(learner || base); 0 while the penalty is off."""
    value_loss: float
    """Of the critic; 0 without one, as is the next."""
    explained_variance: float
    """Of the returns by the critic that the step started from: 1 - var(return - value) / var(return)."""


def never() -> bool:
    return False


class Trainer:
    """Holds the frozen base, the adapter and the optimizer state, and takes steps. `run` from one thread at a time."""

    def __init__(
        self,
        config: ModelConfig,
        params: Params | Weights,
        lora: LoraSettings,
        optimizer: OptimizerSettings,
        loss: LossSettings,
        *,
        buckets: Sequence[int],
        rows_per_call: int,
        temperature: float,
        max_kept: int = 0,
        seed: int,
        remat: bool | Remat = False,
        quantize: Quantization = Quantization.NONE,
        sharding: ShardingSettings | None = None,
        advantages: AdvantageSettings | None = None,
        epochs: int = 1,
        minibatches: int = 1,
        critic: CriticSettings | None = None,
    ) -> None:
        """`params` of either layout, or still on disk; training scans over stacked layers.

        `temperature` is the behaviour policy's, and `max_kept` the most ids that its truncated draws keep; 0 if it
        truncates none. `seed` makes the first adapter. `remat` True is `Remat.ATTENTION`. `quantize` is how the base's
        projections are held. `sharding` None is one device. `advantages` say whether a step whitens them, or has a
        critic estimate them, with the settings `critic`. A step makes `epochs` passes over its rows, with an update for
        each of `minibatches` parts of them.
        """
        if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
            raise ValueError(f"buckets must be ascending row lengths, e.g. [512, 1024]; found {list(buckets)}")
        if rows_per_call < 1:
            raise ValueError(f"rows_per_call must be at least 1, found {rows_per_call}")
        if not 0 < temperature < math.inf:
            raise ValueError(
                f"temperature must be above 0 to train (0 is greedy and has no gradient), found {temperature}; "
                "the usual value is 1.0"
            )
        self._sharding = Sharding(sharding or ShardingSettings())
        self._critic: Critic | None = None
        if advantages is not None and advantages.critic:
            self._critic = Critic(config, lora, optimizer, critic or CriticSettings(), self._sharding, remat)
        self._program = StepProgram(
            config,
            lora,
            optimizer,
            loss,
            self._sharding,
            rows_per_call=rows_per_call,
            temperature=temperature,
            max_kept=max_kept,
            remat=remat,
            episodes=self._critic is not None,
        )
        self._max_kept, self._loss = max_kept, loss
        self._buckets, self._rows_per_call = tuple(buckets), rows_per_call
        self._params = (
            self._sharding.load_params(params, quantize)
            if isinstance(params, Weights)
            else self._sharding.put_params(stack_layers(params), quantize)
        )
        adapter = self._sharding.put_adapter(init_adapter(config, lora, seed))
        optimizer_state = self._place_optimizer(self._program.transformation.init(adapter))
        judge = self._critic.init(stream_seed(seed, "critic")) if self._critic is not None else None
        self._state = TrainState(adapter, optimizer_state, self._put_step(0), judge)
        self._whiten = advantages is not None and advantages.whiten
        self._epochs = epochs
        self._looks_back = epochs * minibatches > 1
        """Whether pi_prox is another policy than pi in some update."""
        self._compiled: dict[int, Callable[..., Any]] = {}
        self._proximal: dict[int, Callable[..., Any]] = {}
        self._zeros: Callable[[], _Accumulated] | None = None
        self._apply: Callable[..., Any] | None = None

    # State

    @property
    def adapter(self) -> Adapter:
        """The newest adapter. Its arrays stay valid after later steps."""
        adapter: Adapter = self._state.adapter
        return adapter

    @property
    def step_number(self) -> int:
        return int(self._state.step)

    @property
    def wants_rewards(self) -> bool:
        """Whether rows must hold the rewards of their tokens in place of advantages (see `token_rewards`)."""
        return self._critic is not None

    @property
    def compiles(self) -> int:
        """XLA compilations of this process so far; after `compile()` it stands still."""
        return _compiles()

    def state(self) -> TrainState:
        """What a checkpoint keeps; its arrays stay valid and unchanged after later steps."""
        return self._state

    def restore(self, state: Any) -> None:
        """Go on from `state()`, as arrays of numpy or JAX. Raises ValueError if it is of another model or LoRA."""
        found, expected = jax.tree.structure(state), jax.tree.structure(self._state)
        if found != expected:
            raise ValueError(f"the training state must have the structure {expected}, found {found}")
        for (path, new), old in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(self._state), strict=True):
            if np.shape(new) != np.shape(old):
                raise ValueError(
                    f"training state {jax.tree_util.keystr(path)} must have shape {np.shape(old)}, found "
                    f"{np.shape(new)}: it belongs to another model or to other [lora] settings"
                )
        # Copies, so that nobody who still holds the arrays can change the state under us.
        self._state = jax.tree.map(lambda new, old: place(np.array(new, old.dtype), old.sharding), state, self._state)

    # Compilation

    def compile(self) -> float:
        """Compile every shape that a step can need; returns the seconds it took. Later steps compile nothing."""
        began = time.perf_counter()
        program = self._program
        params, state = jax.tree.map(abstract, (self._params, self._state))
        zeros = program.lower_zeros().compile()
        for bucket in self._buckets:
            batch = program.abstract_batch(bucket)
            if self._looks_back:
                self._proximal[bucket] = program.lower_logprobs(params, batch).compile()
                batch = batch._replace(proximal_N=batch.behaviour_N)
            self._compiled[bucket] = program.lower_accumulate(params, batch).compile()
        self._apply = program.lower_update(state._replace(critic=None)).compile()
        if self._critic is not None:
            batches = {bucket: program.abstract_batch(bucket) for bucket in self._buckets}
            self._critic.compile(state.critic, params, batches)
        self._zeros = zeros
        return time.perf_counter() - began

    def flops(self, bucket: int) -> float:
        """Floating-point operations of one call by XLA's count, in which a scan over layers counts one layer."""
        analysis = self._compiled[bucket].cost_analysis()  # type: ignore[attr-defined]
        return float(analysis["flops"])

    # Host side

    def prepare(self, *minibatches: Sequence[Row]) -> PreparedStep:
        """Lay out one optimizer step and move it to the device. From any thread; it never touches the state.

        Each argument holds the rows of one update.
        """
        rows = tuple(row for minibatch in minibatches for row in minibatch)
        if self._whiten:
            white = iter(whitened(rows))
            minibatches = tuple([next(white) for _ in minibatch] for minibatch in minibatches)
        updates = tuple(self._lay_update(minibatch) for minibatch in minibatches)
        return PreparedStep(
            updates=updates,
            rows=len(rows),
            row_tokens=sum(row.bucket for row in rows),
            used_tokens=sum(row.used for row in rows),
            call_tokens=sum(bucket * self._rows_per_call for update in updates for bucket, _ in update.calls),
        )

    def _lay_update(self, rows: Sequence[Row]) -> PreparedUpdate:
        by_bucket: dict[int, list[Row]] = {bucket: [] for bucket in self._buckets}
        for row in rows:
            if row.bucket not in by_bucket:
                raise ValueError(
                    f"a row has {row.bucket} tokens and the learner compiled {list(self._buckets)}: both sides of a "
                    "run must read the same packing.buckets"
                )
            by_bucket[row.bucket].append(row)
        calls, loss_tokens, sequences = [], 0, 0
        for bucket, members in by_bucket.items():
            for start in range(0, len(members), self._rows_per_call):
                batch, found = self._batch(bucket, members[start : start + self._rows_per_call])
                loss_tokens += int(batch.counts_S.sum())
                sequences += found
                calls.append((bucket, self._put_batch(batch)))
        return PreparedUpdate(
            calls=tuple(calls),
            loss_tokens=loss_tokens,
            sequences=sequences,
            denominator=self._loss.denominator(loss_tokens, sequences),
        )

    def _batch(self, bucket: int, rows: Sequence[Row]) -> tuple[Batch, int]:
        """The batch of one call, on the host, and the number of episodes in it that have loss tokens."""
        batch = self._program.empty_batch(bucket)
        shares, sequences = len(batch.counts_S), 0
        rows_each = self._rows_per_call // shares
        for b, row in enumerate(rows):
            share, b_share = divmod(b, rows_each)
            batch.tokens_BT[b] = row.tokens_T
            batch.segment_ids_BT[b] = row.segment_ids_T
            batch.parent_ids_BT[b] = row.parent_ids_T
            batch.positions_BT[b] = row.positions_T
            predecessors_T = row.predecessors_T()
            # A token that nothing precedes has no log-prob; it must not be predicted from itself.
            (index,) = np.nonzero(row.loss_mask_T & (predecessors_T != np.arange(bucket)))
            start = share * rows_each * bucket + batch.counts_S[share]
            place = slice(start, start + len(index))
            batch.counts_S[share] += len(index)
            batch.predecessors_N[place] = b_share * bucket + predecessors_T[index]
            batch.targets_N[place] = row.tokens_T[index]
            batch.behaviour_N[place] = row.logprobs_T[index]
            batch.advantages_N[place] = row.advantages_T[index]
            if len(row.kept_counts_T):
                self._lay_kept(batch, place, row, index)
            # An episode lies in one row, as one segment.
            segments, numbers_n = np.unique(row.segment_ids_T[index], return_inverse=True)
            if batch.sequences_N is not None:
                batch.sequences_N[place] = sequences + numbers_n
            sequences += len(segments)
        return batch, sequences

    def _lay_kept(self, batch: Batch, place: slice, row: Row, index: Any) -> None:
        """The kept ids of the row's tokens `index` go to the loss tokens `place`."""
        counts_n = row.kept_counts_T[index]
        if counts_n.max(initial=0) > self._max_kept:
            raise ValueError(
                f"a token was drawn from {counts_n.max()} kept ids and the learner compiled {self._max_kept}: both "
                "sides of a run must read the same [sampling]"
            )
        if self._max_kept:
            column = np.arange(self._max_kept)
            used_nK = column < counts_n[:, None]
            sources_nK = kept_offsets(row.kept_counts_T)[index][:, None] + column
            batch.kept_NK[place][used_nK] = row.kept_ids_K[sources_nK[used_nK]]

    def _put_batch(self, batch: Batch) -> Batch:
        return Batch(*(None if x is None else self._sharding.put_batch(x) for x in batch))

    def _put_scalar(self, number: Any) -> Any:
        return self._sharding.put_replicated(number)

    def _put_step(self, step: int) -> Any:
        return self._put_scalar(np.int32(step))

    def _place_optimizer(self, optimizer: Any) -> Any:
        """Moments lie where the parameter they belong to lies (they come from it); counters everywhere."""
        return jax.tree.map(lambda x: x if np.ndim(x) else self._put_scalar(np.asarray(x)), optimizer)

    # The step

    def run(self, prepared: PreparedStep, *, interrupted: Callable[[], bool] = never) -> StepMetrics | None:
        """Make the step's updates, each by accumulating over its calls, and wait until they are done.

        `interrupted` is asked before every call and before every update; when it says so the step is given up: None,
        and the state is as it was.
        """
        if self._apply is None:
            raise RuntimeError("Trainer.compile() must run before the first step")
        updates = self._with_proximal(prepared.updates, interrupted)
        if updates is None:
            return None
        judged = self._judged(updates, interrupted)
        if judged is None:
            return None
        updates, targets = judged
        state, sums, done = self._state._replace(critic=None), None, []
        critic, value_sums = self._state.critic, None
        for number in range(1, self._epochs * len(updates) + 1):
            turn = (number - 1) % len(updates)
            update = updates[turn]
            if self._critic is not None:
                tokens = self._put_scalar(np.float32(update.loss_tokens))
                learned = self._critic.learn(
                    critic, self._params, _bare(update.calls), targets[turn], tokens, value_sums, interrupted
                )
                if learned is None:
                    return None
                critic, value_sums = learned
            accumulated = self._gather(state.adapter, update.calls, interrupted, sums)
            if accumulated is None or interrupted():
                return None
            sums = accumulated.sums
            denominator = self._put_scalar(np.float32(update.denominator))
            advance = self._put_step(int(number == self._epochs * len(updates)))
            state, norm, changed = self._apply(state, accumulated.gradient, denominator, advance)
            done.append((norm, changed))
        state = state._replace(critic=critic)
        jax.block_until_ready(state)
        self._state = state
        assert sums is not None
        norms, changes = ([value.item() for value in values] for values in zip(*done, strict=True))
        return self._metrics(prepared, sums, norms, changes, value_sums)

    def _with_proximal(
        self, updates: tuple[PreparedUpdate, ...], interrupted: Callable[[], bool]
    ) -> tuple[PreparedUpdate, ...] | None:
        """The updates with the log-probs of the policy that the step starts from, where some update needs them."""
        if not self._looks_back:
            return updates
        found = []
        previous: Any = None
        for update in updates:
            calls = []
            for bucket, batch in update.calls:
                jax.block_until_ready(previous)
                if interrupted():
                    return None
                proximal_N = self._proximal[bucket](self._params, self._state.adapter, batch)
                previous = proximal_N
                calls.append((bucket, batch._replace(proximal_N=proximal_N)))
            found.append(replace(update, calls=tuple(calls)))
        return tuple(found)

    def _judged(
        self, updates: tuple[PreparedUpdate, ...], interrupted: Callable[[], bool]
    ) -> tuple[tuple[PreparedUpdate, ...], list[list[Targets]]] | None:
        """The updates with the critic's advantages, and what the critic learns from each, where there is one."""
        if self._critic is None:
            return updates, []
        every = [call for update in updates for call in update.calls]
        found = self._critic.judge(self._state.critic, self._params, _bare(every), interrupted)
        if found is None:
            return None
        each = iter(zip(*found, strict=True))
        judged, targets = [], []
        for update in updates:
            here = [next(each) for _ in update.calls]
            pairs = zip(update.calls, here, strict=True)
            calls = tuple((bucket, batch._replace(advantages_N=white)) for (bucket, batch), (white, _) in pairs)
            judged.append(replace(update, calls=calls))
            targets.append([target for _, target in here])
        return tuple(judged), targets

    def gradient(self, prepared: PreparedStep) -> tuple[Adapter, LossSums]:
        """The gradient of a step of one update, divided by the global denominator, and its sums. Changes nothing."""
        updates = self._with_proximal(prepared.updates, never)
        assert updates is not None
        judged = self._judged(updates, never)
        assert judged is not None
        ((update,), _) = judged
        accumulated = self._gather(self._state.adapter, update.calls, never)
        assert accumulated is not None
        scale = np.float32(1 / max(prepared.denominator, 1))
        return jax.tree.map(lambda x: np.asarray(x) * scale, accumulated.gradient), accumulated.sums

    def _gather(
        self,
        adapter: Adapter,
        calls: Sequence[tuple[int, Batch]],
        interrupted: Callable[[], bool],
        earlier: LossSums | None = None,
    ) -> _Accumulated | None:
        """The gradient over the calls, and `earlier` with their sums."""
        if self._zeros is None:
            raise RuntimeError("Trainer.compile() must run before the first step")
        gradient, sums = self._zeros()
        sums = sums if earlier is None else earlier
        previous: LossSums | None = None
        for bucket, batch in calls:
            # At most two calls are in flight: the device never waits for the host, and an interrupt not for a queue.
            jax.block_until_ready(previous)
            if interrupted():
                return None
            previous = sums
            gradient, sums = self._compiled[bucket](gradient, sums, adapter, self._params, batch)
        return _Accumulated(gradient, sums)

    def _metrics(
        self,
        prepared: PreparedStep,
        sums: LossSums,
        norms: Sequence[float],
        changes: Sequence[bool],
        values: ValueSums | None,
    ) -> StepMetrics:
        total = {name: float(value) for name, value in sums._asdict().items()}
        valid = max(total["tokens"] - total["invalid"], 1.0)
        return StepMetrics(
            step=self.step_number,
            updated=all(changes),
            updates=sum(changes),
            loss=total["loss"] / max(self._epochs * prepared.denominator, 1.0),
            gradient_norm=sum(norms) / len(norms),
            loss_tokens=prepared.loss_tokens,
            sequences=prepared.sequences,
            invalid_tokens=round(total["invalid"] / self._epochs),
            rows=prepared.rows,
            row_tokens=prepared.row_tokens,
            used_tokens=prepared.used_tokens,
            calls=len(prepared.calls),
            clipped_fraction=total["clipped"] / valid,
            capped_fraction=total["capped"] / valid,
            masked_fraction=total["masked"] / valid,
            kept_fraction=total["kept"] / max(total["tokens"], 1.0),
            mean_abs_log_ratio=total["abs_log_ratio"] / valid,
            max_abs_log_ratio=total["max_abs_log_ratio"],
            behaviour_kl=total["behaviour_kl"] / valid,
            effective_sample_size=total["weight"] ** 2 / max(total["weight_squared"], 1e-30) / valid,
            reference_kl=total["reference_kl"] / valid,
            value_loss=values.value_loss if values is not None else 0.0,
            explained_variance=values.explained_variance if values is not None else 0.0,
        )


class StepProgram:
    """What a step computes, and the shapes and places of everything that it takes: no state, no allocated array.

    `Trainer` runs these functions, and `learner.planning` compiles the same ones for machines that are not there.
    """

    def __init__(
        self,
        config: ModelConfig,
        lora: LoraSettings,
        optimizer: OptimizerSettings,
        loss: LossSettings,
        sharding: Sharding,
        *,
        rows_per_call: int,
        temperature: float = 1.0,
        max_kept: int = 0,
        remat: bool | Remat = False,
        episodes: bool = False,
    ) -> None:
        """`episodes`: batches say which token is of which episode, whether the loss asks for it or not."""
        sharding.check_rows(rows_per_call)
        self._episodes = episodes or loss.needs_sequences
        self._config, self._lora, self._loss, self._sharding = config, lora, loss, sharding
        self._model = MeshModel(config, sharding)
        self._temperature, self._max_kept, self._remat = temperature, max_kept, remat
        self._rows_per_call = rows_per_call
        self.transformation = optimizer.transformation()

    # Shapes and places

    def abstract_params(self, dtype: Any, quantize: Quantization = Quantization.NONE) -> Params:
        """The base with stacked layers; matrices of `dtype`, norms and biases float32, as `policy.weights` has them,
        and projections as `quantize` says."""
        return self._sharding.abstract_params(self._config, dtype, quantize)

    def abstract_state(self) -> TrainState:
        """`TrainState` at any step; the optimizer's moments lie where their parameters do."""
        replicated = self._sharding.replicated
        adapter = self._sharding.abstract_adapter(adapter_shapes(self._config, self._lora))
        optimizer = optax.tree_map_params(
            self.transformation,
            lambda moment, parameter: jax.ShapeDtypeStruct(moment.shape, moment.dtype, sharding=parameter.sharding),
            jax.eval_shape(self.transformation.init, adapter),
            adapter,
            transform_non_params=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated),
        )
        return TrainState(adapter, optimizer, jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated))

    def abstract_batch(self, bucket: int) -> Batch:
        """The batch of one call."""
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), self.empty_batch(bucket))
        return Batch(*(None if x is None else self._sharding.abstract_batch(x) for x in batch))

    def empty_batch(self, bucket: int) -> Batch:
        """A batch of padding, on the host."""
        shape, size = (self._rows_per_call, bucket), self._rows_per_call * bucket
        return Batch(
            tokens_BT=np.zeros(shape, np.int32),
            segment_ids_BT=np.zeros(shape, np.int32),
            parent_ids_BT=np.zeros(shape, np.int32),
            positions_BT=np.zeros(shape, np.int32),
            predecessors_N=np.zeros(size, np.int32),
            targets_N=np.zeros(size, np.int32),
            behaviour_N=np.zeros(size, np.float32),
            advantages_N=np.zeros(size, np.float32),
            counts_S=np.zeros(self._sharding.shares, np.int32),
            kept_NK=np.full((size, self._max_kept), -1, np.int32) if self._max_kept else None,
            sequences_N=np.full(size, size - 1, np.int32) if self._episodes else None,
        )

    def _abstract_accumulated(self) -> _Accumulated:
        replicated = self._sharding.replicated
        adapter = self.abstract_state().adapter
        gradient = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), adapter)
        sums = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), jax.eval_shape(no_sums)
        )
        return _Accumulated(gradient, sums)

    # Compilation

    def lower_zeros(self) -> Any:
        """() -> what accumulation starts from, lowered."""
        return jax.jit(self._zero_accumulated, out_shardings=_places(self._abstract_accumulated())).lower()

    def lower_accumulate(self, params: Params, batch: Batch) -> Any:
        """(gradient, sums, adapter, params, batch) -> (gradient, sums), lowered for abstract `params` and `batch`."""
        accumulated = self._abstract_accumulated()
        # Only the gradient's buffers are donated: readers of an older adapter, and a step that is interrupted, need
        # the rest as it was.
        function = jax.jit(self._accumulate, donate_argnums=0, out_shardings=_places(accumulated))
        return function.lower(*accumulated, self.abstract_state().adapter, params, batch)

    def lower_logprobs(self, params: Params, batch: Batch) -> Any:
        """(params, adapter, batch) -> log-probs of the loss tokens, lowered for abstract `params` and `batch`."""
        function = jax.jit(self._logprobs, out_shardings=batch.behaviour_N.sharding)
        return function.lower(params, self.abstract_state().adapter, batch)

    def lower_update(self, state: TrainState) -> Any:
        """(state, gradient, denominator, steps it counts) -> (state, norm, whether it changed), lowered for an abstract
        state."""
        replicated = self._sharding.replicated
        denominator = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated)
        function = jax.jit(self._update, donate_argnums=1, out_shardings=(_places(state), replicated, replicated))
        advance = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
        return function.lower(state, self._abstract_accumulated().gradient, denominator, advance)

    # Traced functions

    def _zero_accumulated(self) -> _Accumulated:
        adapter = self.abstract_state().adapter
        gradient = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), adapter)
        return _Accumulated(gradient, no_sums())

    def _accumulate(
        self, gradient: Any, sums: LossSums, adapter: Adapter, params: Params, batch: Batch
    ) -> _Accumulated:
        """Add one call's gradient (a sum over tokens) and sums."""

        def loss(adapter: Adapter) -> tuple[Any, LossSums]:
            logprobs_N = self._logprobs(params, adapter, batch)
            reference_N = None
            if self._loss.kl_coefficient:
                reference_N = jax.lax.stop_gradient(self._logprobs(params, None, batch))
            return policy_loss(
                logprobs_N,
                batch.behaviour_N,
                batch.advantages_N,
                batch.mask_N(),
                self._loss,
                proximal_N=batch.proximal_N,
                reference_N=reference_N,
                sequences_N=batch.sequences_N,
            )

        more, more_sums = jax.grad(loss, has_aux=True)(adapter)
        gradient = jax.tree.map(lambda x, y: x + y.astype(jnp.float32), gradient, more)
        return _Accumulated(gradient, add_sums(sums, more_sums))

    def _logprobs(self, params: Params, adapter: Adapter | None, batch: Batch) -> Any:
        """log pi of the loss tokens, over the tokens that each was drawn from; unused entries are 0.

        NaN, and so invalid, where a token is not among its kept ids. The base (no adapter) is renormalised over the
        same ones, see `learner.losses`.
        """
        layout = RowLayout(batch.segment_ids_BT, batch.parent_ids_BT, batch.positions_BT)
        hidden_BTD = self._model.hidden_states(
            params, adapter, self._lora.scale, batch.tokens_BT, layout, remat=self._remat
        )
        return self._model.token_logprobs(
            params,
            hidden_BTD,
            batch.predecessors_N,
            batch.targets_N,
            batch.counts_S,
            self._temperature,
            batch.kept_NK,
        )

    def _update(self, state: TrainState, gradient: Any, denominator: Any, advance: Any) -> tuple[TrainState, Any, Any]:
        """One optimizer update -> (state, gradient norm, whether the parameters changed)."""
        gradient = jax.tree.map(lambda x: x / jnp.maximum(denominator, 1.0), gradient)
        norm = optax.global_norm(gradient)
        usable = jnp.isfinite(norm) & (denominator > 0)
        updates, optimizer = self.transformation.update(gradient, state.optimizer, state.adapter)
        adapter = optax.apply_updates(state.adapter, updates)
        # An optimizer state with one NaN in it is lost for good: such a step is left out, and said so.
        adapter, optimizer = jax.tree.map(
            lambda new, old: jnp.where(usable, new, old), (adapter, optimizer), (state.adapter, state.optimizer)
        )
        return TrainState(adapter, optimizer, state.step + advance), norm, usable


def _bare(calls: Sequence[tuple[int, Batch]]) -> list[tuple[int, Batch]]:
    """The calls as they were prepared, which is how the critic's functions are compiled."""
    return [(bucket, batch._replace(proximal_N=None)) for bucket, batch in calls]


def _places(arrays: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, arrays)
