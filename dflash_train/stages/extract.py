"""stage=extract: runs the target over the prepared samples and keeps the features of the chosen layers as a dataset.

In: run_dir/prepare and the target. Out, in features.dir: `manifest.json` and the shards. Rank r of W computes the missing shards r, r+W,
...; a later launch, with any number of processes, computes what is missing then. Which samples a shard holds, and which of them share a
forward, is planned from data, seed and settings, so the files do not depend on who computed them.
"""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dflash_train.capture import Capture
from dflash_train.config import Config, Stage
from dflash_train.errors import UserError
from dflash_train.features.codec import Bf16Codec, codec_named
from dflash_train.features.manifest import FILE_NAME, Manifest, ShardEntry
from dflash_train.features.plan import Plan, ShardPlan, make_plan
from dflash_train.features.shard import DamagedShardError, Layout, payload_bytes
from dflash_train.features.writer import ShardBuilder, WriterThread
from dflash_train.launch import from_main_process, make_accelerator
from dflash_train.layers import FeatureContract
from dflash_train.progress import Progress
from dflash_train.run_folder import open_stage_dir, stage_dir
from dflash_train.samples import PreparedSamples, load_samples
from dflash_train.target import contract_for, load_target

_CPU_THREADS = 2


def run(config: Config) -> None:
    """Computes every missing shard. Raises UserError for samples, settings or a folder that do not fit together, and for a full disk."""
    samples = load_samples(stage_dir(config, Stage.prepare))
    accelerator = make_accelerator()
    job = _plan_job(config, samples)
    missing = _open_dataset(config, job, accelerator)
    with _reproducible_threads(accelerator.device):
        _extract(config, job, missing[accelerator.process_index :: accelerator.num_processes], accelerator)
    accelerator.wait_for_everyone()
    accelerator.print(f"features: {len(job.plan.shards)} shards with {job.plan.num_tokens:,} tokens in {job.folder}")


@dataclass(frozen=True)
class _Job:
    """What is to be computed, the same on every process."""

    samples: PreparedSamples
    plan: Plan
    manifest: Manifest
    folder: Path

    def rows(self, shard: ShardPlan) -> dict[str, list[Any]]:
        """The columns of the prepared samples for `shard`, in its order."""
        return self.samples.dataset.select(shard.samples)[:]

    def sample_ids(self, shard: ShardPlan) -> list[str]:
        """The names of the samples of `shard`, in its order."""
        return self.samples.dataset.select_columns(["sample_id"]).select(shard.samples)[:]["sample_id"]

    def layout(self, number: int) -> Layout:
        """The arrays of one shard of the plan."""
        return self.manifest.shard_layout(self.manifest.shards[number])


def _plan_job(config: Config, samples: PreparedSamples) -> _Job:
    features = config.features
    contract = contract_for(config.target, features.layer_ids, features.teacher_state, config.data.template_kwargs)
    _require_same_tokenizer(samples, contract, stage_dir(config, Stage.prepare))
    plan = make_plan(_lengths(samples), config.seed, features.shard_tokens, features.tokens_per_forward)
    manifest = Manifest(
        contract=contract,
        codec=Bf16Codec.name,
        target_dtype=config.target.dtype.value,
        seed=config.seed,
        shard_tokens=features.shard_tokens,
        samples_digest=samples.summary["digest"],
        answers_from_target=samples.summary["answers_from_target"],
        shards=tuple(ShardEntry(shard.name, len(shard.samples), plan.shard_tokens(shard)) for shard in plan.shards),
    )
    folder = stage_dir(config, Stage.extract)
    if (folder / FILE_NAME).exists():
        manifest.require_continues(Manifest.load(folder), folder)
    return _Job(samples, plan, manifest, folder)


def _require_same_tokenizer(samples: PreparedSamples, contract: FeatureContract, prepare_dir: Path) -> None:
    prepared, current = samples.summary["tokenizer"], contract.tokenizer
    different = [f"{key} {prepared.get(key)} != {current.get(key)}" for key in current if prepared.get(key) != current.get(key)]
    if different:
        raise UserError(
            f"{prepare_dir} was prepared with another tokenizer than target.path has: {'; '.join(different)}; run stage=prepare again"
        )


def _lengths(samples: PreparedSamples) -> list[int]:
    lengths = pc.list_value_length(samples.dataset.data.column("input_ids")).to_pylist()
    if not lengths:
        raise UserError("the prepared dataset is empty: nothing to extract")
    return lengths


def _open_dataset(config: Config, job: _Job, accelerator: Accelerator) -> list[ShardPlan]:
    """Brings the folder into order and returns the missing shards, the same on every process.

    The main process alone looks at the files: a slower one would already see shards that this launch writes.
    """
    numbers = from_main_process(accelerator, lambda: _missing_shards(config, job))
    return [job.plan.shards[number] for number in numbers]


def _missing_shards(config: Config, job: _Job) -> list[int]:
    numbers = [number for number in range(len(job.plan.shards)) if not _is_sound(job, number)]
    _print_plan(job, num_missing=len(numbers))
    _require_space(job.folder, needed_bytes=sum(payload_bytes(job.layout(number)) for number in numbers))
    open_stage_dir(config, Stage.extract)
    if not (job.folder / FILE_NAME).exists():
        job.manifest.save(job.folder)
    return numbers


def _is_sound(job: _Job, number: int) -> bool:
    """Whether the shard is there and whole; a damaged one is renamed and said."""
    path = job.folder / job.plan.shards[number].name
    if not path.exists():
        return False
    try:
        header = job.manifest.read_shard_header(job.folder, job.manifest.shards[number])
        if header.metadata["sample_ids"] != job.sample_ids(job.plan.shards[number]):
            raise DamagedShardError(f"{path} is damaged: it holds other samples than planned")
    except DamagedShardError as error:
        aside = path.with_name(f"{path.name}.damaged")
        os.replace(path, aside)
        print(f"warning: {error}; set aside as {aside.name} and computed again", file=sys.stderr, flush=True)
        return False
    return True


def _require_space(folder: Path, needed_bytes: int) -> None:
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    free_bytes = shutil.disk_usage(existing).free
    if needed_bytes > free_bytes:
        raise UserError(
            f"features.dir={folder}: the features need {_size(needed_bytes)} more, the disk has {_size(free_bytes)} free; "
            "choose another features.dir, fewer features.layer_ids or fewer samples"
        )


def _print_plan(job: _Job, num_missing: int) -> None:
    total_bytes = sum(payload_bytes(job.layout(number)) for number in range(len(job.plan.shards)))
    table = Table("samples", "tokens", "padding", "bytes per token", "total", "shards", "missing", title=Text(f"features in {job.folder}"))
    table.add_row(
        f"{len(job.plan.lengths):,}",
        f"{job.plan.num_tokens:,}",
        f"{job.plan.padding_share:.1%}",
        f"{total_bytes / job.plan.num_tokens:,.0f}",
        _size(total_bytes),
        f"{len(job.plan.shards):,}",
        f"{num_missing:,}",
    )
    Console().print(table)


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:,.4g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.2f} TB"


def _extract(config: Config, job: _Job, shards: Sequence[ShardPlan], accelerator: Accelerator) -> None:
    """Computes `shards` on this process; before the first one the hooks are held to `output_hidden_states`."""
    if not shards:
        return
    contract, codec = job.manifest.contract, codec_named(job.manifest.codec)
    capture = Capture(load_target(config.target, accelerator.device), contract.layer_ids, contract.teacher_state)
    title = "extract" if accelerator.num_processes == 1 else f"extract, process 1 of {accelerator.num_processes}"
    num_tokens = sum(job.plan.shard_tokens(shard) for shard in shards)
    with Progress(title, num_tokens, "tokens", accelerator.is_main_process) as progress, WriterThread(accelerator.device) as writer:
        for shard in shards:
            builder = ShardBuilder(job.folder / shard.name, job.rows(shard), contract, codec, config.features.tokens_per_forward)
            rows = builder.input_ids
            if shard is shards[0]:
                capture.compare_with_hidden_states(*_padded(rows[-2:], accelerator.device))
            for batch in _in_batches(rows, shard):
                writer.add(builder, *_forward(capture, batch, accelerator.device))
                progress.advance(sum(map(len, batch)))


def _in_batches(rows: Sequence[Tensor], shard: ShardPlan) -> Iterator[Sequence[Tensor]]:
    first = 0
    for batch in shard.batches:
        yield rows[first : first + len(batch)]
        first += len(batch)


def _padded(rows: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Right-padded ids and attention mask, both int64 [B, T]. Padding is token 0, which the mask hides."""
    mask_BT = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return pad_sequence(list(rows), batch_first=True).long().to(device), mask_BT.long().to(device)


def _forward(capture: Capture, rows: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Features [T, L, D] and teacher state [T, D] of the rows one after the other, without padding."""
    input_ids_BT, mask_BT = _padded(rows, device)
    width = input_ids_BT.shape[1]
    kept_T = torch.cat([torch.arange(len(row)) + number * width for number, row in enumerate(rows)]).to(device)
    try:
        captured = capture.run(input_ids_BT, mask_BT)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"out of memory on {device} in a forward of {len(rows)} rows of {width} tokens: "
            "run again with a smaller features.tokens_per_forward, finished shards stay"
        ) from error
    teacher_state_BTD = captured.teacher_state_BTD
    teacher_state_TD = None if teacher_state_BTD is None else teacher_state_BTD.flatten(0, 1).index_select(0, kept_T)
    return captured.features_BTLD.flatten(0, 1).index_select(0, kept_T), teacher_state_TD


@contextmanager
def _reproducible_threads(device: torch.device) -> Iterator[None]:
    """The same number of CPU threads in every process of every launch.

    CPU kernels cut their work by the number of threads, and the last bits follow: torch 2.13 gives other fp32 products for 5 to 11 rows
    on two threads than on one, other GELU values on three. More cores are used by more processes.
    """
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(_CPU_THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)
