"""The layer-index contract: which hidden states of the target a drafter reads, and every other name the field has for them.

A **layer id** is the 0-based index of a decoder layer of the target's language model (N layers); its feature is the residual stream
*after* that layer, before any final norm. Most other conventions count the embeddings as 0 and write the same tensor one higher;
this file holds that shift, nowhere else is 1 added to a layer index. Comes in: ids from the settings, or a drafter's `config.json`;
goes out: `LayerIds` in any convention, and the `FeatureContract` that features, checkpoints and exports carry. Imports no torch.

Source of the conventions: z-lab dflash 0.1.0 (`model.py`), vLLM 0.33 (`eagle3_utils.py`), SGLang 0.5.23 (`dflash_utils.py`),
speculators 0.9.0, transformers 5.24 (`candidate_generator.py`), TensorRT-LLM, llama.cpp and ONNX Runtime GenAI converters.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from dflash_train.errors import UserError


class Convention(StrEnum):
    """Who writes the number, and under which key."""

    zlab = "dflash_config.target_layer_ids"  # also SpecForge, SGLang's and vLLM's reading of that key
    transformers = "transformers target_layer_ids"
    tensorrt_llm = "TensorRT-LLM layers_to_capture"
    mlx = "MLX layer hooks"
    hf_hidden_states = "Hugging Face hidden_states"
    vllm_aux = "vLLM aux layer ids"
    sglang_capture = "SGLang capture points"
    speculators_aux = "speculators aux_hidden_state_layer_ids"
    gguf = "GGUF dflash.target_layers"
    onnx_genai = "ONNX Runtime GenAI aux_hidden_state_layers"


_UNSHIFTED = {Convention.zlab, Convention.transformers, Convention.tensorrt_llm, Convention.mlx}

_CONFIG_KEYS = {
    "dflash_config.target_layer_ids": Convention.zlab,
    "target_layer_ids": Convention.zlab,  # where z-lab's first drafters and transformers keep it
    "dspark_target_layer_ids": Convention.zlab,
    "eagle_aux_hidden_state_layer_ids": Convention.vllm_aux,  # vLLM prefers it to all others
    "aux_hidden_state_layer_ids": Convention.speculators_aux,
    "dflash_config.layer_ids": Convention.vllm_aux,
    "eagle_config.layer_ids": Convention.vllm_aux,
}


@dataclass(frozen=True)
class LayerIds:
    """Valid layer ids of one target: strictly increasing, 0 to N-2.

    Servers capture in ascending order and disagree with each other about the last layer (its output before or after the final norm),
    so both are refused here. Raises UserError naming the id and the range.
    """

    ids: tuple[int, ...]
    num_target_layers: int

    def __post_init__(self) -> None:
        if not self.ids:
            raise UserError(f"layer ids [] are empty: name at least one of {self._allowed()}")
        for number in self.ids:
            self._check_id(number)
        if any(right <= left for left, right in zip(self.ids, self.ids[1:], strict=False)):
            raise UserError(f"{self}: must be strictly increasing and unique, because servers capture in ascending order")

    def __str__(self) -> str:
        return f"layer ids {list(self.ids)}"

    @property
    def zlab(self) -> tuple[int, ...]:
        """`target_layer_ids` of z-lab, SpecForge, SGLang, TensorRT-LLM, MLX and transformers: the ids themselves."""
        return self.to_convention(Convention.zlab)

    @property
    def hf_hidden_states(self) -> tuple[int, ...]:
        """Indices into the `hidden_states` tuple of transformers, where 0 is the embeddings."""
        return self.to_convention(Convention.hf_hidden_states)

    @property
    def num_hf_hidden_states(self) -> int:
        """Length of the `hidden_states` tuple: the embeddings and one entry per layer."""
        return self.num_target_layers + 1

    @property
    def num_computed_layers(self) -> int:
        """Layers that have to run for the features: those up to the last id."""
        return self.ids[-1] + 1

    @property
    def vllm_aux(self) -> tuple[int, ...]:
        """vLLM's aux layer ids and `eagle_aux_hidden_state_layer_ids`."""
        return self.to_convention(Convention.vllm_aux)

    @property
    def sglang_capture(self) -> tuple[int, ...]:
        """SGLang's capture points: the stream that enters that layer."""
        return self.to_convention(Convention.sglang_capture)

    @property
    def speculators_aux(self) -> tuple[int, ...]:
        """`aux_hidden_state_layer_ids` of speculators."""
        return self.to_convention(Convention.speculators_aux)

    @property
    def gguf(self) -> tuple[int, ...]:
        """`dflash.target_layers` of llama.cpp."""
        return self.to_convention(Convention.gguf)

    def to_convention(self, convention: Convention) -> tuple[int, ...]:
        """The same layers as `convention` writes them."""
        return self.ids if convention in _UNSHIFTED else tuple(layer_id + 1 for layer_id in self.ids)

    @classmethod
    def from_convention(cls, convention: Convention, numbers: Iterable[int], num_target_layers: int) -> "LayerIds":
        """Inverse of `to_convention`. Raises UserError that shows the foreign numbers as well."""
        numbers = tuple(numbers)
        for number in numbers:
            _check_whole(number, f"{convention} {list(numbers)}")
        ids = numbers if convention in _UNSHIFTED else tuple(number - 1 for number in numbers)
        try:
            return cls(ids, num_target_layers)
        except UserError as error:
            if convention in _UNSHIFTED:
                raise
            raise UserError(f"{convention} {list(numbers)}, which are {error}") from error

    @classmethod
    def from_drafter_config(cls, config: dict[str, Any], num_target_layers: int) -> "LayerIds":
        """Reads a drafter's `config.json`; every place in which it names its layers has to say the same.

        Ids are never guessed: a config that names none is refused. Raises UserError.
        """
        found = {key: _lookup(config, key) for key in _CONFIG_KEYS if _lookup(config, key) is not None}
        if not found:
            raise UserError(
                "the drafter's config.json has no dflash_config.target_layer_ids: the layers it was trained on cannot be guessed, "
                "a spacing formula is right for few published drafters"
            )
        read = {key: cls.from_convention(_CONFIG_KEYS[key], _as_list(key, numbers), num_target_layers) for key, numbers in found.items()}
        if len(set(read.values())) > 1:
            places = ", ".join(f"{key}={found[key]} (layer ids {list(layer_ids.ids)})" for key, layer_ids in read.items())
            raise UserError(f"the drafter's config.json contradicts itself about the target's layers: {places}")
        return next(iter(read.values()))

    def _check_id(self, number: int) -> None:
        _check_whole(number, str(self))
        last = self.num_target_layers - 1
        if 0 <= number < last:
            return
        if number == last:
            why = (
                "is the last layer: servers take its output before the final norm and Hugging Face after it; "
                "features.teacher_state=true is the way to have it"
            )
        elif number == self.num_target_layers:
            why = f"is not a layer of this target (0..{last}), it is another convention's name for the output of layer {last}"
        else:
            why = f"is not a layer of this target, which has {self.num_target_layers} layers (0..{last})"
        raise UserError(f"{self}: {number} {why}; context features take {self._allowed()}")

    def _allowed(self) -> str:
        return f"0..{self.num_target_layers - 2}"


def zlab_spacing(num_target_layers: int, num_features: int) -> list[int]:
    """z-lab's even spacing from layer 1 to N-3 (dflash 0.1.0 `build_target_layer_ids`), to be written out into a recipe.

    Raises UserError when the target is too shallow for `num_features` different layers.
    """
    if num_features == 1:
        ids = [num_target_layers // 2]
    else:
        first, last = 1, num_target_layers - 3
        ids = [round(first + i * (last - first) / (num_features - 1)) for i in range(num_features)]
    return list(LayerIds(tuple(ids), num_target_layers).ids)


_STREAM_COUNTS = ("hc_mult", "hc_count", "altup_num_inputs")


def refuse_residual_streams(text_config: Any) -> None:
    """Raises UserError for targets whose layers hand on several residual streams, such as DeepSeek-V4, GLM-5-Next or Gemma 3n.

    Their features are [tokens, streams, D]; which reduction a server applies is not agreed on.
    """
    for name in _STREAM_COUNTS:
        count = getattr(text_config, name, None)
        if isinstance(count, int) and count > 1:
            raise UserError(
                f"target of type {text_config.model_type} carries {count} residual streams ({name}={count}, hyper-connections): "
                "its layers have no single output that servers agree on, so it cannot be a target yet"
            )


@dataclass(frozen=True)
class FeatureContract:
    """What a feature dataset, a checkpoint and an export were made from; compared whole whenever one of them is read."""

    layer_ids: LayerIds
    hidden_size: int
    teacher_state: bool  # whether the input of the final norm is kept besides the features
    target: dict[str, Any]  # `target.target_identity`
    tokenizer: dict[str, Any]  # `target.tokenizer_identity`

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self) | {"layer_ids": list(self.layer_ids.ids), "num_target_layers": self.layer_ids.num_target_layers}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> "FeatureContract":
        """Inverse of `to_dict`. Raises UserError for a contract that lacks a field or holds other ones."""
        try:
            rest = dict(value)
            layer_ids = LayerIds(tuple(rest.pop("layer_ids")), rest.pop("num_target_layers"))
            return cls(layer_ids=layer_ids, **rest)
        except (KeyError, TypeError) as error:
            raise UserError(f"feature contract {_shorten(value)} is not one of this version: {error}") from error

    def differences(self, other: "FeatureContract") -> list[str]:
        """One string per differing field, with the value here and the value there."""
        here, there = dict(_leaves(self.to_dict())), dict(_leaves(other.to_dict()))
        names = list(dict.fromkeys([*here, *there]))
        pairs = [(name, here.get(name, "nothing"), there.get(name, "nothing")) for name in names]
        return [f"{name}: {_shorten(mine)} != {_shorten(theirs)}" for name, mine, theirs in pairs if mine != theirs]

    def require_equal(self, other: "FeatureContract", ours: str, theirs: str) -> None:
        """Raises UserError that shows both sides; `ours` and `theirs` say where the two contracts come from."""
        if differences := self.differences(other):
            raise UserError(f"{ours} and {theirs} do not belong together ({ours} != {theirs}): {'; '.join(differences)}")


def check_mask_token_id(
    mask_token_id: int, embedding_rows: int, special: dict[str, Collection[int]], used: Collection[int] = frozenset()
) -> None:
    """Raises UserError unless the mask token is a row of the target's embedding that nothing else uses.

    `special` maps a role ("pad", "eos", "bos") to its ids, `used` holds ids that occur in the data. The message lists unused ids.
    """
    taken = [role for role, ids in special.items() if mask_token_id in ids]
    if not 0 <= mask_token_id < embedding_rows:
        why = f"is outside the target's embedding rows 0..{embedding_rows - 1}"
    elif taken:
        why = f"is the target's {' and '.join(taken)} token"
    elif mask_token_id in used:
        why = "occurs in the data"
    else:
        return
    occupied = set(used).union(*special.values())
    unused = [row for row in reversed(range(embedding_rows)) if row not in occupied][:5]
    raise UserError(f"drafter.mask_token_id={mask_token_id} {why}; unused ids are for example {sorted(unused)}")


def _check_whole(number: Any, where: str) -> None:
    if not isinstance(number, int) or isinstance(number, bool):
        raise UserError(f"{where}: {number!r} is not a whole number")


def _lookup(config: dict[str, Any], dotted: str) -> Any:
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _as_list(key: str, numbers: Any) -> Sequence[int]:
    if not isinstance(numbers, list | tuple):
        raise UserError(f"the drafter's config.json has {key}={numbers!r}, which is not a list of layers")
    return numbers


def _leaves(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield from _leaves(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def _shorten(value: Any, length: int = 60) -> str:
    text = str(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."
