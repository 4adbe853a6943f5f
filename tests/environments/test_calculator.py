"""The two calculators keep the rules that the measured figures rest on."""

import asyncio
import json
import random

import numpy as np
import pytest

from environments.calculator import (
    Calculator,
    WordCalculator,
    calculate,
    demonstrate,
    evaluate,
    held_out,
    is_right_call,
    show,
)
from environments.environment import Action
from policy.chat import load_chat, parse_hermes
from policy.client import FinishReason


@pytest.mark.parametrize(("spec", "count"), [(WordCalculator(), 128), (Calculator(), 512)])
def test_no_training_question_of_any_seed_is_held_out(spec, count):
    held = [task["question"] for task in spec.tasks.eval_tasks(count)]
    assert len(set(held)) == count
    assert all(map(held_out, held))
    assert held[:16] == [task["question"] for task in type(spec)(seed=5).tasks.eval_tasks(16)]
    trained = {type(spec)(seed=seed).tasks.task(group)["question"] for seed in range(3) for group in range(400)}
    assert not any(map(held_out, trained))
    assert len(trained) > 1000
    assert spec.tasks.task(7) == type(spec)().tasks.task(7) != type(spec)(seed=1).tasks.task(7)
    assert json.loads(json.dumps(spec.tasks.task(7))) == spec.tasks.task(7)


@pytest.mark.parametrize(
    ("spec", "count", "there_are"),
    [
        (Calculator(operations=1), 1952, "1951"),
        (Calculator(operations=1), 100_000, "1951"),
        (Calculator(), 900_000, "about 325000"),
        (WordCalculator(), 10**9, "about 247000"),
    ],
)
def test_asking_for_more_held_out_questions_than_exist_says_how_many_there_are(spec, count, there_are):
    with pytest.raises(ValueError, match=f"there are {there_are} held-out questions, asked for {count}"):
        spec.tasks.eval_tasks(count)


def test_every_held_out_question_may_be_asked_and_the_first_stay_the_first():
    tasks = Calculator(operations=1).tasks
    questions = [task["question"] for task in tasks.eval_tasks(1951)]
    assert len(set(questions)) == 1951
    assert all(map(held_out, questions))
    assert [task["question"] for task in tasks.eval_tasks(1900)] == questions[:1900]
    # A figure of another day is only comparable if it was measured on the same.
    assert questions[:3] == ["26*37", "92+53", "47+53"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [("37*48", 1776), ("(1+2)*-3", -9), ("7/2", 3.5), ("8/2", 4.0), (" 1.5 + 1", 2.5), ("+5-5", 0)],
)
def test_expressions(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["2**9", "7//2", "1/0", "037", "5 5", "5(3)", "", "x", "9" * 31, "()", "1,2", "__import__('os')", "٣+٣"],
)
def test_what_is_no_expression(expression):
    with pytest.raises(ValueError, match=r"."):
        evaluate(expression)


def test_values_are_shown_as_people_write_them():
    assert [show(v) for v in (1776, 4.0, 3.5, 2 / 3)] == ["1776", "4", "3.5", "0.67"]


def call(expression, **more):
    return (
        "<tool_call>"
        + json.dumps({"name": "calculator", "arguments": {"expression": expression}, **more})
        + "</tool_call>"
    )


def test_any_expression_of_the_right_value_is_a_right_call():
    assert is_right_call(call("37*48"), 1776)
    assert is_right_call(f" {call('48 * 37 + 0')}\n", 1776)
    assert not is_right_call(call("37*47"), 1776)
    assert not is_right_call(call("1776"), 1776)
    assert not is_right_call(call("37*48", id=1), 1776)
    assert not is_right_call("Sure! " + call("37*48"), 1776)
    assert not is_right_call(call(37), 37)


def play(spec, payload, *turns):
    async def episode():
        environment = spec.make()
        await environment.reset(payload, episode_id="0.0/0", seed=0)
        results = []
        for text, reason in turns:
            results.append(await environment.step(Action(text, parse_hermes(text), reason)))
        return results

    return asyncio.run(episode())


WORDS = {"question": "Tom has 37 boxes with 48 pens each. How many pens in total?", "answer": 1776}
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def test_word_episode_call_then_answer():
    spec = WordCalculator(latency_s=0)
    first, last = play(spec, WORDS, (call("37*48"), STOP), ("<answer>1776</answer>", STOP))
    assert (first.reward, first.reward_parts, first.done) == (0.5, {"call": 0.5}, False)
    assert [m.content for m in first.messages] == ["1776"]
    assert (last.reward, last.reward_parts, last.done, last.success) == (0.5, {"answer": 0.5}, True, True)


def test_a_wrong_call_is_answered_and_earns_nothing_even_if_the_answer_is_right():
    first, last = play(WordCalculator(latency_s=0), WORDS, (call("37+48"), STOP), ("<answer>1776</answer>", STOP))
    assert (first.reward, [m.content for m in first.messages]) == (0.0, ["85"])
    assert (last.reward, last.success, last.done) == (0.0, False, True)


@pytest.mark.parametrize(
    ("turn", "reward"),
    [
        ((call("37*48"), LENGTH), 0.5),
        (("1776", STOP), 0.0),
        ((call("1/0"), STOP), 0.0),
        ((call("37*48") + "x", STOP), 0.0),
    ],
)
def test_the_episode_ends_when_there_is_nothing_to_evaluate(turn, reward):
    (result,) = play(WordCalculator(latency_s=0), WORDS, turn)
    assert (result.reward, result.done, result.success) == (reward, True, False)


def test_the_second_turn_ends_it_whatever_it_says():
    _, last = play(WordCalculator(latency_s=0), WORDS, (call("37*48"), STOP), (call("37*48"), STOP))
    assert (last.reward, last.done) == (0.0, True)


def test_latency_is_the_same_for_the_same_call_and_differs_between_episodes():
    def waits(seed):
        async def main():
            environment = WordCalculator(latency_s=0.02).make()
            await environment.reset(WORDS, episode_id="0.0/0", seed=seed)
            slept, sleep = [], asyncio.sleep

            async def note(delay, *rest):
                slept.append(delay)
                await sleep(0)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(asyncio, "sleep", note)
                await environment.step(Action(call("1+1"), (), STOP))
            return slept

        return asyncio.run(main())

    assert waits(1) == waits(1) != waits(2)


def test_tiny_episode():
    payload = {"question": "63+58+61", "answer": 182}
    chat = load_chat("calculator-tiny")

    def turn(text):
        ids = [chat.ids[text[:6]], *chat.encode(text[6:-7]), chat.ids[text[-7:]]] if "calc" in text else None
        return chat.parse(ids) if ids else Action(text)

    async def episode():
        environment = Calculator(latency_s=0).make()
        await environment.reset(payload, episode_id="0.0/0", seed=0)
        return [
            await environment.step(turn(text))
            for text in ("<calc>63+58</calc>", "<calc>63+</calc>", "<answer>182</answer>")
        ]

    good, bad, answer = asyncio.run(episode())
    assert [m.content for m in good.messages] == ["121"]
    assert bad.metrics == {"tool_calls": 1, "refused_calls": 1}
    assert chat.decode(chat.continuation(bad.messages)) == "<result><error></result>"
    assert (answer.reward, answer.success, answer.done) == (1.0, True, True)


def test_the_tiny_tool():
    assert calculate("12*12") == "144"
    assert calculate("99999*99999") == "999980"
    assert calculate("11-99") == "-88"
    for wrong in ("1+1+1", "123456+1", "-1+1", "12", "٣+٣"):
        with pytest.raises(ValueError, match="one operation"):
            calculate(wrong)


def test_demonstrations():
    chat, rng = load_chat("calculator-tiny"), random.Random(0)
    perfect = [demonstrate(rng, 1.0) for _ in range(200)]
    assert all(demo.reward == 1.0 for demo in perfect)
    noisy = [demonstrate(rng, 0.55) for _ in range(600)]
    assert 0.2 < np.mean([demo.reward for demo in noisy]) < 0.4
    for demo in (*perfect, *noisy):
        question, _, rest = chat.decode(demo.token_ids).partition("</q>")
        assert not held_out(question.removeprefix("<q>"))
        assert len(demo.token_ids) == len(demo.loss_mask) <= 64
        said = chat.decode([t for t, mine in zip(demo.token_ids, demo.loss_mask, strict=True) if mine])
        assert "<result>" not in said
        assert said.replace("</calc>", "").replace("</answer>", "") in rest.replace("<", "<") or "<result>" in rest
