"""Environments in Tunix's shape: one of ours, and Tunix's own ToolEnvironment where it is installed."""

import json

import pytest

NAME = "tunix:Tunix"
MODULE = "tests.libraries.tunix_environments"


def written(tmp_path, rows):
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_the_shape_alone_is_enough(play, tmp_path):
    tasks = written(tmp_path, [{"word": f"w{n}", "hint": f"it ends with {n}"} for n in range(30)])
    spec = play.spec(NAME, make_environment=f"{MODULE}:Guess", tasks_file=tasks, system="Guess well.")
    payload = spec.tasks.task(0)
    episodes = play(spec, lambda session, turn, text: payload["word"] if turn else "what?", payload=payload, members=2)
    for episode in episodes:
        assert (episode.reward, episode.success, len(episode.turns)) == (1.0, True, 2), episode.error
        assert episode.reward_parts == {}
        assert episode.metrics["tries"] == 3
    (messages, schemas), *_ = play.chat.shown
    assert [message.content for message in messages] == ["Guess well.", f"Guess: {payload['hint']}"]
    assert list(schemas) == []
    assert json.loads(play.chat.shown[-1][0].content) == {"told": "no"}
    assert "touched" not in payload
    lost = play(spec, ["no"], payload=payload)
    assert (lost.reward, lost.success, lost.status) == (0.0, False, "completed")


def test_one_that_blocks_or_answers_in_another_shape_fails_its_episode_and_no_other(play, tmp_path):
    options = {"make_environment": f"{MODULE}:Odd", "tool_schemas": f"{MODULE}:schemas"}
    spec = play.spec(NAME, **options, tasks_file=written(tmp_path, [{"n": n} for n in range(30)]))
    said = {"0": "block", "1": "five", "2": "anything"}
    blocked, five, right = play(spec, lambda session, *_: said[session[-1]], members=3, step_timeout_s=1.0)
    assert (blocked.status, blocked.metrics) == ("timeout", {"close_errors": 1})
    assert five.status == "environment_error"
    assert "step must return (observation, reward, done, info), found ('seen', 1.0, True, False, {})" in five.error
    assert (right.status, right.reward, right.success) == ("completed", 1.0, True), right.error
    (messages, schemas), *_ = play.chat.shown
    assert [message.content for message in messages] == ["say what I do"]
    assert schemas[0]["function"]["name"] == "look"
    with pytest.raises(ValueError, match="make_environment '': it must be module:Name"):
        play.spec(NAME, make_environment="", tasks_file=str(tmp_path / "tasks.jsonl"))


@pytest.mark.libraries
def test_tunixs_own_tool_environment_runs_its_tools(play, tmp_path):
    tasks = written(tmp_path, [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(30)])
    spec = play.spec(NAME, make_environment=f"{MODULE}:tool_environment", tasks_file=tasks)
    payload = spec.tasks.task(0)
    ask = {"a": int(payload["answer"]) - 1, "b": 1, "op": "+"}
    both = "\n".join(f"call calculator {json.dumps({**ask, 'op': op})}" for op in "+-")
    episode = play(
        spec, [both, f"call calculator {json.dumps({'a': 1, 'b': 0, 'op': '/'})}", payload["answer"]], payload=payload
    )
    assert (episode.reward, episode.success, len(episode.turns)) == (1.0, True, 3), episode.error
    (messages, schemas), first, second = play.chat.shown
    assert messages[0].content == payload["question"]
    assert schemas[0]["function"]["name"] == "calculator"
    assert [float(message.content) for message in first] == [int(payload["answer"]), int(payload["answer"]) - 2]
    assert "zero" in second[0].content.lower()
    assert episode.metrics["length"] == len(payload["answer"])
