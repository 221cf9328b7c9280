"""The matrix: families x methods x checkpointing x attention x sizes; both engines' numbers.

A family is a model of the catalogue at its real widths and vocabulary, cut to one period of its layers. Each of the
three sizes has its own precision and preparation, so that those are seen with every family too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from tests.agreement.steps import Case, real_timeline, tape_timeline
from wazn.timeline.breakdown import peak
from wazn.timeline.events import Phase, Timeline
from wazn.units import round_up

FAMILIES: dict[str, tuple[str, int]] = {
    "llama": ("meta-llama/Llama-3.1-8B", 2),
    "mistral": ("mistralai/Mistral-7B-v0.1", 2),
    "qwen2": ("Qwen/Qwen2.5-7B", 2),
    "qwen3": ("Qwen/Qwen3-8B", 2),
    "qwen3_moe": ("Qwen/Qwen3-30B-A3B", 2),
    "mixtral": ("mistralai/Mixtral-8x7B-v0.1", 2),
    "gemma": ("google/gemma-2b", 2),
    "gemma2": ("google/gemma-2-2b", 2),
    "gemma3_text": ("google/gemma-3-1b-it", 6),
    "phi3": ("microsoft/Phi-3-mini-4k-instruct", 2),
    "phi": ("microsoft/phi-2", 2),
    "gpt_neox": ("EleutherAI/pythia-1b", 2),
    "gpt2": ("openai-community/gpt2", 2),
    "falcon": ("tiiuae/falcon-7b", 2),
    "olmo2": ("allenai/OLMo-2-1124-7B", 2),
    "starcoder2": ("bigcode/starcoder2-3b", 2),
    "cohere": ("CohereForAI/c4ai-command-r-v01", 2),
    "cohere2": ("CohereLabs/c4ai-command-r7b-12-2024", 4),
    "granite": ("ibm-granite/granite-3.1-2b-instruct", 2),
    "glm4": ("zai-org/GLM-4-9B-0414", 2),
    "deepseek_v3": ("moonshotai/Moonlight-16B-A3B", 2),
    "gpt_oss": ("openai/gpt-oss-20b", 2),
    "smollm3": ("HuggingFaceTB/SmolLM3-3B", 4),
    "nemotron": ("nvidia/Nemotron-Mini-4B-Instruct", 2),
}
METHODS = ("full", "lora", "qlora")
CHECKPOINTING = ("none", "full")
ATTENTION = ("sdpa", "eager", "flash")
# its class has no sdpa, and a flash kernel of its own
EAGER_ONLY = frozenset({"gpt_oss"})
# PEFT refuses dropout on their experts
WITH_EXPERTS = frozenset({"qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"})
SIZES = ((1, 512), (2, 1024), (1, 4096))
OPTIMIZERS = ("adamw-fused", "adamw-8bit", "adamw")  # for each of the sizes
FLASH_SIZE = 1  # the package flash-attn comes third, at one size
# the positions that a model has, or was trained with
LONGEST = {"gpt2": 1024, "phi": 2048, "gpt_neox": 2048}


def cases() -> dict[str, Case]:
    """The whole matrix, by name."""
    return dict(
        _case(family, method, checkpointing, attention, size)
        for family, method, checkpointing, attention, size in product(
            FAMILIES, METHODS, CHECKPOINTING, ATTENTION, range(len(SIZES))
        )
        if (attention == "eager" or family not in EAGER_ONLY)
        and (attention != "flash" or size == FLASH_SIZE)
    )


def _case(
    family: str, method: str, checkpointing: str, attention: str, size: int
) -> tuple[str, Case]:
    model, layers = FAMILIES[family]
    micro_batch, seq_len = SIZES[size]
    seq_len = min(seq_len, LONGEST.get(family, seq_len))
    name = (
        f"{family}, {method}, checkpointing {checkpointing}, {attention}, {micro_batch} x {seq_len}"
    )
    return name, Case(
        model=model,
        layers=layers,
        method=method,
        targets=() if method == "full" else ("all-linear",),
        micro_batch=micro_batch,
        seq_len=seq_len,
        checkpointing=checkpointing,
        attention=attention,
        optimizer=OPTIMIZERS[size],
        autocast=None if size == 0 else "bfloat16",
        weights="float32" if size == 2 and method == "full" else "bfloat16",
        dropout=0.05 if size == 1 and family not in WITH_EXPERTS else 0.0,
        kbit=size != 2,
    )


# the names of `Held.levels` and of `Held.peaks`
LEVELS = tuple(
    f"after {phase}, step {step}" for step in (1, 2) for phase in ("forward", "backward")
)
PEAKS = ("peak of forward and loss", "peak of backward", "peak of the update")


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What a run held, in bytes, each block rounded to 512.

    levels: when forward had ended and when backward had ended, in the first and in the second step.
    peaks: of forward with the loss, of backward and of the update (clipping and the optimizer), in the second step.
    categories: what was alive at the peak; sums to it.
    """

    peak_bytes: int
    levels: tuple[int, ...]
    peaks: tuple[int, ...]
    categories: Mapping[str, int]

    def packed(self) -> dict[str, str]:
        """Return it in a few strings, for a file."""
        return {
            "peak": str(self.peak_bytes),
            "levels": " ".join(map(str, self.levels)),
            "peaks": " ".join(map(str, self.peaks)),
            "categories": " ".join(f"{name} {n}" for name, n in sorted(self.categories.items())),
        }

    @classmethod
    def unpacked(cls, packed: Mapping[str, str]) -> Held:
        """Read what `packed` wrote."""
        words = packed["categories"].split()
        return cls(
            peak_bytes=int(packed["peak"]),
            levels=tuple(map(int, packed["levels"].split())),
            peaks=tuple(map(int, packed["peaks"].split())),
            categories=dict(zip(words[::2], map(int, words[1::2]), strict=True)),
        )


def held(timeline: Timeline) -> Held:
    """Return what a timeline of two steps held."""
    found = peak(timeline)
    levels: dict[tuple[int, bool], int] = {}
    peaks: dict[str, int] = {}
    before = 0
    for (step, phase), level, top in _stretches(timeline):
        if phase is Phase.BACKWARD:
            levels.setdefault((step, False), before)
            levels[step, True] = level
        before = level
        name = _NAMES.get(phase)
        if step == 2 and name is not None:
            peaks[name] = max(top, peaks.get(name, 0))
    return Held(
        peak_bytes=found.peak_bytes,
        levels=tuple(levels[key] for key in sorted(levels)),
        peaks=tuple(peaks[name] for name in dict.fromkeys(_NAMES.values())),
        categories={str(name): n for name, n in found.by_category().items()},
    )


_NAMES = {
    Phase.FORWARD: "forward",
    Phase.LOSS: "forward",
    Phase.BACKWARD: "backward",
    Phase.CLIP: "update",
    Phase.OPTIMIZER: "update",
}


def _stretches(timeline: Timeline) -> Iterator[tuple[tuple[int, Phase], int, int]]:
    """Yield (step, phase), the level at its end and its highest, for each stretch of one phase."""
    key: tuple[int, Phase] | None = None
    level = top = 0
    for event in timeline.events():
        if (event.step, event.phase) != key:
            if key is not None:
                yield key, level, top
            key, top = (event.step, event.phase), level
        size = event.num_bytes
        level += round_up(size, 512) if size > 0 else -round_up(-size, 512)
        top = max(top, level)
    if key is not None:
        yield key, level, top


def real(case: Case) -> Held:
    """The rehearsal's."""
    return held(real_timeline(case))


def tape(case: Case) -> Held:
    """The tape's."""
    return held(tape_timeline(case))
