"""Remote servers: a real `headrace serve` process in each dialect, and servers that misbehave in ways ours does not."""

import asyncio
import contextlib
import dataclasses
import json
import math
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable

import numpy as np
import pytest
from aiohttp import web

from environments.calculator import Calculator
from environments.environment import EnvironmentSettings
from environments.orchestrator import RolloutOrchestrator
from policy import remote
from policy.chat import load_chat
from policy.client import FinishReason, PolicyError, SamplingParams
from policy.files import CALCULATOR_TINY
from policy.lora import zero_adapter
from policy.remote import RemotePolicy
from policy.serve import BASE, ServeSettings, build_policy
from policy.settings import Backend, Dialect, SamplingSettings
from policy.weights import ModelSettings, load_model
from tests.policy.server import LORA, MAX_CONTEXT, Server, make_adapter, publish, roomy_model, serving
from trajectories.schema import Kind, Status, Task, Version, VersionSpan

CHAT = load_chat(CALCULATOR_TINY)
SETTINGS = SamplingSettings(slots=8, small_batch=0, max_context=MAX_CONTEXT)
V1, V2 = Version(1, 1), Version(2, 1)


def prompt(text="12+34"):
    return [CHAT.ids["<q>"], *CHAT.encode(text), CHAT.ids["</q>"]]


def run(work):
    return asyncio.run(asyncio.wait_for(work, 240))


@contextlib.contextmanager
def connected(*addresses, dialect=Dialect.VLLM, api_key="", **changes):
    settings = dataclasses.replace(
        SETTINGS, backend=Backend.REMOTE, servers=tuple(addresses), dialect=dialect, **changes
    )
    policy = RemotePolicy(settings, "test", CHAT.vocab_size, version=BASE, api_key=api_key)
    try:
        yield policy
    finally:
        policy.close()


def ask(policy, ids=None, session="s", version=None, **params):
    return run(policy.sample(session, prompt() if ids is None else ids, SamplingParams(**params), version=version))


def metrics(server):
    with urllib.request.urlopen(f"{server.address}/metrics") as response:
        return json.load(response)


def until(condition: Callable[[], bool], timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return roomy_model(tmp_path_factory.mktemp("models") / "roomy")


@pytest.fixture(scope="module")
def engine(model):
    """The same engine in this process."""
    engine = build_policy(ModelSettings(model), LORA, SETTINGS, ServeSettings())[0].engine
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def config(model):
    return load_model(ModelSettings(model)).config


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def server(model, storage):
    with serving(model, "--port", "0", "--adapters", str(storage)) as server:
        yield server


@pytest.fixture(autouse=True)
def base_in_force(request):
    """Each test finds the base model at the server."""
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        if name := metrics(server)["adapter"]:
            body = json.dumps({"lora_name": name}).encode()
            urllib.request.urlopen(urllib.request.Request(f"{server.address}/unload_lora_adapter", body)).close()


def sampled_here(engine, ids, **params):
    engine_session = f"here/{np.random.default_rng().integers(1 << 60)}"
    completion = run(engine.sample(engine_session, ids, SamplingParams(**params)))
    engine.close_session(engine_session)
    return completion


def assert_same(found, expected):
    assert found.token_ids_N.tolist() == expected.token_ids_N.tolist()
    assert np.abs(found.logprobs_N - expected.logprobs_N).max() < 1e-5
    assert found.finish_reason == expected.finish_reason
    assert [ids.tolist() for ids in found.kept_ids] == [ids.tolist() for ids in expected.kept_ids]


@pytest.mark.parametrize("dialect", Dialect)
def test_every_dialect_samples_what_the_engine_in_this_process_samples(dialect, server, engine):
    stops = CHAT.stop_token_ids
    with connected(server.address, dialect=dialect) as policy:
        for temperature in (0.0, 0.7, 1.0):
            for seed in range(3):
                params = {"temperature": temperature, "seed": seed, "max_tokens": 14, "stop_token_ids": stops}
                assert_same(ask(policy, **params), sampled_here(engine, prompt(), **params))
        short = ask(policy, max_tokens=2, stop_token_ids=stops)
        assert (short.finish_reason, len(short.token_ids_N)) == (FinishReason.LENGTH, 2)
        assert short.version_spans == (VersionSpan(0, BASE),)
        assert policy.first_token_at.keys() == {BASE}
        assert (policy.running, policy.queued) == (0, 0)


@pytest.mark.parametrize("dialect", [Dialect.VLLM, Dialect.SGLANG])
def test_truncated_draws_come_with_the_ids_they_chose_from(dialect, server, engine):
    with connected(server.address, dialect=dialect) as policy:
        for truncation in ({"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2, "top_k": 10}):
            params = {"temperature": 1.3, "seed": 3, "max_tokens": 14, "stop_token_ids": CHAT.stop_token_ids}
            found = ask(policy, **params, **truncation)
            assert_same(found, sampled_here(engine, prompt(), **params, **truncation))
            assert len(found.kept_ids) == len(found.token_ids_N)


@pytest.mark.parametrize("dialect", Dialect)
def test_stop_strings_end_a_turn_in_every_dialect(dialect, server, engine):
    params = {"temperature": 0.0, "max_tokens": 14, "stop": ("+3",), "stop_token_ids": CHAT.stop_token_ids}
    with connected(server.address, dialect=dialect) as policy:
        found = ask(policy, **params)
        assert_same(found, sampled_here(engine, prompt(), **params))
        assert found.finish_reason == FinishReason.STOP
        assert CHAT.decode(found.token_ids_N.tolist()).endswith("+3")


def test_a_context_that_fills_up_ends_the_turn(server):
    with connected(server.address) as policy:
        ids = (prompt("1+1") * 300)[: MAX_CONTEXT - 6]
        cut = ask(policy, ids, max_tokens=50)
        assert (cut.finish_reason, len(cut.token_ids_N)) == (FinishReason.CONTEXT, 6)
        full = ask(policy, ids + cut.token_ids_N.tolist(), max_tokens=50)
        assert (full.finish_reason, len(full.token_ids_N)) == (FinishReason.CONTEXT, 0)


@pytest.mark.parametrize("dialect", Dialect)
def test_an_adapter_is_in_force_after_the_swap(dialect, server, engine, config, storage):
    versions = Version(1, 10 + list(Dialect).index(dialect)), Version(2, 10 + list(Dialect).index(dialect))
    params = {"temperature": 0.0, "max_tokens": 14, "stop_token_ids": CHAT.stop_token_ids}
    with connected(server.address, dialect=dialect) as policy:
        before = ask(policy, **params)
        for seed, version in enumerate(versions):
            policy.swap(publish(storage, config, version, seed), version)
            engine.swap(make_adapter(config, seed), version)
            found = ask(policy, **params)
            assert_same(found, sampled_here(engine, prompt(), **params))
            assert found.version_spans == (VersionSpan(0, version),)
            assert policy.version == version
            assert found.logprobs_N.tolist() != before.logprobs_N.tolist()
        engine.swap(zero_adapter(config, LORA), BASE)


def test_a_pinned_version_is_waited_for_and_answers_beside_the_next(server, config, storage):
    with connected(server.address) as policy:

        async def pinned():
            waiting = asyncio.create_task(policy.sample("p", prompt(), SamplingParams(max_tokens=3), version=V1))
            while not policy.queued:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(policy.swap, publish(storage, config, V1, 5), V1)
            return await waiting

        assert run(pinned()).version_spans == (VersionSpan(0, V1),)
        policy.swap(publish(storage, config, V2, 6), V2)
        for pinned, version in ((V1, V1), (None, V2)):
            assert ask(policy, version=pinned, max_tokens=3).version_spans == (VersionSpan(0, version),)


def test_a_kept_version_that_made_room_at_the_server_is_loaded_again(server, config, storage):
    versions = [Version(step, 40) for step in range(1, 6)]
    with connected(server.address) as policy:
        for version in versions:
            policy.swap(publish(storage, config, version, 40 + version.step), version)
            if version == versions[0]:
                policy.keep(str(storage / f"run-{version}" / "adapters" / str(version)), version)
                first = ask(policy, temperature=0.0, max_tokens=14)
        assert f"headrace-test-{versions[0]}" not in metrics(server)["adapters"]
        assert_same(ask(policy, version=versions[0], temperature=0.0, max_tokens=14), first)
        latest = ask(policy, temperature=0.0, max_tokens=14)
        assert latest.version_spans == (VersionSpan(0, versions[-1]),)
        assert latest.token_ids_N.tolist() != first.token_ids_N.tolist()


def test_a_failed_swap_leaves_the_old_version_in_force(server, storage):
    with connected(server.address) as policy:
        with pytest.raises(PolicyError, match="holds no adapter"):
            policy.swap(str(storage / "adapters" / "7.7"), Version(7, 7))
        with pytest.raises(PolicyError, match=r"403.*may be loaded from below"):
            policy.swap("/", Version(7, 7))
        assert policy.version == BASE
        assert len(ask(policy, max_tokens=3).token_ids_N) == 3


def test_requests_go_on_while_adapters_change(server, config, storage):
    versions = [Version(step, 20) for step in range(1, 6)]
    urls = [publish(storage, config, version, 30 + version.step) for version in versions]
    with connected(server.address) as policy:

        async def everything():
            async def episode(k):
                found = []
                while policy.version != versions[-1]:
                    params = SamplingParams(max_tokens=20, seed=k)
                    found.append(await policy.sample(f"e/{k}", prompt(f"{k}+{k}"), params))
                return found

            episodes = [asyncio.create_task(episode(k)) for k in range(12)]
            for url, version in zip(urls, versions, strict=True):
                await asyncio.sleep(0.2)
                await asyncio.to_thread(policy.swap, url, version)
            return await asyncio.gather(*episodes)

        completions = [completion for found in run(everything()) for completion in found]
    assert all(len(completion.token_ids_N) == 20 for completion in completions)
    assert len({completion.version_spans for completion in completions}) > 1


def test_a_cancelled_request_gives_its_slot_back(server):
    before = metrics(server)["requests"].get("cancelled", 0)
    with connected(server.address) as policy:

        async def cancel():
            work = [
                asyncio.create_task(policy.sample(f"c/{k}", prompt(), SamplingParams(max_tokens=1000, seed=k)))
                for k in range(8)
            ]
            while not (await asyncio.to_thread(metrics, server))["running"]:
                await asyncio.sleep(0.001)
            for task in work:
                task.cancel()
            return await asyncio.gather(*work, return_exceptions=True)

        assert asyncio.CancelledError in {type(result) for result in run(cancel())}
        until(lambda: policy.running == 0)
        until(lambda: metrics(server)["running"] == 0)
        assert metrics(server)["requests"]["cancelled"] > before


def test_a_server_killed_under_requests_and_started_again(model, config, storage):
    version = Version(3, 30)
    url = publish(storage, config, version, 3)
    with (
        serving(model, "--port", "0", "--adapters", str(storage)) as first,
        connected(first.address, request_retries=3) as policy,
    ):
        policy.swap(url, version)
        expected = ask(policy, temperature=0.0, max_tokens=14)

        async def under_requests():
            work = [
                asyncio.create_task(policy.sample(f"k/{k}", prompt(), SamplingParams(max_tokens=1000, seed=k)))
                for k in range(8)
            ]
            while not policy.running:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
            await asyncio.to_thread(first.kill)
            return await asyncio.gather(*work, return_exceptions=True)

        ended = run(under_requests())
        failed = [error for error in ended if isinstance(error, BaseException)]
        assert failed
        assert all(isinstance(error, PolicyError) and "could not be reached" in str(error) for error in failed)
        second = Server(model, "--port", first.port, "--adapters", str(storage))
        try:
            # The new process knows no adapter; it is told of it by the first request that names it.
            assert_same(ask(policy, temperature=0.0, max_tokens=14), expected)
        finally:
            second.kill()


def test_a_whole_episode_runs_over_a_server(server):
    settings = EnvironmentSettings(name="environments.calculator:Calculator", max_turns=4, max_concurrency=8)
    environment = Calculator(seed=0, latency_s=0.0)
    with connected(server.address) as policy:

        async def episodes():
            orchestrator = RolloutOrchestrator(
                policy, CHAT, environment, settings, SamplingParams(temperature=0.7, max_tokens=14), 0
            )
            task = Task("run", 0, group_size=8, payload=environment.tasks.task(0), kind=Kind.TRAIN)
            return await asyncio.gather(*(orchestrator.run(task, sample) for sample in range(8)))

        for episode in run(episodes()):
            assert episode.status in (Status.COMPLETED, Status.MAX_TURNS, Status.MAX_TOKENS), episode.error
            assert episode.version_spans == (VersionSpan(episode.prompt_length, BASE),)
            assert len(episode.turns) >= 1
            assert (episode.logprobs_T[episode.loss_mask_T] < 0).any()


# Servers that ours is not.


class Scripted:
    """An HTTP server that answers by a script: `answer(body)` gives a status and a JSON body or text."""

    def __init__(self, answer, cards=({"id": "m"},), delay_s=0.0):
        self.answer, self.cards, self.delay_s = answer, cards, delay_s
        self.bodies, self.loads, self.unloads, self.headers = [], [], [], []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.address = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)

    async def _start(self):
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        for path in ("/inference/v1/generate", "/generate", "/v1/completions"):
            app.router.add_post(path, self._generate)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        app.router.add_post("/v1/unload_lora_adapter", self._unload)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _models(self, request):
        return web.json_response({"data": self.cards})

    async def _load(self, request):
        self.loads.append(await request.json())
        await asyncio.sleep(self.delay_s)
        return web.json_response("ok")

    async def _unload(self, request):
        self.unloads.append((await request.json())["lora_name"])
        return web.json_response("ok")

    async def _generate(self, request):
        self.headers.append(dict(request.headers))
        await asyncio.sleep(self.delay_s)
        self.bodies.append(await request.json())
        status, body, *headers = self.answer(self.bodies[-1])
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, body=text.encode(), headers=headers[0] if headers else {})

    def close(self):
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture
def scripted():
    """Makes scripted servers and closes them."""
    servers = []

    def make(answer, **options):
        servers.append(Scripted(answer, **options))
        return servers[-1]

    yield make
    for one in servers:
        one.close()


def vllm(ids, logprobs, finish="length", **more):
    content = [{"token_id": token, "logprob": p} for token, p in zip(ids, logprobs, strict=True)]
    return {"choices": [{"token_ids": ids, "logprobs": {"content": content}, "finish_reason": finish, **more}]}


GOOD = vllm([1, 2, 3], [-0.5, -0.25, -1.0])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("no json", "is not vllm's"),
        ({"choices": []}, "is not vllm's"),
        ({"choices": [{"token_ids": [1], "finish_reason": "length"}]}, "is not vllm's"),
        ({"choices": [{"token_ids": [1, 2], "logprobs": {"content": [{"token_id": 1, "logprob": -1}]}}]}, "not agree"),
        ({"choices": [{"token_ids": [1], "logprobs": {"content": [{"token": "a", "logprob": -1}]}}]}, "as text"),
        (vllm([1, 2, 3, 4], [-1.0] * 4), "4 tokens, asked were 1 to 3"),
        (vllm([], []), "0 tokens"),
        (vllm([1, 9999], [-1.0, -1.0]), "token id 9999 is not in the vocabulary"),
        (vllm([1, -1], [-1.0, -1.0]), "token id -1 is not in the vocabulary"),
        (vllm([1], [float("nan")]), "finite"),
        (vllm([1], [0.5]), "at most 0"),
        (vllm([1], [-9999.0]), "finite"),
        (vllm([1], [-1.0], "stop", stop_reason=7), "stopped at token 7"),
        (vllm([10**30], [-1.0]), "token id 10{11}.* is not in the vocabulary"),
        (vllm([1], [-(10**400)]), "is not vllm's: OverflowError"),
        (vllm([1], [-1e300]), "finite"),
        (vllm([1.0], [-1.0]), r"must be a whole number, found 1\.0"),
        (vllm([1], ["-1"]), "must be a number, found '-1'"),
        ('{"choices": [{"token_ids": ' + "[" * 900 + "]" * 900 + "}]}", "is not vllm's"),
        ("[" * 100_000, "is not vllm's: RecursionError"),
        ("null", "is not vllm's"),
        ("5", "is not vllm's"),
        ("", "is not vllm's"),
        ({"choices": {"0": 1}}, "is not vllm's"),
        ({"choices": [5]}, "is not vllm's"),
        ({"choices": [{"token_ids": 5, "logprobs": {"content": []}, "finish_reason": "length"}]}, "is not vllm's"),
        ({"choices": [{"token_ids": [1], "logprobs": {"content": [5]}, "finish_reason": "length"}]}, "is not vllm's"),
        ({"choices": [{"token_ids": [1], "logprobs": {"content": [{"token": 5, "logprob": -1}]}}]}, "as text"),
    ],
)
def test_unusable_answers_are_refused_and_say_why(body, message, scripted):
    server = scripted(lambda _: (200, body))
    with connected(server.address) as policy:
        with pytest.raises(PolicyError, match=message) as caught:
            ask(policy, max_tokens=3)
        assert server.address in str(caught.value)
        server.answer = lambda _: (200, GOOD)
        assert ask(policy, max_tokens=3).token_ids_N.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("dialect", "answer", "message"),
    [
        (Dialect.SGLANG, {"meta_info": {"finish_reason": None, "output_token_logprobs": []}}, "is not sglang's"),
        (Dialect.SGLANG, {"meta_info": {"finish_reason": "stop", "output_token_logprobs": []}}, "is not sglang's"),
        (
            Dialect.SGLANG,
            {"meta_info": {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-1.0]]}},
            "is not sglang's",
        ),
        (
            Dialect.SGLANG,
            {
                "meta_info": {
                    "finish_reason": {"type": "length"},
                    "output_token_logprobs": [[-1.0, 1, None]],
                    "output_token_sampling_mask": [[1]],
                }
            },
            "is not sglang's",
        ),
        (
            Dialect.COMPLETIONS,
            {"choices": [{"logprobs": {"tokens": ["token_id:" + "9" * 5000], "token_logprobs": [-1.0]}}]},
            "is not completions's",
        ),
        (
            Dialect.COMPLETIONS,
            {"choices": [{"logprobs": {"tokens": [None], "token_logprobs": [None]}, "finish_reason": "stop"}]},
            "as text",
        ),
    ],
)
def test_answers_of_the_other_dialects_are_looked_at_as_closely(dialect, answer, message, scripted):
    server = scripted(lambda _: (200, answer))
    with connected(server.address, dialect=dialect) as policy, pytest.raises(PolicyError, match=message):
        ask(policy, max_tokens=3)


def test_what_else_a_server_may_say_of_itself_is_a_policy_error(scripted, monkeypatch):
    """Its models, its refusals, its character set, the size of its answer."""
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    nested = '{"error": {"message": ' + "[" * 900 + "]" * 900 + "}}"
    server = scripted(lambda _: (400, nested))
    with connected(server.address, request_retries=0) as policy:
        with pytest.raises(PolicyError, match="answered 400"):
            ask(policy)
        server.answer = lambda _: (200, GOOD, {"Content-Type": "application/json; charset=hex"})
        assert ask(policy, max_tokens=3).token_ids_N.tolist() == [1, 2, 3]
        server.answer = lambda _: (200, GOOD, {"Content-Encoding": "gzip"})
        with pytest.raises(PolicyError, match="could not be reached: "):
            ask(policy, max_tokens=3)
        monkeypatch.setattr(remote, "MOST_BYTES", 1000)
        server.answer = lambda _: (200, " " * 1001)
        with pytest.raises(PolicyError, match="an answer of more than 1000 bytes"):
            ask(policy, max_tokens=3)
    for cards in ([{}], [{"id": 5}], ["m"], [None], 5, None):
        server = scripted(lambda _: (200, GOOD), cards=cards)
        with connected(server.address) as policy, pytest.raises(PolicyError, match="gave no list of models"):
            ask(policy, max_tokens=3)
    for address in ("http://" + "a" * 70 + ".invalid:80", "http://host.invalid:99999"):
        with connected(address, request_retries=0) as policy, pytest.raises(PolicyError, match="invalid"):
            ask(policy, max_tokens=3)


def test_the_answers_of_earlier_and_later_vllm_are_read(scripted):
    earlier = {
        "choices": [
            {
                "token_ids": [4, 5],
                "logprobs": {"content": [{"token": f"token_id:{t}", "logprob": -0.5, "bytes": []} for t in (4, 5)]},
                "finish_reason": "stop",
                "stop_reason": 5,
            }
        ]
    }
    for answer in (earlier, vllm([4, 5], [-0.5, -0.5], "stop", stop_reason=5)):
        with connected(scripted(lambda _, answer=answer: (200, answer)).address) as policy:
            found = ask(policy, max_tokens=3, stop_token_ids=(5,))
            assert (found.token_ids_N.tolist(), found.finish_reason) == ([4, 5], FinishReason.STOP)


def test_an_overloaded_server_is_asked_again_and_a_refusal_is_not(scripted, monkeypatch):
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    answers = [(503, {"error": {"message": "full"}}), (429, "slow", {"Retry-After": "0"}), (200, GOOD)]
    server = scripted(lambda _: answers.pop(0))
    with connected(server.address) as policy:
        assert ask(policy, max_tokens=3, seed=11).token_ids_N.tolist() == [1, 2, 3]
        assert policy.retries == 2
        # The same request each time: the seed makes it one.
        assert all(body == server.bodies[0] for body in server.bodies)
        server.answer = lambda _: (500, "broken")
        with pytest.raises(PolicyError, match=r"given up after 7 tries: .* answered 500: broken"):
            ask(policy, max_tokens=3)
        server.bodies.clear()
        server.answer = lambda _: (400, {"error": {"message": "too long a prompt"}})
        with pytest.raises(PolicyError, match="answered 400: too long a prompt"):
            ask(policy, max_tokens=3)
        assert len(server.bodies) == 1


def probed(server_logprobs):
    """A vLLM that reports, for the probe's eight tokens, what `server_logprobs` says."""

    def answer(body):
        if body["sampling_params"]["max_tokens"] == remote.PROBE.max_tokens:
            return 200, vllm(list(range(8)), server_logprobs)
        return 200, GOOD

    return answer


def test_log_probs_at_temperature_1_are_found_out_and_other_temperatures_refused(scripted):
    flat, raw = [-math.log(CHAT.vocab_size)] * 8, [-3.0, -9.0, -1.0, -12.0, -2.0, -7.0, -4.0, -5.0]
    honest, other = scripted(probed(flat)), scripted(probed(raw))
    with connected(honest.address) as policy:
        assert len(ask(policy, temperature=0.7, max_tokens=3).token_ids_N) == 3
        assert len(ask(policy, temperature=0.7, max_tokens=3).token_ids_N) == 3
        assert len(honest.bodies) == 3  # asked once
    with connected(other.address) as policy:
        for temperature in (0.0, 1.0):
            ask(policy, temperature=temperature, max_tokens=3)
        with pytest.raises(PolicyError, match=r"at temperature 1.*--logprobs-mode processed_logprobs"):
            ask(policy, temperature=0.7, max_tokens=3)


def test_an_adapter_that_a_server_forgot_is_loaded_again(scripted):
    known = []

    def answer(body):
        name = body["model"]
        if name not in known:
            known.append(name)
            return 404, {"error": {"message": f"The model `{name}` does not exist."}}
        return 200, GOOD

    server = scripted(answer)
    with connected(server.address) as policy:
        policy.swap("gs://bucket/run/adapters/1.1", V1)
        assert ask(policy, max_tokens=3).version_spans == (VersionSpan(0, V1),)
        wanted = {"lora_name": "headrace-test-1.1", "lora_path": "gs://bucket/run/adapters/1.1"}
        assert server.loads == [wanted, wanted]


def test_a_kept_version_answers_beside_the_one_in_force_until_it_is_dropped(scripted, monkeypatch):
    monkeypatch.setattr(remote, "RETIRE_S", 0.05)
    server = scripted(lambda body: (200, GOOD))
    with connected(server.address) as policy:
        policy.swap("run/adapters/1.1", V1)
        policy.keep("run/adapters/1.1", V1)
        policy.swap("run/adapters/2.1", V2)
        time.sleep(0.2)  # in which one that nobody keeps is unloaded
        for pinned, version in ((V1, V1), (None, V2)):
            assert ask(policy, version=pinned, max_tokens=3).version_spans == (VersionSpan(0, version),)
            assert server.bodies[-1]["model"] == f"headrace-test-{version}"
        assert server.unloads == []
        policy.drop(V1)
        while not server.unloads:
            time.sleep(0.01)
        assert server.unloads == ["headrace-test-1.1"]
        with pytest.raises(PolicyError, match=r"pinned version 1\.1 was replaced by 2\.1"):
            ask(policy, version=V1, max_tokens=3)
        policy.keep("run/adapters/1.1", V1)  # loaded for those pinned to it alone
        assert ask(policy, version=V1, max_tokens=3).version_spans == (VersionSpan(0, V1),)
        assert ask(policy, max_tokens=3).version_spans == (VersionSpan(0, V2),)


@pytest.mark.parametrize("keep_first", [True, False])
def test_a_version_that_is_kept_while_it_comes_into_force_is_served_and_unloaded(scripted, monkeypatch, keep_first):
    monkeypatch.setattr(remote, "RETIRE_S", 0.05)
    server = scripted(lambda body: (200, GOOD), delay_s=0.1)
    with connected(server.address) as policy:
        calls = [policy.keep, policy.swap] if keep_first else [policy.swap, policy.keep]
        threads = [threading.Thread(target=call, args=("run/adapters/1.1", V1)) for call in calls]
        for thread in threads:
            thread.start()
            time.sleep(0.02)
        for thread in threads:
            thread.join()
        policy.drop(V1)
        time.sleep(0.2)  # in which one that is neither kept nor in force is unloaded
        assert ask(policy, version=V1, max_tokens=3).version_spans == (VersionSpan(0, V1),)
        assert server.unloads == []
        policy.swap("run/adapters/2.1", V2)
        until(lambda: server.unloads == ["headrace-test-1.1"])


def test_sessions_stay_with_a_server_and_pass_over_one_that_is_away(scripted):
    servers = [scripted(lambda _: (200, GOOD)) for _ in range(2)]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with connected(*(s.address for s in servers), dead) as policy:
            for turn in range(3):
                for k in range(12):
                    ask(policy, [k, *[1] * turn], f"episode/{k}", max_tokens=3)
    firsts = [{body["token_ids"][0] for body in server.bodies} for server in servers]
    assert firsts[0] | firsts[1] == set(range(12))
    assert not firsts[0] & firsts[1]
    assert all(firsts)


def test_truncation_needs_the_kept_ids(scripted):
    flat = [-math.log(CHAT.vocab_size)] * 8

    def answer(body):
        if body["sampling_params"]["top_k"] == -1:
            return 200, vllm(list(range(8)), flat)
        return 200, kept

    server = scripted(answer)
    with connected(server.address) as policy:
        kept = vllm([1, 2], [-0.5, -0.5], sampling_mask=[[3, 1], [2, 5, 4]])
        found = ask(policy, max_tokens=2, top_k=3)
        assert [ids.tolist() for ids in found.kept_ids] == [[1, 3], [2, 4, 5]]
        kept = vllm([1, 2], [-0.5, -0.5])
        with pytest.raises(PolicyError, match="--return-sampling-mask"):
            ask(policy, max_tokens=2, top_k=3)
        for mask in ([[3], [2]], [[], [2]], [[1, 2.5], [2]], [[1, -1], [2]], [[1, 10**30], [2]], [[1, [2]], [2]]):
            kept = vllm([1, 2], [-0.5, -0.5], sampling_mask=mask)
            with pytest.raises(PolicyError, match="drawn from ids that lack it or lie outside"):
                ask(policy, max_tokens=2, top_k=3)
        for mask in (5, "ab", {"0": [1], "1": [2]}, [1, 2], [[1], None]):
            kept = vllm([1, 2], [-0.5, -0.5], sampling_mask=mask)
            with pytest.raises(PolicyError, match="must be a list for each, found"):
                ask(policy, max_tokens=2, top_k=3)
        kept = vllm([1, 2], [-0.5, -0.5], sampling_mask=[list(range(24)) * 3, [2]])
        with pytest.raises(PolicyError, match=r"drawn from 72 ids, sampling.max_kept is 64"):
            ask(policy, max_tokens=2, top_k=3)
    with (
        connected(server.address, dialect=Dialect.COMPLETIONS) as policy,
        pytest.raises(PolicyError, match="use the dialect vllm or sglang"),
    ):
        ask(policy, max_tokens=2, top_k=3)


def test_the_key_is_sent_and_never_told(scripted, caplog):
    server = scripted(lambda _: (401, {"error": {"message": "no"}}))
    with connected(server.address, api_key="very-secret") as policy:
        with pytest.raises(PolicyError, match=r"set sampling\.api_key_env") as caught:
            ask(policy)
        assert server.headers[0]["Authorization"] == "Bearer very-secret"
        assert "very-secret" not in str(caught.value) + caplog.text


def test_a_server_with_a_shorter_context_or_another_model_is_refused(scripted):
    server = scripted(lambda _: (200, GOOD), cards=({"id": "m", "max_model_len": 100},))
    with connected(server.address) as policy, pytest.raises(PolicyError, match="holds 100 tokens"):
        ask(policy)
    with (
        connected(server.address, served_model="other") as policy,
        pytest.raises(PolicyError, match=r"serves m; sampling\.served_model is 'other'"),
    ):
        ask(policy)


def test_a_slow_server_and_a_closed_policy_fail_what_waits(scripted):
    server = scripted(lambda _: (200, GOOD), delay_s=30.0)
    with (
        connected(server.address, request_timeout_s=0.3) as policy,
        pytest.raises(PolicyError, match=r"did not answer within sampling.request_timeout_s \(0.3 s\)"),
    ):
        ask(policy)
    with connected(server.address) as policy:

        async def closed_under_it():
            work = asyncio.create_task(policy.sample("s", prompt(), SamplingParams()))
            while not policy.running:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(policy.close)
            await work

        with pytest.raises(PolicyError, match="closed"):
            run(closed_under_it())
        with pytest.raises(PolicyError, match="closed"):
            ask(policy)


def test_a_temperature_that_vllm_would_raise_in_silence_is_refused(scripted):
    server = scripted(lambda _: (200, GOOD))
    for dialect in (Dialect.VLLM, Dialect.COMPLETIONS):
        with connected(server.address, dialect=dialect) as policy, pytest.raises(PolicyError, match=r"at least 0\.01"):
            ask(policy, temperature=0.005)
    assert not server.bodies


def test_requests_that_race_the_end_of_the_policy_fail_and_none_hangs(scripted, monkeypatch):
    server = scripted(lambda _: (200, GOOD))
    ended = []

    def busy(policy):
        async def ask_on():
            while True:
                await policy.sample("s", prompt(), SamplingParams(max_tokens=3))

        with pytest.raises(PolicyError, match="the policy is closed"):
            asyncio.run(ask_on())
        ended.append(threading.current_thread())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(10):
            with connected(server.address) as policy:
                threads = [threading.Thread(target=busy, args=(policy,), daemon=True) for _ in range(8)]
                for thread in threads:
                    thread.start()
                until(lambda policy=policy: policy.tokens_sampled > 30)
            for thread in threads:
                thread.join(60.0)
            assert not any(thread.is_alive() for thread in threads)
    finally:
        sys.setswitchinterval(interval)
    assert len(ended) == 80

    # The worst moment, made to happen: the policy is closed while a request is on its way to the HTTP thread.
    leave, closing = asyncio.run_coroutine_threadsafe, threading.Event()

    def late(work, loop):
        if work.__name__ == "_sample":
            closing.set()
            time.sleep(0.5)
        return leave(work, loop)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", late)
    with connected(server.address) as policy:
        thread = threading.Thread(target=busy, args=(policy,), daemon=True)
        thread.start()
        assert closing.wait(60.0)
    thread.join(60.0)
    assert len(ended) == 81


def test_a_swap_under_way_when_the_policy_closes_is_a_policy_error(scripted):
    server = scripted(lambda _: (200, GOOD), delay_s=30.0)
    with connected(server.address) as policy:
        failed = []

        def swap():
            try:
                policy.swap("gs://bucket/run/adapters/1.1", V1)
            except PolicyError as error:
                failed.append(error)

        thread = threading.Thread(target=swap, daemon=True)
        thread.start()
        until(lambda: server.loads)
    thread.join(60.0)
    assert "the policy is closed" in str(failed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": Backend.REMOTE}, "must hold an address"),
        ({"servers": ("10.0.0.5:8000",)}, "addresses like http"),
        ({"servers": ("http://me:pass@host:1",)}, "api_key_env"),
        ({"servers": ("http://a:1", "http://a:1")}, "each address once"),
        ({"request_timeout_s": 0.0}, "more than 0 seconds"),
        ({"backend": Backend.REMOTE, "servers": ("http://a:1",), "top_p": 0.9}, "top_k must be above 0"),
        (
            {"backend": Backend.REMOTE, "servers": ("http://a:1",), "top_k": 5, "dialect": Dialect.COMPLETIONS},
            "must be vllm or sglang",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        SamplingSettings(**changes)
    assert "pass" not in str(caught.value).replace("password", "")
