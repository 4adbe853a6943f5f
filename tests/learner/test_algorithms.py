"""Each algorithm sets what its paper says, and comes to its paper's gradient from rewards on."""

import math

import numpy as np
import pytest

from learner.algorithms import ALGORITHMS, DEFAULT
from learner.losses import LossSettings
from tests.learner import papers
from tests.learner.test_losses import value_and_gradient, whole_episodes
from trajectories.advantages import AdvantageSettings, advantages

TOKEN, SEQUENCE, CONSTANT = "token_mean", "sequence_mean", "constant"
PAPERS = {
    # estimator, policy loss, correction, clip, aggregation, coefficient of the KL
    "dapo": ("grpo", "decoupled_ppo", "tis", (0.2, 0.28), TOKEN, 0.0),
    "grpo": ("grpo", "decoupled_ppo", "tis", (0.2, 0.2), SEQUENCE, 0.04),
    "dr_grpo": ("dr_grpo", "decoupled_ppo", "tis", (0.2, 0.2), CONSTANT, 0.0),
    "rloo": ("rloo", "reinforce", "tis", (0.2, 0.28), CONSTANT, 0.0),
    "reinforce++": ("reinforce++", "decoupled_ppo", "tis", (0.2, 0.2), TOKEN, 0.0),
    "reinforce++_baseline": ("reinforce++_baseline", "decoupled_ppo", "tis", (0.2, 0.2), TOKEN, 0.0),
    "maxrl": ("maxrl", "decoupled_ppo", "tis", (0.2, 0.2), TOKEN, 0.0),
    "gspo": ("grpo", "gspo", "none", (3e-4, 4e-4), SEQUENCE, 0.0),
    "gspo_token": ("grpo", "gspo_token", "none", (3e-4, 4e-4), SEQUENCE, 0.0),
    "cispo": ("grpo", "cispo", "none", (1.0, 4.0), TOKEN, 0.0),
    "ppo": ("gae", "ppo", "none", (0.2, 0.2), TOKEN, 0.0),
    "icepop": ("grpo", "decoupled_ppo", "icepop", (0.2, 0.2), SEQUENCE, 0.0),
}


def test_the_default_is_the_sections_own() -> None:
    assert ALGORITHMS[DEFAULT].settings() == (AdvantageSettings(), LossSettings())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_sets_what_its_paper_says(name: str) -> None:
    estimate, loss = ALGORITHMS[name].settings()
    clip = (loss.clip_low, loss.clip_high)
    found = (estimate.estimator, loss.policy_loss, loss.correction, clip, str(loss.aggregation), loss.kl_coefficient)
    assert found == PAPERS[name]
    assert ALGORITHMS[name].paper
    assert not loss.ignores_staleness


def group_advantages(rewards: list[float], estimator: str) -> list[float]:
    """By the papers, for one group of a step."""
    count, mean = len(rewards), sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / count)
    return {
        "grpo": [(r - mean) / (std + 1e-4) for r in rewards],
        "dr_grpo": [r - mean for r in rewards],
        "rloo": [r - (sum(rewards) - r) / (count - 1) for r in rewards],
        "reinforce++": rewards,
        "gae": rewards,
        "reinforce++_baseline": [r - mean for r in rewards],
        "maxrl": [(r - mean) / (mean + 1e-4) for r in rewards],
    }[estimator]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_goes_from_rewards_to_its_papers_gradient(name: str) -> None:
    """On rows whose policy has moved since they were sampled. What a step whitens is in `test_step.py`, what a critic
    makes of rewards in `test_critic.py`."""
    estimate, loss = ALGORITHMS[name].settings()
    lengths = (4, 9, 2, 6)
    rewards = [1.0, 0.0, 0.25, 1.0]
    episodes, arrays = whole_episodes(seed=5, lengths=lengths)
    for episode, advantage in zip(episodes, group_advantages(rewards, estimate.estimator), strict=True):
        episode["advantage"] = np.full(len(episode["pi"]), advantage)
    found = np.repeat(advantages(rewards, estimate), lengths)
    arrays["advantages_N"][arrays["mask_N"]] = found
    (total, sums), grad_N = value_and_gradient(arrays, loss)
    denominator = loss.denominator(sum(lengths), len(lengths))
    assert sums.kept > 0
    np.testing.assert_allclose(total / denominator, papers.objective(episodes, loss), rtol=1e-5)
    np.testing.assert_allclose(
        grad_N[arrays["mask_N"]] / denominator, papers.gradient(episodes, loss), rtol=2e-4, atol=1e-6
    )
