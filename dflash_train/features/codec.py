"""How feature values are stored: a codec turns captured features into the arrays of a shard and back.

Comes in: features [tokens, L, D] in the target's dtype, finite. Goes out: named arrays whose first axis is the token, so that one
sample's rows of every array are contiguous; decoded features are bf16 or fp32. The teacher state is no feature and is always plain bf16.
The bytes of a codec depend on the values alone, not on the device or on how the rows are cut into calls.

Nothing here is compiled: measured with inductor on CPUs without AVX-512, the eager code below is the faster one in both directions.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from dflash_train.errors import UserError


class Codec(ABC):
    """One way of storing features.

    `name` stands in the manifest and in every shard; `spacing` is the largest step between two neighbouring stored values, relative to
    the smaller one.
    """

    name: ClassVar[str]
    spacing: ClassVar[float]

    @abstractmethod
    def token_layout(self, num_layers: int, hidden_size: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Arrays the codec keeps: dtype and shape of one token's part."""

    @abstractmethod
    def encode(self, features_TLD: Tensor) -> dict[str, Tensor]:
        """Arrays of `token_layout`, each [T, ...], on the device of `features_TLD`."""

    @abstractmethod
    def decode(self, arrays: dict[str, Tensor], dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
        """Features [T, L, D] in `dtype` (bf16 or fp32), on the device of `arrays`.

        When `out` [T, L, D] is given it is filled, in its own dtype, and returned; otherwise the result may share memory with `arrays`.
        """

    def squared_error(self, features_TLD: Tensor) -> tuple[Tensor, Tensor]:
        """Per layer, float64 [L]: the sum of squares of (decoded - exact), and that of the exact features.

        Both add up over pieces of the rows; the root of their quotient is the relative error in the Frobenius norm.
        """
        error_L, size_L = torch.zeros(2, features_TLD.shape[1], dtype=torch.float64, device=features_TLD.device)
        for block_TLD in features_TLD.split(_rows_per_block(features_TLD)):
            exact_TLD = block_TLD.double()
            decoded_TLD = self.decode(self.encode(block_TLD), torch.float32)
            error_L += (decoded_TLD - exact_TLD).square().sum((0, 2))
            size_L += exact_TLD.square().sum((0, 2))
        return error_L, size_L


class Bf16Codec(Codec):
    """bfloat16, two bytes a value: exact for a target that runs in bf16."""

    name = "bf16"
    spacing = 2.0**-7

    def token_layout(self, num_layers: int, hidden_size: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"features": (torch.bfloat16, (num_layers, hidden_size))}

    def encode(self, features_TLD: Tensor) -> dict[str, Tensor]:
        return {"features": features_TLD.to(torch.bfloat16)}

    def decode(self, arrays: dict[str, Tensor], dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
        stored_TLD = arrays["features"]
        if out is None:
            return stored_TLD.to(dtype)
        assert out.shape == stored_TLD.shape
        return out.copy_(stored_TLD)


class Fp8Codec(Codec):
    """FP8 e4m3, one byte a value: sign, 4 bits of exponent, 3 of mantissa, largest value 448; and one fp32 scale per token and layer.

    value = feature * scale. The scale is a power of two, the smallest that brings the row's largest magnitude to 448 or below, so scaling
    is exact everywhere: the only error is the rounding to e4m3, decoded values are exact in bf16, and encoding them again keeps them.
    That error is at most 2**-4 of a value down to 2**-6 * scale and 2**-10 * scale below. A row of zeros has scale 1.

    e4m3 as in "FP8 Formats for Deep Learning" (arXiv 2209.05433) and the OCP 8-bit floating point specification: torch.float8_e4m3fn.
    """

    name = "fp8"
    spacing = 2.0**-3

    def token_layout(self, num_layers: int, hidden_size: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"features": (torch.float8_e4m3fn, (num_layers, hidden_size)), "scales": (torch.float32, (num_layers,))}

    def encode(self, features_TLD: Tensor) -> dict[str, Tensor]:
        """`features` e4m3 [T, L, D] and `scales` fp32 [T, L]. Values beyond 448 * 2**119 (3.0e38) are stored as that."""
        stored_TLD = torch.empty_like(features_TLD, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
        scales_TL = torch.empty(features_TLD.shape[:2], dtype=torch.float32, device=features_TLD.device)
        rows = _rows_per_block(features_TLD)
        for block_TLD, stored, scales in zip(features_TLD.split(rows), stored_TLD.split(rows), scales_TL.split(rows), strict=True):
            exact_TLD = block_TLD.float()
            scales.copy_(_power_of_two_scales(exact_TLD.abs().amax(-1)))
            stored.copy_((exact_TLD / scales.unsqueeze(-1)).clamp_(-448, 448))  # torch's versions differ in what they make of more
        return {"features": stored_TLD, "scales": scales_TL}

    def decode(self, arrays: dict[str, Tensor], dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
        stored_TLD, scales_TL = arrays["features"], arrays["scales"]
        if out is None:
            out = torch.empty(stored_TLD.shape, dtype=dtype, device=stored_TLD.device)
        assert out.shape == stored_TLD.shape
        rows = _rows_per_block(stored_TLD)
        for block_TLD, stored, scales in zip(out.split(rows), stored_TLD.split(rows), scales_TL.split(rows), strict=True):
            block_TLD.copy_(_e4m3_over_256(stored).mul_(scales.unsqueeze(-1) * 256))
        return out


def codec_named(name: str) -> Codec:
    """The codec of a manifest. Raises UserError for a name this version does not know."""
    match name:
        case Bf16Codec.name:
            return Bf16Codec()
        case Fp8Codec.name:
            return Fp8Codec()
    raise UserError(f"feature codec {name!r} is unknown to this version: it reads {Bf16Codec.name} and {Fp8Codec.name}")


def _rows_per_block(features_TLD: Tensor) -> int:
    """Rows worked on at once: temporaries stay small whatever T is, near the CPU's caches; a GPU wants more work per launch."""
    num_values = 2**20 if features_TLD.device.type == "cpu" else 2**24
    return max(1, num_values // (features_TLD.shape[1] * features_TLD.shape[2]))


def _power_of_two_scales(largest_TL: Tensor) -> Tensor:
    """The smallest power of two s with largest / s <= 448, from 2**-116 to 2**119; 1 where `largest_TL` (fp32, >= 0) is 0 or subnormal.

    Within these bounds no value that counts, stored or decoded, is subnormal: a process that flushes those to zero makes the same bytes.
    """
    bits_TL = largest_TL.view(torch.int32)
    exponent_TL = ((bits_TL + 0x1FFFFF) >> 23) - 8  # 448 is 1.75 * 2**8: a mantissa above 1.75 carries into the exponent
    scales_TL = (exponent_TL.clamp(127 - 116, 127 + 119) << 23).view(torch.float32)
    return torch.where(bits_TL < 1 << 23, 1.0, scales_TL)


def _e4m3_over_256(stored: Tensor) -> Tensor:
    """fp32 of e4m3 values / 256, exact: several times the speed of torch's own conversion on a CPU, which takes value by value.

    With its exponent and mantissa moved up to those of fp16, whose bias is larger by 8, an e4m3 value reads as fp16, subnormals included.
    Widening copied the sign into bits 14 and 15; it stays in 15.
    """
    bits = stored.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    return bits.view(torch.float16).float()
