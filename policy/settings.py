"""How a policy is sampled: the section `sampling` of the run file, and what training keeps. Imports neither JAX nor a
model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from policy.client import check_stop, check_temperature, check_truncation, truncates


class Remat(StrEnum):
    """What the backward pass of training computes again instead of keeping."""

    NONE = "none"
    """Nothing: fastest, and the attention weights of every layer stay in memory."""
    ATTENTION = "attention"
    """Attention and the elementwise parts; the outputs of the projections are kept. A few percent slower than `none`,
    about half the memory."""
    LAYER = "layer"
    """Everything but each layer's input: least memory, one more forward pass. What large models need."""


class Quantization(StrEnum):
    """How training holds the base's projections (policy.quantization)."""

    NONE = "none"
    """As `model.dtype` says."""
    INT8 = "int8"
    INT4 = "int4"
    NF4 = "nf4"
    """NormalFloat: levels that lie as a normal distribution's quantiles do. The 4 bits of QLoRA."""


class Backend(StrEnum):
    """Who answers `SamplingClient.sample`."""

    ENGINE = "engine"
    """The model, in this process."""
    SIMULATED = "simulated"
    """Random tokens without a model, to measure everything else."""
    REMOTE = "remote"
    """Inference servers, over HTTP."""


class Dialect(StrEnum):
    """What the servers of the backend `remote` speak (policy.remote)."""

    VLLM = "vllm"
    """vLLM's token-in, token-out endpoint. `headrace serve` speaks all three."""
    SGLANG = "sglang"
    """SGLang's own endpoint."""
    COMPLETIONS = "completions"
    """OpenAI's /v1/completions of a server that takes and returns token ids."""


@dataclass(frozen=True)
class SamplingSettings:
    """Section `sampling` of the run file."""

    backend: Backend = Backend.ENGINE
    """`engine` (the model), `remote` (inference servers) or `simulated` (random tokens, for benchmarks of the
    machinery)."""
    slots: int = 48
    """Episodes whose key/value cache a worker process holds at once; more wait their turn. Memory grows with it. With
    the backend `remote`: turns that a worker process asks for at once."""
    small_batch: int = 16
    """While no more requests than this are decoding, a smaller compiled shape decodes them; 0 for one shape only."""
    temperature: float = 1.0
    """Of training episodes; 0 is greedy. Else at least 0.0001, at vLLM 0.01: it would raise lower ones in silence."""
    top_k: int = 0
    """Draw from so many of the most likely tokens; 0 is off. Applied before `top_p`, and that before `min_p`."""
    top_p: float = 1.0
    """Draw from the most likely tokens that hold this share of the probability; 1 is off."""
    min_p: float = 0.0
    """Draw from tokens that are at least this share as likely as the most likely one; 0 is off."""
    max_kept: int = 64
    """Most tokens that a truncated draw (`top_k`, `top_p`, `min_p`) chooses from. Their ids travel with each token, so
    that the learner renormalises over the same ones. 0 stores no ids and refuses truncation."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn, beside the model's own end of turn: at most 16, each of at most 256 characters."""
    max_tokens: int = 64
    """Most tokens sampled in one turn."""
    max_context: int = 512
    """Most tokens (prompt and sampled) of one episode. Decoding costs grow with it: no larger than needed."""
    prefill_chunk: int = 64
    """Prompt tokens computed in one call between two decode calls."""
    extend_rows: int = 8
    """Requests whose short extensions (tool results) are computed in one call. Calls of half as many rows and twice the
    tokens are compiled too, down to those of one prompt: each call takes the shape that suits those who wait."""
    extend_chunk: int = 16
    """Tokens of each of them."""
    steps_per_call: int = 1
    """Tokens each request draws between two looks at joins, leaves and new adapters. More of them only pay where a call
    costs more than its arithmetic; a request that ends within a call wastes the rest."""
    servers: tuple[str, ...] = ()
    """Addresses of the backend `remote`, such as http://10.0.0.5:8000. An episode stays with one of them, for the sake
    of its prefix cache, as long as that can be reached."""
    dialect: Dialect = Dialect.VLLM
    """What the servers speak: `vllm`, `sglang` or `completions`. `headrace serve` speaks each of them."""
    served_model: str = ""
    """The base model's name at the servers. Empty: the first that they list."""
    server_storage: str = ""
    """The run's storage as the servers reach it, such as the folder where they mount its bucket. Empty: as the workers
    do. Adapters are loaded from there."""
    api_key_env: str = ""
    """Environment variable that holds the servers' API key, in every worker. The key itself stands in no run file."""
    connect_timeout_s: float = 10.0
    """Seconds to reach a server."""
    request_timeout_s: float = 600.0
    """Seconds for one turn at a server, its wait for a slot there included; also for loading an adapter."""
    request_retries: int = 6
    """Tries after the first, where a server cannot be reached or is overloaded. The pauses between them double from a
    quarter second to 8 s."""

    def __post_init__(self) -> None:
        for name in ("slots", "max_tokens", "prefill_chunk", "extend_rows", "extend_chunk", "steps_per_call"):
            if getattr(self, name) < 1:
                raise ValueError(f"sampling.{name} must be at least 1, found {getattr(self, name)}")
        if self.small_batch < 0:
            raise ValueError(f"sampling.small_batch must be 0 (one shape) or more, found {self.small_batch}")
        if self.max_context < 2:
            raise ValueError(
                f"sampling.max_context must be at least 2, found {self.max_context}; "
                "it holds the prompt and everything an episode samples and is told"
            )
        check_temperature(self.temperature, "sampling.")
        self._check_servers()
        check_truncation(self.top_k, self.top_p, self.min_p, "sampling.")
        check_stop(self.stop, "sampling.")
        if self.max_kept < 0:
            raise ValueError(f"sampling.max_kept must be 0 (no ids are stored) or more, found {self.max_kept}")
        if self.truncates and not self.max_kept:
            raise ValueError(
                "sampling.max_kept must be above 0 with top_k, top_p or min_p, found 0: without the kept ids the "
                "learner could not renormalise over the tokens that a draw chose from"
            )
        if self.top_k > self.max_kept > 0:
            raise ValueError(
                f"sampling.max_kept must be at least sampling.top_k ({self.top_k}), found {self.max_kept}: raise the "
                "one or lower the other"
            )

    @property
    def truncates(self) -> bool:
        """Whether training episodes draw from less than the whole vocabulary."""
        return truncates(self.top_k, self.top_p, self.min_p)

    def _check_servers(self) -> None:
        for address in self.servers:
            parts = urlsplit(address)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
                raise ValueError(f"sampling.servers must hold addresses like http://host:8000, found {address!r}")
            if parts.username or parts.password:
                raise ValueError(
                    f"sampling.servers must hold no user or password, found some for {parts.hostname}: put the key "
                    "into an environment variable and its name into sampling.api_key_env"
                )
        if len(set(self.servers)) != len(self.servers):
            raise ValueError(f"sampling.servers must hold each address once, found {list(self.servers)}")
        if self.backend is Backend.REMOTE and not self.servers:
            raise ValueError('sampling.servers must hold an address with backend = "remote", found none')
        if self.backend is Backend.REMOTE and self.truncates:
            if self.dialect is Dialect.COMPLETIONS:
                raise ValueError(
                    "sampling.dialect must be vllm or sglang with top_k, top_p or min_p, found completions: that API "
                    "does not say which ids a token was drawn from"
                )
            if not self.top_k:
                raise ValueError(
                    "sampling.top_k must be above 0 with top_p or min_p and servers, found 0: servers do not know "
                    "sampling.max_kept, top_k keeps their draws within it"
                )
        for name in ("connect_timeout_s", "request_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"sampling.{name} must be more than 0 seconds, found {getattr(self, name)}")
        if self.request_retries < 0:
            raise ValueError(f"sampling.request_retries must be 0 or more, found {self.request_retries}")

    @property
    def prefill_shapes(self) -> tuple[tuple[int, int], ...]:
        """(rows, chunk) of the compiled prefill calls: one long prompt, one short extension, and from many short
        extensions to a few longer ones."""
        rows, chunk = min(self.extend_rows, self.slots), min(self.extend_chunk, self.max_context)
        shapes = [(1, min(self.prefill_chunk, self.max_context)), (1, chunk)]
        while rows > 1 and (chunk < self.prefill_chunk or len(shapes) == 2):
            shapes.append((rows, chunk))
            rows, chunk = rows // 2, min(2 * chunk, self.max_context)
        return tuple(dict.fromkeys(shapes))

    @property
    def segments(self) -> tuple[int, ...]:
        """Slots by compiled decode shape: the small batch and the rest."""
        small = min(self.small_batch, self.slots)
        return tuple(size for size in (small, self.slots - small) if size)
