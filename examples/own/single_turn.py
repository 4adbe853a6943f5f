"""A question and a function that judges the policy's one turn: `environment.name = "single_turn:Calls"`."""

import re
from pathlib import Path

from environments.tasks import task_file
from environments.verifiable import Verifiable


def reward(payload, answer):
    """Named parts, which add up: the turn is to be a call that holds the question."""
    call = re.fullmatch(r"<calc>(\d+[-+*]\d+)</calc>", answer)
    return {"form": 0.25 * bool(call), "right": 0.75 * bool(call and call[1] == payload["question"])}


def Calls(seed=0):
    tasks = task_file(Path(__file__).with_name("sums.jsonl"), seed=seed, key="question", held_out=0.2)
    return Verifiable(tasks, reward, prompt="{question}")
