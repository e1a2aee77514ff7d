"""Logs of training frameworks as step times and plans."""

import math
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from autopar.cli.entry import main
from autopar.degrees import Degrees
from autopar.errors import DataError
from autopar.validation.own_steps import read_steps
from autopar.validation.training_logs import read_log

MEGATRON = """\
using world size: 8, data-parallel size: 2, context-parallel size: 1, tensor-model-parallel size: 2, \
pipeline-model-parallel size: 2
------------------------ arguments ------------------------
  add_bias_linear ................................. False
  attention_backend ............................... AttnBackend.auto
  bf16 ............................................ True
  context_parallel_size ........................... 1
  cp_comm_type .................................... ['p2p']
  cpu_offloading_num_layers ....................... 0
  encoder_num_layers .............................. 24
  exp_avg_dtype ................................... torch.float32
  ffn_hidden_size ................................. 4096
  fp8 ............................................. None
  fp8_recipe ...................................... delayed
  global_batch_size ............................... 32
  hidden_size ..................................... 1024
  max_position_embeddings ......................... 1024
  micro_batch_size ................................ 4
  moe_layer_freq .................................. 1
  num_attention_heads ............................. 16
  num_layers ...................................... 24
  padded_vocab_size ............................... 50432
  pipeline_model_parallel_size .................... 2
  recompute_granularity ........................... full
  recompute_method ................................ uniform
  recompute_num_layers ............................ 1
  seq_length ...................................... 1024
  sequence_parallel ............................... True
  tensor_model_parallel_size ...................... 2
  use_distributed_optimizer ....................... True
  vocab_size ...................................... None
  world_size ...................................... 8
-------------------- end of arguments ---------------------
 [2024-05-01 10:00:00] iteration       10/     100 | consumed samples:          320 | \
elapsed time per iteration (ms): 2500.0 | learning rate: 1.5E-04 | global batch size:    32 | lm loss: 1.0E+01 |
 [2024-05-01 10:00:06] iteration       20/     100 | consumed samples:          640 | \
elapsed time per iteration (ms): 512.0 | learning rate: 1.5E-04 | global batch size:    32 | lm loss: 9.0E+00 |
 [2024-05-01 10:00:11] iteration       30/     100 | consumed samples:          960 | \
elapsed time per iteration (ms): 508.0/700.0 | learning rate: 1.5E-04 | global batch size:    32 | lm loss: 8.0E+00 |
 [2024-05-01 10:00:16] iteration       40/     100 | consumed samples:         1280 | \
elapsed time per iteration (ms): 530.0 | learning rate: 1.5E-04 | global batch size:    32 | lm loss: 7.0E+00 |
"""
TITAN = """\
[rank0]:[titan] 2025-12-14 05:53:40,651 - root - INFO - Building device mesh with parallelism: pp=1, dp_replicate=1, \
dp_shard=8, cp=1, tp=2, ep=1
[rank0]:[titan] 2025-12-14 05:53:41,651 - root - INFO - Applied full activation checkpointing to the model
[rank0]:[titan] 2025-12-14 05:53:48,651 - root - INFO - Trainer is initialized with local batch size 2, \
global batch size 32, gradient accumulation steps 2, sequence length 4096, total steps 3000 (warmup 600)
[rank0]:[titan] 2025-12-14 05:54:38,070 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.2512  \
\x1b[38;2;180;60;0mgrad_norm:  4.4551  \x1b[36mmemory: 60.01GiB(75%)  \x1b[34mtps: 100  \x1b[36mtflops: 2.72\x1b[39m
[rank0]:[titan] 2025-12-14 05:55:38,070 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  9.9834  \
\x1b[38;2;180;60;0mgrad_norm:  4.4551  \x1b[36mmemory: 60.01GiB(75%)  \x1b[34mtps: 4,096  \x1b[36mtflops: 295.7\x1b[39m
[rank0]:[titan] 2025-12-14 05:56:38,070 - root - INFO - \x1b[31mstep: 20  \x1b[32mloss:  8.9834  \
\x1b[38;2;180;60;0mgrad_norm:  4.4551  \x1b[36mmemory: 60.01GiB(75%)  \x1b[34mtps: 4,096  \x1b[36mtflops: 295.7\x1b[39m
"""
DEEPSPEED = """\
[2024-09-15 00:13:21,400] [INFO] [config.py:999:print] DeepSpeedEngine configuration:
[2024-09-15 00:13:21,400] [INFO] [config.py:1003:print]   gradient_accumulation_steps .. 1
[2024-09-15 00:13:21,400] [INFO] [config.py:1003:print]   train_batch_size ............. 16
[2024-09-15 00:13:21,400] [INFO] [config.py:1003:print]   train_micro_batch_size_per_gpu  4
[2024-09-15 00:13:21,400] [INFO] [config.py:1003:print]   world_size ................... 4
[2024-09-15 00:13:21,400] [INFO] [config.py:989:print_user_config]   json = {
[2024-09-15 00:13:21,400] [INFO] [config.py:1072:print]   json = {
    "train_batch_size": 1.600000e+01,
    "bf16": {
        "enabled": true
    },
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": true
    }
}
[2024-09-15 00:14:18,633] [INFO] [timer.py:260:stop] epoch=0/micro_step=10/global_step=10, \
RunningAvgSamplesPerSec=8.0, CurrSamplesPerSec=4.0, MemAllocated=4.32GB, MaxMemAllocated=38.49GB
[2024-09-15 00:15:18,633] [INFO] [timer.py:260:stop] epoch=0/micro_step=20/global_step=20, \
RunningAvgSamplesPerSec=16.0, CurrSamplesPerSec=32.0, MemAllocated=4.32GB, MaxMemAllocated=38.49GB
"""
PIPELINE = """\
steps: 10 loss: 10.5508 iter time (s): 2.936 samples/sec: 43.6
steps: 20 loss: 6.5508 lm loss: 5.5103 iter time (s): 0.936 samples/sec: 136.706
"""


def _written(folder: Path, text: str, name: str = "run.log") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_megatron_states_plan_model_and_seconds(tmp_path: Path) -> None:
    """The median of 508, 512 and 530 ms; the first line, with 2,500 ms, does not count."""
    found = read_log(_written(tmp_path, MEGATRON))

    assert (found.framework, found.num_lines) == ("megatron", 3)
    assert (found.seconds, found.low, found.high) == pytest.approx((0.512, 0.508, 0.530))
    assert found.degrees == Degrees(
        dp=2, tp=2, pp=2, zero=1, sequence_parallel=True, recompute="full", microbatch=4, global_batch=32
    )
    assert found.model.startswith("zoo:gpt")
    assert found.precision == "mixed"


def test_torchtitan_states_tokens_per_second_and_device(tmp_path: Path) -> None:
    """32 sequences of 4,096 tokens by 16 devices of 4,096 tokens a second each: 2 s."""
    found = read_log(_written(tmp_path, TITAN), model="zoo:llama3-8b")

    assert (found.framework, found.num_lines) == ("torchtitan", 2)
    assert found.seconds == pytest.approx(2.0)
    assert (found.degrees.dp, found.degrees.tp, found.degrees.zero, found.degrees.recompute) == (8, 2, 3, "full")
    assert (found.degrees.microbatch, found.degrees.global_batch) == (2, 32)
    assert found.dims == {"seq": 4096}


def test_old_meshes_of_torchtitan_are_read(tmp_path: Path) -> None:
    """Up to 0.1 the line had names and sizes in two lists."""
    text = TITAN.replace(
        "device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=2, ep=1",
        "2-D device mesh with ['dp_shard', 'tp'], [8, 2]",
    )
    assert text != TITAN

    found, new = (read_log(_written(tmp_path, own), model="zoo:llama3-8b") for own in (text, TITAN))

    assert found.degrees == new.degrees


def test_deepspeed_states_samples_per_second(tmp_path: Path) -> None:
    """16 samples at 32 a second: 0.5 s."""
    found = read_log(_written(tmp_path, DEEPSPEED), model="zoo:gpt2")

    assert (found.framework, found.num_lines) == ("deepspeed", 1)
    assert found.seconds == pytest.approx(0.5)
    assert found.degrees == Degrees(dp=4, zero=2, microbatch=4, global_batch=16)
    assert found.precision == "mixed"


def test_a_pipeline_of_deepspeed_needs_degrees(tmp_path: Path) -> None:
    """It prints seconds, and nothing of its stages."""
    path = _written(tmp_path, PIPELINE)
    degrees = Degrees(dp=2, pp=4, microbatch=8, global_batch=128)

    assert read_log(path, degrees=degrees, model="zoo:gpt2").seconds == pytest.approx(0.936)
    with pytest.raises(DataError, match="does not state the plan") as caught:
        read_log(path, model="zoo:gpt2")
    assert "--degrees" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss 1.0\nloss 0.9\n", "has no step times"),
        (MEGATRON[: MEGATRON.index(" [2024-05-01 10:00:06]")], "states 1 step time, and the first does not count"),
        (TITAN.replace("Trainer is", "It is"), "states tokens per second, and not how many a step has"),
        (DEEPSPEED.replace(" train_batch_size", " other"), "states samples per second, and not how many a step has"),
        (MEGATRON.replace("micro_batch_size", "other"), "no --micro-batch-size"),
    ],
)
def test_logs_that_say_too_little_are_refused(text: str, message: str, tmp_path: Path) -> None:
    """With the file, and what to do."""
    with pytest.raises(DataError, match=message) as caught:
        read_log(_written(tmp_path, text), model="zoo:gpt2")

    assert "run.log" in str(caught.value)
    assert caught.value.hint


MESH = "mesh with parallelism: pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=2, ep=1"


@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        (MEGATRON, "512.0", "5.1.2"),
        (MEGATRON, "global batch size:    32", "global batch size: " + "9" * 5000),
        (TITAN, "tps: 4,096", "tps: ,"),
        (TITAN, "sequence length 4096", "sequence length " + "9" * 5000),
        (TITAN, MESH, "mesh with parallelism: tp=" + "9" * 5000),
        (TITAN, f"device {MESH}", "2-D device mesh with ['dp_shard', tp(], [8, 2]"),
        (TITAN, f"device {MESH}", "2-D device mesh with ['dp_shard', 'tp'], [8]"),
        (DEEPSPEED, "CurrSamplesPerSec=", "CurrSamplesPerSec=1.2."),
        (DEEPSPEED, "json = {", "json = " + '{"a": ' * 100_000),
    ],
)
def test_wrong_numbers_end_in_one_error_at_most(text: str, right: str, wrong: str, tmp_path: Path) -> None:
    """Numbers that are none or have thousands of digits, lists of other lengths, nesting without end."""
    assert right in text
    with suppress(DataError):
        assert 0 < read_log(_written(tmp_path, text.replace(right, wrong)), model="zoo:llama3-8b").seconds < math.inf


@pytest.mark.parametrize("text", [MEGATRON, TITAN, DEEPSPEED], ids=["megatron", "torchtitan", "deepspeed"])
def test_damaged_logs_end_in_one_error_at_most(text: str, tmp_path: Path) -> None:
    """Digits, brackets and quotes doubled, dropped and put elsewhere."""
    draw, path = Random(0), tmp_path / "run.log"
    for _ in range(100):
        damaged = text
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(damaged))
            piece = draw.choice(("", ".", ",", "9" * 5000, "[", "]", "'", "{", "\n", "nan", "-1", "\x00", "\u0663"))
            damaged = damaged[:place] + piece + damaged[place + draw.randint(0, 3) :]
        path.write_text(damaged, encoding="utf-8")
        with suppress(DataError):
            assert 0 < read_log(path, model="zoo:llama3-8b").seconds < math.inf


def test_a_row_names_its_log(tmp_path: Path) -> None:
    """Seconds come from the log, degrees from the row if it has any, else from the log, too."""
    _written(tmp_path, MEGATRON)
    rows = "dp,tp,zero,microbatch,global_batch,seconds,log\n8,1,1,4,32,,run.log\n,,,,,,run.log\n8,1,1,4,32,0.7,\n"

    stated, logged, timed = read_steps(_written(tmp_path, rows, "steps.csv"), "zoo:gpt2")

    assert (stated.degrees.dp, logged.degrees.pp) == (8, 2)
    assert (stated.seconds, logged.seconds) == pytest.approx((0.512, 0.512))
    assert (timed.seconds, timed.source) == (0.7, "steps.csv")


def test_command_fits_a_stack_to_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes of the model come from the command, the plan from the log."""
    monkeypatch.chdir(tmp_path)
    _written(tmp_path, DEEPSPEED)
    sizes = ["--model", "zoo:mlp-xs", "--set", "num_layers=2", "--set", "hidden=64", "--cluster", "a100"]

    code = main(["calibrate", "run.log", *sizes, "--scalars", "step_seconds", "--name", "mine", "-o", "mine.yaml"])

    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert "run.log" in (tmp_path / "mine.yaml").read_text()
