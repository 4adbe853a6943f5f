"""Games of TextArena: alone, against another player, or with the policy on both sides.

Invariant: an episode is what one side saw and said, never both: each side keeps its own sequence of tokens, and reads
of the other only what the game shows it. TextArena draws from Python's global generator, so each call of a game runs
alone in the process, on the game's own state of that generator, and leaves the process's as it was: what a game draws
follows from its seed, whatever else runs.

With the policy on both sides, members 0 and 1 of a group play each other, 2 and 3, and so on, from the same seed; all
members of a group run in one process. Their rewards are those of one zero-sum game, so the group's mean is the baseline
that each side is compared with. `learner.group_size` must be even, and both members of a pair need a place at the same
time: `environment.max_concurrency` must be at least 2.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from environments.environment import Action, Message, StepResult, TaskSource
from environments.libraries import SeededTasks, Threaded, named, require
from environments.tools import call_either
from environments.turns import opening
from trajectories.schema import stream_seed

_EXTRA = "textarena"
_PAIR = 2
_MOST_MATCHES = 10_000
"""Remembered, those that are over included."""

R = TypeVar("R")


@dataclass(frozen=True)
class TextArena:
    """`environments.libraries.textarena:TextArena`.

    The payload is the game's `seed`, and `alone`: true where the policy plays one side only, as in all held-out tasks.
    The reward is the game's for the side (TextArena gives 1 to a winner, -1 to a loser); success is a reward above 0
    against others and of `success_at` in a game for one.
    """

    id: str
    """As `textarena.make` takes it, such as `TicTacToe-v0`."""
    players: int = _PAIR
    opponent: str = ""
    """`module:function` that plays the other sides: (text, generator) to the text of its move, where `text` is all that
    the side has been shown so far and `generator` a random.Random; sync or async."""
    side: int | None = None
    """The policy's side, from 0; None takes turns by the task's seed."""
    both_sides: bool = False
    """Whether the policy plays both sides in training. Held-out games are played against `opponent`."""
    system: str = ""
    """The system message; the game's own rules come after it."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for `textarena.make`."""
    success_at: float = 1.0
    """Least reward that is a success in a game for one player."""
    seed: int = 0
    move_of_others: Callable[..., Any] | None = field(init=False, repr=False, compare=False)
    """What `opponent` names."""
    _matches: dict[str, Match | None] = field(init=False, repr=False, compare=False)
    """By name; None once both sides have left."""

    def __post_init__(self) -> None:
        registry = require("textarena", _EXTRA).envs.registration.ENV_REGISTRY
        if self.id not in registry:
            near = sorted(name for name in registry if name.lower().startswith(self.id[:3].lower()))
            raise ValueError(f"textarena has no game {self.id!r}; near it: {', '.join(near[:8]) or 'nothing'}")
        if self.players < 1:
            raise ValueError(f"environment.options.players must be at least 1, found {self.players}")
        if self.players > 1 and not self.opponent:
            raise ValueError(
                "environment.options.opponent must name a function that plays the other side, found none: held-out "
                "games are played against it, with the policy on both sides as well"
            )
        if self.both_sides and self.players != _PAIR:
            raise ValueError(f"environment.options.both_sides is for games for two, found players = {self.players}")
        if self.side is not None and not 0 <= self.side < self.players:
            raise ValueError(f"environment.options.side must be from 0 to {self.players - 1}, found {self.side}")
        object.__setattr__(self, "move_of_others", named("opponent", self.opponent))
        object.__setattr__(self, "_matches", {})

    @property
    def tasks(self) -> TaskSource:
        return Games(self.seed, self.both_sides)

    def make(self) -> TextArenaEnvironment:
        return TextArenaEnvironment(self)

    def side_of(self, payload: Mapping[str, Any]) -> int:
        """The policy's side in a game against others."""
        return (payload["seed"] // 2) % self.players if self.side is None else self.side

    def match(self, episode_id: str) -> tuple[str, int, Match]:
        """Name of the match that a member of a group plays in, its side, and the match, which the first of the two
        makes. Raises RuntimeError if this side has been taken before, as when a member begins again."""
        group, _, sample = episode_id.rpartition("/")
        number, side = divmod(int(sample), _PAIR)
        name = f"{group}/{number}"
        match = self._matches.setdefault(name, Match(self))
        if match is None or side in match.taken:
            raise RuntimeError(
                f"side {side} of match {name} has been played: its episode began again, the other did not"
            )
        match.taken.add(side)
        while len(self._matches) > _MOST_MATCHES:
            del self._matches[next(iter(self._matches))]
        return name, side, match

    def over(self, name: str) -> None:
        """Both sides have left a match."""
        if name in self._matches:
            self._matches[name] = None


@dataclass(frozen=True)
class Games:
    """A TaskSource: by seed, and the held-out ones against the opponent."""

    seed: int
    both_sides: bool

    def task(self, group_id: int) -> Mapping[str, Any]:
        return SeededTasks(self.seed, {"alone": not self.both_sides}).task(group_id)

    def eval_tasks(self, count: int) -> list[Mapping[str, Any]]:
        return SeededTasks(self.seed, {"alone": True}).eval_tasks(count)


class Match:
    """One game, and whose turn it is. All methods on one event loop; the game's calls run beside it."""

    def __init__(self, spec: TextArena) -> None:
        self._spec = spec
        self._thread = Threaded()
        self._changed = asyncio.Condition()
        self._random = random.Random()
        self._game: Any = None
        self.taken: set[int] = set()
        """Sides that the policy plays."""
        self.left: set[int] = set()
        """Sides whose episodes have ended."""
        self.player = 0
        """Whose turn it is."""
        self.rewards: Mapping[int, float] | None = None
        """By side, once the game is over."""

    async def begin(self, seed: int) -> None:
        """Set up the game; harmless where it has been. Which of two sides comes first does not matter."""
        async with self._changed:
            if self._game is None:
                self._random = random.Random(seed)
                await self._alone(lambda: self._make(seed))
                self._changed.notify_all()

    def _make(self, seed: int) -> None:
        game = require("textarena", _EXTRA).make(self._spec.id, **self._spec.kwargs)
        game.reset(num_players=self._spec.players, seed=seed % 2**31)
        self._game = game
        self.player = self._whose_turn()

    def _whose_turn(self) -> int:
        return int(self._game.state.current_player_id)

    async def turn_of(self, side: int) -> str:
        """Waits until `side` is to move, or the game is over (""); what the game has shown the side since its last
        turn, apart from its own words. Raises RuntimeError if the other side leaves before."""
        async with self._changed:
            others = self.taken - {side}
            await self._changed.wait_for(
                lambda: self._game is not None and (self.rewards is not None or self.player == side or self.left)
            )
            if self.rewards is not None:
                return ""
            if self.player != side or (self.left & others):
                raise RuntimeError("the other side's episode ended before the game did")
            return await self._alone(lambda: self._shown(side))

    def _shown(self, side: int) -> str:
        """Beneath the wrappers, which show all of it anew at every turn."""
        innermost = self._game
        while hasattr(innermost, "env"):
            innermost = innermost.env
        _, seen = innermost.get_observation()
        roles = innermost.state.role_mapping
        lines = [
            message if sender == _GAME else f"[{roles.get(sender, f'Player {sender}')}] {message}"
            for sender, message, _ in seen
            if sender != side
        ]
        return "\n".join(lines)

    async def move(self, text: str) -> None:
        """Play the turn of whoever's it is."""
        async with self._changed:
            await self._alone(lambda: self._move(text))
            self._changed.notify_all()

    def _move(self, text: str) -> None:
        done, _ = self._game.step(action=text)
        if done:
            rewards, _ = self._game.close()
            self.rewards = {int(side): float(reward) for side, reward in (rewards or {}).items()}
        else:
            self.player = self._whose_turn()

    async def leave(self, side: int) -> None:
        async with self._changed:
            self.left.add(side)
            self._changed.notify_all()

    async def _alone(self, work: Callable[[], R]) -> R:
        return await self._thread.call(lambda: _with_generator(self._random, work))


_GAME = -1
"""textarena.GAME_ID"""

_global_generator = threading.Lock()


def _with_generator(own: random.Random, work: Callable[[], R]) -> R:
    """`work()` with the global generator in the state of `own`, which is moved on."""
    with _global_generator:
        before = random.getstate()
        random.setstate(own.getstate())
        try:
            return work()
        finally:
            own.setstate(random.getstate())
            random.setstate(before)


class TextArenaEnvironment:
    """One side of one game."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, spec: TextArena) -> None:
        self._spec = spec
        self._match: Match | None = None
        self._name = ""
        self._side = 0
        self._random = random.Random()
        self._seen: dict[int, str] = {}
        """What the opponent's sides have been shown."""

    async def reset(self, payload: Mapping[str, Any], *, episode_id: str, seed: int) -> Sequence[Message]:
        spec = self._spec
        if payload["alone"]:
            self._side, self._match = spec.side_of(payload), Match(spec)
            self._match.taken.add(self._side)
            self._random = random.Random(stream_seed(payload["seed"], "opponent"))
        else:
            self._name, self._side, self._match = spec.match(episode_id)
        await self._match.begin(payload["seed"])
        return opening(spec.system, await self._next())

    async def step(self, action: Action) -> StepResult:
        match = self._match
        assert match is not None
        if not action.finished:  # a cut turn is no move, and the episode ends with it
            return StepResult(done=True)
        await match.move(action.text)
        text = await self._next()
        if match.rewards is None:
            return StepResult((Message("user", text),))
        reward = match.rewards.get(self._side, 0.0)
        won = reward > 0 if self._spec.players > 1 else reward >= self._spec.success_at
        return StepResult((), reward, True, {"game": reward}, won)

    async def _next(self) -> str:
        """What the policy reads at its next turn, once the others have had theirs."""
        match, opponent = self._match, self._spec.move_of_others
        assert match is not None
        while match.rewards is None and match.player not in match.taken:
            side = match.player
            assert opponent is not None
            self._seen[side] = self._seen.get(side, "") + await match.turn_of(side) + "\n"
            move = await call_either(opponent, self._seen[side], self._random)
            self._seen[side] += f"{move}\n"
            await match.move(str(move))
        return await match.turn_of(self._side)

    async def close(self) -> None:
        if self._match is not None:
            await self._match.leave(self._side)
            if len(self._match.left) == _PAIR:
                self._spec.over(self._name)
