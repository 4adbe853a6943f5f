"""The policy losses as their papers write them: loops over episodes in NumPy and float64, nothing shared with
`learner.losses` but the settings' names.

An episode is a dict of arrays over its loss tokens: `pi`, `mu`, `prox`, `ref` (log-probs) and `advantage`. What a paper
holds without gradient is computed from `still`, so that a difference quotient over `pi` alone is the gradient.
"""

import math

import numpy as np


def clip(ratio, settings):
    return min(max(ratio, 1 - settings.clip_low), 1 + settings.clip_high)


def surrogate(ratio, advantage, settings):
    """Equation 7 of the PPO paper, as a loss."""
    return -min(ratio * advantage, clip(ratio, settings) * advantage)


def ppo(e, s):
    for pi, mu, advantage in zip(e["pi"], e["mu"], e["advantage"], strict=True):
        loss = surrogate(math.exp(pi - mu), advantage, s)
        if s.dual_clip is not None and advantage < 0:
            loss = -max(-loss, s.dual_clip * advantage)
        yield loss


def decoupled_ppo(e, s):
    """With the anchor `proximal` it is the paper's; with `behaviour`, the ratio to mu decides whether the clip acts."""
    for pi, still, mu, prox, advantage in zip(e["pi"], e["still"], e["mu"], e["prox"], e["advantage"], strict=True):
        if s.clip_anchor == "proximal":
            yield surrogate(math.exp(pi - prox), advantage, s)
            continue
        moved = math.exp(still - mu)
        left = moved > 1 + s.clip_high if advantage > 0 else moved < 1 - s.clip_low
        yield -(clip(math.exp(still - prox), s) if left else math.exp(pi - prox)) * advantage


def gspo(e, s):
    length = len(e["pi"])
    ratio = (math.prod(math.exp(pi) for pi in e["pi"]) / math.prod(math.exp(mu) for mu in e["mu"])) ** (1 / length)
    return [surrogate(ratio, advantage, s) for advantage in e["advantage"]]


def gspo_token(e, s):
    ratio = math.prod(math.exp(a - b) for a, b in zip(e["still"], e["mu"], strict=True)) ** (1 / len(e["pi"]))
    for pi, still, advantage in zip(e["pi"], e["still"], e["advantage"], strict=True):
        yield surrogate(ratio * math.exp(pi) / math.exp(still), advantage, s)


def cispo(e, s):
    for pi, still, mu, advantage in zip(e["pi"], e["still"], e["mu"], e["advantage"], strict=True):
        yield -clip(math.exp(still - mu), s) * advantage * pi


def reinforce(e, s):
    return [-advantage * pi for pi, advantage in zip(e["pi"], e["advantage"], strict=True)]


def weights(e, s, numerator):
    ratios = [math.exp(a - b) for a, b in zip(e[numerator], e["mu"], strict=True)]
    geometric = math.prod(ratios) ** (1 / len(ratios))
    inside = s.mask_low <= geometric <= s.mask_high
    return {
        "none": [1.0] * len(ratios),
        "tis": [min(ratio, s.importance_cap) for ratio in ratios],
        "sequence_tis": [min(math.prod(ratios), s.importance_cap)] * len(ratios),
        "icepop": [ratio if s.mask_low <= ratio <= s.mask_high else 0.0 for ratio in ratios],
        "geometric_mask": [min(ratio, s.importance_cap) if inside else 0.0 for ratio in ratios],
    }[s.correction]


def kl(pi, ref, estimator):
    """Schulman's k1, k2, k3 with r = ref / pi."""
    r = math.exp(ref - pi)
    return {"k1": -math.log(r), "k2": math.log(r) ** 2 / 2, "k3": (r - 1) - math.log(r)}[estimator]


def episode_losses(e, s):
    e = {name: np.asarray(x, np.float64).tolist() for name, x in e.items()}
    if s.kl_coefficient and s.kl_in == "reward":
        costs = [kl(still, ref, s.kl_estimator) for still, ref in zip(e["still"], e["ref"], strict=True)]
        e["advantage"] = [a - s.kl_coefficient * sum(costs[t:]) for t, a in enumerate(e["advantage"])]
    losses = list(globals()[s.policy_loss](e, s))
    if s.kl_coefficient and s.kl_in == "loss":
        penalties = [kl(pi, ref, s.kl_estimator) for pi, ref in zip(e["pi"], e["ref"], strict=True)]
        losses = [loss + s.kl_coefficient * penalty for loss, penalty in zip(losses, penalties, strict=True)]
    numerator = {"decoupled_ppo": "prox", "reinforce": "still"}.get(s.policy_loss)
    if numerator is not None:
        losses = [weight * loss for weight, loss in zip(weights(e, s, numerator), losses, strict=True)]
    return losses


def objective(episodes, s):
    """The step's loss: what the whole step's tokens come to as one number."""
    losses = [episode_losses(e, s) for e in episodes]
    match s.aggregation:
        case "token_mean":
            return sum(map(sum, losses)) / sum(map(len, losses))
        case "sequence_mean":
            return sum(sum(one) / len(one) for one in losses) / len(losses)
        case "constant":
            return sum(map(sum, losses)) / s.constant_length / len(losses)
    raise AssertionError(s.aggregation)


def gradient(episodes, s, step=1e-6):
    """d objective / d pi of every token, by difference quotients."""
    found = []
    for number, e in enumerate(episodes):
        for t in range(len(e["pi"])):
            ends = []
            for sign in (1, -1):
                pi = np.array(e["pi"], np.float64)
                pi[t] += sign * step
                changed = [*episodes[:number], {**e, "pi": pi}, *episodes[number + 1 :]]
                ends.append(objective(changed, s))
            found.append((ends[0] - ends[1]) / (2 * step))
    return np.array(found)
