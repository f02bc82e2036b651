"""Runs the target and collects its context features with forward hooks, in the form every server has them.

Comes in: a `Target`, `LayerIds`, right-padded ids with an attention mask. Goes out: the residual stream behind each chosen layer,
[B, T, L, D], and on request the teacher state, which is the input of the target's final norm. The head does not run and the forward
stops as soon as the last wanted tensor is there, unless the caller runs the model itself (`Capture.recording`).

Rows hold one sequence each: packing several into a row corrupts targets with recurrent layers, right padding does not.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash_train.errors import UserError
from dflash_train.layers import LayerIds
from dflash_train.target import Target

_NUM_LOGITS = 64  # tokens whose log-probabilities are compared
_LOGIT_ERROR = 1e-2  # of the largest logit: the same operations in the same dtype


@dataclass
class Captured:
    """Features of one forward in the target's dtype, on the device of the input. Padding positions hold what the model made of them."""

    features_BTLD: Tensor
    teacher_state_BTD: Tensor | None


@dataclass(frozen=True)
class RecomputedTeacher:
    """Teacher state on the CPU, and the logits of the last R tokens as the whole model gives them."""

    state_TD: Tensor
    logits_RV: Tensor
    rebuild: Callable[[Tensor], Tensor]  # `Target.logits`


@dataclass(frozen=True)
class Recomputed:
    """One sample alone, unpadded, as `output_hidden_states` gives it, on the CPU; `compute_dtype` is the target's."""

    compute_dtype: torch.dtype
    features_TLD: Tensor
    teacher: RecomputedTeacher | None


class Recorder:
    """Holds what the hooks saw in the latest forward."""

    def __init__(self, layer_ids: Sequence[int], device: torch.device) -> None:
        self.features_BTLD = torch.empty(0)
        self.teacher_state_BTD: Tensor | None = None
        self._layer_ids, self._device = layer_ids, device

    def put_layer(self, plane: int, output: Tensor | tuple[Tensor, ...]) -> None:
        """Copies a layer's output into its plane: later layers may go on in place in the tensor they were given."""
        hidden_BTD = output[0] if isinstance(output, tuple) else output
        if hidden_BTD.ndim != 3:
            raise UserError(
                f"layer {self._layer_ids[plane]} put out {list(hidden_BTD.shape)} instead of [rows, tokens, width]: "
                "it cannot be a target yet"
            )
        if plane == 0:
            rows, tokens, width = hidden_BTD.shape
            self.features_BTLD = hidden_BTD.new_empty(rows, tokens, len(self._layer_ids), width, device=self._device)
        first_BTD = self.features_BTLD[:, :, 0]
        if hidden_BTD.shape != first_BTD.shape or hidden_BTD.dtype != first_BTD.dtype:
            raise UserError(
                f"layer {self._layer_ids[plane]} put out {list(hidden_BTD.shape)} in {hidden_BTD.dtype}, layer {self._layer_ids[0]} "
                f"{list(first_BTD.shape)} in {first_BTD.dtype}: features of one forward have one shape and dtype"
            )
        self.features_BTLD[:, :, plane].copy_(hidden_BTD)

    def put_teacher_state(self, hidden_BTD: Tensor) -> None:
        """Copies the input of the final norm."""
        self.teacher_state_BTD = hidden_BTD.to(self._device, copy=True)


class Capture:
    """Collects the features of `layer_ids`, in that order, from `target`."""

    def __init__(self, target: Target, layer_ids: LayerIds, teacher_state: bool = False) -> None:
        self.target, self.layer_ids, self.teacher_state = target, layer_ids, teacher_state

    @torch.no_grad()
    def run(self, input_ids_BT: Tensor, attention_mask_BT: Tensor) -> Captured:
        """One forward of the decoder up to the last wanted tensor."""
        with self._hooked(input_ids_BT.device, stop=True) as recorder:
            try:
                self._decode(input_ids_BT, attention_mask_BT)
            except _Complete:
                return Captured(recorder.features_BTLD, recorder.teacher_state_BTD)
        raise AssertionError("the target's forward ended without passing the last captured layer")

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """While open, every forward of the target that the caller runs, in whatever way, leaves its features in the recorder."""
        with self._hooked(self.target.device, stop=False) as recorder:
            yield recorder

    @torch.no_grad()
    def compare_with_hidden_states(self, input_ids_BT: Tensor, attention_mask_BT: Tensor) -> Tensor:
        """The features [B, T, L, D], if the hooks see exactly what `output_hidden_states` gives in the same forward.

        The teacher state is held to the last hidden state, which the final norm has to turn it into, and to the model's own logits.
        Raises UserError naming layer and row.
        """
        with self.recording() as recorder:
            output = self._decode(input_ids_BT, attention_mask_BT, output_hidden_states=True)
        states, expected = output.hidden_states or (), self.layer_ids.num_hf_hidden_states
        if len(states) != expected:
            raise UserError(f"the target gives {len(states)} hidden_states, expected {expected}: the embeddings and one per layer")
        real_BT = attention_mask_BT.bool()
        for plane, (layer_id, index) in enumerate(zip(self.layer_ids.ids, self.layer_ids.hf_hidden_states, strict=True)):
            _require_equal(f"layer {layer_id}", recorder.features_BTLD[:, :, plane], f"hidden_states[{index}]", states[index], real_BT)
        if recorder.teacher_state_BTD is not None:
            normed_BTD = self.target.final_norm(recorder.teacher_state_BTD.to(output.last_hidden_state.device))
            _require_equal("teacher state", normed_BTD, "the last hidden state", output.last_hidden_state, real_BT)
            self._compare_logits(input_ids_BT, attention_mask_BT)
        return recorder.features_BTLD

    def _compare_logits(self, input_ids_BT: Tensor, attention_mask_BT: Tensor) -> None:
        with self.recording() as recorder:
            model_V = self.target.run_with_logits(input_ids_BT, attention_mask_BT, num_logits=1).logits[0, -1].float()
        assert recorder.teacher_state_BTD is not None
        rebuilt_V = self.target.logits(recorder.teacher_state_BTD[0, -1]).float()
        error, largest = float((rebuilt_V - model_V).abs().max()), float(model_V.abs().max())
        if not error <= _LOGIT_ERROR * largest:
            raise UserError(
                "capture check failed: logits rebuilt from the teacher state through the target's final norm, head, logit scale and "
                f"soft cap are not the model's own: off by {error:.3g}, the largest is {largest:.3g}; "
                "features.teacher_state cannot be used with this target"
            )

    @torch.no_grad()
    def recompute(self, input_ids_T: Tensor) -> Recomputed:
        """One sample alone, without padding, its features taken from `output_hidden_states` and not from the hooks.

        With the teacher state come the model's own logits of the last 64 tokens.
        """
        input_ids_BT = input_ids_T.long()[None].to(self.target.device)
        mask_BT = torch.ones_like(input_ids_BT)
        if not self.teacher_state:
            states = self._decode(input_ids_BT, mask_BT, output_hidden_states=True).hidden_states
            return Recomputed(self.target.model.dtype, self._features_of(states), None)
        with self.recording() as recorder:
            output = self.target.run_with_logits(input_ids_BT, mask_BT, num_logits=_NUM_LOGITS)
        assert recorder.teacher_state_BTD is not None
        teacher = RecomputedTeacher(recorder.teacher_state_BTD[0].cpu(), output.logits[0, -_NUM_LOGITS:], self.target.logits)
        return Recomputed(self.target.model.dtype, self._features_of(output.hidden_states), teacher)

    def _features_of(self, states: Sequence[Tensor]) -> Tensor:
        return torch.stack([states[index][0].cpu() for index in self.layer_ids.hf_hidden_states], dim=1)

    def _decode(self, input_ids_BT: Tensor, attention_mask_BT: Tensor, **options: Any) -> Any:
        return self.target.decoder(input_ids=input_ids_BT, attention_mask=attention_mask_BT, use_cache=False, **options)

    @contextmanager
    def _hooked(self, device: torch.device, stop: bool) -> Iterator[Recorder]:
        recorder = Recorder(self.layer_ids.ids, device)
        with ExitStack() as hooks:
            for plane, layer_id in enumerate(self.layer_ids.ids):
                is_last = stop and not self.teacher_state and layer_id == self.layer_ids.ids[-1]
                hooks.enter_context(self.target.layers[layer_id].register_forward_hook(_layer_hook(recorder, plane, is_last)))
            if self.teacher_state:
                hooks.enter_context(self.target.final_norm.register_forward_pre_hook(_norm_hook(recorder, stop)))
            yield recorder


class _Complete(Exception):
    """Ends a forward that has nothing more to give."""


def _layer_hook(recorder: Recorder, plane: int, is_last: bool) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Tensor | tuple[Tensor, ...]) -> None:
        recorder.put_layer(plane, output)
        if is_last:
            raise _Complete

    return hook


def _norm_hook(recorder: Recorder, is_last: bool) -> Any:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        recorder.put_teacher_state(inputs[0])
        if is_last:
            raise _Complete

    return hook


def _require_equal(what: str, seen_BTD: Tensor, name: str, given_BTD: Tensor, real_BT: Tensor) -> None:
    wrong_BT = (seen_BTD != given_BTD.to(seen_BTD.device)).any(-1) & real_BT.to(seen_BTD.device)
    if wrong_BT.any():
        row, token = wrong_BT.nonzero()[0].tolist()
        raise UserError(
            f"capture check failed: {what} as the hooks see it is not {name} of the same forward, first at row {row}, token {token} "
            f"({int(wrong_BT.sum())} of {int(real_BT.sum())} tokens differ); this target's layers do not give what servers read"
        )
