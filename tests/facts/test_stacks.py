from __future__ import annotations

import csv
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from wazn.errors import InputError, UnknownFact, Unsupported
from wazn.facts import stacks
from wazn.facts._build_stacks import build_stacks, load_stacks, minor_releases, versions_of
from wazn.facts.stacks import (
    PREPARED,
    RULED_FIELDS,
    CausalBuffers,
    Habits,
    KvCache,
    LossProgram,
    Shift,
    Upcast,
    WindowMask,
    resolve_stack,
    stack_versions,
)
from wazn.recipe import Checkpointing, Optimizer

TABLE = load_stacks()
MINORS = minor_releases(TABLE)
DOCS = Path(__file__).parents[2] / "docs" / "stacks.md"


def _seen() -> list[tuple[str, str, dict[str, str]]]:
    """Rows of stacks_seen.csv, one per family and release: (family, minor release, what was seen)."""
    with (Path(__file__).parent / "stacks_seen.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [
        (row["family"], MINORS[position], row)
        for row in rows
        for position in range(MINORS.index(row["first"]), MINORS.index(row["last"]) + 1)
    ]


SEEN = _seen()


def _said(habits: Habits) -> dict[str, str]:
    """What the table says, in the columns of stacks_seen.csv."""
    loss = habits.loss
    outputs_fp32 = loss.upcast is Upcast.FORWARD and not loss.recast_outputs
    yes = {False: "no", True: "yes"}
    return {
        "attention": "eager" if habits.eager_attention else "sdpa",
        "cache": habits.kv_cache.value,
        "logits": "float32" if outputs_fp32 else "bfloat16",
        "log_softmax": "bfloat16" if loss.upcast is Upcast.NONE else "float32",
        "positions": "S-1" if loss.shift is Shift.COPY_LOGITS else "S",
        "sdpa_mask": yes[habits.sdpa_mask],
        "repeated_kv": yes[habits.repeat_kv],
        "contiguous_q": yes[habits.contiguous_qkv],
        "rotary_tables": "each" if habits.rotary_per_layer else "one",
        "stored_tables": yes[habits.rotary_stored],
        "causal_buffers": habits.causal_buffers.value,
        "experts": "fused" if habits.fused_experts else "modules",
    }


@pytest.mark.parametrize("minor", MINORS)
def test_the_table_says_what_the_classes_did(minor: str) -> None:
    """Every habit equals what the real classes of that release were seen to do, family by family.

    stacks_seen.csv: each family's class at each release with two small layers, bf16, training mode, an attention
    mask of ones, one forward and backward pass on the CPU with every allocation recorded. Empty: does not apply.
    """
    rows = [(family, row) for family, release, row in SEEN if release == minor]
    assert len(rows) >= 18
    for family, row in rows:
        said = _said(resolve_stack(f"hf@{minor}", family=family))
        assert {key: said[key] for key in said if row[key]} == {
            key: row[key] for key in said if row[key]
        }, family


WINDOWS_SEEN = list(
    csv.DictReader((Path(__file__).parent / "windows_seen.csv").read_text("utf-8").splitlines())
)


@pytest.mark.parametrize("row", WINDOWS_SEEN, ids=lambda row: f"{row['family']}-{row['version']}")
def test_windows_make_the_masks_that_were_seen(row: dict[str, str]) -> None:
    """With a window as long as the sequence, the classes make these masks; with one token more, none of them.

    windows_seen.csv: as stacks_seen.csv, 40 tokens, windows of 39, 40 and 41; 39 and 40 do the same.
    """
    habits = resolve_stack("hf@" + row["version"], family=row["family"])
    assert habits.window_mask.value == row["mask"]


def test_every_family_was_seen() -> None:
    """No family is in the table that was not run, but the five whose code lies on the hub; those say `assumed`."""
    hub = {"baichuan", "chatglm", "exaone", "internlm2", "internlm3"}
    assert {family for family, _, _ in SEEN} == set(TABLE["families"]) - hub
    for field in RULED_FIELDS:
        for entry in TABLE[field]:
            named = set(entry.get("families", ()))
            assert named <= hub if entry.get("assumed") else not named & hub


def test_the_prepared_form_is_the_readable_one() -> None:
    """`prepared/stacks.json` is what `python -m wazn.facts._build_stacks` makes of `stacks.toml`."""
    assert json.loads(Path(PREPARED).read_text(encoding="utf-8")) == build_stacks()


def test_loading_takes_less_than_a_millisecond() -> None:
    """Reading the prepared form and resolving a stack is under a millisecond; the best of twenty tries."""
    best = 1.0
    for _ in range(20):
        stacks._prepared.cache_clear()
        start = time.perf_counter()
        resolve_stack("hf@4.48", family="mistral")
        best = min(best, time.perf_counter() - start)
    assert best < 0.001


def test_no_version_is_the_newest() -> None:
    """`hf` is transformers 5.24, the newest release that was read."""
    assert resolve_stack("hf", family="llama") == resolve_stack("hf@5.24", family="llama")
    assert stack_versions()[0] == "4.40"
    assert stack_versions()[-1] == "5.24"


def test_a_patch_release_is_its_minor_release() -> None:
    """`hf@4.48.1` has the habits of 4.48."""
    assert resolve_stack("hf@4.48.1", family="mistral") == resolve_stack(
        "hf@4.48", family="mistral"
    )


def test_mistral_at_448() -> None:
    """Read in transformers 4.48.3: the loss function upcasts and copies, the cache is an object, keys are repeated."""
    assert resolve_stack("hf@4.48", family="mistral") == Habits(
        stack="hf",
        version="4.48",
        family="mistral",
        loss=LossProgram(
            name="function-copy",
            upcast=Upcast.LOSS_FUNCTION,
            shift=Shift.COPY_LOGITS,
            copy_lives_in=Upcast.LOSS_FUNCTION,
            recast_outputs=False,
        ),
        logits_scaled_in_fp32=False,
        outputs_to_fp32=True,
        optimizer=Optimizer.ADAMW,
        checkpointing=Checkpointing.FULL_REENTRANT,
        inputs_require_grad=False,
        fetches_step_at_once=True,
        loads_fp32=True,
        kv_cache=KvCache.OBJECT,
        eager_attention=False,
        sdpa_mask=False,
        window_mask=WindowMask.ADDITIVE,
        repeat_kv=True,
        contiguous_qkv=True,
        rotary_per_layer=False,
        rotary_stored=False,
        causal_buffers=CausalBuffers.NONE,
        rotary_code="own",
        norm_code="own",
        fused_experts=False,
        adapters_fp32=True,
        keeps_quantized_input=False,
        computes_in_input_dtype=True,
        fused_4bit_product=False,
    )


S, V = 64, 4000  # of loss_seen.csv
LOSS_SEEN = list(
    csv.DictReader((Path(__file__).parent / "loss_seen.csv").read_text("utf-8").splitlines())
)


def _scaling(habits: Habits, half: int, full: int) -> tuple[list[int], list[int], list[int]]:
    """What a soft-cap or a scale does before the upcast and after it, and in backward."""
    if habits.family == "gemma2":  # divided, tanh (saved), multiplied
        return [half, -half, half, -half, half], [], [half, -half, half, -half, -half, half, -half]
    if habits.family not in ("cohere", "granite"):
        return [], [], []
    if habits.logits_scaled_in_fp32:
        return [], [full, -full], [full, -full]
    return [half, -half], [], [half, -half]


def _written_down(habits: Habits, micro_batch: int, wrapped: bool) -> dict[str, list[int]]:
    """The tables of docs/stacks.md as allocations (+) and frees (-) in bytes, labels and scalars left out."""
    loss = habits.loss
    half, full = 2 * micro_batch * S * V, 4 * micro_batch * S * V
    copies = loss.shift is Shift.COPY_LOGITS
    whole = half if loss.upcast is Upcast.NONE else full
    shifted = whole * (S - 1) // S if copies else whole
    copied = [shifted] if copies and micro_batch > 1 else []
    died = [-size for size in copied]
    before, after, scaled_back = _scaling(habits, half, full)

    forward = [half, *before]
    forward += {Upcast.NONE: [], Upcast.FORWARD: [full, -half], Upcast.LOSS_FUNCTION: [full]}[
        loss.upcast
    ]
    forward += [*after, *copied, shifted]
    forward += [-full] if loss.upcast is Upcast.LOSS_FUNCTION else []
    forward += died if loss.copy_lives_in is Upcast.LOSS_FUNCTION else []
    forward += [half, -full] if loss.recast_outputs else []
    forward += died if loss.copy_lives_in is Upcast.FORWARD else []
    outputs = full if loss.upcast is Upcast.FORWARD and not loss.recast_outputs else half
    if wrapped and outputs == half:
        forward += [full, -half]
        outputs = full

    backward = [shifted, shifted, -shifted, -shifted]
    backward += [whole, -shifted] if copies else []
    upcast_back = [half, -full] if whole == full else []
    if habits.logits_scaled_in_fp32:
        backward += [*scaled_back, *upcast_back]
    else:
        backward += [*upcast_back, *scaled_back]
    return {"forward": forward, "after_forward": [-outputs], "backward": [*backward, -half]}


@pytest.mark.parametrize(
    "row",
    LOSS_SEEN,
    ids=lambda row: "-".join(
        (row["family"], row["transformers"], row["micro_batch"], row["outputs_wrapped"])
    ),
)
def test_the_loss_runs_as_the_tables_say(row: dict[str, str]) -> None:
    """The logits-sized allocations and frees of the real classes, in order, are those of docs/stacks.md.

    loss_seen.csv: the family's class at that patch release with one small layer and 4,000 vocabulary rows, bf16, 64
    tokens, on fake tensors; `outputs_wrapped`: in accelerate 1.15's convert_outputs_to_fp32, without autocast itself.
    """
    habits = resolve_stack("hf@" + row["transformers"], family=row["family"])
    said = _written_down(habits, int(row["micro_batch"]), row["outputs_wrapped"] == "yes")
    assert said == {phase: [int(size) for size in row[phase].split()] for phase in said}


@pytest.mark.parametrize(
    ("family", "turns"),
    [
        ("llama", {"4.40": "forward-copy", "4.46": "function-copy", "4.49": "function-pad"}),
        ("mistral", {"4.40": "forward-copy", "4.48": "function-copy", "4.49": "function-pad"}),
        ("starcoder2", {"4.40": "forward-copy", "4.47": "function-copy", "4.49": "function-pad"}),
        ("gpt2", {"4.40": "native-copy", "4.48": "function-copy", "4.49": "function-pad"}),
        ("gpt_neox", {"4.40": "native-copy", "4.49": "function-pad"}),
        (
            "gpt_neo",
            {
                "4.40": "forward-copy-recast",
                "4.48": "forward-function-copy-recast",
                "4.49": "forward-function-pad-recast",
                "5.0": "function-pad",
            },
        ),
    ],
)
def test_loss_programs_change_with_these_releases(family: str, turns: dict[str, str]) -> None:
    """The loss program changes at these releases and at no other; read in the code of each."""
    found: dict[str, str] = {}
    for minor in stack_versions():
        name = resolve_stack(f"hf@{minor}", family=family).loss.name
        if name not in found.values():
            found[minor] = name
    assert found == turns


@pytest.mark.parametrize(
    ("name", "family", "error", "words", "hint"),
    [
        (
            "trl",
            "llama",
            UnknownFact,
            "unknown stack `trl`",
            "there are `hf` and its versions, `hf@4.40` to `hf@5.24`",
        ),
        ("hf", "lama", UnknownFact, "`lama` were not read", "did you mean `llama`"),
        ("hf@latest", "llama", InputError, "found `latest`", "`hf@4.40` to `hf@5.24`"),
        ("hf@", "llama", InputError, "found ``", "`hf@4.40` to `hf@5.24`"),
        ("hf@4.39", "llama", Unsupported, "transformers 4.39", "4.40 to 5.24"),
        ("hf@6.0", "llama", Unsupported, "transformers 6.0", "4.40 to 5.24"),
        ("hf@4.41", "gemma2", Unsupported, "`gemma2` is not in transformers 4.41", "`hf@4.42`"),
        (
            "h" * 500,
            "llama",
            UnknownFact,
            "unknown stack",
            "there are `hf` and its versions, `hf@4.40` to `hf@5.24`",
        ),
        ("hf@" + "9" * 500, "llama", InputError, "expected a version", "`hf@4.40`"),
    ],
)
def test_mistakes_are_named(
    name: str, family: str, error: type[Exception], words: str, hint: str
) -> None:
    """Another stack, family or version is refused with what there is, and a long one is cut."""
    with pytest.raises(error) as caught:
        resolve_stack(name, family=family)
    assert words in str(caught.value)
    assert hint in str(caught.value.hint)  # type: ignore[attr-defined]
    assert len(str(caught.value)) < 200


def test_versions_of_a_range() -> None:
    """`a..b` includes both ends, `a..` goes to the newest, and a wrong order is refused."""
    minors = ["4.40", "4.41", "4.42"]
    assert list(versions_of("4.40..4.41", minors)) == [0, 1]
    assert list(versions_of("4.41..", minors)) == [1, 2]
    with pytest.raises(ValueError, match="names no release"):
        versions_of("4.42..4.40", minors)


def test_every_entry_has_sources_to_the_line() -> None:
    """Each entry names files, lines and versions, and the versions exist in the table of releases."""
    one = re.compile(r"[\w/]+\.py:[\d,-]+@((accelerate|peft|bitsandbytes)-[\d.]+|\d+\.\d+)")
    for field in RULED_FIELDS:
        for entry in TABLE[field]:
            for part in [] if "assumed" in entry else entry["source"].split("; "):
                found = one.fullmatch(part)
                assert found is not None, f"{field}: {part}"
                assert "-" in found[1] or found[1] in MINORS, part
            assert set(entry.get("seen", ())) <= set(MINORS)
            assert set(entry) <= {"value", "versions", "families", "source", "seen", "assumed"}


def test_the_docs_describe_every_field_and_program() -> None:
    """docs/stacks.md has a row for each field of `Habits` and names each loss program."""
    text = DOCS.read_text(encoding="utf-8")
    for field in RULED_FIELDS:
        assert f"| `{field}` |" in text, field
    programs: list[dict[str, Any]] = TABLE["loss_program"]
    for program in programs:
        assert f"`{program['name']}`" in text, program["name"]
