"""A program with a loop of its own: `environment.name = "agent_program:Agent"`."""

from pathlib import Path

from function_tool import calculator, right

from environments.programs import AgentProgram
from environments.tasks import task_file


async def solve(payload, chat):
    """Ask until the policy calls no tool any more; what is returned is the reward."""
    messages = [{"role": "user", "content": payload["question"]}]
    for _ in range(3):
        reply = await chat.create(messages, tools=[calculator])
        if not reply.tool_calls:
            return right(payload, reply.content)
        messages += [reply, *await chat.call_tools(reply)]
    return 0.0


def Agent(seed=0):
    tasks = task_file(Path(__file__).with_name("sums.jsonl"), seed=seed, key="question", held_out=0.2)
    return AgentProgram(solve, tasks)
