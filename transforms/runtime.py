"""The runtime of a worker process: one policy, one event loop of episodes, the adapters it follows, its heartbeats.

Invariants: one runtime per process and run, made at the first use and kept (Beam makes and drops DoFns per bundle);
nothing here blocks Beam's thread: the model is loaded and compiled in the background while episodes wait in state.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from environments.environment import Prepared, load_environment
from environments.orchestrator import RolloutOrchestrator
from environments.user_code import make_importable
from policy.adapters import AdapterStore, LatestAdapter, MissingAdapter
from policy.allocator import keep_freed_memory
from policy.chat import ChatFormat, load_chat
from policy.client import PolicyError, SamplingClient, SamplingParams
from policy.engine import Engine
from policy.lora import Adapter, init_adapter
from policy.remote import RemotePolicy
from policy.settings import Backend
from policy.simulated import SimulatedPolicy
from policy.transformer import ModelConfig
from policy.weights import load_model
from trajectories.schema import Episode, Task, Version
from trajectories.storage import Storage, open_storage
from transforms import metrics
from transforms.adapters import AdapterFollower
from transforms.heartbeats import Heartbeats, PolicyState
from transforms.loop import EpisodeLoop
from transforms.pending import Look
from transforms.pinned import PinnedVersions
from transforms.settings import RolloutSpec

log = logging.getLogger(__name__)

BASE = Version(0, 0)
"""The base model without an adapter: what samples until the learner has published."""


class RuntimeStartError(RuntimeError):
    """This process cannot run episodes: its model, environment or storage could not be opened."""


@dataclass(frozen=True)
class ProcessRuntime:
    """Travels in the job graph; `start` gives this process's runtime of the run."""

    spec: RolloutSpec

    def start(self) -> RolloutRuntime:
        """The runtime, made at the first call. Returns at once: the model is loaded in the background."""
        with _LOCK:
            runtime = _RUNTIMES.get(self.spec.run_id)
            if runtime is None:
                keep_freed_memory()
                runtime = _RUNTIMES[self.spec.run_id] = RolloutRuntime(self.spec)
            return runtime


def close_runtimes(timeout_s: float) -> None:
    """Stop every runtime of this process; waits at most `timeout_s`."""
    with _LOCK:
        runtimes = list(_RUNTIMES.values())
        _RUNTIMES.clear()
    for runtime in runtimes:
        runtime.close(timeout_s)


class Policy(SamplingClient, Protocol):
    """A sampling client that changes versions."""

    @property
    def version(self) -> Version: ...

    @property
    def slots(self) -> int: ...

    @property
    def first_token_at(self) -> Mapping[Version, float]: ...

    def drop(self, version: Version) -> None: ...

    def close(self) -> None: ...


class RolloutRuntime:
    """Runs a process's episodes with the spec's policy and environment. Thread-safe."""

    def __init__(self, spec: RolloutSpec) -> None:
        settings = spec.rollouts
        self._spec = spec
        self._policy: Policy | None = None
        self._orchestrator: RolloutOrchestrator | None = None
        self._follower: AdapterFollower | None = None
        self._failure: Exception | None = None
        self._closed = threading.Event()
        self._episodes = EpisodeLoop(
            max_concurrency=spec.environment.max_concurrency,
            poll_interval_s=settings.poll_interval_s,
            orphan_intervals=settings.orphan_intervals,
            clock=time.monotonic,
        )
        self._heartbeats = Heartbeats(
            spec.run_id,
            spec.topics.heartbeats,
            settings.heartbeat_interval_s,
            self._episodes.occupancy,
            self._policy_state,
        )
        threading.Thread(target=self._open, name="runtime", daemon=True).start()

    def claim(self, episode_id: str, starts: int) -> None:
        """See `transforms.episodes.Runtime`."""
        self._episodes.claim(episode_id, starts)

    def look(self, episode_id: str) -> Look:
        """See `transforms.episodes.Runtime`."""
        return self._episodes.look(episode_id)

    def room(self) -> int:
        """Episodes that may be started now; raises RuntimeStartError if there never will be any."""
        if self._failure is not None:
            raise RuntimeStartError(f"this process cannot run episodes: {self._failure}") from self._failure
        return self._episodes.room()

    @property
    def failure(self) -> Exception | None:
        """Why this process will never run an episode."""
        return self._failure

    def submit(self, task: Task, sample: int) -> None:
        """See `transforms.episodes.Runtime`."""
        self._episodes.submit(task, sample)

    def forget(self, episode_id: str) -> None:
        """See `transforms.episodes.Runtime`."""
        self._episodes.forget(episode_id)

    def close(self, timeout_s: float) -> None:
        """Cancel the episodes, close their environments, stop the threads; waits about `timeout_s`."""
        self._closed.set()
        deadline = time.monotonic() + timeout_s
        self._episodes.close(timeout_s)
        if self._follower is not None:
            self._follower.close(max(0.0, deadline - time.monotonic()))
        self._heartbeats.close(max(0.0, deadline - time.monotonic()))
        if self._policy is not None:
            self._policy.close()

    def _policy_state(self) -> PolicyState:
        policy, orchestrator = self._policy, self._orchestrator
        if orchestrator is not None:
            metrics.PROCESS.gauge("environments/abandoned", orchestrator.gauges.abandoned)
            metrics.PROCESS.gauge("environments/hung_threads", orchestrator.gauges.hung_threads)
        if policy is None:
            return PolicyState(None, 0, {})
        return PolicyState(policy.version, policy.slots, dict(policy.first_token_at))

    def _open(self) -> None:
        """Load everything, follow the learner, then let episodes start."""
        spec = self._spec
        try:
            began = time.monotonic()
            make_importable(spec.code_path)
            environment = load_environment(spec.environment, spec.seed)
            if isinstance(environment, Prepared):
                environment.prepare()
            policy, follower, keep = open_policy(spec)
            sampling = spec.sampling
            # A job that starts anew beside a learner must not sample with the base first.
            follower.poll()
            orchestrator = RolloutOrchestrator(
                policy,
                _load_chat(spec),
                environment,
                spec.environment,
                SamplingParams(
                    temperature=sampling.temperature,
                    max_tokens=sampling.max_tokens,
                    top_k=sampling.top_k,
                    top_p=sampling.top_p,
                    min_p=sampling.min_p,
                    stop=sampling.stop,
                ),
                spec.seed,
            )
        except Exception as error:
            log.exception("this process cannot run episodes")
            self._failure = error
            return
        self._policy, self._follower, self._orchestrator = policy, follower, orchestrator
        if self._closed.is_set():
            policy.close()
            return
        follower.start()
        pinned = PinnedVersions(keep, policy.drop)

        async def run(task: Task, sample: int) -> Episode:
            if task.version is None:
                return await orchestrator.run(task, sample)
            async with pinned.held(task.version):
                return await orchestrator.run(task, sample)

        self._episodes.attach(run)
        log.info("ready to run episodes with version %s after %.1f s", policy.version, time.monotonic() - began)


def _load_chat(spec: RolloutSpec) -> ChatFormat:
    model = spec.model
    return load_chat(model.path, variables=model.template_variables, tool_calls=model.tool_calls)


def open_policy(spec: RolloutSpec) -> tuple[Policy, AdapterFollower, Callable[[Version], None]]:
    """The spec's policy with its base weights, what keeps it at the learner's newest version, and what loads a version
    for those pinned to it, to be served beside the newest until it is dropped."""
    storage, settings = open_storage(spec.storage_url), spec.sampling
    policy: Policy
    if settings.backend is Backend.SIMULATED:
        chat = _load_chat(spec)
        policy = SimulatedPolicy(
            chat.vocab_size,
            chat.stop_token_ids,
            version=BASE,
            max_context=settings.max_context,
            slots=settings.slots,
        )
        store = _latest_only(storage, chat.vocab_size, spec)
        simulated = policy
        follower = AdapterFollower(store.latest, lambda _: None, policy.swap, spec.rollouts.adapter_poll_s)
        return policy, follower, lambda version: simulated.keep(None, version)
    if settings.backend is Backend.REMOTE:
        return _open_remote(spec, storage)
    model = load_model(spec.model)
    store = AdapterStore(storage, model.config, spec.lora, base_model=model.base_model)
    # With b = 0 this is the base, and of the shapes that the learner's adapters will have.
    base = init_adapter(model.config, spec.lora, spec.seed)
    chat = _load_chat(spec)
    engine = Engine(model.config, model.weights, base, BASE, settings, spec.lora.scale, decode=chat.decode)

    def load(found: LatestAdapter) -> Adapter:
        return store.load(found.version, sha256=found.sha256)

    def keep(version: Version) -> None:
        engine.keep(store.load(version), version)

    return engine, AdapterFollower(store.latest, load, engine.swap, spec.rollouts.adapter_poll_s), keep


def _open_remote(spec: RolloutSpec, storage: Storage) -> tuple[Policy, AdapterFollower, Callable[[Version], None]]:
    """No weights are in this process: the servers are told where each adapter lies. Raises PolicyError."""
    settings = spec.sampling
    key = os.environ.get(settings.api_key_env, "") if settings.api_key_env else ""
    if settings.api_key_env and not key:
        raise PolicyError(
            f"the environment variable {settings.api_key_env}, which sampling.api_key_env names, is not set in this "
            "worker: set it to the servers' API key, or leave the setting out"
        )
    vocab_size = _load_chat(spec).vocab_size
    policy = RemotePolicy(settings, spec.run_id, vocab_size, version=BASE, api_key=key)
    seen_by_servers = (settings.server_storage or storage.url).rstrip("/")

    def swap(_: Adapter | None, version: Version) -> None:
        policy.swap(f"{seen_by_servers}/adapters/{version}", version)

    def keep(version: Version) -> None:
        if version not in store.versions():
            raise MissingAdapter(f"adapter {version} is not in {storage.url}: not yet published, or pruned")
        policy.keep(f"{seen_by_servers}/adapters/{version}", version)

    store = _latest_only(storage, vocab_size, spec)
    return policy, AdapterFollower(store.latest, lambda _: None, swap, spec.rollouts.adapter_poll_s), keep


def _latest_only(storage: Storage, vocab_size: int, spec: RolloutSpec) -> AdapterStore:
    """A store of which only `latest` and `versions` are asked, so that any model will do."""
    return AdapterStore(storage, ModelConfig(vocab_size, 1, 2, 1, 1, 2, 2), spec.lora)


_RUNTIMES: dict[str, RolloutRuntime] = {}
_LOCK = threading.Lock()
