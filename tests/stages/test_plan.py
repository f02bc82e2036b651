"""stage=plan: every recipe from a config alone, real counts where there are some, and one line where something does not fit."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from tiny_models import MASK_TOKEN_ID, make_llama, make_qwen3
from transformers import LlamaConfig, PreTrainedConfig, Qwen3_5Config, Qwen3Config

from dflash_train import cli
from dflash_train.cli import package_root, register_recipes, to_config
from dflash_train.config import (
    Config,
    DataConfig,
    DrafterConfig,
    Dtype,
    FeatureCodec,
    FeaturesConfig,
    LayerType,
    PlanConfig,
    Stage,
    TargetConfig,
    TrainConfig,
)
from dflash_train.errors import UserError
from dflash_train.features.reader import FeatureDataset
from dflash_train.layers import LayerIds
from dflash_train.packing import RunPlan, usable
from dflash_train.stages import extract, plan, prepare
from dflash_train.target import target_size

ROOT = Path(__file__).parents[2]
RECIPES = register_recipes()
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
GB = 1e9


def config_of(recipe: str) -> PreTrainedConfig:
    """A config of the recipe's kind of target, with its layers and rows and little else."""
    match recipe:
        case "quickstart":
            return LlamaConfig(**SIZES, num_hidden_layers=30, vocab_size=49152, tie_word_embeddings=True)
        case "qwen3_6_27b":
            linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
            vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
            return Qwen3_5Config(text_config=SIZES | linear | {"num_hidden_layers": 64, "vocab_size": 248320}, vision_config=vision)
        case "llama3_1_8b":
            return LlamaConfig(**SIZES, num_hidden_layers=32, vocab_size=128256)
        case _:
            return Qwen3Config(**SIZES, num_hidden_layers=36, vocab_size=151936)


def composed(recipe: str, *overrides: str) -> Config:
    with initialize_config_dir(version_base="1.3", config_dir=str(package_root() / "conf")):
        return to_config(compose("config", [f"recipe={recipe}", "stage=plan", *overrides]))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_plans_from_a_config_without_weights(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config_of(recipe).save_pretrained(tmp_path / "target")
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["config.json"]
    overrides = [f"target.path={tmp_path}/target", f"run_dir={tmp_path}/run", "plan.samples=1000", "plan.tokens_per_sample=300"]
    plan.run(composed(recipe, *overrides, "plan.device_memory_bytes=180e9", "plan.device_flops=1e15", "plan.disk_bytes=1e12"))
    out = capsys.readouterr().out
    for needed in ("frozen embedding and head", "head chunk", "still to be written", "time in all", "300,000 tokens: assumed"):
        assert needed in out, needed
    assert not (tmp_path / "run").exists()


# ── figures by hand ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("target"))


def plan_config(run_dir: Path, target: Path, **settings: Any) -> Config:
    """20 samples of 50 tokens, of which 4 are held out: 16 packs of 2, in steps of 4 packs, on 1 process."""
    return Config(
        stage=Stage.plan,
        run_dir=str(run_dir),
        target=TargetConfig(path=str(target), dtype=Dtype.float32),
        data=DataConfig(heldout_share=0.2),
        plan=PlanConfig(**{"samples": 40, "tokens_per_sample": 50, "device_memory_bytes": 4 * GB, "disk_bytes": GB} | settings),
        features=FeaturesConfig(layer_ids=[1, 3], dir=str(run_dir / "extract"), shard_tokens=800, tokens_per_forward=50),
        drafter=DrafterConfig(
            num_layers=2,
            layer_types=[LayerType.sliding_attention, LayerType.full_attention],
            sliding_window=16,
            block_size=4,
            mask_token_id=MASK_TOKEN_ID,
        ),
        train=TrainConfig(epochs=3, tokens_per_step=400, tokens_per_pack=110, anchors_per_document=8),
    )


def shape_of(config: Config, target: Path) -> plan.DrafterShape:
    text = Qwen3Config.from_pretrained(target)
    drafter = plan.drafter_config(config.drafter, LayerIds((1, 3), 6), text, text.vocab_size)
    return plan.drafter_shape(drafter, num_features=2, tied_tables=False)


def test_assumed_data_by_hand(tmp_path: Path, target: Path) -> None:
    config = plan_config(tmp_path, target)
    data = plan.find_data(config, shape_of(config, target))
    assert (data.num_samples, data.num_tokens, data.missing_tokens) == (40, 2000, 2000)
    assert data.largest_packs == (plan.PackShape(100, 16),)  # two documents of 50 tokens, 8 blocks of each
    assert (data.packs_per_step, data.tokens_per_step, data.blocks_per_step) == (4, 400, 64)
    assert data.num_steps == 3 * 4  # 32 training samples, 8 of them in a step
    assert data.keys[None] == 24 and data.keys[16] == (sum(range(16)) + 33 * 16) / 49
    assert plan.find_data(replace(config, train=replace(config.train, max_steps=7)), shape_of(config, target)).num_steps == 7


def test_a_sample_is_cut_and_a_long_one_makes_a_pack_of_its_own(tmp_path: Path, target: Path) -> None:
    config = plan_config(tmp_path, target, tokens_per_sample=10_000)
    data = plan.find_data(config, shape_of(config, target))
    assert data.num_tokens == 40 * 4096 and data.largest_packs == (plan.PackShape(4096, 8),) and data.packs_per_step == 1


def test_the_target_s_size(tmp_path: Path, target: Path) -> None:
    # a layer: q and o 32x32, k and v 32x16, three matrices 32x64, norms 32, 32, 8 and 8
    layer = 2 * 1024 + 2 * 512 + 3 * 2048 + 80
    size = target_size(TargetConfig(path=str(target), dtype=Dtype.bfloat16), LayerIds((1, 3), 6))
    assert size.num_computed == 4 * layer and size.num_parameters == 6 * layer + 2 * 320 * 32 + 32 and size.value_bytes == 2
    tied = target_size(TargetConfig(path=str(make_llama(tmp_path))), LayerIds((1,), 6))
    assert tied.num_parameters == 6 * (layer - 16) + 320 * 32 + 32 and tied.value_bytes == 4


def test_tables_by_hand(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture) -> None:
    plan.run(plan_config(tmp_path, target, device_flops=1e6, utilisation=0.5, num_processes=2))
    out = re.sub(" +", " ", capsys.readouterr().out)
    per_token = 2 * 4 * 9296
    for row in (
        "extraction │ 2,000 tokens │ 74.37 kFLOP per token",
        "training │ 12 steps",
        "a step │ 400 tokens │ 64 blocks, 4 packs",
        "features in bf16 │ 266.3 kB │ 133 bytes per token, the chosen codec",  # 2 x 32 values, id and mask; 41 offsets
        "features in fp8 │ 154.3 kB │ 77 bytes per token",  # 2 scales of 4 bytes
        f"time of extraction │ {plan.duration_text(per_token * 2000 / 1e6)} │ 2 of 1 MFLOP per second at 50%",
        "DDP buckets",
        "of 1 GB free",
    ):
        assert row in out, f"{row}\n{out}"


# ── real data ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    with path.open("w") as file:
        for i in range(24):
            answer = f"{i}, {i + 1}, {i + 2}." * (1 + i % 3)
            turns = [{"role": "user", "content": f"Count from {i}."}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def test_real_counts_take_the_place_of_assumed_ones(tmp_path: Path, target: Path, chats: Path, capsys: pytest.CaptureFixture) -> None:
    config = replace(plan_config(tmp_path, target), data=DataConfig(files=[str(chats)], heldout_share=0.2))
    shape = shape_of(config, target)
    prepare.run(config)
    capsys.readouterr()
    of_samples = plan.find_data(config, shape)
    said = capsys.readouterr().err
    assert "warning: plan.samples=40 has no effect" in said and "warning: plan.tokens_per_sample=50 has no effect" in said
    assert of_samples.num_samples == of_samples.missing_samples == 24 and "the samples in" in of_samples.source

    extract.run(config)
    of_features = plan.find_data(config, shape)
    assert "the features in" in of_features.source and (of_features.missing_samples, of_features.missing_tokens) == (0, 0)
    dataset = FeatureDataset(config.features.dir)
    train = config.train
    refs = usable(dataset.refs("train"))
    real = RunPlan(refs, config.seed, train.tokens_per_step, train.tokens_per_pack, train.shuffle_shards)
    packs = [pack for step in real.epoch(0) for pack in step]
    for data in (of_samples, of_features):
        assert data.num_tokens == sum(ref.num_tokens for split in ("train", "heldout") for ref in dataset.refs(split))
        assert data.num_steps == real.num_steps(3) and data.packs_per_step == len(packs) / len(real.epoch(0))
        assert data.blocks_per_step * len(real.epoch(0)) == sum(min(8, ref.num_supervised - 1) for ref in refs)
        assert data.largest_packs[0].num_tokens == max(sum(ref.num_tokens for ref in pack) for pack in packs)

    lost = next(iter(sorted(Path(config.features.dir).glob("shard-*"))))
    lost.unlink()
    partly = plan.find_data(config, shape)
    assert "1 shards of their features are missing" in partly.source and 0 < partly.missing_tokens < partly.num_tokens
    plan.run(config)


# ── what does not fit, and nonsense ──────────────────────────────────────────────────────────────────────────────────────────────────────


def refused(config: Config) -> str:
    with pytest.raises(UserError) as told:
        plan.run(config)
    assert "\n" not in str(told.value)
    return str(told.value)


def test_memory_that_does_not_fit_comes_with_a_value_that_does(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture) -> None:
    config = plan_config(tmp_path, target, tokens_per_sample=2000)
    config = replace(config, train=replace(config.train, tokens_per_pack=2000, tokens_per_step=8000, anchors_per_document=1000))
    small = replace(config, plan=replace(config.plan, device_memory_bytes=1.1 * GB))
    message = refused(small)
    assert "in all" in capsys.readouterr().out  # the tables come first
    value = re.search(r"lower train.anchors_per_document=1000, for example to (\d+), or train.tokens_per_pack=2000", message)
    assert value and "plan.device_memory_bytes=1.1e+09" in message and "extraction" not in message
    plan.run(replace(small, train=replace(small.train, anchors_per_document=int(value[1]))))


def test_a_device_without_room_for_anything(tmp_path: Path, target: Path) -> None:
    message = refused(plan_config(tmp_path, target, device_memory_bytes=1e9))
    assert "extraction needs" in message and "even a pack of one token does not fit: lower drafter.num_layers=2" in message


def test_a_disk_that_is_too_small(tmp_path: Path, target: Path) -> None:
    config = plan_config(tmp_path, target, samples=100_000)
    message = refused(replace(config, plan=replace(config.plan, disk_bytes=5e8)))
    assert "free disk (plan.disk_bytes): set features.codec=fp8, take fewer samples or features.layer_ids" in message
    plan.run(replace(config, plan=replace(config.plan, disk_bytes=5e8), features=replace(config.features, codec=FeatureCodec.fp8)))


def test_checkpoints_that_are_too_large(tmp_path: Path, target: Path) -> None:
    config = plan_config(tmp_path, target, disk_bytes=4e5)
    assert "lower train.keep_checkpoints=2 or choose another run_dir" in refused(config)
    for step in (1, 2, 3, 4):
        (tmp_path / "train" / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
    plan.run(config)  # those that are there take no more room


def test_idle_processes_are_told(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture) -> None:
    plan.run(plan_config(tmp_path, target, num_processes=8))
    assert "a step has 4 packs for plan.num_processes=8, so 50% of the processes' time is idle" in capsys.readouterr().err
    assert plan.busy_share(4, 8) == 0.5 and plan.busy_share(4, 3) == 2 / 3 and plan.busy_share(4, 2) == 1


@pytest.mark.parametrize("missing", ["samples", "tokens_per_sample"])
def test_without_data_their_amount_has_to_be_said(tmp_path: Path, target: Path, missing: str) -> None:
    assert f"plan.{missing} is missing: neither {tmp_path}" in refused(plan_config(tmp_path, target, **{missing: None}))


@pytest.mark.parametrize(
    ("override", "status", "said"),
    [
        ("plan.samples=0", 1, "plan.samples=0 must be greater than 0"),
        ("plan.tokens_per_sample=1", 1, "plan.tokens_per_sample=1 must be at least 2"),
        ("plan.utilisation=0", 1, "plan.utilisation=0.0 must be above 0 and at most 1"),
        ("plan.utilisation=40", 1, "plan.utilisation=40.0 must be above 0 and at most 1"),
        ("plan.num_processes=0", 1, "plan.num_processes=0 must be greater than 0"),
        ("plan.device_memory_bytes=-1", 1, "plan.device_memory_bytes=-1.0 must be greater than 0"),
        ("plan.device_flops=nan", 1, "plan.device_flops=nan must be greater than 0"),
        ("plan.disk_bytes=180GB", 2, "plan.disk_bytes"),
        ("plan.memory=1", 2, "plan.memory is not a setting"),
    ],
)
def test_nonsense_is_one_line(override: str, status: int, said: str) -> None:
    command = [sys.executable, "-m", "dflash_train", "stage=plan", "recipe=quickstart", override]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == status and said in line, line


def test_all_runs_neither_plan_nor_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(cli.subprocess, "run", lambda command: ran.append(command[3]) or subprocess.CompletedProcess(command, 0))
    cli.run_stage(composed("quickstart", "stage=all"), [])
    assert ran == [f"stage={name}" for name in ("prepare", "extract", "train", "evaluate", "export")]
