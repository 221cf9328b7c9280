"""Whole steps of well-known runs, cut to a few layers: the tape peaks where the real libraries peak.

Every case runs the real model class, peft, bitsandbytes' layers and the loop under fake tensors, at the real widths.
Forward and loss are one phase here, as the rehearsal counts the head to the first and the tape to the second.
"""

from __future__ import annotations

import pytest

from tests.agreement.golden import Golden
from tests.agreement.steps import Case, Peaks, real_peaks, tape_peaks
from wazn.model.linears import quantized_linears
from wazn.timeline.events import Phase

LLAMA2, LLAMA3 = "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-3.1-8B"
MIXTRAL, QWEN_MOE = "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B"
QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
MLA = ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
ALL = ("all-linear",)

CASES: dict[str, Case] = {
    "C1, fp32 weights under autocast": Case(model=LLAMA2, weights="float32", autocast="bfloat16"),
    "C1, pure bf16": Case(model=LLAMA2),
    "C2": Case(
        model=LLAMA3,
        method="lora",
        targets=ALL,
        micro_batch=2,
        checkpointing="full",
        autocast="bfloat16",
    ),
    "C3": Case(
        model="Qwen/Qwen2.5-7B",
        method="qlora",
        targets=ALL,
        micro_batch=4,
        seq_len=4096,
        checkpointing="full",
        autocast="bfloat16",
    ),
    "C4, experts in bf16": Case(
        model=MIXTRAL,
        method="qlora",
        targets=QKVO,
        kbit=False,
        checkpointing="full",
        autocast="bfloat16",
    ),
    "C6": Case(
        model="google/gemma-2-2b",
        layers=4,
        method="lora",
        targets=ALL,
        micro_batch=8,
        seq_len=1024,
        checkpointing="full",
        autocast="bfloat16",
    ),
    "C7": Case(
        model=QWEN_MOE,
        method="lora",
        targets=QKVO,
        seq_len=4096,
        checkpointing="full",
        autocast="bfloat16",
    ),
    "C7, trained whole": Case(model=QWEN_MOE, layers=2, seq_len=4096),
    "C7, adapters on the experts": Case(
        model=QWEN_MOE,
        layers=2,
        method="lora",
        targets=ALL,
        checkpointing="full",
        autocast="bfloat16",
    ),
    "C4, adapters on the experts": Case(
        model=MIXTRAL,
        method="qlora",
        targets=ALL,
        kbit=False,
        checkpointing="full",
        autocast="bfloat16",
    ),
    "C8, experts in bf16": Case(
        model="deepseek-ai/DeepSeek-V2-Lite",
        method="qlora",
        targets=MLA,
        kbit=False,
        seq_len=4096,
        checkpointing="full",
        autocast="bfloat16",
    ),
    "DeepSeek-V3, adapters on the attention": Case(
        model="deepseek-ai/DeepSeek-V3",
        layers=4,
        method="lora",
        targets=("q_a_proj", "q_b_proj", *MLA[1:]),
        seq_len=1024,
        autocast="bfloat16",
    ),
    "Qwen2-MoE, its shared expert trained": Case(
        model="Qwen/Qwen1.5-MoE-A2.7B",
        layers=2,
        autocast="bfloat16",
        checkpointing="full",
        seq_len=1024,
    ),
    "OLMoE": Case(model="allenai/OLMoE-1B-7B-0924", layers=2, autocast="bfloat16", seq_len=1024),
    "gpt-oss": Case(
        model="openai/gpt-oss-20b",
        layers=2,
        method="lora",
        targets=QKVO,
        autocast="bfloat16",
        seq_len=1024,
    ),
    "QLoRA without checkpointing or autocast": Case(
        model=LLAMA3, method="qlora", targets=ALL, seq_len=1024
    ),
    "QLoRA, reentrant": Case(
        model=LLAMA3,
        method="qlora",
        targets=ALL,
        seq_len=2048,
        checkpointing="full-reentrant",
        autocast="bfloat16",
    ),
    "DoRA": Case(
        model=LLAMA3,
        method="lora",
        targets=ALL,
        dora=True,
        dropout=0.1,
        checkpointing="full",
        autocast="bfloat16",
    ),
    "Embedding and head trained beside the adapters": Case(
        model=LLAMA3,
        method="lora",
        targets=ALL,
        saved=("embed_tokens", "lm_head"),
        checkpointing="full",
        autocast="bfloat16",
    ),
    "Embedding trained, its tied head not": Case(
        model="meta-llama/Llama-3.2-1B", method="lora", targets=QKVO, saved=("embed_tokens",)
    ),
    "bf16 adapters with dropout": Case(
        model=LLAMA3, method="lora", targets=ALL, adapters="bfloat16", dropout=0.1
    ),
    "fp32 weights, reentrant": Case(
        model=LLAMA3, weights="float32", autocast="bfloat16", checkpointing="full-reentrant"
    ),
    "fp16 autocast": Case(model=LLAMA3, weights="float32", autocast="float16", seq_len=1024),
    "LoRA on Conv1D": Case(
        model="openai-community/gpt2", method="lora", targets=ALL, autocast="bfloat16", seq_len=1024
    ),
}


def joined(peaks: Peaks) -> dict[tuple[int, str], int]:
    """Return the peaks of loading, of forward with the loss, and of backward."""
    names = {
        Phase.LOAD: "load",
        Phase.FORWARD: "forward",
        Phase.LOSS: "forward",
        Phase.BACKWARD: "backward",
    }
    result: dict[tuple[int, str], int] = {}
    for (step, phase), peak_bytes in peaks.items():
        name = names.get(Phase(phase))
        if name is not None:
            result[step, name] = max(peak_bytes, result.get((step, name), 0))
    return result


SCALARS_BYTES = 4 * 512  # numbers of one step that the tape leaves out, each a block of its own


def allowed_bytes(case: Case, phase: str, step: int) -> int:
    """What may differ. Biases of 4-bit linears are fp32 after k-bit preparation until the first forward pass makes
    them bf16; the tape loads them in bf16. Shifted labels are a copy in a batch of many, and a view in a batch of
    one.
    """
    if phase == "load":
        biases = sum(
            linear.out_features
            for linears in quantized_linears(case.spec()).layers
            for linear in linears
            if linear.bias
        )
        raised = case.method == "qlora" and case.kbit
        return SCALARS_BYTES + (2 * biases if raised else 0)
    labels_bytes = 8 * case.seq_len if case.micro_batch == 1 and phase == "forward" else 0
    return SCALARS_BYTES * step + labels_bytes


@pytest.mark.filterwarnings("ignore:.*(rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, golden: Golden) -> None:
    """The peaks of loading, forward and backward agree in both steps, but for a few scalars."""
    case = CASES[name]
    real, tape = joined(golden.peaks(lambda: real_peaks(case))), joined(tape_peaks(case))
    assert tape.keys() == real.keys()
    for (step, phase), peak_bytes in real.items():
        difference_bytes = abs(tape[step, phase] - peak_bytes)
        assert difference_bytes <= allowed_bytes(case, phase, step), (step, phase)
