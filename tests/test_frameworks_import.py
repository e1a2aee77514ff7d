"""Configurations that frameworks' own defaults complete: read as the framework would run them, or refused as there."""

from pathlib import Path

import pytest

from autopar.cost import IDEAL
from autopar.degrees import Degrees
from autopar.errors import ExportError
from autopar.frameworks.configuration import Configuration
from autopar.frameworks.configurations import parse_configuration
from autopar.prediction import predict
from tests.executions import TINY

LLAMA = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 "
    "--vocab-size 32000 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0.0 --bf16 --micro-batch-size 1 "
)
GPT2 = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 "
    "--vocab-size 50257 --make-vocab-size-divisible-by 1 --micro-batch-size 1 --global-batch-size 32 --bf16 "
)
MOE = LLAMA + "--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1536 --global-batch-size 2048 "


def read(text: str, gpus: int = 8) -> Configuration:
    """Return what arguments of Megatron-LM state."""
    return parse_configuration(text, "megatron", gpus=gpus)


def test_a_gated_mlp_has_two_thirds_of_the_width() -> None:
    """`validate_args`: int(4 h 2/3 / 64) * 64 with --swiglu, 4 h without."""
    assert read(LLAMA).dims["ffn"] == 10880
    assert read(LLAMA + "--ffn-hidden-size 11008").model == "zoo:llama2-7b"


def test_sizes_of_a_published_model_have_its_name() -> None:
    """The base that sizes are stated against is no name."""
    found = read(GPT2)

    assert (found.model, found.dims) == ("zoo:gpt2", {})


def test_a_vocabulary_is_padded_as_megatron_pads_it() -> None:
    """To a multiple of --make-vocab-size-divisible-by (128) times the tensor-parallel degree."""
    assert read(GPT2.replace("--make-vocab-size-divisible-by 1 ", "")).dims["vocab"] == 50304
    assert read(GPT2 + "--tensor-model-parallel-size 2").dims["vocab"] == 50258


def test_grouped_queries_without_a_number_are_one_group() -> None:
    assert read(LLAMA + "--group-query-attention").dims["kv_heads"] == 1
    assert read(LLAMA).dims["kv_heads"] == 32


def test_a_number_of_buckets_is_read_and_told() -> None:
    """`--ddp-num-buckets` divides the gradients of a stage; beside a size Megatron-LM refuses it."""
    usual = "gradients are reduced in buckets of 6,250,000"  # 25 MB of sums in float32

    assert f"{usual}; --ddp-num-buckets makes 12" in read(GPT2 + "--ddp-num-buckets 12").assumed
    assert not any("buckets" in told for told in read(GPT2).assumed)
    with pytest.raises(ExportError, match="both state buckets of gradients"):
        read(GPT2 + "--ddp-num-buckets 12 --ddp-bucket-size 40000000")


def test_arguments_without_a_precision_run_in_float32() -> None:
    assert read(LLAMA).precision == "mixed"
    assert read(LLAMA.replace("--bf16 ", "")).precision == "fp32"


def test_further_tokens_are_predicted_by_a_model_that_is_given(cache_dir: Path) -> None:
    """--mtp-num-layers is `mtp` of the model; none of the models that arguments state by themselves has it."""
    text = "--mtp-num-layers 2 --micro-batch-size 1 --global-batch-size 8 --bf16 --pipeline-model-parallel-size 2"

    found = parse_configuration(text, "megatron", gpus=4, model="zoo:deepseek-v3")

    assert (found.model, found.dims) == ("zoo:deepseek-v3", {"mtp": 2})
    assert "--mtp-num-layers 2" in found.understood
    assert parse_configuration(text.replace("--mtp-num-layers 2 ", ""), "megatron", gpus=4, model="zoo:gpt2").dims == {}
    predicted = predict(found.model, found.degrees, dims={**TINY["deepseek-v3"], **found.dims}, cache_dir=cache_dir)
    assert {op.op.split(".")[1] for block in predicted.plan.blocks for op in block.ops if op.op.startswith("mtp")} == {
        "0", "1"
    }  # fmt: skip
    with pytest.raises(ExportError, match="--mtp-num-layers makes a model that is not in the zoo") as error:
        read(LLAMA + "--mtp-num-layers 1")
    assert "--model, such as zoo:deepseek-v3" in str(error.value)


def test_layers_that_embedding_and_loss_count_among() -> None:
    text = LLAMA.replace("32 --hidden-size", "30 --hidden-size") + "--pipeline-model-parallel-size 4 "
    text += "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"

    assert read(text).degrees.layers == (7, 8, 8, 7)


@pytest.mark.parametrize(
    ("option", "selective", "recompute", "every"), [("op", "alternate", "selective", 1), ("2", "cheap", "full", 2)]
)
def test_checkpointing_by_op_is_that_of_torchtitan(option: str, selective: str, recompute: str, every: int) -> None:
    """Every other product is kept, or every second layer recomputes whole."""
    text = f"[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = '{option}'\n"

    found = parse_configuration(text, "torchtitan", gpus=8, model="zoo:llama3-8b")

    assert (found.degrees.recompute, found.degrees.recompute_every) == (recompute, every)
    assert dict(found.software).get("selective", "cheap") == selective


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("--recompute-activations", ("core_attn",)),
        ("--recompute-granularity selective", ("core_attn",)),
        ("--recompute-granularity selective --recompute-modules moe_act mla_up_proj", ("mla_up_proj", "moe_act")),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", ()),
    ],
)
def test_modules_that_run_again_are_those_of_megatron(text: str, modules: tuple[str, ...]) -> None:
    assert read(f"{LLAMA} {text}").stack(IDEAL).recompute_modules == modules


def test_the_block_method_recomputes_the_first_layers_of_every_stage() -> None:
    full = LLAMA + "--pipeline-model-parallel-size 4 --recompute-granularity full --recompute-method block "

    assert read(full + "--recompute-num-layers 3").first_layers == 3
    assert read(full + "--recompute-num-layers 8").first_layers == 0


@pytest.mark.parametrize(
    ("text", "framework", "hides"),
    [
        (LLAMA + "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap", "megatron", True),
        (LLAMA + "--tensor-model-parallel-size 2 --tp-comm-overlap", "megatron", False),
        (LLAMA + "--tensor-model-parallel-size 2 --sequence-parallel", "megatron", False),
        ("enable_async_tensor_parallel = true\n[compile]\nenable = true\n", "torchtitan", True),
        ("enable_async_tensor_parallel = true\n", "torchtitan", False),
    ],
)
def test_collectives_hidden_behind_products_are_read(text: str, framework: str, hides: bool) -> None:
    """Megatron-LM's overlap needs sequence parallelism, and that of PyTorch is a pass of its compiler."""
    if framework == "torchtitan":
        text = "[parallelism]\ntensor_parallel_degree = 2\n" + text

    found = parse_configuration(text, framework, gpus=8, model="zoo:llama3-8b")
    assert dict(found.software).get("hides_tp", False) == hides


@pytest.mark.parametrize(
    ("text", "kind"),
    [("", "ring"), ("--cp-comm-type all_gather", "gather"), ("--cp-comm-type a2a", "ulysses")],
    ids=["default", "all_gather", "a2a"],
)
def test_megatron_passes_keys_and_values_round_unless_told_otherwise(text: str, kind: str) -> None:
    found = read(f"{GPT2} --context-parallel-size 2 {text}")

    assert (found.degrees.cp, found.degrees.cp_kind) == (2, kind)
    assert not any("context" in sentence for sentence in found.assumed)
    assert read(GPT2 + text).degrees.cp_kind == ""


def test_a_torchtitan_file_without_a_batch_has_torchtitans(tmp_path: Path) -> None:
    found = parse_configuration("[training]\nsteps = 10\n", "torchtitan", gpus=8, model="zoo:llama3-8b")

    assert found.degrees == Degrees(
        dp=8, zero=3, recompute="full", recompute_every=2, microbatch=8, global_batch=64
    )  # selective_ac_option "2": one layer in two runs again, whole
    assert found.dims == {"seq": 2048}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (LLAMA, "--overlap-grad-reduce"),
        (LLAMA + "--use-distributed-optimizer", "--overlap-param-gather"),
        (LLAMA + "--context-parallel-size 4 --cp-comm-type a2a+p2p", "Megatron-LM runs a2a+p2p"),
        (LLAMA.replace("--hidden-dropout 0 ", ""), "runs --hidden-dropout 0.1"),
        (LLAMA.replace("--normalization RMSNorm ", ""), "Megatron-LM's are LayerNorm"),
        (LLAMA.replace("--position-embedding-type rope ", ""), "Megatron-LM's are learned_absolute"),
        (LLAMA.replace("--disable-bias-linear ", ""), "no biases"),
        (LLAMA.replace("--untie-embeddings-and-output-weights ", ""), "131,072,000 parameters"),
        (LLAMA.replace("--vocab-size 32000 ", ""), "a vocabulary of 128256"),
        (MOE + "--expert-model-parallel-size 8", "allgather"),
    ],
)
def test_what_is_taken_otherwise_is_said(text: str, sentence: str) -> None:
    """A default of Megatron-LM is not replaced without a word."""
    assert any(sentence in found for found in read(text).assumed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            LLAMA.replace("32 --hidden-size", "30 --hidden-size") + "--pipeline-model-parallel-size 4",
            r"30 layers are not divisible by 4 stages[\s\S]*'Et\*8\|t\*8\|t\*7\|t\*7,L'",
        ),
        (LLAMA + "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 3", "divisible by 12 stages"),
        (LLAMA + "--pipeline-model-parallel-layout Et*30|t,L", "has 31 layers, --num-layers is 32"),
        (LLAMA.replace("--micro-batch-size 1", ""), "no --micro-batch-size"),
        (LLAMA + "--recompute-granularity full", "Megatron-LM asks for both"),
        (LLAMA + "--recompute-granularity selective --recompute-modules head", "has 'head'"),
        (LLAMA + "--context-parallel-size 8 --seq-length 2056", "divisible by 2 x --context-parallel-size 8"),
        (LLAMA + "--kv-channels 64", "--kv-channels 64 with 32 heads"),
        (LLAMA + "--multi-latent-attention", "--multi-latent-attention makes a model that is not in the zoo"),
        (GPT2 + "--group-query-attention --num-query-groups 4", "4 key-value heads of 12 without --swiglu"),
        (MOE.replace("--swiglu", "") + "--ffn-hidden-size 16384", "experts without --swiglu"),
        (MOE + "--expert-model-parallel-size 3", "128 experts are not divisible"),
    ],
)
def test_what_megatron_refuses_is_refused(text: str, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        read(text)


def test_experts_over_tensor_parallel_devices_are_whole_or_refused_with_the_nearest_groups() -> None:
    """TP2 PP8 EP32 on 256 devices: groups of 32 devices, 16 of them data parallel, take whole experts only."""
    text = MOE + "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 8 --expert-model-parallel-size 32 "

    whole = read(text + "--expert-tensor-parallel-size 1", gpus=256).degrees
    assert (whole.dp, whole.ep, whole.etp, whole.expert_axis) == (16, 32, 1, 16)
    with pytest.raises(ExportError, match="do not divide the 32 devices of a stage") as raised:
        read(text, gpus=256)

    assert "--expert-model-parallel-size 16 --expert-tensor-parallel-size 2 is the nearest" in str(raised.value)
    nearest = text.replace("size 32 ", "size 16 ") + "--expert-tensor-parallel-size 2"
    assert read(nearest, gpus=256).degrees.ep == 16


def test_key_value_heads_have_to_divide_for_torchtitan() -> None:
    """The framework torchtitan splits them; Megatron-LM copies them to more devices than there are heads."""
    text = "[parallelism]\ntensor_parallel_degree = 16\n"

    with pytest.raises(ExportError, match="8 key-value heads do not divide over tensor_parallel_degree 16"):
        parse_configuration(text, "torchtitan", gpus=16, model="zoo:llama3-70b")
    grouped = LLAMA + "--group-query-attention --num-query-groups 2 --tensor-model-parallel-size 4"
    assert read(grouped).degrees.tp == 4


MTP = LLAMA.replace("--num-layers 32", "--num-layers 5 --mtp-num-layers 1") + "--global-batch-size 8 "


def test_a_layout_places_multi_token_prediction() -> None:
    """On a stage of its own, or with layers; the loss may be alone."""
    four = "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout "

    found = parse_configuration(MTP + four + "'Et|tt|ttm|L'", "megatron", gpus=4, model="zoo:deepseek-v3").degrees
    alone = parse_configuration(MTP + four + "'E|ttt|tt|mL'", "megatron", gpus=4, model="zoo:deepseek-v3").degrees

    assert (found.layers, found.predictions) == ((1, 2, 2, 0), (0, 0, 1, 0))
    assert (alone.layers, alone.predictions) == ((0, 3, 2, 0), (0, 0, 0, 1))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Et|tt|tt|L", "has 0 modules of multi-token prediction, --mtp-num-layers is 1"),
        ("t|Ett|tt|mL", "the embedding .E. of the layout .* is not on the first stage"),
        ("Et|tt|ttL|m", "the loss .L. of the layout .* is not on the last stage"),
    ],
)
def test_layouts_that_megatron_refuses(layout: str, message: str) -> None:
    text = f"{MTP} --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout '{layout}'"
    with pytest.raises(ExportError, match=message):
        parse_configuration(text, "megatron", gpus=4, model="zoo:deepseek-v3")


def test_pipelines_inside_data_parallelism_are_read() -> None:
    found = read(LLAMA + "--pipeline-model-parallel-size 4 --use-tp-pp-dp-mapping", gpus=16).degrees

    assert found == Degrees(dp=4, pp=4, pp_inside=True, global_batch=4)


def test_an_overlapped_dispatch_is_a_schedule() -> None:
    """Megatron-LM refuses it in a pipeline without virtual stages."""
    overlap = "--expert-model-parallel-size 4 --overlap-moe-expert-parallel-comm "
    pipeline = MOE + overlap + "--pipeline-model-parallel-size 2 "

    assert read(MOE + overlap).degrees.schedule == "1f1b-a2a"
    assert read(pipeline + "--num-virtual-stages-per-pipeline-rank 4").degrees.schedule == "1f1b-a2a"
    with pytest.raises(ExportError, match="without virtual stages"):
        read(pipeline)
