"""How long an answer takes inside the process: the peak alone, and the whole answer with what PyTorch reserves.

    python benchmarks/estimate.py [--repeat 25] [--check]

    peak      options, two optimizer steps on the tape, their highest point (`run_through`, `timeline.breakdown.peak`)
    answer    the same with the caching allocator, and all that an estimate says (`weigh`)

Models are read beforehand and everything has run once. Prints medians of the processor time, which a busy machine
does not lengthen much; `--check` fails where one is beyond its bound.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from wazn.estimation.estimate import run_through, weigh
from wazn.estimation.options import Options
from wazn.facts.models import resolve_model, spec_of
from wazn.model.spec import ModelSpec
from wazn.timeline.breakdown import Peak, peak


@dataclass(frozen=True, kw_only=True)
class Case:
    """A question, and the most milliseconds that its peak and its whole answer may take."""

    model: str
    options: Options
    most_peak_ms: float
    most_answer_ms: float


BOUNDS = {"llama-3.1-8b": (5.0, 40.0), "llama-3.1-405b": (20.0, 120.0)}  # 32 and 126 layers
QUESTIONS = (Options(), Options(method="full"), Options(checkpointing="none"))
CASES = [
    Case(model=model, options=options, most_peak_ms=peak_ms, most_answer_ms=answer_ms)
    for model, (peak_ms, answer_ms) in BOUNDS.items()
    for options in QUESTIONS
]


def median_ms(function: Callable[[], object], repeat: int) -> float:
    """Return the median time of a call, in milliseconds; the first call is not counted."""
    function()
    times = []
    for _ in range(repeat):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return statistics.median(times) * 1000


def peak_of(spec: ModelSpec, options: Options) -> Peak:
    """Return the highest point of two optimizer steps."""
    return peak(run_through(spec, options, None).simulation.timeline)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=25)
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is exceeded")
    arguments = parser.parse_args()
    slow = False
    print(f"{'':44} {'events':>8} {'peak':>16} {'answer':>18}")
    for case in CASES:
        spec = spec_of(resolve_model(case.model))
        answer = weigh(spec, case.options)
        peak_ms = median_ms(partial(peak_of, spec, case.options), arguments.repeat)
        answer_ms = median_ms(partial(weigh, spec, case.options), arguments.repeat)
        slow = slow or peak_ms > case.most_peak_ms or answer_ms > case.most_answer_ms
        name = f"{case.model} {answer.recipe.method} checkpointing {answer.recipe.checkpointing}"
        events = sum(
            part.times * sum(len(segment.sizes) for segment in part.segments)
            for part in answer.timeline.parts
        )
        print(
            f"{name:44} {events:8,}"
            f" {peak_ms:6.1f} of {case.most_peak_ms:3g} ms {answer_ms:6.1f} of {case.most_answer_ms:3g} ms"
        )
    return int(slow and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
