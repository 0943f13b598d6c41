"""The flag table, and argparse's reading of it."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpdeploy.sglang import flags
from mtpdeploy.sglang.flags import (
    HelpFlags,
    canonical,
    coerce,
    explain_absent,
    flags_of,
    human_int,
    match,
    nearest,
    spelling,
)
from mtpdeploy.sglang.versions import RELEASES, Version

V = Version.parse


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        (
            "mamba_radix_cache_strategy",
            {"0.5.6": None, "0.5.7": "--mamba-scheduler-strategy", "0.5.13": "--mamba-scheduler-strategy",
             "0.5.14": "--mamba-radix-cache-strategy", "0.5.23": "--mamba-radix-cache-strategy"},
        ),
        ("cuda_graph_max_bs_decode", {"0.5.6": "--cuda-graph-max-bs", "0.5.13": "--cuda-graph-max-bs", "0.5.14": "--cuda-graph-max-bs-decode"}),
        ("disable_prefill_cuda_graph", {"0.5.9": None, "0.5.10": "--disable-piecewise-cuda-graph", "0.5.14": "--disable-prefill-cuda-graph"}),
        ("incremental_streaming_output", {"0.5.9": "--stream-output", "0.5.10": "--incremental-streaming-output"}),
        ("enable_linear_replayssm_spec", {"0.5.15": None, "0.5.16": "--enable-gdn-replayssm-spec", "0.5.17": "--enable-linear-replayssm-spec"}),
        ("attn_dp_size", {"0.5.21": None, "0.5.22": "--attn-dp-size"}),
        ("tp_size", dict.fromkeys(RELEASES, "--tp-size")),
        ("disable_cuda_graph", dict.fromkeys(RELEASES, "--disable-cuda-graph")),
        ("model_path", dict.fromkeys(RELEASES, "--model-path")),
    ],
)  # fmt: skip
def test_the_hosts_version_decides_the_spelling(name, spellings):
    for version, option in spellings.items():
        found = spelling(name, V(version))
        assert (found and found.option) == option, version


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("mamba_scheduler_strategy", "mamba_radix_cache_strategy"),
        ("--mamba-scheduler-strategy", "mamba_radix_cache_strategy"),
        ("tensor_parallel_size", "tp_size"),
        ("model", "model_path"),
        ("cuda_graph_bs", "cuda_graph_bs_decode"),
        ("disable_piecewise_cuda_graph", "disable_prefill_cuda_graph"),
        ("nsa_prefill_backend", "dsa_prefill_backend"),
        ("no_such_thing", None),
    ],
)
def test_older_names_are_aliases_of_the_newest_releases(written, name):
    assert canonical(written) == name


def test_every_canonical_name_means_itself():
    assert [n for n in flags.canonical_names() if canonical(n) != n] == []


@pytest.mark.parametrize(
    ("written", "version", "option"),
    [
        ("--tp", "0.5.23", "--tp-size"),
        ("--mem-fraction", "0.5.23", "--mem-fraction-static"),
        ("--speculative-algo", "0.5.10", "--speculative-algorithm"),
        ("--model", "0.5.23", "--model-path"),
        ("--mamba-scheduler-strategy", "0.5.19", "--mamba-scheduler-strategy"),
        ("--no-enable-tf32-matmul", "0.5.23", "--enable-tf32-matmul"),
    ],
)
def test_what_argparse_accepts_is_matched(written, version, option):
    found = match(written, V(version)).flag
    assert found is not None
    assert option in (found.option, found.group)


@pytest.mark.parametrize(
    ("written", "version"), [("--pp", "0.5.7"), ("--cuda-graph-max-bs", "0.5.20"), ("--cuda-graph-bs", "0.5.23")]
)
def test_ambiguous_abbreviations_are_told_from_unknown_ones(written, version):
    assert len(match(written, V(version)).ambiguous) >= 2
    assert match("--no-such-flag", V(version)).unknown


@given(st.sampled_from(RELEASES), st.data())
def test_a_full_option_always_matches_itself_and_a_unique_prefix_its_option(version, data):
    options = flags_of(V(version))
    option = data.draw(st.sampled_from(sorted(options)))
    assert match(option, V(version)).flag is options[option]
    cut = option[: data.draw(st.integers(3, len(option)))]
    found = match(cut, V(version))
    starting = [o for o in options if o.startswith(cut)]
    if found.flag is None:
        assert len(found.ambiguous) >= 2
    else:
        assert cut == found.flag.option or {options[o].group for o in starting} == {found.flag.group}


@pytest.mark.parametrize(
    ("name", "version", "near"),
    [
        ("speculativ_num_step", "0.5.23", "--speculative-num-steps"),
        ("mamba_scheduler_strategy", "0.5.23", "--mamba-radix-cache-strategy"),
        ("mamba_radix_cache_strategy", "0.5.10", "--mamba-scheduler-strategy"),
        ("cuda_graph_max_bs", "0.5.23", "--cuda-graph-max-bs-decode"),
        ("torchao_config", "0.5.23", None),
        ("entirely_made_up", "0.5.23", None),
    ],
)
def test_the_nearest_name_is_offered_only_where_it_is_near(name, version, near):
    assert nearest(name, V(version)) == near


def test_a_removed_flag_is_explained_with_the_versions_that_had_it():
    text = explain_absent("mamba_scheduler_strategy", V("0.5.23"))
    assert "0.5.7 to 0.5.19" in text
    assert "--mamba-radix-cache-strategy" in text
    assert "no SGLang release" in explain_absent("entirely_made_up", V("0.5.23"))


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("1k", 1000), ("25.6k", 25600), ("1Ki", 1024), ("2M", 2_000_000), ("1Gi", 1 << 30), ("-1", -1)],
)
def test_human_integers_are_read_as_sglang_reads_them(text, value):
    assert human_int(text) == value


@pytest.mark.parametrize("text", ["1K", "1.5Ki", "1ki", "", "k", "1 000", "1e3", "0x10"])
def test_what_sglang_refuses_as_an_integer_is_refused(text):
    with pytest.raises(ValueError, match="whole number"):
        human_int(text)


def test_a_wrong_choice_names_the_choices_and_the_near_one():
    flag = flags_of(V("0.5.12"))["--mamba-scheduler-strategy"]
    with pytest.raises(ValueError, match=r"auto, no_buffer, extra_buffer \(did you mean extra_buffer\?\)"):
        coerce(flag, "extra_buffer_lazy")
    assert coerce(flags_of(V("0.5.13"))["--mamba-scheduler-strategy"], "extra_buffer_lazy") == "extra_buffer_lazy"


def test_defaults_and_deprecations_change_with_the_version():
    assert flags_of(V("0.5.8"))["--mamba-ssm-dtype"].default == "float32"
    assert flags_of(V("0.5.9"))["--mamba-ssm-dtype"].default is None
    assert flags_of(V("0.5.19"))["--mamba-full-memory-ratio"].default == 0.9
    assert flags_of(V("0.5.20"))["--mamba-full-memory-ratio"].default is None
    assert flags_of(V("0.5.14"))["--mamba-scheduler-strategy"].deprecated
    assert not flags_of(V("0.5.13"))["--mamba-scheduler-strategy"].deprecated
    assert "--mamba-scheduler-strategy" not in flags_of(V("0.5.20"))


HELP = """usage: sglang serve [-h] --model-path MODEL_PATH [--tp-size TENSOR_PARALLEL_SIZE] [--shiny-thing]
                    [--colour {red,green}]

options:
  -h, --help            show this help message and exit
  --model-path MODEL_PATH, --model MODEL_PATH
                        The path of the model weights, see --tokenizer-path
  --tp-size TP_SIZE     Tensor parallelism.
  --shiny-thing         A switch that no release of the table has.
  --colour {red,green}  Choices.
  --sizes SIZES [SIZES ...]
  --prefixes [PREFIXES ...]
  --maybe [MAYBE]       One or none.
  --enable-x, --no-enable-x
                        Both ways.
"""


def test_a_help_text_overrides_the_table_for_versions_that_it_does_not_hold():
    found = HelpFlags.parse(HELP)
    kinds = {name: (f.kind, f.nargs, f.choices) for name, f in found.options.items()}
    assert kinds == {
        "--model-path": ("value", None, ()),
        "--model": ("value", None, ()),
        "--tp-size": ("value", None, ()),
        "--shiny-thing": ("flag", None, ()),
        "--colour": ("value", None, ("red", "green")),
        "--sizes": ("value", "+", ()),
        "--prefixes": ("value", "*", ()),
        "--maybe": ("value", "?", ()),
        "--enable-x": ("switch", None, ()),
    }
    newer = V("0.5.99")
    assert spelling("shiny_thing", newer) is None
    assert spelling("shiny_thing", newer, found).option == "--shiny-thing"
    assert spelling("mem_fraction_static", newer, found) is None


def test_text_that_is_no_server_help_is_refused():
    with pytest.raises(ValueError, match="--model-path"):
        HelpFlags.parse("usage: vllm serve [-h]\n\noptions:\n  --port PORT  x\n")
    with pytest.raises(ValueError, match="--model-path"):
        HelpFlags.named(["--port"])


def test_the_table_has_a_type_and_a_default_for_every_run_of_every_option():
    table = json.loads(Path(flags.__file__).with_name("flags.json").read_text())
    assert tuple(table["versions"]) == RELEASES
    for option, runs in table["flags"].items():
        order = [(RELEASES.index(r["first"]), RELEASES.index(r["last"])) for r in runs]
        assert order == sorted(order), option
        assert all(a[1] < b[0] for a, b in pairwise(order)), option
        for run in runs:
            assert run["kind"] in ("value", "flag", "switch"), option
            assert "default" in run, option
            assert run["kind"] != "value" or "type" in run, option


CORPUS = Path(__file__).parents[2] / "shared" / "corpus" / "h200" / "help-0.5.17.txt"


@pytest.mark.skipif(not CORPUS.is_file(), reason="the corpus of real runs is not here")
def test_the_table_agrees_with_a_real_help_text():
    real, table = HelpFlags.parse(CORPUS.read_text()).options, flags_of(V("0.5.17"))
    assert set(real) <= set(table)
    # Options whose help is suppressed are the only ones that --help does not show.
    assert set(table) - set(real) == {
        "--forward-pass-metrics-ipc-name", "--forward-pass-metrics-worker-id", "--speculative-dflash-draft-window-size",
    }  # fmt: skip
    for option, shown in real.items():
        assert (shown.kind, shown.nargs) == (table[option].kind, table[option].nargs), option
        if table[option].choices:
            assert sorted(shown.choices) == sorted(map(str, table[option].choices)), option
