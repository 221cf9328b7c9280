"""The whole command as a person meets it: wall time and memory, with the installable peers beside it in one run.

    python benchmarks/command.py [--runs 15] [--peers] [--check]

Builds a wheel of this checkout into a fresh environment, asks one question (Llama-3.1-8B, LoRA of rank 16 on all
matrices, 2 x 2048 tokens, checkpointing, 24 GB), and prints the median and the least wall time, the largest resident
set (never below this script's own 15 MiB, which the system counts for its children) and what was answered. `--peers`
installs each peer into an environment of its own; those that read the hub find the configuration in a prepared
cache, so that nobody's network is measured. `--check` fails where wazn misses its bounds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL_ID = "meta-llama/Llama-3.1-8B"
CONFIG = ROOT / "src/wazn/facts/models/meta-llama--Llama-3.1-8B.json"
QUESTION = (
    "estimate llama-3.1-8b --method lora --rank 16 --targets all-linear --micro-batch 2 --seq-len 2048"
    " --checkpointing full --gpu 24GB"
).split()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One command: `figure` finds the answer's number in what it prints."""

    name: str
    package: str
    program: str
    arguments: list[str]
    figure: str = r"^(.+)$"
    most_seconds: float | None = None
    most_mib: float | None = None


OURS = [
    Case(name="wazn --version", package=str(ROOT), program="wazn", arguments=["--version"]),
    Case(
        name="wazn calc",
        package=str(ROOT),
        program="wazn",
        arguments="calc training --params 7B --optimizer adam".split(),
        figure=r"(= .+)$",
    ),
    Case(
        name="wazn estimate, text",
        package=str(ROOT),
        program="wazn",
        arguments=QUESTION,
        most_seconds=0.25,
        most_mib=60,
    ),
    Case(
        name="wazn estimate, JSON",
        package=str(ROOT),
        program="wazn",
        arguments=[*QUESTION, "--format", "json"],
        figure=r'"device_bytes": (\d+)',
        most_seconds=0.20,
        most_mib=60,
    ),
]

PEERS = [
    Case(
        name="vramcalc 0.1.2",
        package="vramcalc==0.1.2",
        program="vramcalc",
        arguments=(
            "estimate MODEL_FOLDER --train --lora 16 --dtype bf16 --batch 2 --seq 2048 --grad-checkpoint"
            " --precision pure --gpu 24 --json"
        ).split(),
        figure=r'"required_bytes": (\d+)',
    ),
    Case(
        name="fitcheck-llm 0.3.1",
        package="fitcheck-llm==0.3.1",
        program="fitcheck",
        arguments=(
            f"{MODEL_ID} --batch-size 2 --seq-len 2048 --grad-checkpoint --flash-attn --lora-r 16 --lora-targets full"
            " --gpu 4090 --json"
        ).split(),
        figure=r'"(?:total|peak)\w*": ([\d.]+)',
    ),
    Case(
        name="canifinetune 0.4.1",
        package="canifinetune==0.4.1",
        program="canifinetune",
        arguments=(
            f"estimate --model {MODEL_ID} --gpu-vram-gb 24 --method lora --seq-len 2048 --micro-batch-size 2"
            " --lora-rank 16 --target-scope all_linear --quantization none --optimizer adamw --offline --json"
        ).split(),
        figure=r'"\w*(?:peak|total)\w*": ([\d.]+)',
    ),
    Case(
        name="accelerate estimate-memory",
        package="accelerate transformers torch==2.13.0",
        program="accelerate",
        arguments=f"estimate-memory {MODEL_ID} --dtypes float16".split(),
        figure=r"(float16.*)$",
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--peers", action="store_true", help="install and run the peers as well")
    parser.add_argument("--check", action="store_true", help="fail where wazn misses its bounds")
    asked = parser.parse_args()
    missed = []
    with tempfile.TemporaryDirectory(prefix="wazn-bench-") as scratch:
        environment = prepare(Path(scratch))
        print(f"{'command':<28} {'median':>8} {'least':>8} {'memory':>9}  answer")
        for case in [*OURS, *(PEERS if asked.peers else [])]:
            program = install(case, Path(scratch))
            seconds, mib, said = measure(program, case, Path(scratch), environment, asked.runs)
            median = statistics.median(seconds)
            print(
                f"{case.name:<28} {median:7.3f}s {min(seconds):7.3f}s {mib:6.1f}MiB  {said[:60]}",
                flush=True,
            )
            if case.most_seconds is not None and median > case.most_seconds:
                missed.append(f"{case.name}: {median:.3f} s, at most {case.most_seconds} s")
            if case.most_mib is not None and mib > case.most_mib:
                missed.append(f"{case.name}: {mib:.1f} MiB, at most {case.most_mib} MiB")
    print(*missed, sep="\n")
    sys.exit(bool(missed) and asked.check)


def prepare(scratch: Path) -> dict[str, str]:
    """Lay out a folder with the configuration and a hub cache that holds it; return the environment."""
    config = json.loads(CONFIG.read_text("utf-8"))
    config = {key: value for key, value in config.items() if not key.startswith("_")}
    commit = "0" * 40
    repository = scratch / "home" / "hub" / f"models--{MODEL_ID.replace('/', '--')}"
    for folder in (scratch / "model", repository / "snapshots" / commit):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))
    }
    return {**kept, "HF_HOME": str(scratch / "home"), "HF_HUB_OFFLINE": "1"}


def install(case: Case, scratch: Path) -> Path:
    """Return the program, installed into an environment of its package's own, bytecode included."""
    venv = scratch / "venvs" / re.sub(r"\W+", "-", case.package)
    if not venv.exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        command = [venv / "bin" / "pip", "install", "--quiet", "--compile", *case.package.split()]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return venv / "bin" / case.program


def measure(
    program: Path, case: Case, scratch: Path, environment: dict[str, str], runs: int
) -> tuple[list[float], float, str]:
    """Return the wall times, the largest resident set in MiB, and the answer (or the last line of an error)."""
    arguments = [a.replace("MODEL_FOLDER", str(scratch / "model")) for a in case.arguments]
    out, err = scratch / "out", scratch / "err"
    seconds, most_kib = [], 0
    for _ in range(runs + 1):
        with out.open("wb") as out_file, err.open("wb") as err_file:
            begin = time.perf_counter()
            process = subprocess.Popen(
                [program, *arguments], stdout=out_file, stderr=err_file, env=environment
            )
            _, _, usage = os.wait4(process.pid, 0)
            seconds.append(time.perf_counter() - begin)
        most_kib = max(most_kib, usage.ru_maxrss)
        process.returncode = 0  # it was waited for, above
    figures = re.findall(case.figure, out.read_text("utf-8", "replace"), re.MULTILINE)
    errors = err.read_text("utf-8", "replace").strip().splitlines()
    return seconds[1:], most_kib / 1024, figures[-1] if figures else (errors or ["nothing"])[-1]


if __name__ == "__main__":
    main()
