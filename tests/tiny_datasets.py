"""Prepared samples and feature datasets for a tiny target, as stage=prepare and stage=extract leave them."""

import random
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import torch
from safetensors.torch import load_file

from dflash_train.config import Config, DrafterConfig, Dtype, FeaturesConfig, Stage, TargetConfig
from dflash_train.features.shard import open_shard, read_header, sample_checksum
from dflash_train.samples import save_samples
from dflash_train.target import load_tokenizer, tokenizer_identity


def extract_config(run_dir: Path, target: Path, **features: Any) -> Config:
    """Settings of a run with layer ids [1, 3], about 256 tokens per shard and 16 per forward."""
    settings = {"layer_ids": [1, 3], "dir": str(run_dir / "extract"), "shard_tokens": 256, "tokens_per_forward": 16}
    return Config(
        stage=Stage.extract,
        run_dir=str(run_dir),
        target=TargetConfig(path=str(target), dtype=Dtype.float32),
        features=FeaturesConfig(**settings | features),
        drafter=DrafterConfig(mask_token_id=300),
    )


def extract_command(config: Config, *launcher: str) -> list[str]:
    """The command line of `stage=extract` with the settings of `config`; `launcher` instead of plain Python."""
    features = config.features
    return [
        *(launcher or (sys.executable,)),
        "-m",
        "dflash_train",
        "stage=extract",
        f"run_dir={config.run_dir}",
        f"target.path={config.target.path}",
        "target.dtype=float32",
        f"features.layer_ids={features.layer_ids}".replace(" ", ""),
        f"features.teacher_state={str(features.teacher_state).lower()}",
        f"features.dir={features.dir}",
        f"features.shard_tokens={features.shard_tokens}",
        f"features.tokens_per_forward={features.tokens_per_forward}",
        "drafter.mask_token_id=300",
        "train.max_steps=1",
    ]


def make_samples(run_dir: Path, target: Path, num_samples: int = 40, longest: int = 40) -> None:
    """Random ids of 5 to `longest` tokens, the last two thirds supervised, every fifth sample held out."""
    draw = random.Random(0)
    rows: dict[str, list[Any]] = {"sample_id": [], "conversation_id": [], "split": [], "input_ids": [], "loss_mask": []}
    for number in range(num_samples):
        length = draw.randrange(5, longest + 1)
        rows["sample_id"].append(f"sample-{number}")
        rows["conversation_id"].append(f"conversation-{number}")
        rows["split"].append("train" if number % 5 else "heldout")
        rows["input_ids"].append([draw.randrange(256) for _ in range(length)])
        rows["loss_mask"].append([position >= length // 3 for position in range(length)])
    columns = {
        "sample_id": datasets.Value("string"),
        "conversation_id": datasets.Value("string"),
        "split": datasets.Value("string"),
        "input_ids": datasets.List(datasets.Value("int32")),
        "loss_mask": datasets.List(datasets.Value("bool")),
    }
    tokenizer = tokenizer_identity(load_tokenizer(TargetConfig(path=str(target))), {})
    dataset = datasets.Dataset.from_dict(rows, features=datasets.Features(columns))
    folder = run_dir / "prepare"
    folder.mkdir(parents=True)
    save_samples(folder, dataset, {"tokenizer": tokenizer, "answers_from_target": "unknown"})


def rewrite_shard(path: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Changes the arrays of a shard as a faulty writer would have written them: with the right checksums."""
    metadata = read_header(path).metadata
    arrays = load_file(path)
    edit(arrays)
    offsets = arrays["offsets"].tolist()
    metadata["sample_checksums"] = [
        sample_checksum(begin, {name: array[begin:end] for name, array in arrays.items() if name != "offsets"})
        for begin, end in pairwise(offsets)
    ]
    with open_shard(path, {name: (array.dtype, tuple(array.shape)) for name, array in arrays.items()}, metadata) as file:
        for name, array in arrays.items():
            file.write_rows(name, 0, array)
        file.finish(metadata)
