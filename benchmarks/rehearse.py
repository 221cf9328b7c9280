"""`wazn trace` as a person meets it: wall time, CPU time and memory, with PyTorch's own means beside it in one run.

    python benchmarks/rehearse.py [--runs 3] [--peers] [--check]

Each run is a process of its own, from its start to its exit, imports included: LoRA of rank 16 on every matrix, one
sequence of 2,048 tokens, whole-layer checkpointing, two optimizer steps in the real `Trainer`. Printed are the median
wall time, the least CPU time of all threads (which other work on the machine moves less), the largest resident set,
and what was answered. It runs in the environment of this Python, which has `wazn[trace]`.

The peers run the same model and two steps in a plain loop, and both answer less:

- FakeTensorMode: PyTorch's fake tensors as they come, the same LoRA; what a step costs before anybody looks at memory.
- MemTracker: `torch.distributed._tools`, on the same fake tensors; full fine-tuning, because it stops at frozen
  weights.

`--check` fails where wazn misses its bounds.
"""

from __future__ import annotations

import argparse
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
CONFIG = ROOT / "src/wazn/facts/models/meta-llama--Llama-3.1-8B.json"
QUESTION = "--method lora --rank 16 --seq-len 2048 --micro-batch 1 --checkpointing full".split()
MOST_MIB = 1200 * 1000**2 / 1024**2  # 1.2 GB


@dataclass(frozen=True, kw_only=True)
class Case:
    """One process: `figure` finds the answer in what it prints."""

    name: str
    arguments: list[str]
    figure: str
    most_seconds: float | None = None


def ours(model: str, most_seconds: float) -> Case:
    return Case(
        name=f"wazn trace {model}",
        arguments=["-m", "wazn", "trace", model, *QUESTION, "--format", "json"],
        figure=r'"allocated_bytes": (\d+)',
        most_seconds=most_seconds,
    )


OURS = [ours("llama-3.1-8b", 6), ours("llama-3.1-70b", 20), ours("llama-3.1-405b", 40)]

PLAIN_LOOP = """
import json, sys
from contextlib import nullcontext
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

config = json.load(open(sys.argv[1]))
config = {key: value for key, value in config.items() if not key.startswith("_")}
tracked = sys.argv[2] == "tracked"
with torch.device("meta"):
    hf_config = AutoConfig.for_model(config.pop("model_type"), use_cache=False, **config)
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16)
    if not tracked:
        from peft import LoraConfig, get_peft_model
        lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
model.train()
model.gradient_checkpointing_enable({"use_reentrant": False})
with FakeTensorMode(allow_non_fake_inputs=True):
    model.to_empty(device="cpu")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=True)
    tokens = torch.zeros(1, 2048, dtype=torch.int64)
    tracker = None
    if tracked:
        from torch.distributed._tools.mem_tracker import MemTracker
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
    with tracker or nullcontext():
        for step in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if tracker:
                tracker.reset_mod_stats()
    if tracker:
        print("peak", sum(total["Total"] for total in tracker.get_tracker_snapshot("peak").values()))
    else:
        print("peak", "not asked for")
"""


def peer(name: str, how: str) -> Case:
    return Case(
        name=name,
        arguments=["-c", PLAIN_LOOP, str(CONFIG), how],
        figure=r"^peak (.+)$",
    )


PEERS = [peer("FakeTensorMode, 8B, LoRA", "untracked"), peer("MemTracker, 8B, full", "tracked")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peers", action="store_true", help="run PyTorch's own means as well")
    parser.add_argument("--check", action="store_true", help="fail where wazn misses its bounds")
    asked = parser.parse_args()
    missed = []
    print(f"{'process':<28} {'wall':>8} {'CPU':>8} {'memory':>9}  answer")
    for case in [*OURS, *(PEERS if asked.peers else [])]:
        seconds, cpu_seconds, mib, said = measure(case, asked.runs)
        median = statistics.median(seconds)
        print(
            f"{case.name:<28} {median:7.2f}s {min(cpu_seconds):7.2f}s {mib:6.0f}MiB  {said[:60]}",
            flush=True,
        )
        if case.most_seconds is None:
            continue
        if median > case.most_seconds:
            missed.append(f"{case.name}: {median:.2f} s, at most {case.most_seconds} s")
        if mib > MOST_MIB:
            missed.append(f"{case.name}: {mib:.0f} MiB, at most {MOST_MIB:.0f} MiB")
    print(*missed, sep="\n")
    sys.exit(bool(missed) and asked.check)


def measure(case: Case, runs: int) -> tuple[list[float], list[float], float, str]:
    """Return the wall and CPU seconds of each run, the largest resident set in MiB, and the answer."""
    seconds, cpu_seconds, most_kib = [], [], 0
    with tempfile.TemporaryDirectory(prefix="wazn-bench-") as scratch:
        out, err = Path(scratch) / "out", Path(scratch) / "err"
        for _ in range(runs):
            with out.open("wb") as out_file, err.open("wb") as err_file:
                begin = time.perf_counter()
                process = subprocess.Popen(
                    [sys.executable, *case.arguments], stdout=out_file, stderr=err_file
                )
                _, status, usage = os.wait4(process.pid, 0)
                seconds.append(time.perf_counter() - begin)
            process.returncode = os.waitstatus_to_exitcode(status)  # it was waited for, above
            cpu_seconds.append(usage.ru_utime + usage.ru_stime)
            most_kib = max(most_kib, usage.ru_maxrss)
        figures = re.findall(case.figure, out.read_text("utf-8", "replace"), re.MULTILINE)
        errors = err.read_text("utf-8", "replace").strip().splitlines()
    return (
        seconds,
        cpu_seconds,
        most_kib / 1024,
        figures[0] if figures else (errors or ["nothing"])[-1],
    )


if __name__ == "__main__":
    main()
