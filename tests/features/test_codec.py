"""bf16 keeps 8 bits of mantissa, e4m3 keeps 4: worked by hand, and the fast ways against plain ones."""

import math

import pytest
import torch
from torch import Tensor

from dflash_train.errors import UserError
from dflash_train.features.codec import Bf16Codec, Codec, Fp8Codec, codec_named

CODECS = [Bf16Codec(), Fp8Codec()]


def heavy_tailed(num_tokens: int = 64, dtype: torch.dtype = torch.float32) -> Tensor:
    """[T, 3, 96] like a residual stream: Student-t values, a few channels far larger, rows of every size, a row of zeros."""
    generator = torch.Generator().manual_seed(5)
    normal_TLD = torch.randn(num_tokens, 3, 96, generator=generator)
    features_TLD = normal_TLD / torch.randn(num_tokens, 3, 96, generator=generator).abs().clamp_min(0.05)
    features_TLD[:, :, [7, 50]] *= torch.tensor([300.0, 2000.0])
    features_TLD *= torch.exp2(torch.randint(-6, 7, (num_tokens, 3, 1), generator=generator))
    features_TLD[num_tokens // 2, 1] = 0
    return features_TLD.clamp(-60000, 60000).to(dtype)  # fp16 ends at 65504


def plain_fp8(features_TLD: Tensor) -> tuple[Tensor, Tensor]:
    """Decoded values and scales in fp64, a row at a time: the scale found by trying, the values rounded to multiples of their step."""
    decoded_TLD, scales_TL = features_TLD.double(), torch.ones(features_TLD.shape[:2], dtype=torch.float64)
    for token, layer in torch.cartesian_prod(*map(torch.arange, features_TLD.shape[:2])).tolist():
        largest = decoded_TLD[token, layer].abs().max().item()
        if largest > 0:
            scales_TL[token, layer] = min(2.0**k for k in range(-116, 120) if largest <= 448 * 2.0**k)
        exponent_D = torch.frexp(decoded_TLD[token, layer] / scales_TL[token, layer]).exponent - 1
        step_D = scales_TL[token, layer] * torch.exp2(exponent_D.clamp_min(-6).double() - 3)
        decoded_TLD[token, layer] = (decoded_TLD[token, layer] / step_D).round() * step_D  # torch.round: ties to even
    return decoded_TLD, scales_TL


def round_trip(codec: Codec, features_TLD: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return codec.decode(codec.encode(features_TLD), dtype)


def test_bf16_by_hand():
    features_TLD = torch.tensor([[[1.0, 2.0], [1 + 2**-8, 0.0], [0.0, 0.0]]])  # 1 + 2^-8 is a tie and rounds to 1
    codec = codec_named("bf16")
    decoded_TLD = codec.decode(codec.encode(features_TLD))
    assert decoded_TLD.dtype == torch.bfloat16
    assert decoded_TLD.tolist() == [[[1.0, 2.0], [1.0, 0.0], [0.0, 0.0]]]
    error_L, size_L = codec.squared_error(features_TLD)
    assert error_L.dtype == size_L.dtype == torch.float64
    assert error_L.tolist() == [0.0, 2**-16, 0.0] and size_L.tolist() == [5.0, (1 + 2**-8) ** 2, 0.0]


def test_bf16_is_exact_for_bf16():
    features_TLD = torch.randn(7, 2, 16).bfloat16()
    assert torch.equal(round_trip(Bf16Codec(), features_TLD, torch.bfloat16), features_TLD)
    assert Bf16Codec().squared_error(features_TLD)[0].tolist() == [0.0, 0.0]


# A step is 1/8 of the power of two below: 32 from 256, 16 from 128, 2 from 16; 2^-9 below 2^-6. Ties go to the even mantissa.
@pytest.mark.parametrize(
    ("row", "scale", "stored", "decoded"),
    [
        ([448, 1, 0, -0.5], 1, [0x7E, 0x38, 0x00, 0xB0], [448, 1, 0, -0.5]),
        ([449, 1, 3, -448], 2, [0x76, 0x30, 0x3C, 0xF6], [448, 1, 3, -448]),  # 224.5 rounds to 224
        ([-1000, 1, 100, 0], 4, [0xF8, 0x28, 0x5C, 0x00], [-1024, 1, 96, 0]),  # 250 rounds to 256; 25 is a tie of 24 and 26
        ([448, 17, 19, 2**-10], 1, [0x7E, 0x58, 0x5A, 0x00], [448, 16, 20, 0]),
        ([300, 3 * 2**-10, 2**-9, 2**-6], 1, [0x79, 0x02, 0x01, 0x08], [288, 2**-8, 2**-9, 2**-6]),
        ([3.5, 0.25, 2**-17, 2**-18], 2**-7, [0x7E, 0x60, 0x00, 0x00], [3.5, 0.25, 0, 0]),
        ([0, 0, 0, 0], 1, [0, 0, 0, 0], [0, 0, 0, 0]),
        ([2**-120, -(2**-125), 0, 0], 2**-116, [0x18, 0x81, 0, 0], [2**-120, -(2**-125), 0, 0]),
        ([2**-130, 0, 0, 0], 1, [0, 0, 0, 0], [0, 0, 0, 0]),  # subnormal in fp32
        ([1.75 * 2**127, 2.0**127, 0, 0], 2**119, [0x7E, 0x78, 0, 0], [1.75 * 2**127, 2.0**127, 0, 0]),
        ([torch.finfo(torch.float32).max, 2.0**100, 0, 0], 2**119, [0x7E, 0x00, 0, 0], [1.75 * 2**127, 0, 0, 0]),
    ],
)
def test_fp8_by_hand(row: list[float], scale: float, stored: list[int], decoded: list[float]):
    codec = codec_named("fp8")
    arrays = codec.encode(torch.tensor([[row]], dtype=torch.float32))
    assert arrays["scales"].tolist() == [[scale]]
    assert arrays["features"].view(torch.uint8).tolist() == [[stored]]
    assert codec.decode(arrays, torch.float32).tolist() == [[decoded]]


def test_fp8_error_by_hand():
    features_TLD = torch.tensor([[[448.0, 17.0], [0.0, 0.0]], [[448.0, 19.0], [0.0, 3.0]]])
    error_L, size_L = Fp8Codec().squared_error(features_TLD)
    assert error_L.tolist() == [2.0, 0.0] and size_L.tolist() == [2 * 448**2 + 17**2 + 19**2, 9.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_equals_the_plain_way(dtype: torch.dtype):
    features_TLD = heavy_tailed(dtype=dtype)
    arrays = Fp8Codec().encode(features_TLD)
    decoded_TLD, scales_TL = plain_fp8(features_TLD)
    assert torch.equal(arrays["scales"].double(), scales_TL) and len(scales_TL.unique()) > 5
    assert torch.equal(Fp8Codec().decode(arrays, torch.float32).double(), decoded_TLD)


@pytest.mark.parametrize("scale", [2.0**-116, 1.0, 2.0**119])
def test_fp8_decodes_every_byte(scale: float):
    stored = torch.arange(256).to(torch.uint8)
    stored = stored[(stored & 0x7F) != 0x7F].view(1, 2, 127).view(torch.float8_e4m3fn)  # those two are nan
    arrays = {"features": stored, "scales": torch.full((1, 2), scale)}
    exact = stored.float() * scale
    assert exact.isfinite().all() and exact.unique().numel() == 253  # 0 and -0 are one
    assert torch.equal(Fp8Codec().decode(arrays, torch.float32), exact)
    assert torch.equal(Fp8Codec().decode(arrays).float(), exact)


def test_fp8_scales_are_the_smallest_powers_of_two():
    features_TLD = heavy_tailed()
    scales_TL, largest_TL = Fp8Codec().encode(features_TLD)["scales"], features_TLD.abs().amax(-1)
    assert {math.frexp(scale)[0] for scale in scales_TL.flatten().tolist()} == {0.5}
    some_TL = largest_TL > 0
    assert (largest_TL / scales_TL)[some_TL].min() > 224 and (largest_TL / scales_TL).max() <= 448
    assert scales_TL[~some_TL].tolist() == [1.0]


def test_fp8_error_bounds():
    features_TLD = heavy_tailed()
    arrays = Fp8Codec().encode(features_TLD)
    error_TLD = (Fp8Codec().decode(arrays, torch.float32) - features_TLD).abs()
    scales_TL1 = arrays["scales"].unsqueeze(-1)
    normal_TLD = features_TLD.abs() >= 2**-6 * scales_TL1
    assert 0.02 < normal_TLD.logical_not().float().mean() < 0.98  # both kinds are there
    assert (error_TLD / features_TLD.abs())[normal_TLD].max() <= 2**-4
    assert (error_TLD / scales_TL1)[~normal_TLD].max() <= 2**-10


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_encoding_again_keeps_the_values(codec: Codec):
    once_TLD = round_trip(codec, heavy_tailed(), torch.bfloat16)
    assert torch.equal(round_trip(codec, once_TLD, torch.bfloat16), once_TLD)
    assert not torch.equal(once_TLD, heavy_tailed())


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_layout_and_pieces(codec: Codec):
    """What `token_layout` says comes out, whatever the pieces; errors add up; bf16 and fp32 decode to the same values."""
    features_TLD = heavy_tailed()
    arrays = codec.encode(features_TLD)
    layout = {name: (array.dtype, array.shape[1:]) for name, array in arrays.items()}
    assert layout == codec.token_layout(3, 96) and all(len(array) == 64 and array.is_contiguous() for array in arrays.values())
    pieces = [codec.encode(piece) for piece in features_TLD.split([1, 0, 40, 23])]
    for name, array in arrays.items():
        assert torch.equal(torch.cat([piece[name] for piece in pieces]).view(torch.uint8), array.view(torch.uint8))
    decoded_TLD, decoded_fp32_TLD = codec.decode(arrays), codec.decode(arrays, torch.float32)
    assert (decoded_TLD.dtype, decoded_fp32_TLD.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(decoded_TLD.float(), decoded_fp32_TLD)
    errors = [torch.stack(codec.squared_error(piece)) for piece in features_TLD.split([1, 0, 40, 23])]
    torch.testing.assert_close(sum(errors), torch.stack(codec.squared_error(features_TLD)), rtol=1e-12, atol=0)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_spacing_is_the_largest_step(codec: Codec):
    stored = round_trip(codec, torch.linspace(128, 256, 2**12).view(1, 1, -1)).unique()
    assert (stored.diff() / stored[:-1]).max() == codec.spacing


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decode_fills_a_part_of_a_buffer(codec: Codec, dtype: torch.dtype):
    arrays = codec.encode(heavy_tailed())
    batch_TLD = torch.full((100, 3, 96), 7.0, dtype=dtype)
    out = batch_TLD[20:84]
    assert codec.decode(arrays, out=out) is out
    assert torch.equal(batch_TLD[20:84], codec.decode(arrays, dtype))
    assert (batch_TLD[:20] == 7).all() and (batch_TLD[84:] == 7).all()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_large_inputs_are_worked_on_in_blocks(codec: Codec):
    features_TLD = torch.randn(300, 2, 4096)  # 2.3 blocks of 2**20 values
    arrays = codec.encode(features_TLD)
    last = codec.encode(features_TLD[-1:])
    assert all(torch.equal(array[-1:].view(torch.uint8), last[name].view(torch.uint8)) for name, array in arrays.items())
    decoded_TLD = codec.decode(arrays, torch.float32)
    assert torch.equal(decoded_TLD[-1:], codec.decode(last, torch.float32))
    error_L, size_L = codec.squared_error(features_TLD)
    torch.testing.assert_close(error_L, (decoded_TLD - features_TLD).double().square().sum((0, 2)))
    torch.testing.assert_close(size_L, features_TLD.double().square().sum((0, 2)))


def test_fp8_does_not_need_subnormals():
    """A process may flush them to zero (torch.set_flush_denormal, libraries built with -ffast-math)."""
    features_TLD = heavy_tailed() * 2.0 ** torch.tensor([-127, -115, 0]).view(1, 3, 1)
    arrays = Fp8Codec().encode(features_TLD)
    decoded_TLD = Fp8Codec().decode(arrays)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        assert torch.tensor([2.0**-130]).mul(2.0**10).item() == 0
        flushed = Fp8Codec().encode(features_TLD)
        assert torch.equal(Fp8Codec().decode(arrays), decoded_TLD)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(flushed["scales"], arrays["scales"]) and len(arrays["scales"].unique()) > 15
    assert torch.equal(flushed["features"].view(torch.uint8), arrays["features"].view(torch.uint8))


def test_unknown_codec():
    with pytest.raises(UserError, match="'zip' is unknown.*bf16 and fp8"):
        codec_named("zip")
