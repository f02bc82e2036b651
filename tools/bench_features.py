"""Measures the feature dataset and prints markdown tables: extraction, reading, codecs, and what a codec does to tau.

    python -m dflash_train stage=prepare recipe=quickstart         makes what `extract` and `codecs` need,
    python -m dflash_train stage=extract recipe=quickstart         and this what `tau` needs
    python tools/bench_features.py extract [--memory] [SETTING=VALUE ...]
    python tools/bench_features.py read
    python tools/bench_features.py codecs [--experiment FILE] [SETTING=VALUE ...]
    python tools/bench_features.py tau [--experiment FILE] [SETTING=VALUE ...]

What is compared takes turns in one process, on the same threads, and a figure is the median of the rounds; CPU seconds are those of all
threads. Nothing is left behind but what --json asks for. An experiment is a Python file with a `Codec` of its own.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import inspect
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor

from dflash_train.atomic import write_json
from dflash_train.capture import Capture, Recomputed
from dflash_train.cli import package_root, register_recipes, run_stage, to_config
from dflash_train.config import Config, FeatureCodec, Stage
from dflash_train.errors import UserError
from dflash_train.features import writer
from dflash_train.features.checks import ContentChecks
from dflash_train.features.codec import Bf16Codec, Codec, codec_named
from dflash_train.features.manifest import Manifest, ShardEntry
from dflash_train.features.reader import FeatureDataset, SampleRef
from dflash_train.features.writer import CapturedRows, CheckSample, ShardJob, write_shard
from dflash_train.launch import make_accelerator
from dflash_train.layers import FeatureContract, LayerIds
from dflash_train.run_folder import stage_dir
from dflash_train.samples import PreparedSamples, load_samples, save_samples
from dflash_train.stages import extract
from dflash_train.target import Target, load_target

SHAPES = {"S": (512, 5, 576), "M": (2048, 5, 1024)}  # tokens of a sample, L, D
SAMPLES_PER_SHARD = 16
NUM_OUTLIERS = 8  # channels of a layer with the largest mean square

Row = dict[str, Any]  # what stands in each column


def settings_of(arguments: argparse.Namespace, stage: Stage, *more: str) -> Config:
    """The quickstart's settings with those of the command line; `more` has the last word."""
    register_recipes()
    with initialize_config_dir(version_base="1.3", config_dir=str(package_root() / "conf")):
        settings = ["recipe=quickstart", f"stage={stage}", f"run_dir={arguments.run_dir}", *arguments.settings, *more]
        return to_config(compose("config", settings))


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds by the clock, and those of all cores."""

    wall: float
    cpu: float


def cost_of(work: Callable[[], Any]) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def in_turns(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[Cost]]:
    """Runs every way once per round, every second round in the opposite order."""
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            costs[name].append(cost_of(ways[name]))
    return costs


# ── extract ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def bench_extract(arguments: argparse.Namespace) -> list[Row]:
    """Extraction with all its checks against the bare forward; with --memory, peak memory of a tenth of the samples and of all."""
    samples = load_samples(stage_dir(settings_of(arguments, Stage.extract), Stage.prepare))
    with tempfile.TemporaryDirectory(dir=arguments.run_dir) as folder:
        if arguments.memory:
            return _memory_rows(arguments, samples, Path(folder))
        config = settings_of(arguments, Stage.extract, f"features.dir={folder}/features")
        job = extract.plan_job(config, samples)
        accelerator = make_accelerator()
        capture = Capture(load_target(config.target, accelerator.device), job.contract.layer_ids)
        batches = [
            extract._padded(rows, accelerator.device)
            for shard in job.plan.shards
            for rows in extract._in_batches(job.shard_job(shard).input_ids, shard)
        ]
        checks: dict[str, float] = defaultdict(float)

        def whole() -> None:
            with tempfile.TemporaryDirectory(dir=folder) as fresh, _clocked_checks(checks):
                extract.extract_shards(dataclasses.replace(job, folder=Path(fresh)), job.plan.shards, capture, accelerator)

        ways = {"bare forward": lambda: run_bare(capture.target, job.contract.layer_ids.ids[-1], batches), "extraction": whole}
        with extract.reproducible_threads(accelerator.device):
            run_bare(capture.target, job.contract.layer_ids.ids[-1], batches[:1])
            return _speed_rows(in_turns(ways, arguments.rounds), job.plan.num_tokens, checks)


class _Passed(Exception):
    """The forward has passed the last captured layer."""


@torch.no_grad()
def run_bare(target: Target, last_layer_id: int, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """The decoder alone, stopped behind `last_layer_id`; nothing is kept."""

    def stop(*_: Any) -> None:
        raise _Passed

    hook = target.layers[last_layer_id].register_forward_hook(stop)
    try:
        for input_ids_BT, mask_BT in batches:
            with contextlib.suppress(_Passed):
                target.decoder(input_ids=input_ids_BT, attention_mask=mask_BT, use_cache=False)
    finally:
        hook.remove()


WAITED_FOR, BESIDE = "checks that the forward waits for", "checks beside the forward"
CHECKS = (
    (extract, "_check_capture", WAITED_FOR),
    (Capture, "recompute", WAITED_FOR),
    (ContentChecks, "check", BESIDE),
    (ContentChecks, "median_norms", BESIDE),
    (writer, "require_sample", BESIDE),
)


@contextlib.contextmanager
def _clocked_checks(seconds: dict[str, float]) -> Iterator[None]:
    """While open, adds up the seconds of every check, by the clock."""

    def clocked(check: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = check(*arguments, **options)
            seconds[kind] += time.perf_counter() - started
            return result

        return run

    with contextlib.ExitStack() as stack:
        for owner, name, kind in CHECKS:
            stack.enter_context(mock.patch.object(owner, name, clocked(getattr(owner, name), kind)))
        yield


def _speed_rows(costs: dict[str, list[Cost]], num_tokens: int, checks: dict[str, float]) -> list[Row]:
    rows: list[Row] = []
    for name, found in costs.items():
        pairs = list(zip(costs["bare forward"], found, strict=True))
        row = {
            "": name,
            "tokens/s": statistics.median(num_tokens / cost.wall for cost in found),
            "share": statistics.median(bare.wall / cost.wall for bare, cost in pairs),
            "tokens per CPU second": statistics.median(num_tokens / cost.cpu for cost in found),
            "share by CPU": statistics.median(bare.cpu / cost.cpu for bare, cost in pairs),
        }
        rows.append(row)
    total = sum(cost.wall for cost in costs["extraction"])
    return rows + [{"": f"{kind}, of the extraction's time", "share": checks[kind] / total} for kind in (WAITED_FOR, BESIDE)]


def _memory_rows(arguments: argparse.Namespace, samples: PreparedSamples, folder: Path) -> list[Row]:
    rows = []
    for every in (10, 1):
        part = folder / f"every-{every}"
        chosen = samples.dataset.select(range(0, len(samples.dataset), every))
        save_samples(part / "prepare", chosen, samples.summary)
        rows.append({"samples": len(chosen), "tokens": sum(map(len, chosen["input_ids"])), "peak MB": _peak_mb(arguments, part)})
    return [row | {"growth": row["peak MB"] / rows[0]["peak MB"] - 1} for row in rows]


def _peak_mb(arguments: argparse.Namespace, run_dir: Path) -> float:
    """Peak resident memory of stage=extract in a process of its own, which tells it itself: what a parent is told counts the parent too."""
    settings = ["recipe=quickstart", *arguments.settings, f"run_dir={run_dir}", f"features.dir={run_dir}/features"]
    told = subprocess.run([sys.executable, "-c", _TELL_PEAK, "stage=extract", *settings], stdout=subprocess.PIPE, text=True)
    if told.returncode:
        raise UserError(f"stage=extract of {run_dir} ended with status {told.returncode}")
    return int(told.stdout.split()[-2]) / 1024


_TELL_PEAK = """
from pathlib import Path
from dflash_train.cli import main
main()
print(*(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")))
"""


# ── read ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def bench_read(arguments: argparse.Namespace) -> list[Row]:
    """Shuffled samples into a batch: a `torch.save` file per sample against the feature dataset. One thread, files in the page cache."""
    rows = []
    for shape, sizes in SHAPES.items():
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, threads(1):
            samples = _RandomSamples(Path(folder), *sizes, arguments.samples)
            rows.append({"shape": shape} | _read_speeds(samples, max(1, arguments.tokens_per_batch // sizes[0]), arguments.rounds))
    return rows


def _read_speeds(samples: "_RandomSamples", per_batch: int, rounds: int) -> Row:
    batches = _shuffled_batches(samples.dataset.refs("train"), per_batch)
    samples.require_equal(batches[0])
    ways = {"torch.save": lambda: samples.read_files(batches), "dataset": lambda: samples.read_dataset(batches)}
    in_turns(ways, 1)  # now everything is in the page cache
    costs = in_turns(ways, rounds)
    read_mb = sum(map(len, batches)) * samples.feature_bytes / 1e6
    speeds = {f"{name}, MB per CPU second": statistics.median(read_mb / cost.cpu for cost in found) for name, found in costs.items()}
    return speeds | {"ratio": statistics.median(a.cpu / b.cpu for a, b in zip(costs["torch.save"], costs["dataset"], strict=True))}


def _shuffled_batches(refs: Sequence[SampleRef], per_batch: int) -> list[list[SampleRef]]:
    order = random.Random(0).sample(refs, len(refs))
    return [order[first : first + per_batch] for first in range(0, len(order) - per_batch + 1, per_batch)]


class _RandomSamples:
    """Equally long random samples, kept both ways in `folder`; both ways read ids and mask as well."""

    def __init__(self, folder: Path, num_tokens: int, num_layers: int, hidden_size: int, num_samples: int) -> None:
        self.folder, self.num_tokens, self.width = folder, num_tokens, (num_layers, hidden_size)
        contract = FeatureContract(LayerIds(tuple(range(num_layers)), num_layers + 1), hidden_size, False, {}, {})
        firsts = range(0, num_samples, SAMPLES_PER_SHARD)
        shards = [[str(number) for number in range(first, min(first + SAMPLES_PER_SHARD, num_samples))] for first in firsts]
        entries = [ShardEntry(f"shard-{n:05}.safetensors", len(ids), len(ids) * num_tokens) for n, ids in enumerate(shards)]
        manifest = Manifest(contract, Bf16Codec.name, "bfloat16", 0, num_tokens * SAMPLES_PER_SHARD, "", "unknown", tuple(entries))
        generator = torch.Generator().manual_seed(0)
        for entry, sample_ids in zip(entries, shards, strict=True):
            samples = {sample_id: self._save_new(sample_id, generator) for sample_id in sample_ids}
            write_samples(folder / entry.name, contract, Bf16Codec(), samples, ["train"] * len(samples))
        manifest.save(folder)
        self.dataset = FeatureDataset(folder)

    def _save_new(self, sample_id: str, generator: torch.Generator) -> dict[str, Tensor]:
        sample = {
            "input_ids": torch.randint(1000, (self.num_tokens,), generator=generator, dtype=torch.int32),
            "loss_mask": torch.arange(self.num_tokens) >= self.num_tokens // 3,
            "features": torch.randn(self.num_tokens, *self.width, generator=generator).bfloat16(),
        }
        torch.save(sample, self._file(sample_id))
        return sample

    def _file(self, sample_id: str) -> Path:
        return self.folder / f"{sample_id}.pt"

    @property
    def feature_bytes(self) -> int:
        """Of one sample."""
        return self.num_tokens * math.prod(self.width) * 2

    def read_dataset(self, batches: Sequence[Sequence[SampleRef]]) -> Tensor:
        """The features of the last batch."""
        for batch in batches:
            features_TLD = self.dataset.read_encoded(batch).features.decode()
        return features_TLD

    def read_files(self, batches: Sequence[Sequence[SampleRef]]) -> Tensor:
        """The features of the last batch."""
        size = len(batches[0]) * self.num_tokens
        features_TLD = torch.empty(size, *self.width, dtype=torch.bfloat16)
        input_ids_T, loss_mask_T = torch.empty(size, dtype=torch.int64), torch.empty(size, dtype=torch.bool)
        for batch in batches:
            for number, ref in enumerate(batch):
                rows = slice(number * self.num_tokens, (number + 1) * self.num_tokens)
                sample = torch.load(self._file(ref.sample_id), weights_only=True)
                features_TLD[rows].copy_(sample["features"])
                input_ids_T[rows].copy_(sample["input_ids"])
                loss_mask_T[rows].copy_(sample["loss_mask"])
        return features_TLD

    def require_equal(self, batch: Sequence[SampleRef]) -> None:
        assert torch.equal(self.read_dataset([batch]), self.read_files([batch])), "the two ways read different features"


def write_samples(path: Path, contract: FeatureContract, codec: Codec, samples: dict[str, dict[str, Tensor]], splits: list[str]) -> None:
    """A shard of finished samples: `input_ids` [T], `loss_mask` [T] and `features` bf16 [T, L, D] by sample id."""
    columns = {name: [sample[name].tolist() for sample in samples.values()] for name in ("input_ids", "loss_mask")}
    job = ShardJob(path, {"sample_id": list(samples), "split": splits} | columns, contract, codec, tokens_per_forward=1)
    forwards = [CapturedRows(sample["input_ids"], sample["features"], None) for sample in samples.values()]
    write_shard(job, forwards, CheckSample(0, Recomputed(torch.bfloat16, forwards[0].features_TLD, None)))


# ── codecs ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def codecs_of(arguments: argparse.Namespace) -> list[Codec]:
    """Every codec of the product, and those of the experiment's file."""
    codecs = [codec_named(name.value) for name in FeatureCodec]
    if arguments.experiment:
        spec = importlib.util.spec_from_file_location(arguments.experiment.stem, arguments.experiment)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        own = [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == module.__name__]
        codecs += [kind() for kind in own if issubclass(kind, Codec) and not inspect.isabstract(kind)]
    return codecs


def bench_codecs(arguments: argparse.Namespace) -> list[Row]:
    """Size, error on real activations, and speed on one thread. Errors are means over layers of |decoded - exact| / |exact|."""
    codecs = codecs_of(arguments)
    batches = _real_features(arguments)
    with threads(1):
        speeds = _codec_speeds(codecs, [batch_TLD.bfloat16() for batch_TLD in batches], arguments.rounds)
    return [
        {"codec": codec.name, "bytes per token": _token_bytes(codec, batches[0])} | _codec_errors(codec, batches) | speeds[codec.name]
        for codec in codecs
    ]


def _real_features(arguments: argparse.Namespace) -> list[Tensor]:
    """Features [T, L, D] in the target's dtype of forwards drawn at random from the plan, `--tokens` together or a little more."""
    config = settings_of(arguments, Stage.extract, "features.dir=/nowhere")  # a dataset of another codec is no obstacle
    job = extract.plan_job(config, load_samples(stage_dir(config, Stage.prepare)))
    capture = Capture(load_target(config.target, make_accelerator().device), job.contract.layer_ids)
    planned = [batch for shard in job.plan.shards for batch in shard.batches]
    found: list[Tensor] = []
    with extract.reproducible_threads(capture.target.device):
        for batch in random.Random(0).sample(planned, len(planned)):
            if sum(map(len, found)) < arguments.tokens:
                rows = [torch.tensor(ids) for ids in job.samples.dataset.select(batch)["input_ids"]]
                found.append(extract.forward(capture, rows).features_TLD.cpu())
    return found


def _token_bytes(codec: Codec, features_TLD: Tensor) -> int:
    layout = codec.token_layout(*features_TLD.shape[1:])
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in layout.values())


def _codec_errors(codec: Codec, batches: Sequence[Tensor]) -> dict[str, float]:
    error_LD, size_LD = torch.zeros(2, *batches[0].shape[1:], dtype=torch.float64)
    row_errors = []
    for exact_TLD in batches:
        difference_TLD = codec.decode(codec.encode(exact_TLD), torch.float32) - exact_TLD.float()
        error_LD += difference_TLD.double().square().sum(0)
        size_LD += exact_TLD.double().square().sum(0)
        row_errors.append(difference_TLD.norm(dim=-1) / exact_TLD.float().norm(dim=-1))
    inside_LD = torch.ones_like(size_LD).scatter_(1, size_LD.topk(min(NUM_OUTLIERS, size_LD.shape[1] - 1)).indices, 0)
    return {
        "error": float((error_LD.sum(1) / size_LD.sum(1)).sqrt().mean()),
        f"outside {NUM_OUTLIERS} outlier channels": float(((error_LD * inside_LD).sum(1) / (size_LD * inside_LD).sum(1)).sqrt().mean()),
        "median row": float(torch.cat(row_errors).median()),
    }


def _codec_speeds(codecs: Sequence[Codec], batches: Sequence[Tensor], rounds: int) -> dict[str, Row]:
    """GB of bf16 features per CPU second, both ways; a codec that hands on what it gets has no speed."""
    encoded = {codec.name: [codec.encode(batch_TLD) for batch_TLD in batches] for codec in codecs}
    outs = [torch.empty_like(batch_TLD) for batch_TLD in batches]

    def encode(codec: Codec) -> None:
        for batch_TLD in batches:
            codec.encode(batch_TLD)

    def decode(codec: Codec) -> None:
        for arrays, out_TLD in zip(encoded[codec.name], outs, strict=True):
            codec.decode(arrays, out=out_TLD)

    ways = {f"{codec.name} {way.__name__}": partial(way, codec) for codec in codecs for way in (encode, decode)}
    in_turns(ways, 1)  # what is compiled is compiled now
    gigabytes = sum(map(torch.Tensor.numel, batches)) * 2 / 1e9
    speeds = {name: statistics.median(gigabytes / cost.cpu for cost in found) for name, found in in_turns(ways, rounds).items()}
    for codec in codecs:
        if any(array.data_ptr() == batches[0].data_ptr() for array in encoded[codec.name][0].values()):
            del speeds[f"{codec.name} encode"]
    return {codec.name: {f"{way} GB/s": speeds.get(f"{codec.name} {way}") for way in ("encode", "decode")} for codec in codecs}


# ── tau ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def bench_tau(arguments: argparse.Namespace) -> list[Row]:
    """Held-out replay tau of a short training on the same features in every codec."""
    source = FeatureDataset(settings_of(arguments, Stage.train).features.dir)
    if source.manifest.codec != Bf16Codec.name:
        raise UserError(f"{source.folder} is stored in {source.manifest.codec}: what is encoded again has to be bf16")
    codecs = codecs_of(arguments)
    rows: dict[str, Row] = {codec.name: {"codec": codec.name} for codec in codecs}
    with tempfile.TemporaryDirectory(dir=arguments.run_dir) as folder:
        for codec in codecs:
            recode(source, codec, Path(folder) / codec.name)
        for seed in range(arguments.seeds):
            for codec in codecs:
                tau, core_minutes = _short_training(arguments, Path(folder), codec.name, seed)
                rows[codec.name] |= {f"tau, seed {seed}": tau, f"core-minutes, seed {seed}": core_minutes}
    return list(rows.values())


def recode(source: FeatureDataset, codec: Codec, folder: Path) -> None:
    """What stage=extract leaves with `codec`. Of an experiment, which no stage can read, the decoded features are stored in bf16."""
    stored = codec if codec.name in list(FeatureCodec) else Bf16Codec()
    folder.mkdir()
    dataclasses.replace(source.manifest, codec=stored.name).save(folder)
    refs = [*source.refs("train"), *source.refs("heldout")]
    for entry in source.manifest.shards:
        chosen = sorted((ref for ref in refs if ref.shard == entry.name), key=lambda ref: ref.row)
        samples = {ref.sample_id: _read_again(source, ref, codec, stored) for ref in chosen}
        write_samples(folder / entry.name, source.contract, stored, samples, [ref.split for ref in chosen])


def _read_again(source: FeatureDataset, ref: SampleRef, codec: Codec, stored: Codec) -> dict[str, Tensor]:
    sample = source.read(ref)
    features_TLD = sample.features_TLD if stored is codec else codec.decode(codec.encode(sample.features_TLD))
    return {"input_ids": sample.input_ids_T, "loss_mask": sample.loss_mask_T, "features": features_TLD}


def _short_training(arguments: argparse.Namespace, folder: Path, codec: str, seed: int) -> tuple[float, float]:
    """Replay tau after `--steps` steps, and the minutes of one core it took."""
    run_dir = folder / f"{codec}-{seed}"
    steps = [f"train.{name}={arguments.steps}" for name in ("max_steps", "evaluate_every_steps", "checkpoint_every_steps")]
    settings = [f"run_dir={run_dir}", f"features.dir={folder / codec}", f"seed={seed}", "evaluate.mode=replay", *steps]

    def train_and_replay() -> None:
        for stage in (Stage.train, Stage.evaluate):
            run_stage(settings_of(arguments, stage, *settings), [])

    cost = cost_of(train_and_replay)
    (replayed,) = json.loads((run_dir / "evaluate" / "report.json").read_text(encoding="utf-8"))["sets"]
    return replayed["tau"], cost.cpu / 60


# ── the command line ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def markdown(rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns), *([_shown(row.get(name)) for name in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(value: Any) -> str:
    match value:
        case None:
            return ""
        case float():
            return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"
        case int():
            return f"{value:,}"
    return str(value)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", type=Path, help="also write the rows, unrounded, to this file")
    run = argparse.ArgumentParser(add_help=False, parents=[shared])
    run.add_argument("--run-dir", default="runs/quickstart", help="where the quickstart's stages ran (default: %(default)s)")
    run.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="as the stages take them, on top of the quickstart's")
    experiment = argparse.ArgumentParser(add_help=False)
    experiment.add_argument("--experiment", type=Path, help="Python file with further codecs")

    command = commands.add_parser("extract", parents=[run], help="extraction against the bare forward, or its memory")
    command.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    command.add_argument("--memory", action="store_true", help="peak memory of a tenth of the samples and of all instead")
    command.set_defaults(bench=bench_extract)
    command = commands.add_parser("read", parents=[shared], help="shuffled reading against torch.save files")
    command.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    command.add_argument("--samples", type=int, default=48, help="of each shape (default: %(default)s)")
    command.add_argument("--tokens-per-batch", type=int, default=4096, help="default: %(default)s")
    command.add_argument("--folder", type=Path, help="where the files are made, 2.6 GB for a moment (default: the system's)")
    command.set_defaults(bench=bench_read)
    command = commands.add_parser("codecs", parents=[run, experiment], help="size, error and speed of every codec")
    command.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    command.add_argument("--tokens", type=int, default=20_000, help="real ones to encode (default: %(default)s)")
    command.set_defaults(bench=bench_codecs)
    command = commands.add_parser("tau", parents=[run, experiment], help="replay tau of a short training on every codec")
    command.add_argument("--seeds", type=int, default=2, help="how many trainings per codec, seeds 0 and following (default: %(default)s)")
    command.add_argument("--steps", type=int, default=30, help="of the optimizer (default: %(default)s)")
    command.set_defaults(bench=bench_tau)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the stages say is not part of the table
            rows = arguments.bench(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(markdown(rows))
    if arguments.json:
        write_json(arguments.json, {"command": arguments.command, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
