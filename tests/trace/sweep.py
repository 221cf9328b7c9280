"""Which models can be rehearsed: one optimizer step of each, with few of its layers and its own widths.

    scripts/sweep                    rehearse all, and write tests/trace/sweep.json
    scripts/sweep catalogue llama    those whose name holds a word; writes nothing

Three lists: every model of the catalogue, what it is usually trained for; every image-text model of the catalogue, with
one image; every model type for which transformers has a class for causal language models, with its default
configuration. Each is fully trained without checkpointing, then with adapters on all linear layers and checkpointing.

The record says of each what was trained, with how many layers, and why it cannot be rehearsed, if it cannot. A default
configuration that lacks a value without which the class cannot be built has it in `LACKING`: those need a rule of their
own.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tests.recipes import lora_recipe, make_recipe
from wazn.facts.models import list_models, resolve_model
from wazn.recipe import Checkpointing
from wazn.trace.script import Script, Task

__all__ = ["LACKING", "LISTS", "RECORD", "Case", "cases", "run"]

RECORD = Path(__file__).with_suffix(".json")
LISTS = ("catalogue", "images", "causal-lm types")
IMAGE = (672, 1008)  # height, width
_TEXT_TOKENS = 64
_TOKENS_WITH_IMAGE = 4096
_MOST_LAYERS = 12  # enough for every pattern; whole models are not the question here
_SECONDS = 300
_ADDRESS_SPACE_BYTES = 16 << 30

# Values without which the default configuration of a type cannot be built or run, whatever they are.
LACKING: dict[str, dict[str, Any]] = {}


class Case(NamedTuple):
    """A model to rehearse; `source` is the catalogue's id or the model type."""

    listed: str
    source: str

    @property
    def name(self) -> str:
        """The case's name in the record and in tests."""
        return f"{self.listed}: {self.source}"

    def config(self) -> dict[str, Any]:
        """Return its config.json."""
        if self.listed == "causal-lm types":
            return {"model_type": self.source, **LACKING.get(self.source, {})}
        return dict(resolve_model(self.source).mapping)

    def task(self) -> Task | None:
        """Return what it is trained for; None for what it is usually trained for."""
        given = {"images": Task.IMAGE_TEXT, "causal-lm types": Task.CAUSAL_LM}
        return given.get(self.listed)


def cases() -> Iterator[Case]:
    """Yield all cases."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for model in list_models():
        yield Case("catalogue", model.id)
    for model in list_models():
        if "vision_config" in resolve_model(model.id).mapping:
            yield Case("images", model.id)
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        yield Case("causal-lm types", model_type)


def run(case: Case, *, num_layers: int | None = None) -> dict[str, Any]:
    """Rehearse a case; return its entry in the record.

    Raises: whatever stops it.
    """
    from wazn.trace.configs import resolve_task
    from wazn.trace.step import rehearse

    config, task = case.config(), case.task()
    layers = num_layers or enough_layers(config, task)
    has_image = case.listed == "images"
    script = Script(
        task=task,
        num_layers=layers,
        num_steps=1,
        num_images=int(has_image),
        image_size=IMAGE if has_image else None,
    )
    sizes = {"micro_batch": 1, "seq_len": _TOKENS_WITH_IMAGE if has_image else _TEXT_TOKENS}
    whole = rehearse(config, make_recipe(**sizes), script)
    adapted = rehearse(config, lora_recipe(checkpointing=Checkpointing.FULL, **sizes), script)
    assert 0 < adapted.num_trainable_parameters < whole.num_trainable_parameters
    assert whole.peak_bytes > 0
    return {"task": str(task or resolve_task(config, script)), "layers": layers}


def enough_layers(config: dict[str, Any], task: Task | None) -> int:
    """Return how many of the first layers have one of each kind, by parameters and by the configuration's lists."""
    from torch.nn import ModuleList

    from wazn.trace.configs import read_hf_config, task_of, text_part
    from wazn.trace.models import build_model

    hf_config = read_hf_config(config)
    wanted = task or task_of(hf_config)
    model = build_model(config, make_recipe(), Script(task=wanted))
    part = text_part(hf_config)
    depth = getattr(part, "num_hidden_layers", 0)
    stacks = [m for m in model.modules() if isinstance(m, ModuleList) and len(m) == depth]
    if not stacks:
        return _MOST_LAYERS
    said = [
        value
        for value in vars(part).values()
        if isinstance(value, list | tuple) and len(value) == depth
    ]
    kinds = [
        (
            type(layer),
            tuple((name, tuple(p.shape)) for name, p in layer.named_parameters()),
            tuple(str(values[index]) for values in said),
        )
        for index, layer in enumerate(max(stacks, key=lambda stack: _size(stack)))
    ]
    enough = next(n for n in range(1, depth + 1) if set(kinds[:n]) == set(kinds))
    return min(max(enough, 2), _MOST_LAYERS)


def _size(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _in_a_process(case: Case) -> dict[str, Any]:
    """Run a case in a child, which may hang or die, and return its entry: what was run, or `error`."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(_SECONDS)
        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE_BYTES,) * 2)
        try:
            entry = run(case)
        except BaseException as error:
            entry = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
        os.write(writer, json.dumps(entry).encode())
        os._exit(0)
    os.close(writer)
    said = b""
    while piece := os.read(reader, 1 << 16):
        said += piece
    os.close(reader)
    _, status = os.waitpid(child, 0)
    return json.loads(said) if said else {"error": f"the process ended, status {status}"}


def _table(record: dict[str, dict[str, dict[str, Any]]]) -> Iterator[str]:
    """Yield how many ran, and why the others did not, grouped."""
    for listed, entries in record.items():
        ran = [name for name, entry in entries.items() if "error" not in entry]
        own = sum(name in LACKING for name in ran) if listed == "causal-lm types" else 0
        share = len(ran) / max(1, len(entries))
        rules = f", {own} of them with a value that their default lacks" if own else ""
        yield f"{listed}: {len(ran)} of {len(entries)} run ({share:.1%}){rules}"
        reasons = Counter(entry["error"] for entry in entries.values() if "error" in entry)
        for reason, count in reasons.most_common():
            names = [name for name, entry in entries.items() if entry.get("error") == reason]
            yield f"  {count} {', '.join(names)}: {reason}"


def main(words: list[str]) -> None:
    """Rehearse the cases whose names hold all words; write the record if no words are given."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    import peft  # noqa: F401  # what the children need is imported once
    import transformers.trainer

    import wazn.trace.step  # noqa: F401

    chosen = [case for case in cases() if all(word in case.name for word in words)]
    record: dict[str, dict[str, dict[str, Any]]] = {}
    with ThreadPoolExecutor(int(os.environ.get("WAZN_PROCESSES", "2"))) as pool:
        for case, entry in zip(chosen, pool.map(_in_a_process, chosen), strict=True):
            record.setdefault(case.listed, {})[case.source] = entry
            sys.stderr.write(f"{case.name}: {entry.get('error', 'runs')}\n")
    sys.stdout.write("\n".join(_table(record)) + "\n")
    if not words:
        versions = {
            name: sys.modules[name].__version__ for name in ("torch", "transformers", "peft")
        }
        RECORD.write_text(json.dumps({"versions": versions, **record}, indent=0) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
