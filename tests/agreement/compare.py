"""Run one contract of the tape and the real op on fake tensors, and lay the two side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.agreement.golden import Seen
from wazn.dtypes import BFLOAT16, BOOL, FLOAT16, FLOAT32, INT64, Dtype
from wazn.simulate.tape import Parameter, Tape, Tensor
from wazn.timeline.events import Phase
from wazn.trace.specs import OpTrace, Spec
from wazn.units import round_up

DTYPES: dict[str, Dtype] = {
    dtype.name: dtype for dtype in (BFLOAT16, BOOL, FLOAT16, FLOAT32, INT64)
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TapeTrace:
    """The numbers of `OpTrace`, of a contract on the tape."""

    kept_bytes: int
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    gradient_bytes: int
    changes: dict[str, list[int]]


def leaf(tape: Tape, spec: Spec, name: str = "x") -> Parameter:
    """Make the tensor that `spec` describes, on the tape."""
    numel = 1
    for size in spec.shape:
        numel *= size
    return tape.parameter(
        name=name, numel=numel, dtype=DTYPES[spec.dtype], requires_grad=spec.requires_grad
    )


def run_on_tape(
    function: Callable[..., Tensor],
    *inputs: Spec,
    autocast: Dtype | None = None,
    prepare: Callable[[Tape], object] | None = None,
) -> TapeTrace:
    """Run `function(tape, *tensors)` forward and backward; all numbers are above what existed before.

    `prepare(tape)` allocates whatever else exists before (the weights of a module); its result is handed to `function`
    after the tape.
    """
    tape = Tape()
    tensors = [leaf(tape, spec) for spec in inputs]
    prepared = () if prepare is None else (prepare(tape),)
    tape.enter(Phase.FORWARD)
    with tape.autocast(autocast):
        result = function(tape, *prepared, *tensors)
    tape.enter(Phase.LOSS)  # the result is let go
    if not result.requires_grad:
        del result
        return _trace(tape)
    gradient_source = Tape()
    gradient = gradient_source.new(result.numel, result.dtype)
    result.storage = None
    tape.enter(Phase.BACKWARD)
    tape.backward(result, gradient)
    del result
    tape.enter(Phase.OPTIMIZER)
    return _trace(tape)


def _trace(tape: Tape) -> TapeTrace:
    phases = {Phase.FORWARD: "forward", Phase.LOSS: "release", Phase.BACKWARD: "backward"}
    changes: dict[str, list[int]] = {name: [] for name in phases.values()}
    for segment in tape.finish():
        if segment.phase in phases:
            changes[phases[segment.phase]] += segment.sizes
    kept, forward_peak = _walk(changes["forward"])
    saved = kept + _walk(changes["release"])[0]
    gradient, backward_peak = _walk(changes["backward"])
    return TapeTrace(
        kept_bytes=kept,
        saved_bytes=saved,
        forward_peak_bytes=forward_peak,
        backward_peak_bytes=saved + backward_peak,
        gradient_bytes=saved + gradient,
        changes=changes,
    )


def _walk(sizes: list[int]) -> tuple[int, int]:
    current = peak = 0
    for size in sizes:
        current += round_up(size, 512) if size > 0 else -round_up(-size, 512)
        peak = max(peak, current)
    return current, peak


def allocations(changes: list[int]) -> list[int]:
    """Return what was allocated, in order."""
    return [size for size in changes if size > 0]


def assert_agree(real: OpTrace | Seen, tape: TapeTrace) -> None:
    """The contract and the op allocate the same sizes in the same order and have the same levels, to the byte."""
    for phase in ("forward", "backward"):
        assert allocations(tape.changes[phase]) == allocations(real.changes(phase)), phase
    assert tape.kept_bytes == real.kept_bytes
    assert tape.saved_bytes == real.saved_bytes
    assert tape.forward_peak_bytes == real.forward_peak_bytes
    assert tape.backward_peak_bytes == real.backward_peak_bytes
    assert tape.gradient_bytes == real.gradient_bytes
