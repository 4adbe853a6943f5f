"""The built-in tools by name, and an environment of questions that are answered with them.

Invariant: a process makes what a tool needs (index, sandbox, processes) once, for all of its episodes; an episode has
counts of its own.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from environments.calculator import evaluate, show
from environments.environment import Action, Message, Prepared
from environments.http_tool import HttpSettings, HttpTool
from environments.python_tool import PythonSettings, PythonTool
from environments.search_tool import SearchSettings, SearchTool
from environments.sql_tool import SqlSettings, SqlTool
from environments.tasks import TaskFileError, TaskList, task_file
from environments.tools import Limits, Score, Tool, ToolEnvironment
from environments.turns import between_tags, opening
from environments.user_code import located


class ToolMaker(Protocol):
    def tool(self) -> Tool:
        """The tool of one episode."""
        ...

    def described(self) -> Tool:
        """The tool as the policy is shown it; starts nothing."""
        ...


class CalculatorTool:
    def __init__(self, limits: Limits) -> None:
        def calculator(expression: str) -> str:
            """Evaluates an expression of at most 30 characters: numbers, + - * / and parentheses."""
            return show(evaluate(expression))

        self._tool = Tool.of(calculator).limited(limits)

    def tool(self) -> Tool:
        return self._tool

    def described(self) -> Tool:
        return self._tool


_MAKERS: Mapping[str, tuple[type, type[Any]]] = {
    "calculator": (Limits, CalculatorTool),
    "python": (PythonSettings, PythonTool),
    "search": (SearchSettings, SearchTool),
    "sql": (SqlSettings, SqlTool),
    "http": (HttpSettings, HttpTool),
}
_FILES = {"search": "corpus", "sql": "database"}
"""Settings that name a file of the user's."""


class Toolset:
    """Built-in tools, each with its settings. Raises ValueError for names and settings that cannot be used."""

    def __init__(self, names: Sequence[str], settings: Mapping[str, Mapping[str, Any]]) -> None:
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise ValueError(f'tools must be a list of names, such as ["search", "sql"], found {names!r}')
        if unknown := [name for name in (*names, *settings) if name not in _MAKERS]:
            raise ValueError(f"there is no built-in tool {unknown[0]!r}; there are {', '.join(_MAKERS)}")
        if unused := [name for name in settings if name not in names]:
            raise ValueError(f"{unused[0]} has settings and is not among the tools: {', '.join(names) or 'none'}")
        self._makers: list[ToolMaker] = []
        for name in dict.fromkeys(names):
            kind, maker = _MAKERS[name]
            given = _checked(name, kind, settings.get(name, {}))
            if (file := _FILES.get(name)) in given:
                given[file] = located(given[file])
            self._makers.append(maker(kind(**given)))

    def prepare(self) -> None:
        """Make what takes time, once in each process; may block. Raises ValueError, StorageError and SandboxError."""
        for maker in self._makers:
            if isinstance(maker, Prepared):
                maker.prepare()

    def tools(self) -> list[Tool]:
        """For one episode."""
        return [maker.tool() for maker in self._makers]

    def schemas(self) -> list[Mapping[str, Any]]:
        """Of the tools, as the policy is shown them; starts nothing."""
        return [maker.described().schema for maker in self._makers]


def _checked(tool: str, kind: type, given: object) -> dict[str, Any]:
    """The settings of a tool as its dataclass takes them. Raises ValueError for an unknown one and a wrong type."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{tool} must be a table of settings, such as {{ timeout_s = 5.0 }}, found {given!r}")
    hints = typing.get_type_hints(kind)
    names = [one.name for one in dataclasses.fields(kind)]
    found = {}
    for name, value in given.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            mend = f"did you mean {near[0]}?" if near else f"its settings are {', '.join(names)}"
            raise ValueError(f"{tool} has no setting {name!r}; {mend}")
        if not _fits(value, hints[name]):
            raise ValueError(f"{tool}.{name} must be {_wanted(hints[name])}, found {value!r}")
        found[name] = tuple(value) if isinstance(value, list) else value
    return found


def _fits(value: object, hint: Any) -> bool:
    """Whether a value of a run file is of a setting's type. What an enum allows is its dataclass's business."""
    if typing.get_origin(hint) is tuple:
        return isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
    if hint is bool or isinstance(value, bool):
        return hint is bool and isinstance(value, bool)
    return isinstance(value, int | float if hint is float else int if hint is int else str)


def _wanted(hint: Any) -> str:
    words = {bool: "true or false", int: "a whole number", float: "a number"}
    return "a list of texts" if typing.get_origin(hint) is tuple else words.get(hint, "a text")


class ToolQuestions:
    """Questions from a file, answered with built-in tools: `environments.builtin:ToolQuestions`.

    `questions` is a JSON Lines file of objects with `question` and `answer`, read and split by `task_file`. An episode
    ends at the first turn without a call; its reward is 1 if the turn's last <answer>…</answer> is the answer, apart
    from case and white space. Files are looked for in `code.path`'s folder, then from the current one on.
    """

    def __init__(
        self,
        questions: str,
        tools: Sequence[str],
        system: str = "Use the tools. Give the final answer as <answer>...</answer>.",
        seed: int = 0,
        held_out: float = 0.1,
        held_out_file: str = "",
        calculator: Mapping[str, Any] | None = None,
        python: Mapping[str, Any] | None = None,
        search: Mapping[str, Any] | None = None,
        sql: Mapping[str, Any] | None = None,
        http: Mapping[str, Any] | None = None,
    ) -> None:
        texts = {"questions": questions, "held_out_file": held_out_file, "system": system}
        for name, option in texts.items():
            if not isinstance(option, str):
                raise ValueError(f"{name} must be a text, found {option!r}")
        if not _fits(held_out, float):
            raise ValueError(f"held_out must be a number, found {held_out!r}")
        given = {"calculator": calculator, "python": python, "search": search, "sql": sql, "http": http}
        self._toolset = Toolset(tools, {name: value for name, value in given.items() if value is not None})
        self._system = system
        apart = located(held_out_file) if held_out_file else ""
        self.tasks = task_file(located(questions), seed=seed, key="question", held_out=held_out, held_out_file=apart)
        _check_questions(self.tasks)

    def prepare(self) -> None:
        self._toolset.prepare()

    def first_prompt(self, payload: Mapping[str, Any]) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]]]:
        """See `environments.environment.Shown`."""
        return self._prompt(payload), self._toolset.schemas()

    def make(self) -> ToolEnvironment:
        return ToolEnvironment(self._toolset.tools(), self._prompt, score_answer)

    def _prompt(self, payload: Mapping[str, Any]) -> list[Message]:
        return opening(self._system, payload["question"])


def _check_questions(tasks: TaskList) -> None:
    """Raises TaskFileError with the place of the first that cannot be asked, or never be right."""
    tasks.require(("question", "answer"))
    for place, payload in zip(tasks.places, (*tasks.training, *tasks.held_out), strict=True):
        question, answer = payload["question"], payload["answer"]
        if not (isinstance(question, str) and question.strip()):
            raise TaskFileError(f"{place}: question must be a text, found {question!r:.60}")
        if not isinstance(answer, str | int | float):
            raise TaskFileError(f"{place}: answer must be a text, a number, true or false, found {answer!r:.60}")


def score_answer(payload: Mapping[str, Any], actions: Sequence[Action]) -> Score:
    """1 if the last turn's last answer is the payload's."""
    found = between_tags(actions[-1].text, "answer")
    right = found is not None and _plain(found) == _plain(str(payload["answer"]))
    return Score({"answer": float(right)}, right)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
