"""Peak memory of one real optimizer step, in a process of its own: `python tests/step_memory.py SHAPE fp32|bf16` prints one line of JSON.

`base_bytes` is resident before anything of the step exists, imports and one small product included; `peak_bytes` is the highest of the
process after two steps. Both are Linux's own counts (VmRSS, VmHWM).
"""

import json
import sys
from itertools import repeat
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import Qwen3Config

from dflash_train.blocks import build_blocks
from dflash_train.config import DrafterConfig, LayerType, TrainConfig
from dflash_train.drafter import DFlashDraftModel, drafter_config
from dflash_train.layers import LayerIds
from dflash_train.loss import head_chunk_bytes
from dflash_train.optimizer import make_optimizer
from dflash_train.packing import Step
from dflash_train.target import TargetEnds
from dflash_train.trainer import Trainer
from dflash_train.training_data import TrainingPack

SHAPES = {
    "S": {
        "documents": (4, 512, 32),  # number, tokens of each, anchors of each
        "layers": "ssf",
        "window": 128,
        "sizes": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
        "vocab_size": 49_152,
        "target_layers": 30,
    },
    "M": {
        "documents": (1, 2048, 128),
        "layers": "ssssf",
        "window": 512,
        "sizes": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
        "vocab_size": 151_936,
        "target_layers": 28,
    },
}
LAYER_IDS = (1, 7, 13, 19, 25)
BLOCK_SIZE = 16


def resident_bytes(name: str) -> int:
    """VmRSS or VmHWM of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def settings(shape: dict) -> DrafterConfig:
    """The drafter section of a recipe for this shape."""
    kinds = {"s": LayerType.sliding_attention, "f": LayerType.full_attention}
    layer_types = [kinds[letter] for letter in shape["layers"]]
    return DrafterConfig(
        num_layers=len(layer_types),
        layer_types=layer_types,
        sliding_window=shape["window"],
        block_size=BLOCK_SIZE,
        mask_token_id=shape["vocab_size"] - 1,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        **{name: value for name, value in shape["sizes"].items() if name != "hidden_size"},
    )


def make_drafter(shape: dict) -> DFlashDraftModel:
    """A drafter of this shape, with random weights in fp32."""
    text = Qwen3Config(hidden_size=shape["sizes"]["hidden_size"], max_position_embeddings=32_768)
    ids = LayerIds(LAYER_IDS, shape["target_layers"])
    return DFlashDraftModel(drafter_config(settings(shape), ids, text, shape["vocab_size"])).float()


def make_pack(shape: dict) -> TrainingPack:
    """All documents, supervised throughout; features in bf16, as they are stored."""
    number, num_tokens, num_anchors = shape["documents"]
    generator = torch.Generator().manual_seed(0)
    supervised_T = torch.ones(num_tokens, dtype=torch.bool)
    documents = [(torch.randint(0, 1000, (num_tokens,), generator=generator), supervised_T) for _ in range(number)]
    places = num_tokens - BLOCK_SIZE - 1
    anchors = [torch.randperm(places, generator=generator)[:num_anchors].sort().values + 1 for _ in range(number)]
    context, blocks = build_blocks(documents, anchors, BLOCK_SIZE, shape["vocab_size"] - 1)
    features_TLD = torch.empty(number * num_tokens, len(LAYER_IDS), shape["sizes"]["hidden_size"], dtype=torch.bfloat16)
    return TrainingPack(features_TLD.normal_(generator=generator), context, blocks)


def main(name: str, precision: str) -> None:
    torch.set_num_threads(1)
    shape, train = SHAPES[name], TrainConfig()
    accelerator = Accelerator(cpu=True, mixed_precision={"bf16": "bf16", "fp32": "no"}[precision])
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    torch.mm(torch.ones(64, 64, dtype=dtype), torch.ones(64, 64, dtype=dtype))
    base = resident_bytes("VmRSS")
    drafter = make_drafter(shape)
    size = (shape["vocab_size"], shape["sizes"]["hidden_size"])
    trainer = Trainer(
        accelerator=accelerator,
        drafter=drafter,
        model=accelerator.prepare(drafter),
        optimizer=make_optimizer(drafter, train.weight_decay),
        ends=TargetEnds(*(torch.empty(size, dtype=dtype).normal_(std=0.02) for _ in range(2))),
        max_grad_norm=train.max_grad_norm,
        head_chunk_bytes=head_chunk_bytes(train.head_chunk_bytes, on_gpu=False),
    )
    packs = repeat(make_pack(shape))
    for number in (1, 2):
        assert trainer.take_step(number, Step(epoch=0, packs=[[]]), packs, lr=1e-4).loss is not None
    print(json.dumps({"base_bytes": base, "peak_bytes": resident_bytes("VmHWM")}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
