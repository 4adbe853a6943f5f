"""The local runner does no work for outputs that are empty, and loses none that are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.direct import transform_evaluator
from apache_beam.runners.direct.direct_runner import BundleBasedDirectRunner
from apache_beam.transforms import core, userstate

from pipelines.direct_runner import ease
from trajectories.packing import PackingSettings
from transforms.rows import _Pack


class _Note(beam.DoFn):  # type: ignore[misc]
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start_bundle(self) -> None:
        with (self.folder / "bundles").open("a") as file:
            file.write("bundle\n")

    def process(self, element: int) -> Iterator[int]:
        with (self.folder / "elements").open("a") as file:
            file.write(f"{element}\n")
        yield element


@pytest.fixture
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = transform_evaluator._ParDoEvaluator
    monkeypatch.setattr(evaluator, "finish_bundle", evaluator.finish_bundle)
    monkeypatch.setattr(core, "get_signature", core.get_signature)
    for module in (userstate, transform_evaluator):
        monkeypatch.setattr(module, "get_dofn_specs", module.get_dofn_specs)


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize(("kept", "bundles"), [(lambda number: False, 0), (lambda number: number == 2, 1)])
def test_a_stage_behind_an_empty_output_does_not_run(tmp_path: Path, kept: object, bundles: int) -> None:
    ease()
    ease()
    with beam.Pipeline(BundleBasedDirectRunner(), PipelineOptions([])) as pipeline:
        pipeline | beam.Impulse() | beam.FlatMap(lambda _: range(4)) | beam.Filter(kept) | beam.ParDo(_Note(tmp_path))
    noted = {path.name: path.read_text().split() for path in tmp_path.iterdir()}
    assert noted == ({"bundles": ["bundle"], "elements": ["2"]} if bundles else {})


@pytest.mark.usefixtures("_restored")
def test_what_is_looked_up_once_is_what_beam_finds() -> None:
    stateful = _Pack(PackingSettings())
    plain, function = _Note(Path()), core.CallableWrapperDoFn(lambda element, window=beam.DoFn.WindowParam: [element])
    before = [
        (userstate.get_dofn_specs(dofn), core.get_function_arguments(dofn, "process"))
        for dofn in (stateful, plain, function)
    ]
    ease()
    for _ in range(2):
        found = [
            (userstate.get_dofn_specs(dofn), core.get_function_arguments(dofn, "process"))
            for dofn in (stateful, plain, function)
        ]
        assert found == before
    assert userstate.is_stateful_dofn(stateful)
    assert not userstate.is_stateful_dofn(function)
    other = core.CallableWrapperDoFn(lambda element: [element])
    assert core.get_function_arguments(other, "process") != core.get_function_arguments(function, "process")
