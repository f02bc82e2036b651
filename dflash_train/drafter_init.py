"""A drafter that starts as a copy of the target's last decoder layers.

Comes in: a fresh drafter and the target's folder, of which only the needed tensors are read. A copy is a start only if the drafter's
layer then computes what the target's layer computes, so everything that could differ is checked, and one copied layer is run beside the
target's own on random tokens. What the drafter lacks in the target is set so that little changes at first:

- `fc` is the identity on the last captured layer and zero on the others, `hidden_norm` is one;
- the weight of each target layer's input norm is folded into its q, k and v projections and the drafter's own input norm is one, because
  all layers share one `hidden_norm` and context does not pass through `input_layernorm`: the context's keys and values are then those the
  target's layer itself would make of that stream;
- a target without q and k norms gives them the root mean square of its queries and keys on the last captured stream of some sample, so
  that attention is about as sharp as the target's.
"""

import copy
import re

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from dflash_train.attention import DenseAttention
from dflash_train.config import TargetConfig
from dflash_train.drafter import DFlashDraftModel, DraftLayer, Rotary
from dflash_train.errors import UserError
from dflash_train.target import load_config, target_dir, text_config
from dflash_train.weight_files import StoredTensor, read_tensor, stored_tensors

_QK_NORMS = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
_PROOF_TOKENS = 8
_PROOF_TOLERANCE = 1e-3  # of the largest output, fp32


@torch.no_grad()
def init_from_target(drafter: DFlashDraftModel, settings: TargetConfig, features_TLD: Tensor) -> None:
    """Overwrites the drafter's weights (fp32, on the CPU) with those of the target's last layers.

    `features_TLD` of any sample show the usual size of queries and keys. Raises UserError that lists what differs between target and
    drafter.
    """
    text = text_config(load_config(settings))
    stored = _stored_decoder(stored_tensors(target_dir(settings)), text.num_hidden_layers)
    first = text.num_hidden_layers - len(drafter.layers)
    if first < 0:
        _refuse(settings, [f"the target has {text.num_hidden_layers} layers, the drafter {len(drafter.layers)}"])
    layers = [_of_layer(stored, first + i) for i in range(len(drafter.layers))]
    with torch.device("meta"):
        decoder = AutoModel.from_config(text, trust_remote_code=settings.trust_remote_code)
    _refuse(settings, _differences(drafter, text, decoder, layers))

    stream_TD = features_TLD[:, -1].float()
    normed_TD = stream_TD / stream_TD.square().mean(-1, keepdim=True).sqrt()
    for layer, tensors in zip(drafter.layers, layers, strict=True):
        _copy_layer(layer, {name: _read(tensor) for name, tensor in tensors.items()}, normed_TD)
    drafter.norm.weight.copy_(_read(stored["norm.weight"]))
    drafter.hidden_norm.weight.fill_(1)
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -drafter.config.hidden_size :].fill_diagonal_(1)
    _prove_copy(settings, drafter, text, decoder, {name: _read(tensor) for name, tensor in layers[-1].items()})


def _stored_decoder(stored: dict[str, StoredTensor], num_layers: int) -> dict[str, StoredTensor]:
    """The tensors of the language model's decoder, without the prefix that wrappers give them."""
    marker = f"layers.{num_layers - 1}.input_layernorm.weight"
    prefixes = [name.removesuffix(marker) for name in stored if re.search(rf"(^|\.){re.escape(marker)}$", name)]
    if len(prefixes) != 1:
        raise UserError(f"drafter.init_from=target: the target's weights name {len(prefixes)} tensors ...{marker}, expected one")
    return {name.removeprefix(prefixes[0]): tensor for name, tensor in stored.items() if name.startswith(prefixes[0])}


def _of_layer(stored: dict[str, StoredTensor], index: int) -> dict[str, StoredTensor]:
    prefix = f"layers.{index}."
    return {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}


def _read(stored: StoredTensor) -> Tensor:
    return read_tensor(stored, torch.device("cpu")).float()


def _refuse(settings: TargetConfig, differences: list[str]) -> None:
    if differences:
        raise UserError(
            f"drafter.init_from=target: the drafter's layers cannot be copies of those of target.path={settings.path}: "
            f"{'; '.join(differences)}; drafter.init_from=random starts afresh"
        )


def _differences(
    drafter: DFlashDraftModel, text: PreTrainedConfig, decoder: PreTrainedModel, layers: list[dict[str, StoredTensor]]
) -> list[str]:
    """What keeps the drafter's layer from computing what the target's computes, one string each."""
    own = {name: tuple(weight.shape) for name, weight in drafter.layers[0].state_dict().items()}
    found = [difference for tensors in layers for difference in _tensor_differences(own, tensors)]
    rope, attention = _target_rope(text), getattr(decoder.layers[-1], "self_attn", None)
    pairs = {
        "rope type": (rope.get("rope_type", "default"), "default"),
        "rope theta": (rope.get("rope_theta"), drafter.config.rope_parameters["rope_theta"]),
        "rotated share of a head": (rope.get("partial_rotary_factor", 1), 1),
        "rope sections": (rope.get("mrope_section"), None),
        "activation": (getattr(text, "hidden_act", None), drafter.config.hidden_act),
        "form of the norms": (_norm_form(getattr(decoder, "norm", None)), "w"),
        "attention scale": (getattr(attention, "scaling", None), drafter.config.head_dim**-0.5),
    }
    found += [f"{name} is {theirs} in the target, {ours} in the drafter" for name, (theirs, ours) in pairs.items() if theirs != ours]
    return list(dict.fromkeys(found))


def _tensor_differences(own: dict[str, tuple[int, ...]], tensors: dict[str, StoredTensor]) -> list[str]:
    theirs = {name: tensor.shape for name, tensor in tensors.items()}
    lacking = sorted(set(own) - set(theirs) - _QK_NORMS)
    return [
        *(f"the target's layers lack {name}" for name in lacking),
        *(f"the target's layers have {name}, which the drafter's lack" for name in sorted(set(theirs) - set(own))),
        *(
            f"{name} is {list(theirs[name])} in the target, {list(own[name])} in the drafter"
            for name in own
            if name in theirs and theirs[name] != own[name]
        ),
        *(f"{name} is stored as {t.dtype}" for name, t in tensors.items() if t.dtype not in ("F32", "BF16", "F16")),
    ]


def _target_rope(text: PreTrainedConfig) -> dict:
    """Rope of the target's last layer; some targets have one set per layer type."""
    rope = getattr(text, "rope_parameters", None) or {}
    return rope.get((getattr(text, "layer_types", None) or [None])[-1], rope)


def _norm_form(norm: nn.Module | None) -> str:
    """A norm whose weight is zero gives zero only if the weight multiplies as it is (not as 1+w)."""
    if norm is None:
        return "not called norm"
    norm = copy.deepcopy(norm).to_empty(device="cpu")
    for weight in norm.parameters():
        nn.init.zeros_(weight)
        return "1+w or another" if norm(torch.ones(1, len(weight))).any() else "w"
    return "without weight"


def _copy_layer(layer: DraftLayer, weights: dict[str, Tensor], normed_TD: Tensor) -> None:
    input_norm_D = weights["input_layernorm.weight"]
    for name, parameter in layer.named_parameters():
        if name in weights:
            parameter.copy_(weights[name])
    layer.input_layernorm.weight.fill_(1)
    attention = layer.self_attn
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight.mul_(input_norm_D)
    for kind in ("q", "k"):
        if f"self_attn.{kind}_norm.weight" not in weights:
            projected = getattr(attention, f"{kind}_proj")(normed_TD)
            getattr(attention, f"{kind}_norm").weight.fill_(projected.square().mean().sqrt())


def _prove_copy(
    settings: TargetConfig, drafter: DFlashDraftModel, text: PreTrainedConfig, decoder: PreTrainedModel, weights: dict[str, Tensor]
) -> None:
    """Runs the last layer of both on the same tokens: it also catches what no list foresees, such as interleaved rope."""
    x_KD = torch.randn(_PROOF_TOKENS, text.hidden_size, generator=torch.Generator().manual_seed(0))
    theirs_KD = _run_target_layer(text, decoder, weights, x_KD)
    ours_KD = _run_copied_layer(drafter, weights, x_KD)
    error = (ours_KD - theirs_KD).abs().max() / theirs_KD.abs().max()
    if not error <= _PROOF_TOLERANCE:
        _refuse(
            settings, [f"run on the same tokens, the outputs of the last layers differ by {error:.1%} (rope layout, gating, residuals?)"]
        )


def _run_target_layer(text: PreTrainedConfig, decoder: PreTrainedModel, weights: dict[str, Tensor], x_KD: Tensor) -> Tensor:
    layer = decoder.layers[-1].to_empty(device="cpu").float().eval()
    layer.load_state_dict(weights)
    positions = torch.arange(len(x_KD))[None]
    causal = torch.full((len(x_KD), len(x_KD)), float("-inf")).triu(1)[None, None]
    rotary = type(decoder.rotary_emb)(config=text)
    out = layer(x_KD[None], attention_mask=causal, position_ids=positions, position_embeddings=rotary(x_KD[None], positions))
    return (out[0] if isinstance(out, tuple) else out).view_as(x_KD)


def _run_copied_layer(drafter: DFlashDraftModel, weights: dict[str, Tensor], x_KD: Tensor) -> Tensor:
    """The drafter's last layer as a plain causal layer: one block without context, and without norms the target has not."""
    layer = copy.deepcopy(drafter.layers[-1])
    for name in _QK_NORMS - weights.keys():
        setattr(layer.self_attn, name.split(".")[1], nn.Identity())
    rotary = Rotary.at(torch.arange(len(x_KD))[None], drafter.config.head_dim, drafter.config.rope_parameters["rope_theta"])
    no_context = torch.empty(0, drafter.config.num_key_value_heads, drafter.config.head_dim)
    causal = torch.ones(len(x_KD), len(x_KD), dtype=torch.bool).tril()
    return layer(x_KD[None], rotary, (no_context, no_context), DenseAttention(torch.ones(1, 1, 0, dtype=torch.bool), causal))[0]
