"""GSM8K from its published JSON Lines: `question`, and an `answer` whose last line is `#### ` and the number.

Invariant: a solution that holds no number is an error with its line, when the spec is made; an answer is compared as a
number, so that 1,000 is 1000 and 72.00 is 72.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from typing import Any

from environments.environment import Action, Message
from environments.tasks import TaskList, task_file
from environments.tools import Score, ToolEnvironment
from environments.turns import between_tags, opening
from environments.user_code import located


class Extraction(StrEnum):
    """Which number of a turn is its answer."""

    HASHES = "hashes"
    """The one after the first `####`: how the data set's authors extract answers."""
    TAG = "tag"
    """The only one in the last <answer>."""
    LAST = "last"
    """The last number of the turn, wherever it stands."""


_PROMPTS = {
    Extraction.HASHES: "Solve the problem step by step. End with a line of its own: #### and the number, nothing else.",
    Extraction.TAG: (
        "Solve the problem. Think first, between <reasoning> and </reasoning>; then write the answer, one number and "
        "nothing else, between <answer> and </answer>."
    ),
    Extraction.LAST: "Solve the problem step by step and end with the answer, which is one number.",
}
_FORMATS = {
    Extraction.HASHES: r".+\n#### -?[\d.,]+\s*",
    Extraction.TAG: r"\s*<reasoning>.+?</reasoning>\s*<answer>[^<]+</answer>\s*",
    Extraction.LAST: r".*\d\D*",
}
_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?|-?\.\d+"


def number_in(text: str) -> Decimal | None:
    """The value of text that is one number, with thousands' commas, a currency sign or a full stop at its end."""
    plain = text.strip().replace(",", "").replace("$", "").removesuffix("%").removesuffix(".")
    if not re.fullmatch(r"-?\d*\.?\d+", plain, re.ASCII) or len(plain) > 40:
        return None
    try:
        return Decimal(plain)
    except InvalidOperation:
        return None


def extract(text: str, extraction: Extraction) -> Decimal | None:
    """The number that a turn, or a published solution, answers; None if it answers none."""
    match extraction:
        case Extraction.HASHES:
            found = re.search(r"#### (-?[0-9.,]+)", text)
            return number_in(found[1]) if found else None
        case Extraction.TAG:
            return number_in(between_tags(text, "answer") or "")
        case Extraction.LAST:
            numbers = re.findall(_NUMBER, text, re.ASCII)
            return number_in(numbers[-1]) if numbers else None


@dataclass(frozen=True)
class GSM8K:
    """`environments.libraries.gsm8k:GSM8K`; the payload is the published object.

    The reward is 1 for the right number, and `format_reward` for a turn of the form that the prompt asks for; success
    is the right number. A turn that was cut is scored as it stands.
    """

    folder: str = "gsm8k"
    """Where `train.jsonl` and `test.jsonl` lie, on disk or at gs://; github.com/openai/grade-school-math holds them."""
    extraction: str = Extraction.HASHES.value
    """`hashes`, `tag` or `last`."""
    system: str | None = None
    """The instructions; None asks for the form that `extraction` reads. Models without a system role get them at the
    head of the question."""
    format_reward: float = 0.0
    """Added for the form alone."""
    seed: int = 0
    tasks: TaskList = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.extraction not in list(Extraction):
            raise ValueError(
                f"environment.options.extraction must be one of {', '.join(Extraction)}, found {self.extraction!r}"
            )
        folder = located(self.folder.rstrip("/"))
        train, test = f"{folder}/train.jsonl", f"{folder}/test.jsonl"
        tasks = task_file(train, seed=self.seed, key="question", held_out_file=test)
        for place, row in zip(tasks.places, (*tasks.training, *tasks.held_out), strict=True):
            if not isinstance(row["question"], str) or solution(row) is None:
                raise ValueError(
                    f"{folder}/{place}: each line must have `question` and an `answer` that ends with #### and a "
                    f"number, found {str(dict(row))[:120]}"
                )
        object.__setattr__(self, "tasks", tasks)

    def make(self) -> ToolEnvironment:
        return ToolEnvironment((), self.messages, self.score)

    def messages(self, payload: Mapping[str, Any]) -> Sequence[Message]:
        """The conversation before the turn."""
        told = _PROMPTS[Extraction(self.extraction)] if self.system is None else self.system
        return opening(told, payload["question"])

    def score(self, payload: Mapping[str, Any], turns: Sequence[Action]) -> Score:
        """What the turn is worth."""
        text = turns[-1].text
        extraction = Extraction(self.extraction)
        right = extract(text, extraction) == solution(payload)
        parts = {"answer": float(right)}
        if self.format_reward:
            parts["format"] = self.format_reward * bool(re.fullmatch(_FORMATS[extraction], text, re.DOTALL))
        return Score(parts, right)


def solution(row: Mapping[str, Any]) -> Decimal | None:
    """The number of a published solution."""
    answer = row.get("answer")
    return extract(answer, Extraction.HASHES) if isinstance(answer, str) else None
