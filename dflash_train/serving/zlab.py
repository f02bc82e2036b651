"""A drafter in z-lab's format, the one that vLLM, SGLang, z-lab's own package and converters read.

Comes in: a drafter's config and weights. Goes out: a folder with `config.json`, `model.safetensors` (bf16, 11 tensors per layer and 3
more), `contract.json` and `README.md`. The consumers hardly check what they load (a missing tensor keeps its random weight in
vLLM, an extra one is skipped in SGLang), so names and shapes are asserted here, before anything is written.

What the keys mean to whom was read in vLLM 0.33.0, SGLang 0.5.23, dflash 0.1.0 and transformers 5.24. Some are written twice, because
readers look in different places: `block_size` (top level in z-lab's first drafters, inside `dflash_config` later) and rope (transformers 5
writes `rope_parameters` alone, readers of version 4 know `rope_theta`). `is_causal` and `dflash_config.causal` are never written: both
switch all layers at once, while the layers' types already say which are causal.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config

from dflash_train.atomic import TEMPORARY_PREFIX, atomic_path, write_json, write_text
from dflash_train.config import LayerType
from dflash_train.drafter import DFlashDraftModel, draft_value
from dflash_train.errors import UserError
from dflash_train.layers import FeatureContract, LayerIds

ARCHITECTURE = "DFlashDraftModel"
_DTYPE = "bfloat16"
_FILES = {"config.json", "model.safetensors", "contract.json", "README.md"}
_RECORDS = {"config.yaml", "versions.json"}  # what a run folder has beside them
_WRAPPERS = {"_orig_mod", "module"}  # name parts that torch.compile and DDP add
_COPIED_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "attention_dropout",
)


def zlab_config(config: Qwen3Config) -> dict[str, Any]:
    """`config.json` of a drafter: every key that a consumer reads, and no other. Raises UserError for a config without layer ids."""
    layer_ids = LayerIds.from_drafter_config(config.to_dict(), config.num_target_layers)
    block_size = draft_value(config, "block_size")
    rope_theta = config.rope_parameters["rope_theta"]
    slides = LayerType.sliding_attention in config.layer_types
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "block_size": block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": {
            "target_layer_ids": list(layer_ids.zlab),
            "mask_token_id": draft_value(config, "mask_token_id"),
            "block_size": block_size,
        },
        **{name: getattr(config, name) for name in _COPIED_SIZES},
        "layer_types": list(config.layer_types),
        "use_sliding_window": slides,  # transformers drops the window without it
        "sliding_window": config.sliding_window if slides else None,
        "max_window_layers": config.num_hidden_layers,
        "rope_theta": rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,  # the target's embedding rows
        "tie_word_embeddings": False,
        "initializer_range": config.initializer_range,
        "use_cache": True,
        "dtype": _DTYPE,
        "torch_dtype": _DTYPE,
    }


def zlab_tensors(weights: Mapping[str, Tensor], config: Qwen3Config) -> dict[str, Tensor]:
    """The tensors of `model.safetensors`: exactly those of a drafter of this config, bf16, on the CPU.

    `weights` may come from a module wrapped by DDP or torch.compile. Raises UserError for names, shapes or values that are not right.
    """
    tensors = {_plain_name(name): tensor.detach() for name, tensor in weights.items()}
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in DFlashDraftModel(config).state_dict().items()}
    wrong = [
        *(f"{name} is missing" for name in sorted(expected.keys() - tensors.keys())),
        *(f"{name} does not belong there" for name in sorted(tensors.keys() - expected.keys())),
        *(
            f"{name} is {list(tensors[name].shape)} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in tensors and tensors[name].shape != shape
        ),
        *(f"{name} is not finite" for name, tensor in tensors.items() if not tensor.isfinite().all()),
    ]
    if wrong:
        raise UserError(f"these weights are not a drafter that a server could load: {'; '.join(wrong[:5])}")
    return {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def refuse_foreign_folder(folder: Path) -> None:
    """Raises UserError unless `folder` is absent, empty, or an earlier export: nothing else is ever replaced."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"export.dir={folder} is a file")
    names = {path.name for path in folder.iterdir() if not path.name.startswith(TEMPORARY_PREFIX)}  # what a killed export left
    others = sorted(names - _FILES - _RECORDS)
    if others or not _is_drafter_or_nothing(folder / "config.json"):
        found = f"it holds {', '.join(others[:3])}" if others else "its config.json is another model's"
        raise UserError(f"export.dir={folder} exists and is not an earlier export ({found}); name an empty or a new folder")


def write_drafter(
    folder: Path, config: Qwen3Config, weights: Mapping[str, Tensor], contract: FeatureContract, card: str
) -> dict[str, tuple[int, ...]]:
    """Writes the whole folder beside `folder` and puts it in its place at the end; returns the shapes by tensor name.

    The run's own records in `folder` are kept. Raises UserError as `zlab_tensors` and `refuse_foreign_folder` do.
    """
    refuse_foreign_folder(folder)
    folder = folder.resolve()  # a link stays a link
    tensors = zlab_tensors(weights, config)
    fresh = folder.with_name(f"{TEMPORARY_PREFIX}{folder.name}-new")
    _remove(fresh)
    with atomic_path(fresh) as temporary:
        temporary.mkdir(parents=True)
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        write_json(temporary / "config.json", zlab_config(config))
        write_json(temporary / "contract.json", contract.to_dict())
        write_text(temporary / "README.md", card)
        for record in _RECORDS:
            if (folder / record).exists():
                shutil.copy(folder / record, temporary / record)
    _swap(fresh, folder)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _is_drafter_or_nothing(config_path: Path) -> bool:
    if not config_path.exists():
        return True
    try:
        return json.loads(config_path.read_text(encoding="utf-8")).get("architectures") == [ARCHITECTURE]
    except (OSError, ValueError, AttributeError):
        return False


def _swap(fresh: Path, folder: Path) -> None:
    """Two renames; a process killed between them leaves both folders whole, and the next export takes the place."""
    retired = folder.with_name(f"{TEMPORARY_PREFIX}{folder.name}-old")
    _remove(retired)
    if folder.exists():
        folder.rename(retired)
    fresh.rename(folder)
    _remove(retired)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
