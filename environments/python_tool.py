"""The tool with which the policy runs Python.

Invariant: what the code does is the policy's doing. Its errors, and that it was stopped at a limit, are observations;
only a sandbox that could not run it is the tool's fault.
"""

from __future__ import annotations

from dataclasses import dataclass

from environments.sandbox.client import Execution, ExecutionStatus, Interpreter, Sandbox, SandboxSettings
from environments.tools import Tool, ToolContext, ToolError

_PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "Python source"}},
    "required": ["code"],
}
_DESCRIPTIONS = {
    Interpreter.RESTRICTED: "Runs Python and answers with what it prints and the value of its last line. "
    "No files, no network, few modules; nothing is kept between calls.",
    Interpreter.CPYTHON: "Runs Python and answers with what it prints and the value of its last line. "
    "No network, no processes or threads; nothing is kept between calls.",
}


@dataclass(frozen=True)
class PythonSettings(SandboxSettings):
    """The sandbox's limits, and those of an episode."""

    calls_per_episode: int = 16
    """Most calls in one episode; more are refused."""
    queue_s: float = 30.0
    """Most seconds that a call waits for a slot before it is given up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.calls_per_episode < 1:
            raise ValueError(f"python.calls_per_episode must be at least 1, found {self.calls_per_episode}")
        if not 0 < self.queue_s <= 3600:
            raise ValueError(f"python.queue_s must be more than 0 and at most 3600 seconds, found {self.queue_s}")


class PythonTool:
    """Makes the tool for each episode; all of them share one sandbox."""

    def __init__(self, settings: PythonSettings | None = None) -> None:
        self.settings = settings or PythonSettings()
        self.sandbox = Sandbox(self.settings)

    def prepare(self) -> None:
        """Start the sandbox, once in each process; blocks for some tenths of a second. Raises SandboxError if it must
        not start here."""
        self.sandbox.start()

    def tool(self) -> Tool:
        """For one episode: it counts its calls. Without `prepare`, the first starts the sandbox, and raises what that
        does, so that the episode fails before the policy has said anything."""
        self.prepare()
        return self.described().for_episode()

    def described(self) -> Tool:
        """The tool as the policy is shown it; starts nothing."""
        settings = self.settings

        async def python(code: str, context: ToolContext) -> str:
            return shown(await self.sandbox.run(code, seed=context.seed))

        return Tool(
            name="python",
            description=_DESCRIPTIONS[settings.interpreter],
            parameters=_PARAMETERS,
            function=python,
            timeout_s=settings.queue_s + settings.timeout_s,
            max_output=settings.output_bytes,
            max_calls=settings.calls_per_episode,
        )


def shown(execution: Execution) -> str:
    """What the policy reads of a call. Raises ToolError if the call was stopped."""
    if execution.status in (ExecutionStatus.COMPLETED, ExecutionStatus.EXCEPTION):
        parts = (execution.output.removesuffix("\n"), execution.result, execution.error)
        return "\n".join(part for part in parts if part) or "(no output)"
    printed = f"; it had printed:\n{execution.output}" if execution.output else ""
    raise ToolError(execution.error + printed)
