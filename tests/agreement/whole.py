"""Fourteen models at their whole size, from 7 to 405 billion parameters, each as somebody might train it."""

from __future__ import annotations

from typing import Any

from tests.agreement.steps import Case

ALL: dict[str, Any] = {"targets": ("all-linear",), "autocast": "bfloat16"}
LORA: dict[str, Any] = {"method": "lora", **ALL}
QLORA: dict[str, Any] = {"method": "qlora", **ALL}
QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")

WHOLE: dict[str, Case] = {
    "Llama-3.1-8B, LoRA": Case(
        model="meta-llama/Llama-3.1-8B",
        layers=32,
        micro_batch=2,
        seq_len=4096,
        checkpointing="full",
        **LORA,
    ),
    "Mistral-7B, full, bf16, flash": Case(
        model="mistralai/Mistral-7B-v0.1",
        layers=32,
        micro_batch=4,
        seq_len=4096,
        checkpointing="full-reentrant",
        attention="flash",
    ),
    "Qwen2.5-14B, QLoRA with dropout": Case(
        model="Qwen/Qwen2.5-14B",
        layers=48,
        micro_batch=4,
        dropout=0.05,
        checkpointing="full",
        optimizer="paged-adamw-8bit",
        **QLORA,
    ),
    "Phi-4, full, fp32 weights under autocast, nothing checkpointed": Case(
        model="microsoft/phi-4",
        layers=40,
        weights="float32",
        autocast="bfloat16",
        optimizer="adamw-fused",
    ),
    "Gemma-2-27B, QLoRA, eager": Case(
        model="google/gemma-2-27b",
        layers=46,
        attention="eager",
        checkpointing="full",
        **QLORA,
    ),
    "Llama-3.1-70B, QLoRA": Case(
        model="meta-llama/Llama-3.1-70B",
        layers=80,
        micro_batch=2,
        seq_len=4096,
        checkpointing="full",
        optimizer="paged-adamw-8bit",
        **QLORA,
    ),
    "Qwen2.5-72B, LoRA, nothing checkpointed": Case(
        model="Qwen/Qwen2.5-72B", layers=80, seq_len=1024, **LORA
    ),
    "Mixtral-8x7B, LoRA on the attention": Case(
        model="mistralai/Mixtral-8x7B-v0.1",
        layers=32,
        method="lora",
        targets=QKVO,
        autocast="bfloat16",
        checkpointing="full",
    ),
    "Qwen3-30B-A3B, LoRA on the attention": Case(
        model="Qwen/Qwen3-30B-A3B",
        layers=48,
        method="lora",
        targets=QKVO,
        autocast="bfloat16",
        checkpointing="full",
        seq_len=4096,
    ),
    "Moonlight-16B-A3B, full, bf16": Case(
        model="moonshotai/Moonlight-16B-A3B",
        layers=27,
        checkpointing="full",
        optimizer="adamw-8bit",
    ),
    "Command R, LoRA": Case(
        model="CohereForAI/c4ai-command-r-v01", layers=40, checkpointing="full", **LORA
    ),
    "gpt-oss-20b, LoRA on the attention": Case(
        model="openai/gpt-oss-20b",
        layers=24,
        method="lora",
        targets=QKVO,
        autocast="bfloat16",
        attention="eager",
        checkpointing="full",
    ),
    "Falcon-40B, LoRA": Case(model="tiiuae/falcon-40b", layers=60, checkpointing="full", **LORA),
    "Llama-3.1-405B, QLoRA": Case(
        model="meta-llama/Llama-3.1-405B",
        layers=126,
        checkpointing="full",
        optimizer="paged-adamw-8bit",
        **QLORA,
    ),
}
