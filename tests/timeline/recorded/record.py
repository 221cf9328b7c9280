"""Record what the real allocator does; see README.md beside this file."""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
MIB = 2**20
ADVICE = " If reserved but unallocated memory is large"

SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:20",
    "max_split_size_mb:64,max_non_split_rounding_mb:32",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[64:8,256:4,>:1],expandable_segments:True",
    "large_segment_size_mb:40",
    "large_segment_size_mb:12,expandable_segments:True",
    "garbage_collection_threshold:0.6",
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.8",
    "per_process_memory_fraction:0.7",
    "expandable_segments:True,max_split_size_mb:40",
    "expandable_segments:True,per_process_memory_fraction:0.7,garbage_collection_threshold:0.5",
    "garbage_collection_threshold:0.5,per_process_memory_fraction:1.0,max_split_size_mb:100",
)


def script(rng: random.Random, length: int) -> list[str]:
    """Make up a run: few sizes or many, growing and shrinking, last in first out or any order."""
    kinds = (
        lambda: rng.randint(1, 3000),
        lambda: rng.randint(1, 2 * MIB),
        lambda: rng.randint(1, 30 * MIB),
        lambda: rng.randint(1, 8) * MIB,
        lambda: rng.randint(9, 64) * MIB,
        lambda: rng.randint(1, 120 * MIB),
    )
    sizes = [rng.choice(kinds)() for _ in range(rng.choice((6, 12, 40, 200)))]
    lines: list[str] = []
    live: list[int] = []
    number = 0
    growth = 0.6
    for _ in range(length):
        if rng.random() < 0.02:
            growth = rng.choice((0.3, 0.45, 0.5, 0.55, 0.7))
        if rng.random() < 0.005:
            lines.append("e")
        elif live and rng.random() > growth:
            lines.append(f"f {live.pop(rng.choice((-1, 0, rng.randrange(len(live)))))}")
        else:
            lines.append(f"a {rng.choice(sizes)}")
            live.append(number)
            number += 1
    return lines


def training() -> list[str]:
    """Write out the benchmark's training run with three small layers."""
    place = HERE.parents[2] / "benchmarks" / "replay.py"
    benchmark = runpy.run_path(str(place))
    timeline = benchmark["training"](
        layers=3, hidden=1024, ffn=2816, kv=256, tokens=1024, vocab=32_000
    )
    numbers: dict[int, int] = {}
    lines = []
    for count, event in enumerate(timeline.events()):
        if event.num_bytes > 0:
            numbers[event.block_id] = sum(line[0] == "a" for line in lines[:count])
            lines.append(f"a {event.num_bytes}")
        else:
            lines.append(f"f {numbers.pop(event.block_id)}")
    return lines


def build(torch: Path, cuda_include: Path, out: Path) -> Path:
    """Compile the stand-in for CUDA and the driver program."""
    runtime = out / "libcudart.so.13"
    (out / "versions").write_text("libcudart.so.13 { global: *; };\n")
    subprocess.run(
        ["gcc", "-w", "-O2", "-shared", "-fPIC", f"-I{cuda_include}", "-o", runtime]
        + ["-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={out / 'versions'}"]
        + [HERE / "fake_cudart.c", HERE / "fake_cudart_rest.c"],
        check=True,
    )
    (out / "libnvidia-ml.so.1").symlink_to(runtime)
    subprocess.run(
        ["g++", "-w", "-std=c++20", "-O1", f"-I{torch / 'include'}", f"-I{cuda_include}"]
        + [HERE / "drive.cpp", "-o", out / "drive"]
        + [torch / "lib/libc10_cuda.so", torch / "lib/libc10.so", runtime]
        + [f"-Wl,-rpath,{torch / 'lib'}:{out}"],
        check=True,
    )
    return out / "drive"


def record(program: Path, run: dict[str, object], lines: list[str]) -> dict[str, object]:
    """Run one script; return the run with what came of it."""
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(program.parent),
        "FAKE_CAPACITY": str(run["capacity_bytes"]),
        "FAKE_TOTAL": str(run["total_bytes"]),
        "PYTORCH_ALLOC_CONF": str(run["settings"]),
    }
    if not run["settings"]:
        del environment["PYTORCH_ALLOC_CONF"]
    done = subprocess.run(
        [program],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    rows = [row.split(" ", 7) for row in done.stdout.splitlines()]
    messages = [row[7] for row in rows if row[7]]
    last = [int(field) for field in rows[-1][1:7]]
    return run | {
        "script": " ".join(lines),
        "addresses": [
            max(int(row[0]), -512) // 512
            for row, line in zip(rows, lines, strict=True)
            if line[0] == "a"
        ],
        "reserved_mib": [int(row[3]) // MIB for row in rows],
        "requested_bytes": last[0],
        "allocated_bytes": last[1],
        "peak_reserved_bytes": last[3],
        "num_alloc_retries": last[4],
        "num_ooms": last[5],
        "message": messages[0].partition(ADVICE)[0] if messages else None,
    }


def main() -> None:
    """Record every setting with little memory, with enough, and on a card that others use too; then a training run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", type=Path, required=True)
    parser.add_argument("--cuda-include", type=Path, required=True)
    arguments = parser.parse_args()
    rng = random.Random(2130)
    with tempfile.TemporaryDirectory() as folder, (HERE / "runs.jsonl").open("w") as file:
        program = build(arguments.torch.resolve(), arguments.cuda_include, Path(folder))
        for settings in SETTINGS:
            for capacity_mib, others_mib in ((300, 0), (600, 150), (2**20, 0)):
                run: dict[str, object] = {
                    "settings": settings,
                    "capacity_bytes": capacity_mib * MIB,
                    "total_bytes": (capacity_mib + others_mib) * MIB,
                }
                found = record(program, run, script(rng, 300))
                file.write(json.dumps(found, separators=(",", ":")) + "\n")
        for settings in ("", "expandable_segments:True"):
            for capacity_mib in (1200, 700, 640):
                run = {
                    "settings": settings,
                    "capacity_bytes": capacity_mib * MIB,
                    "total_bytes": capacity_mib * MIB,
                }
                found = record(program, run, training())
                file.write(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
