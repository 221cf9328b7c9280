"""The rehearsal behind `wazn.estimate`: the same answer, with the place of every allocation."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import wazn
from wazn.errors import InputError, MissingExtra, Unsupported
from wazn.estimation import estimate as counting
from wazn.estimation import rehearse as rehearsing
from wazn.estimation.answer import Estimate
from wazn.report.holders import holder_rows
from wazn.report.json import to_json
from wazn.trace.script import Loop, Script, Task

pytest.importorskip("torch")
pytest.importorskip("transformers")

LAYERS, HIDDEN, INNER, VOCABULARY = 2, 256, 512, 1000
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
}
MAMBA: dict[str, Any] = {
    "model_type": "mamba",
    "hidden_size": 64,
    "state_size": 16,
    "num_hidden_layers": 2,
    "vocab_size": 500,
}


def folder(path: Path, config: dict[str, Any]) -> str:
    """A folder with such a config.json."""
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder(tmp_path_factory.mktemp("llama"), LLAMA)


@pytest.fixture(scope="module")
def traced(llama: str) -> Estimate:
    return wazn.estimate(llama, engine="trace", method="full", micro_batch=4, seq_len=512)


def test_the_answer_has_the_keys_and_sums_of_a_counted_one(llama: str, traced: Estimate) -> None:
    """One schema for both engines; lines and holders sum to the allocated peak to the byte."""
    counted = to_json(wazn.estimate(llama, method="full", micro_batch=4, seq_len=512))
    document = to_json(traced)
    assert list(document) == list(counted)
    assert document["engine"] == "trace"
    assert {line["basis"] for line in document["breakdown"]} == {"traced"}
    assert "kernels-assumed" not in {note["code"] for note in document["notes"]}
    peak = document["peak"]["allocated_bytes"]
    assert sum(line["bytes"] for line in document["breakdown"]) == peak
    assert sum(holder["bytes"] for holder in document["holders"]) == peak


def test_every_view_of_the_holders_sums_to_the_peak(traced: Estimate) -> None:
    """By module, line, op and category: the same bytes, another order."""
    for by in ("module", "line", "op", "category"):
        rows = holder_rows(traced, by)
        assert sum(row.num_bytes for row in rows) == traced.peak.allocated_bytes, by


def test_what_is_kept_belongs_to_its_module(traced: Estimate) -> None:
    """At the peak `mlp.up_proj` of each layer holds its weight and two states in bf16, and its own gradient."""
    of_module: dict[str, int] = {}
    for holder in traced.holders:
        if holder.module == "model.layers.1.mlp.up_proj" and holder.category != "activations":
            of_module[holder.category] = of_module.get(holder.category, 0) + holder.num_bytes
    weight = HIDDEN * INNER * 2
    assert of_module["weights"] == weight
    assert of_module["optimizer-states"] == 2 * weight + 512  # and the fused AdamW's count of steps


def test_the_loss_is_where_it_is_computed(traced: Estimate) -> None:
    """What the loss function holds stands under its own line of transformers, in fp32 per logit."""
    rows = holder_rows(traced, "line")
    logits = 4 * 512 * VOCABULARY * 4
    in_loss = [row for row in rows if row.name.startswith("transformers/loss/loss_utils.py:")]
    assert sum(row.num_bytes for row in in_loss) >= 2 * logits


def test_auto_rehearses_what_is_not_counted(tmp_path: Path) -> None:
    """Mamba has no contract on the tape: the real class runs, and a note says so."""
    answer = wazn.estimate(folder(tmp_path, MAMBA), method="full", seq_len=32)
    assert (answer.engine, answer.spec) == ("trace", None)
    assert {"rehearsed-instead", "kernels-assumed"} <= {note.code for note in answer.notes}
    # embedding and head are one matrix; per layer a mixer of inner size 128, 16 states, rank 4, width 4
    inner, states, rank, hidden = 128, 16, 4, 64
    mixer = (
        hidden * 2 * inner + inner * 4 + inner + inner * (rank + 2 * states) + rank * inner + inner
    )
    mixer += inner * states + inner + inner * hidden
    assert answer.model.num_parameters == 500 * hidden + 2 * (mixer + hidden) + hidden


def test_simulate_never_rehearses(tmp_path: Path) -> None:
    """`--engine simulate` means what it says."""
    with pytest.raises(Unsupported, match="mamba"):
        wazn.estimate(folder(tmp_path, MAMBA), engine="simulate")


def test_without_torch_the_hint_is_the_pip_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told that it cannot be done where an install would do."""
    monkeypatch.setattr(rehearsing, "_installed", lambda name: None)
    with pytest.raises(Unsupported, match=r"pip install 'wazn\[trace\]'"):
        wazn.estimate(folder(tmp_path, MAMBA))
    with pytest.raises(MissingExtra, match=r"pip install 'wazn\[trace\]'"):
        wazn.estimate("smollm2-135m", engine="trace")


def test_an_old_version_is_named_with_the_one_that_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lower bounds are those of the package's own metadata."""
    monkeypatch.setattr(rehearsing, "_installed", {"torch": "2.1.0", "transformers": "5.0.0"}.get)
    with pytest.raises(Unsupported, match=r"needs torch 2\.6 or newer, found 2\.1\.0"):
        wazn.estimate("smollm2-135m", engine="trace")


def test_what_nobody_has_is_refused_before_it_is_built(tmp_path: Path) -> None:
    """A million layers would be a million modules; a batch of 30 million tokens a list of as many numbers."""
    deep = folder(tmp_path, {**MAMBA, "num_hidden_layers": 1_000_000})
    with pytest.raises(InputError, match="`num_hidden_layers`: at most 512"):
        wazn.estimate(deep, engine="trace")
    with pytest.raises(InputError, match="30,000,000 tokens is not rehearsed"):
        wazn.estimate("smollm2-135m", engine="trace", seq_len=30_000_000)
    with pytest.raises(InputError, match="takes fp16 and bf16 only"):
        wazn.estimate("smollm2-135m", engine="trace", attention="flash", precision="fp32")


def test_more_tokens_than_positions_are_named(tmp_path: Path) -> None:
    """BERT looks its positions up in a table of 64 rows: the message says that, not where the code stopped."""
    bert = {
        "model_type": "bert",
        "hidden_size": 64,
        "num_attention_heads": 2,
        "intermediate_size": 128,
    }
    few = folder(tmp_path, {**bert, "num_hidden_layers": 1, "max_position_embeddings": 64})
    with pytest.raises(InputError, match=r"the model has 64 positions(.|\n)*`--seq-len 64`"):
        wazn.estimate(few, engine="trace", method="full", seq_len=65)
    answer = wazn.estimate(few, engine="trace", method="full", seq_len=64)
    assert answer.model.family == "bert"


def test_another_version_than_the_installed_one_cannot_be_rehearsed() -> None:
    """A rehearsal runs what is there; it does not pretend to be another version."""
    with pytest.raises(InputError, match=r"hf@4\.41.*\n.*pip install 'transformers==4\.41\.\*'"):
        wazn.estimate("smollm2-135m", engine="trace", stack="hf@4.41")


def test_many_micro_batches_are_cut_and_said(llama: str) -> None:
    """From the third on the peak is the same, but for the waiting ids: 8 bytes of 3 tensors of 64 tokens each."""
    few, many = (
        wazn.estimate(llama, engine="trace", seq_len=64, grad_accum=number) for number in (3, 9)
    )
    assert many.batch.effective_batch == 9
    assert many.peak.allocated_bytes == few.peak.allocated_bytes
    codes = {note.code: note.params for note in many.notes}
    assert codes["micro-batches-alike"] == {"run": 3, "of": 9}


def test_generations_of_a_step_are_not_cut(llama: str) -> None:
    """8 micro-batches of one completion are one group of 8, and their tokens lie on the card for the whole step."""
    script = Script(loop=Loop.GRPO, num_generations=8)
    options: dict[str, Any] = {"engine": "trace", "seq_len": 64, "script": script}
    whole = wazn.estimate(llama, micro_batch=1, grad_accum=8, **options)
    assert whole.batch.effective_batch == 8
    assert "micro-batches-alike" not in {note.code for note in whole.notes}
    with pytest.raises(InputError, match=r"--micro-batch 8`, or `--grad-accum 8"):
        wazn.estimate(llama, micro_batch=1, **options)


def test_what_an_inference_engine_keeps_stands_outside(llama: str) -> None:
    """It is no tensor of the training: the device's figure grows by it, the allocated peak does not."""
    script = Script(loop=Loop.PLAIN, reserved_bytes=3_000_000_000)
    without = wazn.estimate(
        llama, engine="trace", seq_len=64, script=replace(script, reserved_bytes=0)
    )
    answer = wazn.estimate(llama, engine="trace", seq_len=64, script=script)
    assert [(line.category, line.num_bytes) for line in answer.outside] == [
        ("inference-engine", 3_000_000_000)
    ]
    assert answer.peak.allocated_bytes == without.peak.allocated_bytes
    assert answer.peak.device_bytes == without.peak.device_bytes + 3_000_000_000
    assert answer.rehearsed is not None
    assert answer.rehearsed.script == {"reserved_bytes": 3_000_000_000}


def test_the_fraction_that_is_done_grows(llama: str) -> None:
    """Progress is told from above 0 to at most 1."""
    seen: list[float] = []
    wazn.estimate(llama, engine="trace", seq_len=64, grad_accum=3, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[0] > 0
    assert seen[-1] <= 1


def test_nothing_gets_out(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that opens a connection while it rehearses is refused, and the door is open again afterwards."""
    import wazn.trace.step as stepping

    def phones_home(*args: Any, **kwargs: Any) -> None:
        with socket.socket() as door:
            door.connect(("127.0.0.1", 9))

    with monkeypatch.context() as patched:
        patched.setattr(stepping, "build_model", phones_home)
        with pytest.raises(Unsupported, match="never touches the network"):
            wazn.estimate(llama, engine="trace")
    with pytest.raises(ConnectionRefusedError):
        phones_home()


def test_an_unreadable_answer_of_both_engines_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What neither can answer says why of each."""

    def refuses(*args: Any, **kwargs: Any) -> None:
        raise Unsupported("the op `x` has no fake kernel")

    monkeypatch.setattr(rehearsing, "_rehearse", refuses)
    with pytest.raises(Unsupported, match=r"mamba(.|\n)*rehearsing it fails too: the op `x`"):
        wazn.estimate(folder(tmp_path, MAMBA))
    assert counting.ENGINES == ("auto", "simulate", "trace")


SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 500}
LEARNED: dict[str, dict[str, Any]] = {
    "roberta": {"max_position_embeddings": 66, "intermediate_size": 64, **SMALL},  # from 2 on
    "opt": {"max_position_embeddings": 64, "ffn_dim": 64, "word_embed_proj_dim": 64, **SMALL},
    "gpt2": {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 500},
    "gptj": {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2, "rotary_dim": 16},
    "rwkv": {"context_length": 64, "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 500},
}


@pytest.mark.parametrize("loop", [Loop.PLAIN, Loop.TRAINER])
@pytest.mark.parametrize("model_type", list(LEARNED))
def test_more_tokens_than_positions_are_refused(
    tmp_path: Path, model_type: str, loop: Loop
) -> None:
    """A table of 64 usable rows takes 64 tokens and not 65, at which an index on a GPU would be out of bounds."""
    path = folder(tmp_path, {"model_type": model_type, **LEARNED[model_type]})
    script = Script(loop=loop)
    wazn.estimate(path, engine="trace", method="full", seq_len=64, script=script)
    with pytest.raises(InputError, match=r"hint: .*\b64\b"):
        wazn.estimate(path, engine="trace", method="full", seq_len=65, script=script)


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """BART's classifier looks for its end token, here 700 of a vocabulary of 500: a GPU would stop."""
    sizes = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 500}
    config = {"model_type": "bart", "eos_token_id": 700, **sizes}
    script = Script(loop=Loop.TRAINER, task=Task.SEQUENCE_CLASSIFICATION)
    with pytest.raises(InputError, match="index 700 is beyond a table of 500 rows"):
        wazn.estimate(
            folder(tmp_path, config), engine="trace", method="full", seq_len=32, script=script
        )


def test_labels_have_a_table_of_their_own(tmp_path: Path) -> None:
    """The decoder of BART has as many positions as its encoder, and its tokens are the labels'."""
    sizes = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 500}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = {"model_type": "bart", "max_position_embeddings": 64, **sizes, **heads}
    script = Script(loop=Loop.TRAINER, target_len=65)
    with pytest.raises(InputError, match=r"positions reach 66.*\n.*at most 64 tokens"):
        wazn.estimate(
            folder(tmp_path, config), engine="trace", method="full", seq_len=32, script=script
        )


@pytest.mark.parametrize("loop", [Loop.TRAINER, Loop.SFT])
def test_targets_that_peft_takes_of_mamba_are_named(tmp_path: Path, loop: Loop) -> None:
    """Its kernels read `out_proj` past the module, so peft refuses `all-linear`; what the hint says runs."""
    path = folder(tmp_path, MAMBA)
    script = Script(loop=loop)
    with pytest.raises(InputError, match=r"'out_proj' is incompatible") as caught:
        wazn.estimate(path, engine="trace", seq_len=32, script=script)
    assert caught.value.hint == "`--targets in_proj,x_proj,dt_proj`"
    answer = wazn.estimate(
        path, engine="trace", seq_len=32, script=script, targets="in_proj,x_proj,dt_proj"
    )
    assert answer.model.num_trainable_parameters > 0


@pytest.mark.parametrize("layers", [0, -1])
def test_a_model_has_layers(tmp_path: Path, layers: int) -> None:
    """None, or fewer, are said to be so before anything is built."""
    path = folder(tmp_path, {**MAMBA, "num_hidden_layers": layers})
    with pytest.raises(InputError, match=rf"`num_hidden_layers`: expected 1 .* found `{layers}`"):
        wazn.estimate(path, engine="trace", seq_len=32)


def test_a_line_break_in_a_name_is_not_printed(tmp_path: Path) -> None:
    """A model type is foreign text."""
    with pytest.raises(Unsupported, match=r"no model type `lla\\nma`"):
        wazn.estimate(folder(tmp_path, {"model_type": "lla\nma"}), engine="trace")
