"""Content checks: what features have to be like, whoever made them.

Two kinds. `ContentChecks` looks at all values as they pass: nothing that is not finite, no sample whose layer is all zero, no sample with
two equal layers. stage=extract runs it before encoding, stage=verify on what it decodes. `require_sample` holds a stored sample to the
same sample recomputed alone, unpadded and through `output_hidden_states`: shifted layers, normed states, swapped or missing rows, padding
and batch mates that leak, and a codec or file that garbles all show there. A failed check raises `ContentError`, which names sample,
layer and row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

import torch
from torch import Tensor

from dflash_train.capture import Recomputed, RecomputedTeacher
from dflash_train.errors import UserError
from dflash_train.features.codec import Codec

TEACHER_STATE = "the teacher state"
_FAR_NORM = 10.0  # times the norm that a layer's tokens have elsewhere


def plane_names(layer_ids: Sequence[int]) -> list[str]:
    """What each plane of the features is called in messages."""
    return [f"the feature of layer {layer_id}" for layer_id in layer_ids]


class ContentError(UserError):
    """Features that cannot be what the target gives."""


@dataclass(frozen=True)
class Tolerance:
    """How far a recomputed row may be from the stored one: norm of the difference over norm of the row.

    Batch mates change the order of sums, so rows agree to rounding, and in 16 bits some rows of some models (experts chosen by a near-tie)
    by much more: `median` and `upper` bound the middle and the 95th percentile of a sample's rows, `largest` the worst one.
    """

    median: float
    upper: float
    largest: float
    median_kl: float  # nats between the model's next-token distribution and the one rebuilt from the teacher state

    @classmethod
    def of(cls, compute_dtype: torch.dtype, spacing: float) -> "Tolerance":
        """For a target that computes in `compute_dtype` and a codec whose neighbouring values are `spacing` apart, relative to them."""
        if compute_dtype in (torch.float32, torch.float64):
            return cls(1e-3 + spacing / 4, 1e-3 + spacing, 1e-3 + spacing, median_kl=0.01)
        return cls(0.05 + spacing / 4, 0.5 + spacing, float("inf"), median_kl=0.1)


@dataclass(frozen=True)
class SamplePlaces:
    """Which rows of a shard belong to which sample. `offsets` [S+1]: first row of each sample, and the end."""

    sample_ids: Sequence[str]
    offsets: Tensor

    @property
    def lengths(self) -> list[int]:
        return self.offsets.diff().tolist()

    def span(self, sample: int) -> tuple[int, int]:
        """First row of a sample, and the row behind it."""
        begin, end = self.offsets[sample : sample + 2].tolist()
        return begin, end

    def spans(self, first: int, last: int) -> list[tuple[int, int]]:
        """The spans of the samples whose rows are `first` to `last`-1."""
        bounds = self.offsets[(self.offsets >= first) & (self.offsets <= last)].tolist()
        return list(pairwise(bounds))

    def sample_at(self, row: int) -> int:
        """The sample that owns a row."""
        return int(torch.searchsorted(self.offsets, row, right=True)) - 1

    def of_row(self, row: int) -> str:
        """The place of a row, for messages."""
        sample = self.sample_at(row)
        begin, end = self.span(sample)
        return f"sample {self.sample_ids[sample]}, row {row - begin} of {end - begin}"


@dataclass
class ContentChecks:
    """Looks at the features of one shard's samples, forward by forward."""

    layer_ids: Sequence[int]
    places: SamplePlaces
    _norms_TL: list[Tensor] = field(default_factory=list)

    def check(self, first: int, features_TLD: Tensor, teacher_state_TD: Tensor | None) -> None:
        """Raises ContentError unless these rows, `first` and following, of whole samples, can be features."""
        planes, ids = plane_names(self.layer_ids), self.layer_ids
        norms_TL = self._norms(first, features_TLD, planes)
        if teacher_state_TD is not None:
            self._norms(first, teacher_state_TD[:, None], [TEACHER_STATE])
        for begin, end, one, other in self._twins(first, features_TLD):
            raise ContentError(
                f"{self.places.of_row(begin)}: the features of layers {ids[one]} and {ids[other]} are equal in all {end - begin} rows: "
                "one of them was captured twice"
            )
        self._norms_TL.append(norms_TL)

    def median_norms(self) -> list[float]:
        """Per layer, the median over all rows so far of a row's Euclidean norm."""
        return torch.cat(self._norms_TL).median(0).values.tolist()

    def _norms(self, first: int, values_TPD: Tensor, planes: Sequence[str]) -> Tensor:
        """Euclidean norms [T, P] on the CPU; raises ContentError for what is not finite, and for a sample's plane of zeros."""
        norms_TP = torch.linalg.vector_norm(values_TPD, dim=-1, dtype=torch.float32).cpu()
        for row, plane in (~torch.isfinite(norms_TP)).nonzero().tolist():
            wrong_D = ~torch.isfinite(values_TPD[row, plane])
            if wrong_D.any():  # or else only the norm overflows
                raise ContentError(
                    f"{self.places.of_row(first + row)}: {planes[plane]} is {values_TPD[row, plane][wrong_D][0].item()}: "
                    "the target overflows on this text, or its dtype is too narrow (target.dtype)"
                )
        for row, plane in (norms_TP == 0).nonzero().tolist():
            begin, end = self.places.span(self.places.sample_at(first + row))
            if not norms_TP[begin - first : end - first, plane].any():
                raise ContentError(f"{self.places.of_row(begin)}: {planes[plane]} is zero in all rows: nothing was captured")
        return norms_TP

    def _twins(self, first: int, features_TLD: Tensor) -> Iterator[tuple[int, int, int, int]]:
        """Spans and pairs of planes that are equal; a sample's last row tells nearly always, so only that is read of all."""
        pairs, spans = list(combinations(range(len(self.layer_ids)), 2)), self.places.spans(first, first + len(features_TLD))
        if not pairs:
            return
        last_SLD = features_TLD[torch.tensor([end - 1 - first for _, end in spans], device=features_TLD.device)]
        equal_SP = torch.stack([(last_SLD[:, one] == last_SLD[:, other]).all(-1) for one, other in pairs], dim=1)
        for sample, pair in equal_SP.nonzero().tolist():
            (begin, end), (one, other) = spans[sample], pairs[pair]
            if torch.equal(features_TLD[begin - first : end - first, one], features_TLD[begin - first : end - first, other]):
                yield begin, end, one, other


def far_norms(median_norms: Sequence[float], reference: Sequence[float], layer_ids: Sequence[int]) -> list[str]:
    """One line per layer whose tokens are ten times longer or shorter than those of `reference`."""
    return [
        f"the median norm of the features of layer {layer_id} is {norm:.3g}, elsewhere {usual:.3g}"
        for layer_id, norm, usual in zip(layer_ids, median_norms, reference, strict=True)
        if not usual / _FAR_NORM <= norm <= usual * _FAR_NORM
    ]


def require_sample(sample_id: str, layer_ids: Sequence[int], codec: Codec, arrays: dict[str, Tensor], recomputed: Recomputed) -> None:
    """Holds the stored `arrays` of one sample to the sample recomputed alone.

    Raises ContentError, naming sample, layer and row, unless features, teacher state and the log-probabilities that follow from it agree.
    """
    tolerance = Tolerance.of(recomputed.compute_dtype, codec.spacing)
    stored_TLD = codec.decode({name: array for name, array in arrays.items() if name != "teacher_state"}, torch.float32)
    expected_TLD = codec.decode(codec.encode(recomputed.features_TLD), torch.float32)
    _require_rows(sample_id, plane_names(layer_ids), stored_TLD, expected_TLD, tolerance)
    if recomputed.teacher is not None:
        state_TD = arrays["teacher_state"]
        plain = Tolerance.of(recomputed.compute_dtype, torch.finfo(torch.bfloat16).eps)
        _require_rows(sample_id, [TEACHER_STATE], state_TD[:, None].float(), recomputed.teacher.state_TD[:, None].float(), plain)
        _require_log_probs(sample_id, state_TD, recomputed.teacher, plain.median_kl)


def _require_rows(sample_id: str, planes: Sequence[str], stored_TPD: Tensor, expected_TPD: Tensor, tolerance: Tolerance) -> None:
    """Both fp32 on the CPU."""
    if stored_TPD.shape != expected_TPD.shape:
        raise ContentError(f"sample {sample_id}: {planes[0]} is stored as {list(stored_TPD.shape)}, recomputed {list(expected_TPD.shape)}")
    size_TP = expected_TPD.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    error_TP = (stored_TPD - expected_TPD).norm(dim=-1) / size_TP
    for plane, error_T in zip(planes, error_TP.unbind(1), strict=True):
        median, upper, largest = (float(error_T.quantile(share)) for share in (0.5, 0.95, 1.0))
        if not (median <= tolerance.median and upper <= tolerance.upper and largest <= tolerance.largest):
            row = int(error_T.argmax())
            raise ContentError(
                f"sample {sample_id}, row {row} of {len(error_T)}: {plane} is not what the target gives for this sample alone: "
                f"the row is off by {float(error_T[row]):.2g} of its norm, the median row by {median:.2g} (allowed: "
                f"median {tolerance.median:.2g}, 95 of 100 rows {tolerance.upper:.2g}, all {tolerance.largest:.2g})"
            )


def _require_log_probs(sample_id: str, state_TD: Tensor, recomputed: RecomputedTeacher, median_kl: float) -> None:
    """Held to `median_kl` nats is the median over the last rows of the divergence of the rebuilt distribution from the model's."""
    model_RV = recomputed.logits_RV.float().log_softmax(-1)
    rebuilt_RV = recomputed.rebuild(state_TD[-len(model_RV) :]).float().log_softmax(-1)
    kl_R = (model_RV.exp() * (model_RV - rebuilt_RV)).sum(-1)
    if not kl_R.median() <= median_kl:
        row = int(kl_R.argmax())
        raise ContentError(
            f"sample {sample_id}, row {len(state_TD) - len(kl_R) + row} of {len(state_TD)}: the log-probabilities rebuilt from "
            f"{TEACHER_STATE} through the target's final norm, head, logit scale and soft cap are not the model's own: they differ by "
            f"{float(kl_R[row]):.2g} nats there and by {float(kl_R.median()):.2g} in the median row (allowed {median_kl:.2g})"
        )
