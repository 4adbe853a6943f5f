"""The built-in tools by name, and an environment of questions that are answered with them.

Invariant: a process makes what a tool needs (index, sandbox, processes) once, for all of its episodes; an episode has
counts of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from environments.calculator import evaluate, show
from environments.environment import Action, Message
from environments.http_tool import HttpSettings, HttpTool
from environments.python_tool import PythonSettings, PythonTool
from environments.search_tool import SearchSettings, SearchTool
from environments.sql_tool import SqlSettings, SqlTool
from environments.tasks import task_file
from environments.tools import Limits, Score, Tool, ToolEnvironment
from environments.turns import between_tags, opening


class ToolMaker(Protocol):
    def tool(self) -> Tool:
        """The tool of one episode."""
        ...


class CalculatorTool:
    def __init__(self, limits: Limits) -> None:
        def calculator(expression: str) -> str:
            """Evaluates an expression of at most 30 characters: numbers, + - * / and parentheses."""
            return show(evaluate(expression))

        self._tool = Tool.of(calculator).limited(limits)

    def tool(self) -> Tool:
        return self._tool


_MAKERS: Mapping[str, tuple[type, type[Any]]] = {
    "calculator": (Limits, CalculatorTool),
    "python": (PythonSettings, PythonTool),
    "search": (SearchSettings, SearchTool),
    "sql": (SqlSettings, SqlTool),
    "http": (HttpSettings, HttpTool),
}


class Toolset:
    """Built-in tools, each with its settings. Raises ValueError for names and settings that cannot be used."""

    def __init__(self, names: Sequence[str], settings: Mapping[str, Mapping[str, Any]]) -> None:
        if unknown := [name for name in (*names, *settings) if name not in _MAKERS]:
            raise ValueError(f"there is no built-in tool {unknown[0]!r}; there are {', '.join(_MAKERS)}")
        if unused := [name for name in settings if name not in names]:
            raise ValueError(f"{unused[0]} has settings and is not among the tools {', '.join(names)}")
        self._makers: list[ToolMaker] = []
        for name in dict.fromkeys(names):
            kind, maker = _MAKERS[name]
            of_name = settings.get(name, {}).items()
            given = {key: tuple(value) if isinstance(value, list) else value for key, value in of_name}
            try:
                self._makers.append(maker(kind(**given)))
            except TypeError as error:
                raise ValueError(f"{name}: {error}") from error

    def prepare(self) -> None:
        """Make what takes time, once in each process; may block. Raises ValueError and StorageError."""
        for maker in self._makers:
            if isinstance(maker, SearchTool | SqlTool):
                maker.prepare()

    def tools(self) -> list[Tool]:
        """For one episode."""
        return [maker.tool() for maker in self._makers]


class ToolQuestions:
    """Questions from a file, answered with built-in tools: `environments.builtin:ToolQuestions`.

    `questions` is a JSON Lines file of objects with `question` and `answer`, read and split by `task_file`. An episode
    ends at the first turn without a call; its reward is 1 if the turn's last <answer>…</answer> is the answer, apart
    from case and white space.
    """

    def __init__(
        self,
        questions: str,
        tools: Sequence[str],
        system: str = "Use the tools. Give the final answer as <answer>...</answer>.",
        seed: int = 0,
        calculator: Mapping[str, Any] | None = None,
        python: Mapping[str, Any] | None = None,
        search: Mapping[str, Any] | None = None,
        sql: Mapping[str, Any] | None = None,
        http: Mapping[str, Any] | None = None,
    ) -> None:
        given = {"calculator": calculator, "python": python, "search": search, "sql": sql, "http": http}
        self._toolset = Toolset(tools, {name: value for name, value in given.items() if value is not None})
        self._system = system
        self.tasks = task_file(questions, seed=seed, key="question")
        self.tasks.require(("question", "answer"))

    def prepare(self) -> None:
        self._toolset.prepare()

    def make(self) -> ToolEnvironment:
        return ToolEnvironment(self._toolset.tools(), self._prompt, score_answer)

    def _prompt(self, payload: Mapping[str, Any]) -> list[Message]:
        return opening(self._system, payload["question"])


def score_answer(payload: Mapping[str, Any], actions: Sequence[Action]) -> Score:
    """1 if the last turn's last answer is the payload's."""
    found = between_tags(actions[-1].text, "answer")
    right = found is not None and _plain(found) == _plain(str(payload["answer"]))
    return Score({"answer": float(right)}, right)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
