"""bf16 keeps 8 bits of mantissa: worked by hand."""

import pytest
import torch

from dflash_train.errors import UserError
from dflash_train.features.codec import Bf16Codec, codec_named


def test_bf16_error_by_hand():
    features_TLD = torch.tensor([[[1.0, 2.0], [1 + 2**-8, 0.0], [0.0, 0.0]]])  # 1 + 2^-8 is a tie and rounds to 1
    codec = codec_named("bf16")
    decoded_TLD = codec.decode(codec.encode(features_TLD))
    assert decoded_TLD.dtype == torch.bfloat16
    assert decoded_TLD.tolist() == [[[1.0, 2.0], [1.0, 0.0], [0.0, 0.0]]]
    assert codec.relative_error(features_TLD) == pytest.approx([0.0, 2**-8 / (1 + 2**-8), 0.0], rel=1e-12)


def test_bf16_is_exact_for_bf16():
    features_TLD = torch.randn(7, 2, 16).bfloat16()
    assert Bf16Codec().relative_error(features_TLD) == [0.0, 0.0]


def test_unknown_codec():
    with pytest.raises(UserError, match="'zip' is unknown.*bf16"):
        codec_named("zip")
