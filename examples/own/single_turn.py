"""A question, an answer, a function that judges it: `environment.name = "single_turn:Sums"`."""

import re
from pathlib import Path

from environments.tasks import task_file
from environments.verifiable import Verifiable


def reward(payload, answer):
    """Named parts; they add up to the reward."""
    said = re.fullmatch(r"<answer>(\d+)</answer>", answer)
    return {"form": 0.25 * bool(said), "right": 0.75 * bool(said and int(said[1]) == payload["answer"])}


def Sums(seed=0):
    tasks = task_file(Path(__file__).with_name("sums.jsonl"), seed=seed, key="question", held_out=0.2)
    return Verifiable(tasks, reward, prompt="{question}")
