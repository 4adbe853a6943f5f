"""Beam's DirectRunner, made fit to share two cores with a sampler and a learner.

In Beam 2.77 every bundle of a ParDo sends a bundle down each of its outputs, also where that is empty, and each costs
every stage below it one to three milliseconds of reflection (a Pub/Sub sink makes a client as well). RunEpisodes looks
at its episodes ten times a second: that alone kept 0.75 of a core busy. Without the empty bundles it is about 0.05.
With thousands of episodes in flight the reflection was a quarter of the job's time; a function's signature and the
state of a DoFn's class do not change, so they are looked up once.

Invariant: elements, timers, state and watermarks are untouched. Leaving out an empty output is what the runner's own
Pub/Sub read and GroupByKey do.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from apache_beam.runners.direct import transform_evaluator
from apache_beam.transforms import core, userstate


def ease() -> None:
    """Make this process's DirectRunner commit no empty output of a ParDo and reflect once. Harmless if called again."""
    evaluator = transform_evaluator._ParDoEvaluator
    if not hasattr(evaluator.finish_bundle, "__wrapped__"):
        evaluator.finish_bundle = _without_empty(evaluator.finish_bundle)
        core.get_signature = _once_for_each_function(core.get_signature)
        specs = _once_for_each_class(userstate.get_dofn_specs)
        for module in (userstate, transform_evaluator):
            module.get_dofn_specs = specs


def _without_empty(finish_bundle: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(finish_bundle)
    def finish(self: Any) -> Any:
        result = finish_bundle(self)
        result.uncommitted_output_bundles = [
            bundle for bundle in result.uncommitted_output_bundles if bundle.has_elements()
        ]
        return result

    return finish


def _once_for_each_function(get_signature: Callable[[Any], inspect.Signature]) -> Callable[[Any], inspect.Signature]:
    known: dict[tuple[Any, bool], inspect.Signature] = {}

    @functools.wraps(get_signature)
    def get(function: Any) -> inspect.Signature:
        key = (getattr(function, "__func__", function), inspect.ismethod(function))
        try:
            return known[key]
        except KeyError:
            return known.setdefault(key, get_signature(function))
        except TypeError:  # a callable that cannot be a key
            return get_signature(function)

    return get


def _once_for_each_class(get_dofn_specs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[type[Any], Any] = {}

    @functools.wraps(get_dofn_specs)
    def get(dofn: Any) -> Any:
        if hasattr(dofn, "_inspect_process"):  # made of a function: the class says nothing
            return get_dofn_specs(dofn)
        if type(dofn) not in known:
            known[type(dofn)] = get_dofn_specs(dofn)
        return known[type(dofn)]

    return get
