"""Measures one optimizer step of the product beside those of other DFlash trainers, on the same shapes and tensors.

    python tools/bench_train_step.py                                                  ours alone
    python tools/bench_train_step.py --peers-python peers/bin/python --json step.json
    python tools/bench_train_step.py --shapes S --dtypes fp32 --rounds 1
    python tools/bench_train_step.py --shapes --shape like=M,num_tokens=4096,num_anchors=256 --dtypes bf16
    python tools/bench_train_step.py --one ours:dense --shape X --dtype fp32 --loss-only
    python tools/bench_train_step.py --profile-context                                attention alone, see tools/profile_context.py

In every round each variant runs in a fresh process, one after the other: one step to warm up, then the measured ones. Figures are medians
over the rounds:

    CPU s/step      CPU seconds of all threads per step
    spread          largest minus smallest of the rounds, of the median
    peak MB         highest resident memory of the process, in MiB
    tokens/s        context tokens of a step per second of the clock
    of product      needed operations, at the best speed of one matrix product in the same process and dtype, over the seconds
    speed-up        how many times the step of the fastest peer takes as long
    memory          peak, as a share of that peer's

With a CUDA device the step runs there, without peers, and two columns are others; CUDA_VISIBLE_DEVICES= keeps it on the CPU:

    GPU s/step      seconds of the clock per step, from an idle GPU to an idle GPU
    peak GPU MB     most that tensors had on the GPU during the measured steps, in MiB

Memory beyond the tables grows little with the vocabulary: compare the peak less 2 * vocab_size * 1024 * 2 bytes (bf16) of

    python tools/bench_train_step.py --shapes --shape like=M,name=32k,vocab_size=32000 --shape like=M,name=248k,vocab_size=248320 \\
        --dtypes bf16 --rounds 1

The environment of the peers is described in tools/peers_step.py. Ours is the real `Trainer.take_step` on a pack of all sequences.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import product, repeat
from pathlib import Path
from typing import Any

import torch
from profile_context import profile_context
from rich.console import Console
from rich.table import Table
from step_shapes import (
    DTYPES,
    GAMMA,
    LR,
    RMS_NORM_EPS,
    ROPE_THETA,
    SHAPES,
    StepShape,
    StepValues,
    add_step_arguments,
    drafter_weights,
    frozen_tables,
    print_figures,
    shape_argument,
    step_inputs,
)
from torch import Tensor
from transformers import Qwen3Config

from dflash_train.atomic import write_json
from dflash_train.blocks import build_blocks
from dflash_train.config import AttentionBackend, TrainConfig
from dflash_train.drafter import DFlashDraftModel
from dflash_train.errors import UserError
from dflash_train.launch import keep_until_exit, make_accelerator
from dflash_train.loss import head_chunk_bytes
from dflash_train.optimizer import make_optimizer
from dflash_train.packing import Step
from dflash_train.target import TargetEnds
from dflash_train.trainer import Trainer
from dflash_train.training_data import TrainingPack

BACKENDS = ("dense", "tiled", "flex")  # each also as NAME+compile
PEERS = {"specforge": "specforge", "speculators": "speculators", "modelopt": "nvidia-modelopt"}  # by package
OURS = "ours:"
PEERS_SCRIPT = Path(__file__).with_name("peers_step.py")
TABLE_WIDTH, ERROR_WIDTH = 136, 50  # at least

Row = dict[str, Any]


# ── our step ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def make_trainer(shape: StepShape, dtype: str, backend: str) -> Trainer:
    """The trainer as stage=train makes it, with the weights and tables of `step_shapes`."""
    name, _, compiled = backend.partition("+")
    if name not in BACKENDS or compiled not in ("", "compile"):
        raise UserError(f"back end {backend}: choose among {', '.join(BACKENDS)}, or NAME+compile")
    settings = TrainConfig()
    accelerator = make_accelerator({"bf16": "bf16", "fp32": "no"}[dtype])
    drafter = DFlashDraftModel(drafter_config(shape)).float()
    drafter.load_state_dict(drafter_weights(shape, DTYPES[dtype]))
    drafter.attention = AttentionBackend(name)
    if compiled:
        drafter.compile_layers()
    return Trainer(
        accelerator=accelerator,
        drafter=drafter,
        model=keep_until_exit(accelerator.prepare(drafter)),
        optimizer=make_optimizer(drafter, settings.weight_decay),
        ends=TargetEnds(*(table.to(accelerator.device) for table in frozen_tables(shape, DTYPES[dtype]))),
        max_grad_norm=settings.max_grad_norm,
        head_chunk_bytes=head_chunk_bytes(settings.head_chunk_bytes, accelerator.device.type != "cpu"),
    )


def drafter_config(shape: StepShape) -> Qwen3Config:
    """The config of a drafter of this shape."""
    return Qwen3Config(
        architectures=["DFlashDraftModel"],
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=len(shape.layers),
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=RMS_NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        max_position_embeddings=32_768,
        vocab_size=shape.vocab_size,
        layer_types=shape.layer_types,
        use_sliding_window="s" in shape.layers,
        sliding_window=shape.sliding_window,
        max_window_layers=len(shape.layers),
        tie_word_embeddings=False,
        block_size=shape.block_size,
        num_target_layers=shape.num_target_layers,
        dflash_config={"target_layer_ids": shape.layer_ids, "mask_token_id": shape.mask_token_id, "block_size": shape.block_size},
    )


def make_pack(shape: StepShape, dtype: torch.dtype) -> TrainingPack:
    """All sequences of the step as documents of one pack."""
    inputs = step_inputs(shape, dtype)
    supervised_T = torch.ones(shape.num_tokens, dtype=torch.bool)
    documents: list[tuple[Tensor, Tensor]] = [(ids_T, supervised_T) for ids_T in inputs.ids]
    context, blocks = build_blocks(documents, list(inputs.anchors), shape.block_size, shape.mask_token_id, GAMMA)
    features_TLD = inputs.features.view(shape.context_tokens, len(shape.layer_ids), shape.hidden_size)
    return TrainingPack(features_TLD, context, blocks)


def to_device(pack: TrainingPack, device: torch.device) -> TrainingPack:
    """The pack where the step runs."""
    return TrainingPack(pack.features_TLD.to(device), pack.context.to(device), pack.blocks.to(device))


def make_step(shape: StepShape, dtype: str, backend: str) -> Callable[[], StepValues]:
    """A call is one optimizer step, always on the same pack."""
    trainer = make_trainer(shape, dtype, backend)
    packs: Iterator[TrainingPack] = repeat(to_device(make_pack(shape, DTYPES[dtype]), trainer.accelerator.device))
    one_pack = Step(epoch=0, packs=[[]])

    def take_step() -> StepValues:
        figures = trainer.take_step(1, one_pack, packs, LR)
        assert figures.loss is not None and figures.grad_norm is not None
        return StepValues(figures.loss, figures.grad_norm)

    return take_step


# ── variants in turns ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Variant:
    """One trainer on one shape in one dtype, and what its processes told: a result per round, or the reason why there is none."""

    name: str
    shape: StepShape
    dtype: str
    command: list[str]
    results: list[dict[str, Any]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of whole processes
    error: str | None = None

    def __str__(self) -> str:
        return f"{self.shape.name} {self.dtype} {self.name}"

    def run(self, environment: dict[str, str]) -> None:
        """One process. After a failure it does not count on."""
        started = time.monotonic()
        done = subprocess.run(self.command, env=environment, capture_output=True, text=True)
        self.seconds.append(time.monotonic() - started)
        if done.returncode:
            last_lines = [line.strip() for line in done.stderr.splitlines() if line.strip()][-1:]
            self.error = " ".join([*last_lines, f"(status {done.returncode})"])
            return
        self.results.append(json.loads(done.stdout.splitlines()[-1]))

    def median(self, name: str) -> float | None:
        """Over the rounds."""
        return statistics.median(result[name] for result in self.results) if self.results else None

    @property
    def is_peer(self) -> bool:
        """Whether it is not ours."""
        return not self.name.startswith(OURS)


def variants_of(arguments: argparse.Namespace) -> list[Variant]:
    """In the order in which a round runs them: ours and the peers of a shape and dtype are neighbours."""
    trainers = {f"{OURS}{backend}": [sys.executable, __file__, "--one", f"{OURS}{backend}"] for backend in arguments.backends}
    if arguments.peers_python:
        trainers |= {peer: [str(arguments.peers_python), str(PEERS_SCRIPT), peer] for peer in arguments.peers}
    options = ["--steps", str(arguments.steps), "--threads", str(arguments.threads)]
    return [
        Variant(name, shape, dtype, [*command, "--shape", str(shape), "--dtype", dtype, *options])
        for shape, dtype, (name, command) in product(arguments.all_shapes, arguments.dtypes, trainers.items())
    ]


def run_in_turns(variants: Sequence[Variant], rounds: int, threads: int, limit_s: float = math.inf) -> None:
    """Runs every variant once per round; one that failed is not started again. After `limit_s` none starts."""
    ends = time.monotonic() + limit_s
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads that spin would count as CPU seconds
        "GOMP_SPINCOUNT": "0",
        "HF_HUB_OFFLINE": "1",
    }
    for number in range(1, rounds + 1):
        for variant in variants:
            if variant.error is None and time.monotonic() > ends:
                variant.error = f"round {number} did not start within --limit-s {limit_s:g}"
            elif variant.error is None:
                variant.run(environment)
                _tell(variant, number, variants, rounds)


def _tell(variant: Variant, number: int, variants: Sequence[Variant], rounds: int) -> None:
    figure = variant.error or _figure(variant.results[-1])
    left = timedelta(seconds=round(_seconds_left(variants, rounds)))
    print(f"round {number}/{rounds}: {variant}: {figure} · about {left} left", file=sys.stderr, flush=True)


def _figure(result: dict[str, Any]) -> str:
    if "gpu_s" in result:
        return f"{result['gpu_s']:.4f} s/step, {result['gpu_peak_mb']:,.0f} MB on the GPU"
    return f"{result['cpu_s']:.2f} CPU s/step, {result['peak_mb']:,.0f} MB"


def _seconds_left(variants: Sequence[Variant], rounds: int) -> float:
    """A variant takes as long as before; one that has not run yet takes as long as those that have, on average."""
    average = statistics.mean(seconds for variant in variants for seconds in variant.seconds)
    running = [variant for variant in variants if variant.error is None]
    return sum((rounds - len(variant.seconds)) * statistics.mean(variant.seconds or [average]) for variant in running)


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def rows_of(variants: Sequence[Variant]) -> list[Row]:
    """One row per variant, with its error in place of figures where it has failed."""
    rows = []
    for variant in variants:
        row: Row = {"shape": variant.shape.name, "dtype": variant.dtype, "variant": variant.name}
        if variant.results:
            row |= _figures(variant) | _against(variant, _fastest_peer(variant, variants))
        rows.append(row | ({"error": variant.error} if variant.error else {}))
    return rows


def _figures(variant: Variant) -> Row:
    cost, peak = ("gpu_s", "gpu_peak_mb") if "gpu_s" in variant.results[0] else ("cpu_s", "peak_mb")
    seconds = [result[cost] for result in variant.results]
    shares = [result["needed_gflop"] / result[cost] / max(result["product_gflops"]) for result in variant.results]
    return {
        cost: variant.median(cost),
        "spread": (max(seconds) - min(seconds)) / statistics.median(seconds) if len(seconds) > 1 else None,
        peak: variant.median(peak),
        "tokens_per_s": variant.shape.context_tokens / variant.median("wall_s"),
        "share_of_product": statistics.median(shares),
        "loss": variant.results[0]["loss"],
        "grad_norm": variant.results[0]["grad_norm"],
    }


def _fastest_peer(variant: Variant, variants: Sequence[Variant]) -> Variant | None:
    peers = [
        other for other in variants if other.is_peer and other.results and (other.shape, other.dtype) == (variant.shape, variant.dtype)
    ]
    return min(peers, key=lambda peer: peer.median("cpu_s"), default=None)


def _against(variant: Variant, peer: Variant | None) -> Row:
    if peer is None:
        return {}
    speed_up, memory = peer.median("cpu_s") / variant.median("cpu_s"), variant.median("peak_mb") / peer.median("peak_mb")
    return {"fastest_peer": peer.name, "speed_up": speed_up, "memory": memory}


_COLUMNS = {
    "shape": ("shape", "{}"),
    "dtype": ("dtype", "{}"),
    "variant": ("variant", "{}"),
    "cpu_s": ("CPU s/step", "{:.3g}"),
    "gpu_s": ("GPU s/step", "{:.3g}"),
    "spread": ("spread", "{:.0%}"),
    "peak_mb": ("peak MB", "{:,.0f}"),
    "gpu_peak_mb": ("peak GPU MB", "{:,.0f}"),
    "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "share_of_product": ("of product", "{:.0%}"),
    "speed_up": ("speed-up", "{:.2f}x"),
    "memory": ("memory", "{:.0%}"),
    "loss": ("first loss", "{:.5f}"),
    "grad_norm": ("grad norm", "{:.5f}"),
    "error": ("failed with", "{}"),
}


def print_table(rows: Sequence[Row], caption: str) -> None:
    """On stdout; columns that no row fills are left out."""
    table = Table(caption=caption, caption_justify="left")
    names = [name for name in _COLUMNS if any(row.get(name) is not None for row in rows)]
    for name in names:
        is_text = _COLUMNS[name][1] == "{}"
        table.add_column(_COLUMNS[name][0], justify="left" if is_text else "right", no_wrap=name != "error", overflow="fold")
    for i, row in enumerate(rows):
        following = rows[i + 1] if i + 1 < len(rows) else row
        cells = [_COLUMNS[name][1].format(row[name]) if row.get(name) is not None else "" for name in names]
        table.add_row(*cells, end_section=[row["shape"], row["dtype"]] != [following["shape"], following["dtype"]])
    console = Console(markup=False, highlight=False)
    console.width = max(console.width, TABLE_WIDTH + (ERROR_WIDTH if "error" in names else 0))  # a file has no width of its own
    console.print(table)


# ── the command line ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def peer_versions(python: Path, peers: Sequence[str]) -> dict[str, str]:
    """Versions of the peers and their torch. Raises UserError when that interpreter does not run or lacks one of them."""
    packages = [*(PEERS[peer] for peer in peers), "torch", "transformers"]
    code = "import json, sys; from importlib.metadata import version; print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    try:
        told = subprocess.run([str(python), "-c", code, *packages], capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"--peers-python {python} does not run: {error.strerror}") from error
    if told.returncode:
        reason = (told.stderr.strip().splitlines() or [f"status {told.returncode}"])[-1]
        raise UserError(f"--peers-python {python} is no environment of the peers ({reason}): {PEERS_SCRIPT.name} says how to make one")
    return json.loads(told.stdout)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=["S", "M"], help="default: S M; X is tiny, for values")
    shape_help = "one more shape as key=value,... on top of the shape `like` (repeatable); keys: those of StepShape in tools/step_shapes.py"
    parser.add_argument("--shape", type=shape_argument, action="append", default=[], help=shape_help)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="default: all")
    parser.add_argument(
        "--backends",
        nargs="+",
        default=["tiled"],
        help="of our attention: dense, tiled, flex; NAME+compile compiles the layers (default: tiled)",
    )
    parser.add_argument("--peers-python", type=Path, metavar="PATH", help="python of the peers' environment; without it, ours alone")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="default: all")
    parser.add_argument("--rounds", type=_at_least_one, default=5, help="processes per variant (default: %(default)s)")
    parser.add_argument("--steps", type=_at_least_one, default=2, help="measured ones per process (default: %(default)s)")
    parser.add_argument("--threads", type=_at_least_one, default=1, help="of each process, one at a time (default: %(default)s)")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="seconds after which no process starts (default: none)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write rows and the result of every process to this file")
    parser.add_argument("--one", metavar="ours:BACKEND", help="measure one variant of ours in this process; see --one ours:dense --help")
    parser.add_argument("--profile-context", action="store_true", help="attention alone over growing contexts; with --help, its settings")
    arguments = parser.parse_args(argv)
    arguments.all_shapes = [*(SHAPES[name] for name in arguments.shapes), *arguments.shape]
    if not arguments.all_shapes:
        parser.error("there is no shape to measure: give --shapes or --shape")
    return arguments


def parse_one(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures one variant of ours in this process and prints one line of JSON.")
    parser.add_argument("--one", metavar="ours:BACKEND", required=True, help=f"back ends: {', '.join(BACKENDS)}")
    add_step_arguments(parser)
    return parser.parse_args(argv)


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of at least 1")
    return int(text)


def run_one(arguments: argparse.Namespace) -> None:
    """The child of a round."""
    if not arguments.one.startswith(OURS):
        raise UserError(f"--one {arguments.one}: must be {OURS}BACKEND; a peer runs in tools/peers_step.py")
    device = "cuda" if torch.cuda.is_available() else "cpu"  # as make_accelerator has it
    print_figures(arguments, lambda: make_step(arguments.shape, arguments.dtype, arguments.one.removeprefix(OURS)), device)


def run_all(arguments: argparse.Namespace) -> bool:
    """All rounds and the table; whether no variant failed."""
    if arguments.peers_python and torch.cuda.is_available():
        raise UserError("--peers-python: the peers run on the CPU, ours would take the GPU: set CUDA_VISIBLE_DEVICES= to compare")
    versions = peer_versions(arguments.peers_python, arguments.peers) if arguments.peers_python else {}
    variants = variants_of(arguments)
    run_in_turns(variants, arguments.rounds, arguments.threads, arguments.limit_s)
    rows = rows_of(variants)
    device = next((result["device"] for variant in variants for result in variant.results if "device" in result), "none")
    print_table(rows, f"rounds: {arguments.rounds}, steps per process: {arguments.steps}, threads: {arguments.threads}, device: {device}")
    if arguments.json:
        settings = {name: getattr(arguments, name) for name in ("rounds", "steps", "threads")}
        processes = [asdict(variant) for variant in variants]
        settings |= {"device": device}
        write_json(arguments.json, settings | {"torch": torch.__version__, "peers": versions, "rows": rows, "processes": processes})
    return all(variant.error is None for variant in variants)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        if any(argument.partition("=")[0] == "--one" for argument in argv):
            run_one(parse_one(argv))
            return 0
        if "--profile-context" in argv:
            profile_context(argv)
            return 0
        return 0 if run_all(parse(argv)) else 1
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
