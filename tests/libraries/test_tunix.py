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
