"""Agent programs: their calls are one token sequence, their ends are rewards, and they hurt nobody when they fail."""

import asyncio
import contextlib
import re

import numpy as np
import pytest

from environments.environment import EnvironmentSettings, Message
from environments.orchestrator import RolloutOrchestrator
from environments.programs import AgentProgram
from environments.tasks import task_list
from environments.tools import tool
from policy.chat import load_chat
from policy.client import Completion, FinishReason, SamplingParams
from trajectories.schema import Status, Task, Version, VersionSpan

TASKS = task_list([{"question": f"{n}+{n}"} for n in range(1, 60)])


@tool
def calculator(expression: str) -> str:
    """Adds two numbers."""
    return str(sum(map(int, expression.split("+"))))


def ask(text):
    return {"role": "user", "content": text}


def episode(play, kit, program, *lines, **settings):
    """The episode, and what the policy was asked."""
    client = kit.Speaker(lambda session, turn: lines[turn] if turn < len(lines) else "<answer>0</answer>")
    orchestrator = play(client, AgentProgram(program, TASKS), **settings)
    found = asyncio.run(orchestrator.run(Task("run", 0, payload={"question": "4+4"}), 0))
    assert orchestrator.gauges.abandoned == 0
    assert client.closed == ["0.0/0"]
    return found, client


async def with_a_tool(payload, chat):
    messages = [ask(payload["question"])]
    while True:
        reply = await chat.create(messages, tools=[calculator])
        messages.append(reply)
        if not reply.tool_calls:
            chat.metrics["turns"] = len(messages)
            return {"answer": float(reply.content == "<answer>8</answer>")}
        messages += await chat.call_tools(reply)


def test_the_calls_of_a_program_are_one_sequence_of_the_very_tokens_that_were_sampled(play, kit):
    first = kit.completion("<calc>4+4</calc>", spans=((0, Version(1, 1)), (3, Version(2, 1))))
    found, client = episode(play, kit, with_a_tool, first, "<answer>8</answer>")
    assert (found.status, found.reward, found.reward_parts, found.success) == (
        Status.COMPLETED,
        1.0,
        {"answer": 1.0},
        True,
    )
    assert kit.CHAT.decode(found.tokens_T) == "<q>4+4</q><calc>4+4</calc><result>8</result><answer>8</answer>"
    assert client.requests[1].ids == found.tokens_T[: found.turns[1].start].tolist()
    sampled = [*first.token_ids_N, *kit.ids_of("<answer>8</answer>")]
    assert found.tokens_T[found.loss_mask_T].tolist() == sampled
    assert found.logprobs_T[found.turns[0].start : found.turns[0].end].tolist() == first.logprobs_N.tolist()
    start = found.turns[0].start
    assert [(s.first_token, s.version) for s in found.version_spans] == [
        (start, Version(1, 1)),
        (start + 3, Version(2, 1)),
        (found.turns[1].start, Version(0, 1)),
    ]
    assert found.metrics == {"tool_calls": 1, "turns": 4}


def test_messages_may_be_what_openai_programs_send(play, kit):
    async def program(payload, chat):
        messages = [{"role": "user", "content": [{"type": "text", "text": payload["question"]}]}]
        reply = await chat.create(messages, tools=[calculator.schema])
        call = reply.tool_calls[0]
        function = {"name": call.name, "arguments": '{"expression": "4+4"}'}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [{"id": call.id, "function": function}]},
            {"role": "tool", "tool_call_id": call.id, "content": "8"},
        ]
        return float((await chat.create(messages)).finish_reason == "stop")

    found, _ = episode(play, kit, program, "<calc>4+4</calc>", "<answer>8</answer>")
    assert (found.status, found.reward, found.error) == (Status.COMPLETED, 1.0, "")
    assert kit.CHAT.decode(found.tokens_T) == "<q>4+4</q><calc>4+4</calc><result>8</result><answer>8</answer>"


async def forgets(payload, chat):
    reply = await chat.create([ask("1+1"), ask("2+2")])
    await chat.create([ask("1+1"), reply, ask("3+3")])


async def edits(payload, chat):
    await chat.create([ask("1+1")])
    await chat.create([ask("1+1"), {"role": "assistant", "content": "<answer>7</answer>"}, ask("2+2")])


async def asks_again(payload, chat):
    await chat.create([ask("1+1")])
    await chat.create([ask("1+1")])


async def adds_nothing(payload, chat):
    await chat.create([ask("1+1"), await chat.create([ask("1+1")])])


async def asks_twice_at_once(payload, chat):
    await asyncio.gather(chat.create([ask("1+1")]), chat.create([ask("2+2")]))


async def gives_up(payload, chat):
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(chat.create([ask("1+1")]), 0.01)
    await chat.create([ask("1+1")])


async def changes_tools(payload, chat):
    reply = await chat.create([ask("1+1")])
    await chat.create([ask("1+1"), reply, ask("2+2")], tools=[calculator])


async def never_asks(payload, chat):
    return 1.0


async def asks_nothing(payload, chat):
    await chat.create([])


async def raises(payload, chat):
    await chat.create([ask("1+1")])
    raise KeyError("solution")


async def leaves(payload, chat):
    await chat.create([ask("1+1")])
    raise SystemExit(3)


async def cancels_itself(payload, chat):
    await chat.create([ask("1+1")])
    raise asyncio.CancelledError


async def returns_nothing(payload, chat):
    await chat.create([ask("1+1")])


async def shows_a_picture(payload, chat):
    await chat.create([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}])


async def says_a_bare_text(payload, chat):
    await chat.create("1+1")


async def has_a_schema_called(payload, chat):
    await chat.call_tools(await chat.create([ask("1+1")], tools=[calculator.schema]))


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (says_a_bare_text, r"messages\[0\] must be a dict, a Message or a Reply, found '1'"),
        (has_a_schema_called, "given no function for calculator, only a schema"),
        (forgets, r"messages\[1\] must still be user '2\+2', found assistant '<answer>2</answer>'"),
        (edits, r"messages\[1\] must still be assistant '<answer>2</answer>', found assistant '<answer>7</answer>'"),
        (asks_again, r"messages\[1\] must still be assistant '<answer>2</answer>', found nothing"),
        (adds_nothing, "must end with what the policy is to answer, found its own reply"),
        (asks_twice_at_once, "while another call waits: an episode is one conversation"),
        (gives_up, "while another call was given up"),
        (changes_tools, r"the tools must be those of the first call \(none\), found calculator"),
        (never_asks, r"ended without a call of chat\.create; it returned 1\.0"),
        (asks_nothing, "messages must not be empty"),
        (raises, "KeyError: 'solution'"),
        (leaves, r"it called exit\(3\)"),
        (cancels_itself, "the program cancelled itself"),
        (returns_nothing, "a reward must be a number, a mapping .* found None"),
        (shows_a_picture, r"messages\[0\] must have text as its content"),
    ],
)
def test_a_program_that_fails_is_a_failed_episode_that_says_why(play, kit, program, says):
    says_what = "<calc>1+1</calc>" if program is has_a_schema_called else "<answer>2</answer>"
    client = kit.Speaker(lambda session, turn: says_what, delay_s=0.05 if program is gives_up else 0.0)
    orchestrator = play(client, AgentProgram(program, TASKS))
    found = asyncio.run(orchestrator.run(Task("run", 0, payload={"question": "1+1"}), 0))
    assert (found.status, found.reward) == (Status.ENVIRONMENT_ERROR, 0.0)
    assert re.search(says, found.error), found.error


def test_limits_end_a_program_and_its_clean_up_runs(play, kit):
    cleaned = []

    async def hangs(payload, chat):
        try:
            await chat.create([ask("1+1")])
            await asyncio.sleep(60)
        finally:
            cleaned.append("hangs")

    found, _ = episode(play, kit, hangs, "<answer>2</answer>", step_timeout_s=0.1)
    assert (found.status, cleaned) == (Status.TIMEOUT, ["hangs"])

    async def goes_on(payload, chat):
        messages = [ask("1+1")]
        try:
            while True:
                messages += [await chat.create(messages), ask("2+2")]
        finally:
            cleaned.append("goes_on")

    found, client = episode(play, kit, goes_on, max_turns=3)
    assert (found.status, len(client.requests), cleaned[-1]) == (Status.MAX_TURNS, 3, "goes_on")
    cut = kit.completion("<answer>2", reason=FinishReason.LENGTH)
    found, client = episode(play, kit, goes_on, cut)
    assert (found.status, len(client.requests), found.reward) == (Status.MAX_TOKENS, 1, 0.0)

    async def takes_what_it_gets(payload, chat):
        return 0.25 * ((await chat.create([ask("1+1")])).finish_reason == "length")

    found, _ = episode(play, kit, takes_what_it_gets, cut)
    assert (found.status, found.reward) == (Status.MAX_TOKENS, 0.25)


def test_a_program_whose_clean_up_fails_or_that_does_not_end_is_counted_and_its_place_is_free(play, kit):
    over = asyncio.Event()

    async def cleans_up_badly(payload, chat):
        try:
            await chat.create([ask("1+1")])
            await asyncio.sleep(60)
        finally:
            raise OSError("the simulator is gone")

    async def is_deaf(payload, chat):
        await chat.create([ask("1+1")])
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue

    client = kit.Speaker(lambda session, turn: "<answer>2</answer>")
    limits = {"step_timeout_s": 0.1, "close_timeout_s": 0.1, "max_concurrency": 1}

    async def main():
        found = []
        for program in (cleans_up_badly, is_deaf):
            orchestrator = play(client, AgentProgram(program, TASKS), **limits)
            found += [(await orchestrator.run(Task("run", 0, payload={}), 0), orchestrator.gauges)]
        over.set()
        await asyncio.sleep(0.05)
        return found

    for episode, gauges in asyncio.run(main()):
        assert (episode.status, episode.metrics["close_errors"]) == (Status.TIMEOUT, 1)
        assert (gauges.running, gauges.finished) == (0, 1)
    assert gauges.abandoned == 1


def test_only_an_async_function_is_a_program():
    with pytest.raises(TypeError, match="must be `async def program"):
        AgentProgram(lambda payload, chat: 1.0, TASKS)


def test_a_real_chat_template_goes_on_where_the_sampled_ids_end(kit):
    chat = load_chat("smollm2-135m")
    eos = chat.stop_token_ids[0]
    said = [[*chat.encode("I  know ."), eos], [*chat.encode("8"), eos]]

    def say(session, turn):
        ids = np.array(said[turn], np.int32)
        return Completion(ids, np.zeros(len(ids), np.float32), (VersionSpan(0, Version(0, 1)),), FinishReason.STOP)

    async def program(payload, talk):
        messages = [{"role": "system", "content": "Be brief."}, ask("What?")]
        messages += [await talk.create(messages), ask("So?")]
        assert messages[2].content == "I  know ."
        return float((await talk.create(messages)).content == "8")

    client = kit.Speaker(say, max_context=512)
    spec = AgentProgram(program, TASKS)
    orchestrator = RolloutOrchestrator(client, chat, spec, EnvironmentSettings(), SamplingParams(), 7)
    found = asyncio.run(orchestrator.run(Task("run", 0, payload={}), 0))
    assert (found.reward, found.error) == (1.0, "")
    first, second = (request.ids for request in client.requests)
    between = chat.continuation([Message("user", "So?")], sampled=said[0])
    assert second == first + said[0] + between


def test_a_program_that_asks_again_whatever_is_raised_holds_nobody_up(play, kit):
    """Its second question is refused for ever: a call goes on from the calls before it."""

    async def stubborn(payload, chat):
        while True:
            with contextlib.suppress(Exception):
                await chat.create([{"role": "user", "content": "1+1"}])

    orchestrator = play(kit.Speaker(lambda *_: "<answer>2</answer>"), AgentProgram(stubborn, TASKS), step_timeout_s=0.3)
    episode = asyncio.run(orchestrator.run(Task("run", 0, payload={}), 0))
    assert episode.status is Status.TIMEOUT
    assert orchestrator.gauges.abandoned == 0
