"""Rehearse whole steps of a real model, run the same on the tape, and lay the peaks of every phase side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.agreement.golden import Peaks
from tests.recipes import make_recipe
from wazn.dtypes import BFLOAT16, FLOAT16, FLOAT32
from wazn.facts.models import resolve_model
from wazn.facts.stacks import resolve_stack
from wazn.model.config import read_config
from wazn.model.lora import adapted
from wazn.model.spec import ModelSpec
from wazn.recipe import (
    Adapter,
    Attention,
    Checkpointing,
    KbitPreparation,
    Method,
    Optimizer,
    Precision,
    Quantization,
    QuantizationFormat,
    Recipe,
)
from wazn.simulate.step import simulate
from wazn.timeline.events import Timeline
from wazn.units import round_up

if TYPE_CHECKING:
    from wazn.trace.rehearsal import Rehearsal

DTYPES = {"bfloat16": BFLOAT16, "float16": FLOAT16, "float32": FLOAT32}
METHODS = {"full": Method.FULL, "lora": Method.LORA, "qlora": Method.QLORA}
CHECKPOINTING = {
    "none": Checkpointing.NONE,
    "full": Checkpointing.FULL,
    "full-reentrant": Checkpointing.FULL_REENTRANT,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of the catalogue, cut to a few layers, and what is done with it."""

    model: str
    layers: int = 3
    method: str = "full"
    targets: tuple[str, ...] = ()
    micro_batch: int = 1
    seq_len: int = 2048
    checkpointing: str = "none"
    weights: str = "bfloat16"
    autocast: str | None = None
    adapters: str = "float32"
    kbit: bool = True
    dora: bool = False
    dropout: float = 0.0
    attention: str = "sdpa"
    optimizer: str = "adamw"
    saved: tuple[str, ...] = ()  # modules that are trained whole beside the adapters
    changes: tuple[tuple[str, Any], ...] = ()  # of the configuration

    def config(self) -> dict[str, Any]:
        """The configuration, cut."""
        config = dict(resolve_model(self.model).mapping)
        key = next(k for k in ("num_hidden_layers", "n_layer") if k in config)
        whole, config[key] = config[key], self.layers
        for name, value in config.items():
            if isinstance(value, list) and len(value) == whole:  # layer_types, no_rope_layers
                config[name] = value[: self.layers]
        return {**config, **dict(self.changes)}

    def spec(self) -> ModelSpec:
        """The architecture."""
        return read_config(self.config(), id=self.model, path=self.model)

    def recipe(self) -> Recipe:
        """For the tape."""
        adapted_by = Adapter(
            rank=16,
            targets=self.targets,
            dora=self.dora,
            dropout=self.dropout,
            modules_to_save=self.saved,
        )
        quantization = Quantization(
            format=QuantizationFormat.NF4,
            double_quant=True,
            kbit_preparation=KbitPreparation.PEFT if self.kbit else KbitPreparation.NONE,
            experts=False,
        )
        return make_recipe(
            method=METHODS[self.method],
            adapter=None if self.method == "full" else adapted_by,
            quantization=quantization if self.method == "qlora" else None,
            precision=Precision(
                weight_dtype=DTYPES[self.weights],
                autocast_dtype=None if self.autocast is None else DTYPES[self.autocast],
                adapter_dtype=DTYPES[self.adapters],
                master_dtype=None,
                gradient_dtype=None,
                state_dtype=None,
            ),
            micro_batch=self.micro_batch,
            seq_len=self.seq_len,
            checkpointing=CHECKPOINTING[self.checkpointing],
            attention=Attention(self.attention),
            optimizer=Optimizer(self.optimizer),
            inputs_require_grad=self.method != "full" and self.checkpointing != "none",
        )


def rehearsal(case: Case) -> Rehearsal:
    """What the real libraries do."""
    from wazn.trace.script import Script
    from wazn.trace.step import rehearse

    return rehearse(case.config(), case.recipe(), Script(matmul_workspaces=False))


def real_peaks(case: Case) -> Peaks:
    """The rehearsal's peaks by step and phase."""
    return rehearsal(case).peaks()


def real_timeline(case: Case) -> Timeline:
    """The rehearsal's timeline."""
    return rehearsal(case).timeline()


def tape_timeline(case: Case) -> Timeline:
    """The tape's timeline."""
    spec, recipe = case.spec(), case.recipe()
    names: frozenset[str] = frozenset()
    if case.targets:
        found = adapted(spec, ",".join(case.targets), modules_to_save=case.saved)
        names = frozenset(target.name for layer in found.layers for target in layer)
    habits = resolve_stack("hf@5.24", family=spec.family)
    return simulate(spec, recipe, habits, names).timeline


def tape_peaks(case: Case) -> Peaks:
    """The tape's peaks by step and phase."""
    peaks: Peaks = {}
    current_bytes = 0
    for event in tape_timeline(case).events():
        key = (event.step, str(event.phase))
        peaks.setdefault(key, current_bytes)
        size = event.num_bytes
        current_bytes += round_up(size, 512) if size > 0 else -round_up(-size, 512)
        peaks[key] = max(peaks[key], current_bytes)
    return peaks


__all__ = [
    "Case",
    "Peaks",
    "real_peaks",
    "real_timeline",
    "rehearsal",
    "tape_peaks",
    "tape_timeline",
]
