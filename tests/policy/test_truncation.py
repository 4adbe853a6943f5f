"""The engine where requests draw from less than the whole vocabulary, and where strings end them."""

import asyncio
import dataclasses

import numpy as np
import pytest

from policy.client import FinishReason, PolicyError, SamplingParams
from policy.engine import Engine
from tests.policy.test_engine import CONFIG, LORA, SETTINGS, V0, make_adapter, make_params, only, prompt_of, replay, run

LIMITS = {"top_k": 6, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8}
WORDS = [chr(97 + i % 26) * (i // 26 % 3) + chr(65 + i % 23) for i in range(300)]
"""One to three characters each."""


def decode(ids):
    return "".join(WORDS[i] for i in ids)


def make_engine(*, settings=None, text=decode, **changes):
    settings = dataclasses.replace(settings or SETTINGS, **changes)
    return Engine(CONFIG, make_params(), make_adapter(0), V0, settings, LORA.scale, decode=text)


@pytest.fixture(scope="module")
def engine():
    engine = make_engine(max_kept=8, **LIMITS)
    yield engine
    engine.close()


def log_softmax(x):
    return x - np.logaddexp.reduce(x)


@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_log_probs_are_those_over_the_kept_ids_whoever_else_is_there(engine, steps_per_call):
    """Truncated, plain and greedy requests side by side, each as it would be alone."""
    several = engine if steps_per_call == 1 else make_engine(max_kept=8, steps_per_call=steps_per_call, **LIMITS)
    plain = make_engine()
    kinds = [
        SamplingParams(max_tokens=20, seed=1, **LIMITS),
        SamplingParams(max_tokens=20, seed=2, temperature=1.2),
        SamplingParams(max_tokens=20, seed=3, min_p=0.3),
        SamplingParams(max_tokens=20, seed=4, top_k=3, temperature=0),
    ]
    try:

        async def everything(client, chosen):
            requests = [(client.sample(f"{i}/{params.seed}", prompt_of(i, 20), params)) for i, params in chosen]
            return await asyncio.gather(*requests)

        chosen = [(i, kinds[i % 4]) for i in range(12)]
        compiled = several.compiles
        found = run(everything(several, chosen))
        assert several.compiles == compiled
        alone = run(everything(plain, [(i, params) for i, params in chosen if not params.truncates]))
    finally:
        plain.close()
        if several is not engine:
            several.close()
    for (i, params), completion in zip(chosen, found, strict=True):
        tokens_N, kept = completion.token_ids_N, completion.kept_ids
        scaled_TV = replay([*prompt_of(i, 20), *tokens_N], *only()) / (params.temperature or 1)
        expected = []
        for n, token in enumerate(tokens_N):
            row = scaled_TV[19 + n]
            ids = kept[n] if params.truncates else np.arange(300)
            expected.append(log_softmax(row[ids])[ids.tolist().index(token)])
            if params.truncates:
                assert 1 <= len(ids) <= (params.top_k or 8)
                assert (np.diff(ids) > 0).all()
                assert row[ids].min() >= np.delete(row, ids).max() - 1e-4
        assert np.abs(np.array(expected) - completion.logprobs_N).max() < 1e-4
        assert len(kept) == (20 if params.truncates else 0)
    assert max(len(ids) for ids in found[0].kept_ids) > 1
    for before, after in zip(
        alone, [c for c, (_, p) in zip(found, chosen, strict=True) if not p.truncates], strict=True
    ):
        assert before.token_ids_N.tolist() == after.token_ids_N.tolist()
        assert (np.abs(before.logprobs_N - after.logprobs_N) < 1e-4).all()


def test_what_an_engine_was_not_made_for_is_refused(engine):
    plain = make_engine(text=None)

    async def ask(client, **params):
        await client.sample("x", [1, 2], SamplingParams(max_tokens=2, **params))

    try:
        for client, params, text in (
            (plain, {"top_p": 0.9}, "top_k, top_p and min_p need"),
            (plain, {"stop": ("a",)}, "can decode"),
            (engine, {"top_k": 9}, r"at most sampling\.max_kept \(8\), found 9"),
        ):
            with pytest.raises(PolicyError, match=text):
                run(ask(client, **params))
        run(ask(plain, top_p=0.9, temperature=0))  # greedy truncates nothing
    finally:
        plain.close()
    with pytest.raises(ValueError, match="max_kept"):
        Engine(CONFIG, make_params(), None, V0, dataclasses.replace(SETTINGS, max_kept=0), 1.0, truncates=True)


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_a_turn_ends_with_the_token_that_completes_a_stop_string(engine, steps_per_call):
    several = engine if steps_per_call == 1 else make_engine(max_kept=8, steps_per_call=steps_per_call, **LIMITS)
    params = SamplingParams(max_tokens=40, seed=5)

    async def ask(name, **changes):
        return await several.sample(name, prompt_of(1, 20), dataclasses.replace(params, **changes))

    async def go_on(name, first):
        ids = np.concatenate([prompt_of(1, 20), first.token_ids_N, prompt_of(2, 4)])
        return await several.sample(name, ids, params)

    try:
        whole = run(ask("whole"))
        text, sampled = decode(whole.token_ids_N), whole.token_ids_N.tolist()
        assert whole.finish_reason is FinishReason.LENGTH
        for start, length in ((0, 1), (7, 2), (9, 6), (20, 17), (len(text) - 3, 3)):
            stop = text[start : start + length]
            at = text.index(stop) + length
            expected = next(n for n in range(1, 41) if len(decode(sampled[:n])) >= at)
            name = f"{steps_per_call}/{start}"
            stopped = run(ask(name, stop=("never said", stop)))
            assert stopped.finish_reason is FinishReason.STOP
            assert stopped.token_ids_N.tolist() == sampled[:expected]
            assert np.abs(stopped.logprobs_N - whole.logprobs_N[:expected]).max() < 1e-4
            assert len(run(go_on(name, stopped)).token_ids_N) == 40
        # The prompt's text is not searched, and a stop string that never comes ends nothing.
        unsaid = decode(prompt_of(1, 20))[:8]
        assert unsaid not in text
        assert run(ask("prompt", stop=(unsaid,))).token_ids_N.tolist() == sampled
    finally:
        if several is not engine:
            several.close()


def test_a_request_whose_tokens_have_no_text_fails_alone(engine):
    def refuses(ids):
        raise KeyError(ids[-1])

    failing = make_engine(text=refuses)

    async def both():
        ids = prompt_of(3, 10)
        requests = (
            failing.sample("a", ids, SamplingParams(max_tokens=5, stop=("x",))),
            failing.sample("b", ids, SamplingParams(max_tokens=5)),
        )
        return await asyncio.gather(*requests, return_exceptions=True)

    try:
        refused, answered = run(both())
        assert isinstance(refused, PolicyError)
        assert "session a: its tokens cannot be decoded" in str(refused)
        assert len(answered.token_ids_N) == 5
        assert failing.failures == 0
    finally:
        failing.close()


def test_no_request_can_fail_the_others_by_a_number_beyond_the_arrays(engine):
    """A greedy request's top_k means nothing, however large; a tiny top_p keeps the most likely token."""
    failures = engine.failures

    async def together():
        return await asyncio.gather(
            engine.sample("huge", prompt_of(1, 9), SamplingParams(max_tokens=4, temperature=0, top_k=2**31)),
            engine.sample("tiny", prompt_of(2, 9), SamplingParams(max_tokens=4, temperature=1.0, top_p=1e-50)),
            engine.sample("greedy", prompt_of(2, 9), SamplingParams(max_tokens=4, temperature=0)),
        )

    huge, tiny, greedy = run(together())
    assert engine.failures == failures
    assert len(huge.token_ids_N) == 4
    np.testing.assert_array_equal(tiny.token_ids_N, greedy.token_ids_N)
    np.testing.assert_array_equal(tiny.logprobs_N, np.zeros(4, np.float32))
