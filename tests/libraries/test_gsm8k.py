"""The GSM8K loader over lines of the published form, its extraction and rewards, and the example's run file."""

import json
import tomllib
from decimal import Decimal
from pathlib import Path

import pytest

from environments.libraries.gsm8k import Extraction, extract
from pipelines.cli import main

NAME = "gsm8k:GSM8K"
EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k_gemma2_2b.toml"


@pytest.fixture
def folder(tmp_path):
    """Questions of ours in the published form: working with calculator annotations, and the answer after ####."""
    for name, first, count in (("train", 0, 40), ("test", 38, 12)):
        lines = [
            {"question": f"Ann has {n} pens and buys 1,000. How many?", "answer": _solution(n)}
            for n in range(first, first + count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(tmp_path)


def _solution(n):
    return f"She has {n}+1000=<<{n}+1000={n + 1000}>>{n + 1000} pens.\n#### {n + 1000:,}"


@pytest.mark.parametrize(
    ("text", "hashes", "tag", "last"),
    [
        ("5+2=7\n#### 7", "7", None, "7"),
        ("so 7.\n#### 1,072", "1072", None, "1072"),
        ("#### -3.50 and 9", "-3.50", None, "9"),
        ("#### $3.50", None, None, "3.50"),
        ("####7", None, None, "7"),
        ("#### none", None, None, None),
        ("<answer>no</answer> <answer> 72. </answer>", None, "72", "72"),
        ("<answer>72 pens</answer>", None, None, "72"),
        ("It is 1,072.00.", None, None, "1072.00"),
        ("in 2024, -5", None, None, "-5"),
        ("#### " + "9" * 500, None, None, None),
        ("٣ #### ٣", None, None, None),
        ("", None, None, None),
    ],
)
def test_which_number_a_turn_answers(text, hashes, tag, last):
    for extraction, expected in zip(Extraction, (hashes, tag, last), strict=True):
        assert extract(text, extraction) == (None if expected is None else Decimal(expected)), extraction


def test_the_right_number_is_a_success_and_the_form_counts_apart(play, folder):
    spec = play.spec(NAME, folder=folder, extraction="tag", format_reward=0.5)
    payload = spec.tasks.task(0)
    right = payload["answer"].rsplit("#### ", 1)[1]
    said = {
        f"<reasoning>I add.</reasoning>\n<answer>{right}</answer>": (1.5, True, {"answer": 1.0, "format": 0.5}),
        f"<answer>{right.replace(',', '')}.00</answer>": (1.0, True, {"answer": 1.0, "format": 0.0}),
        "<reasoning>I add.</reasoning><answer>1</answer>": (0.5, False, {"answer": 0.0, "format": 0.5}),
        right: (0.0, False, {"answer": 0.0, "format": 0.0}),
    }
    for text, expected in said.items():
        episode = play(spec, [text], payload=payload)
        assert (episode.reward, episode.success, episode.reward_parts) == expected, text
    messages, _ = play.chat.shown[0]
    assert [message.role for message in messages] == ["system", "user"]
    assert "<reasoning>" in messages[0].content
    assert messages[1].content == payload["question"]
    hashes = play(play.spec(NAME, folder=folder), [f"I add.\n#### {right}"], payload=payload)
    assert (hashes.reward, hashes.reward_parts) == (1.0, {"answer": 1.0})


def test_the_published_split_is_kept_and_questions_of_both_files_are_held_out(play, folder):
    file = Path(folder) / "train.jsonl"
    *_, line = file.read_text().splitlines()
    in_other_words = {**json.loads(line), "answer": f"In other words.\n{json.loads(line)['answer']}"}
    file.write_text(file.read_text() + json.dumps(in_other_words) + "\n")  # of a question that the other file has too
    tasks = play.spec(NAME, folder=folder).tasks
    held_out = [task["question"] for task in tasks.eval_tasks(12)]
    trained = [tasks.task(n)["question"] for n in range(76)]
    assert not set(held_out) & set(trained)
    assert len(set(trained[:38])) == len(set(trained)) == 38  # each once a round
    assert trained[:38] != trained[38:]
    with pytest.raises(ValueError, match="there are 12 held-out tasks, asked for 13"):
        tasks.eval_tasks(13)


def test_lines_that_are_no_questions_are_named(play, folder):
    file = Path(folder) / "train.jsonl"
    file.write_text(file.read_text() + '{"question": "How many?", "answer": "Many."}\n')
    with pytest.raises(ValueError, match=r"train\.jsonl, line 41: .* found .*Many"):
        play.spec(NAME, folder=folder)
    file.write_text("{]\n")
    with pytest.raises(ValueError, match=r"train\.jsonl, line 1: a line must be one JSON object"):
        play.spec(NAME, folder=folder)
    with pytest.raises(ValueError, match="extraction must be one of hashes, tag, last, found 'boxed'"):
        play.spec(NAME, folder=folder, extraction="boxed")


def test_the_example_holds_the_published_setting_and_a_dry_run_says_what_it_cannot_check(capsys, folder, monkeypatch):
    example = tomllib.loads(EXAMPLE.read_text())
    assert example["algorithm"] == "grpo"
    assert example["lora"] == {"rank": 64, "alpha": 64.0}
    assert {key: example["sampling"][key] for key in ("temperature", "top_p", "top_k")} == {
        "temperature": 0.9,
        "top_p": 1.0,
        "top_k": 50,
    }
    assert example["sharding"] == {"fsdp": 2, "tensor": 4}
    monkeypatch.chdir(folder)
    assert main(["run", str(EXAMPLE), "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["model"]["path"] == "gemma-2-2b-it"
    assert "checked: the shapes of gemma-2-2b (gemma2)" in err
    assert "NOT CHECKED: weights, tokenizer and chat format: model.path 'gemma-2-2b-it'" in err
    assert "NOT CHECKED: environment and tasks" in err
    assert "gsm8k/test.jsonl: there is no such file" in err
    settings = ["--set", f"environment.options.folder={folder}", "--set", "evaluation.questions=12"]
    assert main(["run", str(EXAMPLE), "--dry-run", *settings]) == 0
    assert "environment environments.libraries.gsm8k:GSM8K, 12 held-out questions" in capsys.readouterr().err
    assert main(["run", str(EXAMPLE), "--dry-run", *settings[:2]]) == 2  # too few questions
    assert main(["run", str(EXAMPLE), "--dry-run", "--set", "model.path=gemma-9-9b"]) == 2
    assert main(["run", str(EXAMPLE), "--dry-run", "--set", "model.path=calculator-tiny"]) == 2  # the data is missing


def test_a_plan_takes_the_examples_model_adapter_rows_and_mesh(capsys):
    assert main(["plan", str(EXAMPLE), "--topology", "v5e-8", "--compile", "0", "--json"]) == 0
    out = capsys.readouterr().out
    assert "planned in bfloat16; " + str(EXAMPLE) + " has model.dtype = float32" in out
    plan = json.loads(out.splitlines()[-1])
    assert (plan["fits"], plan["model"], plan["lora_rank"]) == (True, "gemma-2-2b-it", 64)
    assert plan["mesh"] == {"data": 1, "fsdp": 2, "tensor": 4}
    assert (plan["bucket"], plan["rows"], plan["remat"]) == (2048, 2, "layer")
    assert main(["plan", str(EXAMPLE), "--topology", "v5e-8", "--compile", "0", "--json", "--lora-rank", "8"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["lora_rank"] == 8
    assert main(["plan", "--topology", "v5e-8"]) == 2
