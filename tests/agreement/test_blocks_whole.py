"""Whole models of two layers: the tape peaks, phase by phase, where the real model peaks.

Two optimizer steps of full fine-tuning under fake tensors, with every family's embedding, tables,
masks, head and loss. Forward and loss are one phase here, as the rehearsal counts the head to the
first and the tape to the second.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.agreement.families import CONFIGS
from tests.agreement.golden import Golden, Peaks
from tests.agreement.test_blocks import EAGER_ONLY
from tests.recipes import make_recipe
from wazn.facts.stacks import resolve_stack
from wazn.model.config import read_config
from wazn.recipe import Attention, Checkpointing, Recipe
from wazn.simulate.step import simulate
from wazn.timeline.events import Phase
from wazn.units import round_up

BATCH, LENGTH = 2, 256


def real_peaks(config: dict[str, Any], *, attention: str, checkpointing: str) -> Peaks:
    """The rehearsal's peaks by step and phase."""
    from wazn.trace.script import Script
    from wazn.trace.step import rehearse

    recipe = _recipe(attention, checkpointing)
    return joined(rehearse(config, recipe, Script(matmul_workspaces=False)).peaks())


def _recipe(attention: str, checkpointing: str) -> Recipe:
    return make_recipe(
        micro_batch=BATCH,
        seq_len=LENGTH,
        attention=Attention(attention),
        checkpointing=Checkpointing(checkpointing),
    )


def tape_peaks(config: dict[str, Any], *, attention: str, checkpointing: str) -> Peaks:
    """The tape's peaks by step and phase."""
    spec = read_config(config, id="test", path="test")
    recipe = _recipe(attention, checkpointing)
    peaks: Peaks = {}
    current_bytes = 0
    habits = resolve_stack("hf@5.24", family=spec.family)
    for event in simulate(spec, recipe, habits, frozenset()).timeline.events():
        key = (event.step, str(event.phase))
        peaks.setdefault(key, current_bytes)
        size = event.num_bytes
        current_bytes += round_up(size, 512) if size > 0 else -round_up(-size, 512)
        peaks[key] = max(peaks[key], current_bytes)
    return joined(peaks)


def joined(peaks: Peaks) -> Peaks:
    """The peaks of loading, of forward with the loss, and of backward."""
    names = {
        str(Phase.LOAD): "load",
        str(Phase.FORWARD): "forward",
        str(Phase.LOSS): "forward",
        str(Phase.BACKWARD): "backward",
    }
    result: Peaks = {}
    for (step, phase), num_bytes in peaks.items():
        if phase in names:
            key = (step, names[phase])
            result[key] = max(result.get(key, 0), num_bytes)
    return result


SCALARS_BYTES = (
    4 * 512
)  # the loop's numbers of one step, each a block of its own, which the tape leaves out


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("name", CONFIGS)
def test_peaks(name: str, checkpointing: str, golden: Golden) -> None:
    """Loading, forward and backward peak at the same byte in both steps, but for a few scalars."""
    how = {
        "attention": "eager" if name in EAGER_ONLY else "sdpa",
        "checkpointing": checkpointing,
    }
    tape = tape_peaks(CONFIGS[name], **how)
    real = golden.peaks(lambda: real_peaks(CONFIGS[name], **how))
    assert tape.keys() == real.keys()
    for (step, phase), peak_bytes in real.items():
        assert 0 <= peak_bytes - tape[step, phase] <= SCALARS_BYTES * max(step, 1), (step, phase)
