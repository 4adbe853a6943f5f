"""Two environments with a calculator: word questions for a real LLM, and bare expressions for the tiny model.

Invariant: whether a question is held out is decided by its text alone, so no training question, of any seed or group,
ever equals a held-out one.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import hashlib
import itertools
import json
import math
import operator
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from environments.environment import Action, Message, StepResult, ToolCall
from environments.tools import Score, Tool, ToolContext, ToolEnvironment, ToolError
from policy.chat import TinyChat, load_tiny_chat
from trajectories.schema import stream_seed

Question = Mapping[str, Any]
"""A task's payload: `question`, its text, and `answer`, an integer."""

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def held_out(question: str) -> bool:
    """True for about a tenth of all questions."""
    return hashlib.blake2b(question.encode(), digest_size=2).digest() < b"\x1a\x00"


_HELD_OUT = 0x1A00 / 0x10000
"""The share that `held_out` is true for."""
_DRAWN = 0.9
"""Share of the held-out questions up to which they are drawn: the last ones would take ever more draws."""
_FEW = 50_000
"""Questions that are counted to say how many are held out."""


@dataclass(frozen=True)
class Questions:
    """A TaskSource over a generator of questions, split by `held_out`."""

    draw: Callable[[random.Random], Question]
    seed: int
    number: Callable[[], int]
    """How many questions `draw` may yield, or at least yields where they are more than anybody asks for."""
    every: Callable[[], Iterator[Question]]
    """Each of them once, in any order that stays."""

    def task(self, group_id: int) -> Question:
        return draw_training(self.draw, random.Random(stream_seed(self.seed, "task", group_id)))

    def eval_tasks(self, count: int) -> list[Question]:
        """The same for every seed, so that runs can be compared."""
        number = self.number()
        expected = _HELD_OUT * number
        if count > expected + 8 * math.sqrt(expected):  # eight standard deviations: there are not so many
            there_are = f"{sum(1 for _ in self._rest({}))}" if number <= _FEW else f"about {round(expected, -3):.0f}"
            raise _too_few(there_are, count)
        rng, found = random.Random(stream_seed("held out")), dict[str, Question]()
        while len(found) < min(count, _DRAWN * expected):
            question = self.draw(rng)
            if held_out(question["question"]):
                found.setdefault(question["question"], question)
        if len(found) < count:
            rest = itertools.islice(self._rest(found), count - len(found))
            found |= {question["question"]: question for question in rest}
        if len(found) < count:
            raise _too_few(str(len(found)), count)
        return list(found.values())

    def _rest(self, found: Mapping[str, Question]) -> Iterator[Question]:
        """Held-out questions that are not among those `found`."""
        return (one for one in self.every() if held_out(one["question"]) and one["question"] not in found)


def _too_few(there_are: str, count: int) -> ValueError:
    return ValueError(
        f"there are {there_are} held-out questions, asked for {count}: lower evaluation.questions or make the "
        "environment's questions more various"
    )


def draw_training(draw: Callable[[random.Random], Question], rng: random.Random) -> Question:
    while held_out((question := draw(rng))["question"]):
        pass
    return question


async def _wait(mean_s: float, context: ToolContext) -> None:
    """As a slow tool would: exponentially distributed, the same for the same call of the same episode."""
    if mean_s:
        await asyncio.sleep(random.Random(context.seed).expovariate(1 / mean_s))


_PATIENCE_S = 3600.0
"""The step's limit is the one that counts: a slow calculator is what the demo is about."""


def _check_latency(latency_s: float) -> None:
    if not 0 <= latency_s < float("inf"):
        raise ValueError(f"environment.options.latency_s must be 0 or more seconds, found {latency_s}")


# --- word questions ---------------------------------------------------------------------------------------------------

_NAMES = (
    "Tom",
    "Ana",
    "Bob",
    "Eva",
    "Ian",
    "Zoe",
    "Max",
    "Lea",
    "Sam",
    "Mia",
    "Leo",
    "Ida",
    "Ben",
    "Amy",
    "Dan",
    "Kim",
)
_ITEMS = ("apples", "pens", "coins", "books", "cards", "stamps", "shells", "eggs")
_WORDING = {
    "+": "{name} has {a} {item} and gets {b} more. How many {item} now?",
    "-": "{name} has {a} {item} and gives away {b}. How many {item} are left?",
    "*": "{name} has {a} boxes with {b} {item} each. How many {item} in total?",
}
_SYSTEM = "Use the calculator tool."
_WORKED = (
    ("Lea has 69 boxes with 59 eggs each. How many eggs in total?", "69*59", 4071),
    ("Sam has 80 stamps and gives away 17. How many stamps are left?", "80-17", 63),
    ("Leo has 86 cards and gets 46 more. How many cards now?", "86+46", 132),
)
"""One for each operation. A model of this size does not use the tool without them."""


def draw_word_question(rng: random.Random) -> Question:
    name, item = rng.choice(_NAMES), rng.choice(_ITEMS)
    a, b, sign = rng.randint(12, 98), rng.randint(12, 98), rng.choice("+-*")
    if sign == "-" and a < b:
        a, b = b, a
    return _word_question(name, item, a, sign, b)


def _word_question(name: str, item: str, a: int, sign: str, b: int) -> Question:
    return {"question": _WORDING[sign].format(name=name, item=item, a=a, b=b), "answer": _apply(a, sign, b)}


def _word_numbers() -> Iterator[tuple[int, str, int]]:
    span = range(12, 99)
    return ((a, sign, b) for a in span for b in span for sign in "+-*" if sign != "-" or a >= b)


def _count_word_questions() -> int:
    return len(_NAMES) * len(_ITEMS) * sum(1 for _ in _word_numbers())


def _every_word_question() -> Iterator[Question]:
    for a, sign, b in _word_numbers():
        for name, item in itertools.product(_NAMES, _ITEMS):
            yield _word_question(name, item, a, sign, b)


def word_prompt(payload: Question) -> list[Message]:
    messages = [Message("system", _SYSTEM)]
    for question, expression, value in _WORKED:
        call = {"name": "calculator", "arguments": {"expression": expression}}
        messages += [
            Message("user", question),
            Message("assistant", f"<tool_call>{json.dumps(call)}</tool_call>"),
            Message("tool", str(value)),
            Message("assistant", f"<answer>{value}</answer>"),
        ]
    return [*messages, Message("user", payload["question"])]


def evaluate(expression: str) -> int | float:
    """Value of an expression in + - * / and parentheses, of at most 30 characters. Raises ToolError."""
    if not re.fullmatch(r"[\d+\-*/() .]{1,30}", expression, re.ASCII):
        raise ToolError("an expression holds at most 30 of the characters 0-9 + - * / ( ) .")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ArithmeticError) as error:
        raise ToolError(f"{expression!r} has no value: {error}") from error


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            result: int | float = _OPERATORS[type(sign)](_value(left), _value(right))
            return result
    raise ToolError("an expression may use + - * / and parentheses only")


def show(value: int | float) -> str:
    """A whole number without a fraction, any other with at most two places."""
    return str(int(value) if value == int(value) else round(value, 2))


def _called(text: str) -> Any:
    """The JSON of a turn that is one tool call and nothing else; None if it is not."""
    call = re.fullmatch(r"<tool_call>(.*)</tool_call>", text.strip(), re.DOTALL)
    try:
        return json.loads(call[1]) if call else None
    except (ValueError, RecursionError):
        return None


def is_right_call(text: str, answer: int) -> bool:
    """Whether the turn is a well-formed call of the calculator; any expression of the right value will do."""
    match _called(text):
        case {"name": "calculator", "arguments": {"expression": str() as expression, **more}, **rest} if (
            not more and not rest and not expression.strip().isdigit()
        ):
            try:
                return evaluate(expression) == answer
            except ValueError:
                return False
    return False


async def _evaluate_slowly(expression: str, context: ToolContext, *, latency_s: float) -> str:
    await _wait(latency_s, context)
    return show(evaluate(expression))


_EXPRESSION = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}


class WordCalculatorEnvironment(ToolEnvironment):
    """Turn 1 calls the calculator (0.5 if the call is right); turn 2 answers (0.5 if both are right).

    The tool answers whenever the expression has a value, right or wrong; otherwise the episode ends after turn 1.
    """

    def __init__(self, latency_s: float) -> None:
        slowly = functools.partial(_evaluate_slowly, latency_s=latency_s)
        self._calculator = Tool("calculator", "Evaluates an expression.", _EXPRESSION, slowly, _PATIENCE_S)
        super().__init__((self._calculator,), word_prompt, self._judge)
        self._call_was_right = False

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """None are described: the worked dialogues show the tool, and prompts are shorter without its schema."""
        return ()

    async def step(self, action: Action) -> StepResult:
        if self.actions:
            return await super().step(Action(action.text, (), action.finish_reason))
        self.actions.append(action)
        self._call_was_right = is_right_call(action.text, self.payload["answer"])
        reward = 0.5 * self._call_was_right
        parts = {"call": reward}
        match _called(action.text):
            case {"arguments": {"expression": str() as expression}} if action.finished and _has_value(expression):
                answer = await self.observe([ToolCall("calculator", {"expression": expression})])
                return StepResult(answer.messages, reward, False, parts, metrics=answer.metrics)
        return StepResult((), reward, True, parts)

    def _judge(self, payload: Question, actions: Sequence[Action]) -> Score:
        right = self._call_was_right and actions[-1].text.strip() == f"<answer>{payload['answer']}</answer>"
        return Score({"answer": 0.5 * right}, right)


def _has_value(expression: str) -> bool:
    try:
        return bool(show(evaluate(expression)))
    except (ValueError, OverflowError):
        return False


@dataclass(frozen=True)
class WordCalculator:
    """Word questions over two turns: `environments.calculator:WordCalculator`."""

    latency_s: float = 0.5
    """Mean time the tool takes."""
    seed: int = 0

    def __post_init__(self) -> None:
        _check_latency(self.latency_s)

    @property
    def tasks(self) -> Questions:
        return Questions(draw_word_question, self.seed, _count_word_questions, _every_word_question)

    def make(self) -> WordCalculatorEnvironment:
        return WordCalculatorEnvironment(self.latency_s)


# --- bare expressions, for the tiny model -----------------------------------------------------------------------------


def _apply(x: int, sign: str, y: int) -> int:
    return x + y if sign == "+" else x - y if sign == "-" else x * y


def draw_expression(rng: random.Random, operations: int) -> Question:
    """Two-digit numbers joined by 1 to `operations` signs, applied from left to right; never below 0 on the way."""
    count = rng.randint(1, operations)  # drawn once: long questions must not lose to the rule about 0
    while True:
        value = rng.randint(11, 99)
        text = str(value)
        for index in range(count):
            sign, y = rng.choice("+-*" if index == 0 else "+-"), rng.randint(11, 99)
            value, text = _apply(value, sign, y), f"{text}{sign}{y}"
            if value < 0:
                break
        if value >= 0:
            return {"question": text, "answer": value}


_PLENTY = 10**9
"""Expressions that need not be counted further."""


@functools.cache
def _count_expressions(operations: int) -> int:
    """Of at most so many operations; no fewer than `_PLENTY` are not counted to the end."""
    total, values = 0, Counter(range(11, 100))
    for index in range(operations):
        after: Counter[int] = Counter()
        for value, number in values.items():
            for sign, y in itertools.product("+-*" if index == 0 else "+-", range(11, 100)):
                after[_apply(value, sign, y)] += number
        values = Counter({value: number for value, number in after.items() if value >= 0})
        total += values.total()
        if total >= _PLENTY:
            break
    return total


def _every_expression(operations: int) -> Iterator[Question]:
    def longer(text: str, value: int, index: int, count: int) -> Iterator[Question]:
        if index == count:
            yield {"question": text, "answer": value}
            return
        for sign, y in itertools.product("+-*" if index == 0 else "+-", range(11, 100)):
            if (after := _apply(value, sign, y)) >= 0:
                yield from longer(f"{text}{sign}{y}", after, index + 1, count)

    for count in range(1, operations + 1):
        for first in range(11, 100):
            yield from longer(str(first), first, 0, count)


def calculate(expression: str) -> str:
    """One operation on two numbers of at most five digits; at most six characters. Raises ToolError."""
    parts = re.fullmatch(r"(\d{1,5})([+\-*])(\d{1,5})", expression, re.ASCII)
    if not parts:
        raise ToolError("a call is one operation on two numbers")
    return str(_apply(int(parts[1]), parts[2], int(parts[3])))[:6]


async def _calculate_slowly(expression: str, context: ToolContext, *, latency_s: float) -> str:
    await _wait(latency_s, context)
    return calculate(expression)


def _score_answer(payload: Question, actions: Sequence[Action]) -> Score:
    right = actions[-1].text == f"<answer>{payload['answer']}</answer>"
    return Score({"answer": float(right)}, right)


@dataclass(frozen=True)
class Calculator:
    """The tiny model's calculator: `environments.calculator:Calculator`.

    One operation a call, reward 1 for the right answer, in the format of `policy.chat.TinyChat`. It was measured
    with `environment.max_turns = 4`.
    """

    latency_s: float = 0.02
    """Mean time the tool takes."""
    operations: int = 2
    """Most operations in a question."""
    seed: int = 0

    def __post_init__(self) -> None:
        _check_latency(self.latency_s)
        if self.operations < 1:
            raise ValueError(f"environment.options.operations must be at least 1, found {self.operations}")

    @property
    def tasks(self) -> Questions:
        return Questions(
            functools.partial(draw_expression, operations=self.operations),
            self.seed,
            functools.partial(_count_expressions, self.operations),
            functools.partial(_every_expression, self.operations),
        )

    def make(self) -> ToolEnvironment:
        slowly = functools.partial(_calculate_slowly, latency_s=self.latency_s)
        tool = Tool("calculator", "Applies one operation to two numbers.", _EXPRESSION, slowly, _PATIENCE_S)
        return ToolEnvironment((tool,), lambda payload: [Message("user", payload["question"])], _score_answer)


class Demonstration(NamedTuple):
    token_ids: list[int]
    loss_mask: list[bool]
    """True on what the demonstrator said."""
    reward: float


def demonstrate(
    rng: random.Random,
    good: float,
    *,
    good_answer: float | None = None,
    guess: float = 0.0,
    operations: int = 2,
    max_tokens: int = 64,
) -> Demonstration:
    """A demonstrator with bad habits works on a training question, in the tiny model's vocabulary.

    Each call is right with probability `good`, the final answer with `good_answer` (`good` if None). A call that is not
    right answers early (probability `guess`), or else uses the wrong sign, is malformed or takes a wrong operand.
    """
    chat = load_tiny_chat()
    question = draw_training(functools.partial(draw_expression, operations=operations), rng)
    first, *steps = re.findall(r"[+\-*]?\d+", question["question"])
    ids = chat.prompt([Message("user", question["question"])])
    mask = [False] * len(ids)
    current, done, reward = int(first), 0, 0.0
    for turn in range(_DEMONSTRATED_TURNS):
        if done < len(steps):
            said, done = _demonstrated_call(rng, current, steps[done], done, good, guess)
        else:
            right = rng.random() < (good if good_answer is None else good_answer)
            said = f"<answer>{current if right else steps[-1][1:]}</answer>"
        spoken = _tagged(chat, said)
        ids += spoken
        mask += [True] * len(spoken)
        action = chat.parse(spoken)
        if not action.tool_calls:
            reward = sum(_score_answer(question, [action]).reward_parts.values())
            break
        if turn + 1 == _DEMONSTRATED_TURNS:
            break
        try:
            result = calculate(said.removeprefix("<calc>").removesuffix("</calc>"))
            digits = result.removeprefix("-")
            current = int(digits)
        except ValueError:
            result = "error"
        seen = chat.continuation([Message("tool", result)])
        ids += seen
        mask += [False] * len(seen)
    return Demonstration(ids[:max_tokens], mask[:max_tokens], reward)


_DEMONSTRATED_TURNS = 4


def _demonstrated_call(
    rng: random.Random, current: int, step: str, done: int, good: float, guess: float
) -> tuple[str, int]:
    """What is said where `step` ("+58") comes next, and how many steps the demonstrator then believes done."""
    sign, y = step[0], step[1:]
    if rng.random() < good:
        return f"<calc>{current}{sign}{y}</calc>", done + 1
    if rng.random() < guess:
        return f"<answer>{current}</answer>", done
    habit = rng.randrange(1, 4)
    if habit == 1:
        return f"<calc>{current}{rng.choice([other for other in '+-*' if other != sign])}{y}</calc>", done + 1
    if habit == 2:
        return f"<calc>{current}{sign}</calc>", done
    return f"<calc>{y}{sign}{y}</calc>", done + 1


def _tagged(chat: TinyChat, text: str) -> list[int]:
    """Ids of text in which tags are tokens."""
    return [chat.ids[piece] for piece in re.findall(r"</?\w+>|.", text)]
