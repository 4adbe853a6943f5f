"""A sentence in, a JSON object out: an environment of one turn, from generated tasks and a reward function.

    Tom is 31 years old and lives in Oslo.  ->  {"name": "Tom", "age": 31, "city": "Oslo"}

Invariant: tasks are split by the object that is asked for, so no person of a held-out task occurs in the training in
any of the six phrasings.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from environments.environment import Message
from environments.tasks import task_list
from environments.verifiable import Verifiable

NAMES = ("Amy", "Ana", "Ben", "Bob", "Dan", "Eva", "Ian", "Ida", "Kim", "Lea", "Leo", "Max", "Mia", "Sam", "Tom", "Zoe")
CITIES = ("Berlin", "Cairo", "Delhi", "Dublin", "Kyoto", "Lima", "Madrid", "Oslo", "Paris", "Quito", "Rome", "Vienna")
PHRASINGS = (
    "{name} is {age} years old and lives in {city}.",
    "In {city} lives {name}, who is {age}.",
    "{name}, aged {age}, moved to {city}.",
    "Meet {name} from {city}. Age: {age}.",
    "At {age}, {name} works in {city}.",
    "{city} is home to {name} ({age}).",
)


def draw(rng: random.Random) -> dict[str, Any]:
    person = {"name": rng.choice(NAMES), "age": rng.randint(5, 90), "city": rng.choice(CITIES)}
    return {"question": rng.choice(PHRASINGS).format(**person), "person": person}


def prompt(payload: Mapping[str, Any]) -> list[Message]:
    """One worked example: without it a model of this size writes prose, and there is nothing to reward."""
    worked = {"name": "Ada", "age": 36, "city": "London"}
    return [
        Message("system", "JSON with name, age, city."),
        Message("user", PHRASINGS[0].format(**worked)),
        Message("assistant", json.dumps(worked)),
        Message("user", payload["question"]),
    ]


async def reward(payload: Mapping[str, Any], answer: str) -> float:
    """1 for exactly the object, however it is spaced and ordered, and nothing around it."""
    try:
        return float(json.loads(answer) == payload["person"])
    except (ValueError, RecursionError):
        return 0.0


def extraction(seed: int = 0) -> Verifiable:
    rng = random.Random(0)
    return Verifiable(task_list([draw(rng) for _ in range(4000)], key="person", seed=seed), reward, prompt)
