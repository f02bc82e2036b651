"""One change at a time: short trainings on the quickstart's features, and what each leaves in held-out replay tau.

    python tools/compare_training.py --run-dir runs/quickstart --steps 80 --seeds 2 --jobs 2
    python tools/compare_training.py --only base dpace --variant slower train.lr=5e-4

The run folder holds features with the teacher state (stage=prepare and stage=extract with recipe=quickstart features.teacher_state=true).
Every training is a process of its own on one thread, so that its minutes are those of one core; `--jobs` of them run at once. The table
is Markdown: tau of every seed, the minutes, the largest difference between two seeds of a variant.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_train.atomic import write_json

VARIANTS = {
    "base": [],
    "dpace": ["train.position_weights=dpace"],
    "wsd": ["train.schedule=wsd"],
    "ema 0.98": ["train.ema=0.98"],
    "muon": ["train.optimizer=muon"],
    "random start": ["drafter.init_from=random"],
    "kl": ["train.loss=kl"],
    "late kl to tv": ["train.loss=kl_tv"],
}


@dataclass(frozen=True)
class Result:
    """What one training left: `tau` of its last weights on the held-out answers, and CPU minutes. `error` is its last line if it failed."""

    variant: str
    seed: int
    tau: float | None
    interval: list[float] | None
    core_minutes: float
    error: str | None = None


def train(arguments: argparse.Namespace, folder: Path, variant: str, settings: Sequence[str], seed: int) -> Result:
    """Trains and evaluates in a new run folder."""
    run_dir = folder / f"{variant.replace(' ', '-')}-{seed}"
    every = [f"train.{name}={arguments.steps}" for name in ("max_steps", "evaluate_every_steps", "checkpoint_every_steps")]
    shared = [f"run_dir={run_dir}", f"features.dir={arguments.run_dir / 'extract'}", "features.teacher_state=true", f"seed={seed}"]
    command = [sys.executable, "-m", "dflash_train", "stage=train", "recipe=quickstart", *shared, *every, *settings]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    minutes = (usage.ru_utime + usage.ru_stime) / 60
    if status:
        return Result(variant, seed, None, None, minutes, (output.strip().splitlines() or ["no output"])[-1])
    (row,) = [row for row in map(json.loads, (run_dir / "train" / "metrics.jsonl").open()) if "tau" in row]
    return Result(variant, seed, row["tau"], row["tau_ci95"], minutes)


def compare(arguments: argparse.Namespace, variants: dict[str, list[str]]) -> list[Result]:
    """All trainings, seed by seed, with a line on stderr for each that ends."""
    started, results = time.monotonic(), []
    jobs = [(name, settings, seed) for seed in range(arguments.seeds) for name, settings in variants.items()]
    with tempfile.TemporaryDirectory(dir=arguments.run_dir) as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        for result in pool.map(lambda job: train(arguments, Path(folder), *job), jobs):
            results.append(result)
            left = (time.monotonic() - started) / len(results) * (len(jobs) - len(results))
            what = result.error or f"tau {result.tau:.3f}, {result.core_minutes:.1f} core-minutes"
            print(
                f"{len(results)}/{len(jobs)} {result.variant}, seed {result.seed}: {what}; about {left / 60:.0f} min left", file=sys.stderr
            )
    return results


def markdown(results: Sequence[Result]) -> str:
    """A row per variant."""
    lines = ["| variant | tau, seed by seed | spread | core-minutes |", "|---|---|---|---|"]
    for name in dict.fromkeys(result.variant for result in results):
        ours = [result for result in results if result.variant == name]
        taus = [result.tau for result in ours if result.tau is not None]
        shown = ", ".join(f"{result.tau:.2f}" if result.tau is not None else f"failed: {result.error}" for result in ours)
        spread = f"{max(taus) - min(taus):.2f}" if len(taus) > 1 else ""
        lines.append(f"| {name} | {shown} | {spread} | {max(result.core_minutes for result in ours):.1f} |")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-dir", type=Path, default=Path("runs/quickstart"), help="has the features (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=80, help="of the optimizer, per training (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=2, help="trainings per variant, seeds 0 and following (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at once, one core each (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME", help=f"of: {', '.join(VARIANTS)}")
    own = "NAME and its settings, besides those of --only"
    parser.add_argument("--variant", nargs="+", action="append", default=[], metavar="NAME SETTING=VALUE", help=own)
    parser.add_argument("--json", type=Path, help="also write every training's result to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; the exit status tells whether every training ended well."""
    arguments = parse(argv)
    if not (arguments.run_dir / "extract" / "manifest.json").is_file():
        print(f"error: {arguments.run_dir / 'extract'} holds no features: see --help", file=sys.stderr)
        return 1
    variants: dict[str, list[str]] = {name: VARIANTS[name] for name in arguments.only}
    variants |= {name: settings for name, *settings in arguments.variant}
    results = compare(arguments, variants)
    print(markdown(results))
    if arguments.json:
        rows: list[dict[str, Any]] = [vars(result) for result in results]
        write_json(arguments.json, rows)
    return int(any(result.error for result in results))


if __name__ == "__main__":
    sys.exit(main())
