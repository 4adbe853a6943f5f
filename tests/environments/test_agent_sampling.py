"""What the agent makes of truncated draws and of turns that a stop string ended."""

import asyncio
import dataclasses
import time

import numpy as np
import pytest

from environments.calculator import Calculator
from environments.environment import EnvironmentSettings, Message, StepResult
from environments.orchestrator import RolloutOrchestrator
from policy.chat import load_chat
from policy.client import Completion, FinishReason, SamplingParams
from trajectories.schema import Status, Task, Version, VersionSpan, kept_offsets

TASK = Task("run", 3, attempt=1, group_size=4, payload={"question": "63+58+61", "answer": 182})
LIMITED = SamplingParams(max_tokens=14, top_k=4, top_p=0.9, min_p=0.1, stop=("7",))


def run(orchestrator, task=TASK):
    return asyncio.run(orchestrator.run(task, 2))


def limited(completion):
    """As if each token had been drawn from itself and its number in the turn."""
    kept = tuple(np.unique([token, n]).astype(np.int32) for n, token in enumerate(completion.token_ids_N.tolist()))
    return dataclasses.replace(completion, kept_ids=kept)


def test_an_episode_holds_the_kept_ids_of_each_sampled_token(play, kit):
    said = [limited(kit.completion("<calc>63+58</calc>")), kit.completion("<calc>1</calc>"), kit.completion("<answer>")]
    said[2] = limited(said[2])
    client = kit.Speaker(lambda session, turn: said[turn])
    episode = run(play(client, Calculator(latency_s=0), LIMITED))
    offsets = kept_offsets(episode.kept_counts_T)
    kept = [episode.kept_ids_K[offsets[i] : offsets[i + 1]].tolist() for i in range(len(episode))]
    for turn, completion in zip(episode.turns, said, strict=True):
        assert kept[turn.start : turn.end] == (
            [ids.tolist() for ids in completion.kept_ids] or [[]] * len(completion.token_ids_N)
        )
    assert not any(ids for ids, sampled in zip(kept, episode.loss_mask_T, strict=True) if not sampled)
    (first, *_) = client.requests
    assert (first.params.top_k, first.params.top_p, first.params.min_p, first.params.stop) == (4, 0.9, 0.1, ("7",))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda kept: kept[:-1], "for all of 3 tokens or none"),
        (lambda kept: (*kept[:-1], np.array([0, 1], np.int32)), "must be among the kept ids"),
    ],
)
def test_kept_ids_that_cannot_be_are_the_policys_failure(play, kit, spoil, reason):
    said = limited(kit.completion("<answer>1</answer>"))
    spoilt = dataclasses.replace(said, kept_ids=spoil(said.kept_ids))
    episode = run(play(kit.Speaker(lambda session, turn: spoilt), Calculator(latency_s=0), LIMITED))
    assert episode.status is Status.POLICY_ERROR
    assert reason in episode.error


class Listener:
    """An environment that keeps what it is told and asks once more."""

    tools = ()

    def __init__(self):
        self.heard = []

    async def reset(self, payload, *, episode_id, seed):
        return [Message("user", "What is it?")]

    async def step(self, action):
        self.heard.append(action)
        return StepResult(messages=[Message("user", "And now?")], done=len(self.heard) == 2)

    async def close(self):
        pass


def test_a_turn_that_a_stop_string_ended_is_cut_for_the_environment_and_ended_for_the_model(kit):
    chat, stop = load_chat("smollm2-135m"), "\nObservation:"
    turns = ("I look it up." + stop + " more", "It is 4.")
    eos = chat.stop_token_ids[0]
    ids = [chat.encode(turns[0]), [*chat.encode(turns[1]), eos]]

    def say(session, turn):
        said = np.array(ids[turn], np.int32)
        logprobs = np.full(len(said), -1, np.float32)
        return Completion(said, logprobs, (VersionSpan(0, Version(0, 1)),), FinishReason.STOP)

    listener, client = Listener(), kit.Speaker(say, max_context=512)
    params = SamplingParams(stop=("never said", stop))
    spec = kit.Spec(lambda *_: listener)
    episode = run(RolloutOrchestrator(client, chat, spec, EnvironmentSettings(), params, 7, time.time))
    assert episode.status is Status.COMPLETED, episode.error
    assert [action.text for action in listener.heard] == ["I look it up.", "It is 4."]
    first, second = client.requests
    between = chat.continuation([Message("user", "And now?")], stopped=False)
    assert between[0] == eos
    assert second.ids == first.ids + ids[0] + between
    assert episode.tokens_T[episode.loss_mask_T].tolist() == ids[0] + ids[1]
