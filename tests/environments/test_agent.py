"""One episode: token in, token out, and every way it can end."""

import asyncio
import dataclasses
import re

import numpy as np
import pytest

from environments.calculator import Calculator
from environments.environment import Message, StepResult
from policy.client import FinishReason, PolicyError, SamplingParams
from trajectories.schema import Kind, Status, Task, Turn, Version, VersionSpan, stream_seed

TASK = Task("run", 3, attempt=1, group_size=4, payload={"question": "63+58+61", "answer": 182})
RIGHT = ("<calc>63+58</calc>", "<calc>121+61</calc>", "<answer>182</answer>")


def run(orchestrator, task=TASK, sample=2):
    return asyncio.run(orchestrator.run(task, sample))


def test_an_episode_holds_exactly_what_was_sampled(play, kit):
    spans = [((0, Version(1, 1)), (3, Version(2, 1))), ((0, Version(2, 1)),), ((0, Version(2, 1)), (1, Version(3, 1)))]
    said = [kit.completion(text, spans=s) for text, s in zip(RIGHT, spans, strict=True)]
    client = kit.Speaker(lambda session, turn: said[turn])
    episode = run(play(client, Calculator(latency_s=0)))

    seen = ("<q>63+58+61</q>", "<result>121</result>", "<result>182</result>")
    whole = "".join(part for pair in zip(seen, RIGHT, strict=True) for part in pair)
    assert kit.CHAT.decode(episode.tokens_T) == whole
    assert (episode.reward, episode.reward_parts, episode.success) == (1.0, {"answer": 1.0}, True)
    assert (episode.status, episode.error, episode.episode_id) == (Status.COMPLETED, "", "3.1/2")
    assert episode.prompt_length == len(kit.ids_of("<q>63+58+61</q>"))
    assert np.concatenate([c.token_ids_N for c in said]).tolist() == episode.tokens_T[episode.loss_mask_T].tolist()
    assert np.array_equal(np.concatenate([c.logprobs_N for c in said]), episode.logprobs_T[episode.loss_mask_T])
    assert not episode.logprobs_T[~episode.loss_mask_T].any()
    first, _, third = episode.turns
    assert [episode.loss_mask_T[turn.start : turn.end].all() for turn in episode.turns] == [True] * 3
    assert third == Turn(len(episode) - 5, len(episode), 1.0)
    assert episode.version_spans == (
        VersionSpan(first.start, Version(1, 1)),
        VersionSpan(first.start + 3, Version(2, 1)),
        VersionSpan(third.start + 1, Version(3, 1)),
    )
    assert episode.metrics == {"tool_calls": 2}
    assert episode.timings.ended_at >= episode.timings.started_at > 0

    assert [r.session for r in client.requests] == ["3.1/2"] * 3
    for earlier, completion, later in zip(client.requests, said, client.requests[1:], strict=False):
        grown = earlier.ids + completion.token_ids_N.tolist()
        assert later.ids[: len(grown)] == grown
    assert [r.params.seed for r in client.requests] == [stream_seed(7, "3.1/2", turn) for turn in range(3)]
    assert client.requests[0].params.stop_token_ids == kit.CHAT.stop_token_ids
    assert client.closed == ["3.1/2"]


def test_an_eval_task_brings_its_version_and_temperature(play, kit):
    client = kit.Speaker(lambda session, turn: "<answer>182</answer>")
    task = dataclasses.replace(TASK, kind=Kind.EVAL, temperature=0.0, version=Version(4, 2))
    episode = run(play(client, Calculator(latency_s=0), SamplingParams(temperature=0.7, max_tokens=9)), task)
    (request,) = client.requests
    assert (request.params.temperature, request.params.max_tokens, request.version) == (0.0, 9, Version(4, 2))
    assert (episode.kind, episode.temperature, episode.episode_id) == (Kind.EVAL, 0.0, "eval-3.1/2")


def test_ids_that_no_tokenizer_would_make_pass_untouched(play, kit):
    """Adjacent tags and unknowns: the tokens a model may draw, not the ones its tokenizer would choose."""
    odd = "<calc><unk><pad>6<q></calc>"
    client = kit.Speaker(lambda session, turn: (odd, "<answer>1</answer>")[turn])
    episode = run(play(client, Calculator(latency_s=0)))
    assert episode.tokens_T[episode.turns[0].start : episode.turns[0].end].tolist() == kit.ids_of(odd)
    assert episode.metrics == {"tool_calls": 1, "refused_calls": 1}


def test_truncated_is_scored_and_not_failed(play, kit):
    cut = kit.completion("<answer>18", reason=FinishReason.LENGTH)
    episode = run(play(kit.Speaker(lambda session, turn: cut), Calculator(latency_s=0)))
    assert (episode.status, episode.status.failed, episode.reward) == (Status.MAX_TOKENS, False, 0.0)
    assert episode.sampled_tokens == 3

    async def half():
        return StepResult(reward=0.5, reward_parts={"format": 0.5}, messages=(Message("tool", "1"),))

    episode = run(play(kit.Speaker(lambda session, turn: cut), kit.Spec(lambda: kit.Scripted(half))))
    assert (episode.status, episode.reward) == (Status.MAX_TOKENS, 0.5)


def test_max_turns(play, kit):
    episode = run(play(kit.Speaker(lambda session, turn: "<calc>1+1</calc>"), Calculator(latency_s=0), max_turns=3))
    assert (episode.status, len(episode.turns)) == (Status.MAX_TURNS, 3)
    assert episode.loss_mask_T[-1]


@pytest.mark.parametrize("room", [11, 20, 28])
def test_context_overflow_keeps_what_was_sampled(play, kit, room):
    """Whether the policy says so, or the observation no longer fits."""

    def line(session, turn):
        if room == 20:
            return kit.completion("<calc>1+1</calc>", reason=FinishReason.CONTEXT)
        return "<calc>1+1</calc>"

    client = kit.Speaker(line, max_context=room)
    episode = run(play(client, Calculator(latency_s=0)))
    assert (episode.status, episode.status.failed) == (Status.CONTEXT_OVERFLOW, False)
    assert episode.loss_mask_T[-1]
    assert len(episode.turns) == len(client.requests)


def test_a_prompt_that_never_fits_is_a_failure_that_says_so(play, kit):
    episode = run(play(kit.Speaker(None, max_context=10), Calculator()))
    assert episode.status is Status.ENVIRONMENT_ERROR
    assert "prompt has 10 tokens" in episode.error


async def _raises():
    raise KeyError("gone")


async def _exits():
    raise SystemExit(1)


async def _hangs():
    await asyncio.sleep(60)


async def _nan():
    return StepResult(reward=float("nan"))


async def _vast():
    return StepResult(reward=-1e300)


async def _nothing():
    return None


async def _no_text():
    return StepResult(messages=(Message("tool", 7),))


async def _stranger():
    return StepResult(messages=(Message("nobody", "7"),))


@pytest.mark.parametrize(
    ("step", "status", "says"),
    [
        (_raises, Status.ENVIRONMENT_ERROR, r"failed in step: KeyError: 'gone' \(test_agent.py, line \d+\)$"),
        (_exits, Status.ENVIRONMENT_ERROR, "exit"),
        (_hangs, Status.TIMEOUT, r"step passed environment.step_timeout_s \(0.1 s\)"),
        (_nan, Status.ENVIRONMENT_ERROR, "rewards must be finite"),
        (_vast, Status.ENVIRONMENT_ERROR, r"at most 1e\+18 in size, found -1e\+300"),
        (_nothing, Status.ENVIRONMENT_ERROR, "found a NoneType"),
        (_stranger, Status.ENVIRONMENT_ERROR, "'nobody'"),
    ],
)
def test_an_environment_that_fails_in_its_step(play, kit, step, status, says):
    environment = kit.Scripted(step)
    client = kit.Speaker(lambda session, turn: "<calc>1+1</calc>")
    episode = run(play(client, kit.Spec(lambda: environment), step_timeout_s=0.1))
    assert episode.status is status
    assert re.search(says, episode.error)
    assert (episode.reward, episode.success, len(episode.turns)) == (0.0, False, 1)
    assert (environment.closed, client.closed) == (1, ["3.1/2"])


@pytest.mark.parametrize(
    ("reset", "status"),
    [(_raises, Status.ENVIRONMENT_ERROR), (_hangs, Status.TIMEOUT), (_nothing, Status.ENVIRONMENT_ERROR)],
)
def test_an_environment_that_fails_in_its_reset(play, kit, reset, status):
    environment = kit.Scripted(reset=reset)
    episode = run(play(kit.Speaker(None), kit.Spec(lambda: environment), step_timeout_s=0.1))
    assert (episode.status, len(episode), episode.prompt_length, environment.closed) == (status, 0, 0, 1)


def test_an_environment_that_cannot_be_made(play, kit):
    def make():
        raise OSError("no such simulator")

    episode = run(play(kit.Speaker(None), kit.Spec(make)))
    assert (episode.status, episode.timings.started_at > 0) == (Status.ENVIRONMENT_ERROR, True)
    assert "no such simulator" in episode.error


def test_a_megabyte_or_invalid_text_from_an_environment_is_cut_and_mended(play, kit):
    for content in ("1" * 1_000_000, b"1\xff", "1\ud800", 7):
        answers = iter([StepResult(messages=(Message("tool", content),)), StepResult(done=True)])

        async def step(answers=answers):
            return next(answers)

        client = kit.Speaker(lambda session, turn: "<calc>1+1</calc>")
        episode = run(play(client, kit.Spec(lambda step=step: kit.Scripted(step)), max_observation=40))
        assert episode.status is Status.COMPLETED
        assert len(episode.metrics) == (content != 7)


def _raise(error):
    raise error


@pytest.mark.parametrize(
    "line",
    [
        lambda kit: _raise(PolicyError("engine closed")),
        lambda kit: _raise(OSError("connection lost")),
        lambda kit: kit.completion(""),
        lambda kit: dataclasses.replace(kit.completion("<calc>"), logprobs_N=np.array([np.nan], np.float32)),
        lambda kit: dataclasses.replace(kit.completion("<calc>"), token_ids_N=np.array([24], np.int32)),
        lambda kit: dataclasses.replace(kit.completion("<calc>"), version_spans=()),
    ],
)
def test_a_policy_that_fails_is_no_wrong_answer(play, kit, line):
    environment = kit.Scripted()
    episode = run(play(kit.Speaker(lambda session, turn: line(kit)), kit.Spec(lambda: environment)))
    assert (episode.status, episode.reward, environment.closed) == (Status.POLICY_ERROR, 0.0, 1)
    assert episode.error.startswith("the policy failed: ")


def test_waiting_for_the_policy_counts_for_the_episode_and_not_for_the_step(play, kit):
    slow = kit.Speaker(lambda session, turn: "<answer>182</answer>", delay_s=0.3)
    assert run(play(slow, Calculator(latency_s=0), step_timeout_s=0.1)).status is Status.COMPLETED
    episode = run(play(slow, Calculator(latency_s=0), step_timeout_s=0.1, episode_timeout_s=0.1))
    assert episode.status is Status.TIMEOUT
    assert "episode_timeout_s" in episode.error


def test_trouble_in_closing_is_counted(play, kit):
    for close in (_raises, _hangs):
        client = kit.Speaker(lambda session, turn: "<answer>2</answer>")
        orchestrator = play(client, kit.Spec(lambda close=close: kit.Scripted(close=close)), close_timeout_s=0.1)
        episode = run(orchestrator)
        assert (episode.status, episode.metrics) == (Status.COMPLETED, {"close_errors": 1})
