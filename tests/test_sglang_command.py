"""Building and reading SGLang command lines."""

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpdeploy.errors import PlanRefused, UsageError
from mtpdeploy.secret import MASK
from mtpdeploy.sglang import flags
from mtpdeploy.sglang.command import build, parse
from mtpdeploy.sglang.flags import HelpFlags, flags_of
from mtpdeploy.sglang.versions import RELEASES, Version

V = Version.parse
MTP = {
    "model_path": "/models/Qwen3.6 27B",
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 3,
    "mamba_radix_cache_strategy": "extra_buffer",
    "mem_fraction_static": 0.92,
    "enable_metrics": True,
}


def test_one_profile_is_spelled_for_each_version():
    for version, strategy in (("0.5.10", "--mamba-scheduler-strategy"), ("0.5.23", "--mamba-radix-cache-strategy")):
        argv = build(MTP, V(version), python="/venv/bin/python").argv
        assert argv[:5] == ("/venv/bin/python", "-m", "sglang.launch_server", "--model-path", "/models/Qwen3.6 27B")
        assert argv[argv.index(strategy) + 1] == "extra_buffer"
        assert "--enable-metrics" in argv


def test_false_and_none_are_left_out_and_a_list_becomes_words():
    args = {"model_path": "m", "disable_radix_cache": False, "context_length": None, "cuda_graph_bs_decode": (1, 2, 4)}
    assert build(args, V("0.5.12")).argv[3:] == ("--model-path", "m", "--cuda-graph-bs", "1", "2", "4")


def test_a_switch_says_no_where_it_is_false():
    args = {"model_path": "m", "enable_tf32_matmul": False}
    assert build(args, V("0.5.23")).argv[-1] == "--no-enable-tf32-matmul"


def test_json_stays_one_word_and_a_leading_dash_is_joined():
    args = {
        "model_path": "m",
        "json_model_override_args": {"rope_theta": 1},
        "chunked_prefill_size": -1,
        "chat_template": "-x",
    }
    argv = build(args, V("0.5.23")).argv
    assert argv[argv.index("--json-model-override-args") + 1] == '{"rope_theta":1}'
    assert argv[argv.index("--chunked-prefill-size") + 1] == "-1"
    assert "--chat-template=-x" in argv


def test_attention_data_parallelism_is_two_flags_before_0_5_22():
    args = {"model_path": "m", "tp_size": 4, "attn_dp_size": 2}
    old = build(args, V("0.5.21"))
    assert old.argv[-3:] == ("--dp-size", "2", "--enable-dp-attention")
    assert any("0.5.22" in note for note in old.notes)
    assert build(args, V("0.5.22")).argv[-2:] == ("--attn-dp-size", "2")
    with pytest.raises(PlanRefused, match="attn_dp_size"):
        build({**args, "dp_size": 4}, V("0.5.21"))


def test_what_an_old_version_does_anyway_is_left_out_with_a_note():
    made = build(
        {"model_path": "m", "disable_prefill_cuda_graph": True, "mamba_radix_cache_strategy": "no_buffer"}, V("0.5.6")
    )
    assert made.argv[3:] == ("--model-path", "m")
    assert len(made.notes) == 2


@pytest.mark.parametrize(
    ("args", "version", "words"),
    [
        ({"mamba_radix_cache_strategy": "extra_buffer"}, "0.5.6", "0.5.14 to 0.5.23"),
        ({"mamba_radix_cache_strategy": "extra_buffer_lazy"}, "0.5.12", "is not one of auto, no_buffer, extra_buffer"),
        ({"torchao_config": "int4wo"}, "0.5.20", "0.5.6 to 0.5.17"),
        ({"enable_metrics": "yes"}, "0.5.17", "takes no value"),
        ({"attention_backend": True}, "0.5.17", "takes one of"),
        ({"page_size": [1, 2]}, "0.5.17", "takes one value"),
        ({"page_size": 1.5}, "0.5.17", "not a whole number"),
        ({"port": "http"}, "0.5.17", "is not a whole number"),
        ({"served_model_name": "a\0b"}, "0.5.17", "NUL"),
        ({"api_key": "hunter2"}, "0.5.17", "seen by everybody"),
        ({"model_path": None}, "0.5.17", "--model-path"),
        ({"cuda_graph_bs_decode": ()}, "0.5.17", "at least one value"),
    ],
)
def test_what_a_version_does_not_take_is_refused_before_anything_is_touched(args, version, words):
    with pytest.raises(PlanRefused) as refused:
        build({"model_path": "m", **args}, V(version))
    assert words in refused.value.message
    assert "Nothing was touched" in refused.value.message
    assert "hunter2" not in refused.value.message


def test_all_problems_are_named_at_once():
    with pytest.raises(PlanRefused) as refused:
        build({"foo": 1, "page_size": "x"}, V("0.5.17"))
    assert len(refused.value.details["problems"]) == 3


def test_a_newer_version_takes_what_its_own_help_lists():
    own = HelpFlags.named(["--model-path", "--shiny-thing", "--mem-fraction-static"])
    argv = build({"model_path": "m", "shiny_thing": True, "mem_fraction_static": 0.9}, V("0.5.99"), help_flags=own).argv
    assert argv[-3:] == ("--shiny-thing", "--mem-fraction-static", "0.9")
    with pytest.raises(PlanRefused, match="tp-size"):
        build({"model_path": "m", "tp_size": 2}, V("0.5.99"), help_flags=own)


TYPED = r"""
CUDA_VISIBLE_DEVICES=0 env SGLANG_ENABLE_SPEC_V2=1 nohup python3.11 -m sglang.launch_server \
  --model-path "/models/Qwen 3.6" --tp 2 --mem-fraction=0.9 \
  --speculative-algo NEXTN --cuda-graph-bs 1 2 4 --mamba-scheduler-strategy 'extra_buffer' --enable-metrics \
  --api-key s3cret > server.log 2>&1 &
"""


def test_a_command_as_typed_is_read_with_its_environment_quotes_and_abbreviations():
    found = parse(TYPED, V("0.5.12"))
    assert found.args == {
        "model_path": "/models/Qwen 3.6",
        "tp_size": 2,
        "mem_fraction_static": 0.9,
        "speculative_algorithm": "NEXTN",
        "cuda_graph_bs_decode": (1, 2, 4),
        "mamba_radix_cache_strategy": "extra_buffer",
        "enable_metrics": True,
    }
    assert found.env == {"CUDA_VISIBLE_DEVICES": "0", "SGLANG_ENABLE_SPEC_V2": "1"}
    assert found.python == "python3.11"
    assert found.secrets["api_key"].reveal() == "s3cret"
    assert "s3cret" not in repr(found)
    assert str(found.secrets["api_key"]) == MASK
    assert any("--tp is short for --tp-size" in note for note in found.notes)


@pytest.mark.parametrize(
    ("text", "args"),
    [
        ("sglang serve Qwen/Qwen3.6-27B --port 1", {"model_path": "Qwen/Qwen3.6-27B", "port": 1}),
        ("/venv/bin/sglang serve --model X", {"model_path": "X"}),
        ("docker run --gpus all -e A=1 img python3 -m sglang.launch_server --model-path X", {"model_path": "X"}),
        ("--model-path X --chunked-prefill-size -1", {"model_path": "X", "chunked_prefill_size": -1}),
        ("python launch_server.py --model X --no-enable-tf32-matmul", {"model_path": "X", "enable_tf32_matmul": False}),
        ("cd /x && python -m sglang.launch_server --model X; echo done", {"model_path": "X"}),
        ("python -m sglang.launch_server --model X --tp 1 --tp-size 4", {"model_path": "X", "tp_size": 4}),
    ],
)
def test_the_ways_in_which_people_start_it_are_understood(text, args):
    assert parse(text, V("0.5.23")).args == args


def test_a_deprecated_spelling_passes_with_a_note_and_a_removed_one_is_refused():
    text = "python -m sglang.launch_server --model X --mamba-scheduler-strategy extra_buffer --disable-piecewise-cuda-graph"
    found = parse(text, V("0.5.19"))
    assert found.args["mamba_radix_cache_strategy"] == "extra_buffer"
    assert found.args["disable_prefill_cuda_graph"] is True
    assert sum("deprecated" in note for note in found.notes) == 2
    with pytest.raises(PlanRefused) as refused:
        parse(text, V("0.5.20"))
    assert "0.5.7 to 0.5.19" in refused.value.message
    assert "--disable-prefill-cuda-graph" in refused.value.message


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("--pp 2", "ambiguous"),
        ("--cuda-graph-max-bs 8", "ambiguous"),
        ("--config=x.yml", "two words"),
        ("--page-size", "has none"),
        ("--enable-metrics=1", "takes no value"),
        ("stray", "unrecognized arguments"),
        ("--speculative-nun-steps 3", "--speculative-num-steps"),
        ("--attention-backend fa33", "did you mean fa3"),
        ("--help", "help text"),
    ],
)
def test_what_argparse_would_refuse_is_refused_with_what_would_be_right(rest, words):
    with pytest.raises(PlanRefused) as refused:
        parse(f"python -m sglang.launch_server --model X {rest}", V("0.5.23"))
    assert words in refused.value.message


def test_quoted_operators_are_values_and_comments_are_not():
    text = "# how we start it\npython -m sglang.launch_server --model '|' --chat-template 'a>b' \\\n --port 1  # the port\n"
    assert parse(text, V("0.5.23")).args == {"model_path": "|", "chat_template": "a>b", "port": 1}


@pytest.mark.parametrize("text", ["", "vllm serve X", "python -m vllm --model X", "echo 'open", "A=1"])
def test_what_is_no_sglang_server_is_a_usage_error(text):
    with pytest.raises(UsageError, match="--command"):
        parse(text, V("0.5.23"))


def _value(flag):
    if flag.kind != "value":
        return st.just(True)
    if flag.choices and not flag.choices_computed:
        one = st.sampled_from(flag.choices)
    elif flag.type in ("int", "human_int"):
        one = st.integers(-(10**9), 10**9)
    elif flag.type == "float":
        one = st.floats(-1e6, 1e6, allow_nan=False)
    else:
        one = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=12)
    if flag.nargs in ("+", "*"):
        return st.lists(one.filter(lambda v: not str(v).startswith("-")), min_size=1, max_size=3).map(tuple)
    return one


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(RELEASES), st.data())
def test_what_is_built_reads_back_the_same_through_a_shell(version, data):
    options = [
        f
        for f in flags_of(V(version)).values()
        if f.type in ("str", "int", "float", "human_int")
        and not f.dead and f.const is None and f.field not in (*flags.secret_fields(), "config", "model_path", "attn_dp_size")
        and flags.spelling(f.field, V(version)) is f
    ]  # fmt: skip
    chosen = data.draw(st.lists(st.sampled_from(options), max_size=6, unique_by=lambda f: f.field))
    args = {"model_path": "/models/x y", **{f.field: data.draw(_value(f)) for f in chosen}}
    argv = build(args, V(version)).argv
    assert parse(argv, V(version)).args == args
    assert parse(shlex.join(argv), V(version)).args == args
