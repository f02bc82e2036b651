"""The benchmark of the training step on its tiny shape: the values of our step, the table, and what it says of failures."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "tools" / "bench_train_step.py"
sys.path.insert(0, str(SCRIPT.parent))  # the tool imports its neighbour step_shapes.py, as it does when run
bench_train_step = importlib.import_module(SCRIPT.stem)
step_shapes = importlib.import_module("step_shapes")

X = step_shapes.SHAPES["X"]


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine has, here and in child processes."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def one_step(backend: str, *options: str) -> dict:
    command = [sys.executable, SCRIPT, "--one", f"ours:{backend}", "--shape", "X", "--dtype", "fp32", *options]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


@pytest.mark.parametrize("backend", ["dense", "tiled"])  # flex has no backward on a CPU
def test_our_step_has_the_loss_and_gradient_norm_of_specforge(on_the_cpu: None, backend: str) -> None:
    told = one_step(backend, "--loss-only")
    assert told["loss"] == pytest.approx(6.25269, abs=5e-6)
    assert told["grad_norm"] == pytest.approx(1.48803, abs=5e-6)
    assert told["device"] == "cpu" and "cpu_s" not in told


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["dense", "tiled", "flex", "flex+compile"])
def test_our_step_on_a_gpu_is_that_on_the_cpu(backend: str) -> None:
    told = one_step(backend, "--steps", "1")
    assert told["loss"] == pytest.approx(6.25269, abs=2e-5)
    assert told["grad_norm"] == pytest.approx(1.48803, abs=2e-5)
    assert told["device"] == torch.cuda.get_device_name() and told["gpu_s"] > 0 and told["gpu_peak_mb"] > 1
    assert not {"cpu_s", "peak_mb"} & told.keys()


def test_a_table_without_peers(on_the_cpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.json"
    options = ["--shapes", "X", "--dtypes", "bf16", "--backends", "dense", "--rounds", "1", "--json", str(file)]
    assert bench_train_step.main(options) == 0
    out, progress = capsys.readouterr()
    (row,) = json.loads(file.read_text())["rows"]
    assert re.search(r"X\W+bf16\W+ours:dense", out) and "CPU s/step" in out and "speed-up" not in out
    assert "device: cpu" in out and "GPU" not in out
    assert row["cpu_s"] > 0 and row["peak_mb"] > 50 and 0 < row["share_of_product"] < 1
    assert row["loss"] == pytest.approx(6.2527, rel=1e-3)
    assert re.match(r"round 1/1: X bf16 ours:dense: .* about 0:00:00 left\n", progress)


def test_a_failing_peer_stays_in_the_table(on_the_cpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && echo "{}" && exit\necho Traceback >&2\necho "ImportError: no kernel" >&2\nexit 3\n')
    python.chmod(0o755)
    options = ["--shapes", "X", "--dtypes", "fp32", "--backends", "dense", "--peers", "specforge", "--rounds", "2"]
    assert bench_train_step.main([*options, "--peers-python", str(python)]) == 1
    out, progress = capsys.readouterr()
    assert re.search(r"specforge\W.*ImportError: no kernel \(status 3\)", out) and "ours:dense" in out
    assert progress.count("specforge") == 1 and progress.count("ours:dense") == 2


@pytest.mark.parametrize(
    "python, reason", [("/nowhere/python", "does not run: No such file"), (sys.executable, "is no environment of the")]
)
def test_a_wrong_peers_python_is_one_line(on_the_cpu: None, python: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_train_step.main(["--peers-python", python]) == 1
    out, error = capsys.readouterr()
    assert not out and error.count("\n") == 1
    assert error.startswith(f"error: --peers-python {python} ") and reason in error


def test_rows_compare_with_the_fastest_peer() -> None:
    def variant(name: str, *cpu_s: float, peak_mb: float):
        told = {"wall_s": 2.0, "peak_mb": peak_mb, "needed_gflop": 10.0, "product_gflops": [8, 10], "loss": 6.0, "grad_norm": 1.0}
        return bench_train_step.Variant(name, X, "fp32", [], results=[told | {"cpu_s": seconds} for seconds in cpu_s])

    variants = [variant("ours:dense", 2, 3, 2, peak_mb=300), variant("specforge", 5, 5, 5, peak_mb=400)]
    variants += [variant("modelopt", 4, 9, 3, peak_mb=600)]
    ours, specforge, modelopt = bench_train_step.rows_of(variants)
    assert (ours["cpu_s"], ours["spread"], ours["share_of_product"]) == (2, 0.5, 0.5)
    assert ours["tokens_per_s"] == 2 * 96 / 2
    assert (ours["fastest_peer"], ours["speed_up"], ours["memory"]) == ("modelopt", 2, 0.5)
    assert (specforge["speed_up"], modelopt["speed_up"], modelopt["memory"]) == (0.8, 1, 1)


def test_columns_of_a_gpu_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    told = {"device": "H", "needed_gflop": 10.0, "product_gflops": [80, 100], "loss": 6.0, "grad_norm": 1.0, "gpu_peak_mb": 300.0}
    results = [told | {"gpu_s": seconds, "wall_s": seconds} for seconds in (0.2, 0.3, 0.2)]
    variant = bench_train_step.Variant("ours:flex", X, "bf16", [], results=results, seconds=[1.0] * 3)
    bench_train_step._tell(variant, 3, [variant], 3)
    assert "0.2000 s/step, 300 MB on the GPU" in capsys.readouterr().err
    (row,) = bench_train_step.rows_of([variant])
    assert (row["gpu_s"], row["spread"], row["gpu_peak_mb"]) == (0.2, pytest.approx(0.5), 300)
    assert row["share_of_product"] == pytest.approx(0.5) and row["tokens_per_s"] == pytest.approx(2 * 96 / 0.2)
    bench_train_step.print_table([row], "")
    out = capsys.readouterr().out
    assert "GPU s/step" in out and "peak GPU MB" in out and "CPU" not in out


def test_a_gpu_step_is_measured_between_idle_and_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("idle"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: order.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: order.append("peak") or 3 << 20)
    told = step_shapes._cuda_cost(lambda: order.append("step"), 2)
    assert order == ["idle", "reset", "step", "step", "idle", "peak"]
    assert told["gpu_peak_mb"] == 3 and told["gpu_s"] == told["wall_s"] > 0


def test_what_did_not_run_in_time_is_told(on_the_cpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--shapes", "X", "--dtypes", "bf16", "--backends", "dense", "--limit-s", "-1"]
    assert bench_train_step.main(options) == 1
    assert re.search(r"X\W+bf16\W+ours:dense\W+round 1 did not start within --limit-s -1", capsys.readouterr().out)


def test_peers_and_a_gpu_do_not_mix(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert bench_train_step.main(["--peers-python", "python"]) == 1
    assert "set CUDA_VISIBLE_DEVICES= to compare" in capsys.readouterr().err


def test_the_cost_of_a_context_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "context.json"
    options = ["--profile-context", "--shape", "X", "--lengths", "96", "192", "--repeats", "1", "--json", str(file)]
    assert bench_train_step.main(options) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["layer"], row["num_tokens"], row["num_anchors"]) for row in rows] == [
        (layer, num_tokens, num_tokens // 16) for layer in ("sliding", "full") for num_tokens in (96, 192)
    ]
    assert all(row["us_per_token"] > 0 for row in rows) and rows[0]["ratio"] == rows[2]["ratio"] == 1
    assert re.search(r"full\W+192\W+12\W", capsys.readouterr().out)


def test_gpu_check_does_nothing_without_a_gpu(on_the_cpu: None) -> None:
    done = subprocess.run(["bash", SCRIPT.with_name("gpu_check.sh")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: gpu_check.sh needs a CUDA device, and torch.cuda.is_available() is False\n"


def test_gpu_check_names_options_that_exist() -> None:
    text = SCRIPT.with_name("gpu_check.sh").read_text().replace("\\\n", " ")
    (command,) = re.findall(r"bench_train_step\.py (--shapes.*) \|\|", text)
    arguments = bench_train_step.parse(command.split())
    assert [shape.name for shape in arguments.all_shapes] == ["S", "M"] and arguments.dtypes == ["bf16", "fp32"]
    assert arguments.backends == ["flex", "tiled", "dense", "flex+compile"] and arguments.json


def test_needed_operations_of_a_step_by_hand() -> None:
    tiny = {"num_sequences": 1, "num_tokens": 10, "num_anchors": 1, "block_size": 2, "hidden_size": 4, "intermediate_size": 8}
    tiny |= {"num_heads": 1, "num_kv_heads": 1, "head_dim": 4, "vocab_size": 100, "layers": "s", "sliding_window": 3}
    shape = step_shapes.parse_shape(",".join(f"{key}={value}" for key, value in tiny.items()) + ",target_layer_ids=1:2")
    fc = 4 * 10 * (2 * 4) * 4
    layer = 6 * (2 * 4 * (4 * 4 + 3 * 8) + 10 * 2 * 4 * 4)
    head = 4 * 1 * 4 * 100  # slot 0 does not count
    attention = 14 * 2 * (3 + 2) * 4  # 2 slots see 3 context tokens and their block
    assert step_shapes.needed_flop(shape, torch.tensor([[7]])) == fc + layer + head + attention


def test_a_shape_is_named_or_spelled_out() -> None:
    assert step_shapes.parse_shape("M").hidden_size == 1024
    assert step_shapes.parse_shape(str(X)) == X
    longer = step_shapes.parse_shape("like=M,name=long,num_tokens=4096")
    assert (longer.name, longer.num_tokens, longer.hidden_size) == ("long", 4096, 1024)


@pytest.mark.parametrize(
    "text", ["L", "tokens=3", "num_tokens=many", "num_tokens=0", "layers=sx", "num_heads=7", "num_anchors=500", "like=M"]
)
def test_a_shape_that_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match=text.partition("=")[2] or text):
        step_shapes.parse_shape(text)
