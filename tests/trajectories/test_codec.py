import base64
import contextlib
import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from tests.trajectories.strategies import closing_sets, dead_letters, episodes, heartbeats, tasks, verdicts
from trajectories import codec
from trajectories.codec import (
    CodecError,
    Foreign,
    FutureVersion,
    Malformed,
    Oversized,
    Truncated,
    attributes,
    decode,
    encode,
)
from trajectories.packing import pack
from trajectories.schema import Closing, Episode, Pack, Task, Verdict, Version, same

SCHEMA_1_PACK = base64.b64decode(
    "SFJDMSi1L/1gaAWNEAA2mlExYEmbDjAoYwAAAAAOTwidUvu38etffv+7PevDqt6tbZGenrS9NzEt0YBKOdZHRIisDEYAPQBBAFeGex1ep2ls"
    "aXqj6I7e6+BBxRtB3stjssB7bwOHpMALeR/lMnmvkFeSvIjD4qUM+TmkykN6EVOQGw1pkh7S9CSNhilciBAZ3et9MgykyvR403OgSCYO75/F"
    "QYK8op5M3kV3zruYxvsWRc97F4/C+/VczzPnnGNXXM+u7O369bxrz+c1+Sxd+JV7lr45jl+55jja+JXLZwTZMj0LBDLxXUaQH0WKWHwvhsCQ"
    "H+UyPUxBXupXrpxzLhl9MsoQOW1LVSvqLpmIiIiJRABEBKCQkCCAiAMQUQAiLiCiAiImIGLCQMQDBCJCPCBGQChQZbYn29vDWoKGhgPaHsZQ"
    "POy5GFvsTrMYTrOcZn0tdC0YAVioIVGlSGiCJClJpdIBgAIiubE6EmAgOg5kKJIkDTJC5QQjmICIgomUGLYaAHTwDnhqr2M4SndyD/4v16w7"
    "9R19N9GM8TPOyAfKntjCg03KPX9x2Mgr7Bi7pIfT8iF5CWq8XFjklPdLrOVMU06PabH2iFovPxbUONCDfCzVz1gHIFvltaJyBK7X1wicBTcM"
    "TSWAKBIMo2Y3As4QWzxggRMvPlohHJiF6JufX3GoIDOLHMNN+U2C999US042/mJMNO3pygWmImoM"
)
"""`pack([one_closing], 16)`, written before there was a schema version 2."""

packs = closing_sets().map(lambda closings: pack(closings, 200))
messages = st.one_of(tasks, episodes(), verdicts, heartbeats, dead_letters, packs, closing_sets().map(lambda c: c[0]))


def envelope(data: bytes) -> dict[str, Any]:
    content = zstandard.decompress(data[4:])
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    found: dict[str, Any] = json.loads(header["__metadata__"][codec.METADATA_KEY])
    return found


def rewritten(data: bytes, **changes: Any) -> bytes:
    """The same message with another envelope."""
    content = zstandard.decompress(data[4:])
    changed = json.dumps(envelope(data) | changes)
    return codec.MAGIC + zstandard.compress(save(load(content), {codec.METADATA_KEY: changed}))


@given(messages)
@settings(max_examples=300, deadline=None)
def test_every_message_comes_back_bit_for_bit(message: Any) -> None:
    assert same(decode(encode(message), type(message)), message)


@given(messages, st.data())
@settings(max_examples=200, deadline=None)
def test_a_message_cut_anywhere_is_refused_by_name(message: Any, data: st.DataObject) -> None:
    encoded = encode(message)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(CodecError):
        decode(encoded[:cut], type(message))


@given(messages, st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_message_raises_nothing_but_codec_errors(message: Any, data: st.DataObject) -> None:
    encoded = bytearray(encode(message))
    place = data.draw(st.integers(0, len(encoded) - 1))
    encoded[place] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(CodecError):
        decode(bytes(encoded), type(message))


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CodecError):
        decode(data, Task)


def test_each_fault_has_its_name(one_closing: Closing) -> None:
    encoded = encode(one_closing)
    with pytest.raises(Truncated):
        decode(encoded[: len(encoded) // 2], Closing)
    with pytest.raises(Truncated):
        decode(b"", Closing)
    with pytest.raises(Foreign, match="begins with"):
        decode(b"\x80\x04pickle...", Closing)
    with pytest.raises(Foreign, match="expected a Task, found a Closing"):
        decode(encoded, Task)
    with pytest.raises(FutureVersion, match="update it"):
        decode(rewritten(encoded, schema=codec.SCHEMA_VERSION + 1), Closing)
    with pytest.raises(Malformed, match="at least 1"):
        decode(rewritten(encoded, schema=0), Closing)
    with pytest.raises(Malformed):
        decode(rewritten(encoded, body=[1, 2]), Closing)
    with pytest.raises(Malformed, match="follow the end"):
        decode(encoded + b"more", Closing)
    with pytest.raises(Oversized):
        decode(encoded + bytes(codec.MAX_MESSAGE_BYTES), Closing)
    with pytest.raises(Oversized, match="group_size"):
        encode(one_closing, limit=100)


def test_a_small_message_cannot_unfold_without_bound() -> None:
    bomb = codec.MAGIC + zstandard.compress(bytes(codec.MAX_DECODED_BYTES + 1))
    assert len(bomb) < 100_000
    with pytest.raises(Oversized, match="unfolds"):
        decode(bomb, Task)


def test_wrong_types_inside_are_refused() -> None:
    task = encode(Task("run", 1))
    for text in (
        '["run","1",0,"train",1,{},null,null]',
        '["run",1,0,"dance",1,{},null,null]',
        '["run",true,0,"train",1,{},null,null]',
    ):
        with pytest.raises(Malformed):
            decode(rewritten(task, body=json.loads(text)), Task)


@pytest.mark.parametrize(
    "text",
    [
        '{"schema":Infinity,"type":"Task","body":[]}',
        '{"schema":1,"type":"Task","body":["run",1,0,"train",1,{"q":"\\ud800"},null,null]}',
        '{"schema":1,"type":"Task","body":["run",1,0,"train",1,{"\\ud800":1},null,null]}',
        '{"schema":1,"type":"Task","body":["\\ud800",1,0,"train",1,{},null,null]}',
        *(
            '{"schema":1,"type":"Task","body":["run",1,0,"train",1,{"q":' + "[" * n + "]" * n + "},null,null]}"
            for n in (100, 600, 100_000)
        ),
    ],
    ids=lambda text: f"{text[:60]} {len(text)}",
)
def test_what_could_not_be_encoded_again_is_refused(text: str) -> None:
    data = codec.MAGIC + zstandard.compress(save({}, {codec.METADATA_KEY: text}))
    with pytest.raises(Malformed):
        decode(data, Task)


def test_a_pack_whose_rows_lack_an_episode_is_refused(one_closing: Closing) -> None:
    whole = pack([one_closing], 64)
    hollow = dataclasses.replace(whole, rows=())
    with pytest.raises(Malformed, match="no row holds episode"):
        decode(encode(hollow), Pack)


def test_a_pack_sends_each_token_once(one_closing: Closing) -> None:
    big = dataclasses.replace(
        one_closing,
        episodes=tuple(dataclasses.replace(e, sample=sample) for sample, e in enumerate(one_closing.episodes * 16)),
        advantages=one_closing.advantages * 16,
    )
    packed = pack([big], 256)
    arrays = load(zstandard.decompress(encode(packed)[4:]))
    assert {array.shape for array in arrays.values()} <= {(256,), (0,)}


def truncated(closing: Closing) -> Closing:
    """The same closing, the first two sampled tokens of each episode drawn from three and two tokens."""

    def limited(episode: Episode) -> Episode:
        first = int(episode.tokens_T[4])
        return dataclasses.replace(
            episode, kept_counts_T=np.array([0, 0, 0, 0, 3, 2, 0]), kept_ids_K=np.array([3, first, 40, 11, 12])
        )

    return dataclasses.replace(closing, episodes=tuple(limited(episode) for episode in closing.episodes))


def test_messages_of_schema_1_are_read_and_still_written_where_nothing_is_kept(one_closing: Closing) -> None:
    plain, limited = pack([one_closing], 16), pack([truncated(one_closing)], 16)
    assert decode(SCHEMA_1_PACK, Pack) == plain
    assert zstandard.decompress(encode(plain)[4:]) == zstandard.decompress(SCHEMA_1_PACK[4:])
    assert envelope(encode(limited))["schema"] == 2
    with pytest.raises(Malformed, match="Row has 10 fields"):
        decode(rewritten(SCHEMA_1_PACK, schema=2), Pack)


def test_kept_ids_lie_once_in_a_pack_and_come_back(one_closing: Closing) -> None:
    packed = pack([truncated(one_closing)], 64)
    (row,) = packed.rows
    assert row.kept_counts_T.tolist() == [0] * 4 + [3, 2, 0] * 2 + [0] * 54
    assert row.kept_ids_K.tolist() == [3, 10, 40, 11, 12, 3, 11, 40, 11, 12]
    arrays = load(zstandard.decompress(encode(packed)[4:]))
    assert sorted(array.shape for array in arrays.values() if array.size) == [(10,), *[(64,)] * 8]
    assert decode(encode(packed), Pack) == packed
    assert attributes(packed)["schema"] == "2"


def test_kept_ids_that_no_token_can_have_are_refused(one_closing: Closing) -> None:
    episode = truncated(one_closing).episodes[0]
    for counts in ([0, 0, 0, 1, 3, 1, 0], [0, 0, 0, 0, 3, 3, -1], [0, 0, 0, 0, 3, 2], [0, 0, 0, 0, 3, 3, 0], [0] * 7):
        with pytest.raises(ValueError, match="kept_"):
            dataclasses.replace(episode, kept_counts_T=np.array(counts))


def test_attributes_route_without_decoding(one_closing: Closing) -> None:
    assert attributes(pack([one_closing], 64)) == {
        "run_id": "run",
        "type": "Pack",
        "schema": "1",
        "bucket": "64",
        "oldest_version": "4.2",
    }


def test_versions_are_read_strictly() -> None:
    assert Version.parse("12.3") == Version(12, 3)
    for wrong in ("12", "1.2.3", "-1.2", "a.b", "", "1.²"):
        with pytest.raises(ValueError, match="step"):
            Version.parse(wrong)


def test_oldest_version_is_that_of_the_smallest_step(one_closing: Closing) -> None:
    assert one_closing.oldest_version == Version(4, 2)
    assert Verdict("run", 1, 0, codec.typing.cast(Any, "filtered"), "x").oldest_version is None


def test_log_probs_outside_the_mask_are_zero(one_closing: Closing) -> None:
    episode = one_closing.episodes[0]
    noisy = dataclasses.replace(episode, logprobs_T=episode.logprobs_T - 1)
    assert (noisy.logprobs_T[:4] == 0).all()
    assert noisy.logprobs_T[4] == -2.5
    with pytest.raises(ValueError, match="loss mask"):
        dataclasses.replace(episode, loss_mask_T=~episode.loss_mask_T)
    with pytest.raises(ValueError, match="shape"):
        Episode("r", 0, 0, 0, 1, episode.tokens_T, episode.loss_mask_T[:-1], episode.logprobs_T, 4)
