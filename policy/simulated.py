"""A policy without a model: random tokens, to measure everything around it.

Invariant: it keeps the contract of `SamplingClient` (versions, pins, spans, log-probs of what was drawn), so that
nothing downstream can tell it from a model that knows nothing.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from policy.client import Completion, FinishReason, PolicyError, SamplingParams
from policy.lora import Adapter
from trajectories.schema import IntArray, Version, VersionSpan

PIN_POLL_S = 0.02
"""How often a pinned request looks whether its version has come."""
REMEMBERED_VERSIONS = 256


class SimulatedPolicy:
    """Draws uniformly from the tokens that do not stop a turn, and then a stop token after a random length."""

    def __init__(
        self,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        *,
        version: Version = Version(0, 0),
        max_context: int = 1 << 20,
        slots: int = 1 << 20,
        latency_s: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`latency_s` is what each completion takes. Raises ValueError if every token stops a turn."""
        stops = set(stop_token_ids)
        self._words = np.asarray([token for token in range(vocab_size) if token not in stops], np.int32)
        if not len(self._words):
            raise ValueError(f"a vocabulary of {vocab_size} tokens needs one that stops no turn")
        self._logprob = -float(np.log(vocab_size))
        self._version, self._latency_s, self._clock = version, latency_s, clock
        self._lock = threading.Lock()
        self._closed = False
        self._kept: set[Version] = set()
        self._replaced: dict[Version, None] = {}
        """Versions that were in use before, oldest first: nobody need wait for them."""
        self.max_context, self.slots = max_context, slots
        self.running = 0
        self.queued = 0
        self.tokens_sampled = 0
        self.tokens_prefilled = 0
        self.prefill_reused = 0
        self.first_token_at: dict[Version, float] = {}

    @property
    def version(self) -> Version:
        """The version that draws the next token."""
        return self._version

    def swap(self, adapter: Adapter | None, version: Version) -> None:
        """Draw as `version` from now on; the adapter is not looked at."""
        if version != self._version:
            if self._version not in self._kept:
                self._replaced[self._version] = None
            self._replaced.pop(version, None)
            for old in list(self._replaced)[:-REMEMBERED_VERSIONS]:
                del self._replaced[old]
            self._version = version

    def keep(self, adapter: Adapter | None, version: Version) -> None:
        """Answer those pinned to `version` until it is dropped; the adapter is not looked at."""
        self._kept.add(version)
        self._replaced.pop(version, None)

    def drop(self, version: Version) -> None:
        """Keep `version` no more; harmless if it is not kept."""
        if version in self._kept:
            self._kept.discard(version)
            if version != self._version:
                self._replaced[version] = None

    async def sample(
        self,
        session_id: str,
        token_ids: Sequence[int] | IntArray,
        params: SamplingParams,
        *,
        version: Version | None = None,
    ) -> Completion:
        """As `SamplingClient.sample`; the tokens are a pure function of the request's seed and the prompt's length."""
        while version is not None and not self._serves(version) and not self._closed:
            if version in self._replaced:
                raise PolicyError(f"session {session_id}: pinned version {version} was replaced by {self._version}")
            await asyncio.sleep(PIN_POLL_S)
        with self._lock:
            self.running += 1
        try:
            if self._latency_s:
                await asyncio.sleep(self._latency_s)
        finally:
            with self._lock:
                self.running -= 1
        if self._closed:
            raise PolicyError("the policy is closed")
        drawn = self._version if version is None else version
        if not self._serves(drawn):
            text = f"pinned version {version} was replaced by {self._version} during the turn"
            raise PolicyError(f"session {session_id}: {text}")
        stream = random.Random(f"{params.seed} {len(token_ids)}")
        room = max(0, self.max_context - len(token_ids))
        stops = bool(params.stop_token_ids)
        wanted = stream.randint(max(1, params.max_tokens // 2), max(1, params.max_tokens - stops)) + stops
        length = min(room, wanted)
        tokens = self._words[[stream.randrange(len(self._words)) for _ in range(length)]].astype(np.int32)
        finish = FinishReason.CONTEXT if room < wanted else FinishReason.STOP if stops else FinishReason.LENGTH
        if length and finish is FinishReason.STOP:
            tokens[-1] = params.stop_token_ids[stream.randrange(len(params.stop_token_ids))]
        if length:
            self._note(drawn, length)
        return Completion(tokens, np.full(length, self._logprob, np.float32), (VersionSpan(0, drawn),), finish)

    def _serves(self, version: Version) -> bool:
        return version == self._version or version in self._kept

    def close_session(self, session_id: str) -> None:
        """There is nothing to forget."""

    def close(self) -> None:
        """Every request that is or comes fails with PolicyError."""
        self._closed = True

    def _note(self, version: Version, tokens: int) -> None:
        with self._lock:
            self.tokens_sampled += tokens
            if version not in self.first_token_at:
                self.first_token_at[version] = self._clock()
                for old in list(self.first_token_at)[:-REMEMBERED_VERSIONS]:
                    del self.first_token_at[old]
