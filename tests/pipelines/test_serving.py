"""`headrace serve` as a process, and a run whose workers sample at it."""

import asyncio
import contextlib
import http.client
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from pipelines.cli import main
from pipelines.config import load_run
from policy.adapters import AdapterStore
from policy.chat import Message, load_chat
from policy.client import PolicyError, SamplingParams
from policy.files import CALCULATOR_TINY
from policy.weights import load_model
from tests.policy.server import make_adapter, roomy_model, serving
from trajectories.schema import Version, VersionSpan
from trajectories.storage import open_storage
from transforms.runtime import BASE, open_policy

RUN = """
name = "served"
storage = "{storage}"
[model]
path = "{model}"
[lora]
rank = 4
alpha = 8.0
[sampling]
slots = 4
small_batch = 0
max_context = 512
max_tokens = 14
[packing]
buckets = [512]
"""


def write_run(folder: Path, model: str = CALCULATOR_TINY) -> Path:
    file = folder / "run.toml"
    file.write_text(RUN.format(storage=folder / "storage", model=model))
    return file


def test_workers_of_a_run_sample_at_the_server_and_follow_its_learner(tmp_path: Path) -> None:
    file = write_run(tmp_path, roomy_model(tmp_path / "model"))
    ids = load_chat(CALCULATOR_TINY).prompt([Message("user", "12+34")])
    with serving(str(file), "--port", "0", "--api-key-env", "SERVE_KEY", sets=(), SERVE_KEY="sesame") as server:
        run = load_run(
            str(file),
            [
                "sampling.backend=remote",
                f'sampling.servers=["{server.address}"]',
                "sampling.dialect=sglang",
                "sampling.api_key_env=HEADRACE_TEST_KEY",
                "run_id=served-1",
            ],
        )
        spec = run.rollout_spec()
        with pytest.raises(PolicyError, match="HEADRACE_TEST_KEY"):
            open_policy(spec)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HEADRACE_TEST_KEY", "sesame")
            policy, follower, _ = open_policy(spec)
        config = load_model(run.model).config
        store = AdapterStore(open_storage(run.storage), config, run.lora)

        def ask() -> tuple[list[int], tuple[VersionSpan, ...]]:
            params = SamplingParams(temperature=0.0, max_tokens=14)
            found = asyncio.run(policy.sample("s", ids, params))
            return found.token_ids_N.tolist(), found.version_spans

        try:
            assert follower.poll() is None
            base, spans = ask()
            assert spans == (VersionSpan(0, BASE),)
            drawn = [base]
            for version in (Version(1, 1), Version(2, 1)):
                store.publish(version, make_adapter(config, version.step, run.lora), step_ended_at=time.time())
                assert follower.poll() == version == policy.version
                tokens, spans = ask()
                assert spans == (VersionSpan(0, version),)
                drawn.append(tokens)
            assert len({tuple(tokens) for tokens in drawn}) == 3
            assert list(policy.first_token_at) == [BASE, Version(1, 1), Version(2, 1)]

            # SIGTERM under requests: they fail, and the process ends within seconds.
            async def long_request() -> None:
                with contextlib.suppress(PolicyError):
                    await policy.sample("long", ids, SamplingParams(max_tokens=500))

            waiting = [threading.Thread(target=asyncio.run, args=(long_request(),)) for _ in range(3)]
            for thread in waiting:
                thread.start()
            assert server.stop(30.0) == 0
        finally:
            policy.close()
        for thread in waiting:
            thread.join(60)
        assert not any(thread.is_alive() for thread in waiting)


def test_what_cannot_be_served_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tries = {
        "cannot be served: model.path": ["serve", str(tmp_path / "none")],
        "there is no such file": ["serve", str(tmp_path / "none.toml")],
        "which is not set": ["serve", CALCULATOR_TINY, "--api-key-env", "HEADRACE_NO_SUCH_KEY"],
        "takes model, lora and sampling here": ["serve", CALCULATOR_TINY, "--set", "learner.steps=3"],
        "at most the model's 64": ["serve", CALCULATOR_TINY, "--set", "sampling.max_context=4096"],
        "is no adapter": ["serve", CALCULATOR_TINY, "--adapter", str(tmp_path)],
        "a storage address is": ["serve", CALCULATOR_TINY, "--follow", "s3://bucket/run"],
        "the port must be from 0 (any free one) to 65535, found 65536": ["serve", CALCULATOR_TINY, "--port", "65536"],
        "port 0 of 192.0.2.1 cannot be listened at": ["serve", CALCULATOR_TINY, "--host", "192.0.2.1", "--port", "0"],
        "the adapters held must be at least 2, found 1": ["serve", CALCULATOR_TINY, "--max-adapters", "1"],
        "port 8000 of not.a.host.invalid cannot": ["serve", CALCULATOR_TINY, "--host", "not.a.host.invalid"],
        f"port 8000 of {'a' * 70} cannot": ["serve", CALCULATOR_TINY, "--host", "a" * 70],
    }
    for message, arguments in tries.items():
        assert main(arguments) == 2, message
        assert message in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        # The model is not even looked for: loading one takes its time.
        for model in (CALCULATOR_TINY, str(tmp_path / "none")):
            assert main(["serve", model, "--port", port]) == 2
            said = capsys.readouterr().err
            assert f"port {port} of 127.0.0.1 is taken: end what listens there, or choose another with --port" in said


def test_a_model_alone_is_served_with_its_adapter(tmp_path: Path) -> None:
    run = load_run(str(write_run(tmp_path)))
    config = load_model(run.model).config
    AdapterStore(open_storage(run.storage), config, run.lora).publish(
        Version(1, 1), make_adapter(config, 1, run.lora), step_ended_at=0.0
    )
    adapter = f"{run.storage}/adapters/1.1"
    sets = ("sampling.max_context=64", "sampling.slots=2")
    with serving(CALCULATOR_TINY, "--port", "0", "--adapter", adapter, sets=sets) as server:

        def post(path: str, body: object) -> tuple[int, dict[str, object]]:
            request = urllib.request.Request(f"{server.address}{path}", json.dumps(body).encode())
            try:
                with urllib.request.urlopen(request) as response:
                    return response.status, json.load(response)
            except urllib.error.HTTPError as error:
                return error.code, json.load(error)

        assert post("/v1/completions", {"prompt": "1+1", "model": "adapter"})[0] == 200
        assert post("/v1/completions", {"prompt": "1+1"})[1]["model"] == "adapter"
        assert post("/v1/unload_lora_adapter", {"lora_name": "adapter"})[0] == 200
        assert post("/v1/completions", {"prompt": "1+1", "model": CALCULATOR_TINY})[0] == 200
        assert server.stop(30.0) == 0


def test_a_storage_that_never_answers_holds_up_neither_requests_nor_the_end(tmp_path: Path) -> None:
    roots = [tmp_path / "adapters" / "slow", tmp_path / "run"]
    for folder, name in zip(roots, ("adapter_config.json", "latest.json"), strict=True):
        folder.mkdir(parents=True)
        os.mkfifo(folder / name)  # nobody ever writes into it
    options = ("--port", "0", "--adapters", str(roots[0].parent), "--follow", str(roots[1]))
    sets = ("sampling.max_context=64", "sampling.slots=2", "lora.rank=4")
    with (
        open(tmp_path / "log", "w+") as log,
        serving(CALCULATOR_TINY, *options, sets=sets, stderr=log) as server,
    ):

        def post(path: str, body: object) -> int:
            request = urllib.request.Request(f"{server.address}{path}", json.dumps(body).encode())
            try:
                with urllib.request.urlopen(request) as response:
                    return int(response.status)
            except urllib.error.HTTPError as error:
                return error.code
            except (OSError, http.client.HTTPException):
                return 0

        load = {"lora_name": "slow", "lora_path": str(roots[0])}
        loading = [threading.Thread(target=post, args=("/load_lora_adapter", load)) for _ in range(10)]
        for thread in loading:
            thread.start()
        time.sleep(0.2)
        assert post("/v1/completions", {"prompt": "1+1", "max_tokens": 3}) == 200
        assert server.stop(30.0) == 0
        for thread in loading:
            thread.join(30.0)
        log.seek(0)
        said = log.read()
    # At start JAX says of each accelerator that it is not there.
    assert "INFO jax" not in said
    assert "Traceback" not in said, said
