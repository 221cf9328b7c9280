"""One rehearsal in the environment of this process: a setup as JSON on stdin, what came of it as JSON on stdout.

echo '{"environment": ..., "config": ..., "gpu": ..., "options": {...}, ...}' | python -m evidence.worker
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from evidence.environments import read_environments
from evidence.setups import Setup
from wazn.estimation.assemble import fit_of, outside_of
from wazn.estimation.options import Options, resolve
from wazn.facts.gpus import resolve_gpu
from wazn.facts.models import resolve_model
from wazn.facts.stacks import resolve_stack

__all__ = ["run"]

_PACKAGES = ("torch", "transformers", "peft", "accelerate", "trl", "bitsandbytes", "tokenizers")
_PLUGINS = ("fms-acceleration", "fms-acceleration-peft", "fms-acceleration-foak")
_ROOT = Path(__file__).parents[1]


def run(setup: Setup) -> dict[str, Any]:
    """Rehearse; return peaks in bytes as PyTorch and nvidia-smi would show them, and what was used."""
    from evidence.old_torch import OLD_TORCH, every_slice_is_a_view
    from evidence.plugins import adapt_with
    from wazn.trace.script import Loop, Script
    from wazn.trace.step import rehearse

    started = time.perf_counter()
    is_file = setup.config.endswith(".json")
    source = resolve_model(str(_ROOT / setup.config) if is_file else setup.config)
    config = {**source.mapping, **setup.config_changes}
    gpu = resolve_gpu(setup.gpu).gpu
    options = Options(**setup.options)
    habits = resolve_stack(setup.options["stack"], family=config["model_type"])
    recipe = resolve(options, habits, gpu).recipe
    choices = dict(setup.script)
    group_size = choices.pop("group_size", 128)
    if "loop" in choices:
        choices["loop"] = Loop(choices["loop"])
    script = Script(capability=gpu.cuda_capability or (8, 0), **choices)
    adapt = adapt_with(setup.plugins, group_size=group_size)
    is_old = read_environments()[setup.environment].torch == OLD_TORCH
    with every_slice_is_a_view() if is_old else nullcontext():
        rehearsal = rehearse(config, recipe, script, adapt=adapt)
    outside = outside_of(gpu, rehearsal.managed_bytes)
    need, fit = fit_of(gpu, rehearsal.timeline(), outside)
    return {
        "versions": _versions(_PACKAGES + (_PLUGINS if setup.plugins else ())),
        "allocated_bytes": need.peak_allocated_bytes,
        "reserved_bytes": need.peak_reserved_bytes,
        "device_bytes": need.peak_reserved_bytes + sum(line.num_bytes for line in outside),
        "left_bytes": need.allocated_bytes,
        "phase": "" if need.peak is None else need.peak.phase.value,
        "step": 0 if need.peak is None else need.peak.step,
        "verdict": fit.verdict.value,
        "seconds": round(time.perf_counter() - started, 1),
    }


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Read, run, write; an error is an answer, too."""
    setup = Setup(**json.load(sys.stdin))
    try:
        answer = run(setup)
    except Exception as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
