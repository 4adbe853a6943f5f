"""A policy that says what the test tells it to, and environments that misbehave."""

import asyncio
import re
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from environments.calculator import Calculator
from environments.environment import EnvironmentSettings, Message, StepResult
from environments.orchestrator import RolloutOrchestrator
from policy.chat import load_tiny_chat
from policy.client import Completion, FinishReason, SamplingParams
from trajectories.schema import Version, VersionSpan

CHAT = load_tiny_chat()
FROM_THE_BASE = ((0, Version(0, 1)),)


def ids_of(text: str) -> list[int]:
    return [CHAT.ids[piece] for piece in re.findall(r"</?\w+>|.", text)]


@dataclass
class Speaker:
    """A SamplingClient that draws the words of its script; `lines(session, turn)` may return a Completion or raise."""

    lines: object
    max_context: int = 64
    delay_s: float = 0.0
    requests: list = field(default_factory=list)
    closed: list = field(default_factory=list)
    turns: dict = field(default_factory=dict)

    async def sample(self, session_id, token_ids, params, *, version=None):
        turn = self.turns.get(session_id, 0)
        self.turns[session_id] = turn + 1
        self.requests.append(SimpleNamespace(session=session_id, ids=list(token_ids), params=params, version=version))
        await asyncio.sleep(self.delay_s)
        line = self.lines(session_id, turn)
        return completion(line) if isinstance(line, str) else line

    def close_session(self, session_id):
        self.closed.append(session_id)


def completion(text, *, reason=FinishReason.STOP, spans=FROM_THE_BASE):
    ids = np.array(ids_of(text), np.int32)
    logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 8
    return Completion(ids, logprobs, tuple(VersionSpan(*span) for span in spans), reason)


class Scripted:
    """An environment whose reset and step are what the test hands in; it remembers whether it was closed."""

    tools = ()

    def __init__(self, step=None, reset=None, close=None):
        self._step, self._reset, self._close = step, reset, close
        self.closed = 0

    async def reset(self, payload, *, episode_id, seed):
        return [Message("user", "1+1")] if self._reset is None else await self._reset()

    async def step(self, action):
        return StepResult(done=True, reward=1.0) if self._step is None else await self._step()

    async def close(self):
        self.closed += 1
        if self._close is not None:
            await self._close()


class Spec:
    """An EnvironmentSpec that makes environments with `make`."""

    tasks = Calculator().tasks

    def __init__(self, make):
        self.make = make


@pytest.fixture
def play():
    """`play(client, spec, **settings)` -> an orchestrator over the tiny vocabulary."""

    def build(client, spec, sampling=None, **settings):
        return RolloutOrchestrator(
            client, CHAT, spec, EnvironmentSettings(**settings), sampling or SamplingParams(max_tokens=14), 7, time.time
        )

    return build


@pytest.fixture
def kit():
    return SimpleNamespace(
        CHAT=CHAT, ids_of=ids_of, Speaker=Speaker, completion=completion, Scripted=Scripted, Spec=Spec
    )
