"""The report of an evaluation: `report.json` for programs, `report.md` and `acceptance.png` for people, the last lines for the console.

Comes in: one dictionary with the drafter's identity and a list `sets`, each a prompt set measured in one mode. Goes out: three files
in the stage's folder. Nothing is computed here beyond rounding for the eye.
"""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dflash_train.atomic import atomic_path, write_json, write_text

PLOT = "acceptance.png"

_TAU = (
    "**tau**: answer tokens after the first per verification by the target (greedy), pooled over the prompts; 1.0 is useless, the block "
    "size is perfect. Tokens past the end of an answer or past the limit do not count, nor does the token of the prefill. The interval "
    "is the 95 % range of tau when the prompts are drawn again with replacement."
)
_SPEED = (
    "Tokens per second of one process, one prompt at a time, the prompt's own forward included; plain and speculative decoding took "
    "turns, prompt by prompt, after a warm-up. Speculation pays where a forward of the target costs the same for one token as for a "
    "block, as on a GPU that waits for memory. Where arithmetic is the limit, as with a tiny target on a CPU, a verification costs up to "
    "as many times more as the block has tokens, and the draft comes on top: speculation may be slower there, however good its tau."
)
_AGREEMENT = (
    "Speculative greedy decoding must give the tokens of plain greedy decoding. A near-tie is an answer that first differs where plain "
    "decoding's two largest logits lie within 5e-4, so that rounding decides; any other difference is a fault."
)


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Writes `report.json`, `report.md` and `acceptance.png` into `folder`, replacing those of an earlier evaluation."""
    write_json(folder / "report.json", report)
    write_text(folder / "report.md", markdown(report))
    with atomic_path(folder / PLOT) as temporary:
        plot(report["sets"]).savefig(temporary, format="png", dpi=120)


def markdown(report: dict[str, Any]) -> str:
    """The report as a page: what was measured, a row per set, acceptance by position, and what the figures mean."""
    sets = report["sets"]
    head = [
        "# Acceptance of a DFlash drafter",
        "",
        f"Target `{report['target']}`, drafter `{report['checkpoint']}` (step {report['step']}, {report['weights_kind']} weights), "
        f"block size {report['block_size']}, target layers {report['layer_ids']} (0-based).",
        "",
        _TAU,
        "",
    ]
    parts = [*head, *_table(_SUMMARY_HEADER, [_summary_row(s) for s in sets])]
    decoded = [s for s in sets if s["mode"] == "decode"]
    if decoded:
        parts += ["", "## Decoding with the target", "", *_table(_DECODE_HEADER, [_decode_row(s) for s in decoded])]
        parts += ["", _AGREEMENT, "", _SPEED]
    parts += ["", "## Acceptance by position", "", f"![acceptance by position]({PLOT})"]
    for s in sets:
        parts += ["", f"{s['prompts']}, {s['mode']}:", "", *_table(_POSITION_HEADER, _position_rows(s))]
    return "\n".join(parts) + "\n"


def console_lines(report: dict[str, Any]) -> list[str]:
    """The figures of every set in a few lines, decoding last."""
    lines = []
    for s in sorted(report["sets"], key=lambda s: s["mode"] == "decode"):
        lines.append(
            f"{s['prompts']}, {s['mode']}: tau {_number(s['tau'])}{_interval(s['tau_ci95'])}, block size {report['block_size']}, "
            f"{s['num_verifications']} verifications of {s['num_answers']} answers"
        )
        if s["mode"] == "decode":
            lines += _decode_lines(s)
    return lines


def plot(sets: list[dict[str, Any]]) -> Figure:
    """One row per set: acceptance by position (marginal and conditional), and how many drafted tokens verifications accept."""
    figure = Figure(figsize=(11, 3.6 * len(sets)), layout="constrained")
    for (by_position, histogram), s in zip(figure.subplots(len(sets), 2, squeeze=False), sets, strict=True):
        counts = range(len(s["accepted_histogram"]))
        for name, label in (("acceptance_by_position", "marginal"), ("conditional_acceptance_by_position", "given the slots before")):
            by_position.plot(counts[1:], [float("nan") if v is None else v for v in s[name]], marker="o", label=label)
        by_position.set(
            xticks=counts[1:], xlabel="slot k", ylabel="share of verifications", ylim=(0, 1.05), title=f"{s['prompts']}, {s['mode']}"
        )
        by_position.legend()
        histogram.bar(counts, s["accepted_histogram"])
        histogram.set(xticks=counts, xlabel="accepted drafted tokens", ylabel="verifications", title=f"tau {_number(s['tau'])}")
    return figure


def _decode_lines(s: dict[str, Any]) -> list[str]:
    num = s["answers_compared"]
    lines = [
        f"plain {_number(s['tokens_per_second_plain'])} tokens/s, speculative {_number(s['tokens_per_second_speculative'])} tokens/s",
        f"{num} answers: {s['answers_equal']} equal plain greedy decoding token for token, "
        f"{s['answers_near_tie']} near-ties, {s['answers_different']} different",
    ]
    if s.get("replay_tau") is None:
        return lines
    replayed = (
        f"same {s['replay_compared']} prompts: replay tau {_number(s['replay_tau'])}, decoded tau {_number(s['replay_decoded_tau'])}, "
        f"difference {s['replay_difference_percent']:+.2f} %; {s['stored_answers_equal']} of {num} stored answers equal plain decoding"
    )
    return [replayed, *lines]


_SUMMARY_HEADER = ["prompts", "mode", "tau", "95 % interval", "mean over prompts", "prompts", "verifications", "answers from the target"]
_DECODE_HEADER = [
    "prompts",
    "plain tokens/s",
    "speculative tokens/s",
    "answers",
    "equal",
    "near-tie",
    "different",
    "replay tau of the same prompts",
    "stored answers equal",
]
_POSITION_HEADER = ["accepted drafted tokens k", "verifications with exactly k", "share with at least k", "of those that reached k-1"]


def _summary_row(s: dict[str, Any]) -> list[str]:
    interval = _interval(s["tau_ci95"]).strip() or "-"
    figures = [_number(s["tau"]), interval, _number(s["tau_mean_over_prompts"])]
    return [s["prompts"], s["mode"], *figures, str(s["num_prompts"]), str(s["num_verifications"]), s["answers_from_target"]]


def _decode_row(s: dict[str, Any]) -> list[str]:
    speeds = [_number(s["tokens_per_second_plain"]), _number(s["tokens_per_second_speculative"])]
    counts = [str(s[f"answers_{name}"]) for name in ("compared", "equal", "near_tie", "different")]
    return [s["prompts"], *speeds, *counts, _number(s.get("replay_tau")), str(s.get("stored_answers_equal", "-"))]


def _position_rows(s: dict[str, Any]) -> list[list[str]]:
    marginal = [None, *s["acceptance_by_position"]]
    conditional = [None, *s["conditional_acceptance_by_position"]]
    return [[str(k), str(count), _share(marginal[k]), _share(conditional[k])] for k, count in enumerate(s["accepted_histogram"])]


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _interval(bounds: list[float] | None) -> str:
    return "" if bounds is None else f" [{bounds[0]:.3f}, {bounds[1]:.3f}]"
