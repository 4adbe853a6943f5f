"""Episodes through the real orchestrator, with a policy that says what the test tells it to."""

import asyncio
import json
import re
import time

import numpy as np
import pytest

from environments.environment import EnvironmentSettings, load_environment
from environments.orchestrator import RolloutOrchestrator
from policy.chat import Action, ToolCall
from policy.client import Completion, FinishReason, SamplingParams
from trajectories.schema import Task, Version, VersionSpan


class Letters:
    """A chat format in which every character is a token, so that any library's text can be read and said. A line
    `call NAME {json}` is a tool call."""

    vocab_size = 0x110000
    stop_token_ids = (0,)

    def __init__(self):
        self.shown = []
        """(messages, tools) of every prompt, and the messages of every continuation."""

    def prompt(self, messages, tools=()):
        self.shown.append((list(messages), list(tools)))
        return self.encode("".join(f"[{message.role}] {message.content}\n" for message in messages))

    def continuation(self, messages, *, stopped=True, sampled=()):
        self.shown.append(list(messages))
        return self.encode("".join(f"[{message.role}] {message.content}\n" for message in messages))

    def parse(self, token_ids, finish_reason=FinishReason.STOP, tools=()):
        text = self.decode(token for token in token_ids if token)
        calls = []
        for line in re.findall(r"^call .*$", text, re.MULTILINE):
            _, name, arguments = line.split(" ", 2)
            calls.append(ToolCall(name, json.loads(arguments)))
        return Action(text, tuple(calls), finish_reason)

    def encode(self, text):
        return [ord(letter) for letter in text]

    def decode(self, token_ids):
        return "".join(map(chr, token_ids))


class Speaker:
    """Says what `lines(session, turn, text so far)` returns; a list is said line by line."""

    max_context = 200_000

    def __init__(self, lines):
        self.lines = lines if callable(lines) else lambda session, turn, text: lines[min(turn, len(lines) - 1)]
        self.turns = {}
        self.cut = False

    async def sample(self, session_id, token_ids, params, *, version=None):
        turn = self.turns.get(session_id, 0)
        self.turns[session_id] = turn + 1
        said = self.lines(session_id, turn, "".join(map(chr, token_ids)))
        ids = np.array([ord(letter) for letter in said] + [0], np.int32)
        reason = FinishReason.LENGTH if self.cut else FinishReason.STOP
        return Completion(ids, -np.ones(len(ids), np.float32), (VersionSpan(0, Version(0, 1)),), reason)

    def close_session(self, session_id):
        pass


class Play:
    """`play(spec, lines)`: episodes of one group, each member's; `chat` remembers what they were shown."""

    def __init__(self):
        self.chat = Letters()

    def spec(self, name, **options):
        return load_environment(EnvironmentSettings(name=f"environments.libraries.{name}", options=options), seed=3)

    def orchestrator(self, spec, lines, **settings):
        settings = {"max_turns": 20, "step_timeout_s": 60.0, **settings}
        return RolloutOrchestrator(
            lines if isinstance(lines, Speaker) else Speaker(lines),
            self.chat,
            spec,
            EnvironmentSettings(**settings),
            SamplingParams(max_tokens=2000),
            7,
            time.time,
        )

    def __call__(self, spec, lines, *, payload=None, group=0, members=1, **settings):
        orchestrator = self.orchestrator(spec, lines, **settings)
        task = Task("run", group, group_size=members, payload=payload or spec.tasks.task(group))

        async def main():
            return await asyncio.gather(*(orchestrator.run(task, sample) for sample in range(members)))

        episodes = asyncio.run(main())
        return episodes if members > 1 else episodes[0]


@pytest.fixture
def play():
    return Play()
