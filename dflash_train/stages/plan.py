"""stage=plan: what a run takes before anything runs: memory, steps, operations, disk and time, and whether it fits the device and the disk.

In: the settings and the target's `config.json`, no weights and no GPU; of `run_dir`, the features or the prepared samples where they are
there, else `plan.samples` samples of `plan.tokens_per_sample` tokens, all of them supervised. Out: tables; nothing is written. The stage
fails when something does not fit into `plan.device_memory_bytes` or on the disk, and names the settings to lower.
"""

import math
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import Qwen3Config

from dflash_train.checkpoint import all_checkpoints
from dflash_train.config import AttentionBackend, Config, FeatureCodec, LayerType, MixedPrecision, OptimizerKind, Stage
from dflash_train.drafter import drafter_config
from dflash_train.errors import UserError
from dflash_train.features.codec import codec_named
from dflash_train.features.manifest import FILE_NAME, Manifest
from dflash_train.features.plan import make_plan
from dflash_train.features.reader import FeatureDataset, SampleRef
from dflash_train.features.shard import payload_bytes, shard_layout
from dflash_train.launch import refuse_several_processes
from dflash_train.layers import FeatureContract, LayerIds
from dflash_train.loss import head_chunk_bytes
from dflash_train.packing import Pack, RunPlan, usable
from dflash_train.planning import (
    RUNTIME_BYTES,
    DrafterShape,
    PackShape,
    StepSettings,
    checkpoint_bytes,
    mean_keys,
    peak_bytes,
    step_flop,
    step_memory,
)
from dflash_train.progress import duration_text, size_text
from dflash_train.run_folder import stage_dir
from dflash_train.samples import load_samples, sample_sizes
from dflash_train.target import TargetSize, load_config, target_size, text_config

_BUSY_ENOUGH = 0.8  # of the processes; less is told


def run(config: Config) -> None:
    """Raises UserError when there is no data to plan for, and after the tables when the plan does not fit."""
    refuse_several_processes("plan")
    target = load_config(config.target)
    text = text_config(target)
    layer_ids = LayerIds(tuple(config.features.layer_ids), text.num_hidden_layers)
    shape = drafter_shape(
        drafter_config(config.drafter, layer_ids, text, text.vocab_size), len(layer_ids.ids), tied_tables=target.tie_word_embeddings
    )
    data = find_data(config, shape)
    size = target_size(config.target, layer_ids)
    print(f"plan for {data.source}")
    problems = [
        _show_extraction(config, shape, data, size),
        _show_memory(config, shape, data),
        _show_disk(config, layer_ids, shape, data),
    ]
    _show_steps(config, shape, data, size)
    if found := [problem for problem in problems if problem]:
        raise UserError(f"the plan does not fit: {'; '.join(found)}")


def drafter_shape(config: Qwen3Config, num_features: int, tied_tables: bool) -> DrafterShape:
    """The sizes that a drafter's config means."""
    return DrafterShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        windows=tuple(config.sliding_window if kind == LayerType.sliding_attention else None for kind in config.layer_types),
        num_features=num_features,
        block_size=config.block_size,
        vocab_size=config.vocab_size,
        tied_tables=tied_tables,
    )


# ── data ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class PlannedData:
    """What is extracted and trained on; the figures of a step are means over an epoch."""

    source: str
    num_samples: int
    num_tokens: int
    missing_samples: int  # still to be extracted
    missing_tokens: int
    num_steps: int
    packs_per_step: float
    tokens_per_step: float
    blocks_per_step: float
    keys: dict[int | None, float]  # context tokens that a block sees on average, by window
    largest_packs: tuple[PackShape, ...]  # the one with most tokens, the one with most blocks


def find_data(config: Config, shape: DrafterShape) -> PlannedData:
    """Of the features, else of the prepared samples, else of the settings. Raises UserError when there is none of them."""
    features_dir, prepare_dir = stage_dir(config, Stage.extract), stage_dir(config, Stage.prepare)
    if (features_dir / FILE_NAME).exists():
        found = features_dir
    elif (prepare_dir / "summary.json").exists():
        found = prepare_dir
    else:
        return _assumed_data(config, shape)
    for name in ("samples", "tokens_per_sample"):
        if (value := getattr(config.plan, name)) is not None:
            print(f"warning: plan.{name}={value} has no effect: {found} has the real numbers", file=sys.stderr, flush=True)
    if found is prepare_dir:
        return _real_data(config, shape, _planned_refs(config, prepare_dir), f"the samples in {prepare_dir}")
    missing = [entry for entry in Manifest.load(features_dir).shards if not (features_dir / entry.name).exists()]
    left = sum(entry.num_samples for entry in missing), sum(entry.num_tokens for entry in missing)
    if missing:
        source = f"the samples in {prepare_dir}; {len(missing)} shards of their features are missing in {features_dir}"
        return _real_data(config, shape, _planned_refs(config, prepare_dir), source, left)
    dataset = FeatureDataset(features_dir)
    return _real_data(config, shape, [*dataset.refs("train"), *dataset.refs("heldout")], f"the features in {features_dir}", left)


def _planned_refs(config: Config, prepare_dir: Path) -> list[SampleRef]:
    """The prepared samples in the shards that stage=extract makes of them."""
    dataset = load_samples(prepare_dir).dataset
    num_tokens, num_supervised = sample_sizes(dataset)
    if not num_tokens:
        raise UserError(f"{prepare_dir} holds no samples: there is nothing to plan for")
    plan = make_plan(num_tokens, config.seed, config.features.shard_tokens, config.features.tokens_per_forward)
    splits = dataset.data.column("split").to_pylist()
    return [
        SampleRef(str(sample), shard.name, 0, num_tokens[sample], num_supervised[sample], splits[sample])
        for shard in plan.shards
        for sample in shard.samples
    ]


def _real_data(
    config: Config, shape: DrafterShape, refs: Sequence[SampleRef], source: str, missing: tuple[int, int] | None = None
) -> PlannedData:
    """Steps and packs as stage=train makes them. `missing`: samples and tokens still to be extracted, if not all."""
    train, anchors = config.train, config.train.anchors_per_document
    training = usable([ref for ref in refs if ref.split == "train"])
    if not training:
        raise UserError(f"{source}: no sample of the training split has two supervised tokens, so there is nothing to train on")
    plan = RunPlan(training, config.seed, train.tokens_per_step, train.tokens_per_pack, train.shuffle_shards)
    steps = plan.epoch(0)
    packs = [_pack_shape(pack, anchors) for step in steps for pack in step]
    num_samples, num_tokens = len(refs), sum(ref.num_tokens for ref in refs)
    num_blocks = sum(pack.num_blocks for pack in packs)
    lengths = Counter((ref.num_tokens, ref.num_supervised, _num_blocks(ref, anchors)) for ref in training)
    missing_samples, missing_tokens = missing or (num_samples, num_tokens)
    return PlannedData(
        source=f"{num_samples:,} samples with {num_tokens:,} tokens: {source}",
        num_samples=num_samples,
        num_tokens=num_tokens,
        missing_samples=missing_samples,
        missing_tokens=missing_tokens,
        num_steps=train.max_steps or plan.num_steps(train.epochs),
        packs_per_step=len(packs) / len(steps),
        tokens_per_step=sum(pack.num_tokens for pack in packs) / len(steps),
        blocks_per_step=num_blocks / len(steps),
        keys={
            window: sum(num * blocks * mean_keys(length, supervised, window) for (length, supervised, blocks), num in lengths.items())
            / num_blocks
            for window in set(shape.windows)
        },
        largest_packs=(max(packs, key=lambda pack: pack.num_tokens), max(packs, key=lambda pack: pack.num_blocks)),
    )


def _num_blocks(ref: SampleRef, anchors_per_document: int) -> int:
    """Blocks of a sample in an epoch, if its supervision is one piece; each gap in it takes one position more."""
    return min(anchors_per_document, ref.num_supervised - 1)


def _pack_shape(pack: Pack, anchors_per_document: int) -> PackShape:
    return PackShape(sum(ref.num_tokens for ref in pack), sum(_num_blocks(ref, anchors_per_document) for ref in pack))


def _assumed_data(config: Config, shape: DrafterShape) -> PlannedData:
    """Samples of one length, cut as stage=prepare does, all tokens supervised."""
    plan, train = config.plan, config.train
    if plan.samples is None or plan.tokens_per_sample is None:
        name = "samples" if plan.samples is None else "tokens_per_sample"
        nowhere = f"neither {stage_dir(config, Stage.extract)} nor {stage_dir(config, Stage.prepare)} holds data"
        raise UserError(f"plan.{name} is missing: {nowhere}, so plan.samples and plan.tokens_per_sample have to say how much will come")
    length = min(plan.tokens_per_sample, config.data.max_tokens)
    blocks = min(train.anchors_per_document, length - 1)
    training = max(1, round(plan.samples * (1 - config.data.heldout_share)))
    per_pack = min(max(1, train.tokens_per_pack // length), training)
    num_packs = -(-training // per_pack)
    packs_per_step = min(max(1, round(train.tokens_per_step / (per_pack * length))), num_packs)
    per_epoch = -(-num_packs // packs_per_step)
    pack = PackShape(per_pack * length, per_pack * blocks)
    num_tokens = plan.samples * length
    return PlannedData(
        source=f"{plan.samples:,} samples with {num_tokens:,} tokens: assumed by plan.samples and plan.tokens_per_sample, all supervised",
        num_samples=plan.samples,
        num_tokens=num_tokens,
        missing_samples=plan.samples,
        missing_tokens=num_tokens,
        num_steps=train.max_steps or max(1, round(train.epochs * per_epoch)),
        packs_per_step=packs_per_step,
        tokens_per_step=training * length / per_epoch,
        blocks_per_step=training * blocks / per_epoch,
        keys={window: mean_keys(length, length, window) for window in set(shape.windows)},
        largest_packs=(pack,),
    )


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _show_extraction(config: Config, shape: DrafterShape, data: PlannedData, size: TargetSize) -> str | None:
    """The target on a device; what to change when it does not fit."""
    weights = size.num_parameters * size.value_bytes
    num_planes = shape.num_features + config.features.teacher_state
    captured = config.features.tokens_per_forward * num_planes * shape.hidden_size * size.value_bytes
    memory = {"runtime": RUNTIME_BYTES, "weights": weights, "captured features of a forward": captured}
    table = _table("extraction: memory of a process, its activations not counted", "")
    for kind, num_bytes in memory.items():
        table.add_row(kind, size_text(num_bytes))
    table.add_row("in all", size_text(sum(memory.values())))
    Console().print(table)
    over = _over(sum(memory.values()), config.plan.device_memory_bytes)
    if not over:
        return None
    if weights + RUNTIME_BYTES > config.plan.device_memory_bytes:
        return f"extraction needs {over}: set target.device_map=auto, or target.dtype={config.target.dtype} to a smaller dtype"
    return f"extraction needs {over}: lower features.tokens_per_forward={config.features.tokens_per_forward}"


def _over(needed: int, limit: float | None) -> str | None:
    return f"{size_text(needed)} of plan.device_memory_bytes={limit:g}" if limit is not None and needed > limit else None


def step_settings(config: Config, data: PlannedData) -> StepSettings:
    """What the settings mean for the memory of a training process."""
    train = config.train
    return StepSettings(
        compute_bytes=2 if train.mixed_precision is MixedPrecision.bf16 else 4,
        muon=train.optimizer is OptimizerKind.muon,
        ema=train.ema is not None,
        several_processes=config.plan.num_processes > 1,
        accumulates=data.packs_per_step > config.plan.num_processes,
        head_chunk_bytes=head_chunk_bytes(train.head_chunk_bytes, on_gpu=True),
        dense_attention=train.attention is AttentionBackend.dense,
    )


def _show_memory(config: Config, shape: DrafterShape, data: PlannedData) -> str | None:
    """A training process at its largest pack, moment by moment; what to change when it does not fit."""
    settings = step_settings(config, data)
    pack = max(data.largest_packs, key=lambda pack: peak_bytes(shape, pack, settings))
    moments = {name: {"runtime": RUNTIME_BYTES} | memory for name, memory in step_memory(shape, pack, settings).items()}
    table = _table(f"training: memory of a process, largest pack of {pack.num_tokens:,} tokens and {pack.num_blocks:,} blocks", *moments)
    kinds = dict.fromkeys(kind for memory in moments.values() for kind in memory)
    for kind in sorted(kinds, key=lambda kind: kind == "reserve"):
        if any(memory.get(kind) for memory in moments.values()):
            table.add_row(kind, *(size_text(memory.get(kind, 0)) for memory in moments.values()))
    table.add_row("in all", *(size_text(sum(memory.values())) for memory in moments.values()))
    Console().print(table)
    over = _over(max(sum(memory.values()) for memory in moments.values()), config.plan.device_memory_bytes)
    return over and f"training needs {over}: {_memory_advice(config, shape, settings, pack)}"


def _memory_advice(config: Config, shape: DrafterShape, settings: StepSettings, pack: PackShape) -> str:
    """What to lower, with a value that is enough where anchors alone are."""
    train, room = config.train, config.plan.device_memory_bytes - RUNTIME_BYTES
    anchors = f"train.anchors_per_document={train.anchors_per_document}"
    num_blocks, fewer = pack.num_blocks, train.anchors_per_document
    while fewer > 1 and num_blocks > 1:
        num_blocks, fewer = num_blocks // 2, fewer // 2
        if peak_bytes(shape, PackShape(pack.num_tokens, num_blocks), settings) <= room:
            return f"lower {anchors}, for example to {fewer}, or train.tokens_per_pack={train.tokens_per_pack}"
    if peak_bytes(shape, PackShape(1, 1), settings) <= room:
        return f"lower train.tokens_per_pack={train.tokens_per_pack} and data.max_tokens={config.data.max_tokens}, and {anchors}"
    return (
        f"even a pack of one token does not fit: lower drafter.num_layers={config.drafter.num_layers} or "
        f"train.head_chunk_bytes={train.head_chunk_bytes}, or set train.mixed_precision=bf16, train.optimizer=muon or train.ema=null"
    )


def _show_disk(config: Config, layer_ids: LayerIds, shape: DrafterShape, data: PlannedData) -> str | None:
    """Features in each codec and the checkpoints that are kept; what to change when what is still to be written does not fit."""
    sizes = {codec: _feature_bytes(config, layer_ids, shape, codec, data.num_samples, data.num_tokens) for codec in FeatureCodec}
    table = _table("disk", "", "")
    for codec, num_bytes in sizes.items():
        chosen = ", the chosen codec" if codec is config.features.codec else ""
        table.add_row(f"features in {codec}", size_text(num_bytes), f"{num_bytes / data.num_tokens:,.0f} bytes per token{chosen}")
    checkpoint = checkpoint_bytes(shape, muon=config.train.optimizer is OptimizerKind.muon, ema=config.train.ema is not None)
    most = config.train.keep_checkpoints + 2  # the best one, and the one that is being written
    table.add_row("checkpoints", size_text(most * checkpoint), f"{most} of {size_text(checkpoint)}: kept, best, and one being written")
    extract_dir, train_dir = stage_dir(config, Stage.extract), stage_dir(config, Stage.train)
    written = len(all_checkpoints(train_dir))
    needs = {
        extract_dir: _feature_bytes(config, layer_ids, shape, config.features.codec, data.missing_samples, data.missing_tokens),
        train_dir: max(0, most - written) * checkpoint,
    }
    problem = _disk_problem(config, table, needs)
    Console().print(table)
    return problem


def _disk_problem(config: Config, table: Table, needs: dict[Path, int]) -> str | None:
    """Adds what is needed and free, disk by disk; `plan.disk_bytes` is the room of all of it. What to change where it does not fit."""
    existing = {folder: next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists()) for folder in needs}
    disks: dict[int, list[Path]] = {}
    for folder in needs:
        disks.setdefault(0 if config.plan.disk_bytes else existing[folder].stat().st_dev, []).append(folder)
    problems = []
    for folders in disks.values():
        needed = sum(needs[folder] for folder in folders)
        free = config.plan.disk_bytes or shutil.disk_usage(existing[folders[0]]).free
        where = " and ".join(str(folder) for folder in folders)
        table.add_row("still to be written", size_text(needed), f"of {size_text(free)} free, in {where}")
        if needed > free:
            advice = _disk_advice(config, of_features=max(folders, key=needs.__getitem__) == stage_dir(config, Stage.extract))
            problems.append(f"{where} need {size_text(needed)} of {size_text(free)} free disk (plan.disk_bytes): {advice}")
    return "; ".join(problems) or None


def _disk_advice(config: Config, of_features: bool) -> str:
    if not of_features:
        return f"lower train.keep_checkpoints={config.train.keep_checkpoints} or choose another run_dir"
    fp8 = "" if config.features.codec is FeatureCodec.fp8 else "set features.codec=fp8, "
    return f"{fp8}take fewer samples or features.layer_ids, or choose another features.dir"


def _feature_bytes(config: Config, layer_ids: LayerIds, shape: DrafterShape, codec: FeatureCodec, num_samples: int, num_tokens: int) -> int:
    contract = FeatureContract(layer_ids, shape.hidden_size, config.features.teacher_state, target={}, tokenizer={})
    return payload_bytes(shard_layout(contract, codec_named(codec.value), num_samples, num_tokens)) if num_tokens else 0


def _show_steps(config: Config, shape: DrafterShape, data: PlannedData, size: TargetSize) -> None:
    """Steps, operations and time; warns of processes that would wait."""
    flop = step_flop(shape, data.tokens_per_step, data.blocks_per_step, data.keys)
    of_step, of_target = sum(flop.values()), 2 * size.num_computed
    table = _table("work", "", "")
    per_token = f"{_flop_text(of_target)} per token: twice the {size.num_computed:,} parameters up to the last captured layer"
    table.add_row("extraction", f"{data.missing_tokens:,} tokens", per_token)
    table.add_row("training", f"{data.num_steps:,} steps", f"{_flop_text(of_step * data.num_steps)}, {shape.num_parameters:,} parameters")
    table.add_row("a step", f"{data.tokens_per_step:,.0f} tokens", f"{data.blocks_per_step:,.0f} blocks, {data.packs_per_step:,.4g} packs")
    for kind, amount in flop.items():
        table.add_row(f"  {kind}", _flop_text(amount), f"{amount / of_step:.0%}")
    table.add_row("  in all", _flop_text(of_step), "")
    plan, busy = config.plan, busy_share(data.packs_per_step, config.plan.num_processes)
    if plan.device_flops is not None:
        speed = plan.device_flops * plan.utilisation * plan.num_processes
        extraction, step = of_target * data.missing_tokens / speed, of_step / speed / busy
        devices = f"{plan.num_processes} of {_flop_text(plan.device_flops)} per second at {plan.utilisation:.0%}"
        table.add_row("time of extraction", duration_text(extraction), devices)
        table.add_row("time of a step", duration_text(step), f"{busy:.0%} of the processes have a pack, on average")
        table.add_row("time of training", duration_text(step * data.num_steps), "without evaluations and checkpoints")
        table.add_row("time in all", duration_text(extraction + step * data.num_steps), "")
    Console().print(table)
    if busy < _BUSY_ENOUGH:
        print(
            f"warning: a step has {data.packs_per_step:.3g} packs for plan.num_processes={plan.num_processes}, so {1 - busy:.0%} of the "
            f"processes' time is idle: raise train.tokens_per_step={config.train.tokens_per_step} or lower "
            f"train.tokens_per_pack={config.train.tokens_per_pack}",
            file=sys.stderr,
            flush=True,
        )


def busy_share(packs_per_step: float, num_processes: int) -> float:
    """Share of the processes that have a pack, over the rounds of a step."""
    return packs_per_step / (math.ceil(packs_per_step / num_processes) * num_processes)


def _table(title: str, *columns: str) -> Table:
    """A first column of names and one of figures per entry of `columns`; a header where they have names."""
    table = Table("", title=Text(title), title_justify="left", show_header=any(columns))
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if name or number == 0 else "left")
    return table


def _flop_text(amount: float) -> str:
    for unit in ("", "k", "M", "G", "T", "P", "E"):
        if amount < 1000:
            return f"{amount:,.4g} {unit}FLOP"
        amount /= 1000
    return f"{amount:,.4g} ZFLOP"
