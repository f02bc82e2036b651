"""The drafter: Qwen3-style layers whose queries are blocks of mask tokens and whose context is the target's hidden states.

Comes in: context features [T, L, D] (the residual stream after each captured target layer) with their documents and positions, and
blocks with their embeddings [A, K, D] from the target's own table. Goes out: final-normed hidden states [A, K, D], which the target's
own head turns into logits. The context feature `hidden_norm(fc(feature))` is projected straight to keys and values by every layer, without
the layer's `input_layernorm`. One module trains (all blocks of a pack at once) and decodes (features appended to a `DraftContext`).

Tensor names and shapes are those of z-lab's dflash 0.1.0, which vLLM and SGLang load: 11 tensors per layer and `fc`, `hidden_norm`,
`norm`. Rope is full and plain, computed from the config on the fly, so nothing of it is ever saved.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel, Qwen3Config

from dflash_train.attention import Attend, attention_for
from dflash_train.blocks import Blocks, Context
from dflash_train.config import AttentionBackend, DrafterConfig, LayerType
from dflash_train.errors import UserError
from dflash_train.layers import LayerIds


@dataclass
class DraftContext:
    """What the blocks attend to: whose tokens they are, and each layer's keys and values [T, Hkv, d], normalised and rotated."""

    meta: Context
    keys: list[Tensor]
    values: list[Tensor]


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines [..., 1, d/2] of the angles at some positions."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, head_dim: int, theta: float) -> "Rotary":
        """Plain rope over the whole head: pair (i, i + d/2) turns by position / theta^(2i/d)."""
        exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
        angles = positions[..., None, None].float() * (1.0 / theta**exponents)
        return cls(angles.cos(), angles.sin())

    def __call__(self, x: Tensor) -> Tensor:
        """Rotates [..., H, d] in fp32 at least; the result has x's dtype."""
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], dim=-1)
        return turned.to(x.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, in fp32 at least; the result has x's dtype, or autocast's where the products after it do.

    For the backward it keeps x itself and one number per row.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return _RMSNorm.apply(x, self.weight, self.eps, dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad, normed = grad.to(scale.dtype), x.to(scale.dtype) * scale
        grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        grad = grad * weight
        grad_x = scale * (grad - normed * (grad * normed).mean(-1, keepdim=True))
        return grad_x.to(x.dtype), grad_weight, None, None


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftAttention(nn.Module):
    """Queries, keys and values of the block; keys and values of the context; the same matrices serve both."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def keys_values(self, states: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Keys and values [..., Hkv, d] of states [..., D]."""
        heads = (self.num_kv_heads, self.head_dim)
        keys = rotary(self.k_norm(self.k_proj(states).unflatten(-1, heads)))
        return keys, self.v_proj(states).unflatten(-1, heads)

    def forward(self, states_AKD: Tensor, rotary: Rotary, context_kv: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q_AKHd = rotary(self.q_norm(self.q_proj(states_AKD).unflatten(-1, (self.num_heads, self.head_dim))))
        block_kv = self.keys_values(states_AKD, rotary)
        return self.o_proj(attend(q_AKHd, *context_kv, *block_kv).flatten(2))


class DraftLayer(nn.Module):
    """One pre-norm layer. `window` is None on a full layer."""

    def __init__(self, config: Qwen3Config, layer_type: str) -> None:
        super().__init__()
        self.window = config.sliding_window if layer_type == LayerType.sliding_attention else None
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden_AKD: Tensor, rotary: Rotary, context_kv: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        hidden_AKD = hidden_AKD + self.self_attn(self.input_layernorm(hidden_AKD), rotary, context_kv, attend)
        return hidden_AKD + self.mlp(self.post_attention_layernorm(hidden_AKD))


class DFlashDraftModel(PreTrainedModel):
    """Frozen embedding and head stay with the target; everything here trains. Raises UserError for a config that asks for another model."""

    config_class = Qwen3Config
    attention = AttentionBackend.auto  # of `forward`, the training step

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        _check_supported(config)
        self.layer_ids = LayerIds.from_drafter_config(config.to_dict(), config.num_target_layers)
        self.fc = nn.Linear(len(self.layer_ids.ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, layer_type) for layer_type in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def compile_layers(self) -> None:
        """Runs the layers through torch.compile, attention excepted, for packs of any size; names and values stay. Minutes at first use."""
        for layer in self.layers:
            layer.compile(dynamic=True)
            layer.self_attn.keys_values = torch.compile(layer.self_attn.keys_values, dynamic=True)

    @property
    def block_size(self) -> int:
        """Slots per block, the anchor included."""
        return draft_value(self.config, "block_size")

    @property
    def mask_token_id(self) -> int:
        """The row of the target's embedding that fills slots 1..K-1."""
        return draft_value(self.config, "mask_token_id")

    def extend(self, context: DraftContext | None, features_TLD: Tensor, meta: Context) -> DraftContext:
        """The context with the tokens of `meta` appended; `context=None` starts one. Documents may be mixed and come in any order."""
        rotary = self._rotary(meta.position_T)
        states_TD = self.hidden_norm(self.fc(features_TLD.flatten(1).to(self.fc.weight.dtype)))
        keys, values = zip(*(layer.self_attn.keys_values(states_TD, rotary) for layer in self.layers), strict=True)
        if context is None:
            return DraftContext(meta, list(keys), list(values))
        return DraftContext(
            Context(
                document_T=torch.cat([context.meta.document_T, meta.document_T]),
                position_T=torch.cat([context.meta.position_T, meta.position_T]),
            ),
            [torch.cat(pair) for pair in zip(context.keys, keys, strict=True)],
            [torch.cat(pair) for pair in zip(context.values, values, strict=True)],
        )

    def draft(
        self, embeddings_AKD: Tensor, blocks: Blocks, context: DraftContext, attention: AttentionBackend = AttentionBackend.dense
    ) -> Tensor:
        """Final-normed hidden states [A, K, D]. A block sees what `masks.py` says, so tokens at or after its anchor may be in `context`."""
        rotary = self._rotary(blocks.position_AK)
        attend = {window: attention_for(attention, blocks, context.meta, window) for window in {layer.window for layer in self.layers}}
        hidden_AKD = embeddings_AKD
        for layer, keys, values in zip(self.layers, context.keys, context.values, strict=True):
            hidden_AKD = layer(hidden_AKD, rotary, (keys, values), attend[layer.window])
        return self.norm(hidden_AKD)

    def forward(self, features_TLD: Tensor, meta: Context, embeddings_AKD: Tensor, blocks: Blocks) -> Tensor:
        """Hidden states [A, K, D] of all blocks of a pack: one extend and one draft. Works for an empty pack."""
        return self.draft(embeddings_AKD, blocks, self.extend(None, features_TLD, meta), self.attention)

    def _rotary(self, positions: Tensor) -> Rotary:
        return Rotary.at(positions, self.config.head_dim, self.config.rope_parameters["rope_theta"])


def draft_value(config: Qwen3Config, name: str) -> Any:
    """A key of `dflash_config`, else of the top level, where the first published drafters have them; None when it is in neither."""
    nested = getattr(config, "dflash_config", {}).get(name)
    return getattr(config, name, None) if nested is None else nested


def drafter_config(settings: DrafterConfig, layer_ids: LayerIds, text_config: PreTrainedConfig, embedding_rows: int) -> Qwen3Config:
    """The drafter's config: sizes from `settings`, from the target's `text_config` where they are null.

    Rope is written out full and plain: only theta may come from the target, never its scaling, partial factor or mrope sections.
    `embedding_rows` is the padded size of the target's embedding table, not the length of its tokenizer. Raises UserError when a size is
    neither set nor known from the target.
    """
    num_heads = _own_or_targets(settings, text_config, "num_attention_heads")
    num_kv_heads = _own_or_targets(settings, text_config, "num_key_value_heads", default=num_heads)
    head_dim = _own_or_targets(settings, text_config, "head_dim", default=text_config.hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise UserError(f"drafter.num_attention_heads={num_heads} is no multiple of drafter.num_key_value_heads={num_kv_heads}")
    if head_dim % 2:
        raise UserError(f"drafter.head_dim={head_dim} must be even: rope turns its entries in pairs")
    slides = str(LayerType.sliding_attention) in settings.resolved_layer_types
    return Qwen3Config(
        architectures=["DFlashDraftModel"],
        hidden_size=text_config.hidden_size,
        intermediate_size=_own_or_targets(settings, text_config, "intermediate_size"),
        num_hidden_layers=settings.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_own_or_targets(settings, text_config, "rms_norm_eps"),
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta or _target_rope_theta(text_config)},
        max_position_embeddings=text_config.max_position_embeddings,
        vocab_size=embedding_rows,
        layer_types=settings.resolved_layer_types,
        use_sliding_window=slides,
        sliding_window=settings.sliding_window,
        max_window_layers=settings.num_layers,
        tie_word_embeddings=False,
        block_size=settings.block_size,
        num_target_layers=layer_ids.num_target_layers,
        dflash_config={
            "target_layer_ids": list(layer_ids.zlab),
            "mask_token_id": settings.mask_token_id,
            "block_size": settings.block_size,
        },
    )


def _own_or_targets(settings: DrafterConfig, text_config: PreTrainedConfig, name: str, default: float | None = None):
    for value in (getattr(settings, name), getattr(text_config, name, None), default):
        if value is not None:
            return value
    raise UserError(f"drafter.{name}=null, and the target's config ({text_config.model_type}) has no {name}: set it")


def _target_rope_theta(text_config: PreTrainedConfig) -> float:
    rope = getattr(text_config, "rope_parameters", None) or {}
    theta = rope.get("full_attention", rope).get("rope_theta")  # some targets have one set per layer type
    if theta is None:
        raise UserError(f"drafter.rope_theta=null, and the target's config ({text_config.model_type}) has no rope theta: set it")
    return theta


def _check_supported(config: Qwen3Config) -> None:
    """Raises UserError where the config means a computation other than the one written here."""
    rope = config.rope_parameters
    wrong = {
        "hidden_act": config.hidden_act != "silu",
        "attention_bias": config.attention_bias,
        "attention_dropout": config.attention_dropout != 0,
        "rope_parameters": rope["rope_type"] != "default" or rope.get("partial_rotary_factor", 1) != 1 or "mrope_section" in rope,
        "is_causal": draft_value(config, "is_causal") is not None,
        "causal": draft_value(config, "causal") is not None,
        "num_target_layers": draft_value(config, "num_target_layers") is None,
        "sliding_window": LayerType.sliding_attention in config.layer_types and config.sliding_window is None,
    }
    for name, refused in wrong.items():
        if refused:
            raise UserError(f"drafter config: {name}={draft_value(config, name)} is not supported")
