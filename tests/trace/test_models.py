"""Models as `from_pretrained` leaves them: the class for the task, the types of their weights, the attention."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipes import BF16, make_recipe
from wazn.dtypes import FLOAT16
from wazn.errors import InputError, Unsupported
from wazn.facts.models import resolve_model
from wazn.recipe import Attention, Recipe
from wazn.trace.models import build_model
from wazn.trace.script import Loop, Script, Task
from wazn.trace.step import rehearse


def _build(model: str, recipe: Recipe | None = None, **script: Any) -> Any:
    config = resolve_model(model).mapping
    return build_model(config, recipe or make_recipe(), Script(num_layers=2, **script))


@pytest.mark.parametrize(
    ("model", "task", "name"),
    [
        ("meta-llama/Llama-3.1-8B", None, "LlamaForCausalLM"),
        ("meta-llama/Llama-3.1-8B", Task.SEQUENCE_CLASSIFICATION, "LlamaForSequenceClassification"),
        ("google-bert/bert-base-cased", None, "BertForSequenceClassification"),
        ("google/flan-t5-base", None, "T5ForConditionalGeneration"),
        ("google/gemma-3-12b-it", None, "Gemma3ForCausalLM"),
        ("google/gemma-3-12b-it", Task.IMAGE_TEXT, "Gemma3ForConditionalGeneration"),
        ("Qwen/Qwen2-VL-2B-Instruct", None, "Qwen2VLForConditionalGeneration"),
    ],
)
def test_the_task_decides_the_class(model: str, task: Task | None, name: str) -> None:
    """It is the one that transformers' auto class for the task takes; all weights are on `meta`, in bf16."""
    built = _build(model, task=task)
    assert type(built).__name__ == name
    assert {p.dtype for p in built.parameters()} == {torch.bfloat16}
    assert all(p.is_meta for p in built.parameters())


@pytest.mark.parametrize(
    ("model", "published"),
    [
        ("google/mt5-small", 300_176_768),
        ("google/flan-t5-base", 247_577_856),
        ("google/flan-t5-xl", 2_849_757_184),
    ],
)
def test_a_checkpoint_with_two_matrices_is_not_tied(model: str, published: int) -> None:
    """Their config.json unties them and the class of their configuration does not: with a head of its own the total is
    the published one, that of the catalogue.
    """
    built = build_model(resolve_model(model).mapping, make_recipe(), Script())
    assert sum(p.numel() for p in built.parameters()) == published
    assert not any("lm_head" in name for name in built.all_tied_weights_keys)


def test_routers_stay_in_fp32_where_the_class_says_so() -> None:
    """DeepSeek-V3 lists its router and the bias of its experts: `_keep_in_fp32_modules_strict` in
    modeling_deepseek_v3.py, which `from_pretrained` obeys in half precision.
    """
    config = dict(resolve_model("deepseek-ai/DeepSeek-V3").mapping)
    built = build_model(config, make_recipe(), Script(num_layers=4))
    raised = {name for name, tensor in built.named_parameters() if tensor.dtype is torch.float32}
    assert raised == {"model.layers.3.mlp.gate.weight"}
    biases = dict(built.named_buffers())
    assert biases["model.layers.3.mlp.gate.e_score_correction_bias"].dtype is torch.float32


def test_some_weights_stay_in_fp32_in_fp16_only() -> None:
    """T5's last matrix of each feed-forward block, `wo`: `_keep_in_fp32_modules` in modeling_t5.py."""
    precision = replace(BF16, weight_dtype=FLOAT16)
    built = _build("google/flan-t5-base", make_recipe(precision=precision))
    raised = {n for n, tensor in built.named_parameters() if tensor.dtype is torch.float32}
    assert len(raised) == 4
    assert all(name.endswith(".wo.weight") for name in raised)


@pytest.mark.parametrize(
    ("attention", "name"),
    [(Attention.SDPA, "sdpa"), (Attention.EAGER, "eager")],
)
def test_the_attention_that_was_asked_for(attention: Attention, name: str) -> None:
    """As transformers' `attn_implementation`; a class without sdpa takes eager, as in a real run."""
    built = _build("meta-llama/Llama-3.1-8B", make_recipe(attention=attention))
    assert built.config._attn_implementation == name
    eager_only = _build("EleutherAI/gpt-neo-125m", make_recipe(attention=attention))
    assert eager_only.config._attn_implementation == "eager"


def test_what_cannot_be_built_is_a_wrong_question() -> None:
    """A head size that is not a number reaches the class: the line that stops is named."""
    config = {"model_type": "hunyuan_v1_dense", "head_dim": None}
    with pytest.raises(InputError, match=r"cannot build .* at transformers/.*head_dim"):
        build_model(config, make_recipe(), Script(num_layers=2))


def test_a_language_model_inside_another_class() -> None:
    """Llama 3.2 Vision has a class for its language model, under its own type; Qwen2-VL has none."""
    built = _build("meta-llama/Llama-3.2-11B-Vision-Instruct", task=Task.CAUSAL_LM)
    assert type(built).__name__ == "MllamaForCausalLM"
    with pytest.raises(Unsupported, match=r"`qwen2_vl`(?s:.*)image-text"):
        _build("Qwen/Qwen2-VL-2B-Instruct", task=Task.CAUSAL_LM)


@pytest.mark.parametrize("task", [Task.IMAGE_TEXT, Task.SEQ2SEQ])
def test_a_task_that_a_model_has_no_class_for(task: Task) -> None:
    """Llama neither sees images nor has an encoder."""
    with pytest.raises(Unsupported, match=f"no class of `llama` for `{task}`"):
        _build("meta-llama/Llama-3.1-8B", task=task)


_OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_a_checkpoints_own_model_is_built_from_its_folder(tmp_path: Path) -> None:
    """`--trust-remote-code`: both classes come from the folder, cut like any other."""
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    mapping = {"model_type": "own_llama", "auto_map": classes, "num_hidden_layers": 4, **sizes}
    (tmp_path / "own.py").write_text(_OWN_CODE)
    (tmp_path / "config.json").write_text(json.dumps(mapping))
    script = Script(num_layers=2, code_folder=str(tmp_path), num_steps=1)
    built = build_model(mapping, make_recipe(), script)
    assert type(built).__name__ == "OwnForCausalLM"
    assert len(built.model.layers) == 2
    assert rehearse(mapping, make_recipe(seq_len=16), script).num_parameters > 0


@pytest.mark.parametrize("loop", [Loop.PLAIN, Loop.TRAINER])
def test_classifiers_that_look_for_the_end_of_a_text_find_it(loop: Loop) -> None:
    """BART classifies by the state at its last `</s>`, and asks that every sample has as many."""
    script = Script(task=Task.SEQUENCE_CLASSIFICATION, num_layers=1, num_steps=1, loop=loop)
    config = resolve_model("facebook/bart-base").mapping
    rehearsal = rehearse(config, make_recipe(seq_len=16), script)
    assert any(event.shape == (2, 768) for event in rehearsal.events)
