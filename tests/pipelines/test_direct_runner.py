"""The local runner does no work for outputs that are empty, and loses none that are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.direct import transform_evaluator
from apache_beam.runners.direct.direct_runner import BundleBasedDirectRunner

from pipelines.direct_runner import leave_out_empty_bundles


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


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize(("kept", "bundles"), [(lambda number: False, 0), (lambda number: number == 2, 1)])
def test_a_stage_behind_an_empty_output_does_not_run(tmp_path: Path, kept: object, bundles: int) -> None:
    leave_out_empty_bundles()
    leave_out_empty_bundles()
    with beam.Pipeline(BundleBasedDirectRunner(), PipelineOptions([])) as pipeline:
        pipeline | beam.Impulse() | beam.FlatMap(lambda _: range(4)) | beam.Filter(kept) | beam.ParDo(_Note(tmp_path))
    noted = {path.name: path.read_text().split() for path in tmp_path.iterdir()}
    assert noted == ({"bundles": ["bundle"], "elements": ["2"]} if bundles else {})
