"""What a context token costs in the attention of a sliding and of a full layer, in documents that grow.

    python tools/bench_train_step.py --profile-context
    python tools/bench_train_step.py --profile-context --lengths 2048 8192 --repeats 1 --json context.json

Comes in: a shape (M) and the lengths of one document. Goes out: a table of the forward and backward of the attention alone, on the CPU,
with the shape's heads, window, block size and anchors per token. CPU seconds are medians; `of shortest` is a figure over that of the
first length. A sliding layer should stay near 1; a full layer sees all that lies before an anchor, so its ratio grows with the length.
Planning (which tiles, which masks) is done once per pack and layer kind and has a column of its own. The full layer at 32K takes minutes
per run, and 15 GB were seen in bf16; `--lengths 2048 8192` is short.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from step_shapes import DTYPES, SHAPES, StepShape, shape_argument
from torch import Tensor

from dflash_train.atomic import write_json
from dflash_train.attention import attention_for
from dflash_train.blocks import Blocks, Context, build_blocks
from dflash_train.config import AttentionBackend

LENGTHS = (2048, 8192, 32_768)


@dataclass(frozen=True)
class ContextCost:
    """Microseconds of the CPU per context token; ratios are over the shortest document of the same layer."""

    layer: str
    num_tokens: int
    num_anchors: int
    us_per_token: float
    ratio: float
    plan_us_per_token: float


def context_costs(
    shape: StepShape, lengths: Sequence[int], dtype: torch.dtype, backend: AttentionBackend, repeats: int
) -> list[ContextCost]:
    """One figure per layer kind and length, after a run to warm up."""
    costs: list[ContextCost] = []
    for layer, window in (("sliding", shape.sliding_window), ("full", None)):
        shortest = None
        for num_tokens in lengths:
            context, blocks = one_document(shape, num_tokens)
            inputs = attention_inputs(shape, context, blocks, dtype)
            planned, planning = _median_seconds(lambda c=context, b=blocks, w=window: attention_for(backend, b, c, w), 1)
            _, seconds = _median_seconds(lambda attend=planned, x=inputs: _forward_backward(attend, x), repeats)
            shortest = shortest or seconds / num_tokens
            microseconds = 1e6 * seconds / num_tokens
            ratio = seconds / num_tokens / shortest
            print(f"{layer} layer, {num_tokens:,} tokens: {microseconds:.1f} µs/token", file=sys.stderr, flush=True)
            costs.append(ContextCost(layer, num_tokens, len(blocks.position_A), microseconds, ratio, 1e6 * planning / num_tokens))
    return costs


def one_document(shape: StepShape, num_tokens: int) -> tuple[Context, Blocks]:
    """A document with as many anchors per token as the shape has, drawn at random."""
    num_anchors = max(1, num_tokens * shape.num_anchors // shape.num_tokens)
    generator = torch.Generator().manual_seed(0)
    places = torch.randperm(num_tokens - shape.block_size - 1, generator=generator)[:num_anchors].sort().values + 1
    document = torch.zeros(num_tokens, dtype=torch.long), torch.ones(num_tokens, dtype=torch.bool)
    return build_blocks([document], [places], shape.block_size, shape.mask_token_id)


def attention_inputs(shape: StepShape, context: Context, blocks: Blocks, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values of the context, keys and values of the blocks: random, with gradients."""
    generator = torch.Generator().manual_seed(1)
    slots, tokens = blocks.input_ids_AK.shape, context.position_T.shape
    sizes = [(*slots, shape.num_heads), *[(*tokens, shape.num_kv_heads)] * 2, *[(*slots, shape.num_kv_heads)] * 2]
    return [torch.randn(*size, shape.head_dim, dtype=dtype, generator=generator).requires_grad_() for size in sizes]


def _forward_backward(attend: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    out_AKHd = attend(*inputs)
    torch.autograd.grad(out_AKHd, inputs, torch.ones_like(out_AKHd))


def _median_seconds(work: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    result, seconds = work(), []
    for _ in range(repeats):
        started = time.process_time()
        result = work()
        seconds.append(time.process_time() - started)
    return result, statistics.median(seconds)


def print_costs(costs: Sequence[ContextCost], caption: str) -> None:
    """The table, on stdout."""
    table = Table(caption=caption, caption_justify="left")
    for name in ("layer", "context tokens", "anchors", "CPU µs/token", "of shortest", "planning µs/token"):
        table.add_column(name, justify="left" if name == "layer" else "right", no_wrap=True)
    for cost in costs:
        figures = f"{cost.num_tokens:,}", f"{cost.num_anchors:,}", f"{cost.us_per_token:.1f}", f"{cost.ratio:.2f}"
        table.add_row(cost.layer, *figures, f"{cost.plan_us_per_token:.2f}")
    console = Console(markup=False, highlight=False)
    console.width = max(console.width, 100)  # a file has no width of its own
    console.print(table)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile-context", action="store_true", help="this")
    parser.add_argument("--shape", type=shape_argument, default=SHAPES["M"], help="S, M, X or key=value,... (default: M)")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="tokens of the document (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="default: %(default)s")
    parser.add_argument("--backend", choices=["tiled", "dense"], default="tiled", help="of our attention (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="measured runs, of which the median counts (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    arguments = parser.parse_args(argv)
    shortest = arguments.shape.block_size + 2
    if min(arguments.lengths) < shortest or arguments.repeats < 1:
        parser.error(f"--lengths must be at least {shortest} tokens (a block, an anchor and one more), --repeats at least 1")
    return arguments


def profile_context(argv: Sequence[str]) -> None:
    """Measures, prints the table and writes the JSON."""
    arguments = parse(argv)
    torch.set_num_threads(arguments.threads)
    shape, backend = arguments.shape, AttentionBackend(arguments.backend)
    costs = context_costs(shape, arguments.lengths, DTYPES[arguments.dtype], backend, arguments.repeats)
    settings = {name: getattr(arguments, name) for name in ("dtype", "backend", "repeats", "threads")}
    print_costs(costs, ", ".join([f"shape: {shape.name}", *(f"{name}: {value}" for name, value in settings.items())]))
    if arguments.json:
        write_json(arguments.json, settings | {"shape": asdict(shape), "torch": torch.__version__, "rows": [asdict(c) for c in costs]})
