"""The project's own engine behind the HTTP APIs that `policy.remote` speaks, and a chat API for people.

    POST /inference/v1/generate    token ids, as vLLM's
    POST /generate                 token ids, as SGLang's
    POST /v1/completions           token ids or text, as OpenAI's
    POST /v1/chat/completions      messages and tools, by the model's own chat format
    POST /v1/load_lora_adapter, /v1/unload_lora_adapter, /load_lora_adapter, /unload_lora_adapter
    GET  /health, /v1/models, /metrics

Invariants: a request is answered by the model it names, whole, or refused; a request whose client has gone gives its
slot back; nothing that a client sends or a storage holds ends the server, and what it refuses says what, where and how
to mend it.

The engine holds several adapters beside the base model, each of which answers to its name. The one that was loaded last
is in force: it answers the requests that name no model. Where another needs the room, the one that was used longest ago
goes, never one in force or with requests under way. A change of adapters runs to its end whatever becomes of the client
that asked for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hashlib
import hmac
import itertools
import json
import logging
import math
import reprlib
import secrets
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from aiohttp import web

from policy.adapters import AdapterStore, BadAdapter, load_peft
from policy.chat import ChatFormat, ChatFormatError, Message, ToolCall, load_chat
from policy.client import MOST_STOP_IDS, MOST_STOPS, Completion, FinishReason, PolicyError, SamplingParams
from policy.engine import Engine
from policy.lora import Adapter, LoraSettings, zero_adapter
from policy.settings import SamplingSettings
from policy.transformer import ModelConfig
from policy.weights import ModelSettings, load_model
from trajectories.schema import Version
from trajectories.storage import open_storage

T = TypeVar("T")
log = logging.getLogger(__name__)

BASE = Version(0, 0)
REMEMBERED_ADAPTERS = 256
LONGEST_NAME = 256
"""Characters of an adapter's name."""
READ_S = 120.0
"""Most seconds for a storage to give an adapter."""
STOP_S = 2.0
"""Seconds for connections to end when the server does."""
MOST_BYTES = 8 << 20
TEXT_PER_TOKEN, TEXT_BESIDE = 32, 4096
"""Characters that a request's texts may have: so many for each token of the context, and so many more."""
DEEPEST = 64
"""Levels to which what is rendered may be nested."""


@dataclass(frozen=True)
class ServeSettings:
    """What `headrace serve` is told beside the model."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free one."""
    adapter: str = ""
    """Folder or gs:// prefix of the adapter to begin with."""
    adapter_roots: tuple[str, ...] = ()
    """Folders and gs:// prefixes below which clients may have adapters loaded."""
    follow: str = ""
    """Storage of a run whose newest adapter is always in force."""
    follow_poll_s: float = 1.0
    api_key: str = ""
    """What clients must send as a bearer token; empty: nothing."""
    max_body_bytes: int = 0
    """0: what a full context needs, `MOST_BYTES` at the most. Reading a body holds up everybody else's requests."""
    max_adapters: int = 4
    """Adapters held at once, beside the base model: the next, the newest, one whose requests end, one evaluated."""
    room_s: float = 30.0
    """Most seconds that an adapter waits for one of those held to have no request under way."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"the port must be from 0 (any free one) to 65535, found {self.port}")
        if self.max_adapters < 2:
            raise ValueError(
                f"the adapters held must be at least 2, found {self.max_adapters}: one comes while another is in force"
            )


class AddressError(RuntimeError):
    """The server cannot listen where it is told to."""


class Refused(Exception):
    """A request that is not answered, and the HTTP status that says so."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(eq=False, slots=True)
class _Model:
    """The base model, or an adapter that the engine holds."""

    name: str
    version: Version
    """The engine's."""
    url: str = ""
    digest: str = ""
    """SHA-256 of its values."""
    uses: int = 0
    """Requests under way that it answers."""
    used: int = 0
    """When it was loaded or answered last, in steps of a counter."""


_INCARNATIONS = itertools.count(1)
"""An engine that is handed on must not meet a version again that was another adapter: its cache goes by them."""


class ServedPolicy:
    """One engine, and the models that it holds by their names. All calls on one event loop."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        config: ModelConfig,
        lora: LoraSettings,
        sampling: SamplingSettings,
        settings: ServeSettings,
    ) -> None:
        """`engine` must sample with the base, as version `BASE`, of an adapter of `lora`'s shapes."""
        self.name, self.engine, self.max_kept = name, engine, sampling.max_kept
        self.vocab_size = config.vocab_size
        self._config, self._lora, self._settings = config, lora, settings
        self._roots = [*settings.adapter_roots, *filter(None, [settings.adapter, settings.follow])]
        self._zero = zero_adapter(config, lora)
        self._base = self._in_force = _Model(name, BASE)
        self._models = {name: self._base}
        """What requests may name."""
        self._held: list[_Model] = []
        """The adapters in the engine. One that nobody may name any more leaves when its last request has ended."""
        self._meanings: dict[str, str] = {}
        """Digest of every adapter that was loaded and not unloaded by its name, the latest loaded last."""
        incarnation = next(_INCARNATIONS)
        self._versions = (Version(number, incarnation) for number in itertools.count(1))
        self._numbers = itertools.count(1)
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()
        """Loads and unloads under way."""
        self._followed = open_storage(settings.follow) if settings.follow else None
        self.began = time.monotonic()
        self.answered: Counter[str] = Counter()
        """Requests by how they ended."""
        self.follow_failures = 0
        """Looks at the followed run that found nothing usable."""
        self.adapter_evictions = 0
        """Adapters that made room for others."""

    @property
    def adapter(self) -> str:
        """The name of the adapter in force; empty: the base model."""
        return "" if self._in_force is self._base else self._in_force.name

    @property
    def adapters(self) -> dict[str, str]:
        """The folder of each adapter that may be named."""
        return {name: model.url for name, model in self._models.items() if model is not self._base}

    async def sample(self, name: str, ids: Sequence[int], params: SamplingParams) -> tuple[str, Completion]:
        """A completion by the model of that name (empty: by what is in force), and what it is called. Raises
        Refused."""
        model = self._models.get(name) if name else self._in_force
        if model is None:
            raise Refused(404, self._unknown(name))
        session = f"http/{next(self._numbers)}"
        model.uses += 1
        try:
            return model.name, await self.engine.sample(session, ids, params, version=model.version)
        except PolicyError as error:
            # The engine is closed, or a call of it failed and the next may not.
            raise Refused(503, str(error)) from error
        finally:
            self.engine.close_session(session)
            model.uses -= 1
            model.used = next(self._numbers)
            self._let_go(model)

    def _unknown(self, name: str) -> str:
        # In full: who loads adapters looks for the name in the answer.
        shown = repr(name) if len(name) <= LONGEST_NAME else _shown(name)
        if name in self._meanings:
            return f"adapter {shown} made room for others: load it again, or start the server with more --max-adapters"
        served = ", ".join(map(repr, self._models))
        return f"model {shown} is not served here: load it, leave `model` out, or name {served}"

    async def load(self, name: str, url: str) -> None:
        """Put the adapter in the folder `url` in force, as `name`. Raises Refused."""
        await self._to_its_end(self._load(name, url))

    async def unload(self, name: str) -> None:
        """Forget the name; requests under way end. If it is in force, the base is from now on. Raises Refused."""
        await self._to_its_end(self._unload(name))

    async def follow(self) -> None:
        """Keep the newest adapter of the run in force, for ever, whatever its storage holds."""
        assert self._followed is not None
        store = AdapterStore(self._followed, self._config, self._lora)
        seen, complained = None, ""
        while True:
            try:
                latest = await _aside(store.latest)
                if latest is not None and latest != seen:
                    url = self._followed.join(f"adapters/{latest.version}").url
                    await self._to_its_end(self._load(f"followed-{latest.version}", url, renewed=True))
                    log.info("adapter %s is in force", latest.version)
                    seen, complained = latest, ""
            except Exception as error:
                self.follow_failures += 1
                if repr(error) != complained:
                    expected = isinstance(error, BadAdapter | OSError | Refused)
                    log.warning("the adapter in force stays: %s", error, exc_info=None if expected else error)
                    complained = repr(error)
            await asyncio.sleep(self._settings.follow_poll_s)

    async def _to_its_end(self, work: Coroutine[Any, Any, None]) -> None:
        """Cut short, a change would leave an adapter in the engine that is on no record."""
        task = asyncio.create_task(work)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_tell_the_log)
            raise

    async def _load(self, name: str, url: str, *, renewed: bool = False) -> None:
        """`renewed`: the name may mean another adapter than before."""
        if not name or name == self.name or len(name) > LONGEST_NAME:
            wanted = f"a name of its own, of at most {LONGEST_NAME} characters"
            raise Refused(400, f"lora_name must be {wanted}, found {_shown(name)}")
        try:
            allowed_there = _below(url, self._roots)
        except (OSError, RuntimeError, ValueError) as error:  # a NUL, half a character, links in a circle
            raise Refused(
                400, f"lora_path must be a folder or a gs:// address, found {_shown(url)}: {error}"
            ) from error
        if not allowed_there:
            allowed = ", ".join(self._roots) or "nowhere: start the server with --adapters FOLDER"
            raise Refused(403, f"adapters may be loaded from below {allowed}; found {_shown(url)}")
        async with self._changing:
            adapter, digest = await self._read(url)
            if self._meanings.get(name, digest) != digest and not renewed:
                raise Refused(
                    400, f"{_shown(name)} was loaded with other contents; a name keeps its meaning, take a new one"
                )
            former = model = self._models.get(name)
            if model is None or model.digest != digest:
                await self._make_room()
                model = _Model(name, next(self._versions), url, digest)
                await asyncio.to_thread(self.engine.keep, adapter, model.version)
                self._held.append(model)
            self._models[name] = self._in_force = model
            model.used = next(self._numbers)
            if former is not None:
                self._let_go(former)
            self._meanings.pop(name, None)
            self._meanings[name] = digest
            for old in list(self._meanings)[:-REMEMBERED_ADAPTERS]:
                if old not in self._models:
                    del self._meanings[old]

    async def _unload(self, name: str) -> None:
        async with self._changing:
            if self._meanings.pop(name, None) is None:
                raise Refused(404, f"adapter {_shown(name)} is not loaded here")
            model = self._models.pop(name, None)
            if model is None:
                return  # it made room for others
            if model is self._in_force:
                self._in_force = self._base
            self._let_go(model)

    async def _make_room(self) -> None:
        """For one more adapter in the engine. Raises Refused."""
        deadline = time.monotonic() + self._settings.room_s
        while len(self._held) >= self._settings.max_adapters:
            idle = [model for model in self._held if not model.uses and model is not self._in_force]
            if idle:
                oldest = min(idle, key=lambda model: model.used)
                del self._models[oldest.name]
                self._let_go(oldest)
                self.adapter_evictions += 1
            elif time.monotonic() > deadline:
                busy = f"each of the {len(self._held)} held was in force or had requests under way"
                mend = "try again, or start the server with more --max-adapters"
                raise Refused(503, f"no adapter can be loaded: for {self._settings.room_s:g} s {busy}; {mend}")
            else:
                await asyncio.sleep(0.005)
        if self.engine.stopped is not None:
            raise Refused(503, f"no adapter can be loaded: {self.engine.stopped}")

    def _let_go(self, model: _Model) -> None:
        """Have the engine drop the adapter if nobody uses it or may name it."""
        if not model.uses and model in self._held and self._models.get(model.name) is not model:
            self._held.remove(model)
            self.engine.drop(model.version)

    async def _read(self, url: str) -> tuple[Adapter, str]:
        """The adapter in the engine's shapes, and the SHA-256 of its values. Raises Refused."""

        def read() -> tuple[Adapter, str]:
            adapter, lora = load_peft(open_storage(url), self._config)
            fitted = fit(adapter, lora.scale, self._zero, self._lora.scale)
            digest = hashlib.sha256()
            for target in sorted(fitted):
                for part in ("a", "b"):
                    digest.update(fitted[target][part].tobytes())
            return fitted, digest.hexdigest()

        try:
            return await _aside(read)
        except TimeoutError as error:
            raise Refused(503, f"the adapter in {url} could not be read: {error}") from error
        except (BadAdapter, OSError, ValueError) as error:
            raise Refused(400, f"{url} holds no adapter for this server: {error}") from error
        except Exception as error:  # a stranger's files, and a storage's client, raise what they like
            log.exception("the adapter in %s could not be read", url)
            raise Refused(400, f"the adapter in {url} could not be read: {type(error).__name__}: {error}") from error


def _tell_the_log(change: asyncio.Task[None]) -> None:
    """How a change ended whose client has gone."""
    error = None if change.cancelled() else change.exception()
    if error is not None:
        expected = isinstance(error, Refused)
        log.warning("a change of adapters failed, its client has gone: %s", error, exc_info=None if expected else error)


async def _aside(call: Callable[[], T]) -> T:
    """What the call gives, which a storage may delay for long. Not on one of asyncio's threads: the process would wait
    for it at its end. Raises TimeoutError after `READ_S`, beside what the call does."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            settle = functools.partial(answer.set_result, call())
        except Exception as error:
            settle = functools.partial(answer.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits
            loop.call_soon_threadsafe(lambda: None if answer.done() else settle())

    threading.Thread(target=work, name="storage", daemon=True).start()
    try:
        await asyncio.wait({answer}, timeout=READ_S)
        if not answer.done():
            raise TimeoutError(f"the storage did not answer within {READ_S:.0f} s")
        return answer.result()
    finally:
        answer.cancel()


def fit(adapter: Adapter, scale: float, like: Adapter, like_scale: float) -> Adapter:
    """`adapter` in the shapes of `like`: (x a b) scale stays what it is. Raises ValueError if its rank is higher or it
    has a target that `like` lacks."""
    fitted: Adapter = {}
    for target in adapter.keys() - like.keys():
        raise ValueError(f"it adapts {target}; this server's engine was compiled for {', '.join(sorted(like))}")
    for target, parts in like.items():
        a, b = np.zeros(parts["a"].shape, np.float32), np.zeros(parts["b"].shape, np.float32)
        if target in adapter:
            rank, most = adapter[target]["a"].shape[-1], a.shape[-1]
            if rank > most:
                raise ValueError(f"its rank is {rank}; this server's engine was compiled for {most} at most")
            a[..., :rank] = adapter[target]["a"]
            b[:, :rank] = adapter[target]["b"] if scale == like_scale else adapter[target]["b"] * (scale / like_scale)
        fitted[target] = {"a": a, "b": b}
    return fitted


def _below(url: str, roots: Sequence[str]) -> bool:
    """Whether `url` is one of the roots or lies below one, with no way out through links or `..`."""
    for root in roots:
        if root.startswith("gs://") or url.startswith("gs://"):
            parts, inside = url.split("/"), root.rstrip("/").split("/")
            if parts[: len(inside)] == inside and not {".", ".."} & set(parts):
                return True
        elif Path(url).resolve().is_relative_to(Path(root).resolve()):
            return True
    return False


# The HTTP side.

_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "stream": (False,),
    "use_beam_search": (False,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "min_new_tokens": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "response_format": ({"type": "text"},),
}
"""What would change the tokens and cannot be done here -> the values that ask for nothing."""


@dataclass(frozen=True, slots=True)
class _Names:
    """How one API calls what they all have."""

    max_tokens: tuple[str, ...] = ("max_tokens",)
    seed: str = "seed"
    default_tokens: int = 16


_VLLM_NAMES = _Names(default_tokens=1 << 30)
_SGLANG_NAMES = _Names(("max_new_tokens",), "sampling_seed", 128)
_COMPLETION_NAMES = _Names()
_CHAT_NAMES = _Names(("max_completion_tokens", "max_tokens"), default_tokens=1 << 30)


class Api:
    """The handlers."""

    def __init__(self, policy: ServedPolicy, chat: ChatFormat, settings: ServeSettings) -> None:
        self._policy, self._chat, self._settings = policy, chat, settings
        context = policy.engine.max_context
        self._most_bytes = settings.max_body_bytes or min(MOST_BYTES, (1 << 18) + 64 * context)
        self._longest_text = TEXT_BESIDE + TEXT_PER_TOKEN * context

    def application(self) -> web.Application:
        app = web.Application(client_max_size=self._most_bytes, middlewares=[self._guard])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/inference/v1/generate", self._vllm)
        app.router.add_post("/generate", self._sglang)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat_completions)
        for prefix in ("", "/v1"):
            app.router.add_post(f"{prefix}/load_lora_adapter", self._load)
            app.router.add_post(f"{prefix}/unload_lora_adapter", self._unload)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        """The key, the counters, and every refusal as JSON."""
        counts = self._policy.answered
        try:
            if self._settings.api_key and request.path != "/health":
                given = request.headers.get("Authorization", "").removeprefix("Bearer ")
                key = self._settings.api_key
                # Bytes that are no UTF-8 come as surrogates, in the environment and in headers.
                if not hmac.compare_digest(*(text.encode(errors="surrogateescape") for text in (given, key))):
                    raise Refused(401, "send the server's API key as `Authorization: Bearer KEY`")
            response: web.StreamResponse = await handler(request)
        except asyncio.CancelledError:
            counts["cancelled"] += 1
            raise
        except Refused as error:
            counts["refused"] += 1
            return _error(error.status, str(error))
        except web.HTTPException as error:
            counts["refused"] += 1
            return _error(error.status, self._explained(error, request))
        except Exception as error:
            counts["failed"] += 1
            log.exception("a request for %s failed", request.path)
            return _error(500, f"the server failed: {type(error).__name__}: {error}")
        counts["answered"] += 1
        return response

    def _explained(self, error: web.HTTPException, request: web.Request) -> str:
        if error.status == 413:
            return f"the body is larger than {self._most_bytes} bytes: shorten the prompt"
        if error.status == 404:
            paths = sorted({resource.canonical for resource in request.app.router.resources()})
            return f"there is no {request.path}; there is {', '.join(paths)}"
        return f"{error.reason}: {request.method} {request.path}"

    async def _health(self, request: web.Request) -> web.Response:
        stopped = self._policy.engine.stopped
        if stopped is not None:
            return web.json_response({"status": "stopped", "reason": str(stopped)}, status=503)
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        """What may be named, the base model first."""
        policy = self._policy
        card = {"object": "model", "owned_by": "headrace", "max_model_len": policy.engine.max_context}
        cards = [{**card, "id": policy.name, "root": policy.name, "in_force": not policy.adapter}]
        cards += [
            {**card, "id": name, "root": url, "parent": policy.name, "in_force": name == policy.adapter}
            for name, url in policy.adapters.items()
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _metrics(self, request: web.Request) -> web.Response:
        policy, engine = self._policy, self._policy.engine
        return web.json_response(
            {
                "model": policy.name,
                "adapter": policy.adapter,
                "adapters": list(policy.adapters),
                "adapter_evictions": policy.adapter_evictions,
                "uptime_s": round(time.monotonic() - policy.began, 3),
                "requests": dict(policy.answered),
                "follow_failures": policy.follow_failures,
                **{
                    name: getattr(engine, name)
                    for name in (
                        "adapter_bytes",
                        "slots",
                        "running",
                        "queued",
                        "tokens_sampled",
                        "tokens_prefilled",
                        "prefill_reused",
                        "prefill_calls",
                        "decode_calls",
                        "evictions",
                        "failures",
                    )
                },
            }
        )

    async def _vllm(self, request: web.Request) -> web.Response:
        body = await _body(request)
        fields = _table(body.get("sampling_params"), "sampling_params")
        _supported(body)
        request_id = _name(body, "request_id")
        ids = self._ids(body.get("token_ids"), "token_ids")
        params = self._params(fields, _VLLM_NAMES, "sampling_params.")
        model, completion = await self._policy.sample(_name(body, "model"), ids, params)
        tokens, logprobs = completion.token_ids_N.tolist(), completion.logprobs_N.tolist()
        entries = [{"token_id": t, "logprob": p, "top_logprobs": []} for t, p in zip(tokens, logprobs, strict=True)]
        choice = {
            "index": 0,
            "token_ids": tokens,
            "finish_reason": _finish(completion),
            "stop_reason": _stopped_at(completion, params),
            "logprobs": {"content": entries},
            **_kept(completion, "sampling_mask"),
        }
        return web.json_response(
            {
                "request_id": request_id or f"generate-{secrets.token_hex(8)}",
                "created": int(time.time()),
                "model": model,
                "choices": [choice],
                "usage": _usage(ids, tokens),
            }
        )

    async def _sglang(self, request: web.Request) -> web.Response:
        body = await _body(request)
        fields = _table(body.get("sampling_params"), "sampling_params")
        _supported(body)
        request_id = _name(body, "rid")
        if body.get("input_ids") is None:
            ids = await self._encoded(body.get("text"), "text")
        else:
            ids = self._ids(body["input_ids"], "input_ids")
        params = self._params(fields, _SGLANG_NAMES, "sampling_params.")
        # Without an adapter's name it is the base model that is asked for.
        _, completion = await self._policy.sample(_name(body, "lora_path") or self._policy.name, ids, params)
        tokens, logprobs = completion.token_ids_N.tolist(), completion.logprobs_N.tolist()
        kind = _finish(completion)
        finish = {"type": kind, **({"length": len(tokens)} if kind == "length" else {})}
        if (matched := _stopped_at(completion, params)) is not None:
            finish["matched"] = matched
        meta = {
            "id": request_id or secrets.token_hex(16),
            "finish_reason": finish,
            "prompt_tokens": len(ids),
            "completion_tokens": len(tokens),
            "output_token_logprobs": [[p, t, None] for t, p in zip(tokens, logprobs, strict=True)],
            **_kept(completion, "output_token_sampling_mask"),
            **({"output_token_sampling_logprobs": logprobs} if completion.kept_ids else {}),
        }
        return web.json_response({"text": self._chat.decode(tokens), "output_ids": tokens, "meta_info": meta})

    async def _completions(self, request: web.Request) -> web.Response:
        body = await _body(request)
        _supported(body)
        prompt = body.get("prompt")
        ids = await self._encoded(prompt, "prompt") if isinstance(prompt, str) else self._ids(prompt, "prompt")
        params = self._params(body, _COMPLETION_NAMES, "")
        model, completion = await self._policy.sample(_name(body, "model"), ids, params)
        tokens = completion.token_ids_N.tolist()
        choice: dict[str, Any] = {
            "index": 0,
            "text": self._chat.decode(tokens),
            "finish_reason": _finish(completion),
            "stop_reason": _stopped_at(completion, params),
            "logprobs": None,
        }
        if body.get("return_token_ids"):
            choice["token_ids"] = tokens
        if body.get("logprobs") is not None:
            spelled = bool(body.get("return_tokens_as_token_ids"))
            choice["logprobs"] = {
                "tokens": [f"token_id:{token}" if spelled else self._chat.decode([token]) for token in tokens],
                "token_logprobs": completion.logprobs_N.tolist(),
                "top_logprobs": None,
            }
        return web.json_response(
            {
                "id": f"cmpl-{secrets.token_hex(8)}",
                "object": "text_completion",
                "created": int(time.time()),
                "model": model,
                "choices": [choice],
                "usage": _usage(ids, tokens),
            }
        )

    async def _chat_completions(self, request: web.Request) -> web.Response:
        body = await _body(request)
        _supported(body)
        tools = body.get("tools")
        tools = [] if tools is None else tools
        self._check_size([body.get("messages"), tools], "messages and tools")
        if not isinstance(tools, list) or not all(map(_is_tool, tools)):
            raise Refused(400, 'tools must be a list of objects like {"type": "function", "function": {"name": "f"}}')
        messages = _messages(body.get("messages"))
        try:
            ids = self._ids(await asyncio.to_thread(self._chat.prompt, messages, tools), "messages")
        except ChatFormatError as error:
            raise Refused(400, f"the messages cannot be rendered: {error}") from error
        params = self._params(body, _CHAT_NAMES, "")
        model, completion = await self._policy.sample(_name(body, "model"), ids, params)
        tokens = completion.token_ids_N.tolist()
        action = self._chat.parse(tokens, completion.finish_reason, tools)
        calls = [
            {
                "id": f"call-{secrets.token_hex(8)}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
            }
            for call in action.tool_calls
            if call.arguments is not None
        ]
        message = {"role": "assistant", "content": action.text, **({"tool_calls": calls} if calls else {})}
        finish = "tool_calls" if calls and action.finished else _finish(completion)
        return web.json_response(
            {
                "id": f"chatcmpl-{secrets.token_hex(8)}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": model,
                "choices": [{"index": 0, "message": message, "finish_reason": finish}],
                "usage": _usage(ids, tokens),
            }
        )

    async def _load(self, request: web.Request) -> web.Response:
        body = await _body(request)
        name, url = _text(body, "lora_name"), _text(body, "lora_path")
        await self._policy.load(name, url)
        return web.json_response({"success": True, "loaded_adapters": {self._policy.adapter: url}})

    async def _unload(self, request: web.Request) -> web.Response:
        body = await _body(request)
        await self._policy.unload(_text(body, "lora_name"))
        return web.json_response({"success": True})

    # Reading requests.

    async def _encoded(self, text: Any, where: str) -> list[int]:
        if not isinstance(text, str):
            raise Refused(400, f"{where} must be one text or one list of token ids, found {_shown(text)}")
        self._check_size(text, where)
        return self._ids(await asyncio.to_thread(self._chat.encode, text), where)

    def _check_size(self, value: Any, where: str) -> None:
        """Raises Refused for texts that no context holds."""
        if not _smaller(value, self._longest_text, where):
            raise Refused(
                413,
                f"{where} must have at most {self._longest_text} characters here, {TEXT_PER_TOKEN} for each token of "
                "the context: shorten it, or start the server with a larger sampling.max_context",
            )

    def _ids(self, ids: Any, where: str) -> list[int]:
        context = self._policy.engine.max_context
        if isinstance(ids, list) and len(ids) >= context:
            raise Refused(
                400,
                f"{where} has {len(ids)} tokens, the context holds {context} with at least one to sample: shorten it, "
                "or start the server with a larger sampling.max_context",
            )
        if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
            raise Refused(400, f"{where} must be one flat list of at least one token id, found {_shown(ids)}")
        wrong = next((token for token in ids if not 0 <= token < self._policy.vocab_size), None)
        if wrong is not None:
            raise Refused(400, f"{where} must hold ids from 0 to {self._policy.vocab_size - 1}, found {_shown(wrong)}")
        return ids

    def _params(self, fields: Mapping[str, Any], names: _Names, where: str) -> SamplingParams:
        _supported(fields)
        max_tokens = next((fields[n] for n in names.max_tokens if fields.get(n) is not None), names.default_tokens)
        seed = fields.get(names.seed)
        stop = fields.get("stop")
        strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
        if not isinstance(strings, tuple | list):
            raise Refused(400, f"{where}stop must be a text or a list of texts, found {_shown(stop)}")
        if len(strings) > MOST_STOPS:
            raise Refused(400, f"{where}stop must hold at most {MOST_STOPS} texts, found {len(strings)}")
        own = () if fields.get("ignore_eos") else self._chat.stop_token_ids
        stop_ids = fields.get("stop_token_ids")
        stop_ids = [] if stop_ids is None else stop_ids
        if not isinstance(stop_ids, list):
            raise Refused(400, f"{where}stop_token_ids must be a list, found {_shown(stop_ids)}")
        if len(stop_ids) > MOST_STOP_IDS - len(own):
            most = f"at most {MOST_STOP_IDS - len(own)} ids beside the model's own"
            raise Refused(400, f"{where}stop_token_ids must hold {most}, found {len(stop_ids)}")
        ids = [*(_integer(token, where + "stop_token_ids") for token in stop_ids), *own]
        top_k = fields.get("top_k")
        try:
            params = SamplingParams(
                temperature=_real(fields, "temperature", 1.0, where),
                max_tokens=_integer(max_tokens, where + names.max_tokens[0]),
                stop_token_ids=tuple(dict.fromkeys(ids)),
                seed=secrets.randbits(63) if seed is None else _integer(seed, where + names.seed),
                top_k=0 if top_k is None else max(0, _integer(top_k, where + "top_k")),
                top_p=_real(fields, "top_p", 1.0, where),
                min_p=_real(fields, "min_p", 0.0, where),
                stop=tuple(strings),
            )
        except ValueError as error:
            raise Refused(400, f"{where}{error}") from error
        if params.truncates and not 0 < max(1, params.top_k) <= self._policy.max_kept:
            raise Refused(
                400,
                f"{where}top_k must be at most {self._policy.max_kept} here, the most tokens that any truncated draw "
                f"chooses from; found {_shown(params.top_k)}: start the server with a larger sampling.max_kept",
            )
        return params


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.text())
    except web.RequestPayloadError as error:
        raise Refused(400, f"the body of {request.path} cannot be read: {' '.join(str(error).split())}") from error
    except (ValueError, RecursionError, LookupError) as error:
        raise Refused(400, f"the body of {request.path} is no JSON: {error}; send an object") from error
    return _table(body, "the body")


def _table(value: Any, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Refused(400, f"{where} must be a JSON object, found {_shown(value)}")
    return value


def _text(body: Mapping[str, Any], name: str, where: str = "") -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise Refused(400, f"{where}{name} must be a text, found {_shown(value)}")
    return value


def _name(body: Mapping[str, Any], name: str) -> str:
    """Empty if there is none."""
    value = body.get(name)
    if not isinstance(value, str | None):
        raise Refused(400, f"{name} must be a text, found {_shown(value)}")
    return value or ""


def _integer(value: Any, where: str) -> int:
    if type(value) is not int:
        raise Refused(400, f"{where} must be a whole number, found {_shown(value)}")
    return value


def _real(fields: Mapping[str, Any], name: str, default: float, where: str) -> float:
    value = fields.get(name)
    if value is None:
        return default
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise Refused(400, f"{where}{name} must be a number, found {_shown(value)}")
    return number


def _supported(fields: Mapping[str, Any]) -> None:
    for name, neutral in _UNSUPPORTED.items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            raise Refused(400, f"{name} = {_shown(value)} cannot be done by this server: leave {name} out")


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise Refused(400, f"messages must be a list of at least one message, found {_shown(value)}")
    return [_message(item, f"messages[{index}]") for index, item in enumerate(value)]


def _message(item: Any, where: str) -> Message:
    fields = _table(item, where)
    content, role, name = fields.get("content"), fields.get("role"), fields.get("name")
    if isinstance(content, list):
        parts = [_table(part, f"{where}.content") for part in content]
        if any(part.get("type") != "text" for part in parts):
            raise Refused(400, f"{where}.content must be text: this server reads nothing else")
        content = "".join(_text(part, "text", f"{where}.content.") if part.get("text") else "" for part in parts)
    if not (isinstance(content, str | None) and isinstance(role, str) and isinstance(name, str | None)):
        raise Refused(400, f"{where} must have a role and a content that are texts, found {_shown(item)}")
    calls = fields.get("tool_calls")
    calls = [] if calls is None else calls
    if not isinstance(calls, list):
        raise Refused(400, f"{where}.tool_calls must be a list, found {_shown(calls)}")
    called = tuple(_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls))
    return Message(role, content or "", called, name or "")


def _call(item: Any, where: str) -> ToolCall:
    function = _table(_table(item, where).get("function"), f"{where}.function")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"{where}.function.arguments are no JSON: {error}") from error
        # It was counted as text; nested it was not.
        _smaller(arguments, MOST_BYTES, f"{where}.function.arguments")
    found = None if arguments == "" else arguments
    return ToolCall(_text(function, "name", f"{where}.function."), _table(found, f"{where}.function.arguments"))


def _is_tool(tool: Any) -> bool:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _smaller(value: Any, most: int, where: str) -> bool:
    """Whether the texts in a JSON value have at most so many characters, everything else counted as one or as its
    digits. Raises Refused for one that is nested deeper than `DEEPEST`. Looks no further than it must."""
    left, seen = most, [(value, 0)]
    while seen:
        part, depth = seen.pop()
        if depth > DEEPEST:
            raise Refused(400, f"{where} must be nested at most {DEEPEST} deep")
        left -= len(part) if isinstance(part, str) else part.bit_length() // 3 + 1 if isinstance(part, int) else 1
        if isinstance(part, dict | list):
            left -= len(part)
        if left < 0:
            return False
        if isinstance(part, dict):
            seen += ((inner, depth + 1) for pair in part.items() for inner in pair)
        elif isinstance(part, list):
            seen += ((inner, depth + 1) for inner in part)
    return True


_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 80


def _shown(value: Any) -> str:
    """For an error: short, whatever it is."""
    text = _BRIEF.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _finish(completion: Completion) -> str:
    return "stop" if completion.finish_reason is FinishReason.STOP else "length"


def _stopped_at(completion: Completion, params: SamplingParams) -> int | None:
    """The stop token that ended the completion."""
    last = int(completion.token_ids_N[-1]) if len(completion.token_ids_N) else None
    return last if last in params.stop_token_ids else None


def _kept(completion: Completion, name: str) -> dict[str, list[list[int]]]:
    return {name: [ids.tolist() for ids in completion.kept_ids]} if completion.kept_ids else {}


def _usage(prompt: Sequence[int], sampled: Sequence[int]) -> dict[str, int]:
    total = len(prompt) + len(sampled)
    return {"prompt_tokens": len(prompt), "completion_tokens": len(sampled), "total_tokens": total}


def _error(status: int, reason: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": reason, "type": kind, "code": status}}, status=status)


# The process.


def build_policy(
    model: ModelSettings, lora: LoraSettings | None, sampling: SamplingSettings, settings: ServeSettings
) -> tuple[ServedPolicy, ChatFormat]:
    """A fresh engine that samples with the model, and the model's chat format.

    Without `lora` the adapter to begin with decides what adapters the engine takes, else the run that is followed, else
    the defaults do. Raises ModelError, ChatFormatError, BadAdapter, or ValueError for settings that do not fit.
    """
    loaded = load_model(model)
    chat = load_chat(model.path, variables=model.template_variables, tool_calls=model.tool_calls)
    if lora is None and settings.adapter:
        lora = load_peft(open_storage(settings.adapter), loaded.config)[1]
    if lora is None and settings.follow:
        storage = open_storage(settings.follow)
        latest = AdapterStore(storage, loaded.config, LoraSettings()).latest()
        if latest is not None:
            lora = load_peft(storage.join(f"adapters/{latest.version}"), loaded.config)[1]
    lora = lora or LoraSettings()
    engine = Engine(
        loaded.config,
        loaded.weights,
        zero_adapter(loaded.config, lora),
        BASE,
        sampling,
        lora.scale,
        decode=chat.decode,
        truncates=sampling.max_kept > 0,
    )
    return ServedPolicy(loaded.name, engine, loaded.config, lora, sampling, settings), chat


def serve(
    model: ModelSettings,
    lora: LoraSettings | None,
    sampling: SamplingSettings,
    settings: ServeSettings,
    ready: Callable[[str], None],
) -> None:
    """Load the model, answer until SIGTERM or Ctrl-C. `ready` is told the address once requests are answered.

    Raises what `build_policy` does, or AddressError.
    """
    _try_address(settings)
    policy, chat = build_policy(model, lora, sampling, settings)
    try:
        asyncio.run(_serve(policy, chat, settings, ready))
    finally:
        policy.engine.close()


def _try_address(settings: ServeSettings) -> None:
    """Raises AddressError now, rather than when the model is loaded."""
    try:
        found = socket.getaddrinfo(
            settings.host or None, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(address)
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(settings, error) from error


def _cannot_listen(settings: ServeSettings, error: OSError | UnicodeError) -> AddressError:
    where = f"port {settings.port} of {settings.host or 'this machine'}"
    what = error.strerror if isinstance(error, OSError) else None
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return AddressError(
            f"{where} is taken: end what listens there, or choose another with --port (0 takes any that is free)"
        )
    mend = "give --host an address of this machine, and --port one that you may use (from 1024 up, or 0 for any)"
    return AddressError(f"{where} cannot be listened at ({what or error}): {mend}")


async def _serve(policy: ServedPolicy, chat: ChatFormat, settings: ServeSettings, ready: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    if settings.adapter:
        try:
            await policy.load("adapter", settings.adapter)
        except Refused as error:
            raise BadAdapter(str(error)) from error
    following = asyncio.create_task(policy.follow()) if settings.follow else None
    app = Api(policy, chat, settings).application()
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=STOP_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, settings.host, settings.port).start()
        except OSError as error:
            raise _cannot_listen(settings, error) from error
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        ready(f"http://{host}:{runner.addresses[0][1]}")
        await stop.wait()
    finally:
        if following is not None:
            following.cancel()
        # Requests under way fail now, and not when the connections are cut.
        await asyncio.to_thread(policy.engine.close)
        await runner.cleanup()
