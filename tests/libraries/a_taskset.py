"""A verifiers taskset of ours: sums, with the answer in a box."""

import os
import signal
import time
from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if "hang" in trace.last_reply:
            time.sleep(600)
        if "killed" in trace.last_reply:
            os.kill(os.getpid(), signal.SIGKILL)
        if "raise" in trace.last_reply:
            raise ValueError("told to")
        return vf.verify_boxed_math_answer(trace.last_reply, self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        print("a task that prints")
        return float(len(trace.last_reply) < 40)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsTaskset(vf.Taskset[SumTask]):
    def load(self) -> Iterable[SumTask]:
        for number in range(60):
            yield SumTask(
                SumData(prompt=f"What is {number}+1? Box it.", system_prompt="Be brief.", answer=str(number + 1)),
                self.config.task,
            )
