"""Extractions that are killed again and again, or fill the disk: what is there afterwards equals an undisturbed run. Minutes long."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import tiny_models
from tiny_datasets import extract_command, extract_config, make_samples

from dflash_train.config import Config
from dflash_train.stages.extract import run

REPOSITORY = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Config:
    run_dir = tmp_path_factory.mktemp("undisturbed")
    target = tiny_models.make_qwen3(run_dir / "target")
    make_samples(run_dir, target, num_samples=4000)
    config = extract_config(run_dir, target, teacher_state=True)
    run(config)
    return config


def same_samples(run_dir: Path, undisturbed: Config) -> Config:
    shutil.copytree(Path(undisturbed.run_dir) / "prepare", run_dir / "prepare")
    return extract_config(run_dir, Path(undisturbed.target.path), teacher_state=True)


def shards(config: Config) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(config.features.dir).glob("shard-*.safetensors"))}


class Watch(threading.Thread):
    """Looks at every shard the moment it has its name: it has to be whole then, and what an undisturbed run wrote."""

    def __init__(self, folder: Path, expected: dict[str, bytes]) -> None:
        super().__init__(daemon=True)
        self.folder, self.expected, self.torn, self.seen = folder, expected, [], set()
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.is_set():
            names = set(os.listdir(self.folder)) if self.folder.exists() else set()
            for name in sorted(names & self.expected.keys() - self.seen):
                self.seen.add(name)
                if (self.folder / name).read_bytes() != self.expected[name]:
                    self.torn.append(name)
            time.sleep(0.001)


def launch(config: Config, num_processes: int, log: Path) -> subprocess.Popen:
    launcher = (sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={num_processes}", "--standalone")
    command = extract_command(config, *(launcher if num_processes > 1 else ()))
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=log.open("a"), stderr=subprocess.STDOUT, start_new_session=True)


def kill_all(process: subprocess.Popen) -> None:
    """The launcher's processes have sessions of their own and would go on."""
    family = [process, *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            member.send_signal(signal.SIGKILL)
    for member in family:
        member.wait(timeout=30)


def test_twenty_kills(tmp_path, undisturbed):
    draw = random.Random(2026)
    config, expected = same_samples(tmp_path, undisturbed), shards(undisturbed)
    watch = Watch(Path(config.features.dir), expected)
    watch.start()
    log, counts = tmp_path / "log", []
    for _ in range(20):
        enough = len(shards(config)) + draw.randint(0, 20)
        process = launch(config, draw.randint(1, 3), log)
        time.sleep(draw.uniform(0, 8))
        while process.poll() is None and len(shards(config)) < enough:
            time.sleep(draw.uniform(0, 0.5))
        assert process.poll() is None, f"the run ended by itself before it was killed:\n{log.read_text()[-2000:]}"
        kill_all(process)
        counts.append(len(shards(config)))
    assert counts == sorted(counts) and len(set(counts)) > 10, counts  # nothing was lost, and the kills fell into the work
    assert counts[-1] < len(expected), counts
    process = launch(config, 2, log)
    assert process.wait(timeout=600) == 0, log.read_text()[-2000:]
    watch.ended.set()
    watch.join()
    assert not watch.torn and len(watch.seen) == len(expected)
    assert shards(config) == expected
    names = {path.name for path in Path(config.features.dir).iterdir()}
    assert names == set(expected) | {"manifest.json", "config.yaml", "versions.json"}
    print(f"\n20 kills: shards after each {counts}, of {len(expected)}; {log.read_text().count('computed again')} set aside")


def test_a_full_disk(tmp_path, undisturbed):
    """A real small file system that something else fills while the run is on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    needed = sum(map(len, shards(undisturbed).values()))
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={needed + 4_000_000}", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        config = same_samples(tmp_path, undisturbed)
        config.features.dir = str(disk / "features")
        log = tmp_path / "log"
        process = launch(config, 1, log)
        while process.poll() is None and len(shards(config)) < 3:
            time.sleep(0.01)
        filler = disk / "filler"
        with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(100_000))
        assert process.wait(timeout=300) == 1
        last = log.read_text().strip().splitlines()[-1]
        assert last.startswith("error: cannot write ") and last.endswith("No space left on device"), log.read_text()
        assert "Traceback" not in log.read_text()
        assert 3 <= len(shards(config)) < len(shards(undisturbed))
        assert not list(Path(config.features.dir).glob(".tmp-*"))
        filler.unlink()
        assert launch(config, 2, log).wait(timeout=600) == 0, log.read_text()[-2000:]
        assert shards(config) == shards(undisturbed)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
