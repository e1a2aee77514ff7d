"""Whether a model fits: the usual layouts, their memory as the simulator has it, and the command that tells."""

import json
import re

import pytest
from click.testing import CliRunner

from autopar.cli.codes import ExitCode
from autopar.cli.commands import app
from autopar.errors import JobError
from autopar.estimates.fitting import Fit, fit_layouts
from autopar.estimates.layouts import usual_layouts
from autopar.prediction import Setting, open_setting
from autopar.report.fitting import format_largest
from tests.plans import two_stage_plan

TIGHT = 0.9
"""Share of the memory of a layout without recompute that recompute stays within."""


@pytest.fixture(scope="module")
def setting() -> Setting:
    return open_setting("zoo:gpt2", dims={"num_layers": 4, "seq": 256}, cluster="h100", stack="ideal")


@pytest.fixture(scope="module")
def fit(setting: Setting) -> Fit:
    return fit_layouts(setting, 8, global_batch=64)


def test_layouts_use_all_devices_and_are_distinct() -> None:
    layouts = usual_layouts(64, 8, 512, trains=True, experts=16)
    assert {layout.degrees.gpus for layout in layouts} == {64}
    assert len({layout.degrees for layout in layouts}) == len({layout.name for layout in layouts}) == len(layouts)
    assert any(layout.degrees.ep > 1 for layout in layouts)


def test_layouts_that_the_batch_does_not_divide_by_are_left_out() -> None:
    assert all(6 % layout.degrees.dp == 0 for layout in usual_layouts(8, 8, 6, trains=True))


def test_peaks_are_those_of_a_prediction(setting: Setting, fit: Fit) -> None:
    pipeline = next(layout for layout in fit.layouts if layout.degrees.pp == 2 or layout.degrees.tp == 8)
    for layout in (fit.layouts[0], pipeline):
        predicted = setting.predict(layout.degrees)
        peaks = [stage.memory.bytes for stage in predicted.timeline.stages]
        assert layout.peak_bytes == pytest.approx(peaks, rel=0.05)


def test_the_least_recompute_that_fits_is_named(setting: Setting, fit: Fit) -> None:
    plain = fit.layouts[0]
    assert (plain.name, plain.degrees.recompute, plain.fits) == ("data parallel", "none", True)
    limit = TIGHT * max(plain.peak_bytes)
    tight = fit_layouts(setting, 8, global_batch=64, microbatch=8, memory_limit=limit).layouts[0]
    assert tight.degrees.recompute != "none" or not tight.fits


def test_nothing_fits_into_a_byte(setting: Setting) -> None:
    assert not any(layout.fits for layout in fit_layouts(setting, 2, global_batch=2, memory_limit=1.0).layouts)


def test_the_largest_microbatch_fits_and_the_next_does_not(setting: Setting) -> None:
    limit = 4e9
    layout = fit_layouts(setting, 2, global_batch=128, memory_limit=limit, max_batch=True).layouts[0]
    assert layout.largest_microbatch
    size = layout.largest_microbatch
    for samples, fits in ((size, True), (2 * size, False)):
        found = fit_layouts(setting, 2, global_batch=128, microbatch=samples, memory_limit=limit).layouts[0]
        assert found.fits is fits


def test_a_batch_that_divides_by_nothing_is_an_error(setting: Setting) -> None:
    with pytest.raises(JobError, match="no usual layout"):
        fit_layouts(setting, 7, global_batch=2)


def test_an_interrupted_question_tells_what_it_knows(setting: Setting) -> None:
    polls = iter([False, False, True])
    found = fit_layouts(setting, 8, global_batch=64, should_stop=lambda: next(polls))
    assert found.stopped
    assert len(found.layouts) == 2


@pytest.mark.parametrize(
    ("limit", "code", "word"), [("80", ExitCode.DONE, "yes"), ("0.001", ExitCode.INFEASIBLE, "no:")]
)
def test_the_command_answers_in_its_exit_code(limit: str, code: int, word: str) -> None:
    asked = ["fit", "zoo:mlp-xs", "--gpus", "2", "--global-batch", "8", "--stack", "ideal", "--memory-limit", limit]
    told = CliRunner().invoke(app, [*asked, "--no-cache"], standalone_mode=False)
    assert told.return_value == code
    assert word in told.stdout
    as_json = CliRunner().invoke(app, [*asked, "--no-cache", "--json"], standalone_mode=False)
    assert json.loads(as_json.stdout)["fits"] is (code == ExitCode.DONE)


def test_the_largest_microbatches_are_told_beside_a_plan(setting: Setting) -> None:
    fit = fit_layouts(setting, 2, global_batch=128, memory_limit=4e9, max_batch=True)
    size = fit.layouts[0].largest_microbatch or 0

    text = format_largest(fit, two_stage_plan())

    assert re.search(rf"data parallel +{size} +{2 * size}\n", text)
    assert "fastest: " in text
