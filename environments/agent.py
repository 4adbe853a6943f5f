"""One episode: the policy and the environment take turns until one of them ends it.

Invariant: token in, token out. The ids that a turn was sampled with stand in the episode as they were drawn; every
later request extends the earlier ids; only sampled tokens are in the loss mask. `ToolAgent.run` raises nothing that an
environment, a tool or a policy does: a failure is the episode's status.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from environments.environment import Environment, EnvironmentSettings, Message, StepResult
from environments.tools import LimitPassed, bounded_text, describe, passes, raised_at, within
from policy.chat import Action, ChatFormat
from policy.client import Completion, FinishReason, SamplingClient, SamplingParams
from trajectories.schema import Episode, Status, Task, Timings, Turn, VersionSpan, stream_seed

R = TypeVar("R")
log = logging.getLogger(__name__)


class EpisodeFailed(Exception):
    """Ends an episode with a failed status."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass
class _Transcript:
    """What the episode has so far; every list but `kept_ids`, `turns` and `spans` has one entry per token."""

    tokens: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept_counts: list[int] = field(default_factory=list)
    kept_ids: list[int] = field(default_factory=list)
    prompt_length: int = 0
    spans: list[VersionSpan] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    success: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    policy_s: float = 0.0
    tool_s: float = 0.0

    def observe(self, token_ids: Sequence[int]) -> None:
        self.tokens += token_ids
        self.loss_mask += [False] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)
        self.kept_counts += [0] * len(token_ids)

    def sampled(self, completion: Completion) -> None:
        start, count = len(self.tokens), len(completion.token_ids_N)
        self.tokens += completion.token_ids_N.tolist()
        self.loss_mask += [True] * count
        self.logprobs += completion.logprobs_N.tolist()
        self.kept_counts += [len(ids) for ids in completion.kept_ids] or [0] * count
        for ids in completion.kept_ids:
            self.kept_ids += ids.tolist()
        for span in completion.version_spans:
            if not self.spans or self.spans[-1].version != span.version:
                self.spans.append(VersionSpan(start + span.first_token, span.version))
        self.turns.append(Turn(start, start + count))

    def rewarded(self, result: StepResult) -> None:
        self.turns[-1] = dataclasses.replace(self.turns[-1], reward=float(result.reward))
        self.reward += float(result.reward)
        for name, part in result.reward_parts.items():
            self.reward_parts[name] = self.reward_parts.get(name, 0.0) + float(part)
        self.success = self.success or bool(result.success)
        self.count(result.metrics)

    def count(self, counts: Mapping[str, float]) -> None:
        for name, count in counts.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + float(count)


@dataclass(frozen=True)
class ToolAgent:
    """The loop of one episode: prompt, then sample, parse, step, continue, until done."""

    client: SamplingClient
    chat: ChatFormat
    settings: EnvironmentSettings
    sampling: SamplingParams
    """What all turns have in common; seed and stop tokens are set per request."""
    run_seed: int
    clock: Callable[[], float]
    """Unix seconds."""
    on_abandoned: Callable[[], None] = lambda: None
    """Told of every environment that did not stop when its time was up."""

    async def run(self, task: Task, sample: int, environment: Environment, queued_s: float = 0.0) -> Episode:
        """One member of the task's group, from reset to close. CancelledError passes through, after the clean-up."""
        started_at, loop = self.clock(), asyncio.get_running_loop()
        deadline = loop.time() + self.settings.episode_timeout_s
        episode_id = task.episode_id(sample)
        script = _Transcript()
        error = ""
        try:
            status = await self._converse(task, episode_id, environment, script, deadline)
        except EpisodeFailed as failure:
            status, error = failure.status, str(failure)
        finally:
            script.count(await self._clean_up(environment, episode_id))
        failed = status.failed  # then what was gathered before it says nothing
        return Episode(
            run_id=task.run_id,
            group_id=task.group_id,
            attempt=task.attempt,
            sample=sample,
            group_size=task.group_size,
            kind=task.kind,
            tokens_T=np.array(script.tokens, np.int32),
            loss_mask_T=np.array(script.loss_mask, np.bool_),
            logprobs_T=np.array(script.logprobs, np.float32),
            kept_counts_T=np.array(script.kept_counts, np.int32),
            kept_ids_K=np.array(script.kept_ids, np.int32),
            prompt_length=script.prompt_length,
            version_spans=tuple(script.spans),
            turns=tuple(script.turns),
            reward=0.0 if failed else script.reward,
            reward_parts={} if failed else script.reward_parts,
            success=script.success and not failed,
            status=status,
            temperature=self._temperature(task),
            error=error,
            timings=Timings(
                started_at=started_at,
                ended_at=self.clock(),
                queued_s=queued_s,
                policy_s=script.policy_s,
                tool_s=script.tool_s,
            ),
            metrics=script.metrics,
        )

    async def _converse(
        self, task: Task, episode_id: str, environment: Environment, script: _Transcript, deadline: float
    ) -> Status:
        """Fill in the transcript. Raises EpisodeFailed."""
        seed = stream_seed(self.run_seed, episode_id)
        # The group's members, and later tries, have one task between them: what one changes is its own.
        payload = copy.deepcopy(dict(task.payload))
        reset = functools.partial(environment.reset, payload, episode_id=episode_id, seed=seed)
        messages = await self._ask("reset", reset, script, deadline)
        with _blaming(Status.ENVIRONMENT_ERROR, "the environment's first messages cannot be rendered"):
            tools = tuple(environment.tools)
            script.observe(self.chat.prompt(_valid(messages), tools))
        script.prompt_length = len(script.tokens)
        if not 0 < script.prompt_length < self.client.max_context:
            raise EpisodeFailed(
                Status.ENVIRONMENT_ERROR,
                f"the prompt has {script.prompt_length} tokens and the policy's context holds "
                f"{self.client.max_context}: raise the context or shorten the prompt",
            )
        for turn in range(self.settings.max_turns):
            completion = await self._sample(task, episode_id, turn, script, deadline)
            with _blaming(Status.POLICY_ERROR, "the completion cannot be parsed"):
                sampled = completion.token_ids_N.tolist()
                action = self.chat.parse(sampled, completion.finish_reason, tools)
                action = _cut(action, self.sampling.stop)
            if malformed := sum(call.arguments is None for call in action.tool_calls):
                script.count({"malformed_calls": malformed})
            result = await self._ask("step", functools.partial(environment.step, action), script, deadline)
            with _blaming(Status.ENVIRONMENT_ERROR, "the environment's answer is unusable"):
                _check(result)
                script.rewarded(result)
            if not action.finished:
                full = action.finish_reason is FinishReason.CONTEXT or len(script.tokens) >= self.client.max_context
                return Status.CONTEXT_OVERFLOW if full else Status.MAX_TOKENS
            if result.done:
                return Status.COMPLETED
            if turn + 1 == self.settings.max_turns:
                break
            with _blaming(Status.ENVIRONMENT_ERROR, "the environment's messages cannot be rendered"):
                between = self.chat.continuation(self._bounded(result.messages, script), sampled=sampled)
            if len(script.tokens) + len(between) >= self.client.max_context:
                return Status.CONTEXT_OVERFLOW
            script.observe(between)
        return Status.MAX_TURNS

    async def _sample(self, task: Task, episode_id: str, turn: int, script: _Transcript, deadline: float) -> Completion:
        loop = asyncio.get_running_loop()
        params = dataclasses.replace(
            self.sampling,
            temperature=self._temperature(task),
            stop_token_ids=self.chat.stop_token_ids,
            seed=stream_seed(self.run_seed, episode_id, turn),
        )
        began = loop.time()
        try:
            with _blaming(Status.POLICY_ERROR, "the policy failed"):
                sample = functools.partial(
                    self.client.sample, episode_id, list(script.tokens), params, version=task.version
                )
                completion = await within(deadline - began, _awaited(sample))
                _check_completion(completion, self.chat.vocab_size)
                script.sampled(completion)
                return completion
        except LimitPassed:
            raise EpisodeFailed(
                Status.TIMEOUT,
                f"the episode passed environment.episode_timeout_s ({self.settings.episode_timeout_s:g} s) in its turn "
                f"{turn + 1}, waiting for the policy",
            ) from None
        finally:
            script.policy_s += loop.time() - began

    async def _ask(self, what: str, work: Callable[[], Awaitable[R]], script: _Transcript, deadline: float) -> R:
        """Let the environment work within the step's limit and the episode's, whichever is nearer."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        limit = min(self.settings.step_timeout_s, deadline - began)
        try:
            with _blaming(Status.ENVIRONMENT_ERROR, f"the environment failed in {what}"):
                return await within(limit, _awaited(work))
        except LimitPassed as passed:
            if not passed.stopped:
                self.on_abandoned()
            name = "step" if limit == self.settings.step_timeout_s else "episode"
            raise EpisodeFailed(
                Status.TIMEOUT,
                f"the environment's {what} passed environment.{name}_timeout_s "
                f"({getattr(self.settings, name + '_timeout_s'):g} s)",
            ) from None
        finally:
            script.tool_s += loop.time() - began

    async def _clean_up(self, environment: Environment, episode_id: str) -> Mapping[str, float]:
        """Close session and environment; trouble is counted and logged, as the episode is over."""
        counts: dict[str, float] = {}
        try:
            self.client.close_session(episode_id)
        except Exception:
            log.warning("episode %s: closing its session failed", episode_id, exc_info=True)
            counts["close_errors"] = 1
        try:
            await within(self.settings.close_timeout_s, _awaited(environment.close))
        except LimitPassed as passed:
            log.warning("episode %s: its environment did not close in time", episode_id)
            counts["close_errors"] = 1
            if not passed.stopped:
                self.on_abandoned()
        except Exception:
            log.warning("episode %s: closing its environment failed", episode_id, exc_info=True)
            counts["close_errors"] = 1
        return counts

    def _temperature(self, task: Task) -> float:
        return self.sampling.temperature if task.temperature is None else task.temperature

    def _bounded(self, messages: Sequence[Message], script: _Transcript) -> list[Message]:
        bounded = []
        for message in messages:
            content, counts = bounded_text(message.content, self.settings.max_observation)
            script.count(counts)
            bounded.append(dataclasses.replace(message, content=content))
        return bounded


class _blaming:
    """Turns whatever is raised inside into EpisodeFailed of one status; time limits pass through."""

    def __init__(self, status: Status, what: str) -> None:
        self._status, self._what = status, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, LimitPassed | EpisodeFailed):
            return
        if isinstance(error, Exception) or not passes(error):
            text, _ = bounded_text(f"{self._what}: {describe(error)}{raised_at(error)}", 2000)
            raise EpisodeFailed(self._status, text) from error


async def _awaited(work: Callable[[], Awaitable[R]]) -> R:
    """Even what the call raises before there is anything to await is raised in the awaiting."""
    return await work()


def _valid(messages: Sequence[Message]) -> list[Message]:
    """The messages with text that any tokenizer takes; a prompt is never cut."""
    return [dataclasses.replace(m, content=bounded_text(m.content, len(m.content))[0]) for m in messages]


def _cut(action: Action, stop: Sequence[str]) -> Action:
    """The action with its text up to the first stop string; its calls are those of the whole turn, whose ids stay."""
    places = [place for text in stop if (place := action.text.find(text)) >= 0]
    return dataclasses.replace(action, text=action.text[: min(places)]) if places else action


_MOST_REWARD = 1e18
"""Its square still fits float32, in which the learner computes variances."""


def _check(result: StepResult) -> None:
    if not isinstance(result, StepResult):
        raise TypeError(f"step must return a StepResult, found a {type(result).__name__}")
    if not all(math.fabs(value) <= _MOST_REWARD for value in (result.reward, *result.reward_parts.values())):
        raise ValueError(
            f"rewards must be finite, and at most {_MOST_REWARD:g} in size, found {result.reward} with parts "
            f"{dict(result.reward_parts)}"
        )


def _check_completion(completion: Completion, vocab_size: int) -> None:
    ids_N, logprobs_N = completion.token_ids_N, completion.logprobs_N
    if len(ids_N) == 0 or logprobs_N.shape != ids_N.shape:
        raise ValueError(f"it must sample at least one token, with one log-prob each, found {ids_N.shape} tokens")
    if not np.isfinite(logprobs_N).all() or not ((ids_N >= 0) & (ids_N < vocab_size)).all():
        raise ValueError("its tokens must lie in the vocabulary and their log-probs must be finite")
    if completion.kept_ids and len(completion.kept_ids) != len(ids_N):
        raise ValueError(
            f"it must have kept ids for all of {len(ids_N)} tokens or none, found {len(completion.kept_ids)}"
        )
    if any(token not in kept for token, kept in zip(ids_N.tolist(), completion.kept_ids, strict=False)):
        raise ValueError("each of its tokens must be among the kept ids that it was drawn from")
    starts = [span.first_token for span in completion.version_spans]
    if starts[:1] != [0] or starts != sorted(set(starts)) or starts[-1] >= len(ids_N):
        raise ValueError(f"its version spans must begin at 0 and ascend within {len(ids_N)} tokens, found {starts}")
