"""The tiny calculator with a tool that misbehaves for some members of every group; found by code.path."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from environments.calculator import Calculator, calculate
from environments.environment import Message
from environments.tools import Score, Tool, ToolContext, ToolEnvironment


async def calculate_badly(expression: str, context: ToolContext) -> str | bytes:
    """Sample 0 raises, 1 hangs, 2 answers a megabyte, 3 bytes that are no text; the others calculate."""
    match int(context.episode_id.rpartition("/")[2]):
        case 0:
            raise RuntimeError("the calculator is on fire")
        case 1:
            await asyncio.sleep(3600)
        case 2:
            return "9" * 1_000_000
        case 3:
            return b"\xff\xfe\xfa"
    return calculate(expression)


@dataclass(frozen=True)
class FaultyCalculator(Calculator):
    def make(self) -> ToolEnvironment:
        schema = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
        tool = Tool("calculator", "Fails in many ways.", schema, calculate_badly, timeout_s=3600)

        def score(payload, actions):
            right = actions[-1].text == f"<answer>{payload['answer']}</answer>"
            return Score({"answer": float(right)}, right)

        return ToolEnvironment((tool,), lambda payload: [Message("user", payload["question"])], score)
