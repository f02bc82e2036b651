"""Memory, operations and parameters: by hand, against the real drafter, and against the measured peak of real steps."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import step_memory
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from dflash_train import attention, planning
from dflash_train.checkpoint import save_checkpoint
from dflash_train.config import AttentionBackend, OptimizerKind
from dflash_train.drafter import DFlashDraftModel
from dflash_train.ema import Ema
from dflash_train.optimizer import make_optimizer
from dflash_train.planning import (
    DrafterShape,
    PackShape,
    StepSettings,
    checkpoint_bytes,
    mean_keys,
    peak_bytes,
    step_flop,
)
from dflash_train.planning import (
    step_memory as memory_of,
)
from dflash_train.stages.plan import drafter_shape

TINY = DrafterShape(
    hidden_size=8,
    intermediate_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    windows=(6, None),
    num_features=3,
    block_size=4,
    vocab_size=100,
)
PLAIN = StepSettings(compute_bytes=4, muon=False, ema=False, several_processes=False, accumulates=True, head_chunk_bytes=1 << 26)
COMPUTE_BYTES = {"fp32": 4, "bf16": 2}


def shape_of(name: str) -> DrafterShape:
    with torch.device("meta"):
        drafter = step_memory.make_drafter(step_memory.SHAPES[name])
    return drafter_shape(drafter.config, len(step_memory.LAYER_IDS), tied_tables=False)


def pack_of(name: str) -> PackShape:
    number, num_tokens, num_anchors = step_memory.SHAPES[name]["documents"]
    return PackShape(number * num_tokens, number * num_anchors)


# ── parameters and operations ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_parameters_by_hand() -> None:
    # q 8x16, k and v 8x8 each, o 16x8, three matrices 8x16; norms of 8, 8, 4 and 4
    assert TINY.layer_matrices == 128 + 64 + 64 + 128 + 3 * 128 == 768
    assert TINY.num_matrix_parameters == 2 * 768 + 3 * 64 and TINY.num_vector_parameters == 2 * 24 + 16


@pytest.mark.parametrize("name", step_memory.SHAPES)
def test_parameters_are_those_of_the_drafter(name: str) -> None:
    with torch.device("meta"):
        drafter = step_memory.make_drafter(step_memory.SHAPES[name])
    shape = shape_of(name)
    assert shape.num_parameters == sum(p.numel() for p in drafter.parameters())
    assert shape.num_matrix_parameters == sum(p.numel() for p in drafter.parameters() if p.ndim == 2)


def test_operations_by_hand() -> None:
    flop = step_flop(TINY, num_tokens=10, num_blocks=2, keys={6: 3.0, None: 5.0})
    assert flop["fc"] == 2 * (2 * 10 * 24 * 8)
    assert flop["layers"] == 2 * 3 * 2 * (8 * 768 + 10 * 128)  # keys and values of the context as well
    assert flop["attention"] == 3.5 * 4 * 16 * 8 * ((3 + 4) + (5 + 4))
    assert flop["head"] == 2 * 2 * (2 * 3) * 8 * 100


def benchmark_anchors(name: str) -> torch.Tensor:
    """The anchors of the benchmark's step: drawn after its features, last hidden states and ids."""
    shape = step_memory.SHAPES[name]
    number, num_tokens, num_anchors = shape["documents"]
    hidden = shape["sizes"]["hidden_size"]
    generator = torch.Generator().manual_seed(1234)
    for width in (len(step_memory.LAYER_IDS) * hidden, hidden):
        torch.randn(number, num_tokens, width, generator=generator)
    torch.randint(0, shape["vocab_size"] - 1, (number, num_tokens), generator=generator)
    places = num_tokens - step_memory.BLOCK_SIZE - 1
    return torch.cat([torch.randperm(places, generator=generator)[:num_anchors] + 1 for _ in range(number)])


@pytest.mark.parametrize(("name", "gflop"), [("S", 378.56), ("M", 2501.52)])
def test_operations_of_the_benchmark_s_steps(name: str, gflop: float) -> None:
    shape, pack, anchors = shape_of(name), pack_of(name), benchmark_anchors(name)
    window = step_memory.SHAPES[name]["window"]
    keys = {window: anchors.clamp(max=window).double().mean().item(), None: anchors.double().mean().item()}
    exact = sum(step_flop(shape, pack.num_tokens, pack.num_blocks, keys).values())
    assert exact / 1e9 == pytest.approx(gflop, abs=0.005)
    number, num_tokens, _ = step_memory.SHAPES[name]["documents"]
    expected = {w: mean_keys(num_tokens, num_tokens, w) for w in set(shape.windows)}  # without knowing the anchors
    assert sum(step_flop(shape, pack.num_tokens, pack.num_blocks, expected).values()) == pytest.approx(exact, rel=2e-3)


def test_the_headline_costs_what_is_known_of_it() -> None:
    """A drafter of Qwen3.6-27B: 1.73 B parameters, about 124 TFLOP per sample of 3072 tokens at 512 anchors."""
    shape = DrafterShape(5120, 17408, 32, 8, 128, (2048,) * 4 + (None,), num_features=5, block_size=16, vocab_size=248320)
    assert shape.num_parameters / 1e9 == pytest.approx(1.73, abs=0.005)
    flop = step_flop(shape, 3072, 512, {w: mean_keys(3072, 3072, w) for w in (2048, None)})
    assert sum(flop.values()) / 1e12 == pytest.approx(124, rel=0.05) and flop["head"] / sum(flop.values()) == pytest.approx(1 / 3, abs=0.03)


@pytest.mark.parametrize(("num_tokens", "num_supervised"), [(10, 10), (10, 4), (40, 25), (3, 2), (2, 2)])
@pytest.mark.parametrize("window", [None, 4, 16])
def test_mean_keys(num_tokens: int, num_supervised: int, window: int | None) -> None:
    anchors = range(num_tokens - num_supervised, num_tokens - 1)
    assert mean_keys(num_tokens, num_supervised, window) == sum(min(a, window or a) for a in anchors) / len(anchors)


def test_one_supervised_token_makes_no_block() -> None:
    assert mean_keys(10, 1, None) == 0


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_held_by_hand() -> None:
    num = 1728 + 64
    assert planning.held_memory(TINY, PLAIN) == {
        "weights in fp32": 4 * num,
        "optimizer": 8 * num,
        "moving average": 0,
        "DDP buckets": 0,
        "frozen embedding and head": 2 * 4 * 100 * 8,
    }
    rich = replace(PLAIN, compute_bytes=2, muon=True, ema=True, several_processes=True)
    assert planning.held_memory(replace(TINY, tied_tables=True), rich) == {
        "weights in fp32": 4 * num,
        "optimizer": 4 * 1728 + 8 * 64,
        "moving average": 4 * num,
        "DDP buckets": 4 * num,
        "frozen embedding and head": 2 * 100 * 8,
    }


def test_the_head_s_chunk() -> None:
    block = 4 * 100 * 4  # slots, rows, fp32

    def chunk(num_blocks: int, **settings) -> int:
        return memory_of(TINY, PackShape(10, num_blocks), replace(PLAIN, **settings))["head"]["head chunk"]

    assert chunk(2) == 2 * block  # no more than there are
    assert chunk(50, head_chunk_bytes=7 * block + 1) == 7 * block
    assert chunk(50, head_chunk_bytes=1) == block  # at least one
    assert chunk(50, head_chunk_bytes=7 * block, compute_bytes=2) == 7 * block  # twice as many blocks


def test_gradients_are_held_in_the_forward_only_from_the_second_pack_on() -> None:
    one, more = (memory_of(TINY, PackShape(10, 2), replace(PLAIN, accumulates=accumulates)) for accumulates in (False, True))
    assert [moment["gradients"] for moment in one.values()] == [0, 2 * 1792, 4 * 1792]
    assert [moment["gradients"] for moment in more.values()] == [4 * 1792] * 3
    assert peak_bytes(TINY, PackShape(10, 2), PLAIN) == max(sum(moment.values()) for moment in more.values())


def test_checkpoints_are_as_large_as_their_files(tmp_path: Path) -> None:
    drafter = step_memory.make_drafter(
        step_memory.SHAPES["S"]
        | {
            "sizes": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
            "vocab_size": 300,
        }
    )
    shape = drafter_shape(drafter.config, 5, tied_tables=False)
    for number, kind in enumerate(OptimizerKind):
        optimizer = make_optimizer(drafter, 0.0, kind)
        for parameter in drafter.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        path = save_checkpoint(tmp_path, drafter, optimizer, {"step": number}, Ema(drafter, 0.9))
        written = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        assert checkpoint_bytes(shape, muon=kind is OptimizerKind.muon, ema=True) == pytest.approx(written, rel=0.02)


def kept_bytes(drafter: DFlashDraftModel, precision: str, shape: dict) -> int:
    """What autograd keeps of one forward, each storage once, without the weights themselves."""
    pack = step_memory.make_pack(shape)
    table_VD = torch.zeros(shape["vocab_size"], shape["sizes"]["hidden_size"])
    weights = {p.untyped_storage().data_ptr() for p in drafter.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"), saved_tensors_hooks(keep, lambda tensor: tensor):
        drafter(pack.features_TLD, pack.context, F.embedding(pack.blocks.input_ids_AK, table_VD), pack.blocks)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("backend", [AttentionBackend.dense, AttentionBackend.tiled])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("documents", [(2, 96, 24), (1, 256, 6)])  # many slots per token, few
def test_activations_are_what_autograd_keeps(backend: AttentionBackend, precision: str, documents: tuple[int, int, int]) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    described = step_memory.SHAPES["S"] | {"documents": documents, "sizes": sizes, "vocab_size": 2000, "window": 32}
    drafter = step_memory.make_drafter(described)
    drafter.attention = backend
    shape = drafter_shape(drafter.config, len(step_memory.LAYER_IDS), tied_tables=False)
    number, num_tokens, num_anchors = documents
    pack = PackShape(number * num_tokens, number * num_anchors)
    settings = replace(PLAIN, compute_bytes=COMPUTE_BYTES[precision], dense_attention=backend is AttentionBackend.dense)
    memory = memory_of(shape, pack, settings)["head"]
    counted = sum(memory[kind] for kind in ("compute-dtype copies of weights", "features of a pack", "activations of a pack", "attention"))
    stored = 2 * pack.num_tokens * 5 * 96  # the features as they came, which are no part of the graph
    assert counted - stored == pytest.approx(kept_bytes(drafter, precision, described), rel=0.06)


def test_the_groups_of_dense_attention_are_those_of_the_model() -> None:
    assert planning._DENSE_GROUP_BYTES == attention.SCORES_BYTES


@pytest.mark.parametrize(
    ("name", "precision"),
    [("S", "fp32"), ("S", "bf16"), pytest.param("M", "fp32", marks=pytest.mark.slow), pytest.param("M", "bf16", marks=pytest.mark.slow)],
)
def test_the_peak_of_a_real_step_is_within_15_percent(name: str, precision: str) -> None:
    """Two real steps in a process of their own. What the process held before is what `RUNTIME_BYTES` stands for on a GPU."""
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory is read from Linux's /proc")
    command = [sys.executable, step_memory.__file__, name, precision]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    settings = replace(PLAIN, compute_bytes=COMPUTE_BYTES[precision], accumulates=False)
    estimate = peak_bytes(shape_of(name), pack_of(name), settings)
    assert estimate == pytest.approx(measured["peak_bytes"] - measured["base_bytes"], rel=0.15)
