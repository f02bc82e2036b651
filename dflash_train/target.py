"""The frozen target: its config, tokenizer and identity; the whole model, or only its embedding, head and final norm.

Comes in: `TargetConfig`, naming a local Hugging Face folder or a hub id. Goes out: a `Target` with its parts found (any causal language
model that transformers loads, multimodal wrappers included), `TargetEnds` and `TeacherHead` for training, and the identities of a
`FeatureContract`. Only safetensors are read. A weight that the checkpoint lacks is refused; transformers would go on with a random one.
"""

import copy
import hashlib
import inspect
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from dflash_train.config import Dtype, TargetConfig
from dflash_train.errors import UserError
from dflash_train.layers import FeatureContract, LayerIds, check_mask_token_id, refuse_residual_streams
from dflash_train.weight_files import StoredTensor, read_tensor, sample_digest, stored_tensors, weight_paths

if TYPE_CHECKING:  # transformers' modeling code takes seconds to import, which a mistake in a setting need not wait for
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel

_logger = logging.getLogger(__name__)

_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_PLAIN_DTYPES = {"F32", "BF16", "F16"}

# Settings with which a model rescales its embeddings or its logits; the drafter borrows the bare tables.
_RESCALING = (
    "embedding_multiplier",
    "embedding_scale",
    "scale_emb",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "output_multiplier",
    "final_logit_softcapping",
)


@dataclass
class Target:
    """The loaded model, frozen and in eval mode, and the parts of its language model."""

    model: "PreTrainedModel"
    config: PreTrainedConfig  # whole, with the vision part of a wrapper
    text_config: PreTrainedConfig
    decoder: nn.Module  # embeddings, layers and final norm; no head
    layers: nn.ModuleList
    final_norm: nn.Module

    @property
    def device(self) -> torch.device:
        """Where input ids go."""
        return self.model.get_input_embeddings().weight.device

    def run_with_logits(self, input_ids_BT: torch.Tensor, attention_mask_BT: torch.Tensor, num_logits: int) -> Any:
        """The whole model's output with `hidden_states` and `logits`, of the last `num_logits` tokens where the model can limit them."""
        kept = {"logits_to_keep": num_logits} if "logits_to_keep" in inspect.signature(self.model.forward).parameters else {}
        return self.model(input_ids=input_ids_BT, attention_mask=attention_mask_BT, use_cache=False, output_hidden_states=True, **kept)

    @torch.no_grad()
    def logits(self, teacher_state_TD: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] of the input of the final norm: the target's own norm, head, logit scale and soft cap.

        Modules are called past their hooks: another thread may be capturing through them. `Capture` holds the result to the model's own
        logits, so a way of scaling that `LogitScaling` does not know is found.
        """
        head = _head(self.model)
        normed_TD = self.final_norm.forward(teacher_state_TD.to(head.weight.device, self.model.dtype))
        logits_TV = head.forward(normed_TD.to(head.weight.dtype))
        return LogitScaling.of(self.text_config).apply_(logits_TV)


@dataclass(frozen=True)
class LogitScaling:
    """What a target does to the product with its head."""

    factor: float
    cap: float | None

    @classmethod
    def of(cls, text: PreTrainedConfig) -> "LogitScaling":
        """As the settings that transformers 5.24 reads tell: Granite `logits_scaling`, Cohere `logit_scale`, Falcon-H1
        `lm_head_multiplier`, Gemma `final_logit_softcapping`."""
        factor = (getattr(text, "logit_scale", None) or 1) * (getattr(text, "lm_head_multiplier", None) or 1)
        return cls(factor / (getattr(text, "logits_scaling", None) or 1), getattr(text, "final_logit_softcapping", None))

    def apply_(self, logits_TV: torch.Tensor) -> torch.Tensor:
        """The target's logits, in place of the product."""
        if self.factor != 1:
            logits_TV.mul_(self.factor)
        return logits_TV if self.cap is None else logits_TV.div_(self.cap).tanh_().mul_(self.cap)


@dataclass(frozen=True)
class TeacherHead:
    """All that stands between a teacher state and the target's logits, but for the head's matrix."""

    norm: nn.Module  # of the target's own class, frozen
    bias_V: torch.Tensor | None
    scaling: LogitScaling

    @torch.no_grad()
    def normed(self, state_CD: torch.Tensor) -> torch.Tensor:
        """What the head's matrix is multiplied with."""
        dtypes = [parameter.dtype for parameter in self.norm.parameters()]  # none: OLMo's norm has no weight
        return self.norm(state_CD.to(dtypes[0]) if dtypes else state_CD)

    def rescale_(self, logits_CV: torch.Tensor) -> torch.Tensor:
        """The target's logits, in place of the product with the head's matrix."""
        return self.scaling.apply_(logits_CV if self.bias_V is None else logits_CV.add_(self.bias_V))


@dataclass(frozen=True)
class TargetEnds:
    """The frozen tables a drafter borrows; of tied targets both are one tensor."""

    embedding_VD: torch.Tensor
    head_VD: torch.Tensor


def target_dir(settings: TargetConfig) -> Path:
    """The local folder, or the hub's snapshot of it (weights, JSON and tokenizer files only). Raises UserError."""
    if (folder := _local_dir(settings)) is not None:
        return folder
    try:
        files = [*_FILES, "*.py"] if settings.trust_remote_code else _FILES
        return Path(snapshot_download(settings.path, revision=settings.revision, allow_patterns=files))
    except (OSError, ValueError) as error:
        raise UserError(f"{_named(settings)}: the hub does not give it: {_one_line(error)}") from error


def load_config(settings: TargetConfig) -> PreTrainedConfig:
    """The target's whole config, whose `tie_word_embeddings` says what the checkpoint means, wherever a wrapper wrote it.

    Raises UserError for a config that is missing, broken, unknown to transformers, or of a target that cannot have a drafter.
    """
    _local_dir(settings)
    try:
        config = AutoConfig.from_pretrained(settings.path, **_hub_arguments(settings))
        written, _ = PreTrainedConfig.get_config_dict(settings.path, **_hub_arguments(settings))
    except Exception as error:  # transformers raises whatever the broken field provokes
        raise UserError(f"{_named(settings)}: cannot read its config.json: {_one_line(error)}") from error
    text = text_config(config)
    if config.is_encoder_decoder:
        raise UserError(f"{_named(settings)} is an encoder-decoder ({config.model_type}); a target is a decoder-only language model")
    config.tie_word_embeddings = text.tie_word_embeddings = _is_tied(config, text, written)
    return config


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The language model's own config, nested in multimodal wrappers.

    Raises UserError when it lacks a size, or when the target carries several residual streams.
    """
    try:
        text = config.get_text_config(decoder=True)
    except ValueError as error:
        raise UserError(f"target of type {config.model_type} has no single language model: {_one_line(error)}") from error
    refuse_residual_streams(text)
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if not isinstance(getattr(text, name, None), int):
            raise UserError(f"target of type {config.model_type} has no {name} in the config of its language model")
    return text


def eos_token_ids(settings: TargetConfig, config: PreTrainedConfig) -> frozenset[int]:
    """The ids that end an answer: of `generation_config.json`, else of the config, else of the language model's config."""
    folder = target_dir(settings)
    generation = GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").is_file() else None
    for source in (generation, config, text_config(config)):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def load_tokenizer(settings: TargetConfig) -> PreTrainedTokenizerBase:
    """The target's own tokenizer. Raises UserError when there is none."""
    _local_dir(settings)
    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.path, **_hub_arguments(settings))
    except Exception as error:  # as in load_config
        raise UserError(f"{_named(settings)}: cannot read its tokenizer: {_one_line(error)}") from error
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):  # transformers makes up a tokenizer of special tokens
        raise UserError(f"{_named(settings)} has no tokenizer files")
    return tokenizer


def special_token_ids(settings: TargetConfig, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, frozenset[int]]:
    """The ids that the target or its tokenizer use as pad, eos and bos; a mask token may be none of them."""
    ids = {"eos": set(eos_token_ids(settings, config)), "pad": set(), "bos": set()}
    for role, found in ids.items():
        for source in (config, text_config(config), tokenizer):
            value = getattr(source, f"{role}_token_id", None)
            found.update([value] if isinstance(value, int) else value or ())
    return {role: frozenset(found) for role, found in ids.items()}


def check_layers_and_mask(
    settings: TargetConfig, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, layer_ids: list[int], mask_token_id: int
) -> None:
    """Raises UserError for layer ids the target does not have, and for a mask token outside its rows or with another role."""
    text = text_config(config)
    LayerIds(tuple(layer_ids), text.num_hidden_layers)
    check_mask_token_id(mask_token_id, text.vocab_size, special_token_ids(settings, config, tokenizer))


def target_identity(folder: Path) -> dict[str, Any]:
    """What the weights in `folder` are: config, tensor names with shapes and dtypes, quantisation, a digest per weight file."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = sorted((tensor.name, tensor.dtype, tensor.shape) for tensor in stored_tensors(folder).values())
    return {
        "architecture": (config.get("architectures") or [None])[0],
        "config": _digest({key: value for key, value in config.items() if key not in ("transformers_version", "_name_or_path")}),
        "quantization": (config.get("quantization_config") or {}).get("quant_method"),
        "tensors": _digest(tensors),
        "weights": {path.name: sample_digest(path) for path in weight_paths(folder)},
    }


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> dict[str, Any]:
    """What turns messages into ids: the tokenizer, its chat template, and the variables the template is given."""
    return {
        "tokenizer": _digest([_tokenizer_state(tokenizer), tokenizer.special_tokens_map]),
        "chat_template": _digest(tokenizer.chat_template),
        "template_kwargs": dict(template_kwargs),
    }


def contract_for(settings: TargetConfig, layer_ids: list[int], teacher_state: bool, template_kwargs: dict[str, Any]) -> FeatureContract:
    """The contract of features made with these settings; loads config and tokenizer, of the weights only headers and samples.

    Raises UserError for layer ids that the target does not have.
    """
    text = text_config(load_config(settings))
    return FeatureContract(
        layer_ids=LayerIds(tuple(layer_ids), text.num_hidden_layers),
        hidden_size=text.hidden_size,
        teacher_state=teacher_state,
        target=target_identity(target_dir(settings)),
        tokenizer=tokenizer_identity(load_tokenizer(settings), template_kwargs),
    )


def load_target(settings: TargetConfig, device: torch.device) -> Target:
    """Loads the whole target straight onto `device` (or over `target.device_map`), frozen.

    Raises UserError when it cannot be loaded, or when the checkpoint lacks a weight of the language model.
    """
    config, folder = load_config(settings), target_dir(settings)
    weight_paths(folder)
    try:
        model, report = _model_class(config).from_pretrained(
            folder,
            config=config,
            dtype=settings.dtype.value,
            device_map=settings.device_map or {"": device},
            attn_implementation=settings.attn_implementation,
            trust_remote_code=settings.trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise UserError(f"{_named(settings)}: cannot load the model: {_one_line(error)}") from error
    _refuse_missing(settings, model, report["missing_keys"])
    decoder = _find_decoder(model.eval().requires_grad_(False))
    layers = _find_layers(decoder, text_config(config).num_hidden_layers)
    return Target(model, config, text_config(config), decoder, layers, _find_final_norm(decoder, layers))


@dataclass(frozen=True)
class TargetSize:
    """Parameters of a target: of the whole model that is loaded, and of the decoder layers that a capture runs."""

    num_parameters: int
    num_computed: int
    value_bytes: int  # of a parameter in the dtype it is loaded in


def target_size(settings: TargetConfig, layer_ids: LayerIds) -> TargetSize:
    """What the config says of the target's size; reads no weights.

    `num_computed` counts the layers up to the last captured one, behind which a capture stops, and all experts of a mixture. Raises
    UserError for a config of which transformers makes no model.
    """
    config = load_config(settings)
    dtype = (config.dtype or text_config(config).dtype or torch.float32) if settings.dtype is Dtype.auto else getattr(torch, settings.dtype)
    try:
        with torch.device("meta"):
            model = _model_class(config).from_config(config, trust_remote_code=settings.trust_remote_code)
    except (ValueError, RuntimeError, ImportError) as error:
        raise UserError(f"{_named(settings)}: cannot make its model: {_one_line(error)}") from error
    layers = _find_layers(_find_decoder(model), layer_ids.num_target_layers)
    num_computed = sum(p.numel() for layer in layers[: layer_ids.num_computed_layers] for p in layer.parameters())
    return TargetSize(sum(p.numel() for p in model.parameters()), num_computed, dtype.itemsize)


def load_ends(settings: TargetConfig, device: torch.device, dtype: torch.dtype) -> TargetEnds:
    """Loads the embedding table and the head [V, D], V being the padded embedding rows, and nothing else of the target.

    Raises UserError when one is missing in the checkpoint, quantised, or used by the target in another way than a bare lookup and a
    bare product (a scaled embedding, a head with a bias, scaled or capped logits).
    """
    config, folder = load_config(settings), target_dir(settings)
    with torch.device("meta"):
        model = _model_class(config).from_config(config, trust_remote_code=settings.trust_remote_code)
    _refuse_rescaled(settings, model, text_config(config))
    stored, head = stored_tensors(folder), _head(model)
    embedding_VD = _load_end(settings, model, model.get_input_embeddings(), stored, device, dtype)
    if config.tie_word_embeddings and _find_stored(model, head, stored) is None:
        return TargetEnds(embedding_VD, embedding_VD)
    return TargetEnds(embedding_VD, _load_end(settings, model, head, stored, device, dtype))


def load_teacher_head(settings: TargetConfig, device: torch.device, dtype: torch.dtype) -> TeacherHead:
    """Loads the final norm and, where there is one, the head's bias, and nothing else of the target.

    Raises UserError when one is missing in the checkpoint or quantised.
    """
    config, folder = load_config(settings), target_dir(settings)
    with torch.device("meta"):
        model = _model_class(config).from_config(config, trust_remote_code=settings.trust_remote_code)
    decoder, head, stored = _find_decoder(model), _head(model), stored_tensors(folder)
    norm = _find_final_norm(decoder, _find_layers(decoder, text_config(config).num_hidden_layers))
    weights = {name: _load_end(settings, model, norm, stored, device, dtype, name) for name, _ in norm.named_parameters()}
    bias_V = None if head.bias is None else _load_end(settings, model, head, stored, device, dtype, "bias")
    norm = copy.deepcopy(norm).requires_grad_(False)
    norm.load_state_dict(weights, assign=True)
    return TeacherHead(norm.eval(), bias_V, LogitScaling.of(text_config(config)))


def _local_dir(settings: TargetConfig) -> Path | None:
    """The folder `target.path` names, or None for a hub id. Raises UserError when it can be neither."""
    folder = Path(settings.path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"{_named(settings)} holds no config.json; it should be a Hugging Face model folder")
        if settings.revision is not None:
            _logger.warning("target.revision=%s has no effect: target.path=%s is a local folder", settings.revision, settings.path)
        return folder
    if not _HUB_ID.fullmatch(settings.path):
        raise UserError(
            f"target.path={settings.path} does not exist; it should be a local Hugging Face model folder or a hub id like Qwen/Qwen3-8B"
        )
    return None


def _hub_arguments(settings: TargetConfig) -> dict[str, Any]:
    return {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}


def _named(settings: TargetConfig) -> str:
    return f"target.path={settings.path}" if Path(settings.path).exists() else f"target.path={settings.path}, which is no local folder"


def _one_line(error: Exception, length: int = 300) -> str:
    text = " ".join(str(error).split()) or repr(error)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _is_tied(config: PreTrainedConfig, text: PreTrainedConfig, written: dict[str, Any]) -> bool:
    """The flag of the language model's section if written there, else the wrapper's if written, else the model's default.

    Wrapper classes have defaults of their own, which contradict the section in published configs (Kimi-K2.5, Mistral 3).
    """
    sections = [written.get(name) or {} for name in config.sub_configs if getattr(config, name, None) is text]
    for section in (*sections, written):
        if "tie_word_embeddings" in section:
            return bool(section["tie_word_embeddings"])
    return bool(text.tie_word_embeddings)


def _model_class(config: PreTrainedConfig) -> "type[AutoModelForCausalLM] | type[AutoModelForMultimodalLM]":
    from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForMultimodalLM

    is_wrapper = text_config(config) is not config
    return AutoModelForMultimodalLM if is_wrapper and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING else AutoModelForCausalLM


def _module_name(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _head(model: "PreTrainedModel") -> nn.Module:
    head = model.get_output_embeddings() or model.get_decoder().get_output_embeddings()
    if head is None:
        raise UserError(f"target.path: {type(model).__name__} has no head, so it is no language model")
    return head


def _refuse_missing(settings: TargetConfig, model: "PreTrainedModel", missing: set[str]) -> None:
    language = [_module_name(model, _find_decoder(model)), _module_name(model, _head(model))]
    lost = sorted(name for name in missing if any(part == "" or name.startswith(f"{part}.") for part in language))
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise UserError(f"{_named(settings)} lacks {', '.join(lost[:3])}{more}: transformers would go on with random weights")


def _find_decoder(model: "PreTrainedModel") -> nn.Module:
    """Some wrappers (Llama 4) name a language model with its head; the decoder is inside."""
    decoder = model.get_decoder()
    return decoder if decoder is model else _find_decoder(decoder)


def _find_layers(decoder: nn.Module, num_layers: int) -> nn.ModuleList:
    found = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == num_layers]
    if len(found) != 1:
        raise UserError(f"target decoder {type(decoder).__name__} has {len(found)} lists of {num_layers} layers, expected one")
    return found[0]


def _find_final_norm(decoder: nn.Module, layers: nn.ModuleList) -> nn.Module:
    """The first norm registered behind the layers: `norm`, `final_layernorm`, `ln_f`, `embedding_norm`, as the family calls it."""
    children = list(decoder.named_children())
    behind = children[[child is layers for _, child in children].index(True) :]
    norms = [child for name, child in behind if "norm" in name or name.startswith("ln_")]
    if not norms:
        raise UserError(f"target decoder {type(decoder).__name__} has no norm behind its layers")
    return norms[0]


def _refuse_rescaled(settings: TargetConfig, model: "PreTrainedModel", text: PreTrainedConfig) -> None:
    embedding, head = model.get_input_embeddings(), _head(model)
    why = [f"{name}={getattr(text, name)}" for name in _RESCALING if getattr(text, name, None) not in (None, False, 1)]
    if type(embedding) is not nn.Embedding:
        why.append(f"its embedding is a {type(embedding).__name__}, which scales or normalises the rows")
    if type(head) is not nn.Linear or head.bias is not None:
        why.append(f"its head is {head!r} instead of a linear layer without bias")
    if why:
        raise UserError(f"{_named(settings)} ({text.model_type}) cannot lend its embedding and head to a drafter yet: {'; '.join(why)}")


def _load_end(
    settings: TargetConfig,
    model: "PreTrainedModel",
    module: nn.Module,
    stored: dict[str, StoredTensor],
    device: torch.device,
    dtype: torch.dtype,
    parameter: str = "weight",
) -> torch.Tensor:
    found = _find_stored(model, module, stored, parameter)
    name, wanted = f"{_module_name(model, module)}.{parameter}", module.get_parameter(parameter)
    if found is None:
        relatives = [key for key in stored if key.startswith(f"{_module_name(model, module)}.")]
        if relatives and wanted.ndim == 2:
            raise UserError(f"{_named(settings)} holds {name} in packed form ({', '.join(relatives[:3])}); it has to be a plain matrix")
        why = ", and its config does not tie the head to the embedding" if wanted.ndim == 2 else ""
        raise UserError(f"{_named(settings)} lacks {name}{why}")
    if found.dtype not in _PLAIN_DTYPES or found.shape != tuple(wanted.shape):
        kind = "matrix" if wanted.ndim == 2 else "vector"
        raise UserError(
            f"{_named(settings)} holds {name} as {found.dtype} {list(found.shape)}; it has to be a plain {kind} of "
            f"{list(wanted.shape)} in float32, bfloat16 or float16"
        )
    return read_tensor(found, device).to(dtype)


def _find_stored(
    model: "PreTrainedModel", module: nn.Module, stored: dict[str, StoredTensor], parameter: str = "weight"
) -> StoredTensor | None:
    """The stored tensor that transformers would load as this module's parameter: older checkpoints name the same tensor differently."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    name = f"{_module_name(model, module)}.{parameter}"
    if name in stored:
        return stored[name]
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    parameters = model.state_dict()
    for key in (key for key, tensor in stored.items() if tensor.shape == tuple(module.get_parameter(parameter).shape)):
        if rename_source_key(key, renamings, converters, model.base_model_prefix, parameters)[0] == name:
            return stored[key]
    return None


def _tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """All that decides ids; padding and truncation are left out, because calling a fast tokenizer changes them."""
    if not tokenizer.is_fast:
        return {"vocabulary": tokenizer.get_vocab()}
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    return {key: value for key, value in state.items() if key not in ("padding", "truncation")}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True, default=str).encode()).hexdigest()[:16]
