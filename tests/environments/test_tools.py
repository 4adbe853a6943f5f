"""Tools answer with a bounded, valid observation whatever they do."""

import asyncio
import threading
import time
from typing import Any, Literal

import pytest

from environments.environment import Action, Message
from environments.libraries import Threaded
from environments.tools import (
    BlockingCalls,
    Limits,
    Score,
    Tool,
    ToolContext,
    ToolEnvironment,
    ToolError,
    ToolResult,
    blocking_calls,
    bounded_text,
    mismatch,
    within,
)
from policy.chat import FinishReason, ToolCall


def run(tool, **arguments):
    return asyncio.run(tool.run(arguments))


def test_a_typed_function_becomes_a_tool():
    async def search(query: str, limit: int = 3, order: Literal["new", "old"] = "new", tags: list[str] | None = None):
        """Search the corpus."""
        return {"query": query, "limit": limit}

    tool = Tool.of(search)
    assert tool.schema["function"]["description"] == "Search the corpus."
    assert tool.parameters["required"] == ["query"]
    assert tool.parameters["properties"]["order"]["enum"] == ["new", "old"]
    assert run(tool, query="x", tags=["a"]).text == '{"query": "x", "limit": 3}'
    for wrong in ({}, {"query": 1}, {"query": "x", "limit": True}, {"query": "x", "tags": [1]}, {"query": "x", "z": 1}):
        result = run(tool, **wrong)
        assert result.text.startswith("error: search: arguments")
        assert result.counts == {"malformed_calls": 1}


def test_a_parameter_that_json_cannot_carry_is_refused():
    def bad(when: time.struct_time):
        """."""

    with pytest.raises(TypeError, match="parameter when"):
        Tool.of(bad)


def test_blocking_tools_run_beside_the_loop_and_know_their_episode():
    def slow(x: int, context: ToolContext) -> str:
        time.sleep(0.05)
        return f"{context.episode_id}:{x}"

    async def two():
        tool, calls = Tool.of(slow), BlockingCalls(4)
        assert "context" not in tool.parameters["properties"]
        ticks, work = 0, asyncio.gather(calls.run(lambda: slow(1, ToolContext("a"))), tool.run({"x": 2}))
        while not work.done():
            ticks += 1
            await asyncio.sleep(0.005)
        return await work, ticks

    (first, second), ticks = asyncio.run(two())
    assert (first, second.text) == ("a:1", ":2")
    assert ticks > 1


class Nameless(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def _raiser(error):
    def tool():
        raise error

    async def async_tool():
        raise error

    return [tool, async_tool]


@pytest.mark.parametrize(
    "function",
    [
        f
        for e in (ValueError("no"), SystemExit(3), StopIteration(), Nameless(), asyncio.CancelledError())
        for f in _raiser(e)
    ],
)
def test_a_tool_that_raises_is_an_observation(function):
    result = run(Tool("t", "", {"type": "object"}, function))
    assert result.text.startswith("error: ")
    assert result.counts == {"tool_calls": 1, "tool_errors": 1}


def test_what_a_tool_raises_is_logged_once_with_its_line(caplog):
    def lookup(key: str) -> str:
        """Looks up."""
        raise KeyError(key)

    for key in ("a", "b"):
        run(Tool.of(lookup), key=key)
    (record,) = caplog.records
    line = lookup.__code__.co_firstlineno + 2
    assert f"tool lookup raised KeyError (test_tools.py, line {line})" in record.getMessage()
    assert "raise KeyError(key)" in caplog.text


def test_what_a_tool_refuses_is_told_to_the_policy_and_is_no_fault():
    def tool():
        raise ToolError("ask for something else")

    result = run(Tool("t", "", {"type": "object"}, tool))
    assert result == ToolResult("error: ask for something else", {"tool_calls": 1, "refused_calls": 1})


async def _deaf():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if asyncio.get_running_loop().time() > _deaf.until:
                raise


@pytest.mark.parametrize("function", [lambda: time.sleep(30), lambda: asyncio.sleep(30), _deaf])
def test_a_tool_that_hangs_is_an_observation_and_holds_nothing_back(function):
    async def call():
        _deaf.until = asyncio.get_running_loop().time() + 0.5
        result = await Tool("t", "", {"type": "object"}, function, timeout_s=0.1).run({})
        await asyncio.sleep(0.6)  # so that the deaf one may end with the loop
        return result

    result = asyncio.run(call())
    assert result.text == "error: t did not answer within 0.1 s"
    assert result.counts == {"tool_calls": 1, "tool_errors": 1, "tool_timeouts": 1}


def test_a_megabyte_is_cut_and_bytes_that_are_no_text_are_mended():
    big = run(Tool("t", "", {"type": "object"}, lambda: "x" * 1_000_000, max_output=100))
    assert big.text == "x" * 100 + " [999900 more characters were cut]"
    assert big.counts == {"tool_calls": 1, "cut_outputs": 1}
    for output in (b"ok \xff\xfe", "ok \ud800"):
        mended = run(Tool("t", "", {"type": "object"}, lambda output=output: output))
        assert mended.text.encode().decode().startswith("ok \ufffd")
        assert mended.counts == {"tool_calls": 1, "invalid_outputs": 1}
    assert bounded_text("\ud800x\ud800\ud83d\ude00\ud800", 6)[0] == "\ufffdx\ufffd\U0001f600\ufffd"
    loop: list[Any] = []
    loop.append(loop)
    assert run(Tool("t", "", {"type": "object"}, lambda: loop)).failed
    assert bounded_text({"a": object}, 100)[0].startswith('{"a":')


def test_hung_threads_give_their_place_back_and_are_bounded():
    async def main():
        calls = BlockingCalls(limit=1, max_abandoned=2)
        for _ in range(2):
            with pytest.raises(Exception, match="time limit"):
                await within(0.02, calls.run(lambda: time.sleep(1)))
        assert calls.abandoned == 2
        with pytest.raises(RuntimeError, match="hang"):
            await calls.run(lambda: 1)
        await asyncio.sleep(1.2)
        assert calls.abandoned == 0
        assert await calls.run(lambda: 1) == 1

    asyncio.run(main())


def test_cancelling_the_caller_cancels_the_work():
    async def main():
        ended = asyncio.Event()

        async def work():
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

        task = asyncio.create_task(within(60, work()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(ended.wait(), 1)

    asyncio.run(main())


def test_mismatch_knows_nested_schemas():
    schema = {"type": "object", "properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}}
    assert mismatch({"a": None}, schema) == ""
    assert "integer" in mismatch({"a": "x"}, schema)


def test_tool_environment_answers_every_call_and_scores_the_end():
    async def double(x: int) -> int:
        """Twice x."""
        return 2 * x

    def score(payload, actions):
        return Score({"right": float(actions[-1].text == payload["answer"]), "turns": -0.1 * len(actions)}, True)

    async def episode():
        environment = ToolEnvironment([Tool.of(double)], lambda payload: [Message("user", payload["q"])], score)
        assert await environment.reset({"q": "?", "answer": "8"}, episode_id="0.0/0", seed=1) == [Message("user", "?")]
        calls = (ToolCall("double", {"x": 4}), ToolCall("triple", {}), ToolCall("", None, "no JSON"))
        first = await environment.step(Action("", calls))
        last = await environment.step(Action("8", calls, FinishReason.LENGTH))  # a turn that was cut calls nothing
        await environment.close()
        return first, last

    first, last = asyncio.run(episode())
    assert [m.content.split(";")[0] for m in first.messages] == [
        "8",
        "error: there is no tool 'triple'",
        "error: no JSON",
    ]
    assert not first.done
    assert first.metrics == {"tool_calls": 1, "malformed_calls": 1}
    assert last.done
    assert last.reward == pytest.approx(0.8)


def test_calls_beyond_the_limit_are_observations_and_counted_for_each_episode():
    def echo(x: int) -> int:
        return x

    tool = Tool.of(echo).limited(Limits(calls_per_episode=2))

    async def episode():
        environment = ToolEnvironment([tool], lambda payload: [Message("user", "?")], lambda payload, actions: None)
        await environment.reset({}, episode_id="1.0/0", seed=0)
        calls = [ToolCall("echo", {"x": x}) for x in ("no number", 1, 2, 3)]
        return await environment.step(Action("", tuple(calls), FinishReason.STOP))

    for _ in range(2):
        result = asyncio.run(episode())
        assert [message.content for message in result.messages[1:]] == [
            "1",
            "2",
            "error: echo may be called 2 times in an episode",
        ]
        assert result.metrics == {"malformed_calls": 1, "tool_calls": 3, "refused_calls": 1, "calls_over_limit": 1}


def test_limits_say_what_they_must_be():
    with pytest.raises(ValueError, match="timeout_s must be more than 0 and at most 3600 seconds, found 0"):
        Limits(timeout_s=0)


def test_a_blocking_call_that_ends_as_it_is_given_up_is_not_counted_as_hung_for_ever():
    calls, release = BlockingCalls(1), threading.Event()

    async def main():
        task = asyncio.create_task(calls.run(release.wait))
        while len(threads := [one for one in threading.enumerate() if one.name == "blocking-tool"]) < 1:
            await asyncio.sleep(0.01)
        release.set()
        for thread in threads:
            thread.join()  # the news of its end waits for the event loop, which is busy here
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert calls.abandoned == 0


def test_an_object_of_a_library_is_free_again_when_a_call_that_was_given_up_ends_or_never_began():
    release = threading.Event()

    async def main():
        blocking_calls.set(BlockingCalls(1))
        hog, waits = Threaded(), Threaded()
        hanging = asyncio.create_task(hog.call(release.wait))
        waiting = asyncio.create_task(waits.call(lambda: "never made"))
        await asyncio.sleep(0.05)
        for task in (hanging, waiting):
            task.cancel()
        await asyncio.wait((hanging, waiting))
        with pytest.raises(RuntimeError, match="an earlier call hangs"):
            await hog.call(lambda: "closed")
        freed = [await waits.call(lambda: "closed")]
        release.set()
        while hog._used.locked():
            await asyncio.sleep(0.01)
        return [*freed, await hog.call(lambda: "closed")]

    assert asyncio.run(main()) == ["closed", "closed"]
