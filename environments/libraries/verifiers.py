"""Tasksets of verifiers (`verifiers.v1`): its tasks and rewards, with the run's own loop around them.

Invariant: a task's rewards are computed by the library over a trace that holds the conversation as it was, in a process
of their own: the library's answer checkers set signals, which Python allows in the main thread of a process alone, and
read the failure to do so as a wrong answer. A scoring that is given up is killed, and its process replaced.

`python -m environments.libraries.verifiers` is that process; it speaks JSON lines.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from environments.environment import Action, Message, StepResult
from environments.libraries import require
from environments.tasks import TaskList, task_list
from environments.tools import describe, run_blocking

_EXTRA = "verifiers"


@dataclass(frozen=True)
class Verifiers:
    """`environments.libraries.verifiers:Verifiers`; the payload is the task's wire data, as the library writes it in
    traces, and its key.

    One turn a task: the prompt is the task's, the rewards are its `@reward` methods and those of its config, weighted
    as they say. Tasks that need a box, tools, set-up or the library's agents and multi-agent environments cannot run in
    this loop, and are refused by name.
    """

    taskset: str
    """Name of an installed taskset, as `vf.load_taskset` takes it; hub names such as `owner/name` too."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The rest of its config."""
    limit: int | None = None
    """Most tasks to load; an infinite taskset must have one."""
    system: str = ""
    """The system message where a task has none."""
    scoring_processes: int = 2
    """Processes that compute rewards, in each worker process."""
    success_at: float = 1.0
    """Least reward that is a success."""
    seed: int = 0
    tasks: TaskList = field(init=False, repr=False, compare=False)
    _scorers: _Scorers = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.scoring_processes < 1:
            raise ValueError(
                f"environment.options.scoring_processes must be at least 1, found {self.scoring_processes}"
            )
        taskset = _load(self.taskset, self.config)
        if taskset.INFINITE and self.limit is None:
            raise ValueError(f"taskset {self.taskset!r} is infinite: set environment.options.limit")
        if self.limit is not None:
            taskset = taskset.take(self.limit)
        payloads = []
        for task in taskset:
            if why := _refused(task, taskset):
                raise ValueError(f"taskset {self.taskset!r}, task {task.data.idx}: {why}")
            payloads.append({"key": task.key, "data": task.data.model_dump(mode="json", exclude_none=True)})
        object.__setattr__(self, "tasks", task_list(payloads, seed=self.seed, key="key"))
        object.__setattr__(self, "_scorers", _Scorers(self))

    def prepare(self) -> None:
        """Start the scoring processes, which import the library for some seconds; blocks."""
        self._scorers.start()

    def make(self) -> VerifiersEnvironment:
        return VerifiersEnvironment(self, self._scorers)

    def messages(self, payload: Mapping[str, Any]) -> list[Message]:
        data = payload["data"]
        prompt = data["prompt"]
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        system = data.get("system_prompt") or self.system
        told = [Message("system", system)] if system else []
        return told + [Message(one["role"], _text(one["content"])) for one in asked]


def _load(name: str, config: Mapping[str, Any]) -> Any:
    vf = require("verifiers.v1", _EXTRA)
    return vf.load_taskset(vf.taskset_config_type(name).model_validate({**config, "id": name}))


def _refused(task: Any, taskset: Any) -> str:
    """Why a task cannot run in this loop; "" if it can."""
    base = require("verifiers.v1", _EXTRA).Task
    kind = type(task)
    if kind.NEEDS_CONTAINER or task.data.image:
        return "it needs a container"
    if kind.toolsets(task.config) or type(taskset).toolsets(taskset.config):
        return "it has toolsets, which are MCP servers: environments.libraries.mcp runs such"
    if any(getattr(kind, hook) is not getattr(base, hook) for hook in ("setup", "finalize")):
        return "it sets up or finalizes a runtime"
    if task.data.prompt is None:
        return "it has no prompt: its user opens the conversation"
    for hook in (*task.hooks("reward"), *task.hooks("metric"), *(judge.score for judge in task.plugged_judges())):
        parameter = inspect.signature(hook).parameters.get("runtime")
        if parameter is not None and parameter.default is parameter.empty:
            return f"its {getattr(hook, '__name__', 'judge')} needs a runtime"
    return ""


def _text(content: Any) -> str:
    """The text of a message; raises ValueError for pictures."""
    if isinstance(content, str):
        return content
    if any(part.get("type") != "text" for part in content):
        raise ValueError("a message holds something else than text")
    return "\n".join(part["text"] for part in content)


class VerifiersEnvironment:
    """One task, one turn."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, spec: Verifiers, scorers: _Scorers) -> None:
        self._spec = spec
        self._scorers = scorers

    async def reset(self, payload: Mapping[str, Any], *, episode_id: str, seed: int) -> Sequence[Message]:
        self._payload = payload
        self._messages = self._spec.messages(payload)
        return self._messages

    async def step(self, action: Action) -> StepResult:
        said = [*self._messages, Message("assistant", action.text)]
        conversation = [{"role": message.role, "content": message.content} for message in said]
        scored = await self._scorers.score({"data": self._payload["data"], "messages": conversation})
        if "error" in scored:
            raise RuntimeError(f"the task's rewards failed: {scored['error']}")
        parts, reward = scored["rewards"], sum(scored["rewards"].values())
        return StepResult((), reward, True, parts, reward >= self._spec.success_at, scored["metrics"])

    async def close(self) -> None:
        """Nothing to give back: a scoring that was given up has ended its process."""


class _Scorers:
    """Processes that score, as many as are asked for, each with one task at a time."""

    def __init__(self, spec: Verifiers) -> None:
        self._spec = spec
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places = asyncio.Semaphore(spec.scoring_processes)
        self._idle: list[_Scorer] = []

    def start(self) -> None:
        """All of them. Raises RuntimeError if one cannot load the taskset."""
        scorers = [_Scorer(self._spec) for _ in range(self._spec.scoring_processes - len(self._idle))]
        for scorer in scorers:
            if "error" in (answer := scorer.begin()):
                raise RuntimeError(f"a scoring process cannot load the taskset: {answer['error']}")
        self._idle += scorers

    async def score(self, request: Mapping[str, Any]) -> Any:
        """Raises RuntimeError if the process ends meanwhile; it is replaced."""
        if self._loop is not asyncio.get_running_loop():
            self._loop = asyncio.get_running_loop()
            self._places = asyncio.Semaphore(self._spec.scoring_processes)
        async with self._places:
            scorer = self._idle.pop() if self._idle else _Scorer(self._spec)
            try:
                answer = await run_blocking(lambda: scorer.ask(request))
            except BaseException:
                scorer.kill()  # which also ends the thread that waits for it
                raise
            self._idle.append(scorer)
            return answer


class _Scorer:
    """One process. It ends with the pipe that it reads, so at the latest with this process."""

    def __init__(self, spec: Verifiers) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "environments.libraries.verifiers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
        self._taskset = {"taskset": spec.taskset, "config": dict(spec.config)}
        self._begun = False

    def begin(self) -> Any:
        """Have it load the taskset; harmless if it has. Blocks. Raises RuntimeError if the process ends."""
        answer = {} if self._begun else self._exchange(self._taskset)
        self._begun = "error" not in answer
        return answer

    def ask(self, request: Mapping[str, Any]) -> Any:
        """What the process answers. Blocks. Raises RuntimeError if it ends."""
        answer = self.begin()
        return answer if "error" in answer else self._exchange(request)

    def _exchange(self, request: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            line = b""
        else:
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the scoring process ended with status {self._process.wait()}")
        return json.loads(line)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


# --- the scoring process ----------------------------------------------------------------------------------------------


async def _score(taskset: Any, request: Mapping[str, Any]) -> Mapping[str, Any]:
    vf = require("verifiers.v1", _EXTRA)
    generic = require("verifiers.v1.utils.generic", _EXTRA)
    kind = taskset.task_type()
    task = kind(kind.data_type().model_validate(request["data"]), taskset.config.task)
    messages = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
    nodes = [
        vf.MessageNode(
            parent=number - 1 if number else None,
            message=messages[one["role"]](content=one["content"]),
            sampled=one["role"] == "assistant",
        )
        for number, one in enumerate(request["messages"])
    ]
    trace = vf.Trace(
        task=vf.TraceTask(type=kind.__name__, data=task.data, key=task.key, hash=task.hash),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=nodes,
        state=(generic.concrete_type(kind, vf.State) or vf.State)(),
        is_completed=True,
        ok=True,
    )
    await task.score(trace)
    return {
        "rewards": {name: float(reward.value) for name, reward in trace.rewards.items() if reward is not None},
        "metrics": {name: float(value) for name, value in trace.metrics.items() if value is not None},
    }


def _serve() -> None:
    """Answers each line of the standard input with one; what the library or the tasks print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    taskset: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "taskset" in request:
                taskset = _load(request["taskset"], request["config"])
                answer: Mapping[str, Any] = {}
            else:
                answer = asyncio.run(_score(taskset, request))
        except Exception as error:
            cause = error.__cause__ or error
            answer = {"error": describe(cause)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
