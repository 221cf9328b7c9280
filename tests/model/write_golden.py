"""Write what the installed transformers and peft make of every catalogue entry that wazn reads."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.model.catalogue import GOLDEN, LORA_LAYERS, configurations, lora_cases
from tests.model.cut import cut
from tests.model.real import build, count, fingerprint, trained, weights


def main() -> None:
    """Go through the catalogue."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, help="cut the models, where whole ones take too long")
    parser.add_argument("--no-lora", action="store_true", help="weights only: without peft")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    models = {}
    for name, mapping in configurations().items():
        if mapping["model_type"] not in transformers.CONFIG_MAPPING:
            continue
        whole = mapping if options.layers is None else cut(mapping, options.layers)
        shapes = weights(build(whole))
        seen = {"total": count(shapes), "tensors": len(shapes), "weights": fingerprint(shapes)}
        models[name] = seen if options.no_lora else {**seen, "lora": _lora(mapping)}
        sys.stderr.write(f"{name} {seen['total']}\n")
    short = ".".join(transformers.__version__.split(".")[:2])
    _write(GOLDEN / f"transformers-{short}.json", models, layers=options.layers)


def _lora(mapping: Mapping[str, Any]) -> dict[str, list[Any]]:
    short = cut(mapping, LORA_LAYERS)
    seen = {}
    for label, case in lora_cases(short).items():
        shapes = trained(short, **case.peft)
        seen[label] = [count(shapes), fingerprint(shapes)]
    return seen


def _write(path: Path, models: dict[str, Any], *, layers: int | None) -> None:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    if any("lora" in seen for seen in models.values()):
        versions["peft"] = version("peft")
    head = {"python": platform.python_version(), **versions}
    lines = [f"  {json.dumps(name)}: {json.dumps(seen)}" for name, seen in models.items()]
    text = ",\n".join(lines)
    path.write_text(
        f'{{\n "versions": {json.dumps(head)},\n "layers": {json.dumps(layers)},\n "models": {{\n{text}\n }}\n}}\n'
    )


if __name__ == "__main__":
    main()
