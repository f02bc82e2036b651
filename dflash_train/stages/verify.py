"""stage=verify: reads every byte of the feature dataset, says what it is, and sets aside what is wrong.

In: features.dir, and for `verify.samples_per_shard` the target. Damaged or wrong shards are renamed to `NAME.damaged`, so that
stage=extract makes them again; nothing else is written. The stage fails when a shard is damaged, wrong or missing.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflash_train.capture import Capture
from dflash_train.config import Config, Stage
from dflash_train.errors import UserError
from dflash_train.features.manifest import Manifest
from dflash_train.features.shard import set_aside
from dflash_train.features.verify import ShardReport, read_shard, recompute_samples
from dflash_train.launch import make_accelerator, refuse_several_processes
from dflash_train.progress import Progress
from dflash_train.run_folder import stage_dir
from dflash_train.target import contract_for, load_target

_READERS = 4  # shards read at the same time
_NUM_BARS, _BAR_WIDTH = 12, 40


def run(config: Config) -> None:
    """Raises UserError when a shard is damaged, wrong or missing, and when the target is not the one the features were made with."""
    refuse_several_processes("verify")
    folder = stage_dir(config, Stage.extract)
    manifest = Manifest.load(folder)
    _print_identity(manifest, folder)
    recomputes = config.verify.samples_per_shard != 0
    if recomputes:
        _require_same_target(config, manifest)
    reports = list(_read_all(manifest, folder))
    _print_contents(manifest, reports)
    if recomputes:
        _recompute(config, manifest, folder, reports)
    _finish(manifest, folder, reports)


def _require_same_target(config: Config, manifest: Manifest) -> None:
    current = contract_for(
        config.target, list(manifest.contract.layer_ids.ids), manifest.contract.teacher_state, config.data.template_kwargs
    )
    manifest.contract.require_equal(current, "the features", "this run")
    if manifest.target_dtype != config.target.dtype.value:
        raise UserError(f"the features were made with target.dtype={manifest.target_dtype}, this run has {config.target.dtype.value}")


def _read_all(manifest: Manifest, folder: Path) -> Iterator[ShardReport]:
    num_tokens = sum(entry.num_tokens for entry in manifest.shards)
    with Progress("read", num_tokens, "tokens") as progress, ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as readers:
        reports = readers.map(lambda entry: read_shard(manifest, folder, entry), manifest.shards)
        for entry, report in zip(manifest.shards, reports, strict=True):
            progress.advance(entry.num_tokens)
            _print_faults(report)
            yield report


def _recompute(config: Config, manifest: Manifest, folder: Path, reports: list[ShardReport]) -> None:
    target = load_target(config.target, make_accelerator().device)
    capture = Capture(target, manifest.contract.layer_ids, manifest.contract.teacher_state)
    whole = [number for number, report in enumerate(reports) if not report.missing and not report.faults]
    with Progress("recompute", len(whole), "shards") as progress, torch.no_grad():
        for number in whole:
            reports[number].faults.extend(
                recompute_samples(manifest, folder, manifest.shards[number], capture, config.verify.samples_per_shard)
            )
            _print_faults(reports[number])
            progress.advance(1)


def _print_faults(report: ShardReport) -> None:
    for fault in report.faults:
        print(f"{report.name}: {fault}", file=sys.stderr, flush=True)


def _finish(manifest: Manifest, folder: Path, reports: list[ShardReport]) -> None:
    missing = [report.name for report in reports if report.missing]
    damaged = [report.name for report in reports if report.faults]
    for name in damaged:
        print(f"{name}: set aside as {set_aside(folder / name).name}", file=sys.stderr, flush=True)
    wrong = [f"{what}: {_some(names)}" for what, names in (("damaged or wrong", damaged), ("missing", missing)) if names]
    if wrong:
        raise UserError(f"{folder}: of {len(manifest.shards)} shards, {'; '.join(wrong)}; run stage=extract again to make them")
    print(f"{folder}: all {len(manifest.shards)} shards are whole")


def _some(names: list[str], num_shown: int = 5) -> str:
    more = f" and {len(names) - num_shown} more" if len(names) > num_shown else ""
    return f"{len(names)} ({', '.join(names[:num_shown])}{more})"


def _print_identity(manifest: Manifest, folder: Path) -> None:
    contract = manifest.contract
    table = Table(title=Text(f"features in {folder}"), show_header=False)
    table.add_row("layers", f"{list(contract.layer_ids.ids)} of {contract.layer_ids.num_target_layers}, {contract.hidden_size} wide")
    table.add_row("teacher state", "stored" if contract.teacher_state else "not stored")
    table.add_row("codec", manifest.codec)
    table.add_row("target dtype", manifest.target_dtype)
    for what, identity in (("target", contract.target), ("tokenizer", contract.tokenizer)):
        for key, value in identity.items():
            table.add_row(f"{what} {key}", Text(", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)))
    table.add_row("samples", f"{manifest.samples_digest}, written by the target: {manifest.answers_from_target}")
    table.add_row("shard plan", f"{len(manifest.shards):,} shards, seed {manifest.seed}, shard_tokens {manifest.shard_tokens:,}")
    Console().print(table)


def _print_contents(manifest: Manifest, reports: list[ShardReport]) -> None:
    lengths = [length for report in reports for length in report.lengths]
    if not lengths:
        return
    planned = sum(entry.num_samples for entry in manifest.shards), sum(entry.num_tokens for entry in manifest.shards)
    num_supervised = sum(report.num_supervised for report in reports)
    print(f"read: {len(lengths):,} of {planned[0]:,} samples, {sum(lengths):,} of {planned[1]:,} tokens, {num_supervised:,} supervised")
    _print_histogram(lengths)
    for plane, layer_id in enumerate(manifest.contract.layer_ids.ids):
        errors = [report.codec_error[plane] for report in reports if report.codec_error]
        print(f"layer {layer_id}: {manifest.codec} error {sum(errors) / len(errors):.3%} on average over shards, at most {max(errors):.3%}")


def _print_histogram(lengths: list[int]) -> None:
    """Bars of equal width from the shortest sample to the longest."""
    shortest = min(lengths)
    width = -(-(max(lengths) - shortest + 1) // _NUM_BARS)
    counts = Counter((length - shortest) // width for length in lengths)
    table = Table("tokens", "samples", "", title="lengths")
    for number in range(max(counts) + 1):
        first = shortest + number * width
        bar = "█" * round(_BAR_WIDTH * counts[number] / max(counts.values()))
        table.add_row(f"{first:,} to {first + width - 1:,}", f"{counts[number]:,}", bar)
    Console().print(table)
