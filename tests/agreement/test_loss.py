"""The loss on the tape, release by release, against what the real classes of that release allocated."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.agreement.families import CONFIGS
from wazn.dtypes import BFLOAT16, INT64
from wazn.facts.stacks import resolve_stack
from wazn.model.config import read_config
from wazn.model.spec import ModelSpec
from wazn.simulate.loss import causal_lm_loss, held_outputs
from wazn.simulate.modules import LinearModule
from wazn.simulate.tape import Tape
from wazn.timeline.events import Segment

S, V = 64, 4000  # of loss_seen.csv
SEEN = list(
    csv.DictReader(
        (Path(__file__).parents[1] / "facts" / "loss_seen.csv").read_text("utf-8").splitlines()
    )
)
Events = dict[str, list[int]]


def spec_of(family: str) -> ModelSpec:
    """A small model of the family with 4,000 vocabulary rows."""
    config = next(config for config in CONFIGS.values() if config["model_type"] == family)
    return read_config({**config, "vocab_size": V}, id=family, path=family)


def on_tape(
    family: str,
    version: str,
    micro_batch: int,
    *,
    wrapped: bool,
) -> Events:
    """Run the end of a model's forward, let go of its outputs, run backward: the logits-sized events of each."""
    spec, habits = spec_of(family), resolve_stack("hf@" + version, family=family)
    tape = Tape()
    rows = micro_batch * S
    hidden = tape.parameter(
        name="hidden", numel=rows * spec.hidden_size, dtype=BFLOAT16, requires_grad=True
    )
    weight = tape.parameter(
        name="lm_head", numel=V * spec.hidden_size, dtype=BFLOAT16, requires_grad=False
    )
    labels = tape.new(rows, INT64)
    head = LinearModule(spec.head, weight, None)
    smallest = 2 * micro_batch * (S - 1) * V
    tape.cut()
    loss, logits = causal_lm_loss(
        tape, spec, head, hidden, labels, habits=habits, micro_batch=micro_batch
    )
    with tape.autocast(BFLOAT16 if wrapped else None):
        outputs = held_outputs(tape, logits, None, habits)
    del logits
    forward = _large(tape.cut(), smallest)
    outputs.clear()
    after_forward = _large(tape.cut(), smallest)
    tape.backward(loss, tape.new(1, loss.dtype))
    return {
        "forward": forward,
        "after_forward": after_forward,
        "backward": _large(tape.cut(), smallest),
    }


def _large(segments: list[Segment], smallest: int) -> list[int]:
    return [size for segment in segments for size in segment.sizes if abs(size) >= smallest]


def peaks_per_logit(events: Events, micro_batch: int) -> tuple[float, ...]:
    """Highest level of forward and of backward, in bytes per logit."""
    level = 0
    found = []
    for sizes in events.values():
        highest = level
        for size in sizes:
            level += size
            highest = max(highest, level)
        found.append(highest / (micro_batch * S * V))
    return found[0], found[2]


@pytest.mark.parametrize(
    "row",
    SEEN,
    ids=lambda row: "-".join(
        (row["family"], row["transformers"], row["micro_batch"], row["outputs_wrapped"])
    ),
)
def test_logits_live_as_they_were_seen_to(row: dict[str, str]) -> None:
    """Every logits-sized allocation and free of the real class, in order, and so the peaks in bytes per logit.

    loss_seen.csv: the family's class at that release, bf16, 64 tokens, one or two samples, with and without
    accelerate's copy of the outputs to fp32.
    """
    micro_batch = int(row["micro_batch"])
    wrapped = row["outputs_wrapped"] == "yes"
    events = on_tape(row["family"], row["transformers"], micro_batch, wrapped=wrapped)
    seen = {phase: [int(size) for size in row[phase].split()] for phase in events}
    assert events == seen
    assert peaks_per_logit(events, micro_batch) == peaks_per_logit(seen, micro_batch)


def test_loss_programs_that_were_seen() -> None:
    """The rows hold seven of the nine programs, each with one sample and with two, with the outputs copied and not."""
    found: dict[str, set[tuple[str, str]]] = {}
    for row in SEEN:
        program = resolve_stack("hf@" + row["transformers"], family=row["family"]).loss.name
        found.setdefault(program, set()).add((row["micro_batch"], row["outputs_wrapped"]))
    assert set(found) == {
        "forward-copy",
        "forward-copy-recast",
        "forward-function-copy-recast",
        "forward-function-pad-recast",
        "function-copy",
        "function-pad",
        "native-copy",
    }
    assert all(len(seen) == 4 for seen in found.values())
