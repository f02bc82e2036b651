"""How feature values are stored: a codec turns captured features into the arrays of a shard and back.

Comes in: features [tokens, L, D] in the target's dtype, finite. Goes out: named arrays whose first axis is the token, so that one
sample's rows of every array are contiguous; decoded features are bf16. The teacher state is no feature and is always plain bf16.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from dflash_train.errors import UserError


class Codec(ABC):
    """One way of storing features. `name` stands in the manifest and in every shard."""

    name: ClassVar[str]

    @abstractmethod
    def token_layout(self, num_layers: int, hidden_size: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Arrays the codec keeps: dtype and shape of one token's part."""

    @abstractmethod
    def encode(self, features_TLD: Tensor) -> dict[str, Tensor]:
        """Arrays of `token_layout`, each [T, ...], on the device of `features_TLD`."""

    @abstractmethod
    def decode(self, arrays: dict[str, Tensor]) -> Tensor:
        """Features [T, L, D] in bf16."""

    def relative_error(self, features_TLD: Tensor) -> list[float]:
        """Per layer: Frobenius norm of (decoded - features) divided by that of features; 0 for a layer of zeros."""
        exact_TLD = features_TLD.double()
        error_TLD = self.decode(self.encode(features_TLD)).double() - exact_TLD
        squares_L = exact_TLD.square().sum((0, 2)).clamp_min(torch.finfo(torch.float64).tiny)
        return (error_TLD.square().sum((0, 2)) / squares_L).sqrt().tolist()


class Bf16Codec(Codec):
    """bfloat16, two bytes a value: exact for a target that runs in bf16."""

    name = "bf16"

    def token_layout(self, num_layers: int, hidden_size: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"features": (torch.bfloat16, (num_layers, hidden_size))}

    def encode(self, features_TLD: Tensor) -> dict[str, Tensor]:
        return {"features": features_TLD.to(torch.bfloat16)}

    def decode(self, arrays: dict[str, Tensor]) -> Tensor:
        return arrays["features"]


def codec_named(name: str) -> Codec:
    """The codec of a manifest. Raises UserError for a name this version does not know."""
    match name:
        case Bf16Codec.name:
            return Bf16Codec()
    raise UserError(f"feature codec {name!r} is unknown to this version: it reads {Bf16Codec.name}")
