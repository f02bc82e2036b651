"""Faults that put wrong features into a dataset: each wraps `Capture.run` or `Capture._decode`, as a wrong capture would behave.

Every fault names what the checks have to say of it, as a regular expression.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from dflash_train.capture import Capture, Captured
from dflash_train.layers import LayerIds

Run = Callable[[Capture, torch.Tensor, torch.Tensor], Captured]
DIFFERS = r"sample sample-\d+, row \d+ of \d+: the feature of layer {layer} is not what the target gives for this sample alone"


@dataclass(frozen=True)
class Fault:
    """`plant` turns the genuine run into a wrong one; `at_extraction` and `by_verify` are what is said."""

    plant: Callable[[Run], Run]
    at_extraction: str
    by_verify: str | None  # None: no such file can be written


def all_zero(genuine: Run) -> Run:
    def run(capture, input_ids_BT, mask_BT):
        captured = genuine(capture, input_ids_BT, mask_BT)
        captured.features_BTLD[0, :, 1] = 0
        return captured

    return run


def not_finite(value: float) -> Callable[[Run], Run]:
    def plant(genuine: Run) -> Run:
        def run(capture, input_ids_BT, mask_BT):
            captured = genuine(capture, input_ids_BT, mask_BT)
            captured.features_BTLD[0, 2, 1, 5] = value
            return captured

        return run

    return plant


def captured_twice(genuine: Run) -> Run:
    def run(capture, input_ids_BT, mask_BT):
        captured = genuine(capture, input_ids_BT, mask_BT)
        captured.features_BTLD[:, :, 1] = captured.features_BTLD[:, :, 0]
        return captured

    return run


def shifted_by_one(genuine: Run) -> Run:
    def run(capture, input_ids_BT, mask_BT):
        ids = capture.layer_ids
        shifted = LayerIds(tuple(layer_id - 1 for layer_id in ids.ids), ids.num_target_layers)
        return genuine(Capture(capture.target, shifted, capture.teacher_state), input_ids_BT, mask_BT)

    return run


def post_norm(genuine: Run) -> Run:
    def run(capture, input_ids_BT, mask_BT):
        captured = genuine(capture, input_ids_BT, mask_BT)
        return replace(captured, features_BTLD=capture.target.final_norm.forward(captured.features_BTLD))

    return run


def swapped(genuine: Run) -> Run:
    def run(capture, input_ids_BT, mask_BT):
        captured = genuine(capture, input_ids_BT, mask_BT)
        return replace(captured, features_BTLD=captured.features_BTLD.roll(1, 0))

    return run


def row_missing(genuine: Run) -> Run:
    """The first token's row is lost, the following ones move up."""

    def run(capture, input_ids_BT, mask_BT):
        captured = genuine(capture, input_ids_BT, mask_BT)
        features = captured.features_BTLD
        return replace(captured, features_BTLD=torch.cat([features[:, 1:], features[:, -1:]], dim=1))

    return run


def fewer_rows(genuine: Run) -> Run:
    def run(capture, input_ids_BT, mask_BT):
        captured = genuine(capture, input_ids_BT, mask_BT)
        return replace(captured, features_BTLD=captured.features_BTLD[:, :-1])

    return run


def plane_missing(genuine: Run) -> Run:
    def run(capture, input_ids_BT, mask_BT):
        captured = genuine(capture, input_ids_BT, mask_BT)
        return replace(captured, features_BTLD=captured.features_BTLD[:, :, :1])

    return run


def wrong_dtype(genuine: Run) -> Run:
    def run(capture, input_ids_BT, mask_BT):
        captured = genuine(capture, input_ids_BT, mask_BT)
        return replace(captured, features_BTLD=captured.features_BTLD.half())

    return run


def padding_let_in(genuine: Run) -> Run:
    """Left padding without a mask: harmless nowhere, and recurrent layers carry it into every token."""

    def run(capture, input_ids_BT, mask_BT):
        lengths, width = mask_BT.sum(1).tolist(), mask_BT.shape[1]
        left_BT = torch.stack([ids.roll(width - length) for ids, length in zip(input_ids_BT, lengths, strict=True)])
        captured = genuine(capture, left_BT, torch.ones_like(mask_BT))
        rows = [row.roll(length - width, 0) for row, length in zip(captured.features_BTLD, lengths, strict=True)]
        return replace(captured, features_BTLD=torch.stack(rows))

    return run


FAULTS = {
    "all zero": Fault(all_zero, *[r"sample sample-\d+, row 0 of \d+: the feature of layer 3 is zero in all rows"] * 2),
    "nan": Fault(not_finite(float("nan")), *[r"sample sample-\d+, row 2 of \d+: the feature of layer 3 is nan"] * 2),
    "inf": Fault(not_finite(float("inf")), *[r"sample sample-\d+, row 2 of \d+: the feature of layer 3 is inf"] * 2),
    "captured twice": Fault(
        captured_twice, *[r"sample sample-\d+, row 0 of \d+: the features of layers 1 and 3 are equal in all \d+ rows"] * 2
    ),
    "shifted by one": Fault(shifted_by_one, *[DIFFERS.format(layer=1)] * 2),
    "post-norm": Fault(post_norm, *[DIFFERS.format(layer=1)] * 2),
    "two samples swapped": Fault(swapped, *[DIFFERS.format(layer=1)] * 2),
    "a row missing": Fault(row_missing, *[DIFFERS.format(layer=1)] * 2),
    "padding let in": Fault(padding_let_in, *[DIFFERS.format(layer=1)] * 2),
    "fewer rows": Fault(fewer_rows, r"sample sample-\d+, row 0 of \d+ .*features are \[\d+, 2, 32\] .*, not \[\d+, 2, 32\]", None),
    "plane missing": Fault(plane_missing, r"sample sample-\d+, row 0 of \d+ .*features are \[\d+, 1, 32\] .* not \[\d+, 2, 32\]", None),
    "wrong dtype": Fault(wrong_dtype, r"sample sample-\d+, row 0 of \d+ .*features are .* in torch.float16, not .* in torch.float32", None),
}
