"""The process that `test_resume` resumes in: `python -m tests.learner.resumed FOLDER`.

Takes the next step from the newest checkpoint in FOLDER, and leaves what came of it there as a checkpoint.
"""

import sys

from learner.checkpoints import Checkpoints, Snapshot
from tests.learner.test_critic import make_trainer, rewarded, rows_of
from tests.learner.test_step import closings
from trajectories.storage import open_storage


def trainer():
    """With all the state that there is: the actor's, the critic's, and both optimizers'. Four updates a step."""
    return make_trainer(epochs=2)


def take_step(made, number):
    """Step `number`, on the same rows whoever takes it."""
    groups = rewarded(closings(seed=40 + number), seed=number)
    return made.run(made.prepare(rows_of(groups[:3]), rows_of(groups[3:])))


def main():
    checkpoints = Checkpoints(open_storage(sys.argv[1]), 2, keep=9)
    made = trainer()
    found = checkpoints.newest(made.state())
    made.restore(found.state)
    assert made.step_number == found.step
    metrics = take_step(made, found.step)
    record = {"loss": metrics.loss, "gradient_norm": metrics.gradient_norm, "value_loss": metrics.value_loss}
    checkpoints.save(Snapshot(made.step_number, made.state(), b"", record))


if __name__ == "__main__":
    main()
