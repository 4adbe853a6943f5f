"""Inference servers behind `SamplingClient`: token ids in, token ids with their log-probabilities out, over HTTP.

Invariants: one version sampled a completion from its first token to its last; its log-probs are those of the
distribution drawn from, or the request fails with the reason; a server that is away, restarted or wrong fails requests
with PolicyError, whatever it answers, never this process. A request is idempotent by its seed, so it may be sent again.

Adapters have names of their own at the servers, `headrace-<run>-<version>`. A request names the one in force when it is
sent; an old one is unloaded when no request names it any more; a server that does not know a name is told again.

Whether a server reports log-probs at the sampling temperature is asked of the server itself, once, before the first
request to which it matters: at a temperature so high that every token is equally likely, a server that does reports the
same log-prob for each token.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import random
import reprlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import aiohttp
import numpy as np

from policy.client import Completion, FinishReason, PolicyError, SamplingParams
from policy.settings import Dialect, SamplingSettings
from trajectories.schema import IntArray, Version, VersionSpan

T = TypeVar("T")
log = logging.getLogger(__name__)

REMEMBERED_VERSIONS = 256
SKIP_S = 10.0
"""For how long a server that could not be reached is passed over, if there are others."""
RETIRE_S = 10.0
"""How long after its replacement an adapter stays loaded at least: other workers may not have seen the new one."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0
CLOSE_S = 10.0
MOST_BYTES = 256 << 20
"""Of an answer."""
CHAT = "/v1/chat/completions"
PROBE = SamplingParams(temperature=1e6, max_tokens=8)
"""At this temperature logits differ by less than rounding shows."""
NO_LOGPROB = -9999.0
"""What vLLM writes for a log-prob that it does not have."""


class Malformed(ValueError):
    """An answer is not of the form that the dialect has."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One completion as a server gave it."""

    ids: list[int]
    logprobs: list[float]
    finish: str
    """`stop` or `length`; anything else is a failure."""
    matched: int | None = None
    """The stop token that ended it, where the server says so."""
    kept: Any = None
    """The ids that each token was drawn from, a list of lists; not looked at yet."""


class Wire(Protocol):
    """What one kind of server speaks: JSON out, JSON in. Pure."""

    @property
    def generate(self) -> str:
        """Path of the endpoint that samples."""
        ...

    @property
    def load(self) -> str: ...

    @property
    def unload(self) -> str: ...

    @property
    def temperature_mend(self) -> str:
        """How to start the server so that it reports log-probs at the sampling temperature."""
        ...

    @property
    def kept_mend(self) -> str:
        """How to start the server so that it reports the ids that a token was drawn from; empty: it cannot."""
        ...

    @property
    def adapter_mend(self) -> str:
        """How to start the server so that it loads adapters."""
        ...

    @property
    def least_temperature(self) -> float:
        """Above 0 the server samples at no lower one, and does not say so."""
        ...

    def request(self, ids: Sequence[int], base: str, adapter: str, params: SamplingParams) -> dict[str, Any]:
        """The body; `adapter` is empty for the base model itself."""
        ...

    def answer(self, body: Mapping[str, Any]) -> Sampled:
        """Raises Malformed, or what Python does for a value of another kind: `NOT_AS_EXPECTED`."""
        ...


def _truncation(params: SamplingParams) -> dict[str, Any]:
    """Always spelled out: a server would take what is missing from the model's generation_config.json."""
    on = params.truncates
    return {
        "top_k": params.top_k if on and params.top_k else -1,
        "top_p": params.top_p if on else 1.0,
        "min_p": params.min_p if on else 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


class VLLM:
    """vLLM's token-in, token-out endpoint.

    Source: vllm/entrypoints/scale_out/token_in_token_out/protocol.py and serving.py, vllm/v1/sample/sampler.py,
    vllm/sampling_params.py (least temperature) and docs.vllm.ai (LoRA adapters, sampling mask). Servers of 2026 have it
    behind `--enable-scale-out` (for a while VLLM_ENABLE_SCALE_OUT_ENDPOINTS=1), earlier ones always. Log-probs are
    `raw_logprobs`, at temperature 1, unless the server runs with `--logprobs-mode processed_logprobs`. `ignore_eos`
    leaves `stop_token_ids` in force. The log-probs of later servers carry `token_id`, of earlier ones the text
    `token_id:N`.
    """

    generate = "/inference/v1/generate"
    load = "/v1/load_lora_adapter"
    unload = "/v1/unload_lora_adapter"
    temperature_mend = "start vLLM with --logprobs-mode processed_logprobs"
    kept_mend = "start vLLM with --return-sampling-mask and --logprobs-mode processed_logprobs"
    adapter_mend = (
        "start vLLM with --enable-lora, --max-lora-rank of at least lora.rank and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    )
    least_temperature = 0.01

    def request(self, ids: Sequence[int], base: str, adapter: str, params: SamplingParams) -> dict[str, Any]:
        return {
            "model": adapter or base,
            "token_ids": list(ids),
            "stream": False,
            "sampling_params": {
                **_truncation(params),
                "temperature": params.temperature,
                "max_tokens": params.max_tokens,
                "seed": params.seed,
                "stop_token_ids": list(params.stop_token_ids),
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": bool(params.stop),
                **({"stop": list(params.stop)} if params.stop else {}),
            },
        }

    def answer(self, body: Mapping[str, Any]) -> Sampled:
        choice = body["choices"][0]
        ids = [_whole(token) for token in choice["token_ids"]]
        entries = choice["logprobs"]["content"]
        spoken = [_whole(e["token_id"]) if "token_id" in e else _spelled(e["token"]) for e in entries]
        if spoken != ids:
            raise Malformed(f"{len(ids)} token_ids and log-probs of {len(spoken)} tokens do not agree")
        return Sampled(
            ids,
            [_number(entry["logprob"]) for entry in entries],
            str(choice["finish_reason"]),
            _matched(choice.get("stop_reason")),
            choice.get("sampling_mask"),
        )


class SGLang:
    """SGLang's own endpoint.

    Source: python/sglang/srt/managers/io_struct.py (GenerateReqInput, LoadLoRAAdapterReqInput), sampling_params.py,
    layers/sampler.py, and docs/advanced_features (SGLang for RL, LoRA). `output_token_logprobs` are triples (log-prob,
    id, text) of log_softmax(logits / temperature), before top-k, top-p and min-p; with SGLANG_RETURN_ORIGINAL_LOGPROB=1
    those at temperature 1. `return_sampling_mask` adds the ids drawn from and the log-probs renormalised over them.
    `ignore_eos` would switch off `stop_token_ids` as well, so it stays off. Seeds count with
    `--enable-deterministic-inference` only.
    """

    generate = "/generate"
    load = "/load_lora_adapter"
    unload = "/unload_lora_adapter"
    temperature_mend = "start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
    kept_mend = (
        "use an SGLang that knows return_sampling_mask, with --sampling-mask-max-tokens of at least sampling.top_k"
    )
    adapter_mend = "start SGLang with --enable-lora, --max-lora-rank of at least lora.rank and --lora-target-modules"
    least_temperature = 0.0

    def request(self, ids: Sequence[int], base: str, adapter: str, params: SamplingParams) -> dict[str, Any]:
        return {
            "input_ids": list(ids),
            "stream": False,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "sampling_params": {
                **_truncation(params),
                "temperature": params.temperature,
                "max_new_tokens": params.max_tokens,
                "sampling_seed": params.seed,
                "stop_token_ids": list(params.stop_token_ids),
                "no_stop_trim": True,
                "skip_special_tokens": False,
                **({"stop": list(params.stop)} if params.stop else {}),
            },
            **({"return_sampling_mask": True} if params.truncates else {}),
            **({"lora_path": adapter} if adapter else {}),
        }

    def answer(self, body: Mapping[str, Any]) -> Sampled:
        meta = body["meta_info"]
        finish = meta["finish_reason"]
        triples = meta["output_token_logprobs"]
        kept, renormalised = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
        return Sampled(
            [_whole(triple[1]) for triple in triples],
            [_number(value) for value in (renormalised if kept is not None else [triple[0] for triple in triples])],
            str(finish["type"]),
            _matched(finish.get("matched")),
            kept,
        )


class Completions:
    """OpenAI's /v1/completions, of a server that takes ids as the prompt and gives ids back.

    Source: OpenAI's API reference (completions), vllm/entrypoints/openai/completion/protocol.py. Ids come back as
    `token_ids` (`return_token_ids`) or as tokens spelled `token_id:N` (`return_tokens_as_token_ids`), log-probs as
    `logprobs.token_logprobs`. The ids a token was drawn from do not come back, so nothing may truncate.
    """

    generate = "/v1/completions"
    load = "/v1/load_lora_adapter"
    unload = "/v1/unload_lora_adapter"
    temperature_mend = f"{VLLM.temperature_mend}, or {SGLang.temperature_mend}"
    kept_mend = ""
    adapter_mend = VLLM.adapter_mend
    least_temperature = VLLM.least_temperature

    def request(self, ids: Sequence[int], base: str, adapter: str, params: SamplingParams) -> dict[str, Any]:
        return {
            **_truncation(params),
            "model": adapter or base,
            "prompt": list(ids),
            "stream": False,
            "temperature": params.temperature,
            "max_tokens": params.max_tokens,
            "seed": params.seed,
            "stop_token_ids": list(params.stop_token_ids),
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **({"stop": list(params.stop)} if params.stop else {}),
        }

    def answer(self, body: Mapping[str, Any]) -> Sampled:
        choice = body["choices"][0]
        logprobs = choice["logprobs"]
        ids = choice.get("token_ids")
        if ids is None:
            ids = [_spelled(token) for token in logprobs["tokens"]]
        return Sampled(
            [_whole(token) for token in ids],
            [_number(value) for value in logprobs["token_logprobs"]],
            str(choice["finish_reason"]),
            _matched(choice.get("stop_reason")),
        )


WIRES: Mapping[Dialect, Wire] = {
    Dialect.VLLM: VLLM(),
    Dialect.SGLANG: SGLang(),
    Dialect.COMPLETIONS: Completions(),
}


NOT_AS_EXPECTED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading a value raises that is of another kind, or beyond any number."""


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise Malformed(f"a token id must be a whole number, found {reprlib.repr(value)}")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise Malformed(f"a log-prob must be a number, found {reprlib.repr(value)}")
    return float(value)


def _spelled(token: Any) -> int:
    """The id in `token_id:N`."""
    name, _, digits = token.partition(":") if isinstance(token, str) else ("", "", "")
    if name != "token_id" or not digits.isdecimal():
        raise Malformed(
            f"the server gives tokens as text ({reprlib.repr(token)}) and no ids; what was sampled cannot be known"
        )
    return int(digits)


def _matched(value: Any) -> int | None:
    return value if type(value) is int else None


class _Again(Exception):
    """Nothing was sampled, and another try may do better."""

    def __init__(self, reason: str, *, away: bool = False, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.away = away
        """The server could not be reached."""
        self.pause_s = pause_s
        """What the server asks to wait."""


@dataclass(eq=False)
class _Loaded:
    """A version and what it is called at the servers."""

    version: Version
    name: str = ""
    """Empty: the base model itself."""
    url: str = ""
    uses: int = 0
    """Requests under way that name it, and one more while it is to be kept."""


@dataclass(eq=False)
class _Server:
    address: str
    skip_until: float = 0.0
    """By the event loop's clock."""
    base: str = ""
    """Its name of the base model; empty: not asked yet."""
    at_temperature: bool | None = None
    """Whether its log-probs are those at the sampling temperature; None: not asked yet."""
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Whoever holds it finds out what is not known yet; the others wait for the answer."""
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    lost_at: float = -math.inf
    """When it last could not be reached, and why."""
    lost_why: str = ""

    def forget(self) -> None:
        """Another process may answer next time."""
        self.base, self.at_temperature = "", None


class RemotePolicy:
    """A policy at one or several servers. For any thread and event loop; the HTTP runs on a thread of its own."""

    def __init__(
        self,
        settings: SamplingSettings,
        run_id: str,
        vocab_size: int,
        *,
        version: Version = Version(0, 0),
        api_key: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`version` is the base model itself. Asks nothing of the servers yet."""
        self._settings, self._run_id, self._vocab_size = settings, run_id, vocab_size
        self._wire = WIRES[settings.dialect]
        self._clock, self._jitter = clock, random.Random(run_id)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._servers = [_Server(address.rstrip("/")) for address in settings.servers]
        self._current = _Loaded(version)
        self._kept: dict[Version, _Loaded] = {version: self._current}
        """What a request may name: the version in force and those not yet unloaded."""
        self._to_keep: set[Version] = set()
        self._replaced: collections.deque[Version] = collections.deque(maxlen=REMEMBERED_VERSIONS)
        self._slots = asyncio.Semaphore(settings.slots)
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._gate = threading.Lock()
        """Whoever holds it leaves work for the HTTP thread, or ends that for good."""
        self._closing = False
        self._asked: set[concurrent.futures.Future[Any]] = set()
        """Work that was left and is not done."""

        self.max_context, self.slots = settings.max_context, settings.slots
        self.running = 0
        """Requests at the servers."""
        self.queued = 0
        """Requests that wait for one of our slots or for their pinned version."""
        self.tokens_sampled = 0
        self.retries = 0
        self.first_token_at: dict[Version, float] = {}
        """When the first completion of each of the latest versions arrived: `clock()`, Unix seconds by default."""

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="remote-policy", daemon=True)
        self._thread.start()
        self._session = self._call(self._open())

    # What other threads call.

    @property
    def version(self) -> Version:
        """The version that the next request names."""
        return self._current.version

    async def sample(
        self,
        session_id: str,
        token_ids: Sequence[int] | IntArray,
        params: SamplingParams,
        *,
        version: Version | None = None,
    ) -> Completion:
        """As `SamplingClient.sample`. A prompt that fills the context gives an empty completion that finished by
        `CONTEXT`."""
        ids = np.asarray(token_ids, np.int32)
        if ids.ndim != 1 or not len(ids):
            raise PolicyError(f"session {session_id}: the prompt must be a flat list of at least one token id")
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise PolicyError(f"session {session_id}: token ids must lie in [0, {self._vocab_size})")
        return await asyncio.wrap_future(self._leave(self._sample(session_id, ids.tolist(), params, version)))

    async def chat(self, session_id: str, body: Mapping[str, Any]) -> str:
        """The text with which a server's base model answers `body`, the messages and parameters of OpenAI's
        /v1/chat/completions. For judges: what is trained goes by token ids. Raises PolicyError."""
        return await asyncio.wrap_future(self._leave(self._chat(session_id, body)))

    def close_session(self, session_id: str) -> None:
        """The servers keep their caches by the tokens, not by the session."""

    def swap(self, url: str | None, version: Version) -> None:
        """Sample with the adapter in the folder `url` (None: the base model) from the next request on.

        Returns when every server that can be reached has loaded it. Raises PolicyError, with the old one in force.
        """
        self._call(self._swap(url, version))

    def keep(self, url: str | None, version: Version) -> None:
        """Answer those pinned to `version`, whose adapter lies in the folder `url`, until it is dropped.

        Returns when every server that can be reached has loaded it. Raises PolicyError.
        """
        self._call(self._keep(url, version))

    def drop(self, version: Version) -> None:
        """Keep `version` no more. Does not wait; harmless if it is not kept."""
        with contextlib.suppress(PolicyError):
            self._leave(self._drop(version))

    def close(self) -> None:
        """Every request that is or comes fails with PolicyError; within some `CLOSE_S`."""
        with self._gate:
            if self._closing:
                return
            self._closing = True
        # Whatever was left before has begun when this begins: the loop takes work in order.
        shut = asyncio.run_coroutine_threadsafe(self._shut(), self._loop)
        concurrent.futures.wait([shut], CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        for future in list(self._asked):
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                future.set_exception(PolicyError("the policy is closed"))
        if not self._thread.is_alive():
            self._loop.close()

    def _leave(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Have the HTTP thread do it. Raises PolicyError if that has ended."""
        with self._gate:
            if self._closing:
                work.close()
                raise PolicyError("the policy is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._asked.add(future)
        future.add_done_callback(self._asked.discard)
        return future

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return self._leave(work).result()
        except concurrent.futures.CancelledError as error:
            raise PolicyError("the policy is closed") from error

    # On the HTTP thread.

    async def _open(self) -> aiohttp.ClientSession:
        settings = self._settings
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=settings.request_timeout_s, sock_connect=settings.connect_timeout_s),
            headers=self._headers,
        )

    async def _shut(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            ended, _ = await asyncio.wait(others, timeout=CLOSE_S / 2)
            for task in ended:
                if not task.cancelled():
                    task.exception()  # whoever still waits has it from its own future
        await self._session.close()

    async def _sample(
        self, session_id: str, ids: list[int], params: SamplingParams, pinned: Version | None
    ) -> Completion:
        room = self.max_context - len(ids)
        if room <= 0:
            nothing = np.zeros(0, np.int32)
            return Completion(nothing, nothing.astype(np.float32), (), FinishReason.CONTEXT)
        if params.truncates and not self._wire.kept_mend:
            raise PolicyError(
                f"the dialect {self._settings.dialect} does not say which ids a token was drawn from: set "
                "sampling.top_k, top_p and min_p off, or use the dialect vllm or sglang"
            )
        if 0 < params.temperature < self._wire.least_temperature:
            raise PolicyError(
                f"with the dialect {self._settings.dialect} the temperature must be 0 or at least "
                f"{self._wire.least_temperature:g}, found {params.temperature:g}: vLLM would raise it and not say so"
            )
        try:
            self.queued += 1
            try:
                if pinned is not None:
                    await self._until(session_id, pinned)
                await self._slots.acquire()
            finally:
                self.queued -= 1
            self.running += 1
            try:
                return await self._complete(session_id, ids, params, min(params.max_tokens, room), pinned)
            finally:
                self.running -= 1
                self._slots.release()
        except asyncio.CancelledError:
            if self._closing:
                raise PolicyError("the policy is closed") from None
            raise

    async def _until(self, session_id: str, pinned: Version) -> None:
        """Wait until `pinned` may be named."""
        async with self._changed:
            await self._changed.wait_for(lambda: pinned in self._kept or pinned in self._replaced)
        if pinned not in self._kept:
            raise PolicyError(f"session {session_id}: pinned version {pinned} was replaced by {self.version}")

    async def _complete(
        self, session_id: str, ids: list[int], params: SamplingParams, max_tokens: int, pinned: Version | None
    ) -> Completion:
        asked = dataclasses.replace(params, max_tokens=max_tokens)

        async def ask(server: _Server) -> Completion:
            model = self._current if pinned is None else self._kept.get(pinned)
            if model is None:
                raise PolicyError(f"session {session_id}: pinned version {pinned} was replaced by {self.version}")
            with _using(model):
                sampled = await self._ask(server, model, ids, asked)
            completion = self._completion(server, model.version, sampled, params, max_tokens)
            self._note(model.version, len(sampled.ids))
            return completion

        return await self._persist(session_id, ask)

    async def _chat(self, session_id: str, body: Mapping[str, Any]) -> str:
        """Within the slots, like a turn."""

        async def ask(server: _Server) -> str:
            await self._greet(server)
            status, text = await self._post(server, CHAT, {"model": server.base, **body})
            if status != 200:
                raise PolicyError(_refusal(server, CHAT, status, text))
            try:
                content = json.loads(text)["choices"][0]["message"]["content"]
                if not isinstance(content, str):
                    raise Malformed(f"the content must be a text, found {reprlib.repr(content)}")
            except NOT_AS_EXPECTED as error:
                raise PolicyError(f"{server.address}{CHAT} gave no chat completion: {text[:200]!r}") from error
            return content

        try:
            async with self._slots:
                return await self._persist(session_id, ask)
        except asyncio.CancelledError:
            if self._closing:
                raise PolicyError("the policy is closed") from None
            raise

    async def _persist(self, session_id: str, ask: Callable[[_Server], Coroutine[Any, Any, T]]) -> T:
        """Ask, and ask again where that may help. Raises PolicyError."""
        order = sorted(self._servers, key=lambda server: _rank(server.address, session_id))
        pause_s, tries = FIRST_PAUSE_S, self._settings.request_retries + 1
        for attempt in range(1, tries + 1):
            try:
                return await ask(self._choose(order))
            except _Again as trouble:
                if attempt == tries:
                    raise PolicyError(f"session {session_id}: given up after {tries} tries: {trouble}") from trouble
                self.retries += 1
                if not (trouble.away and self._choose(order).skip_until <= self._loop.time()):
                    await asyncio.sleep(max(trouble.pause_s, pause_s * (0.5 + self._jitter.random())))
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        raise AssertionError("the last try either returns or raises")

    def _choose(self, order: Sequence[_Server]) -> _Server:
        """The session's own server, or the next that is not passed over, or the one that was longest ago."""
        now = self._loop.time()
        return next((s for s in order if s.skip_until <= now), min(order, key=lambda s: s.skip_until))

    async def _ask(self, server: _Server, model: _Loaded, ids: list[int], params: SamplingParams) -> Sampled:
        """One completion of one server. Raises _Again or PolicyError."""
        await self._greet(server)
        if params.truncates or params.temperature not in (0.0, 1.0):
            await self._check_temperature(server, model, ids)
        status, text = await self._generate(server, model, ids, params)
        if status != 200:
            raise PolicyError(_refusal(server, self._wire.generate, status, text))
        return self._read(server, text)

    async def _generate(
        self, server: _Server, model: _Loaded, ids: list[int], params: SamplingParams
    ) -> tuple[int, str]:
        """Status and body; a server that does not know the adapter is told of it first."""
        body = self._wire.request(ids, server.base, model.name, params)
        status, text = await self._post(server, self._wire.generate, body)
        if status in (400, 404) and model.name and model.name in text:
            await self._load(server, model)
            status, text = await self._post(server, self._wire.generate, body)
        return status, text

    def _read(self, server: _Server, text: str) -> Sampled:
        where = f"{server.address}{self._wire.generate}"
        try:
            sampled = self._wire.answer(json.loads(text))
        except NOT_AS_EXPECTED as error:
            raise PolicyError(
                f"{where} gave an answer that is not {self._settings.dialect}'s: {type(error).__name__}: {error}; it "
                f"begins {text[:200]!r}. Is sampling.dialect right for that server?"
            ) from error
        if sampled.finish not in ("stop", "length"):
            # SGLang aborts requests when it is paused or updated, vLLM when it shuts down.
            raise _Again(f"{where} ended the request with {reprlib.repr(sampled.finish)}")
        return sampled

    def _completion(
        self, server: _Server, version: Version, sampled: Sampled, params: SamplingParams, max_tokens: int
    ) -> Completion:
        """The checked completion. Raises PolicyError."""
        count = len(sampled.ids)
        faults = []
        if not 1 <= count <= max_tokens:
            faults.append(f"it has {count} tokens, asked were 1 to {max_tokens}")
        if len(sampled.logprobs) != count:
            faults.append(f"it has {count} tokens and {len(sampled.logprobs)} log-probs")
        wrong = next((token for token in sampled.ids if not 0 <= token < self._vocab_size), None)
        if wrong is not None:
            shown = reprlib.repr(wrong)
            faults.append(f"token id {shown} is not in the vocabulary of {self._vocab_size}: is it the same model?")
        if not all(NO_LOGPROB < logprob <= 1e-3 for logprob in sampled.logprobs):
            faults.append(f"its log-probs must be finite and at most 0, found {sampled.logprobs[:8]}")
        if sampled.finish == "stop" and sampled.matched is not None and sampled.matched not in sampled.ids[-1:]:
            faults.append(f"it stopped at token {reprlib.repr(sampled.matched)} and does not end with it")
        kept: tuple[IntArray, ...] = ()
        if params.truncates and not faults:
            kept, faults = self._kept_ids(sampled)
        if faults:
            raise PolicyError(f"{server.address}{self._wire.generate} gave an unusable completion: {'; '.join(faults)}")
        finish = FinishReason.CONTEXT
        if sampled.ids[-1] in params.stop_set or sampled.finish == "stop":
            finish = FinishReason.STOP
        elif count == params.max_tokens:
            finish = FinishReason.LENGTH
        ids, logprobs = np.array(sampled.ids, np.int32), np.array(sampled.logprobs, np.float32)
        return Completion(ids, logprobs, (VersionSpan(0, version),), finish, kept)

    def _kept_ids(self, sampled: Sampled) -> tuple[tuple[IntArray, ...], list[str]]:
        """The ids that each token was drawn from, and what is wrong with them."""
        if sampled.kept is None or (isinstance(sampled.kept, list) and len(sampled.kept) != len(sampled.ids)):
            return (), [f"it lacks the ids that its tokens were drawn from: {self._wire.kept_mend}"]
        if not isinstance(sampled.kept, list) or not all(isinstance(ids, list) for ids in sampled.kept):
            found = reprlib.repr(sampled.kept)
            return (), [f"the ids that its tokens were drawn from must be a list for each, found {found}"]
        most = max(map(len, sampled.kept))
        if most > self._settings.max_kept:
            return (), [f"a token was drawn from {most} ids, sampling.max_kept is {self._settings.max_kept}: set top_k"]
        for token, ids in zip(sampled.ids, sampled.kept, strict=True):
            if token not in ids or not all(type(each) is int and 0 <= each < self._vocab_size for each in ids):
                return (), [f"token {token} was drawn from ids that lack it or lie outside the vocabulary"]
        return tuple(np.unique(np.array(ids, np.int32)) for ids in sampled.kept), []

    def _note(self, version: Version, tokens: int) -> None:
        self.tokens_sampled += tokens
        if version not in self.first_token_at:
            # A copy, so that other threads read a dict that does not change.
            noted = {**self.first_token_at, version: self._clock()}
            self.first_token_at = dict(list(noted.items())[-REMEMBERED_VERSIONS:])

    # What a server is.

    async def _greet(self, server: _Server) -> None:
        """Learn the server's name of the base model, and that our contexts fit."""
        async with self._asking(server):
            if server.base:
                return
            wanted = self._settings.served_model
            cards = await self._models(server)
            if not cards:
                if not wanted:
                    raise PolicyError(f"{server.address}/v1/models lists nothing: set sampling.served_model")
                server.base = wanted
                return
            card = next((card for card in cards if card["id"] == wanted), None) if wanted else cards[0]
            if card is None:
                listed = ", ".join(card["id"] for card in cards)
                raise PolicyError(f"{server.address} serves {listed}; sampling.served_model is {wanted!r}")
            longest = card.get("max_model_len")
            if isinstance(longest, int | float) and longest < self.max_context:
                raise PolicyError(
                    f"{server.address} holds {longest} tokens, sampling.max_context is {self.max_context}: lower it, "
                    "or start the server with a longer context"
                )
            server.base = card["id"]

    @asynccontextmanager
    async def _asking(self, server: _Server) -> AsyncIterator[None]:
        """One at a time; who waited while the server could not be reached need not find that out again."""
        came = self._loop.time()
        async with server.asking:
            if server.lost_at >= came:
                raise _Again(server.lost_why, away=True)
            yield

    async def _models(self, server: _Server) -> list[Mapping[str, Any]]:
        """What /v1/models lists, the base model first; nothing where there is no such page."""
        status, text = await self._exchange(server, "GET", "/v1/models", None)
        if status in (404, 405):
            return []
        if status != 200:
            raise PolicyError(_refusal(server, "/v1/models", status, text))
        try:
            cards = list(json.loads(text)["data"])
            if not all(isinstance(card["id"], str) for card in cards):
                raise Malformed("a model's id must be a text")
        except NOT_AS_EXPECTED as error:
            raise PolicyError(f"{server.address}/v1/models gave no list of models: {text[:200]!r}") from error
        return cards

    async def _check_temperature(self, server: _Server, model: _Loaded, ids: list[int]) -> None:
        """Raises PolicyError if the server's log-probs are not those at the sampling temperature."""
        async with self._asking(server):
            if server.at_temperature is None:
                status, text = await self._generate(server, model, ids[:16], PROBE)
                if status != 200:
                    raise PolicyError(
                        "whether the log-probs are those at the sampling temperature cannot be found out, so only "
                        f"temperatures 0 and 1 can be used: {_refusal(server, self._wire.generate, status, text)}"
                    )
                logprobs = np.asarray(self._read(server, text).logprobs)
                if not np.isfinite(logprobs).all():
                    where = f"{server.address}{self._wire.generate}"
                    raise PolicyError(f"{where} gave log-probs that are not finite: {logprobs.tolist()[:8]}")
                flat = len(logprobs) > 0 and np.abs(logprobs + math.log(self._vocab_size)).max() < 0.5
                server.at_temperature = bool(flat and np.ptp(logprobs) < 0.01)
            if not server.at_temperature:
                raise PolicyError(
                    f"{server.address} reports log-probs at temperature 1, whatever tokens are sampled at; training "
                    f"needs those sampled from: {self._wire.temperature_mend}, or set sampling.temperature = 1"
                )

    # Adapters.

    async def _swap(self, url: str | None, version: Version) -> None:
        if version == self.version:
            return
        async with self._loaded(url, version) as model:
            old, self._current = self._current, model
            if old.version not in self._to_keep:
                self._replaced.append(old.version)
        self._retire_later(old)

    async def _keep(self, url: str | None, version: Version) -> None:
        if version in self._to_keep:
            return
        async with self._loaded(url, version) as model:
            if version not in self._to_keep:
                self._to_keep.add(version)
                model.uses += 1

    async def _drop(self, version: Version) -> None:
        if version not in self._to_keep:
            return
        async with self._changed:
            self._to_keep.discard(version)
            model = self._kept[version]
            model.uses -= 1
            if model is not self._current:
                self._replaced.append(version)
            self._changed.notify_all()
        if model is not self._current:
            self._retire_later(model)

    @asynccontextmanager
    async def _loaded(self, url: str | None, version: Version) -> AsyncIterator[_Loaded]:
        """Within it the version may be named, and nobody else changes what may. Raises PolicyError."""
        name = "" if url is None else f"headrace-{self._run_id}-{version}"
        model = self._kept.get(version) or _Loaded(version, name, url or "")
        with _using(model):  # so that it is not unloaded meanwhile
            await self._load_everywhere(model)
            async with self._changed:
                # An adapter may be put in force and kept at the same time: both mean one thing, whose uses are counted.
                yield self._kept.setdefault(version, model)
                if version in self._replaced:
                    self._replaced.remove(version)
                self._changed.notify_all()

    def _retire_later(self, old: _Loaded) -> None:
        task = self._loop.create_task(self._retire(old))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load_everywhere(self, model: _Loaded) -> None:
        """Raises PolicyError if a server refuses, or none can be reached."""
        version = model.version
        if model.name:
            tried = await asyncio.gather(*(self._load(s, model) for s in self._servers), return_exceptions=True)
            failed = [error for error in tried if isinstance(error, BaseException)]
            refused = [error for error in failed if not isinstance(error, _Again)]
            if refused or len(failed) == len(self._servers):
                raise PolicyError(f"adapter {version} is not in force: {(refused or failed)[0]}")
            for error in failed:
                log.warning("adapter %s is loaded where a server comes back: %s", version, error)

    async def _load(self, server: _Server, model: _Loaded) -> None:
        """Have the server load the adapter, if it has not. Raises _Again or PolicyError."""
        async with server.loading:
            if any(card["id"] == model.name for card in await self._models(server)):
                return
            body = {"lora_name": model.name, "lora_path": model.url}
            status, text = await self._post(server, self._wire.load, body)
            # Another worker may have been faster, at a server that does not list its adapters.
            if status == 200 or "already" in text:
                return
            raise PolicyError(
                f"{_refusal(server, self._wire.load, status, text)}. The server must be able to read {model.url} (see "
                f"sampling.server_storage), and load adapters at run time: {self._wire.adapter_mend}"
            )

    async def _retire(self, old: _Loaded) -> None:
        """Unload a replaced adapter once nobody can be using it."""
        await asyncio.sleep(RETIRE_S)
        while old.uses:
            await asyncio.sleep(RETIRE_S / 10)
        if self._kept.get(old.version) is not old or self._current is old:
            return
        del self._kept[old.version]
        if not old.name or self._current.name == old.name:
            return
        for server in self._servers:
            try:
                status, text = await self._post(server, self._wire.unload, {"lora_name": old.name})
            except (_Again, PolicyError) as error:
                log.warning("adapter %s stays loaded: %s", old.version, error)
                continue
            if status not in (200, 400, 404):  # another worker may have unloaded it
                log.warning("adapter %s stays: %s", old.version, _refusal(server, self._wire.unload, status, text))

    # HTTP.

    async def _post(self, server: _Server, path: str, body: Mapping[str, Any]) -> tuple[int, str]:
        return await self._exchange(server, "POST", path, body)

    async def _exchange(
        self, server: _Server, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[int, str]:
        """(status, text). Raises _Again for what may pass, PolicyError for a time limit."""
        where = f"{server.address}{path}"
        try:
            async with self._session.request(method, where, json=body, allow_redirects=False) as response:
                status, after = response.status, response.headers.get("Retry-After", "")
                data = bytearray()
                async for chunk in response.content.iter_any():
                    data += chunk
                    if len(data) > MOST_BYTES:
                        raise PolicyError(f"{where} gave an answer of more than {MOST_BYTES} bytes")
                # JSON is UTF-8, whatever else the answer says of itself.
                text = data.decode(errors="replace")
        except aiohttp.ConnectionTimeoutError as error:
            limit = f"sampling.connect_timeout_s ({self._settings.connect_timeout_s:g} s)"
            raise self._away(server, f"{where} was not reached within {limit}") from error
        except TimeoutError as error:
            raise PolicyError(
                f"{where} did not answer within sampling.request_timeout_s ({self._settings.request_timeout_s:g} s): "
                "raise it, lower sampling.max_tokens or sampling.slots, or add servers"
            ) from error
        except (aiohttp.InvalidURL, UnicodeError) as error:
            raise PolicyError(f"{where} is no address that can be asked: {error}; see sampling.servers") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._away(server, f"{where} could not be reached: {type(error).__name__}: {error}") from error
        server.skip_until = 0.0
        if status == 429 or status >= 500:
            pause_s = min(float(after), LONGEST_PAUSE_S) if after.isdecimal() else 0.0
            raise _Again(_refusal(server, path, status, text), pause_s=pause_s)
        return status, text

    def _away(self, server: _Server, reason: str) -> _Again:
        server.forget()
        server.lost_at, server.lost_why = self._loop.time(), reason
        server.skip_until = server.lost_at + SKIP_S
        return _Again(reason, away=True)


def _rank(address: str, session_id: str) -> bytes:
    """Rendezvous hashing: a session keeps its server when others come and go."""
    return hashlib.blake2b(f"{address} {session_id}".encode(), digest_size=8).digest()


@contextmanager
def _using(model: _Loaded) -> Iterator[None]:
    model.uses += 1
    try:
        yield
    finally:
        model.uses -= 1


def _refusal(server: _Server, path: str, status: int, text: str) -> str:
    """What a server said instead of an answer, in one line of bounded length."""
    said = text
    try:
        body = json.loads(text)
        error = body.get("error", body)
        said = str(error.get("message") or body.get("error_message") or text if isinstance(error, dict) else error)
    except NOT_AS_EXPECTED:
        pass
    mend = ": set sampling.api_key_env to the variable that holds the key" if status in (401, 403) else ""
    return f"{server.address}{path} answered {status}{mend}: {' '.join(said[:5000].split())[:500]}"
