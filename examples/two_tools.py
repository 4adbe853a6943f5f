"""An agent chooses between a price list and a calculator; no held-out task has the calls of a trained one."""

import random
from collections.abc import Iterator

from environments.builtin import CalculatorTool
from environments.calculator import evaluate, show
from environments.environment import Action, Message
from environments.tasks import Payload, task_list
from environments.tools import Limits
from environments.verifiable import Verifiable

THINGS = "bag ball bed bell book bowl cap chair clock coat cup desk door drum hat key kite lamp pen rug sofa stool"
ITEMS = [f"{color} {thing}" for thing in THINGS.split() for color in ("red", "blue", "black", "white")]
PRICES = {item: random.Random(item).randint(12, 98) for item in ITEMS}


async def price(item: str) -> str:
    return str(PRICES.get(item, f"there is no {item}"))


def task(question: str, expression: str, *items: str) -> Payload:
    calls = [f'[price(item="{item}")]' for item in items] + [f'[calculator(expression="{expression}")]']
    results = [*(str(PRICES[item]) for item in items), show(evaluate(expression))]
    return {"question": question, "calls": calls, "results": results}


def tasks(a: int, b: int, x: str) -> list[Payload]:
    more, many = (f"Price of a {x} + {b}?", f"{PRICES[x]}+{b}"), (f"Price of {a} {x}s?", f"{a}*{PRICES[x]}")
    return [task(f"Calculate {a} * {b}.", f"{a}*{b}"), task(*more, x), task(*many, x)]


def messages(payload: Payload) -> Iterator[Message]:
    yield Message("system", "Use the tools price and calculator.")
    for worked in (*tasks(24, 35, "blue lamp"), *tasks(57, 82, "black clock")):
        heard = [("user", worked["question"]), *(("tool", result) for result in worked["results"])]
        for (role, text), said in zip(heard, [*worked["calls"], worked["results"][-1]], strict=True):
            yield from (Message(role, text), Message("assistant", said))
    yield Message("user", payload["question"])


def right(turns: list[str], calls: list[str]) -> int:
    return next((n for n, call in enumerate(calls) if turns[n : n + 1] != [call]), len(calls))


async def reward(payload: Payload, answer: str, actions: tuple[Action, ...]) -> dict[str, float]:
    """0.2 for the tools and 0.2 for the calls, as far as they are right; 0.6 for the answer after these calls alone."""
    turns, calls = [action.text for action in actions], payload["calls"]
    most = max(len(turns) - 1, len(calls))
    tools = right([turn.split("(")[0] for turn in turns], [call.split("(")[0] for call in calls])
    answered = turns[:-1] == calls and answer.strip() == payload["results"][-1]
    return {"tools": 0.2 * tools / most, "calls": 0.2 * right(turns, calls) / most, "answer": 0.6 * answered}


def shop(seed: int = 0) -> Verifiable:
    rng = random.Random(0)
    mix = [rng.choice(tasks(rng.randint(12, 98), rng.randint(12, 98), rng.choice(ITEMS))) for _ in range(4000)]
    split = task_list(mix, key="calls", seed=seed)  # schemas lead a model of this size astray: it calls as it is shown
    tools = [price, CalculatorTool(Limits()).tool()]
    return Verifiable(split, reward, lambda one: [*messages(one)], tools=tools, show_tools=False, success_at=0.6)
