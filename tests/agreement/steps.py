"""Rehearse whole steps of a real model, run the same on the tape, and lay the peaks of every phase side by side."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

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
    Checkpointing,
    KbitPreparation,
    Method,
    Precision,
    Quantization,
    QuantizationFormat,
    Recipe,
)
from wazn.simulate.step import simulate
from wazn.timeline.events import Timeline
from wazn.units import round_up

if TYPE_CHECKING:
    from wazn.trace.step import Recipe as Rehearsed

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
    saved: tuple[str, ...] = ()  # modules that are trained whole beside the adapters
    changes: tuple[tuple[str, Any], ...] = ()  # of the configuration

    def config(self) -> dict[str, Any]:
        """The configuration, cut."""
        config = dict(resolve_model(self.model).mapping)
        key = next(k for k in ("num_hidden_layers", "n_layer") if k in config)
        config[key] = self.layers
        if isinstance(config.get("layer_types"), list):
            config["layer_types"] = config["layer_types"][: self.layers]
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
            inputs_require_grad=self.method != "full" and self.checkpointing != "none",
        )

    def rehearsed(self) -> Rehearsed:
        """For the rehearsal."""
        from wazn.trace.step import Recipe as Rehearsed

        return Rehearsed(
            method=self.method,
            targets=self.targets if len(self.targets) > 1 else (self.targets or ("all-linear",))[0],
            lora_dropout=self.dropout,
            dora=self.dora,
            prepare_kbit=self.kbit,
            weight_dtype=self.weights,
            autocast_dtype=self.autocast,
            adapter_dtype=None if self.adapters == "float32" else self.adapters,  # peft's own
            micro_batch=self.micro_batch,
            seq_len=self.seq_len,
            checkpointing=self.checkpointing,
            matmul_workspaces=False,
        )


def real_peaks(case: Case) -> Peaks:
    """The rehearsal's peaks by step and phase."""
    import peft

    from wazn.trace.step import rehearse

    if not case.saved:
        return rehearse(case.config(), case.rehearsed()).peaks()
    with_saved = partial(peft.LoraConfig, modules_to_save=list(case.saved))
    with patch.object(peft, "LoraConfig", with_saved):
        return rehearse(case.config(), case.rehearsed()).peaks()


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


__all__ = ["Case", "Peaks", "real_peaks", "tape_peaks", "tape_timeline"]
