"""The stage on a tiny target: regenerate, prepare and extract for real, a drafter fitted to the held-out answers, then every mode."""

import json
import os
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_drafters import LAYER_IDS, fit, make_drafter
from tiny_models import MASK_TOKEN_ID, make_qwen3

from dflash_train.checkpoint import record_best, save_checkpoint
from dflash_train.config import (
    Config,
    DataConfig,
    DrafterConfig,
    Dtype,
    EvaluateConfig,
    EvaluateMode,
    FeaturesConfig,
    LayerType,
    RegenerateConfig,
    Stage,
    TargetConfig,
    Weights,
)
from dflash_train.ema import Ema
from dflash_train.errors import UserError
from dflash_train.features.reader import FeatureDataset
from dflash_train.optimizer import make_optimizer
from dflash_train.stages import evaluate, extract, prepare, regenerate
from dflash_train.target import load_config, load_ends

K = 4
LIMIT = 24


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A run that stands before stage=evaluate."""
    folder = tmp_path_factory.mktemp("run")
    rows = [{"id": f"p{i}", "prompt": f"What is {i} and {i + 3}?"} for i in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config(
        stage=Stage.evaluate,
        run_dir=str(folder / "run"),
        target=TargetConfig(path=str(make_qwen3(folder / "target")), dtype=Dtype.float32),
        data=DataConfig(heldout_share=0.4),
        regenerate=RegenerateConfig(prompts=[str(folder / "prompts.jsonl")], max_new_tokens=LIMIT),
        features=FeaturesConfig(layer_ids=list(LAYER_IDS), dir=str(folder / "run" / "extract"), shard_tokens=4096, tokens_per_forward=256),
        drafter=DrafterConfig(
            num_layers=2,
            layer_types=[LayerType.sliding_attention, LayerType.full_attention],
            sliding_window=6,
            block_size=K,
            mask_token_id=MASK_TOKEN_ID,
        ),
        evaluate=EvaluateConfig(mode=EvaluateMode.both, max_new_tokens=LIMIT),
    )
    for stage in (regenerate, prepare, extract):
        stage.run(config)
    _save_fitted_drafter(config, folder / "run" / "train")
    return config


def _save_fitted_drafter(config, train_dir):
    features = FeatureDataset(config.features.dir)
    heldout = [features.read(ref) for ref in features.refs("heldout")]
    ends = load_ends(config.target, torch.device("cpu"), torch.float32)
    drafter = make_drafter(config.drafter.resolved_layer_types, 6, K, load_config(config.target))
    fit(drafter, ends, heldout, steps=40)
    train_dir.mkdir(parents=True)
    state = {"step": 20, "contract": features.contract.to_dict()}
    save_checkpoint(train_dir, drafter, make_optimizer(drafter, weight_decay=0.0), state)
    record_best(train_dir, {"step": 20, "tau": 1.5})
    ema = Ema(make_drafter(config.drafter.resolved_layer_types, 6, K, load_config(config.target)), decay=0.9)
    save_checkpoint(train_dir, drafter, make_optimizer(drafter, weight_decay=0.0), state | {"step": 30}, ema)  # averages of no training


def run(config, **changes):
    config = replace(config, evaluate=replace(config.evaluate, **changes))
    evaluate.run(config)
    return json.loads(Path(config.run_dir, "evaluate", "report.json").read_text())


def test_replay_and_decoding_agree(config, capsys):
    report = run(config)
    replayed, decoded = report["sets"]
    assert (replayed["prompts"], replayed["mode"], decoded["mode"]) == ("heldout", "replay", "decode")
    assert replayed["answers_from_target"] == "true"
    num = decoded["answers_compared"]
    assert num == replayed["num_answers"] == len(FeatureDataset(config.features.dir).refs("heldout")) > 1
    assert decoded["answers_equal"] == decoded["stored_answers_equal"] == num
    assert decoded["tau"] > 1.3, "the drafter is too bad to tell anything"
    assert abs(decoded["replay_difference_percent"]) < 1  # features stored in bf16
    assert decoded["replay_tau"] == replayed["tau"]
    assert min(decoded["tokens_per_second_plain"], decoded["tokens_per_second_speculative"]) > 0
    assert report["step"] == 20 and report["block_size"] == K and report["dtype"] == "float32"
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{num} answers: {num} equal plain greedy decoding token for token, 0 near-ties, 0 different"


RUN_AS_PROCESS = """
import sys
from omegaconf import OmegaConf
from dflash_train.config import Config
from dflash_train.stages import evaluate

evaluate.run(OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(sys.argv[1]))))
"""


def test_two_processes_count_every_prompt_once(config, tmp_path):
    alone = run(config)
    (tmp_path / "evaluate_once.py").write_text(RUN_AS_PROCESS)
    script = [tmp_path / "evaluate_once.py", f"{config.run_dir}/evaluate/config.yaml"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *script]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=os.environ | {"PYTHONPATH": "."}, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr.decode()
    together = json.loads(Path(config.run_dir, "evaluate", "report.json").read_text())
    for one in (alone, together):
        for measured in one["sets"]:
            for speed in ("tokens_per_second_plain", "tokens_per_second_speculative"):
                measured.pop(speed, None)
    assert together == alone


def test_replay_alone_does_not_load_the_target(config, monkeypatch):
    monkeypatch.setattr(evaluate, "load_target", lambda *_: pytest.fail("the target was loaded"))
    (only,) = run(config, mode=EvaluateMode.replay, max_prompts=2)["sets"]
    assert only["mode"] == "replay" and only["num_prompts"] == 2


def test_the_weights_that_were_measured_are_named(config):
    settings = {"mode": EvaluateMode.replay, "checkpoint": "latest"}
    measured = {wanted: run(config, **settings, weights=wanted) for wanted in (Weights.auto, Weights.ema, Weights.raw)}
    assert [report["weights_kind"] for report in measured.values()] == ["ema", "ema", "raw"]
    assert measured["auto"] == measured["ema"]
    assert measured["ema"]["weights"] != measured["raw"]["weights"]
    assert measured["ema"]["sets"][0]["tau"] < measured["raw"]["sets"][0]["tau"]
    with pytest.raises(UserError, match=r"evaluate\.weights=ema, but .*step-00000020 holds no moving average"):
        run(config, weights=Weights.ema)


def test_prompts_from_files(config, tmp_path):
    good, bad = '{"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}', "{"
    (tmp_path / "few.jsonl").write_text(f'{good}\n{bad}\n{{"prompt": "How?"}}\n')
    (decoded,) = run(config, mode=EvaluateMode.decode, prompts=[str(tmp_path / "few.jsonl")])["sets"]
    assert decoded["prompts"] == "few"
    assert decoded["answers_compared"] == decoded["answers_equal"] == 2
    assert "stored_answers_equal" not in decoded and "replay_tau" not in decoded
    (rejected,) = Path(config.run_dir, "evaluate", "rejected.jsonl").read_text().splitlines()
    assert json.loads(rejected)["line"] == 2


def test_a_prompt_without_room_for_an_answer_is_named(config, tmp_path):
    (tmp_path / "long.jsonl").write_text(json.dumps({"id": "endless", "prompt": "a" * 5000}) + "\n")
    with pytest.raises(UserError, match="prompt endless has .* does not fit into the target's 4096 positions"):
        run(config, mode=EvaluateMode.decode, prompts=[str(tmp_path / "long.jsonl")])


def test_a_checkpoint_of_other_layers_is_refused(config):
    other = deepcopy(config)
    other.features.layer_ids = [1, 2]
    with pytest.raises(UserError, match=r"layer_ids: \[1, 3\] != \[1, 2\]"):
        run(other)


def test_no_heldout_sample_is_told(config, tmp_path, monkeypatch):
    monkeypatch.setattr(FeatureDataset, "refs", lambda self, split: [])
    with pytest.raises(UserError, match="data.heldout_share"):
        run(config, mode=EvaluateMode.replay)
