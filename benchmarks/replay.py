"""How long a peak and a replay take, on timelines that look like training runs.

    python benchmarks/replay.py [--repeat 7]

The timelines are made here, so that this measures the `timeline` room alone: a decoder with equal layers, every layer
checkpointed, two optimizer steps; sizes and lifetimes like those of Llama models. Prints the median of some runs, in
time on the processor.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from wazn.timeline.allocator import make_allocator
from wazn.timeline.breakdown import peak
from wazn.timeline.events import LAYER, PASS, Category, Part, Phase, Segment, Tag, Timeline
from wazn.timeline.replay import replay

MIB = 2**20


class Tape:
    """Writes segments: allocates and frees blocks of one pass."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.num_passes = 0

    def new_pass(self) -> int:
        self.num_passes += 1
        return (self.num_passes - 1) * PASS

    def add(self, *segments: Segment, times: int = 1, shift: int = 0) -> None:
        self.parts.append(Part(segments=segments, times=times, shift=shift))


class Writer:
    """One segment in the making; `base` is the pass and the layer of the blocks that it allocates."""

    def __init__(self, phase: Phase, step: int, layer: int | None, base: int) -> None:
        self.segment = Segment(phase=phase, step=step, layer=layer, block_ids=[], sizes=[], tags=[])
        self.base = base
        self.size_of: dict[int, tuple[int, Tag]] = {}

    def alloc(self, size: int, tag: Tag) -> int:
        block_id = self.base + len(self.size_of)
        self.size_of[block_id] = (size, tag)
        self.event(block_id, size, tag)
        return block_id

    def free(self, block_id: int) -> None:
        size, tag = self.size_of[block_id]
        self.event(block_id, -size, tag)

    def event(self, block_id: int, size: int, tag: Tag) -> None:
        self.segment.block_ids.append(block_id)
        self.segment.sizes.append(size)
        self.segment.tags.append(tag)


def weight_sizes(hidden: int, ffn: int, kv: int) -> list[int]:
    """Bytes of a layer's weights in bf16: attention, MLP, two norms."""
    return [
        2 * hidden * hidden,
        2 * hidden * kv,
        2 * hidden * kv,
        2 * hidden * hidden,
        2 * hidden * ffn,
        2 * hidden * ffn,
        2 * hidden * ffn,
        2 * hidden,
        2 * hidden,
    ]


def forward(out: Writer, *, tokens: int, hidden: int, ffn: int, kv: int) -> list[int]:
    """Allocate what one layer's forward pass allocates and keep what it saves; the output comes last."""
    activation = Tag(Category.ACTIVATIONS, "saved")
    temporary = Tag(Category.TEMPORARY, "temporary")
    h, m, k = 2 * tokens * hidden, 2 * tokens * ffn, 2 * tokens * kv
    saved = []
    for width in (h, h):
        upcast = out.alloc(2 * width, activation)
        square = out.alloc(2 * width, temporary)
        mean = out.alloc(4 * tokens, temporary)
        out.free(square)
        shifted = out.alloc(4 * tokens, temporary)
        out.free(mean)
        rsqrt = out.alloc(4 * tokens, activation)
        out.free(shifted)
        scaled = out.alloc(2 * width, temporary)
        cast = out.alloc(width, activation)
        out.free(scaled)
        saved += [upcast, rsqrt, cast, out.alloc(width, activation)]
    for width in (h, k, k):
        saved.append(out.alloc(width, activation))
    for width in (h, k):
        half = out.alloc(width // 2, temporary)
        rotated = out.alloc(width, temporary)
        out.free(half)
        first = out.alloc(width, temporary)
        second = out.alloc(width, temporary)
        out.free(rotated)
        saved.append(out.alloc(width, activation))
        out.free(first)
        out.free(second)
    saved += [
        out.alloc(h, activation),
        out.alloc(4 * tokens * 32, activation),
        out.alloc(h, activation),
    ]
    for _ in range(6):
        seed = out.alloc(8, temporary)
        out.free(seed)
    saved += [out.alloc(m, activation) for _ in range(4)]
    saved.append(out.alloc(h, activation))
    saved.append(out.alloc(h, activation))
    return saved


def backward(out: Writer, saved: list[int], *, tokens: int, hidden: int) -> None:
    """Walk the saved blocks back: a gradient for each, made before its predecessor goes."""
    temporary = Tag(Category.TEMPORARY, "temporary")
    gradient = out.alloc(2 * tokens * hidden, temporary)
    for block_id in reversed(saved):
        size, _ = out.size_of[block_id]
        extra = [out.alloc(size, temporary) for _ in range(2)]
        new = out.alloc(size, temporary)
        for other in extra:
            out.free(other)
        out.free(gradient)
        out.free(block_id)
        gradient = new
    out.free(gradient)


def training(
    *, layers: int, hidden: int, ffn: int, kv: int, tokens: int, vocab: int = 128_256
) -> Timeline:
    """A full fine-tuning of `layers` layers, every layer checkpointed, for two steps."""
    tape = Tape()
    shape = {"tokens": tokens, "hidden": hidden, "ffn": ffn, "kv": kv}
    sizes = weight_sizes(hidden, ffn, kv)
    weights = Tag(Category.WEIGHTS, "layer")
    gradients = Tag(Category.GRADIENTS, "layer")
    states = Tag(Category.OPTIMIZER_STATES, "adam")
    hidden_tag = Tag(Category.ACTIVATIONS, "checkpoint")
    logits_tag = Tag(Category.LOGITS_AND_LOSS, "logits")
    temporary = Tag(Category.TEMPORARY, "temporary")
    load = Writer(Phase.LOAD, 0, None, tape.new_pass())
    for size in (2 * hidden * vocab, 2 * hidden * vocab):
        load.alloc(size, weights)
    tape.add(load.segment)
    layer = Writer(Phase.LOAD, 0, 0, tape.new_pass() + LAYER)
    for size in sizes:
        layer.alloc(size, weights)
    tape.add(layer.segment, times=layers, shift=LAYER)
    checkpoint_bytes = 2 * tokens * hidden
    for step in range(2):
        forward_pass = tape.new_pass()
        out = Writer(Phase.FORWARD, step, None, forward_pass)
        out.alloc(checkpoint_bytes, hidden_tag)
        tape.add(out.segment)
        out = Writer(Phase.FORWARD, step, 0, forward_pass + LAYER)
        saved = forward(out, **shape)
        for block_id in saved[:-1]:
            out.free(block_id)
        checkpoint = saved[-1]
        tape.add(out.segment, times=layers, shift=LAYER)
        out = Writer(Phase.LOSS, step, None, tape.new_pass())
        logits = [out.alloc(width * tokens * vocab, logits_tag) for width in (2, 4, 4)]
        for block_id in logits:
            out.free(block_id)
        tape.add(out.segment)
        backward_pass = tape.new_pass()
        out = Writer(Phase.BACKWARD, step, layers - 1, backward_pass + layers * LAYER)
        saved = forward(out, **shape)
        made = []
        for size in sizes:
            made.append(out.alloc(size, gradients))
            transposed = out.alloc(size, temporary)
            out.free(transposed)
        backward(out, saved, tokens=tokens, hidden=hidden)
        kept = forward_pass + layers * LAYER + (checkpoint & (LAYER - 1))
        out.event(kept, -checkpoint_bytes, Tag(Category.ACTIVATIONS, "saved"))
        tape.add(out.segment, times=layers, shift=-LAYER)
        out = Writer(Phase.OPTIMIZER, step, None, tape.new_pass())
        if step == 0:
            for _ in range(layers):
                for size in sizes:
                    out.alloc(size, states)
                    out.alloc(size, states)
        for size in sizes:
            scratch = [out.alloc(size, temporary) for _ in range(layers)]
            for block_id in scratch:
                out.free(block_id)
        tape.add(out.segment)
        zero = Writer(Phase.ZERO_GRAD, step, layers - 1, 0)
        for position, size in enumerate(sizes):
            zero.event(made[position], -size, gradients)
        tape.add(zero.segment, times=layers, shift=-LAYER)
        first = Writer(Phase.ZERO_GRAD, step, None, 0)
        first.event(forward_pass, -checkpoint_bytes, hidden_tag)
        tape.add(first.segment)
    return Timeline(parts=tuple(tape.parts))


def median(function: Callable[[], object], repeat: int) -> float:
    """Return the median milliseconds of a call, of this process alone: others on the machine do not count."""
    times = []
    for _ in range(repeat):
        start = time.process_time()
        function()
        times.append((time.process_time() - start) * 1e3)
    return statistics.median(times)


CASES = {
    "8B, 32 layers": {"layers": 32, "hidden": 4096, "ffn": 14336, "kv": 1024, "tokens": 2048},
    "405B, 126 layers": {"layers": 126, "hidden": 16384, "ffn": 53248, "kv": 1024, "tokens": 4096},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=7)
    repeat = parser.parse_args().repeat
    make_allocator()  # imported before the clock runs
    for name, shape in CASES.items():
        timeline = training(**shape)
        found = replay(timeline)
        compressed = sum(len(s.sizes) for part in timeline.parts for s in part.segments)
        peak_ms = median(lambda timeline=timeline: peak(timeline), repeat)
        replay_ms = median(lambda timeline=timeline: replay(timeline), repeat)
        print(
            f"{name}: {found.num_events:,} events ({compressed:,} written); "
            f"peak {peak_ms:.1f} ms; replay {replay_ms:.1f} ms "
            f"({replay_ms * 1e6 / found.num_events:.0f} ns per event); "
            f"{found.peak_allocated_bytes / 2**30:.2f} GiB allocated, "
            f"{found.peak_reserved_bytes / 2**30:.2f} reserved"
        )


if __name__ == "__main__":
    main()
