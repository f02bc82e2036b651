"""The curves of a training run: `curves.png` beside the `metrics.jsonl` it is drawn from.

In: the rows of `metrics.jsonl` (README, "Looking at a run", says what each name means). Out: six panels over the optimizer steps: loss,
held-out tau, acceptance by position, learning rate and gradient norm, coverage and fill, speed. What is not logged yet is left out, so a
picture can be drawn at any moment. Smoothing is for the eye only: the mean over a fiftieth of all rows, half of it on either side.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from dflash_train.atomic import atomic_path

CURVES = "curves.png"

Row = dict[str, Any]

_BLUE, _RED, _GREEN, _GREY = "#1f5fa8", "#c23b22", "#2f7d4f", "#7a7a7a"
_THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")


def write_curves(folder: Path) -> None:
    """Draws `folder/metrics.jsonl` into `folder/curves.png`, replacing an earlier one. Raises UserError when it cannot be written."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    with atomic_path(folder / CURVES) as temporary:
        plot(rows).savefig(temporary, format="png", dpi=110)


def plot(rows: Sequence[Row]) -> Figure:
    """The six panels of a run's rows, which are in the order of their steps."""
    figure = Figure(figsize=(14, 12), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.12)
    figure.suptitle(_heading(rows), fontsize="large")
    panels: list[Callable[[Axes, Sequence[Row]], None]] = [_loss, _tau, _acceptance, _rate_and_gradient, _coverage, _speed]
    for axes, panel in zip(figure.subplots(3, 2).flat, panels, strict=True):
        axes.grid(alpha=0.25)
        axes.spines["top"].set_visible(False)
        panel(axes, rows)
        _finish(axes)
    return figure


def smoothed(values: Sequence[float]) -> np.ndarray:
    """At every place the mean of a fiftieth of all values, the place in the middle so that nothing lags; fewer at the ends."""
    reach = len(values) // 100
    places = np.arange(len(values))
    first, end = np.maximum(places - reach, 0), np.minimum(places + reach + 1, len(values))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[end] - sums[first]) / (end - first)


def _heading(rows: Sequence[Row]) -> str:
    """Where the run is, and its last held-out tau."""
    if not rows:
        return "step 0"
    steps, taus = _series(rows, "tau")
    tau = f" · held-out tau {taus[-1]:.3f} at step {steps[-1]:,}, best {max(taus):.3f}" if steps else ""
    return f"step {rows[-1]['step']:,}{tau}"


def _loss(axes: Axes, rows: Sequence[Row]) -> None:
    _noisy(axes, rows, "loss", _BLUE)
    axes.set(title="Loss of the training steps", xlabel="optimizer step", ylabel="weighted mean of train.loss")


def _tau(axes: Axes, rows: Sequence[Row]) -> None:
    _noisy(axes, rows, "train_anchor_tau", _GREY, "anchor_tau, training blocks")
    _line(axes, rows, "anchor_tau", _GREEN, "anchor_tau, held-out blocks", marker="s", linestyle="--")
    _line(axes, rows, "tau", _BLUE, "tau, held-out replay", marker="o")
    steps, bounds = _series(rows, "tau_ci95")
    if steps:
        axes.fill_between(steps, *zip(*bounds, strict=True), color=_BLUE, alpha=0.15, linewidth=0, label="its 95 % interval")
    axes.set(title="Acceptance length", xlabel="optimizer step", ylabel="tokens per verification")


def _acceptance(axes: Axes, rows: Sequence[Row]) -> None:
    steps, shares = _series(rows, "acceptance_by_position")
    shown = sorted({0, len(steps) // 2, len(steps) - 1} if steps else ())
    for i, color in zip(reversed(shown), (_BLUE, _GREEN, _GREY), strict=False):
        _by_position(axes, shares[i], color, f"held-out, step {steps[i]:,}", "-")
    steps, shares = _series(rows, "train_acceptance_by_position")
    if steps:
        _by_position(axes, shares[-1], _RED, f"training blocks, step {steps[-1]:,}", ":")
    axes.set(title="Acceptance by position", xlabel="slot k of the block", ylabel="right up to slot k", ylim=(0, 1.02))
    axes.yaxis.set_major_formatter(PercentFormatter(1))


def _by_position(axes: Axes, shares: Sequence[float | None], color: str, label: str, linestyle: str) -> None:
    values = [np.nan if share is None else share for share in shares]
    axes.plot(range(1, len(values) + 1), values, color=color, label=label, linestyle=linestyle, marker="o", markersize=4)


def _rate_and_gradient(axes: Axes, rows: Sequence[Row]) -> None:
    _line(axes, rows, "lr", _BLUE)
    axes.set(title="Learning rate and gradient norm", xlabel="optimizer step", ylim=(0, None))
    axes.set_ylabel("learning rate", color=_BLUE)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3), useMathText=True)
    steps, norms = _series(rows, "grad_norm")
    if steps:
        right = axes.twinx()
        right.spines["top"].set_visible(False)
        right.plot(steps, norms, color=_RED, alpha=0.25, linewidth=1, **_alone(steps))
        right.plot(steps, smoothed(norms), color=_RED)
        right.set_yscale("log")
        right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        right.yaxis.set_minor_formatter(NullFormatter())
        right.set_ylabel("gradient norm before clipping", color=_RED)


def _coverage(axes: Axes, rows: Sequence[Row]) -> None:
    _line(axes, rows, "coverage", _BLUE, "coverage: positions that were an anchor")
    _line(axes, rows, "fill", _GREEN, "fill: tokens of a pack by tokens_per_pack", linestyle="--")
    axes.set(title="Coverage of the data and fill of the packs", xlabel="optimizer step", ylabel="share", ylim=(0, 1.05))
    axes.yaxis.set_major_formatter(PercentFormatter(1))


def _speed(axes: Axes, rows: Sequence[Row]) -> None:
    _noisy(axes, rows, "tokens_per_second", _BLUE)
    axes.set(title="Speed of the training steps", xlabel="optimizer step", ylabel="context tokens per second")
    axes.set_ylim(0, 1.15 * max(_series(rows, "tokens_per_second")[1], default=1))
    axes.yaxis.set_major_formatter(_THOUSANDS)


def _noisy(axes: Axes, rows: Sequence[Row], name: str, color: str, label: str | None = None) -> None:
    """What is logged, faint, under its smoothed line."""
    steps, values = _series(rows, name)
    if steps:
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=1, label=None if label else "as logged", **_alone(steps))
        axes.plot(steps, smoothed(values), color=color, label=label or "smoothed")


def _line(axes: Axes, rows: Sequence[Row], name: str, color: str, label: str | None = None, **style: Any) -> None:
    steps, values = _series(rows, name)
    if steps:
        axes.plot(steps, values, color=color, label=label, **({"markersize": 4} | _alone(steps) | style))


def _series(rows: Sequence[Row], name: str) -> tuple[list[int], list[Any]]:
    """Steps at which `name` was logged with a value, and these values."""
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _alone(steps: Sequence[int]) -> dict[str, str]:
    """A single point shows only with a marker."""
    return {"marker": "o"} if len(steps) == 1 else {}


def _finish(axes: Axes) -> None:
    """Whole numbers below, a legend where lines have names, and a word where there is no line."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.xaxis.set_major_formatter(_THOUSANDS)
    if not axes.lines:
        axes.text(0.5, 0.5, "nothing logged yet", transform=axes.transAxes, ha="center", va="center", color=_GREY)
    elif axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)
