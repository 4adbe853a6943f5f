"""A tool to answer with: `environment.name = "function_tool:Sums"`."""

import re
from pathlib import Path

from environments.tasks import task_file
from environments.tools import ToolError, tool
from environments.verifiable import Verifiable


@tool(timeout_s=5.0)
def calculator(expression: str) -> str:
    """Applies one operation to two numbers.

    Args:
        expression: Such as 12+34. The operation is +, - or *.
    """
    parts = re.fullmatch(r"(\d{1,5})([-+*])(\d{1,5})", expression)
    if not parts:
        raise ToolError("an expression is one operation on two numbers")
    a, b = int(parts[1]), int(parts[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[parts[2]])


def right(payload, answer):
    return float(answer == f"<answer>{payload['answer']}</answer>")


def Sums(seed=0):
    tasks = task_file(Path(__file__).with_name("sums.jsonl"), seed=seed, key="question", held_out=0.2)
    return Verifiable(tasks, right, tools=[calculator])
