"""Questions of reasoning-gym: any of its procedural data sets, or a mix of them.

Invariant: a question is the data set's item of one index, made again where it is scored (JSON would not carry all that
scorers read). An item that comes out otherwise there, as another release of the library would make it, is the
environment's error and never a wrong answer.
What the policy answers is never the environment's error: an answer at which a data set's scorer raises scores 0 and is
counted as `unscorable_answers`.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from environments.environment import Action, Message, StepResult
from environments.libraries import held_out, require
from environments.tools import run_blocking
from environments.turns import between_tags, opening
from trajectories.schema import stream_seed

_EXTRA = "reasoning-gym"
_EVERY = "all"
_NOT_ALONE = "composite"
"""A mix that the library makes itself, from data sets that its config names."""
_SYSTEM = (
    "Think step by step, then give the final answer alone between <answer> and </answer>, in the form that the "
    "question asks for."
)
_MOST_MISSES = 10_000
_OTHERWISE_ELSEWHERE = ("isomorphic_strings", "polynomial_multiplication", "ransom_note")
"""Data sets of 0.1.25 whose items follow the order of a set, and so differ from process to process: of these the item
itself travels, which JSON carries well enough for their scorers."""


@dataclass(frozen=True)
class ReasoningGym:
    """`environments.libraries.reasoning_gym:ReasoningGym`; the payload is data set, index and question.

    The reward is the data set's score of what stands in the last <answer> of the turn; success is its full score. About
    a tenth of all questions, by their words, is held out.
    """

    datasets: str | Sequence[str] = "gsm_symbolic"
    """Name of a data set, a list of names, or `all`: drawn with equal probability."""
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of data sets, by name: what its config class takes, apart from `seed` and `size`."""
    size: int = 5_000
    """Items of each data set, training and held-out ones together; small worlds have fewer different ones."""
    system: str = _SYSTEM
    """The system message; "" for none."""
    answer_tag: str = "answer"
    """The tag around the answer; "" takes the whole turn."""
    least_score: float = 0.06
    """Scores below it are 0: the library gives wrong answers of the right form up to 0.05."""
    seed: int = 0
    sources: Mapping[str, Any] = field(init=False, repr=False, compare=False)
    """The library's data set objects by name."""

    def __post_init__(self) -> None:
        library = require("reasoning_gym", _EXTRA)
        available = sorted(set(library.factory.DATASETS) - {_NOT_ALONE})
        if self.datasets == _EVERY:
            names = available
        else:
            names = [self.datasets] if isinstance(self.datasets, str) else list(self.datasets)
        if not names:
            raise ValueError("environment.options.datasets must name at least one data set, found none")
        for name in (*names, *self.configs):
            if name not in (*available, _NOT_ALONE):
                raise ValueError(f"reasoning-gym has no data set {name!r}; it has {', '.join(available)}")
        if unused := set(self.configs) - set(names):
            raise ValueError(
                f"environment.options.configs has {', '.join(sorted(unused))}, which datasets does not name"
            )
        if self.size < 1:
            raise ValueError(f"environment.options.size must be at least 1, found {self.size}")
        if not 0 <= self.least_score <= 1:
            raise ValueError(f"environment.options.least_score must lie in 0 to 1, found {self.least_score}")
        given = {name: {**self.configs.get(name, {}), "seed": 0, "size": self.size} for name in names}
        sources = {name: library.create_dataset(name, **config) for name, config in given.items()}
        object.__setattr__(self, "sources", sources)

    @property
    def tasks(self) -> Questions:
        return Questions(self.sources, self.size, self.seed)

    def make(self) -> QuestionEnvironment:
        return QuestionEnvironment(self)

    def score(self, payload: Mapping[str, Any], text: str) -> tuple[float, bool]:
        """The data set's score of a turn, in 0 to 1, and whether its scorer could read the answer. Makes the item
        again, which takes up to a second: blocks."""
        dataset = self.sources.get(payload["dataset"])
        if dataset is None:
            raise ValueError(f"the task is of data set {payload['dataset']!r}; this run has {', '.join(self.sources)}")
        item = payload["item"] if "item" in payload else dataset[payload["index"]]
        if item["question"] != payload["question"]:
            raise RuntimeError(
                f"item {payload['index']} of {payload['dataset']} is another question here than where the task was "
                "made: install the same release of reasoning-gym everywhere"
            )
        try:
            score = float(dataset.score_answer(answer=between_tags(text, self.answer_tag), entry=item))
        except Exception:
            return 0.0, False
        return (score if score >= self.least_score else 0.0), True


@dataclass(frozen=True)
class Questions:
    """A TaskSource over data sets, split by the words of the question."""

    sources: Mapping[str, Any]
    size: int
    seed: int

    def task(self, group_id: int) -> Mapping[str, Any]:
        drawn = itertools.islice(self._drawn(random.Random(stream_seed(self.seed, "task", group_id))), _MOST_MISSES)
        for payload in drawn:
            if not held_out(payload["question"]):
                return payload
        raise ValueError(
            f"no training question among {_MOST_MISSES} draws from {', '.join(self.sources)}: add data sets"
        )

    def eval_tasks(self, count: int) -> list[Mapping[str, Any]]:
        """The same for every seed, so that runs can be compared."""
        found: dict[str, Mapping[str, Any]] = {}
        misses, drawn = 0, self._drawn(random.Random(stream_seed("held out")))
        while len(found) < count:
            payload = next(drawn)
            if held_out(payload["question"]) and payload["question"] not in found:
                found[payload["question"]], misses = payload, 0
            elif (misses := misses + 1) == _MOST_MISSES:
                raise ValueError(f"there are only about {len(found)} held-out questions, asked for {count}")
        return list(found.values())

    def _drawn(self, rng: random.Random) -> Iterator[Mapping[str, Any]]:
        names = list(self.sources)
        while True:
            name, index = rng.choice(names), rng.randrange(self.size)
            item = self.sources[name][index]
            payload = {"dataset": name, "index": index, "question": item["question"]}
            yield {**payload, "item": json.loads(json.dumps(item))} if name in _OTHERWISE_ELSEWHERE else payload


class QuestionEnvironment:
    """One question, one turn."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, spec: ReasoningGym) -> None:
        self._spec = spec
        self._payload: Mapping[str, Any] = {}

    async def reset(self, payload: Mapping[str, Any], *, episode_id: str, seed: int) -> Sequence[Message]:
        self._payload = payload
        return opening(self._spec.system, payload["question"])

    async def step(self, action: Action) -> StepResult:
        score, readable = await run_blocking(lambda: self._spec.score(self._payload, action.text))
        metrics = {} if readable else {"unscorable_answers": 1.0}
        return StepResult((), score, True, {"answer": score}, score >= 1.0, metrics)

    async def close(self) -> None:
        """Nothing to give back."""
