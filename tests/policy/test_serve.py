"""The HTTP API over a real engine: what it answers, what it refuses, whom it serves."""

import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import re
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer

from policy import serve
from policy.adapters import AdapterStore
from policy.chat import TinyChat, load_chat
from policy.client import SamplingParams
from policy.files import CALCULATOR_TINY
from policy.lora import LoraSettings, init_adapter, zero_adapter
from policy.serve import BASE, Api, ServedPolicy, ServeSettings, build_policy, fit
from policy.settings import SamplingSettings
from policy.weights import ModelSettings, load_model
from tests.policy.server import LORA, make_adapter, publish
from trajectories.schema import Version
from trajectories.storage import open_storage

CHAT = load_chat(CALCULATOR_TINY)
Q = [CHAT.ids["<q>"], *CHAT.encode("12+34"), CHAT.ids["</q>"]]
VLLM, SGLANG, COMPLETIONS, CHATS = "/inference/v1/generate", "/generate", "/v1/completions", "/v1/chat/completions"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


SAMPLING = SamplingSettings(slots=4, small_batch=0, max_context=64, max_kept=8)


@pytest.fixture(scope="module")
def built():
    """The engine of every test's server, and its model's config."""
    engine = build_policy(ModelSettings(CALCULATOR_TINY), LORA, SAMPLING, ServeSettings())[0].engine
    yield engine, load_model(ModelSettings(CALCULATOR_TINY)).config
    engine.close()


@contextlib.asynccontextmanager
async def client(built, chat=CHAT, **changes):
    """A client of a fresh server over the module's engine, with the base in force."""
    engine, config = built
    engine.swap(zero_adapter(config, LORA), BASE)
    while engine.version != BASE:
        await asyncio.sleep(0.01)
    settings = dataclasses.replace(ServeSettings(room_s=0.3), **changes)
    policy = ServedPolicy(CALCULATOR_TINY, engine, config, LORA, SAMPLING, settings)
    app = Api(policy, chat, settings).application()
    async with TestClient(TestServer(app, handler_cancellation=True)) as found:
        yield found, policy


async def post(found, path, body, **options):
    data = body if isinstance(body, str | bytes) else json.dumps(body)
    async with found.post(path, data=data, **options) as response:
        return response.status, await response.json()


async def greedy(found, model=""):
    body = {"model": model, "token_ids": Q, "sampling_params": {"temperature": 0, "max_tokens": 9, "logprobs": 0}}
    status, answer = await post(found, VLLM, body)
    return status, answer["choices"][0]["token_ids"] if status == 200 else answer["error"]["message"]


def run(work):
    return asyncio.run(asyncio.wait_for(work, 240))


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


def called(arguments, **fields):
    """A conversation with one call of a tool."""
    call = {"function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}], **fields}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (VLLM, "{", 400, "is no JSON"),
        (VLLM, b"\xff\xfe{}", 400, "is no JSON"),
        (VLLM, "[" * 100_000, 400, "is no JSON"),
        (VLLM, [1], 400, "the body must be a JSON object"),
        (VLLM, {}, 400, "token_ids must be one flat list"),
        (VLLM, {"token_ids": [[1]]}, 400, "token_ids must be one flat list"),
        (VLLM, {"token_ids": [1.5]}, 400, "token_ids must be one flat list"),
        (VLLM, {"token_ids": [True]}, 400, "token_ids must be one flat list"),
        (VLLM, {"token_ids": [1, 999]}, 400, "ids from 0 to 23, found 999"),
        (VLLM, {"token_ids": [1] * 64}, 400, "has 64 tokens, the context holds 64"),
        (SGLANG, {"input_ids": [1] * 64}, 400, "has 64 tokens, the context holds 64"),
        (COMPLETIONS, {"prompt": "1" * 64}, 400, "has 64 tokens, the context holds 64"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, 400, "prompt must be one flat list"),
        (COMPLETIONS, {"prompt": 7}, 400, "prompt must be one flat list"),
        (VLLM, {"token_ids": [1], "sampling_params": []}, 400, "sampling_params must be a JSON object"),
        (VLLM, {"token_ids": [1], "sampling_params": {"temperature": -1}}, 400, "temperature must be 0"),
        (VLLM, {"token_ids": [1], "sampling_params": {"temperature": "1"}}, 400, "temperature must be a number"),
        (VLLM, '{"token_ids": [1], "sampling_params": {"temperature": NaN}}', 400, "temperature must be a number"),
        (VLLM, {"token_ids": [1], "sampling_params": {"max_tokens": 0}}, 400, "max_tokens must be at least 1"),
        (VLLM, {"token_ids": [1], "sampling_params": {"max_tokens": 1.5}}, 400, "max_tokens must be a whole number"),
        (VLLM, {"token_ids": [1], "sampling_params": {"n": 2}}, 400, "n = 2 cannot be done"),
        (VLLM, {"token_ids": [1], "sampling_params": {"repetition_penalty": 1.1}}, 400, "repetition_penalty = 1.1"),
        (VLLM, {"token_ids": [1], "sampling_params": {"top_k": 9}}, 400, "top_k must be at most 8 here"),
        (VLLM, {"token_ids": [1], "sampling_params": {"top_p": 2}}, 400, "top_p must be above 0 and at most 1"),
        (VLLM, {"token_ids": [1], "sampling_params": {"stop": [""]}}, 400, "stop must hold strings"),
        (VLLM, {"token_ids": [1], "sampling_params": {"temperature": 2e-38}}, 400, "at least 0.0001, found 2e-38"),
        (VLLM, {"token_ids": [1], "sampling_params": {"temperature": 10**400}}, 400, "temperature must be a number"),
        (VLLM, {"token_ids": [1], "sampling_params": {"top_k": 10**400}}, 400, "top_k must be at most 8 here"),
        (VLLM, {"token_ids": [1], "sampling_params": {"stop": ["\ud800"]}}, 400, "lone surrogates"),
        (VLLM, {"token_ids": [1], "sampling_params": {"stop": ["a"] * 17}}, 400, "at most 16 texts, found 17"),
        (VLLM, {"token_ids": [1], "sampling_params": {"stop": ["a" * 257]}}, 400, "at most 256 characters"),
        (VLLM, {"token_ids": [1], "sampling_params": {"stop": 5}}, 400, "stop must be a text or a list of texts"),
        (SGLANG, {"input_ids": [1], "sampling_params": {"stop_token_ids": [1] * 255}}, 400, "at most 254 ids beside"),
        (VLLM, {"token_ids": nested(900)}, 400, "token_ids must be one flat list"),
        (VLLM, {"token_ids": [1], "request_id": nested(900)}, 400, "request_id must be a text"),
        (SGLANG, {"text": "1" * 6145}, 413, "text must have at most 6144 characters here, 32 for each token"),
        (COMPLETIONS, {"prompt": "1" * 6145}, 413, "prompt must have at most 6144 characters"),
        (VLLM, {"token_ids": [1], "stream": True}, 400, "stream = True cannot be done"),
        (VLLM, {"token_ids": [1], "model": "gpt"}, 404, "'gpt' is not served here: .* or name 'calculator-tiny'"),
        (VLLM, {"token_ids": [1], "model": "g" * 256}, 404, f"model '{'g' * 256}' is not served here"),
        (VLLM, {"token_ids": [1], "model": 3}, 400, "model must be a text"),
        (CHATS, {"messages": []}, 400, "messages must be a list"),
        (CHATS, {"messages": [{"role": "tool"}, 1]}, 400, r"messages\[1\] must be a JSON object"),
        (CHATS, {"messages": [{"role": "system", "content": "x"}]}, 400, "cannot be rendered"),
        (CHATS, {"messages": [{"role": "user", "content": "1" * 6145}]}, 413, "at most 6144 characters"),
        (CHATS, {"messages": [{"role": "user", "content": "1"}] * 6145}, 413, "at most 6144 characters"),
        (CHATS, {"messages": [{"role": "user", "tool_calls": 5}]}, 400, r"messages\[0\].tool_calls must be a list"),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, 400, "text must be a text"),
        (CHATS, called(nested(900)), 400, "nested at most 64 deep"),
        (CHATS, called(json.dumps(nested(900))), 400, "nested at most 64 deep"),
        (CHATS, called('{"x": ' + "[" * 5000), 400, "are no JSON"),
        (CHATS, called("[]"), 400, "arguments must be a JSON object"),
        (CHATS, called({}, tools=[{"function": {"name": "f", "parameters": nested(900)}}]), 400, "nested at most 64"),
        (CHATS, called({}, tools=[{"function": 5}]), 400, "tools must be a list of objects like"),
        (LOAD, {"lora_name": "a"}, 400, "lora_path must be a text"),
        (LOAD, {"lora_name": "a" * 257, "lora_path": "/"}, 400, "lora_name must be a name of its own, of at most 256"),
        (UNLOAD, {"lora_name": "a"}, 404, "'a' is not loaded"),
        ("/nowhere", {}, 404, "there is no /nowhere; there is /generate"),
        ("/health", {}, 405, "Method Not Allowed: POST /health"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_what_and_where(path, body, status, message, built):
    async def refused():
        async with client(built) as (found, policy):
            answer = await post(found, path, body)
            assert await greedy(found) == (200, await in_process(policy))
            return answer

    found, answer = run(refused())
    assert found == status
    assert re.search(message, answer["error"]["message"]), answer


async def in_process(policy):
    params = SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=CHAT.stop_token_ids)
    return (await policy.sample("", Q, params))[1].token_ids_N.tolist()


def test_a_body_over_the_limit_and_a_wrong_key_are_refused(built):
    async def limits():
        async with client(built, max_body_bytes=2000, api_key="sesame") as (found, _):
            key = {"headers": {"Authorization": "Bearer sesame"}}
            answers = [
                await post(found, VLLM, {"token_ids": [1]}),
                await post(found, VLLM, {"token_ids": [1]}, headers={"Authorization": "Bearer sesam"}),
                await post(found, VLLM, {"token_ids": [1] * 5000}, **key),
                await post(found, VLLM, {"token_ids": [1], "sampling_params": {"max_tokens": 1}}, **key),
            ]
            async with found.get("/health") as health:
                return [*answers, (health.status, await health.json())]

    answers = run(limits())
    assert [status for status, _ in answers] == [401, 401, 413, 200, 200]
    assert "Authorization: Bearer KEY" in answers[0][1]["error"]["message"]
    assert "larger than 2000 bytes" in answers[2][1]["error"]["message"]


async def raw(found, *lines, body=b""):
    """The status line and the rest of the answer to a request in bytes."""
    reader, writer = await asyncio.open_connection(found.server.host, found.server.port)
    writer.write(b"\r\n".join([*lines, b"Host: x", b"Connection: close", b"Content-Length: %d" % len(body), b"", body]))
    answer = (await reader.read()).decode()
    writer.close()
    return answer.partition("\r\n")[::2]


def test_bytes_that_no_client_library_sends_are_refused(built):
    post_it = b"POST /inference/v1/generate HTTP/1.1"

    async def send():
        async with client(built, api_key="se\udcffsame") as (found, policy):
            answers = [
                await raw(found, b"GET /v1/models HTTP/1.1", b"Authorization: Bearer \xff\xfe"),
                await raw(found, b"GET /v1/models HTTP/1.1", b"Authorization: Bearer se\xffsame"),
            ]
            key = b"Authorization: Bearer se\xffsame"
            zipped = (post_it, key, b"Content-Encoding: gzip")
            answers += [
                await raw(found, *zipped, body=b"no gzip"),
                await raw(found, post_it, key, b"Content-Type: text/plain; charset=hex", body=b"7b7d"),
                await raw(found, post_it, key, b"Content-Type: text/plain; charset=none-such", body=b"{}"),
            ]
            return answers, policy.answered["failed"]

    answers, failed = run(send())
    assert [line.split()[1] for line, _ in answers] == ["401", "200", "400", "400", "400"], answers
    assert failed == 0


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_failure(built):
    async def leave():
        async with client(built) as (found, policy):
            for _ in range(5):
                _, writer = await asyncio.open_connection(found.server.host, found.server.port)
                writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
                await writer.drain()
                writer.close()
            while policy.answered.total() < 5:
                await asyncio.sleep(0.01)
            assert (await greedy(found))[0] == 200
            return policy.answered

    assert run(leave())["failed"] == 0


def test_health_tells_when_the_engine_has_ended():
    sampling = dataclasses.replace(SAMPLING, slots=1)
    policy, chat = build_policy(ModelSettings(CALCULATOR_TINY), LORA, sampling, ServeSettings())

    async def ask():
        async with TestClient(TestServer(Api(policy, chat, ServeSettings()).application())) as found:
            answers = []
            for _ in range(2):
                async with found.get("/health") as response:
                    answers.append((response.status, await response.json()))
                await asyncio.to_thread(policy.engine.close)
            return answers, await greedy(found)

    (alive, dead), refused = run(ask())
    assert alive == (200, {"status": "ok"})
    assert dead == (503, {"status": "stopped", "reason": "the engine was closed"})
    assert refused == (503, "the engine was closed")


class SlowChat(TinyChat):
    """Its text takes as long as the test wants."""

    known = threading.Event()

    def encode(self, text):
        assert self.known.wait(60)
        return super().encode(text)


def test_others_are_answered_while_a_text_is_read(built):
    async def both():
        async with client(built, chat=SlowChat(CHAT.tokens)) as (found, _):
            waiting = [
                asyncio.create_task(post(found, path, {"max_tokens": 2, **body}))
                for path, body in (
                    (COMPLETIONS, {"prompt": "1+1"}),
                    (CHATS, {"messages": [{"role": "user", "content": "1+1"}]}),
                )
            ]
            await asyncio.sleep(0.1)
            assert (await greedy(found))[0] == 200
            SlowChat.known.set()
            return await asyncio.gather(*waiting)

    assert [status for status, _ in run(both())] == [200, 200]


def test_people_get_text_and_tool_calls(built):
    async def talk():
        async with client(built) as (found, _):
            question = {"role": "user", "content": [{"type": "text", "text": "12+34"}]}
            body = {"messages": [question], "temperature": 0}
            chat = (await post(found, CHATS, body))[1]["choices"][0]
            wanted = {"prompt": "12", "temperature": 0, "max_tokens": 2, "logprobs": 1}
            return chat, (await post(found, COMPLETIONS, wanted))[1]["choices"][0]

    chat, text = run(talk())
    call = chat["message"]["tool_calls"][0]["function"]
    assert (call["name"], json.loads(call["arguments"])) == ("calculator", {"expression": "12+34"})
    assert chat["finish_reason"] == "tool_calls"
    assert text["text"] == "".join(text["logprobs"]["tokens"])
    assert len(text["logprobs"]["token_logprobs"]) == 2


async def load(found, name, url):
    return (await post(found, LOAD, {"lora_name": name, "lora_path": url}))[0]


@contextlib.asynccontextmanager
async def long_request(engine, found, model):
    """Within it a request of many tokens is under way; in the end it is answered as it was alone."""
    body = {"token_ids": Q, "model": model, "sampling_params": {"max_tokens": 50, "temperature": 0, "ignore_eos": True}}
    alone = await post(found, VLLM, body)
    task = asyncio.create_task(post(found, VLLM, body))
    while not engine.running:
        await asyncio.sleep(0)
    yield
    status, answer = await task
    assert (status, answer["choices"], answer["model"]) == (200, alone[1]["choices"], model)


def test_adapters_come_answer_beside_one_another_and_go(built, tmp_path):
    _, config = built
    urls = [publish(tmp_path, config, Version(step, 1), step) for step in (1, 2)]

    async def sequence():
        async with client(built, adapter_roots=(str(tmp_path),)) as (found, _):
            base = await greedy(found)
            assert await load(found, "one", urls[0]) == 200
            one = await greedy(found)
            assert await load(found, "two", urls[1]) == 200
            two = await greedy(found)
            assert len({tuple(tokens) for _, tokens in (base, one, two)}) == 3
            named = await asyncio.gather(*(greedy(found, name) for name in ("calculator-tiny", "one", "two")))
            assert named == [base, one, two]
            assert await load(found, "another name of one", urls[0]) == 200
            assert await greedy(found) == await greedy(found, "another name of one") == one
            assert await load(found, "one", urls[1]) == 400
            assert await load(found, "calculator-tiny", urls[1]) == 400
            async with found.get("/v1/models") as response:
                listed = {card["id"]: (card["root"], card["in_force"]) for card in (await response.json())["data"]}
            assert list(listed.items()) == [
                ("calculator-tiny", ("calculator-tiny", False)),
                ("one", (urls[0], False)),
                ("two", (urls[1], False)),
                ("another name of one", (urls[0], True)),
            ]
            status, _ = await post(found, "/unload_lora_adapter", {"lora_name": "another name of one"})
            assert status == 200
            assert await greedy(found) == await greedy(found, "calculator-tiny") == base
            assert await greedy(found, "one") == one
            status, reason = await greedy(found, "another name of one")
            assert status == 404
            assert "is not served here: load it, leave `model` out, or name 'calculator-tiny', 'one', 'two'" in reason
            async with found.get("/metrics") as response:
                metrics = await response.json()
            assert (metrics["adapter"], metrics["running"], metrics["failures"]) == ("", 0, 0)
            assert (metrics["adapters"], metrics["adapter_evictions"]) == (["one", "two"], 0)
            assert metrics["adapter_bytes"] >= sum(leaf.nbytes for leaf in jax.tree.leaves(zero_adapter(config, LORA)))
            assert metrics["requests"]["refused"] == 3

    run(sequence())


def test_the_adapter_used_longest_ago_makes_room_and_none_that_is_in_use(built, tmp_path):
    engine, config = built
    urls = {f"a{step}": publish(tmp_path, config, Version(step, 1), step) for step in range(1, 6)}
    options = {"adapter_roots": (str(tmp_path),), "max_adapters": 2}

    async def sequence():
        async with client(built, **options) as (found, policy):
            first = {}
            for name in ("a1", "a2"):
                await load(found, name, urls[name])
                first[name] = await greedy(found, name)
            assert await greedy(found, "a1") == first["a1"]
            assert await load(found, "a3", urls["a3"]) == 200
            assert list(policy.adapters) == ["a2", "a3"]  # a2 was in force until then, a1 was not
            status, reason = await greedy(found, "a1")
            assert (status, "'a1' made room" in reason, "more --max-adapters" in reason) == (404, True, True)
            assert await load(found, "a1", urls["a4"]) == 400  # it means still what it meant
            async with long_request(engine, found, "a3"):
                assert await load(found, "a1", urls["a1"]) == 200
                assert list(policy.adapters) == ["a3", "a1"]
                assert await greedy(found, "a1") == first["a1"]
            # Unloaded, an adapter answers what is under way, and holds its place until then.
            async with long_request(engine, found, "a3"):
                assert (await post(found, UNLOAD, {"lora_name": "a3"}))[0] == 200
                assert (await greedy(found, "a3"))[0] == 404
                assert await load(found, "a2", urls["a2"]) == 200
            assert list(policy.adapters) == ["a1", "a2"]
            assert policy.adapter_evictions == 2
            assert (await post(found, UNLOAD, {"lora_name": "a3"}))[0] == 404

    async def full():
        async with client(built, **options, room_s=0.0) as (found, policy):
            await load(found, "a1", urls["a1"])
            params = SamplingParams(max_tokens=50)
            crowd = [asyncio.create_task(policy.sample("a1", Q, params)) for _ in range(300)]
            await load(found, "a2", urls["a2"])
            status, answer = await post(found, LOAD, {"lora_name": "a3", "lora_path": urls["a3"]})
            assert status == 503
            assert "each of the 2 held was in force or had requests under way" in answer["error"]["message"]
            assert await load(found, "a1", urls["a1"]) == 200  # what is held needs no room
            assert policy.adapter == "a1"
            for task in crowd:
                task.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)
            assert await load(found, "a3", urls["a3"]) == 200

    run(sequence())
    run(full())


def test_an_adapter_whose_numbers_overflow_fails_those_who_name_it(built, tmp_path):
    engine, config = built
    huge = jax.tree.map(lambda leaf: np.full_like(leaf, 1e30), make_adapter(config, 1))
    AdapterStore(open_storage(str(tmp_path)), config, LORA).publish(Version(1, 1), huge, step_ended_at=0.0)

    async def beside():
        async with (
            client(built, adapter_roots=(str(tmp_path),)) as (found, _),
            long_request(engine, found, "calculator-tiny"),
        ):
            assert await load(found, "huge", str(tmp_path / "adapters" / "1.1")) == 200
            status, reason = await greedy(found)
            assert (status, "log-probabilities that are not finite" in reason) == (503, True)

    run(beside())


def test_a_client_that_hangs_up_during_a_load_leaves_what_is_said_and_what_is_in_force_the_same(
    built, tmp_path, caplog
):
    _, config = built
    url = publish(tmp_path, config, Version(1, 1), 1)

    async def hang_up():
        async with client(built, adapter_roots=(str(tmp_path),)) as (found, policy):
            assert await load(found, "one", url) == 200
            one = await greedy(found)
            assert one != await greedy(found, "calculator-tiny")
            for attempt in range(20):
                await post(found, UNLOAD, {"lora_name": "one"})
                loading = asyncio.create_task(load(found, "one", url))
                while not policy._changes:
                    await asyncio.sleep(0)
                for _ in range(attempt):
                    await asyncio.sleep(0)
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)
                while policy.adapter != "one":
                    await asyncio.sleep(0.001)
                assert await greedy(found, "one") == await greedy(found) == one
            # One that fails after its client has gone is no error of the server.
            loading = asyncio.create_task(load(found, "two", str(tmp_path / "two")))
            await asyncio.sleep(0.003)
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await asyncio.sleep(0.2)

    run(hang_up())
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_name_keeps_its_meaning_however_many_adapters_come_and_go(built, tmp_path, monkeypatch):
    _, config = built
    monkeypatch.setattr(serve, "REMEMBERED_ADAPTERS", 5)
    urls = [publish(tmp_path, config, Version(step, 1), step) for step in range(1, 7)]

    async def sequence():
        async with client(built, adapter_roots=(str(tmp_path),)) as (found, policy):
            assert await load(found, "first", urls[0]) == 200
            first = await greedy(found)
            for number, url in enumerate(urls[1:]):
                assert await load(found, f"a{number}", url) == 200
                assert (await post(found, UNLOAD, {"lora_name": f"a{number}"}))[0] == 200
            assert await greedy(found, "first") == first
            for number, url in enumerate(urls[1:5]):
                assert await load(found, f"b{number}", url) == 200
            assert len(policy.adapters) == 4
            assert (await greedy(found, "first"))[0] == 404
            assert await load(found, "first", urls[1]) == 400
            assert await load(found, "b4", urls[5]) == 200
            return await load(found, "first", urls[1])  # so long ago that nobody knows

    assert run(sequence()) == 200


def test_adapters_outside_the_allowed_folders_or_of_other_models_are_refused(built, tmp_path):
    _, config = built
    allowed, outside = tmp_path / "allowed", tmp_path / "outside"
    url = publish(outside, config, Version(1, 1), 1)
    too_large = publish(allowed, config, Version(2, 1), 1, LoraSettings(rank=8, alpha=16.0))
    os.symlink(outside, allowed / "link")
    broken = allowed / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text("{}")
    (broken / "adapter_model.safetensors").write_bytes(b"nothing")
    circle, deep, cut, endless = (allowed / name for name in ("circle", "deep", "cut", "endless"))
    for folder in (circle, deep, cut, endless):
        folder.mkdir()
    os.symlink("adapter_config.json", circle / "adapter_config.json")
    (deep / "adapter_config.json").write_text("[" * 100_000)
    for folder in (deep, cut, endless):
        (folder / "adapter_model.safetensors").write_bytes(
            (Path(url) / "adapter_model.safetensors").read_bytes()[: 1000 if folder is cut else None]
        )
    whole = (Path(url) / "adapter_config.json").read_text()
    (cut / "adapter_config.json").write_text(whole)
    (endless / "adapter_config.json").write_text(whole.replace('"r": 4', '"r": 1e999'))
    os.symlink(allowed / "loop", allowed / "loop")

    async def tries():
        async with client(built, adapter_roots=(str(allowed), "gs://bucket/runs")) as (found, _):
            urls = [
                url,
                f"{allowed}/../outside",
                f"{allowed}/link",
                "gs://bucket/runs-of-others/a",
                "gs://bucket/runs/../a",
                too_large,
                str(broken),
                str(allowed / "nothing"),
                str(circle),
                str(deep),
                str(cut),
                str(endless),
                str(allowed / "loop" / "adapter"),
                "a\0b",
                "\ud800",
            ]
            return [
                await post(found, "/load_lora_adapter", {"lora_name": f"a{number}", "lora_path": tried})
                for number, tried in enumerate(urls)
            ]

    answers = run(tries())
    assert [status for status, _ in answers] == [403] * 5 + [400] * 10, answers
    assert "its rank is 8" in answers[5][1]["error"]["message"]
    assert "must be a folder or a gs:// address, found 'a\\x00b'" in answers[13][1]["error"]["message"]
    assert "symbolic links" in answers[8][1]["error"]["message"]


def test_the_newest_adapter_of_a_followed_run_is_in_force(built, tmp_path):
    _, config = built
    store = AdapterStore(open_storage(str(tmp_path)), config, LORA)

    async def follow():
        async with client(built, follow=str(tmp_path), follow_poll_s=0.05) as (found, policy):
            following = asyncio.create_task(policy.follow())
            base = await greedy(found)
            seen = []
            for step in (1, 2):
                store.publish(Version(step, 1), make_adapter(config, step), step_ended_at=0.0)
                while policy.adapter != f"followed-{step}.1":
                    await asyncio.sleep(0.01)
                # A client that loads the same folder under its own name gets what is there.
                url = str(tmp_path / "adapters" / f"{step}.1")
                await post(found, "/load_lora_adapter", {"lora_name": f"mine-{step}", "lora_path": url})
                seen.append(await greedy(found, f"mine-{step}"))
            following.cancel()
            assert base not in seen
            assert seen[0] != seen[1]

    run(follow())


def test_nothing_in_a_followed_storage_ends_the_following(built, tmp_path):
    _, config = built
    link, attempts = tmp_path / "latest", [tmp_path / "a1", tmp_path / "a2"]
    os.symlink(attempts[0], link)

    async def follow():
        async with client(built, follow=str(link), follow_poll_s=0.02) as (found, policy):
            following = asyncio.create_task(policy.follow())
            for broken in ("[" * 100_000, "{", json.dumps({"format": 1, "version": "1.1"})):
                failures = policy.follow_failures
                attempts[0].mkdir(exist_ok=True)
                (attempts[0] / "latest.json").write_text(broken)
                while policy.follow_failures < failures + 2:
                    await asyncio.sleep(0.01)
            os.unlink(attempts[0] / "latest.json")
            seen = []
            for attempt, folder in enumerate(attempts):
                # A fresh attempt counts its versions from the beginning again.
                store = AdapterStore(open_storage(str(folder)), config, LORA)
                store.publish(Version(1, 1), make_adapter(config, attempt), step_ended_at=0.0)
                os.unlink(link)
                os.symlink(folder, link)
                while policy.adapter != "followed-1.1" or (seen and await greedy(found) == seen[0]):
                    await asyncio.sleep(0.01)
                seen.append(await greedy(found))
            async with found.get("/metrics") as response:
                assert (await response.json())["follow_failures"] == policy.follow_failures
            assert not following.done()
            following.cancel()

    run(follow())


def test_a_client_that_hangs_up_frees_its_slot(built):
    engine, _ = built
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 60, "ignore_eos": True}}

    async def hang_up():
        async with client(built) as (found, policy):
            for _ in range(50):
                work = [asyncio.create_task(post(found, VLLM, body)) for _ in range(8)]
                while not engine.running:
                    await asyncio.sleep(0)
                for task in work:
                    task.cancel()
                await asyncio.gather(*work, return_exceptions=True)
                if policy.answered["cancelled"]:
                    break
            while engine.running or engine.queued:
                await asyncio.sleep(0.01)
            assert policy.answered["cancelled"]
            assert (await greedy(found))[0] == 200

    run(hang_up())


def test_an_adapter_of_a_lower_rank_and_another_scale_computes_the_same(built):
    _, config = built
    small = LoraSettings(rank=2, alpha=2.0, targets=("q_proj", "down_proj"))
    adapter = make_adapter(config, 3, small)
    wide = fit(adapter, small.scale, init_adapter(config, LORA, 0), LORA.scale)
    x = np.random.default_rng(0).normal(size=96).astype(np.float32)
    a, b = (adapter["q_proj"][part][1] for part in "ab")
    wide_a, wide_b = (wide["q_proj"][part][1] for part in "ab")
    assert np.allclose(x @ a @ b * small.scale, x @ wide_a @ wide_b * LORA.scale, atol=1e-6)
    assert not np.any(wide["k_proj"]["b"])
    with pytest.raises(ValueError, match="it adapts down_proj"):
        fit(adapter, 1.0, {"q_proj": wide["q_proj"]}, 1.0)
