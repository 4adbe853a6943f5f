"""Whole episodes over model families' formats: calls reach tools, results and mistakes reach the model, ids grow."""

import asyncio
import time

import numpy as np
import pytest

from environments.agent import ToolAgent
from environments.environment import EnvironmentSettings
from environments.tools import Score, Tool, ToolEnvironment
from policy.chat import Message, load_chat
from policy.client import Completion, FinishReason, SamplingParams
from tests.policy.make_chat_fixtures import VARIABLES, build_folder
from trajectories.schema import Status, Task, Version, VersionSpan


class Speaker:
    """A SamplingClient that says what the test tells it to, and remembers what it was shown."""

    max_context = 8192

    def __init__(self, chat, turns):
        self.chat, self.turns, self.shown = chat, list(turns), []

    async def sample(self, session_id, token_ids, params, *, version=None):
        self.shown.append(list(token_ids))
        ids = np.array(self.chat.tokenizer.encode_frame(self.turns.pop(0)), np.int32)
        assert ids[-1] in params.stop_token_ids
        return Completion(ids, np.zeros(len(ids), np.float32), (VersionSpan(0, Version(0, 1)),), FinishReason.STOP)

    def close_session(self, session_id):
        pass


def repeat(text: str, times: int) -> str:
    """Says something several times."""
    return " ".join([text] * times)


TURNS = {
    "qwen3": (
        '<tool_call>\n{"name": "repeat", "arguments": {"text": "é"\n</tool_call><|im_end|>',
        '<think>\nOnce more.\n</think>\n\n<tool_call>\n{"name": "repeat", "arguments": {"text": "é", "times": 3}}\n'
        "</tool_call><|im_end|>",
        "Done.<|im_end|>",
    ),
    "qwen3-coder": (
        "<tool_call>\n<function=repeat>\n<parameter=text>\né\n</function>\n</tool_call><|im_end|>",
        "<tool_call>\n<function=repeat>\n<parameter=text>\né\n</parameter>\n<parameter=times>\n3\n</parameter>\n"
        "</function>\n</tool_call><|im_end|>",
        "Done.<|im_end|>",
    ),
    "llama-3.1": (
        '{"name": "repeat", "parameters": {"text": "é", }}<|eot_id|>',
        '<|python_tag|>{"name": "repeat", "parameters": {"text": "é", "times": 3}}<|eom_id|>',
        "Done.<|eot_id|>",
    ),
    "gemma-2": (
        "```tool_code\nrepeat('é', 3)\n```<end_of_turn>",
        "```tool_code\nrepeat(text='é', times=3)\n```<end_of_turn>",
        "Done.<end_of_turn>",
    ),
    "gemma-4": (
        "<|tool_call>call:repeat{text:é}<tool_call|><|tool_response>",
        '<|tool_call>call:repeat{text:<|"|>é<|"|>,times:3}<tool_call|><turn|>',
        "Done.<turn|>",
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "repeat"}]</s>',
        '[TOOL_CALLS] [{"name": "repeat", "arguments": {"text": "é", "times": 3}, "id": "abcdefghi"}]</s>',
        " Done.</s>",
    ),
}


@pytest.mark.parametrize("family", TURNS)
def test_an_episode_calls_tools_and_is_told_its_mistakes(tmp_path, family):
    chat = load_chat(str(build_folder(family, tmp_path / family)), variables=VARIABLES)
    client = Speaker(chat, TURNS[family])
    environment = ToolEnvironment(
        [Tool.of(repeat)],
        lambda payload: [Message("system", "Use tools."), Message("user", payload["ask"])],
        lambda payload, actions: Score({"said": 1.0}, actions[-1].text.strip() == "Done."),
    )
    agent = ToolAgent(client, chat, EnvironmentSettings(), SamplingParams(max_tokens=256), 7, time.time)
    episode = asyncio.run(agent.run(Task("run", 1, payload={"ask": "Repeat é."}), 0, environment))
    assert (episode.status, episode.success) == (Status.COMPLETED, True)
    assert episode.metrics == {"malformed_calls": 1, "tool_calls": 1}
    first, second, third = client.shown
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert "Repeat é." in chat.decode(first)
    assert "repeat" in chat.decode(first), "the tool is described"
    assert "error: malformed tool call: " in chat.decode(second[len(first) :])
    assert "é é é" in chat.decode(third[len(second) :])
    spoken = [id for turn in TURNS[family] for id in chat.tokenizer.encode_frame(turn)]
    assert episode.tokens_T[episode.loss_mask_T].tolist() == spoken
