"""An agent that chooses between two tools, a price list and a calculator, over two to four turns.

Invariant: tasks are split by the calls that answer them: no held-out task shares its calls with one that is trained.
"""

import random

from environments.calculator import evaluate, show
from environments.environment import Action, Message
from environments.tasks import Payload, task_list
from environments.verifiable import Verifiable

ITEMS = "bag ball bed bell book bowl cap chair clock coat cup desk door drum hat key kite lamp pen rug sofa stool table"
PRICES = {item: random.Random(item).randint(12, 98) for item in ITEMS.split()}


async def price(item: str) -> str:
    """Price of one item."""
    return str(PRICES.get(item.removesuffix("s"), f"there is no {item}"))


async def calculator(expression: str) -> str:
    """Value of an expression."""
    return show(evaluate(expression))


def task(question: str, expression: str, *items: str) -> Payload:
    calls = [f'[price(item="{item}")]' for item in items] + [f'[calculator(expression="{expression}")]']
    results = [*(str(PRICES[item]) for item in items), show(evaluate(expression))]
    return {"question": question, "calls": calls, "results": results}


def tasks(a: int, b: int, x: str, y: str) -> list[Payload]:
    boxes = task(f"{a} boxes hold {b} {x}s each. How many {x}s?", f"{a}*{b}")
    many = task(f"How much do {a} {x}s cost?", f"{a}*{PRICES[x]}", x)
    return [boxes, many, task(f"How much do a {x} and a {y} cost together?", f"{PRICES[x]}+{PRICES[y]}", x, y)]


def prompt(payload: Payload) -> list[Message]:
    messages = [Message("system", "Use the tools price and calculator.")]
    for worked in (*tasks(24, 35, "lamp", "rug"), *tasks(57, 82, "clock", "desk")):
        messages.append(Message("user", worked["question"]))
        for call, result in zip(worked["calls"], worked["results"], strict=True):
            messages += [Message("assistant", call), Message("tool", result)]
        messages.append(Message("assistant", worked["results"][-1]))
    return [*messages, Message("user", payload["question"])]


async def reward(payload: Payload, answer: str, actions: tuple[Action, ...]) -> dict[str, float]:
    """0.4 for the calls, by the share of them that is right, and 0.6 for the answer, which is what success means."""
    turns, calls = [action.text for action in actions], payload["calls"]
    share = sum(call in turns for call in calls) / max(len(turns) - 1, len(calls))
    return {"calls": 0.4 * share, "answer": 0.6 * (answer.strip() == payload["results"][-1])}


def shop(seed: int = 0) -> Verifiable:
    rng, items = random.Random(0), list(PRICES)
    mix = [rng.choice(tasks(rng.randint(12, 98), rng.randint(12, 98), *rng.sample(items, 2))) for _ in range(4000)]
    split = task_list(mix, key="calls", seed=seed)  # schemas lead a model of this size astray: it calls as it is shown
    return Verifiable(split, reward, prompt, tools=[price, calculator], show_tools=False, success_at=0.6)
