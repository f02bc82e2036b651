"""Tiny random targets on disk, as a user would have them: config, seeded weights, generation config, tokenizer, chat template.

Every maker writes a whole Hugging Face folder and returns its path. All of them share the byte tokenizer: 256 bytes, then
256 `<|endoftext|>` (pad), 257 `<|im_start|>`, 258 `<|im_end|>` (eos), 259-262 `<think>`, `</think>`, `<tool_call>`, `</tool_call>`.
The models have 320 embedding rows, so 263 to 319 are rows that no text uses.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)

TEMPLATES = Path(__file__).parent / "data" / "templates"
NUM_EMBEDDING_ROWS = 320
NUM_TOKENS = 263
PAD_ID, IM_START_ID, EOS_ID = 256, 257, 258
MASK_TOKEN_ID = 300

SMALL = {
    "vocab_size": NUM_EMBEDDING_ROWS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}


def make_tokenizer(path: str | Path, template: str = "plain.jinja", **overrides: Any) -> PreTrainedTokenizerFast:
    """Saves the byte tokenizer with the chat template `tests/data/templates/<template>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    backend.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>", "<tool_call>", "</tool_call>")])
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": (TEMPLATES / template).read_text()} | overrides
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.save_pretrained(path)
    return tokenizer


def make_qwen3(path: str | Path, template: str = "plain.jinja", seed: int = 0, **overrides: Any) -> Path:
    """A plain Qwen3 of 6 layers, width 32."""
    return make_model(path, Qwen3ForCausalLM, Qwen3Config(**SMALL | overrides), template, seed)


def make_llama(path: str | Path, template: str = "plain.jinja", seed: int = 0, **overrides: Any) -> Path:
    """A Llama like SmolLM2: tied embedding and head."""
    return make_model(path, LlamaForCausalLM, LlamaConfig(**SMALL | {"tie_word_embeddings": True} | overrides), template, seed)


def make_gemma3(path: str | Path, template: str = "plain.jinja", seed: int = 0, **overrides: Any) -> Path:
    """A text-only Gemma 3: scaled embedding, tied head, sliding layers of window 16, norms of the form 1+w."""
    gemma = {"sliding_window": 16, "query_pre_attn_scalar": 8, "tie_word_embeddings": True}
    return make_model(path, Gemma3ForCausalLM, Gemma3TextConfig(**SMALL | gemma | overrides), template, seed)


def make_qwen35_wrapper(path: str | Path, template: str = "plain.jinja", seed: int = 0, **text_overrides: Any) -> Path:
    """A multimodal Qwen3.5 wrapper (gated delta net hybrid with a vision part), 8 layers: every fourth one has full attention."""
    text = SMALL | {
        "num_hidden_layers": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    }
    text |= text_overrides
    vision = {
        "depth": 3,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "patch_size": 4,
        "num_position_embeddings": 16,
        "initializer_range": 0.15,
    }
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=text["tie_word_embeddings"])
    return make_model(path, Qwen3_5ForConditionalGeneration, config, template, seed)


def make_mistral3_wrapper(path: str | Path, template: str = "plain.jinja", seed: int = 0, **text_overrides: Any) -> Path:
    """A multimodal wrapper whose file names its tensors as older releases did (`language_model.model.layers...`)."""
    text = {"model_type": "mistral"} | SMALL | text_overrides
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 32, "patch_size": 8}
    config = Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=text["tie_word_embeddings"])
    return make_model(path, Mistral3ForConditionalGeneration, config, template, seed)


def make_model(path: str | Path, model_class: type[PreTrainedModel], config: PreTrainedConfig, template: str, seed: int) -> Path:
    """Any causal language model of transformers, with seeded weights and the byte tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
        _spread_norms(model)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID, do_sample=False)
    model.save_pretrained(path)
    make_tokenizer(path, template)
    return Path(path)


@torch.no_grad()
def _spread_norms(model: PreTrainedModel) -> None:
    """Fresh norms are all ones, which would hide a norm that is left out or applied twice."""
    for name, weight in model.named_parameters():
        if "norm" in name and weight.ndim == 1:
            weight.add_(0.3 * torch.randn_like(weight))
