"""The picture of a run: it shows what was logged, whatever is missing, and smooths without a lag."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

from dflash_train.curves import plot, smoothed, write_curves

TITLES = [
    "Loss of the training steps",
    "Acceptance length",
    "Acceptance by position",
    "Learning rate and gradient norm",
    "Coverage of the data and fill of the packs",
    "Speed of the training steps",
]


def step_row(step: int) -> dict:
    return {
        "step": step,
        "epoch": 0,
        "loss": 8.0 / step,
        "grad_norm": 1.0 / step,
        "lr": 1e-3,
        "train_anchor_tau": 1.5,
        "train_acceptance_by_position": [0.4, 0.1, None],
        "coverage": step / 100,
        "fill": 0.98,
        "tokens_per_second": 1000.0,
    }


def evaluation_row(step: int) -> dict:
    by_position = [step / 100, step / 200, step / 400]
    return {"step": step, "tau": 1 + step / 100, "tau_ci95": [1.0, 3.0], "anchor_tau": 2.0, "acceptance_by_position": by_position}


def run_rows(num_steps: int = 60) -> list[dict]:
    rows = []
    for step in range(1, num_steps + 1):
        rows.append(step_row(step))
        rows += [evaluation_row(step)] if step % 10 == 0 else []
    return rows


def panels(rows: list[dict]) -> dict[str, Axes]:
    return {axes.get_title(): axes for axes in plot(rows).axes if axes.get_title()}


def labels(axes: Axes) -> list[str]:
    return axes.get_legend_handles_labels()[1]


def test_every_panel_has_its_lines_and_its_axes_are_named() -> None:
    shown = panels(run_rows())
    assert list(shown) == TITLES
    assert all(axes.get_xlabel() and axes.get_ylabel() and axes.lines for axes in shown.values())
    (steps, losses), _ = (line.get_data() for line in shown[TITLES[0]].lines)
    assert steps.tolist() == list(range(1, 61)) and losses[1] == 4.0
    taus = next(line for line in shown[TITLES[1]].lines if line.get_label() == "tau, held-out replay")
    assert taus.get_xdata().tolist() == [10, 20, 30, 40, 50, 60] and taus.get_ydata()[-1] == 1.6
    assert "its 95 % interval" in labels(shown[TITLES[1]])


def test_acceptance_by_position_shows_the_first_middle_and_last_evaluation() -> None:
    axes = panels(run_rows())[TITLES[2]]
    names = [f"held-out, step {step}" for step in (60, 40, 10)]
    assert labels(axes) == [*names, "training blocks, step 60"]
    np.testing.assert_array_equal(axes.lines[0].get_data(), [[1, 2, 3], [0.6, 0.3, 0.15]])
    np.testing.assert_array_equal(axes.lines[3].get_ydata(), [0.4, 0.1, np.nan])


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [step_row(1)],
        [evaluation_row(10)],
        [{"step": 1, "loss": None, "grad_norm": None, "lr": 0.0}, {"step": 1, "tau": None, "tau_ci95": None, "anchor_tau": None}],
    ],
)
def test_what_is_not_there_is_left_out(rows: list[dict], tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_curves(tmp_path)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    empty = {title for title, axes in panels(rows).items() if any(text.get_text() == "nothing logged yet" for text in axes.texts)}
    assert empty == {title for title, axes in panels(rows).items() if not axes.lines}


def test_the_picture_is_replaced_whole(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step_row(1)) + "\n")
    (tmp_path / "curves.png").write_text("an earlier one")
    write_curves(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_smoothing_follows_a_straight_line_without_a_lag_and_keeps_few_values_as_they_are() -> None:
    assert smoothed([3.0, 1.0, 2.0]).tolist() == [3.0, 1.0, 2.0]
    line = [float(i) for i in range(400)]  # four on either side
    np.testing.assert_allclose(smoothed(line)[4:-4], line[4:-4])
    assert smoothed(line)[0] == 2.0  # the mean of 0 to 4
    assert len(smoothed([])) == 0
