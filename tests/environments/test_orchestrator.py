"""Many episodes at once: bounded, without a thread each, and nothing that misbehaves keeps its place."""

import asyncio
import threading
import time

import pytest

from environments.calculator import Calculator
from environments.environment import StepResult
from environments.tools import Score, Tool, ToolEnvironment, run_blocking
from policy.chat import Message
from policy.client import FinishReason
from trajectories.schema import Status, Task


def task(group):
    return Task("run", group, payload={"question": "1+1", "answer": 2})


def says(*lines):
    return lambda session, turn: lines[min(turn, len(lines) - 1)]


def test_a_thousand_episodes_wait_on_their_tools_in_a_few_threads(play, kit):
    """Each waits half a second or so for its tool; one after the other they would take eight minutes."""
    started = threading.active_count()
    client = kit.Speaker(says("<calc>1+1</calc>", "<answer>2</answer>"))
    orchestrator = play(client, Calculator(latency_s=0.5), max_concurrency=1000)

    async def main():
        episodes = [asyncio.create_task(orchestrator.run(task(group), 0)) for group in range(1000)]
        await asyncio.sleep(0.5)
        threads, waiting = threading.active_count(), orchestrator.gauges.running
        return await asyncio.gather(*episodes), threads, waiting

    began = time.monotonic()
    episodes, threads, waiting = asyncio.run(main())
    assert all(episode.success for episode in episodes)
    # Libraries that earlier tests used may start a thread of their own meanwhile; a thousand episodes start none.
    assert threads < started + 20
    assert waiting > 200
    assert time.monotonic() - began < 120


def test_no_more_than_max_concurrency_run_and_all_are_counted(play, kit):
    orchestrator = play(kit.Speaker(says("<answer>2</answer>"), delay_s=0.1), Calculator(), max_concurrency=3)

    async def main():
        episodes = asyncio.gather(*(orchestrator.run(task(group), 0) for group in range(8)))
        await asyncio.sleep(0.05)
        during = orchestrator.gauges
        return during, await episodes

    during, episodes = asyncio.run(main())
    assert (during.running, during.waiting, during.started, during.finished) == (3, 5, 3, 0)
    after = orchestrator.gauges
    assert (after.running, after.waiting, after.started, after.finished) == (0, 0, 8, 8)
    assert sum(episode.timings.queued_s > 0.05 for episode in episodes) == 5


async def _deaf():
    """Ignores its cancellation for a second."""
    until = time.monotonic() + 1
    while time.monotonic() < until:
        try:
            await asyncio.sleep(0.2)
        except asyncio.CancelledError:
            continue
    return StepResult(done=True)


def test_a_hung_environment_is_abandoned_counted_and_its_place_is_free(play, kit):
    makes = iter([kit.Scripted(_deaf, close=_deaf), kit.Scripted()])
    client = kit.Speaker(says("<calc>1+1</calc>"))
    orchestrator = play(
        client, kit.Spec(lambda: next(makes)), max_concurrency=1, step_timeout_s=0.1, close_timeout_s=0.1
    )

    async def main():
        began = time.monotonic()
        hung, fine = await asyncio.gather(orchestrator.run(task(0), 0), orchestrator.run(task(1), 0))
        took = time.monotonic() - began
        await asyncio.sleep(1.2)  # so that the deaf may end
        return hung, fine, took

    hung, fine, took = asyncio.run(main())
    assert (hung.status, fine.status) == (Status.TIMEOUT, Status.COMPLETED)
    assert took < 1
    assert orchestrator.gauges.abandoned == 2


@pytest.mark.parametrize("limit", ["step", "episode"])
def test_a_hung_blocking_environment_is_stopped_by_either_limit_counted_and_replaced(play, kit, limit):
    """Its thread cannot be stopped; its place and its place among the blocking calls go to the next episode."""
    release = threading.Event()

    async def blocks():
        await run_blocking(lambda: release.wait(60))

    async def blocks_a_little():
        return await run_blocking(lambda: StepResult(done=True, reward=1.0))

    makes = iter([kit.Scripted(blocks), kit.Scripted(blocks_a_little)])
    limits = {"step_timeout_s": 60.0, "episode_timeout_s": 60.0, f"{limit}_timeout_s": 0.2}
    orchestrator = play(
        kit.Speaker(says("<calc>1+1</calc>")),
        kit.Spec(lambda: next(makes)),
        max_concurrency=1,
        blocking_threads=1,
        **limits,
    )

    async def main():
        began = time.monotonic()
        hung = await orchestrator.run(task(0), 0)
        took, during = time.monotonic() - began, orchestrator.gauges
        fine = await orchestrator.run(task(1), 0)
        release.set()
        while orchestrator.gauges.hung_threads:
            await asyncio.sleep(0.01)
        return hung, fine, took, during

    hung, fine, took, during = asyncio.run(asyncio.wait_for(main(), 60))
    assert (hung.status, fine.status, fine.reward) == (Status.TIMEOUT, Status.COMPLETED, 1.0)
    assert f"environment.{limit}_timeout_s (0.2 s)" in hung.error
    assert took < 20
    assert (during.running, during.hung_threads) == (0, 1)


class _Panic(BaseException):
    """As extension modules raise it: no `except Exception` catches it."""


class _Mute(BaseException):
    """Whoever asks for its words is told to leave."""

    def __str__(self):
        raise SystemExit(3)


def in_a_thread(main):
    """What `asyncio.run(main())` gives in a thread, as episodes run in a worker: Ctrl-C never reaches it."""
    ended = []

    def run():
        ended.append(asyncio.run(main()))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    return ended[0]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt("3"), _Panic("out of bounds"), _Mute()], ids=repr)
@pytest.mark.parametrize("where", ["make", "reset", "tools", "step", "close"])
def test_an_environment_that_would_end_the_process_ends_its_episode_alone(play, kit, error, where):
    def throw():
        raise error

    async def throws():
        throw()

    class Broken(kit.Scripted):
        tools = property(lambda self: throw())

    makes = {
        "make": throw,
        "tools": Broken,
        **{name: (lambda name=name: kit.Scripted(**{name: throws})) for name in ("reset", "step", "close")},
    }
    scripts = iter([makes[where], kit.Scripted])
    orchestrator = play(kit.Speaker(says("<answer>2</answer>")), kit.Spec(lambda: next(scripts)()), max_concurrency=1)

    async def main():
        return await asyncio.gather(*(orchestrator.run(task(group), 0) for group in (0, 1)))

    broken, fine = in_a_thread(main)
    assert fine.status is Status.COMPLETED
    if where == "close":
        assert (broken.status, broken.metrics["close_errors"]) == (Status.COMPLETED, 1)
    else:
        assert broken.status is Status.ENVIRONMENT_ERROR
        assert any(words in broken.error for words in ("exit", type(error).__name__))
    assert (orchestrator.gauges.running, orchestrator.gauges.finished) == (0, 2)


def test_blocking_tools_share_bounded_threads_and_hung_ones_give_up_their_place(play, kit):
    peak, now, lock = 0, 0, threading.Lock()

    def tool(expression: str) -> str:
        nonlocal peak, now
        with lock:
            now += 1
            peak = max(peak, now)
        time.sleep(3 if expression == "0" else 0.05)
        with lock:
            now -= 1
        return "1"

    def make():
        calculator = Tool("calculator", "", Tool.of(tool).parameters, tool, timeout_s=0.5)
        return ToolEnvironment([calculator], lambda p: [Message("user", "1")], lambda p, a: Score({"right": 1.0}, True))

    client = kit.Speaker(lambda session, turn: ("<calc>0</calc>" if session < "2" else "<calc>1</calc>", "1")[turn])
    orchestrator = play(client, kit.Spec(make), max_concurrency=64, blocking_threads=2)

    async def main():
        hung = await asyncio.gather(*(orchestrator.run(task(group), 0) for group in (0, 1)))
        stuck = orchestrator.gauges.hung_threads
        fine = await asyncio.gather(*(orchestrator.run(task(group), 0) for group in range(2, 8)))
        return hung, stuck, fine

    hung, stuck, fine = asyncio.run(main())
    assert [episode.metrics["tool_timeouts"] for episode in hung] == [1, 1]
    assert stuck == 2
    assert all(
        episode.status is Status.COMPLETED and "tool_errors" not in episode.metrics for episode in (*hung, *fine)[2:]
    )
    assert peak <= 4


@pytest.mark.parametrize("where", ["waiting", "tool", "policy"])
def test_cancelling_closes_environment_and_session_and_passes_through(play, kit, where):
    async def hang():
        await asyncio.sleep(60)

    environment = kit.Scripted(hang)
    client = kit.Speaker(says("<calc>1+1</calc>"), delay_s=60 if where == "policy" else 0)
    orchestrator = play(client, kit.Spec(lambda: environment), max_concurrency=1)

    async def main():
        first = asyncio.create_task(orchestrator.run(task(0), 0))
        second = asyncio.create_task(orchestrator.run(task(1), 0))
        await asyncio.sleep(0.05)
        if where == "waiting":
            assert orchestrator.cancel("1.0/0")
            with pytest.raises(asyncio.CancelledError):
                await second
            assert (orchestrator.gauges.waiting, orchestrator.gauges.running) == (0, 1)
        assert orchestrator.cancel("0.0/0")
        assert not orchestrator.cancel("9.9/9")
        with pytest.raises(asyncio.CancelledError):
            await first
        assert environment.closed == 1
        assert client.closed == ["0.0/0"]
        await asyncio.sleep(0.05)
        await orchestrator.close()
        assert where == "waiting" or second.cancelled()
        return orchestrator.gauges

    gauges = asyncio.run(main())
    assert (gauges.running, gauges.waiting, gauges.finished) == (0, 0, 0)
    assert gauges.started == gauges.cancelled


def test_an_environment_that_cancels_itself_is_a_failed_episode(play, kit):
    async def step():
        raise asyncio.CancelledError

    orchestrator = play(kit.Speaker(says("<calc>1+1</calc>")), kit.Spec(lambda: kit.Scripted(step)))
    episode = asyncio.run(orchestrator.run(task(0), 0))
    assert (episode.status, episode.error) == (
        Status.ENVIRONMENT_ERROR,
        "the environment failed in step: RuntimeError: it cancelled itself",
    )


def test_the_same_seed_gives_the_same_episode(play, kit):
    def line(session, turn):
        return kit.completion("<calc>1+1", reason=FinishReason.LENGTH)

    seeds = []
    for _ in range(2):
        client = kit.Speaker(line)
        asyncio.run(play(client, Calculator(latency_s=0)).run(task(5), 1))
        seeds.append([request.params.seed for request in client.requests])
    assert seeds[0] == seeds[1]


def test_what_an_environment_does_to_its_payload_reaches_no_other_member_and_no_later_try(play, kit):
    seen = []

    class Greedy(kit.Scripted):
        async def reset(self, payload, *, episode_id, seed):
            seen.append((payload["question"], list(payload["given"])))
            payload["given"].append(payload.pop("question"))
            return await super().reset(payload, episode_id=episode_id, seed=seed)

    shared = Task("run", 0, group_size=2, payload={"question": "1+1", "given": []})
    orchestrator = play(kit.Speaker(says("<answer>2</answer>")), kit.Spec(Greedy))

    async def main():
        return [await orchestrator.run(shared, sample) for sample in (0, 1, 1)]

    assert [episode.error for episode in asyncio.run(main())] == ["", "", ""]
    assert seen == [("1+1", [])] * 3
    assert shared.payload == {"question": "1+1", "given": []}
