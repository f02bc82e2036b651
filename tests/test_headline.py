"""The headline on CPU: the shipped recipe of Qwen3.6-27B, with only sizes and paths overridden, on a tiny random target of its shape.

64 layers of which every fourth has full attention, a multimodal wrapper, 248320 embedding rows, and a mask token past the tokenizer.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import make_qwen35_wrapper
from transformers import AutoConfig

from dflash_train.capture import Capture
from dflash_train.config import Dtype, TargetConfig
from dflash_train.layers import LayerIds
from dflash_train.target import load_target

ROOT = Path(__file__).parents[1]
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
OF_THE_SIZES = {"hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = SIZES | {"num_hidden_layers": 64, "vocab_size": 248320}
    rope = {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25, "mrope_section": [1, 0, 0]}
    return make_qwen35_wrapper(tmp_path_factory.mktemp("target"), **sizes, rope_parameters=rope)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    chats = [
        {"messages": [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": f"{word}, {word} and {word}."}]}
        for word in ("one", "two", "three", "four", "five", "six", "seven", "eight")
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return folder


def stage(name: str, target: Path, run_dir: Path, *more: str) -> subprocess.CompletedProcess:
    overrides = [f"target.path={target}", "target.dtype=float32", f"data.files=[{run_dir}/chats.jsonl]", f"run_dir={run_dir}"]
    overrides += [f"drafter.{key}={value}" for key, value in SIZES.items() if key != "hidden_size"]
    overrides += ["data.heldout_share=0.3", "features.tokens_per_forward=512", "features.shard_tokens=8192"]
    overrides += ["train.epochs=1", "train.tokens_per_step=256", "train.tokens_per_pack=256"]
    overrides += ["train.mixed_precision=no", "train.loader_workers=0"]
    command = [sys.executable, "-m", "dflash_train", f"stage={name}", "recipe=qwen3_6_27b", *overrides, *more]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ)


def test_runs_from_chats_to_export(target: Path, run_dir: Path) -> None:
    for name in ("prepare", "extract", "train", "evaluate", "export"):
        result = stage(name, target, run_dir)
        assert result.returncode == 0, f"{name}\n{result.stdout}\n{result.stderr}"
    (replayed,) = json.loads((run_dir / "evaluate" / "report.json").read_text())["sets"]
    assert replayed["mode"] == "replay" and 1 <= replayed["tau"] <= 16 and replayed["num_verifications"] > 0

    exported = json.loads((run_dir / "export" / "config.json").read_text())
    published = json.loads((ROOT / "tests" / "data" / "zlab_qwen3_6_27b.json").read_text())
    assert exported.keys() == published.keys()
    for key in published.keys() - OF_THE_SIZES:
        assert exported[key] == published[key], key
    assert {key: exported[key] for key in SIZES} == SIZES


def test_layer_64_is_refused_by_the_name_of_the_layer_it_is(target: Path, run_dir: Path) -> None:
    result = stage("extract", target, run_dir, "features.layer_ids=[1,16,31,46,61,64]")
    assert result.returncode == 1
    (line,) = result.stderr.strip().splitlines()
    assert "64 is not a layer of this target (0..63), it is another convention's name for the output of layer 63" in line


def test_65_hidden_states_of_64_layers(target: Path) -> None:
    assert AutoConfig.from_pretrained(target).get_text_config().num_hidden_layers == 64
    loaded = load_target(TargetConfig(path=str(target), dtype=Dtype.float32), torch.device("cpu"))
    ids_BT = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(0))
    hidden_states = loaded.model(ids_BT, output_hidden_states=True).hidden_states
    assert len(hidden_states) == 65
    layer_ids = LayerIds((1, 16, 31, 46, 61), 64)
    features_BTLD = Capture(loaded, layer_ids).run(ids_BT, torch.ones_like(ids_BT)).features_BTLD
    for plane, index in enumerate(layer_ids.hf_hidden_states):
        torch.testing.assert_close(features_BTLD[:, :, plane], hidden_states[index])
