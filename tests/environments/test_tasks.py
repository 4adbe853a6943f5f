"""Task files: what is wrong with one is said with file and line, and no training task is ever held out."""

import json

import numpy as np
import pytest

from environments.tasks import TaskFileError, task_file, task_list


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ROWS = [{"question": f"{n}+1", "answer": n + 1} for n in range(300)]


def words(payloads):
    return [payload["question"] for payload in payloads]


def test_every_training_task_comes_once_a_round_and_each_round_in_its_own_order(tmp_path):
    tasks = task_file(write(tmp_path / "a.jsonl", ROWS), seed=3, key="question")
    count = len(tasks.training)
    first, second = ([tasks.task(group)["question"] for group in range(at, at + count)] for at in (0, count))
    assert sorted(first) == sorted(second) == sorted(words(tasks.training))
    assert first != second
    again = task_file(tmp_path / "a.jsonl", seed=3, key="question")
    assert again.task(7 * count + 5) == tasks.task(7 * count + 5)
    assert [task_file(tmp_path / "a.jsonl", seed=4, key="question").task(group) for group in range(9)] != first[:9]


def test_the_split_goes_by_the_tasks_own_words(tmp_path):
    tasks = task_file(write(tmp_path / "a.jsonl", ROWS), key="question")
    held = words(tasks.held_out)
    assert 10 <= len(held) <= 60
    moved = [{**row, "note": "new"} for row in [{"question": "new", "answer": 0}, *ROWS[::-1], *ROWS[:50]]]
    other = task_file(write(tmp_path / "b.jsonl", moved), key="question", seed=9)
    assert [one for one in words(other.held_out) if one != "new"] == held
    assert not set(words(other.training)) & set(words(other.held_out))
    assert words(tasks.eval_tasks(5)) == held[:5]
    with pytest.raises(ValueError, match=rf"{len(held)} held-out tasks, asked for 200: lower evaluation\.questions"):
        tasks.eval_tasks(200)


def test_a_held_out_file_takes_its_tasks_out_of_the_training(tmp_path):
    write(tmp_path / "a.jsonl", ROWS)
    write(tmp_path / "test.jsonl", [*ROWS[:20], ROWS[3], {"question": "elsewhere"}])
    tasks = task_file(tmp_path / "a.jsonl", key="question", held_out_file=tmp_path / "test.jsonl")
    assert sorted(words(tasks.held_out)) == sorted([*words(ROWS[:20]), "elsewhere"])
    assert words(tasks.training) == words(ROWS[20:])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"question": 1}\n\n{"question": 2', r"a\.jsonl, line 3: a line must be one JSON object, found '\{\"question"),
        ('[{"question": 1}]', r"line 1: a line must be one JSON object, found a list"),
        ('{"question": NaN}', r"line 1: .*NaN is no JSON"),
        ('{"question": 1}\n{"q": 2}', r"line 2: it lacks 'question', the key; it has q"),
        ("version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("\n \n", "it holds no task"),
        ("", "it holds no task"),
        ('{"question": 1}\n{"question": 1e999}', "line 2: a task must be plain JSON: Out of range float"),
        ('{"question": "\\ud800"}', "line 1: a task must be plain JSON: .*surrogates"),
        ('{"question": ' + "[" * 100 + "]" * 100 + "}", "line 1: .*nested more than 64 deep"),
        ('{"question": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 1: .*nested too deeply"),
        ('{"question": "' + "x" * (1 << 20) + '"}', "at most 1048576 bytes"),
    ],
)
def test_a_bad_line_is_named_with_its_place(tmp_path, text, says):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(TaskFileError, match=says):
        task_file(tmp_path / "a.jsonl", key="question")


def test_a_file_from_an_editor_on_windows_is_read_as_any_other(tmp_path):
    (tmp_path / "a.jsonl").write_bytes("\ufeff".encode() + b'{"question": "1+1"}\r\n\r\n{"question": "2+2"}\r\n')
    assert words(task_file(tmp_path / "a.jsonl", held_out=0.0).training) == ["1+1", "2+2"]
    with pytest.raises(TaskFileError, match=r"it is a folder, name a file; it holds a\.jsonl"):
        task_file(tmp_path)


def test_a_payload_that_no_message_can_carry_is_named_before_the_run(tmp_path):
    for odd in (np.int64(3), float("nan"), {1, 2}, b"bytes", "\ud800", "x" * (1 << 20)):
        with pytest.raises(TaskFileError, match="task 2: a task must"):
            task_list([{"question": "1"}, {"question": "2", "answer": odd}], key="question")
        with pytest.raises(TaskFileError, match="held-out task 1: a task must"):
            task_list(ROWS, key="question", held_out_tasks=[{"question": "2", "answer": odd}])


def test_a_file_that_is_not_there_or_no_text_says_what_is(tmp_path):
    (tmp_path / "sums.jsonl").write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(TaskFileError, match=r"no such file; its folder holds sums\.jsonl"):
        task_file(tmp_path / "sum.jsonl")
    with pytest.raises(TaskFileError, match="no text in UTF-8"):
        task_file(tmp_path / "sums.jsonl")


def test_a_list_is_split_as_a_file_is(tmp_path):
    assert (
        task_list(ROWS, key="question").held_out
        == task_file(write(tmp_path / "a.jsonl", ROWS), key="question").held_out
    )
    with pytest.raises(TaskFileError, match="every task is held out"):
        task_list(ROWS[:2], held_out_tasks=ROWS[:2])
    with pytest.raises(TaskFileError, match="at least one task, found none"):
        task_list([])
    with pytest.raises(ValueError, match="held_out must be a share"):
        task_list(ROWS, held_out=1.0)


def test_what_is_no_file_and_what_is_no_task_is_said():
    for path in ("", ".", "some/folder/"):
        with pytest.raises(TaskFileError, match="names no file"):
            task_file(path)
    with pytest.raises(TaskFileError, match="task 2: a task must be an object, found a str"):
        task_list([{"question": "1+1"}, "2+2"])
