"""The algorithms of the literature: what `algorithm` in a run file fills in.

Invariant: an algorithm is nothing but settings of `[advantages]` and `[loss]`, so each of them can be changed alone,
and the resolved run shows all of them. A new algorithm is one line here, and one function and one line in
`trajectories.advantages.ESTIMATORS`, `learner.losses.POLICY_LOSSES` or `learner.losses.CORRECTIONS` if it needs a
formula that is not there; docs/algorithms.md shows it. Settings that a line leaves out are those of `dapo`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from learner.losses import Aggregation, Anchor, KlPlace, LossSettings
from trajectories.advantages import AdvantageSettings


@dataclass(frozen=True)
class Algorithm:
    """One line of the table."""

    paper: str
    advantages: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `[advantages]` that differ from the defaults."""
    loss: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `[loss]` that differ from the defaults."""

    def settings(self) -> tuple[AdvantageSettings, LossSettings]:
        """Both sections as the algorithm sets them."""
        return AdvantageSettings(**self.advantages), LossSettings(**self.loss)


_PPO_CLIP = {"clip_high": 0.2}
_GSPO = {"correction": "none", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": Aggregation.SEQUENCE_MEAN}

ALGORITHMS: dict[str, Algorithm] = {
    "dapo": Algorithm("Yu et al. 2025, arXiv:2503.14476"),
    "grpo": Algorithm(
        "Shao et al. 2024, arXiv:2402.03300",
        loss={**_PPO_CLIP, "aggregation": Aggregation.SEQUENCE_MEAN, "kl_coefficient": 0.04},
    ),
    "dr_grpo": Algorithm(
        "Liu et al. 2025, arXiv:2503.20783",
        {"estimator": "dr_grpo"},
        {**_PPO_CLIP, "aggregation": Aggregation.CONSTANT},
    ),
    "rloo": Algorithm(
        "Ahmadian et al. 2024, arXiv:2402.14740",
        {"estimator": "rloo"},
        {"policy_loss": "reinforce", "aggregation": Aggregation.CONSTANT, "constant_length": 1},
    ),
    "reinforce++": Algorithm(
        "Hu et al. 2025, arXiv:2501.03262",
        {"estimator": "reinforce++"},
        {**_PPO_CLIP, "kl_estimator": "k1", "kl_in": KlPlace.REWARD},
    ),
    "reinforce++_baseline": Algorithm(
        "Hu et al. 2025, arXiv:2501.03262", {"estimator": "reinforce++_baseline"}, {**_PPO_CLIP, "kl_estimator": "k2"}
    ),
    "maxrl": Algorithm("Tajwar et al. 2026, arXiv:2602.02710", {"estimator": "maxrl"}, _PPO_CLIP),
    "gspo": Algorithm("Zheng et al. 2025, arXiv:2507.18071", loss={**_GSPO, "policy_loss": "gspo"}),
    "gspo_token": Algorithm("Zheng et al. 2025, arXiv:2507.18071", loss={**_GSPO, "policy_loss": "gspo_token"}),
    "cispo": Algorithm(
        "MiniMax-M1 2025, arXiv:2506.13585",
        loss={"policy_loss": "cispo", "correction": "none", "clip_low": 1.0, "clip_high": 4.0},
    ),
    "ppo": Algorithm(
        "Schulman et al. 2017, arXiv:1707.06347",
        {"estimator": "gae"},
        {**_PPO_CLIP, "policy_loss": "ppo", "correction": "none"},
    ),
    "icepop": Algorithm(
        "Ring-1T 2025, arXiv:2510.18855",
        loss={
            **_PPO_CLIP,
            "correction": "icepop",
            "clip_anchor": Anchor.PROXIMAL,
            "aggregation": Aggregation.SEQUENCE_MEAN,
        },
    ),
}
"""Name in the run file -> settings."""
DEFAULT = "dapo"
