"""The sampling engine: continuous batching of many episodes over one model, in this process, on its own thread.

The decode thread repeats one tick: take what others asked for (requests, cancellations, a new adapter), give rows of
the cache to requests, compute a chunk of waiting prompt tokens, or a few if more wait than draw (and take a new adapter
again), draw the next token of every request that is ready. So requests join and leave, and adapters change, between two
calls of a compiled function; none of them waits for another, and none of them compiles anything.

Rows of the cache:
- An episode keeps its row between its turns, while its tool runs. When rows run out, the one idle for longest is taken;
  its episode computes its tokens again when it returns. When no episode is idle, requests wait their turn.
- Keys and values are a function of the token ids and the weights alone. So a new request begins with a copy of the
  longest common prefix that any row holds, and waits for a prefix that another request is computing just now: a group's
  prompt, or the examples that all prompts share, are computed once. Only what was computed wholly by the current
  version is shared; after a swap a new request reuses nothing older. Running episodes go on with the rows they have.

A version that somebody keeps (`Engine.keep`) answers the requests pinned to it beside the one in force. A call has one
adapter, so a tick draws once for each version that somebody waits for.

All scheduling state belongs to the decode thread. Other threads leave notes under a lock and read gauges.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from policy import cache as kv
from policy.client import Completion, FinishReason, PolicyError, SamplingParams
from policy.lora import Adapter, layer_adapter
from policy.sampling import NOT_KEPT, Limits, seed_words
from policy.settings import SamplingSettings
from policy.transformer import ModelConfig, Params, fuse_adapter, fuse_layers
from policy.weights import Weights
from trajectories.schema import IntArray, Version, VersionSpan

logger = logging.getLogger(__name__)

REMEMBERED_VERSIONS = 256
CLOSE_TIMEOUT_S = 60.0
PREFILLS_PER_TICK = 8
"""Most chunks of prompts computed between two draws, while more requests wait for their prompt than draw."""
STOP_SLACK = 4
"""Tokens before those that a stop string can span, so that the decoded tail holds whole characters where it counts."""


class _Phase(Enum):
    QUEUED = auto()
    """No row yet."""
    FOLLOWING = auto()
    """Has a row; waits for the prefix that another request computes."""
    PREFILL = auto()
    DECODE = auto()


@dataclass(eq=False)
class _Request:
    session: _Session
    ids: IntArray
    params: SamplingParams
    pinned: Version | None
    future: asyncio.Future[Completion]
    loop: asyncio.AbstractEventLoop
    phase: _Phase = _Phase.QUEUED
    given_up: bool = False
    """Set by the caller's thread when its call was cancelled."""
    taken: bool = False
    """Set by the caller's thread when it has the completion."""
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept_ids: list[IntArray] = field(default_factory=list)
    """Of each sampled token, if the request truncates."""
    stop_tail: int = 0
    """Latest tokens among which a stop string must lie that the last of them completes."""
    spans: list[VersionSpan] = field(default_factory=list)

    @property
    def abandoned(self) -> bool:
        """Nobody waits for the answer any more. The future knows of it before its caller's code runs again."""
        return self.given_up or self.future.cancelled()

    @property
    def length(self) -> int:
        return len(self.ids) + len(self.sampled)

    @property
    def last_token(self) -> int:
        return self.sampled[-1] if self.sampled else int(self.ids[-1])


@dataclass(frozen=True)
class _Keep:
    """A note: keep the adapter, or drop the version."""

    version: Version
    adapter: kv.LayerAdapters | None = None
    dropped: bool = False


@dataclass(eq=False)
class _Session:
    """An episode between its first request and `close_session`."""

    name: str
    ids: IntArray
    """Everything said so far, the last completion included; the next request must begin with it."""
    row: _Row | None = None
    request: _Request | None = None
    """The one under way."""
    last: _Request | None = None
    """The latest, under way or not."""


@dataclass(eq=False)
class _Row:
    """One row of the cache: which tokens it holds and which versions computed them. Kept after its session ends."""

    index: int
    ids: IntArray
    """Room for a whole context (a view of `Engine._row_ids`); the first `length` are in the cache."""
    length: int = 0
    spans: list[tuple[int, Version]] = field(default_factory=list)
    """(first position, version) of the weights that computed keys and values."""
    session: _Session | None = None
    used_at: int = 0
    """Tick of the last use."""

    @property
    def idle(self) -> bool:
        return self.session is None or self.session.request is None

    def valid(self, version: Version) -> int:
        """Leading positions that `version` alone computed."""
        if not self.spans or self.spans[0][1] != version:
            return 0
        return self.spans[1][0] if len(self.spans) > 1 else self.length

    def cut(self, length: int) -> None:
        """Forget all positions from `length` on."""
        self.length = min(self.length, length)
        self.spans = [span for span in self.spans if span[0] < self.length]

    def extend(self, ids: Sequence[int] | IntArray, version: Version) -> None:
        if not self.spans or self.spans[-1][1] != version:
            self.spans.append((self.length, version))
        self.ids[self.length : self.length + len(ids)] = ids
        self.length += len(ids)

    def assign(self, other: _Row, length: int) -> None:
        """Take over what `other` knows about its first `length` positions."""
        self.ids[:length] = other.ids[:length]
        self.length, self.spans = other.length, list(other.spans)
        self.cut(length)


def common_prefixes(rows_NT: IntArray, ids_n: IntArray) -> NDArray[np.intp]:
    """How many leading ids of each row equal those of `ids_n`; n is at most T."""
    different_Nn = rows_NT[:, : len(ids_n)] != ids_n
    if not len(ids_n):
        return np.zeros(len(rows_NT), np.intp)
    return np.where(different_Nn.any(-1), different_Nn.argmax(-1), len(ids_n))


def common_prefix(a: IntArray, b: IntArray) -> int:
    """How many leading ids are equal."""
    n = min(len(a), len(b))
    return int(common_prefixes(a[None, :n], b[:n])[0])


class Engine:
    """A `SamplingClient` over a model in this process.

    `adapter` is a LoRA pytree (policy.lora) or None for the base; it is applied beside the frozen `params`, never
    merged, with the lines that the learner runs. `decode` turns sampled ids into text; requests with stop strings need
    it. `truncates` says whether requests may have top-k, top-p or min-p, each token then drawn from `sampling.max_kept`
    tokens at the most; by default they may if `settings` has one of them. Without, nothing of it is compiled.
    Construction compiles every shape (`warmup_s` says for how long) and starts the decode thread. Raises ValueError if
    the settings do not fit the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params | Weights,
        adapter: Adapter | None,
        version: Version,
        settings: SamplingSettings,
        lora_scale: float,
        clock: Callable[[], float] = time.time,
        *,
        decode: Callable[[Sequence[int]], str] | None = None,
        truncates: bool | None = None,
    ) -> None:
        truncates = settings.truncates if truncates is None else truncates
        if truncates and not settings.max_kept:
            raise ValueError("sampling.max_kept must be above 0 in an engine whose requests may truncate, found 0")
        if settings.max_context > config.max_context:
            raise ValueError(
                f"sampling.max_context must be at most the model's {config.max_context}, found {settings.max_context}"
            )
        self._config, self._settings, self._clock = config, settings, clock
        self._text = decode
        self._max_kept = min(settings.max_kept, config.vocab_size) if truncates else 0
        self._params = (
            params.fused(jax.device_put)
            if isinstance(params, Weights)
            else jax.tree.map(jnp.asarray, fuse_layers(params))
        )
        self._params["rotations"] = jax.device_put(kv.rotations(config, settings.max_context))
        self._adapter, self._adapter_shapes = self._by_layer(adapter), _shapes(adapter)
        self._version = version
        self._segments = settings.segments
        self._cache = self._new_cache()

        self.slots = settings.slots
        """Rows of the cache."""
        self.adapter_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._adapter))
        """Memory of each adapter that is in force or kept."""
        self.compiles = 0
        """Functions compiled so far; constant after construction."""
        self.failures = 0
        """Exceptions in the decode thread, each of which failed the requests of that moment."""
        self.evictions = 0
        """Rows taken from waiting episodes."""
        self.tokens_sampled = 0
        self.tokens_prefilled = 0
        """Prompt and tool tokens computed."""
        self.prefill_reused = 0
        """Prompt and tool tokens that were found in the cache."""
        self.decode_calls = 0
        self.prefill_calls = 0
        self.first_token_at: dict[Version, float] = {}
        """When the first token was sampled with each of the latest versions: `clock()`, Unix seconds by default."""

        self._rows = self._new_rows()
        self._sessions: dict[str, _Session] = {}
        self._queue: collections.deque[_Request] = collections.deque()
        self._kept: dict[Version, kv.LayerAdapters | None] = {}
        """Served beside the version in force, to who is pinned to them."""
        self._replaced: dict[Version, None] = {}
        """Versions that were in use before, oldest first: nobody need wait for them."""
        self._active: list[_Request] = []
        self._tick = 0
        self._lost_s = 0.0
        """What the larger shape took longer since the ready requests last lay in the smallest that holds them."""

        self._changed = threading.Condition()
        self._inbox: list[_Request | _Keep | str] = []
        self._pending: tuple[kv.LayerAdapters | None, Version] | None = None
        self._closing = False
        self._stopped: PolicyError | None = None

        began = time.perf_counter()
        self._compile(lora_scale)
        self._measure()
        self.warmup_s = time.perf_counter() - began
        self._thread = threading.Thread(target=self._run, name="sampling-engine", daemon=True)
        self._thread.start()

    # What other threads call.

    @property
    def max_context(self) -> int:
        return self._settings.max_context

    @property
    def version(self) -> Version:
        """The version that draws the next token."""
        return self._version

    @property
    def stopped(self) -> PolicyError | None:
        """Why the decode thread has ended; None while it goes on."""
        return self._stopped

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return len(self._active)

    @property
    def queued(self) -> int:
        """Requests that wait for a row or for their pinned version."""
        return len(self._queue)

    async def sample(
        self,
        session_id: str,
        token_ids: Sequence[int] | IntArray,
        params: SamplingParams,
        *,
        version: Version | None = None,
    ) -> Completion:
        """As `SamplingClient.sample`.

        A prompt that fills the context gives an empty completion that finished by `CONTEXT`. PolicyError: the ids do
        not go on where the session stopped, the session is sampled already or was closed meanwhile, the pinned
        version was replaced, under way or before, the engine was not made for what `params` ask, failed or was closed.
        A turn whose call was cancelled or failed may be sampled again.
        """
        ids = np.asarray(token_ids, np.int32)
        if ids.ndim != 1 or not len(ids):
            raise PolicyError(f"session {session_id}: the prompt must be a flat list of at least one token id")
        if ids.min() < 0 or ids.max() >= self._config.vocab_size:
            raise PolicyError(f"session {session_id}: token ids must lie in [0, {self._config.vocab_size})")
        self._check(session_id, params)
        loop = asyncio.get_running_loop()
        request = _Request(_Session(session_id, ids[:0]), ids, params, version, loop.create_future(), loop)
        if params.stop:
            # In UTF-8, and a token has at least one byte of it.
            request.stop_tail = max(len(text.encode()) for text in params.stop) + STOP_SLACK
        self._leave(request)
        try:
            completion = await request.future
        except asyncio.CancelledError:
            request.given_up = True
            with self._changed:
                self._changed.notify()
            raise
        request.taken = True
        return completion

    def close_session(self, session_id: str) -> None:
        """Forget the session; a request of it that is still running fails."""
        with self._changed:
            if not self._closing:
                self._inbox.append(session_id)
                self._changed.notify()

    def cache_spans(self, session_id: str) -> tuple[VersionSpan, ...]:
        """Which versions computed the session's cached positions; empty if it has no row. Exact between its turns."""
        session = self._sessions.get(session_id)
        row = None if session is None else session.row
        return () if row is None else tuple(VersionSpan(start, version) for start, version in row.spans)

    def swap(self, adapter: Adapter | None, version: Version) -> None:
        """Draw with `adapter` (copied) from the next call on. From any thread; does not wait.

        The newest of several pending swaps wins. Raises ValueError if it is not shaped like the present adapter.
        """
        self._check_shapes(adapter, version)
        fresh = self._by_layer(adapter)
        with self._changed:
            self._pending = (fresh, version)
            self._changed.notify()

    def keep(self, adapter: Adapter | None, version: Version) -> None:
        """Serve `version` to the requests pinned to it until it is dropped, whatever version is in force.

        From any thread; does not wait. It holds for requests that come later. Raises ValueError as `swap` does.
        """
        self._check_shapes(adapter, version)
        fresh = self._by_layer(adapter)
        with self._changed:
            self._inbox.append(_Keep(version, fresh))
            self._changed.notify()

    def drop(self, version: Version) -> None:
        """Keep `version` no more; requests pinned to it fail unless it is in force. Harmless if it is not kept."""
        with self._changed:
            self._inbox.append(_Keep(version, dropped=True))
            self._changed.notify()

    def _check_shapes(self, adapter: Adapter | None, version: Version) -> None:
        present, found = self._adapter_shapes, _shapes(adapter)
        different = sorted(name for name in present.keys() | found.keys() if present.get(name) != found.get(name))
        if different:
            name = different[0]
            raise ValueError(
                f"adapter {version}: {name} must be {present.get(name, 'absent')}, found {found.get(name, 'none')}"
            )

    def close(self) -> None:
        """End the thread after its present call; what still waits fails with PolicyError."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise PolicyError(f"the decode thread did not end within {CLOSE_TIMEOUT_S:.0f} s")

    def _check(self, session_id: str, params: SamplingParams) -> None:
        """Raises PolicyError for what this engine was not made for."""
        if params.truncates and not self._max_kept:
            raise PolicyError(
                f"session {session_id}: this engine draws from the whole vocabulary; top_k, top_p and min_p need a run "
                "that sets one of them, or `truncates`"
            )
        if params.truncates and params.top_k > self._settings.max_kept:
            raise PolicyError(
                f"session {session_id}: top_k must be at most sampling.max_kept ({self._settings.max_kept}), "
                f"found {params.top_k}"
            )
        if params.stop and self._text is None:
            raise PolicyError(f"session {session_id}: stop strings need an engine that can decode")

    def _leave(self, request: _Request) -> None:
        with self._changed:
            if self._stopped is not None:
                raise PolicyError(str(self._stopped))
            if self._closing:
                raise PolicyError("the engine is closed")
            self._inbox.append(request)
            self._changed.notify()

    # The decode thread.

    def _run(self) -> None:
        reason = PolicyError("the engine was closed")
        try:
            while self._receive():
                try:
                    self._step()
                except Exception as error:
                    self._recover(error)
        except Exception as error:
            logger.exception("the engine cannot go on")
            reason = PolicyError(f"the engine cannot go on: {error!r}")
        with self._changed:
            self._closing, self._stopped = True, reason
            left = [item for item in self._inbox if isinstance(item, _Request)]
            self._inbox.clear()
        left += [*self._active, *self._queue]
        self._active.clear()
        self._queue.clear()
        for request in left:
            self._fail(request, reason)

    def _receive(self) -> bool:
        """Take over the notes; sleep while there is nothing to do. False: the engine is to close."""
        with self._changed:
            while not (self._closing or self._pending or self._inbox or self._active or self._startable()):
                self._changed.wait()
            if self._closing:
                return False
            notes, self._inbox = self._inbox, []
        self._take_adapter()
        for note in notes:
            if isinstance(note, str):
                self._forget(note)
            elif isinstance(note, _Keep):
                self._keep_or_drop(note)
            else:
                self._accept(note)
        self._refuse_replaced()
        return True

    def _take_adapter(self) -> None:
        """Put a new adapter to use, if one was left."""
        with self._changed:
            pending, self._pending = self._pending, None
        if pending is None:
            return
        if self._version not in self._kept:
            self._replaced[self._version] = None
        self._adapter, self._version = pending
        self._replaced.pop(self._version, None)
        self._end_unserved()

    def _keep_or_drop(self, note: _Keep) -> None:
        if not note.dropped:
            self._kept[note.version] = note.adapter
            self._replaced.pop(note.version, None)
        elif note.version in self._kept:
            del self._kept[note.version]
            if note.version != self._version:
                self._replaced[note.version] = None
            self._end_unserved()

    def _end_unserved(self) -> None:
        """End what is pinned to a version that is served no more."""
        for old in list(self._replaced)[:-REMEMBERED_VERSIONS]:
            del self._replaced[old]
        for request in [r for r in self._active if not self._serves(r)]:
            text = f"pinned version {request.pinned} was replaced by {self._version} during the turn"
            self._finish(request, PolicyError(f"session {request.session.name}: {text}"))
        self._refuse_replaced()

    def _refuse_replaced(self) -> None:
        """Nobody need wait for a version that was in use before."""
        for request in [r for r in self._queue if r.pinned in self._replaced]:
            text = f"pinned version {request.pinned} was replaced by {self._version}"
            self._finish(request, PolicyError(f"session {request.session.name}: {text}"))

    def _startable(self) -> bool:
        """Whether the queue holds more than requests that wait for another version."""
        return any(r.abandoned or self._serves(r) for r in self._queue)

    def _serves(self, request: _Request) -> bool:
        return request.pinned is None or request.pinned == self._version or request.pinned in self._kept

    def _version_for(self, request: _Request) -> Version:
        """The version that computes its next token."""
        return self._version if request.pinned is None else request.pinned

    def _adapter_of(self, version: Version) -> kv.LayerAdapters | None:
        return self._adapter if version == self._version else self._kept[version]

    def _accept(self, request: _Request) -> None:
        name, ids = request.session.name, request.ids
        session = self._sessions.setdefault(name, request.session)
        request.session = session
        last = session.last
        if session.request is not None and session.request.abandoned:
            self._finish(session.request, None)
        if last is not None and not last.taken:
            # Its caller never saw what it drew, so the turn may be sampled again.
            session.ids = last.ids
        if session.request is not None:
            self._fail(request, PolicyError(f"session {name} is being sampled already"))
            return
        known = session.ids
        same = common_prefix(known, ids)
        if same < len(known):
            found = f"found {ids[same]} there" if same < len(ids) else "found no more ids"
            self._fail(
                request,
                PolicyError(
                    f"session {name}: ids must extend what was said before; index {same} must be {known[same]}, {found}"
                ),
            )
            return
        session.ids = ids
        if len(ids) >= self.max_context:
            none = np.zeros(0, np.int32)
            self._resolve(request, Completion(none, none.astype(np.float32), (), FinishReason.CONTEXT))
            return
        session.request = session.last = request
        self._queue.append(request)

    def _forget(self, name: str) -> None:
        session = self._sessions.pop(name, None)
        if session is None:
            return
        if session.request is not None:
            self._finish(session.request, PolicyError(f"session {name} was closed while it was sampled"))
        if session.row is not None:
            # The row still knows its tokens: others may begin with them.
            session.row.session = None
            session.row = None

    def _step(self) -> None:
        self._tick += 1
        for request in [r for r in (*self._active, *self._queue) if r.abandoned]:
            self._finish(request, None)
        self._admit()
        self._follow()
        phases = collections.Counter(request.phase for request in self._active)
        ready, waiting = phases[_Phase.DECODE], phases[_Phase.PREFILL]
        newest = any(r.phase is _Phase.DECODE and self._version_for(r) == self._version for r in self._active)
        # A draw costs nearly the same for few requests as for many: where more wait than draw, prompts come first.
        for _ in range(max(1, min(PREFILLS_PER_TICK, waiting // max(1, ready)))):
            if newest and self._version not in self.first_token_at:
                break  # the first tokens of a new version come before the prompts that wait
            self._prefill()
            self._take_adapter()
        self._compact()
        self._decode()

    # Rows.

    def _admit(self) -> None:
        """Give rows to queued requests, first come first served; who waits for a version holds nobody up."""
        waiting: collections.deque[_Request] = collections.deque()
        full = False
        for request in self._queue:
            if not self._serves(request):
                waiting.append(request)
                continue
            row = request.session.row
            if row is not None:
                # It goes on with the tokens it has, whichever version computed them; no other row has more of them.
                row.cut(common_prefix(row.ids[: row.length], request.ids[:-1]))
                if request.pinned is not None:
                    row.cut(row.valid(request.pinned))
                self._active.append(request)
                self._start(request, row)
                continue
            row = None if full else self._take_row(request)
            if row is None:
                full = True
                waiting.append(request)
                continue
            row.session, request.session.row = request.session, row
            row.used_at = self._tick
            request.phase = _Phase.FOLLOWING
            self._active.append(request)
        self._queue = waiting

    def _start(self, request: _Request, row: _Row) -> None:
        """The row holds what can be reused: compute the rest."""
        row.used_at = self._tick
        self.prefill_reused += row.length
        request.phase = _Phase.PREFILL if self._left(request) else _Phase.DECODE

    def _take_row(self, request: _Request) -> _Row | None:
        """A row for a request that has none: the one that fits it best, else a free one, else an idle episode's."""
        shared = self._shared(request.ids, self._version_for(request))
        free = [i for i, row in enumerate(self._rows) if row.session is None]
        if free:
            best = max(free, key=lambda i: shared[i])
            whole = shared[best] == len(request.ids) - 1
            chosen = best if whole else min(free, key=lambda i: self._rows[i].used_at)
        else:
            idle = [i for i, row in enumerate(self._rows) if row.idle]
            if not idle:
                return None
            chosen = min(idle, key=lambda i: self._rows[i].used_at)
            session = self._rows[chosen].session
            assert session is not None
            session.row = None
            self.evictions += 1
        row = self._rows[chosen]
        # What it held stays good as far as the request begins the same.
        row.cut(int(shared[chosen]))
        return row

    def _shared(self, ids: IntArray, version: Version) -> NDArray[np.intp]:
        """How many leading ids each row holds as the version computes them.

        The last id never counts: it is always fed again, to draw from.
        """
        valid: NDArray[np.intp] = np.array([row.valid(version) for row in self._rows], np.intp)
        shared: NDArray[np.intp] = np.minimum(common_prefixes(self._row_ids, ids[:-1]), valid)
        return shared

    def _follow(self) -> None:
        """Start the requests whose prefix is there, with a copy of it; leave waiting those whose is being made."""
        copies: list[tuple[_Row, _Row]] = []
        for request in [r for r in self._active if r.phase is _Phase.FOLLOWING]:
            row = request.session.row
            assert row is not None
            version = self._version_for(request)
            row.cut(row.valid(version))
            shared = self._shared(request.ids, version)
            best, held = self._rows[int(shared.argmax())], int(shared.max())
            last = len(request.ids) - 1
            needed = self._chunks(last - held)
            if needed and self._chunks(last - self._promised(request.ids, version)) < needed:
                continue
            if held > row.length:
                row.assign(best, held)
                best.used_at = self._tick
                copies.append((best, row))
            self._start(request, row)
        self._copy(copies)

    def _promised(self, ids: IntArray, version: Version) -> int:
        """The longest common prefix that a request in prefill will leave in its row, as the version computes it."""
        return max(
            (
                common_prefix(other.ids[:-1], ids[:-1])
                for other in self._active
                if other.phase is _Phase.PREFILL
                and other.session.row is not None
                and self._version_for(other) == version
                and other.session.row.valid(version) == other.session.row.length
            ),
            default=0,
        )

    def _chunks(self, tokens: int) -> int:
        return -(-tokens // self._settings.extend_chunk)

    def _copy(self, copies: list[tuple[_Row, _Row]]) -> None:
        """Copy rows (source, target) in order. Members of a group share one read of their source."""
        for source, group in itertools.groupby(copies, key=lambda copy: copy[0].index):
            self._mover.copy(self._cache, source, [target.index for _, target in group])

    def _compact(self) -> None:
        """If the ready requests fit a smaller shape, move them there, in exchange with rows that do not decode.

        As who rents does well to buy once the rent paid would have bought: once the time that the larger shape took
        longer comes to what the moves cost. More requests may be ready by then.
        """
        ready = [r.session.row for r in self._active if r.phase is _Phase.DECODE and r.session.row is not None]
        if not ready:
            return
        size = self._shape(len(ready))
        outside = [row for row in ready if row.index >= size]
        if not outside:
            self._lost_s = 0.0
            return
        present = self._shape(1 + max(row.index for row in outside))
        self._lost_s += self._decode_s[present] - self._decode_s[size]
        if self._lost_s < len(outside) * self._swap_s:
            return
        self._lost_s = 0.0
        busy = {row.index for row in ready}
        by_index = {row.index: row for row in self._rows}
        inside = (by_index[i] for i in range(size) if i not in busy)
        for row in outside:
            other = next(inside)
            self._mover.swap(self._cache, row.index, other.index)
            row.index, other.index = other.index, row.index

    def _shape(self, rows: int) -> int:
        """The smallest compiled decode shape for so many rows."""
        return next(size for size in self._decode_shapes if rows <= size)

    # The compiled calls.

    def _prefill(self) -> None:
        """Compute one call's chunks: of the request that waits longest, and of others of its version as the shape has
        room.

        Of the compiled shapes it takes the one that computes the most tokens per second for those who wait.
        """
        waiting = [r for r in self._active if r.phase is _Phase.PREFILL]
        if not waiting:
            return
        first = waiting[0]
        version = self._version_for(first)
        others = [r for r in waiting[1:] if self._version_for(r) == version]

        def choice(rows: int, chunk: int) -> list[_Request]:
            # Those that the chunk completes come first: they go on to draw.
            return [first, *sorted(others, key=lambda r: self._left(r) > chunk)[: rows - 1]]

        def rate(shape: tuple[int, int]) -> float:
            return sum(min(self._left(r), shape[1]) for r in choice(*shape)) / self._prefill_s[shape]

        rows, chunk = max(self._prefill_functions, key=rate)
        chosen = choice(rows, chunk)
        for request in chosen:
            if self._left(request) > chunk:
                # To the back: a long prompt must not hold up the others between its chunks.
                self._active.remove(request)
                self._active.append(request)
        arguments = self._no_chunks(rows, chunk)
        tokens, indices, starts, counts = arguments
        for i, request in enumerate(chosen):
            row = request.session.row
            assert row is not None
            count = min(chunk, self._left(request))
            tokens[i, :count] = request.ids[row.length : row.length + count]
            indices[i], starts[i], counts[i] = row.index, row.length, count
        self.prefill_calls += 1
        self._call_prefill(arguments, self._adapter_of(version))
        for request, count in zip(chosen, counts.tolist(), strict=False):
            row = request.session.row
            assert row is not None
            row.extend(request.ids[row.length : row.length + count], version)
            self.tokens_prefilled += count
            if not self._left(request):
                request.phase = _Phase.DECODE

    def _call_prefill(self, arguments: list[Any], adapter: kv.LayerAdapters | None) -> None:
        function = self._prefill_functions[arguments[0].shape]
        self._cache = function(self._params, adapter, self._cache, *arguments)

    def _left(self, request: _Request) -> int:
        """Tokens to prefill; the prompt's last one is fed by the first decode call."""
        assert request.session.row is not None
        return len(request.ids) - 1 - request.session.row.length

    def _decode(self) -> None:
        """Draw the next token (or several) of every request that is ready, in one call for each version."""
        decoding = [(r, r.session.row) for r in self._active if r.phase is _Phase.DECODE and r.session.row is not None]
        for version in dict.fromkeys(self._version_for(request) for request, _ in decoding):
            self._draw(version, [pair for pair in decoding if self._version_for(pair[0]) == version])

    def _draw(self, version: Version, ready: list[tuple[_Request, _Row]]) -> None:
        """Draw for these, which the version draws for."""
        size = self._shape(1 + max(row.index for _, row in ready))
        arguments = self._no_draws(size)
        tokens, positions, seeds, indices, temperatures, *limits = arguments
        for request, row in ready:
            i, params = row.index, request.params
            tokens[i], positions[i] = request.last_token, row.length
            seeds[i], indices[i] = seed_words(params.seed), len(request.sampled)
            temperatures[i] = params.temperature
            if params.truncates:
                for values, value in zip(limits[0], (params.top_k, params.top_p, params.min_p), strict=True):
                    values[i] = value
        self.decode_calls += 1
        drawn, logprobs, *rest = map(np.asarray, self._call_decode(size, arguments, self._adapter_of(version)))
        kept = rest[0] if rest else np.zeros((len(drawn), size, 0), np.int32)
        finite = np.isfinite(logprobs).all(0)
        if any(finite[row.index] for _, row in ready):
            self._note_first_token(version)
        elif all(self._version_for(request) == version for request in self._active):
            raise PolicyError(f"version {version} gives log-probabilities that are not finite")
        for request, row in ready:
            i = row.index
            if not finite[i]:
                self._clear(row)
                text = f"version {version} gives this request log-probabilities that are not finite"
                self._finish(request, PolicyError(f"session {request.session.name}: {text}"))
                continue
            for token, logprob, ids in zip(drawn[:, i], logprobs[:, i], kept[:, i], strict=True):
                self._append(request, row, version, int(token), float(logprob), ids)
                try:
                    reason = self._ending(request)
                except PolicyError as error:
                    self._finish(request, error)
                    break
                if reason is not None:
                    self._complete(request, reason)
                    break

    def _clear(self, row: _Row) -> None:
        """Forget the row, values and all: a NaN that no query sees is still one, times a weight of 0."""
        row.cut(0)
        self._mover.clear(self._cache, row.index)

    def _call_decode(self, size: int, arguments: list[Any], adapter: kv.LayerAdapters | None) -> list[Any]:
        used = self._decode_shapes.index(size) + 1
        head, *draws = self._decode_functions[size](self._params, adapter, self._cache[:used], *arguments)
        self._cache = [*head, *self._cache[used:]]
        return list(draws)

    def _note_first_token(self, version: Version) -> None:
        if version not in self.first_token_at:
            self.first_token_at[version] = self._clock()
            if len(self.first_token_at) > REMEMBERED_VERSIONS:
                del self.first_token_at[next(iter(self.first_token_at))]

    def _append(
        self, request: _Request, row: _Row, version: Version, token: int, logprob: float, kept: IntArray
    ) -> None:
        row.extend([request.last_token], version)
        row.used_at = self._tick
        if not request.spans or request.spans[-1].version != version:
            request.spans.append(VersionSpan(len(request.sampled), version))
        request.sampled.append(token)
        request.logprobs.append(logprob)
        if request.params.truncates:
            request.kept_ids.append(kept[kept != NOT_KEPT])
        self.tokens_sampled += 1

    def _ending(self, request: _Request) -> FinishReason | None:
        """Why the request ends with its last token, if it does. Raises PolicyError if its tokens have no text."""
        if request.last_token in request.params.stop_set or self._says_stop(request):
            return FinishReason.STOP
        if len(request.sampled) >= request.params.max_tokens:
            return FinishReason.LENGTH
        return FinishReason.CONTEXT if request.length >= self.max_context else None

    def _says_stop(self, request: _Request) -> bool:
        """Whether the completion contains a stop string. It is asked after each token, so only its tail is new."""
        if not request.params.stop:
            return False
        assert self._text is not None
        try:
            text = self._text(request.sampled[-request.stop_tail :])
        except Exception as error:
            raise PolicyError(f"session {request.session.name}: its tokens cannot be decoded: {error!r}") from error
        return any(stop in text for stop in request.params.stop)

    # Endings.

    def _complete(self, request: _Request, reason: FinishReason) -> None:
        tokens = np.array(request.sampled, np.int32)
        request.session.ids = np.concatenate([request.ids, tokens])
        logprobs, kept = np.array(request.logprobs, np.float32), tuple(request.kept_ids)
        completion = Completion(tokens, logprobs, tuple(request.spans), reason, kept)
        self._finish(request, completion)

    def _finish(self, request: _Request, answer: Completion | PolicyError | None) -> None:
        """The request leaves, its session keeps the row. None: nobody waits for an answer."""
        request.session.request = None
        if request in self._active:
            self._active.remove(request)
        if request in self._queue:
            self._queue.remove(request)
        row = request.session.row
        if row is not None:
            row.cut(len(request.session.ids))
        if isinstance(answer, PolicyError):
            self._fail(request, answer)
        elif answer is not None:
            self._resolve(request, answer)

    def _fail(self, request: _Request, error: PolicyError) -> None:
        self._resolve(request, error)

    @staticmethod
    def _resolve(request: _Request, answer: Completion | PolicyError) -> None:
        def settle() -> None:
            if request.future.done():
                return
            if isinstance(answer, PolicyError):
                request.future.set_exception(answer)
            else:
                request.future.set_result(answer)

        try:
            request.loop.call_soon_threadsafe(settle)
        except RuntimeError:
            logger.warning("session %s: its event loop is closed; nobody takes the answer", request.session.name)

    def _recover(self, error: Exception) -> None:
        """Fail what ran, and go on with an empty cache: the buffers of a failed call are gone."""
        self.failures += 1
        # Without one that ran, a queued request must be what it fails on: left there it would fail for ever.
        failed = list(self._active) or list(self._queue)
        logger.error("a call of the engine failed, and %d requests with it", len(failed), exc_info=error)
        for request in failed:
            self._finish(request, PolicyError(f"session {request.session.name}: the engine failed: {error!r}"))
        for session in self._sessions.values():
            session.row = None
        self._cache = []
        self._rows, self._cache = self._new_rows(), self._new_cache()

    # Construction.

    def _by_layer(self, adapter: Adapter | None) -> kv.LayerAdapters | None:
        """A copy of the adapter, layer by layer."""
        if adapter is None:
            return None
        depths = {len(leaf) for leaf in jax.tree.leaves(adapter)}
        if depths != {self._config.num_layers}:
            raise ValueError(f"an adapter must have {self._config.num_layers} layers, found {sorted(depths)}")
        config = self._config
        return [jax.device_put(fuse_adapter(config, layer_adapter(adapter, i))) for i in range(config.num_layers)]

    @property
    def _length(self) -> int:
        return self._settings.max_context

    def _new_rows(self) -> list[_Row]:
        self._row_ids = np.zeros((self._settings.slots, self._length), np.int32)
        return [_Row(i, ids) for i, ids in enumerate(self._row_ids)]

    def _new_cache(self) -> kv.Cache:
        return kv.new_cache(self._config, self._segments, self._length)

    def _compile(self, lora_scale: float) -> None:
        """Compile every shape that will ever run. Compiled objects refuse other shapes: nothing compiles later."""
        settings = self._settings

        def compiled(function: Callable[..., Any], donated: tuple[int, ...], *args: Any) -> kv.Compiled:
            self.compiles += 1
            jitted = jax.jit(function, donate_argnums=donated, keep_unused=True)
            return jitted.lower(*args).compile()  # type: ignore[no-any-return]

        model = (self._params, self._adapter)
        decode = functools.partial(
            kv.decode, self._config, lora_scale, settings.steps_per_call, max_kept=self._max_kept
        )
        prefill = functools.partial(kv.prefill, self._config, lora_scale)
        self._decode_shapes = list(_running_sums(self._segments))
        self._decode_functions = {
            size: compiled(decode, (2,), *model, self._cache[:used], *self._no_draws(size))
            for used, size in enumerate(self._decode_shapes, 1)
        }
        self._prefill_functions = {
            shape: compiled(prefill, (2,), *model, self._cache, *self._no_chunks(*shape))
            for shape in settings.prefill_shapes
        }
        self._mover = kv.Mover(self._cache, compiled)

    def _measure(self) -> None:
        """How many seconds the compiled calls take: what the choice between them goes by."""

        def seconds(call: Callable[[], object]) -> float:
            taken = []
            for _ in range(2):
                jax.block_until_ready(self._cache)
                began = time.perf_counter()
                call()
                jax.block_until_ready(self._cache)
                taken.append(time.perf_counter() - began)
            return min(taken)

        self._decode_s = {
            size: seconds(functools.partial(self._call_decode, size, self._no_draws(size), self._adapter))
            for size in self._decode_shapes
        }
        self._prefill_s = {
            shape: seconds(functools.partial(self._call_prefill, self._no_chunks(*shape), self._adapter))
            for shape in self._prefill_functions
        }
        self._swap_s = seconds(lambda: self._mover.swap(self._cache, 0, len(self._rows) - 1))

    def _no_draws(self, size: int) -> list[Any]:
        """Arguments of a decode call in which no row decodes: beyond the cache, it writes nothing."""
        positions = np.full(size, kv.cache_length(self._cache), np.int32)
        none = np.zeros(size, np.int32)
        each: list[Any] = [none, positions, np.zeros((size, 2), np.int32), none.copy(), np.ones(size, np.float32)]
        if self._max_kept:
            each.append(Limits(none.copy(), np.ones(size, np.float32), np.zeros(size, np.float32)))
        return each

    @staticmethod
    def _no_chunks(rows: int, chunk: int) -> list[Any]:
        """Arguments of a prefill call that computes nothing of use: tokens, row indices, starts, counts."""
        return [np.zeros((rows, chunk), np.int32), *(np.zeros(rows, np.int32) for _ in range(3))]


def _shapes(tree: Any) -> dict[str, str]:
    """Path -> dtype and shape of every array."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): f"{leaf.dtype.name}{list(leaf.shape)}" for path, leaf in leaves}


def _running_sums(sizes: Sequence[int]) -> Iterator[int]:
    total = 0
    for size in sizes:
        total += size
        yield total
