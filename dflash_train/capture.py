"""Runs the target and collects its context features with forward hooks, in the form every server has them.

Comes in: a `Target`, `LayerIds`, right-padded ids with an attention mask. Goes out: the residual stream behind each chosen layer,
[B, T, L, D], and on request the teacher state, which is the input of the target's final norm. The head does not run and the forward
stops as soon as the last wanted tensor is there, unless the caller runs the model itself (`Capture.recording`).

Rows hold one sequence each: packing several into a row corrupts targets with recurrent layers, right padding does not.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash_train.errors import UserError
from dflash_train.layers import LayerIds
from dflash_train.target import Target


@dataclass
class Captured:
    """Features of one forward in the target's dtype, on the device of the input. Padding positions hold what the model made of them."""

    features_BTLD: Tensor
    teacher_state_BTD: Tensor | None


class Recorder:
    """Holds what the hooks saw in the latest forward."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.features_BTLD = torch.empty(0)
        self.teacher_state_BTD: Tensor | None = None
        self._num_layers, self._device = num_layers, device

    def put_layer(self, plane: int, output: Tensor | tuple[Tensor, ...]) -> None:
        """Copies a layer's output into its plane: later layers may go on in place in the tensor they were given."""
        hidden_BTD = output[0] if isinstance(output, tuple) else output
        if hidden_BTD.ndim != 3:
            raise UserError(f"a target layer put out {list(hidden_BTD.shape)} instead of [rows, tokens, width]: it cannot be a target yet")
        if plane == 0:
            rows, tokens, width = hidden_BTD.shape
            self.features_BTLD = hidden_BTD.new_empty(rows, tokens, self._num_layers, width, device=self._device)
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
    def compare_with_hidden_states(self, input_ids_BT: Tensor, attention_mask_BT: Tensor) -> None:
        """Raises UserError naming layer and row unless the hooks see exactly what `output_hidden_states` gives in the same forward.

        The teacher state is held to the last hidden state: it has to be what the final norm turns into it.
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

    def _decode(self, input_ids_BT: Tensor, attention_mask_BT: Tensor, **options: Any) -> Any:
        return self.target.decoder(input_ids=input_ids_BT, attention_mask=attention_mask_BT, use_cache=False, **options)

    @contextmanager
    def _hooked(self, device: torch.device, stop: bool) -> Iterator[Recorder]:
        recorder = Recorder(len(self.layer_ids.ids), device)
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
