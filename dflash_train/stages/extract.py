"""stage=extract: runs the target over the prepared samples and keeps the features of the chosen layers as a dataset.

In: run_dir/prepare and the target. Out, in features.dir: `manifest.json` and the shards. Rank r of W computes the missing shards r, r+W,
...; a later launch, with any number of processes, computes what is missing then. Which samples a shard holds, and which of them share a
forward, is planned from data, seed and settings, so the files do not depend on who computed them. The plan is shown, and the disk looked
at, before the target is loaded; `features.dry_run` ends there.

What is captured is checked on its way into the file (`features/checks.py`): at the start the hooks against `output_hidden_states` of the
same forward; all values; and of each shard one sample against itself recomputed alone, which is what the checks cost, one sample per shard.
"""

import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
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

from dflash_train.atomic import remove_leftovers
from dflash_train.capture import Capture
from dflash_train.config import Config, Stage
from dflash_train.errors import UserError
from dflash_train.features.checks import far_norms
from dflash_train.features.codec import codec_named
from dflash_train.features.manifest import FILE_NAME, Manifest, ShardEntry
from dflash_train.features.plan import Plan, ShardPlan, make_plan
from dflash_train.features.shard import DamagedShardError, Layout, payload_bytes, set_aside
from dflash_train.features.writer import CapturedRows, CheckSample, ShardJob, WriterThread
from dflash_train.launch import from_main_process, make_accelerator
from dflash_train.layers import FeatureContract
from dflash_train.progress import Progress, size_text
from dflash_train.run_folder import open_stage_dir, stage_dir
from dflash_train.samples import PreparedSamples, load_samples
from dflash_train.target import contract_for, load_target

_CPU_THREADS = 2


def run(config: Config) -> None:
    """Computes every missing shard. Raises UserError for samples, settings or a folder that do not fit together, and for a full disk."""
    samples = load_samples(stage_dir(config, Stage.prepare))
    accelerator = make_accelerator()
    job = plan_job(config, samples)
    missing = from_main_process(accelerator, lambda: _missing_shards(config, job))
    if config.features.dry_run:
        accelerator.print("features.dry_run=true: this was the plan, nothing was computed or written")
        return
    shards = [job.plan.shards[number] for number in missing[accelerator.process_index :: accelerator.num_processes]]
    if shards:
        target = load_target(config.target, accelerator.device)
        with reproducible_threads(accelerator.device):
            extract_shards(job, shards, Capture(target, job.contract.layer_ids, job.contract.teacher_state), accelerator)
    accelerator.wait_for_everyone()
    accelerator.print(f"features: {len(job.plan.shards)} shards with {job.plan.num_tokens:,} tokens in {job.folder}")


@dataclass(frozen=True)
class FeatureJob:
    """What is to be computed, the same on every process."""

    samples: PreparedSamples
    plan: Plan
    manifest: Manifest
    folder: Path
    tokens_per_forward: int
    check_samples: bool

    @property
    def contract(self) -> FeatureContract:
        return self.manifest.contract

    def shard_job(self, shard: ShardPlan) -> ShardJob:
        """All of `shard` but its features."""
        return ShardJob(
            self.folder / shard.name, self.rows(shard), self.contract, codec_named(self.manifest.codec), self.tokens_per_forward
        )

    def rows(self, shard: ShardPlan) -> dict[str, list[Any]]:
        """The columns of the prepared samples for `shard`, in its order."""
        return self.samples.dataset.select(shard.samples)[:]

    def sample_ids(self, shard: ShardPlan) -> list[str]:
        """The names of the samples of `shard`, in its order."""
        return self.samples.dataset.select_columns(["sample_id"]).select(shard.samples)[:]["sample_id"]

    def layout(self, number: int) -> Layout:
        """The arrays of one shard of the plan."""
        return self.manifest.shard_layout(self.manifest.shards[number])


def plan_job(config: Config, samples: PreparedSamples) -> FeatureJob:
    """The plan for `samples`. Raises UserError when the folder holds another dataset, or the samples were made with another tokenizer."""
    features = config.features
    contract = contract_for(config.target, features.layer_ids, features.teacher_state, config.data.template_kwargs)
    _require_same_tokenizer(samples, contract, stage_dir(config, Stage.prepare))
    plan = make_plan(_lengths(samples), config.seed, features.shard_tokens, features.tokens_per_forward)
    manifest = Manifest(
        contract=contract,
        codec=features.codec.value,
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
    return FeatureJob(samples, plan, manifest, folder, features.tokens_per_forward, features.check_samples)


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


def _missing_shards(config: Config, job: FeatureJob) -> list[int]:
    """Brings the folder into order and returns which shards are missing.

    The main process alone looks at the files: a slower one would already see shards that this launch writes.
    """
    numbers = [number for number in range(len(job.plan.shards)) if not _is_sound(job, number, leave=config.features.dry_run)]
    if not config.features.dry_run:
        remove_leftovers(job.folder)
    _show_plan(job, numbers)
    if not config.features.dry_run:
        open_stage_dir(config, Stage.extract)
        if not (job.folder / FILE_NAME).exists():
            job.manifest.save(job.folder)
    return numbers


def _is_sound(job: FeatureJob, number: int, leave: bool) -> bool:
    """Whether the shard is there and whole; a damaged one is said, and renamed unless it is to be left."""
    path = job.folder / job.plan.shards[number].name
    if not path.exists():
        return False
    try:
        header = job.manifest.read_shard_header(job.folder, job.manifest.shards[number])
        if header.metadata["sample_ids"] != job.sample_ids(job.plan.shards[number]):
            raise DamagedShardError(f"{path} is damaged: it holds other samples than planned")
    except DamagedShardError as error:
        consequence = "it will be computed again" if leave else f"set aside as {set_aside(path).name} and computed again"
        print(f"warning: {error}; {consequence}", file=sys.stderr, flush=True)
        return False
    return True


def _show_plan(job: FeatureJob, missing: list[int]) -> None:
    """Prints what is planned; raises UserError when the missing shards do not fit on the disk."""
    total_bytes = sum(payload_bytes(job.layout(number)) for number in range(len(job.plan.shards)))
    needed_bytes, free_bytes = sum(payload_bytes(job.layout(number)) for number in missing), _free_bytes(job.folder)
    table = Table(title=Text(f"features in {job.folder}"), show_header=False)
    table.add_row("samples", f"{len(job.plan.lengths):,}")
    table.add_row("tokens", f"{job.plan.num_tokens:,}")
    table.add_row(
        "padding", f"{job.plan.padding_share:.1%} of what is computed, in {sum(len(s.batches) for s in job.plan.shards):,} forwards"
    )
    table.add_row("bytes per token", f"{total_bytes / job.plan.num_tokens:,.0f}, codec {job.manifest.codec}")
    table.add_row("total", size_text(total_bytes))
    table.add_row("shards", f"{len(job.plan.shards):,} of {size_text(total_bytes / len(job.plan.shards))}")
    table.add_row("missing", f"{len(missing):,} shards, {size_text(needed_bytes)}")
    table.add_row("free", size_text(free_bytes))
    Console().print(table)
    if needed_bytes > free_bytes:
        raise UserError(
            f"features.dir={job.folder}: the features need {size_text(needed_bytes)} more, the disk has {size_text(free_bytes)} free; "
            "choose another features.dir or features.codec, fewer features.layer_ids or fewer samples"
        )


def _free_bytes(folder: Path) -> int:
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def extract_shards(job: FeatureJob, shards: Sequence[ShardPlan], capture: Capture, accelerator: Accelerator) -> None:
    """Computes `shards`, at least one, on this process. Raises UserError when a check fails or a shard cannot be written."""
    usual_norms = _check_capture(job, capture)
    title = "extract" if accelerator.num_processes == 1 else f"extract, process 1 of {accelerator.num_processes}"
    num_tokens = sum(job.plan.shard_tokens(shard) for shard in shards)
    with Progress(title, num_tokens, "tokens", accelerator.is_main_process) as progress, WriterThread(capture.target.device) as writer:
        for shard in shards:
            shard_job = job.shard_job(shard)
            position = shard.check_sample
            with _told_memory(shard_job.input_ids[position][None]):
                recomputed = capture.recompute(shard_job.input_ids[position])
            writer.open(shard_job, CheckSample(position, recomputed, only_warn=not job.check_samples))
            for batch in _in_batches(shard_job.input_ids, shard):
                writer.add(forward(capture, batch))
                progress.advance(sum(map(len, batch)), _shards_note(job, writer.finished(), usual_norms))
        progress.advance(0, _shards_note(job, writer.finished(wait=True), usual_norms))


def _check_capture(job: FeatureJob, capture: Capture) -> list[float]:
    """Holds the hooks to `output_hidden_states` on two short samples of the plan's first shard; returns their layers' median norms."""
    input_ids_BT, mask_BT = _padded(job.shard_job(job.plan.shards[0]).input_ids[-2:], capture.target.device)
    features_BTLD = capture.compare_with_hidden_states(input_ids_BT, mask_BT)
    return features_BTLD[mask_BT.bool()].norm(dim=-1, dtype=torch.float32).median(0).values.tolist()


def _shards_note(job: FeatureJob, finished: Iterable[dict[str, Any]], usual_norms: list[float]) -> str:
    """What to show of the latest finished shard; warns of those whose layers are much longer or shorter than in the first batch."""
    note = ""
    for metadata in finished:
        note = f"{job.manifest.codec} error {max(metadata['codec']['relative_error']):.2%}"
        for line in far_norms(metadata["statistics"]["median_norm"], usual_norms, job.contract.layer_ids.ids):
            print(f"warning: in the shard of sample {metadata['sample_ids'][0]}, {line}", file=sys.stderr, flush=True)
    return note


def _in_batches(rows: Sequence[Tensor], shard: ShardPlan) -> Iterator[Sequence[Tensor]]:
    first = 0
    for batch in shard.batches:
        yield rows[first : first + len(batch)]
        first += len(batch)


def _padded(rows: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Right-padded ids and attention mask, both int64 [B, T]. Padding is token 0, which the mask hides."""
    mask_BT = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return pad_sequence(list(rows), batch_first=True).long().to(device), mask_BT.long().to(device)


def forward(capture: Capture, rows: Sequence[Tensor]) -> CapturedRows:
    """The features of samples, each ids [T], computed together. Raises UserError when the device's memory is not enough."""
    input_ids_BT, mask_BT = _padded(rows, capture.target.device)
    with _told_memory(input_ids_BT):
        captured = capture.run(input_ids_BT, mask_BT)
        # ids go the way of the features, so that the writer sees whose rows it gets
        together = (input_ids_BT, captured.features_BTLD, captured.teacher_state_BTD)
        return CapturedRows(*(None if values is None else _without_padding(values, rows) for values in together))


@contextmanager
def _told_memory(input_ids_BT: Tensor) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        rows, width = input_ids_BT.shape
        raise UserError(
            f"out of memory on {input_ids_BT.device} in a forward of {rows} rows of {width} tokens: "
            "run again with a smaller features.tokens_per_forward, finished shards stay"
        ) from error


def _without_padding(values_BT: Tensor, rows: Sequence[Tensor]) -> Tensor:
    return torch.cat([values_T[: len(row)] for values_T, row in zip(values_BT, rows, strict=True)])


@contextmanager
def reproducible_threads(device: torch.device) -> Iterator[None]:
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
