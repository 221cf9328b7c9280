"""From a measured row to what has to be run: the model, the recipe, the plugins, the environment.

What a row of fms-acceleration means is said by its benchmark: `scripts/benchmarks/scenarios*.yaml` (what is trained),
`defaults.yaml` (checkpointing, flash-attention), `sample-configurations/` (plugins), and by `tuning/sft_trainer.py` of
fms-hf-tuning, which it runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from evidence.environments import Environment
from evidence.rows import Row

__all__ = ["LeftOut", "Setup", "setup_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """One rehearsal; rows of the same setup differ only in what was measured of it.

    config: a catalogue name, or a path within the project.
    config_changes: keys of the config.json that the run changed.
    length: `fixed` where every batch of the run had the length of `options`, `inferred` where the longest had it, which
        was found from another row.
    options: as `wazn.estimate` takes them.
    script: fields of `wazn.trace.script.Script`.
    plugins: the name of a configuration in `evidence.plugins`; "" for none.
    """

    environment: str
    config: str
    gpu: str
    options: Mapping[str, Any]
    config_changes: Mapping[str, Any] = field(default_factory=dict)
    script: Mapping[str, Any] = field(default_factory=dict)
    plugins: str = ""
    length: str = "fixed"

    @property
    def key(self) -> str:
        """A short name that nothing else has that is run."""
        run = {name: value for name, value in asdict(self).items() if name != "length"}
        text = json.dumps(run, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """Why a row is not rehearsed."""

    reason: str


def setup_of(row: Row, environments: Mapping[str, Environment]) -> Setup | LeftOut:
    """Return what a row ran, or why it cannot be run again."""
    if row.source_repo == "foundation-model-stack/fms-acceleration":
        return _of_fms(row, environments)
    if row.source_path.startswith("method_comparison/MetaMathQA"):
        return _of_peft(row, environments)
    return LeftOut(reason=_reason(row))


def _reason(row: Row) -> str:
    if row.source_repo == "modelscope/ms-swift" and not row.model.startswith("01-ai/"):
        return (
            "model code of 2024-01 that is no part of transformers, under transformers 4.36 or 4.37"
        )
    if row.source_repo in ("modelscope/ms-swift", "huggingface/transformers"):
        return "its library versions are older than those that can be rehearsed"
    if row.seq_len_kind in ("max", "dataset", "mean"):
        return "the length of its batches is known to the data alone"
    return "the source does not say what it measured"


# fms-acceleration

_BYTES_IN_16_BITS = 2
_CARD_GB = 86  # more than an A100-80GB has, in 10^9 bytes
_CONFIGS = {
    "mistralai/Mistral-7B-v0.1": "mistralai/Mistral-7B-v0.1",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mistralai/Mixtral-8x7B-v0.1",  # the same sizes
    "NousResearch/Llama-2-70b-hf": "meta-llama/Llama-2-70b-hf",
    "meta-llama/Meta-Llama-3-8B": "meta-llama/Meta-Llama-3-8B",
    "ibm/PowerLM-3b": "tests/evidence/powerlm-3b.json",
    "bigcode/gpt_bigcode-santacoder": "evidence/models/santacoder.json",
    "TheBloke/Mistral-7B-v0.1-GPTQ": "mistralai/Mistral-7B-v0.1",
    "TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ": "mistralai/Mixtral-8x7B-v0.1",
    "TheBloke/Llama-2-70B-GPTQ": "meta-llama/Llama-2-70b-hf",
    "TechxGenus/Meta-Llama-3-8B-GPTQ": "meta-llama/Meta-Llama-3-8B",
}
# `sft_trainer.py` gives a tokenizer the special tokens that it lacks, and the embeddings and the head a row for each:
# Llama's tokenizer lacks `<pad>`; Llama 3's lacks a token for padding and one for what is unknown.
_VOCABULARIES = {
    "mistralai/Mistral-7B-v0.1": 32_001,
    "mistralai/Mixtral-8x7B-v0.1": 32_001,
    "meta-llama/Llama-2-70b-hf": 32_001,
    "meta-llama/Meta-Llama-3-8B": 128_258,
}
# Of the GPTQ checkpoints of TheBloke, whose usual 128 weights share a scale, these share it in a whole row: with 128
# Mixtral would end training 0.9 GB above what was measured.
_GROUP_SIZES = {
    "TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ": -1,
    "TheBloke/Llama-2-70B-GPTQ": -1,
}
_PLUGINS = {
    "none": "",
    "baseline-peft-bnb": "",
    "accelerated-peft-bnb": "",
    "foak-fast-kernels": "foak-fast-kernels",
    "foak-fast-kernels-liger": "foak-fast-kernels-liger",
    "accelerated-peft-bnb-foak": "accelerated-peft-bnb-foak",
    "accelerated-peft-bnb-foak-liger": "accelerated-peft-bnb-foak-liger",
    "accelerated-peft-autogptq": "accelerated-peft-autogptq",
    "accelerated-peft-autogptq-foak": "accelerated-peft-autogptq-foak",
    "accelerated-peft-autogptq-foak-liger": "accelerated-peft-autogptq-foak-liger",
}


def _of_fms(row: Row, environments: Mapping[str, Environment]) -> Setup | LeftOut:
    if row.seq_len_kind != "fixed":
        return LeftOut(reason="the length of its batches is known to the data alone")
    if row.quant == "none" and _BYTES_IN_16_BITS * (row.params_b or 0) > _CARD_GB:
        return LeftOut(
            reason="it ran out of memory: its weights alone are more than the card holds"
        )
    environment = next(item for item in environments.values() if row.source_path in item.sources)
    config = _CONFIGS[row.model]
    major, minor, _ = environment.pins["transformers"].split(".")
    options: dict[str, Any] = {
        "stack": f"hf@{major}.{minor}",
        "method": row.method,
        "micro_batch": row.micro_batch,
        "seq_len": row.seq_len,
        "optimizer": "adamw",
        "checkpointing": "full-reentrant",
        "attention": "flash",
    }
    framework = row.framework.rpartition(": ")[2]
    # `bf16: True`, or `fp16: True` for GPTQ, where the scenario has it: those of liger all do
    is_autocast = row.method == "qlora" or "liger" in row.source_path
    options["precision"] = "bf16-autocast" if is_autocast else "bf16"
    if row.method != "full":
        options |= {"rank": 16, "lora_dropout": 0.1, "targets": _targets(row)}
    if row.quant.startswith("gptq"):  # quantised by the plugin
        options |= {"method": "lora", "precision": "fp16-autocast"}
    elif row.method == "qlora":
        options["kbit_preparation"] = "trl" if framework == "baseline-peft-bnb" else "none"
    vocab_size = _VOCABULARIES.get(config)
    changes: dict[str, Any] = {} if vocab_size is None else {"vocab_size": vocab_size}
    if "santacoder" in row.model:
        options["seq_len"] = 2048  # the tokenizer's `model_max_length`
    script: dict[str, Any] = {"loop": "trainer", "use_cache": True}  # checkpointing switches it off
    if row.model in _GROUP_SIZES:
        script["group_size"] = _GROUP_SIZES[row.model]
    return Setup(
        environment=environment.name,
        config=config,
        gpu="a100-80gb",
        options=options,
        config_changes=changes,
        script=script,
        plugins=_PLUGINS[framework],
    )


def _targets(row: Row) -> str:
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    if row.quant == "nf4" and row.source_path.endswith("a100_80gb.csv"):
        names.append("c_attn")  # `accelerated-peft-bnb` in scenarios.yaml; only santacoder has it
    return ",".join(names)


# PEFT's comparison of methods (method_comparison/MetaMathQA/run.py): a loop of its own, batches of 4 padded to their
# longest sample, out of buckets of 80 samples sorted by length; no checkpointing

# All runs of 5,000 steps see the same batches. How long the longest is, only the tokenizer and the data know: 768
# tokens at most. This is the length at which rank 32 (transformers 4.57.1) reserves most nearly what was measured; the
# other rows have no say in it. That its samples are not all equally long is all that matters of the padding: there is a
# mask then, with which attention takes another kernel.
_LONGEST_BATCH = 641
_PADDING = 0.05
_NOT_PLAIN_LORA = {
    "bdlora": "a variant of LoRA that wazn has no option for",
    "mica": "a variant of LoRA that wazn has no option for",
    "lorafa": "an optimizer of PEFT's that trains one half of each adapter",
    "steps1000": "a run of other batches, whose longest is known to the data alone",
}


def _of_peft(row: Row, environments: Mapping[str, Environment]) -> Setup | LeftOut:
    for name, reason in _NOT_PLAIN_LORA.items():
        if name in row.id:
            return LeftOut(reason=reason)
    version = row.framework.rpartition(" ")[2]
    environment = next(
        item
        for item in environments.values()
        if item.pins["transformers"] == version and "method_comparison/MetaMathQA" in item.sources
    )
    major, minor, _ = version.split(".")
    options: dict[str, Any] = {
        "stack": f"hf@{major}.{minor}",
        "method": "full" if row.method == "full" else "lora",
        "precision": "bf16",
        "optimizer": "adamw",
        "micro_batch": row.micro_batch,
        "seq_len": _LONGEST_BATCH,
        "checkpointing": "none",
        "attention": "sdpa",
        "keep_outputs": True,  # `outputs` lives until the next batch has its own
    }
    if row.method != "full":
        options |= {
            "rank": row.lora_rank,
            "targets": row.lora_targets,
            "dora": row.method == "dora",
        }
    return Setup(
        environment=environment.name,
        config="meta-llama/Llama-3.2-3B",
        gpu="l40s",
        options=options,
        script={"padding": _PADDING},
        length="inferred",
    )
