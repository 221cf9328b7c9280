"""Which models can be rehearsed: one optimizer step of each, with few of its layers and its own widths.

    scripts/sweep                    rehearse all, and write tests/trace/sweep.json
    scripts/sweep catalogue llama    those whose name holds all words; writes nothing
    scripts/sweep again              those that the record does not have, or has as failed; and write them

Three lists: every model of the catalogue, what it is usually trained for; every image-text model of the catalogue, with
one image; every model type for which transformers has a class for causal language models, with its default
configuration. Each is fully trained without checkpointing; the first of each type also with adapters on all linear
layers, with checkpointing where the class has it.

The record says of each what was trained, with how many layers, and why it cannot be rehearsed, if it cannot. Those in
`LACKING` and `IN_FP32` need a rule of their own.
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
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tests.recipes import BF16, lora_recipe, make_recipe
from wazn.dtypes import FLOAT32
from wazn.facts.models import list_models, resolve_model
from wazn.recipe import Adapter, Checkpointing
from wazn.trace.script import Script, Task
from wazn.trace.step import rehearse

__all__ = ["IN_FP32", "LACKING", "LISTS", "RECORD", "Case", "cases", "run"]

RECORD = Path(__file__).with_suffix(".json")
LISTS = ("catalogue", "images", "causal-lm types")
IMAGE = (336, 448)  # height, width
_TEXT_TOKENS = 64
_TOKENS_WITH_IMAGE = 4096
_MOST_LAYERS = 12  # enough for every pattern; whole models are not the question here
_SECONDS = 300
_ADDRESS_SPACE_BYTES = 16 << 30

_QWEN4_INDEXER = {
    "indexer_n_heads": 8,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
}
# Values without which the default configuration of a type cannot be built or run, whatever they are.
LACKING: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 10 + ["conv", "conv"]},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"text_config": _QWEN4_INDEXER},
    "qwen4_exp_text": _QWEN4_INDEXER,
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
}
# Types whose code multiplies bf16 by fp32, which stops on a GPU as well.
IN_FP32 = ("xlnet", "xlstm")
# Zamba ties each shared block after the first to the first, and its class refuses to be without a second.
LAYERS = {"zamba": 9}
# What adapters are put on where `peft` refuses `all-linear` or stops on it: a projection of state-space models, not
# routers that are linear layers and return two tensors, not grouped matrices, not a classifier's own first layer.
TARGETS = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h"), ("in_proj",)),
    **dict.fromkeys(("llama4", "llama4_text", "phimoe"), ("q_proj", "v_proj")),
    "deepseek_v4": ("q_a_proj", "kv_proj"),
    "distilbert": ("q_lin", "v_lin"),
}


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


def run(case: Case, *, adapted: bool, num_layers: int | None = None) -> dict[str, Any]:
    """Rehearse a case, with adapters too if it is so asked; return its entry in the record.

    Raises: whatever stops it.
    """
    from wazn.trace.configs import resolve_task

    config, task = case.config(), case.task()
    layers = num_layers or LAYERS.get(config["model_type"]) or enough_layers(config, task)
    has_image = case.listed == "images"
    script = Script(
        task=task,
        num_layers=layers,
        num_steps=1,
        num_images=int(has_image),
        image_size=IMAGE if has_image else None,
    )
    choices: dict[str, Any] = {
        "micro_batch": 1,
        "seq_len": _TOKENS_WITH_IMAGE if has_image else _TEXT_TOKENS,
        **({"precision": replace(BF16, weight_dtype=FLOAT32)} if case.source in IN_FP32 else {}),
    }
    whole = rehearse(config, make_recipe(**choices), script)
    assert whole.peak_bytes > 0
    if adapted:
        kept = Checkpointing.FULL if _has_checkpointing(config, task) else Checkpointing.NONE
        targets = TARGETS.get(config["model_type"], ("all-linear",))
        adapter = Adapter(rank=16, targets=targets)
        few = rehearse(config, lora_recipe(checkpointing=kept, adapter=adapter, **choices), script)
        assert 0 < few.num_trainable_parameters < whole.num_trainable_parameters
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
    lists = [m for m in model.modules() if isinstance(m, ModuleList) and len(m)]
    stack = max((m for m in lists if len(m) == depth), key=_size, default=None)
    if stack is None:  # counted otherwise
        stack = max(lists, key=_size, default=None)
        depth = 0 if stack is None else len(stack)
    if stack is None:
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
        for index, layer in enumerate(stack)
    ]
    enough = next(n for n in range(1, depth + 1) if set(kinds[:n]) == set(kinds))
    return min(max(enough, 2), _MOST_LAYERS)


def _has_checkpointing(config: dict[str, Any], task: Task | None) -> bool:
    from wazn.trace.models import build_model

    model = build_model(config, make_recipe(), Script(task=task, num_layers=2))
    return bool(model.supports_gradient_checkpointing)


def _size(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _in_a_process(case: Case, adapted: bool) -> dict[str, Any]:
    """Run a case in a child, which may hang or die, and return its entry: what was run, or `error`."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(_SECONDS)
        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE_BYTES,) * 2)
        try:
            entry = run(case, adapted=adapted)
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
        own = (
            sum(name in LACKING or name in IN_FP32 for name in ran)
            if listed == "causal-lm types"
            else 0
        )
        share = len(ran) / max(1, len(entries))
        rules = f", {own} of them by a rule of their own" if own else ""
        yield f"{listed}: {len(ran)} of {len(entries)} run ({share:.1%}){rules}"
        reasons = Counter(entry["error"] for entry in entries.values() if "error" in entry)
        for reason, count in reasons.most_common():
            names = [name for name, entry in entries.items() if entry.get("error") == reason]
            yield f"  {count} {', '.join(names)}: {reason}"


def main(words: list[str]) -> None:
    """Rehearse the cases whose names hold all words; write the record if no words are given."""
    import peft
    import torch
    import transformers
    import transformers.trainer

    versions = {module.__name__: module.__version__ for module in (torch, transformers, peft)}
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    stored: dict[str, Any] = json.loads(RECORD.read_text()) if words == ["again"] else {}
    stored.pop("versions", None)
    chosen = list(cases())
    if words == ["again"]:
        chosen = [
            case
            for case in chosen
            if "error" in stored[case.listed].get(case.source, {"error": ""})
        ]
    else:
        chosen = [case for case in chosen if all(word in case.name for word in words)]
    types = [(case.listed, case.config()["model_type"]) for case in chosen]
    firsts = [listed_type not in types[:index] for index, listed_type in enumerate(types)]
    record: dict[str, dict[str, dict[str, Any]]] = {
        listed: stored.get(listed, {}) for listed in LISTS
    }
    with ThreadPoolExecutor(int(os.environ.get("WAZN_PROCESSES", "2"))) as pool:
        entries = pool.map(_in_a_process, chosen, firsts)
        for case, entry in zip(chosen, entries, strict=True):
            record[case.listed][case.source] = entry
            sys.stderr.write(f"{case.name}: {entry.get('error', 'runs')}\n")
            if words in ([], ["again"]):
                RECORD.write_text(json.dumps({"versions": versions, **record}, indent=0) + "\n")
    sys.stdout.write("\n".join(_table(record)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
