"""The few types that the whole program is about.

    Task      one prompt, to be tried `group_size` times
    Episode   one trajectory: what one member of the group did, token by token
    Closing   the members of one group as they were gathered: the unit of training and of accounting
    Row       a fixed-length sequence that holds packed segments of closings
    Pack      rows, and the closings that lie whole in them: the unit of publishing
    Verdict   how a group ended when it yields no rows
    Heartbeat what one actor process says of itself every few seconds

Arrays carry their axes in their names: `_T` is the token axis of one episode or one row.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

PROMPT_SAMPLE = -1
"""`Segment.sample` of a shared prompt, which belongs to no single member."""
SINCE = "since"
"""In a field's metadata: the schema version of the wire format that brought it; 1 where it is not said."""


def _no_ids() -> IntArray:
    return np.zeros(0, np.int32)


def kept_offsets(kept_counts_T: IntArray) -> NDArray[np.int64]:
    """offsets_T1: `kept_ids_K[offsets[i]:offsets[i + 1]]` are the kept ids of token i."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(kept_counts_T, dtype=np.int64)])


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """A policy version: the optimizer step that made it and the learner's incarnation that wrote it."""

    step: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.step}.{self.incarnation}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """Read `<step>.<incarnation>`; raises ValueError naming the text."""
        step, dot, incarnation = text.partition(".")
        if not (dot and step.isascii() and step.isdigit() and incarnation.isascii() and incarnation.isdigit()):
            raise ValueError(f"a version is '<step>.<incarnation>', two whole numbers; found {text!r}")
        return cls(int(step), int(incarnation))


class Kind(StrEnum):
    """What a task is for. Eval tasks go through the same job and never enter the ledger."""

    TRAIN = "train"
    EVAL = "eval"


class Status(StrEnum):
    """How an episode ended. Truncated is not wrong, and neither is failed."""

    COMPLETED = "completed"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_OVERFLOW = "context_overflow"
    ENVIRONMENT_ERROR = "environment_error"
    TIMEOUT = "timeout"
    POLICY_ERROR = "policy_error"

    @property
    def failed(self) -> bool:
        """A failure of the machinery: the member neither trains nor votes in its group's baseline."""
        return self in (Status.ENVIRONMENT_ERROR, Status.TIMEOUT, Status.POLICY_ERROR)

    @property
    def truncated(self) -> bool:
        """A limit on the policy's turns, tokens or context ended it: what it would have come to is not known."""
        return self in (Status.MAX_TURNS, Status.MAX_TOKENS, Status.CONTEXT_OVERFLOW)


class Outcome(StrEnum):
    """How a group ended without rows."""

    FILTERED = "filtered"
    """All rewards equal: no gradient."""
    FAILED = "failed"
    """Too few members lived, or the task itself is broken."""
    EXPIRED = "expired"
    """Every permitted attempt ran out of time (decided by the learner alone)."""
    RETIRED = "retired"
    """It was not asked: its prompt is solved always or never (decided by the learner alone, see [difficulty])."""


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt to try `group_size` times."""

    run_id: str
    group_id: int
    """Sequential within the run; the payload is a pure function of (run, group_id). Eval tasks count apart."""
    attempt: int = 0
    kind: Kind = Kind.TRAIN
    group_size: int = 1
    payload: Mapping[str, Any] = field(default_factory=dict)
    """JSON for the environment."""
    version: Version | None = None
    """Pinned policy version (eval)."""
    temperature: float | None = None
    """Overrides the run's sampling temperature (eval; 0 is greedy)."""

    @property
    def key(self) -> str:
        """`<group>.<attempt>`, prefixed `eval-` for eval tasks."""
        return group_key(self.kind, self.group_id, self.attempt)

    def episode_id(self, sample: int) -> str:
        """`<group>.<attempt>/<sample>`: the idempotency key that tools are given."""
        return f"{self.key}/{sample}"


def group_key(kind: Kind, group_id: int, attempt: int) -> str:
    """The name of one attempt at one group, unique within a run."""
    return f"{'eval-' if kind is Kind.EVAL else ''}{group_id}.{attempt}"


def stream_seed(*parts: object) -> int:
    """A 63-bit seed that is a pure function of its parts, e.g. (run seed, episode id, turn)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """From token index `first_token` on (until the next span), tokens were sampled by `version`."""

    first_token: int
    version: Version


@dataclass(frozen=True, slots=True)
class Turn:
    """One policy turn: tokens [start, end) were sampled; `reward` is what the environment gave for it."""

    start: int
    end: int
    reward: float = 0.0


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall-clock times of one episode: Unix seconds for instants, seconds for spans."""

    started_at: float = 0.0
    ended_at: float = 0.0
    queued_s: float = 0.0
    policy_s: float = 0.0
    tool_s: float = 0.0

    @property
    def duration_s(self) -> float:
        return self.ended_at - self.started_at


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One trajectory, as it was sampled: token in, token out.

    The arrays of axis T share it. `logprobs_T` are the behaviour policy's log-probabilities, of the distribution that
    the token was drawn from: at the sampling temperature, renormalised over its kept ids. They are meaningful where
    `loss_mask_T` is true (the tokens the policy sampled) and 0 elsewhere.
    """

    run_id: str
    group_id: int
    attempt: int
    sample: int
    group_size: int
    tokens_T: IntArray
    loss_mask_T: BoolArray
    logprobs_T: FloatArray
    prompt_length: int
    """Leading tokens that came from the task; at least 1, and none of them is in the loss mask. 0 if none was made."""
    version_spans: tuple[VersionSpan, ...] = ()
    turns: tuple[Turn, ...] = ()
    reward: float = 0.0
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    success: bool = False
    """Whether the environment calls the episode solved; what success rates count."""
    status: Status = Status.COMPLETED
    kind: Kind = Kind.TRAIN
    temperature: float = 1.0
    error: str = ""
    """Why, for a failed status."""
    timings: Timings = Timings()
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Counts for people: malformed tool calls, tool errors, ..."""
    kept_counts_T: IntArray = field(default_factory=_no_ids, metadata={SINCE: 2})
    """How many ids top-k, top-p and min-p kept for each token; 0 where it was not drawn, or from the whole vocabulary.
    Empty if it is 0 for all."""
    kept_ids_K: IntArray = field(default_factory=_no_ids, metadata={SINCE: 2})
    """Those ids, token after token."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens_T", np.ascontiguousarray(self.tokens_T, np.int32))
        object.__setattr__(self, "loss_mask_T", np.ascontiguousarray(self.loss_mask_T, np.bool_))
        object.__setattr__(self, "logprobs_T", np.ascontiguousarray(self.logprobs_T, np.float32))
        length = len(self.tokens_T)
        for name in ("loss_mask_T", "logprobs_T"):
            if getattr(self, name).shape != (length,):
                raise ValueError(f"episode {self.episode_id}: {name} must have shape ({length},) like tokens_T")
        if self.loss_mask_T[: max(1, self.prompt_length)].any() or not 0 <= self.prompt_length <= length:
            raise ValueError(f"episode {self.episode_id}: prompt tokens must exist and lie outside the loss mask")
        if self.logprobs_T[~self.loss_mask_T].any():
            object.__setattr__(self, "logprobs_T", np.where(self.loss_mask_T, self.logprobs_T, np.float32(0)))
        self._check_kept()

    def _check_kept(self) -> None:
        counts_T = np.ascontiguousarray(self.kept_counts_T, np.int32)
        ids_K = np.ascontiguousarray(self.kept_ids_K, np.int32)
        if not counts_T.any():
            counts_T = np.zeros(0, np.int32)
        elif counts_T.shape != self.tokens_T.shape or counts_T.min() < 0 or counts_T[~self.loss_mask_T].any():
            raise ValueError(f"episode {self.episode_id}: kept_counts_T must count ids of the tokens in the loss mask")
        if ids_K.shape != (counts_T.sum(dtype=np.int64),):
            raise ValueError(
                f"episode {self.episode_id}: kept_ids_K has shape {ids_K.shape}, and kept_counts_T counts "
                f"{counts_T.sum(dtype=np.int64)} ids"
            )
        object.__setattr__(self, "kept_counts_T", counts_T)
        object.__setattr__(self, "kept_ids_K", ids_K)

    def __len__(self) -> int:
        return len(self.tokens_T)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Episode) and same(self, other)

    @property
    def key(self) -> str:
        return group_key(self.kind, self.group_id, self.attempt)

    @property
    def episode_id(self) -> str:
        return f"{self.key}/{self.sample}"

    @property
    def oldest_version(self) -> Version | None:
        """The version with the smallest step that sampled any of the tokens."""
        return min((span.version for span in self.version_spans), default=None)

    @property
    def sampled_tokens(self) -> int:
        return int(self.loss_mask_T.sum())


class End(StrEnum):
    """What a member came to, for people. Each member is one of them."""

    SOLVED = "solved"
    WRONG = "wrong"
    """It came to its end, and the environment does not call it solved."""
    TRUNCATED = "truncated"
    """A limit ended it before, and it is not solved."""
    FAILED = "failed"
    """The machinery failed."""


def end_of(status: Status, success: bool) -> End:
    """What a member of this status came to."""
    if status.failed:
        return End.FAILED
    if success:
        return End.SOLVED
    return End.TRUNCATED if status.truncated else End.WRONG


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A member that ended without failing and does not train (`advantages.truncated`); it counts in statistics. The
    fields are those of Episode."""

    sample: int
    reward: float
    success: bool
    status: Status
    sampled_tokens: int
    timings: Timings = Timings()


@dataclass(frozen=True, slots=True)
class Closing:
    """A group's members as they were gathered. It is trained whole or dropped whole.

    `episodes` are the members that may train (none failed). `advantages` holds one number per episode, in order;
    it is empty before the Advantages stage.
    """

    run_id: str
    group_id: int
    attempt: int
    closing_id: str
    """Random: two closings of one group are told apart by it."""
    group_size: int
    """How many members were asked for."""
    episodes: tuple[Episode, ...]
    failed_members: int = 0
    missing_members: int = 0
    """Members that had not ended at the group's deadline."""
    advantages: tuple[float, ...] = ()
    left_out: tuple[LeftOut, ...] = field(default=(), metadata={SINCE: 3})

    @property
    def key(self) -> str:
        return group_key(Kind.TRAIN, self.group_id, self.attempt)

    @property
    def ended(self) -> tuple[Episode | LeftOut, ...]:
        """The members that ended without failing."""
        return (*self.episodes, *self.left_out)

    @property
    def oldest_version(self) -> Version | None:
        versions = (episode.oldest_version for episode in self.episodes)
        return min((version for version in versions if version is not None), default=None)


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a row: a prompt (`sample == PROMPT_SAMPLE`, `parent == 0`) or the rest of one member."""

    closing_id: str
    sample: int
    segment_id: int
    """1-based within its row; 0 marks padding."""
    parent: int
    """segment_id of the prompt that this member also attends to; 0 for a prompt."""
    start: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A fixed-length sequence of packed segments; all arrays but the kept ids have shape (bucket,).

    Token j is visible to token i if j <= i, j is no padding, and `segment_ids_T[j]` is token i's own segment or
    its parent. `positions_T` count each episode from 0; members go on where their prompt ends. The token that
    predicts token i is `predecessors_T()[i]`.
    """

    tokens_T: IntArray
    segment_ids_T: IntArray
    parent_ids_T: IntArray
    positions_T: IntArray
    loss_mask_T: BoolArray
    logprobs_T: FloatArray
    advantages_T: FloatArray
    segments: tuple[Segment, ...]
    kept_counts_T: IntArray = field(default_factory=_no_ids, metadata={SINCE: 2})
    """As in `Episode`, (bucket,) or empty."""
    kept_ids_K: IntArray = field(default_factory=_no_ids, metadata={SINCE: 2})

    @property
    def bucket(self) -> int:
        return len(self.tokens_T)

    @property
    def used(self) -> int:
        """Tokens that are no padding."""
        return sum(segment.length for segment in self.segments)

    def predecessors_T(self) -> IntArray:
        """Index of the token whose hidden state predicts token i: i - 1 inside a segment, the parent's last token at
        a member's first token, i itself where there is none (a prompt's first token, padding)."""
        before = np.arange(self.bucket, dtype=np.int32)
        last = {segment.segment_id: segment.start + segment.length - 1 for segment in self.segments}
        for segment in self.segments:
            stop = segment.start + segment.length
            before[segment.start + 1 : stop] = np.arange(segment.start, stop - 1)
            if segment.parent and segment.length:
                before[segment.start] = last[segment.parent]
        return before

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Row) and same(self, other)


@dataclass(frozen=True, slots=True)
class Pack:
    """Rows of one bucket and the closings that lie whole in them: one message to the learner."""

    run_id: str
    bucket: int
    rows: tuple[Row, ...]
    closings: tuple[Closing, ...]

    @property
    def oldest_version(self) -> Version | None:
        versions = (closing.oldest_version for closing in self.closings)
        return min((version for version in versions if version is not None), default=None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a group ended when it yields no rows; it carries the statistics that success rates need."""

    run_id: str
    group_id: int
    attempt: int
    outcome: Outcome
    reason: str
    closing_id: str = ""
    members: int = 0
    """Members that ended without failing."""
    failed_members: int = 0
    reward_mean: float = 0.0
    success_mean: float = 0.0
    sampled_tokens: int = 0
    duration_s: float = 0.0
    """The longest member's time."""
    oldest_version: Version | None = None
    truncated_members: tuple[int, ...] = field(default=(), metadata={SINCE: 3})
    """Samples of the members that a limit ended before they were solved."""

    @property
    def key(self) -> str:
        return group_key(Kind.TRAIN, self.group_id, self.attempt)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What one actor process says of itself; it tells a slow tool from a dead worker."""

    run_id: str
    worker_id: str
    """Unique per process start."""
    sent_at: float
    """Unix seconds."""
    interval_s: float
    version: Version | None = None
    """The version in use."""
    first_token_at: Mapping[str, float] = field(default_factory=dict)
    """Version -> Unix seconds at which its first token was sampled here, for the versions since the last heartbeat."""
    slots: int = 0
    running: int = 0
    waiting: int = 0
    holding: tuple[str, ...] = ()
    """Keys (`Task.key`) of the attempts that this process holds unfinished members of."""
    started: int = 0
    """Episodes started since the process began."""
    finished: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Counters and gauges of the process's metrics facade."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Something a stage could not use, whole or in part, with its reason."""

    run_id: str
    stage: str
    reason: str
    detail: str = ""
    payload: bytes = b""
    """The offending bytes, cut to a few kilobytes."""


def same(left: Any, right: Any) -> bool:
    """Deep equality of the types above: arrays by dtype, shape and value, floats bit for bit."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return (
            isinstance(left, np.ndarray)
            and isinstance(right, np.ndarray)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and left.tobytes() == right.tobytes()
        )
    if dataclasses.is_dataclass(left) and not isinstance(left, type):
        return type(left) is type(right) and all(
            same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left)
        )
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, str | bytes) or not isinstance(left, Sequence):
        return bool(left == right) or (left != left and right != right)
    return (
        isinstance(right, Sequence)
        and len(left) == len(right)
        and all(same(a, b) for a, b in zip(left, right, strict=True))
    )
