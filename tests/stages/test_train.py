"""The training stage on a tiny real target, from chats to checkpoints: refusals, kills, and any number of processes."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from omegaconf import OmegaConf
from process_groups import run_group
from safetensors.torch import load_file, save_file
from tiny_models import MASK_TOKEN_ID, make_qwen3, make_tokenizer

from dflash_train.blocks import build_blocks, draw_anchors, eligible_anchors
from dflash_train.checkpoint import best_checkpoint, latest_checkpoint, load_drafter, read_state
from dflash_train.config import (
    Config,
    DataConfig,
    DrafterConfig,
    EvaluateConfig,
    FeaturesConfig,
    LayerType,
    Loss,
    MixedPrecision,
    OptimizerKind,
    PositionWeights,
    Schedule,
    Stage,
    TargetConfig,
    TrainConfig,
    Weights,
)
from dflash_train.drafter import DFlashDraftModel, drafter_config
from dflash_train.errors import UserError
from dflash_train.features.reader import FeatureDataset, SampleRef
from dflash_train.optimizer import lr_at
from dflash_train.packing import RunPlan, Step
from dflash_train.stages import evaluate, extract, prepare, train
from dflash_train.target import load_target
from dflash_train.trainer import StepFigures, Trainer
from dflash_train.training_data import TrainingPack

ROOT = Path(__file__).parents[2]
STEPS = 20


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run folder with features of 24 short chats, a few of them held out."""
    folder = tmp_path_factory.mktemp("prepared")
    with (folder / "chats.jsonl").open("w") as file:
        for i in range(24):
            turns = [
                {"role": "user", "content": f"Count from {i}."},
                {"role": "assistant", "content": f"{i}, {i + 1}, {i + 2}." * (1 + i % 3)},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    config = Config(
        stage=Stage.train,
        run_dir=str(folder / "run"),
        target=TargetConfig(path=str(make_qwen3(folder / "target"))),
        data=DataConfig(files=[str(folder / "chats.jsonl")], heldout_share=0.2),
        features=FeaturesConfig(layer_ids=[1, 3], dir=str(folder / "run" / "extract"), shard_tokens=1600, tokens_per_forward=100),
        drafter=DrafterConfig(
            num_layers=2,
            layer_types=[LayerType.sliding_attention, LayerType.full_attention],
            sliding_window=16,
            block_size=4,
            mask_token_id=MASK_TOKEN_ID,
        ),
        train=TrainConfig(
            max_steps=STEPS,
            lr=3e-3,
            tokens_per_step=300,
            tokens_per_pack=100,
            anchors_per_document=8,
            loader_workers=0,
            log_every_steps=1,
            evaluate_every_steps=10,
            checkpoint_every_steps=7,
        ),
    )
    prepare.run(config)
    extract.run(config)
    return config


@pytest.fixture(scope="module")
def undisturbed(prepared: Config, tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = replace(prepared, run_dir=str(tmp_path_factory.mktemp("undisturbed")))
    train.run(config)
    return config


def with_train(config: Config, run_dir: Path, **settings: object) -> Config:
    return replace(config, run_dir=str(run_dir), train=replace(config.train, **settings))


def train_dir(config: Config) -> Path:
    return Path(config.run_dir) / "train"


def rows(config: Config, key: str) -> list[dict]:
    lines = (train_dir(config) / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if key in row]


def assert_same_end(config: Config, undisturbed: Config) -> None:
    """Equal bits in weights, optimizer, average and state; every step and evaluation once, with the same figures."""
    here, there = latest_checkpoint(train_dir(config)), latest_checkpoint(train_dir(undisturbed))
    assert here.name == there.name == f"step-{undisturbed.train.max_steps:08}"
    assert {path.name for path in here.iterdir()} == {path.name for path in there.iterdir()}
    for path in here.iterdir():
        assert path.read_bytes() == (there / path.name).read_bytes(), path.name
    assert (train_dir(config) / "best.json").read_bytes() == (train_dir(undisturbed) / "best.json").read_bytes()
    for key in ("loss", "coverage", "tau"):
        assert [(row["step"], row[key]) for row in rows(config, key)] == [(row["step"], row[key]) for row in rows(undisturbed, key)]


def arguments(config: Config) -> list[str]:
    """The settings of `config` as the command line takes them."""
    settings = {"run_dir": config.run_dir, "target.path": config.target.path, "stage": "train"}
    for section in ("features", "drafter", "train"):
        settings |= {f"{section}.{name}": value for name, value in vars(getattr(config, section)).items() if value is not None}
    shown = {name: f"[{','.join(map(str, value))}]" if isinstance(value, list) else value for name, value in settings.items()}
    return [f"{name}={value}" for name, value in shown.items()]


def test_learns_logs_and_keeps_the_best(undisturbed: Config) -> None:
    logged = rows(undisturbed, "loss")
    assert [row["step"] for row in logged] == list(range(1, STEPS + 1))
    assert logged[-1]["loss"] < 0.9 * logged[0]["loss"]
    assert {"epoch", "lr", "grad_norm", "tokens_per_second", "blocks_per_second", "train_anchor_tau", "skipped_steps"} < logged[0].keys()
    assert {"coverage", "fill", "seconds_left"} < logged[0].keys() and len(logged[0]["train_acceptance_by_position"]) == 3
    taus = {row["step"]: row["tau"] for row in rows(undisturbed, "tau")}
    assert list(taus) == [10, 20] and all({"tau_ci95", "anchor_tau"} < row.keys() for row in rows(undisturbed, "tau"))
    best = best_checkpoint(train_dir(undisturbed))
    drafter, state = load_drafter(best, "cpu")
    assert state["replay"]["tau"] == max(taus.values()) == state["best"]["tau"]
    assert (drafter.block_size, drafter.mask_token_id) == (4, MASK_TOKEN_ID)
    kept = {path.name for path in (train_dir(undisturbed) / "checkpoints").iterdir()}
    assert kept == {"step-00000014", "step-00000020", best.name}  # two newest and the best


def test_coverage_and_fill_are_those_of_the_samples(undisturbed: Config) -> None:
    settings, dataset = undisturbed.train, FeatureDataset(undisturbed.features.dir)
    refs = dataset.refs("train")
    eligible = [len(eligible_anchors(dataset.read(ref).loss_mask_T)) for ref in refs]
    plan = RunPlan(refs, undisturbed.seed, settings.tokens_per_step, settings.tokens_per_pack, settings.shuffle_shards)
    logged = rows(undisturbed, "coverage")
    for epoch in range(logged[-1]["epoch"]):
        last = [row for row in logged if row["epoch"] == epoch][-1]
        covered = sum(min(num, (epoch + 1) * settings.anchors_per_document) for num in eligible)
        assert last["coverage"] == pytest.approx(covered / sum(eligible), rel=1e-12)
    assert [row["coverage"] for row in logged] == sorted(row["coverage"] for row in logged) and logged[-1]["coverage"] == 1.0
    fills = [sum(ref.num_tokens for pack in step.packs for ref in pack) / len(step.packs) / 100 for step in plan.steps(0, STEPS)]
    assert [row["fill"] for row in logged] == pytest.approx(fills)


def test_the_console_tells_the_plan_and_every_evaluation(undisturbed: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train.run(with_train(undisturbed, tmp_path, max_steps=1, heldout_documents=2))
    out, err = capsys.readouterr()
    assert re.search(
        r"train: \d+ samples, \d+ eligible anchors; an epoch is \d+ packs of 100 tokens, \d\d\.\d% full, in \d steps; 1 steps in all", out
    )
    assert re.search(r"^step 1: held-out tau \d\.\d{3}, 95 % \[.*\], held-out anchor_tau .*, right up to slot k: \d+ \d+ \d+ %$", err, re.M)
    assert re.search(r"loss \d\.\d+, gradient .*, lr .*, .* tokens/s, \d+\.\d% covered, best tau 1", err)


def test_the_curves_are_drawn_and_a_failure_to_draw_ends_nothing(
    undisturbed: Config, prepared: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (train_dir(undisturbed) / "curves.png").read_bytes().startswith(b"\x89PNG")

    def fail(folder: Path) -> None:
        raise RuntimeError("no font\nfound")

    monkeypatch.setattr(train, "write_curves", fail)
    config = with_train(prepared, tmp_path, max_steps=2, evaluate_every_steps=1)
    train.run(config)
    assert [row["step"] for row in rows(config, "tau")] == [1, 2]
    warning = "warning: the curves of step 1 are not drawn, training goes on: no font found"
    assert warning in capsys.readouterr().err.splitlines()


def test_without_a_compiler_it_trains_all_the_same(
    prepared: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(function: object) -> None:
        raise RuntimeError("no C++ compiler\nlooked in PATH")

    monkeypatch.setattr(torch, "compile", fail)
    train.run(with_train(prepared, tmp_path, max_steps=1, compile=True))
    out, err = capsys.readouterr()
    assert "warning: train.compile=true, but torch.compile does not work here, training goes on without it: no C++ compiler\n" in err
    assert "train: attention tiled on cpu\n" in out and "train: 1 steps" in out


def test_samples_that_give_no_block_are_told(prepared: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    dataset = FeatureDataset(prepared.features.dir)
    lone = dataset.refs("train")[0]
    read = FeatureDataset.read_loss_mask
    monkeypatch.setattr(FeatureDataset, "read_loss_mask", lambda self, ref: read(self, ref) & False if ref == lone else read(self, ref))
    train.run(with_train(prepared, tmp_path, max_steps=1))
    assert "warning: 1 training samples have no two supervised tokens in a row: no block can be drawn from them" in capsys.readouterr().err


def test_stopped_between_two_checkpoints_it_ends_as_if_undisturbed(
    prepared: Config, undisturbed: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_train(prepared, tmp_path)
    take_step = Trainer.take_step

    def stop_at_17(self: Trainer, number: int, *rest: object) -> object:
        if number == 17:
            raise KeyboardInterrupt
        return take_step(self, number, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "take_step", stop_at_17)
        train.run(config)
    assert latest_checkpoint(train_dir(config)).name == "step-00000014"
    train.run(with_train(config, tmp_path, loader_workers=1))  # what does not decide the weights may change
    assert_same_end(config, undisturbed)
    train.run(config)  # nothing is left to do
    assert_same_end(config, undisturbed)


def forty_steps(prepared: Config, run_dir: Path, **settings: object) -> Config:
    """A run whose only checkpoints before the last are at steps 13, 26 and 39."""
    return with_train(prepared, run_dir, max_steps=40, checkpoint_every_steps=13, evaluate_every_steps=40, **settings)


def test_killed_at_step_13_of_40_it_ends_as_in_one_go(prepared: Config, tmp_path: Path) -> None:
    """Muon has AdamW beside it for the vectors, so this is every kind of optimizer state, and the average."""
    settings = {"optimizer": OptimizerKind.muon, "schedule": Schedule.wsd, "ema": 0.9}
    whole, config = (forty_steps(prepared, tmp_path / name, **settings) for name in ("whole", "killed"))
    train.run(whole)
    command = [sys.executable, "-m", "dflash_train", *arguments(config)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        while process.poll() is None and latest_checkpoint(train_dir(config)) is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert latest_checkpoint(train_dir(config)).name == "step-00000013", (tmp_path / "log").read_text()
    train.run(config)
    assert_same_end(config, whole)


def test_two_processes_see_the_losses_of_one(prepared: Config, undisturbed: Config, tmp_path: Path) -> None:
    config = with_train(prepared, tmp_path)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run([*launch, "-m", "dflash_train", *arguments(config)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    ours, theirs = ([row["loss"] for row in rows(side, "loss")] for side in (config, undisturbed))
    assert len(ours) == STEPS and ours == pytest.approx(theirs, rel=1e-5)
    ours, theirs = ([(row["coverage"], row["fill"]) for row in rows(side, "loss")] for side in (config, undisturbed))
    assert ours == theirs
    ours, theirs = ([(row["num_prompts"], row["num_verifications"] > 0) for row in rows(side, "tau")] for side in (config, undisturbed))
    assert ours == theirs  # every held-out sample is walked once
    train.run(with_train(config, tmp_path, checkpoint_every_steps=5))  # the checkpoint of two processes is one for any number


@pytest.fixture(scope="module")
def groups(prepared: Config, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Config]:
    """40 steps on 1, 2 and 3 processes, and runs on 1 and 2 that a signal to their last process stopped after step 17."""
    folder = tmp_path_factory.mktemp("groups")
    names = ("1", "2", "3", "1 SIGTERM", "2 SIGUSR1")
    configs = {name: forty_steps(prepared, folder / name.replace(" ", "-")) for name in names}
    for config in configs.values():
        Path(config.run_dir).mkdir()
        OmegaConf.save(OmegaConf.structured(config), Path(config.run_dir) / "settings.yaml")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, __file__, folder], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (folder / "output").write_text(done.stdout)
    return configs


def samples_by_step(config: Config) -> dict[str, list[str]]:
    """What all processes of a run read in each step."""
    found: dict[str, list[str]] = {}
    for path in Path(config.run_dir).glob("samples-*.json"):
        for step, ids in json.loads(path.read_text()).items():
            found[step] = sorted(found.get(step, []) + ids)
    return found


@pytest.mark.parametrize("size", ["2", "3"])
def test_several_processes_read_the_samples_and_see_the_losses_of_one(groups: dict[str, Config], size: str) -> None:
    alone = groups["1"]
    assert len(list(Path(groups[size].run_dir).glob("samples-*.json"))) == int(size)
    assert samples_by_step(groups[size]) == samples_by_step(alone) and len(samples_by_step(alone)) == 40
    ours, theirs = ([row["loss"] for row in rows(side, "loss")] for side in (groups[size], alone))
    assert len(ours) == 40 and ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("name", ["1 SIGTERM", "2 SIGUSR1"])
def test_a_signal_ends_the_run_whole_and_it_goes_on_from_there(groups: dict[str, Config], name: str) -> None:
    config = groups[name]
    checkpoints = train_dir(config) / "checkpoints"
    said = f"train: asked to stop, ended after step 17 of 40 with a checkpoint in {checkpoints}; the same command continues"
    assert (Path(config.run_dir).parent / "output").read_text().splitlines().count(said) == 1
    assert latest_checkpoint(train_dir(config)).name == "step-00000017"
    train.run(config)  # on one process, whatever wrote the checkpoint
    if name == "1 SIGTERM":
        assert_same_end(config, groups["1"])
    ours, theirs = ([row["loss"] for row in rows(side, "loss")] for side in (config, groups["1"]))
    assert len(ours) == 40 and ours == pytest.approx(theirs, rel=1e-5)


def test_a_finished_run_can_be_made_longer_and_not_shorter(
    prepared: Config, undisturbed: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(undisturbed.run_dir, tmp_path / "run")
    longer = with_train(undisturbed, tmp_path / "run", max_steps=24, max_nonfinite_steps=3)
    train.run(longer)
    said = "the learning rate schedule now spans 24 instead of 20 optimizer steps"
    assert capsys.readouterr().out.splitlines().count(said) == 1
    logged = rows(longer, "loss")
    assert [row["step"] for row in logged] == list(range(1, 25))
    assert logged[20]["lr"] == pytest.approx(lr_at(20, 24, 3e-3, 0.04, Schedule.cosine))
    assert read_state(latest_checkpoint(train_dir(longer)))["total_steps"] == 24
    train.run(longer)
    assert "schedule" not in capsys.readouterr().out
    with pytest.raises(UserError, match=r"train\.max_steps or train\.epochs give 23 optimizer steps, but the run has taken 24"):
        train.run(with_train(longer, tmp_path / "run", max_steps=23))
    with pytest.raises(UserError, match=r"train\.epochs give 2 optimizer steps, but the run has taken 24"):
        train.run(with_train(longer, tmp_path / "run", max_steps=None, epochs=0.5))


def test_too_many_steps_that_are_not_finite_end_the_run(
    prepared: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_train(prepared, tmp_path, max_steps=8, max_nonfinite_steps=2, ema=0.9)
    take_step = Trainer.take_step

    def without_some(self: Trainer, number: int, step: Step, packs: Iterator[TrainingPack], *rest: object) -> StepFigures:
        if number not in (2, 4, 6):
            return take_step(self, number, step, packs, *rest)

        def spoiled() -> Iterator[TrainingPack]:
            for pack in packs:
                pack.features_TLD.fill_(float("inf"))
                yield pack

        return take_step(self, number, step, spoiled(), *rest)

    monkeypatch.setattr(Trainer, "take_step", without_some)
    with pytest.raises(UserError, match=r"^3 steps of the run were skipped .* more than train\.max_nonfinite_steps=2: look at the samples"):
        train.run(config)
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: step ")]
    assert [line.split(":")[1] for line in warnings] == [" step 2 is skipped", " step 4 is skipped", " step 6 is skipped"]
    assert [row["nonfinite_steps"] for row in rows(config, "loss")] == [0, 1, 1, 2, 2, 3]
    assert [row["loss"] is None for row in rows(config, "loss")] == [False, True, False, True, False, True]
    train.run(with_train(config, tmp_path, max_nonfinite_steps=3))
    state = read_state(latest_checkpoint(train_dir(config)))
    assert (state["nonfinite_steps"], state["skipped_steps"]) == (3, 0)


def test_the_average_is_what_picks_the_best(prepared: Config, tmp_path: Path) -> None:
    config = with_train(prepared, tmp_path, max_steps=10, ema=0.999)
    train.run(config)
    best = best_checkpoint(train_dir(config))
    raw, averaged = (load_file(best / name) for name in ("model.safetensors", "ema.safetensors"))
    assert raw.keys() == averaged.keys() and {tensor.dtype for tensor in averaged.values()} == {torch.float32}
    assert any(not torch.equal(raw[name], averaged[name]) for name in raw)
    (row,) = rows(config, "tau")
    evaluate.run(replace(config, stage=Stage.evaluate, evaluate=EvaluateConfig(weights=Weights.auto)))
    report = json.loads((tmp_path / "evaluate" / "report.json").read_text())
    assert report["weights_kind"] == "ema" and report["sets"][0]["tau"] == row["tau"]


def test_resume_refuses_another_run_and_shows_both_sides(undisturbed: Config) -> None:
    run_dir = Path(undisturbed.run_dir)
    with pytest.raises(UserError, match=r"train\.lr: 0\.003 there, 0\.1 here"):
        train.run(with_train(undisturbed, run_dir, lr=0.1))
    with pytest.raises(UserError, match=r"seed: 0 there, 1 here"):
        train.run(replace(undisturbed, seed=1))
    with pytest.raises(UserError, match=r"train\.resume=false, but there is .*step-00000020"):
        train.run(with_train(undisturbed, run_dir, resume=False))


def test_features_of_another_target_or_contract_are_refused(prepared: Config, tmp_path: Path) -> None:
    def refused(config: Config, match: str) -> None:
        with pytest.raises(UserError, match=match):
            train.run(replace(config, run_dir=str(tmp_path / "run")))
        assert not (tmp_path / "run").exists()

    refused(replace(prepared, features=replace(prepared.features, layer_ids=[1, 2])), r"layer_ids: \[1, 2\] != \[1, 3\]")
    refused(replace(prepared, drafter=replace(prepared.drafter, mask_token_id=258)), "mask_token_id=258 is the target's eos token")

    copy = shutil.copytree(prepared.target.path, tmp_path / "target")
    other = replace(prepared, target=replace(prepared.target, path=str(copy)))
    tensors = load_file(copy / "model.safetensors")
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name] + 1}, copy / "model.safetensors", metadata={"format": "pt"})
    refused(other, r"target\.weights\.model\.safetensors: \w+ != \w+")
    shutil.copy(Path(prepared.target.path) / "model.safetensors", copy)
    make_tokenizer(copy, chat_template="{{ messages[0].content }}")
    refused(other, r"tokenizer\.chat_template: \w+ != \w+")


def test_without_a_trainable_sample_it_says_so(prepared: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "usable", lambda refs: [])
    with pytest.raises(UserError, match="no training sample with two supervised tokens"):
        train.run(with_train(prepared, tmp_path))


def test_a_mask_token_that_the_data_uses_is_one_line_from_a_loader_worker_too(prepared: Config, tmp_path: Path) -> None:
    dataset = FeatureDataset(prepared.features.dir)
    used = int(dataset.read(dataset.refs("train")[0]).input_ids_T[-4])  # of the answer, not a special token
    config = with_train(prepared, tmp_path, loader_workers=1)
    with pytest.raises(UserError, match=rf"^drafter\.mask_token_id={used} occurs in the data .*$"):
        train.run(replace(config, drafter=replace(config.drafter, mask_token_id=used)))


@pytest.fixture(scope="module")
def with_teacher_states(prepared: Config, tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = str(tmp_path_factory.mktemp("with_teacher_states"))
    config = replace(prepared, features=replace(prepared.features, teacher_state=True, dir=folder))
    extract.run(config)
    return config


@torch.no_grad()
def plain_loss(config: Config, step: Step, tv_share: float, alpha: float) -> float:
    """Of the untrained drafter: the whole target's logits, all slots at once, the sums and products one by one."""
    target, dataset = load_target(config.target, torch.device("cpu")), FeatureDataset(config.features.dir)
    torch.manual_seed(config.seed)
    layer_ids, vocabulary = dataset.contract.layer_ids, target.text_config.vocab_size
    drafter = DFlashDraftModel(drafter_config(config.drafter, layer_ids, target.text_config, vocabulary)).float()
    loss_sum = weight_sum = 0.0
    for ref in (ref for pack in step.packs for ref in pack):
        sample = dataset.read(ref)
        anchors = draw_anchors(sample.loss_mask_T, config.train.anchors_per_document, config.seed, step.epoch, ref.sample_id)
        context, blocks = build_blocks([(sample.input_ids_T, sample.loss_mask_T)], [anchors], drafter.block_size, MASK_TOKEN_ID)
        embeddings_AKD = target.model.get_input_embeddings()(blocks.input_ids_AK)
        hidden_AKD = drafter(sample.features_TLD, context, embeddings_AKD, blocks)
        q_AKV = target.model.get_output_embeddings()(hidden_AKD).softmax(-1)
        p_TV = target.logits(sample.teacher_state_TD).softmax(-1)
        for a, anchor in enumerate(anchors.tolist()):
            slots = [k for k in range(1, drafter.block_size) if blocks.weights_AK[a, k] > 0]
            kept = [(1 - alpha) * float(q_AKV[a, k, sample.input_ids_T[anchor + k]]) + alpha for k in slots]
            for i, k in enumerate(slots):
                p_V, q_V = p_TV[anchor + k - 1], q_AKV[a, k]
                weight = sum(math.prod(kept[: j + 1]) for j in range(i, len(slots)))
                kl, tv = float((p_V * (p_V / q_V).log()).sum()), float((p_V - q_V).abs().sum()) / 2
                loss_sum += weight * ((1 - tv_share) * kl + tv_share * tv)
                weight_sum += weight
    return loss_sum / weight_sum


def test_a_loss_against_the_target_is_the_plain_one(with_teacher_states: Config, tmp_path: Path) -> None:
    settings = {"loss": Loss.kl_tv, "tv_start": 0.0, "position_weights": PositionWeights.dpace, "dpace_alpha": 0.3}
    # with a rate this low, the drafter of the last step is still the first one
    config = with_train(with_teacher_states, tmp_path, **settings, max_steps=3, lr=1e-12, head_chunk_bytes=3 * 2 * 4 * 320 * 4)
    train.run(config)
    logged = rows(config, "loss")
    assert [row["tv_share"] for row in logged] == [0.0, 0.5, 1.0]
    split = config.train.tokens_per_step, config.train.tokens_per_pack, config.train.shuffle_shards
    steps = RunPlan(FeatureDataset(config.features.dir).refs("train"), config.seed, *split).steps(0, 3)
    for row, step in zip(logged, steps, strict=True):
        assert row["loss"] == pytest.approx(plain_loss(config, step, row["tv_share"], alpha=0.3), rel=1e-4)


@pytest.mark.parametrize("loss", [Loss.kl, Loss.tv])
def test_a_loss_against_the_target_falls(with_teacher_states: Config, tmp_path: Path, loss: Loss) -> None:
    config = with_train(with_teacher_states, tmp_path, loss=loss, max_steps=12, evaluate_every_steps=12)
    train.run(config)
    losses = [row["loss"] for row in rows(config, "loss")]
    assert losses[-1] < 0.9 * losses[0] and not any("tv_share" in row for row in rows(config, "loss"))


def test_mixed_precision_keeps_fp32_masters(prepared: Config, tmp_path: Path) -> None:
    config = with_train(prepared, tmp_path, max_steps=2, mixed_precision=MixedPrecision.bf16)
    AcceleratorState._reset_state(reset_partial_state=True)  # Accelerate allows one precision per process
    train.run(config)
    AcceleratorState._reset_state(reset_partial_state=True)
    tensors = load_file(latest_checkpoint(train_dir(config)) / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert any((tensor.bfloat16().float() != tensor).any() for tensor in tensors.values())


def _train_in_groups(folder: Path) -> None:
    """Runs each `folder/SIZE[-SIGNAL]/settings.yaml`; each process writes what it read in each step beside it."""
    for path in sorted(folder.glob("*/settings.yaml")):
        size, _, stop = path.parent.name.partition("-")
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path)))
        run_group(int(size), partial(_train_recorded, config, int(size), getattr(signal, stop, None)))


def _train_recorded(config: Config, size: int, stop: signal.Signals | None) -> None:
    rank, step, ids = int(os.environ.get("RANK", 0)), 0, defaultdict(list)
    take_step, read = Trainer.take_step, FeatureDataset.read_encoded

    def noted_step(self: Trainer, number: int, *rest: object) -> StepFigures:
        nonlocal step
        step = number
        if stop is not None and number == 17 and rank == size - 1:
            os.kill(os.getpid(), stop)
        return take_step(self, number, *rest)

    def noted_read(self: FeatureDataset, refs: list[SampleRef], *rest: object, **more: object) -> object:
        ids[step] += [ref.sample_id for ref in refs]
        return read(self, refs, *rest, **more)

    Trainer.take_step, FeatureDataset.read_encoded = noted_step, noted_read
    train.run(config)
    (Path(config.run_dir) / f"samples-{rank}.json").write_text(json.dumps(ids))


if __name__ == "__main__":
    _train_in_groups(Path(sys.argv[1]))
