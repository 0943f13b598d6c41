"""A command line becomes a profile that means the same."""

import pytest
import yaml

from mtpdeploy import inventory
from mtpdeploy.actions.adopt_command import import_command
from mtpdeploy.errors import PlanRefused, UsageError
from mtpdeploy.plan import known_of, make_plan
from mtpdeploy.progress import Silent
from mtpdeploy.sglang.command import parse
from mtpdeploy.sglang.versions import Version

COMMAND = """SGLANG_ENABLE_SPEC_V2=1 HF_TOKEN=hf_abcdefgh12 /venv/bin/python -m sglang.launch_server --model-path Qwen/Qwen3.6-27B --tp 2 \\
  --mamba-scheduler-strategy extra_buffer --speculative-algo NEXTN --cuda-graph-bs 1 2 4 --host 127.0.0.1 --port 30001 --api-key sk-topsecret1"""


def imported(home, **options):
    given = {"name": "mine", "command": COMMAND, "sglang_version": "0.5.12", "force": False}
    return import_command(home=home, talk=Silent(), **{**given, **options})


def test_the_profile_gives_the_very_arguments_of_the_command(tmp_path, monkeypatch):
    answer = imported(tmp_path)
    monkeypatch.setenv("SGLANG_API_KEY", "sk-topsecret1")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh12")
    d = inventory.resolve(inventory.load(tmp_path), None, "mine")
    plan = make_plan(d, known_of(d, sglang_version="0.5.12"), home=tmp_path)
    again, first = parse(plan.argv, Version.parse("0.5.12")), parse(COMMAND, Version.parse("0.5.12"))
    assert again.args == first.args
    assert again.python == "/venv/bin/python"
    assert plan.env["SGLANG_ENABLE_SPEC_V2"] == "1"
    assert plan.secrets["api_key"].reveal() == "sk-topsecret1"
    assert answer.file == tmp_path / "inventories" / "profiles" / "mine.yml"


def test_no_secret_is_written_or_shown(tmp_path):
    answer = imported(tmp_path)
    for text in (answer.file.read_text(), str(answer.as_json()), repr(answer)):
        assert "topsecret" not in text
        assert "hf_abcdefgh12" not in text
    said = yaml.safe_load(answer.text)
    assert said["api_key"] == {"from_env": "SGLANG_API_KEY"}
    assert said["env"]["HF_TOKEN"] == {"from_env": "HF_TOKEN"}


def test_a_key_for_admins_alone_makes_no_key_for_everybody(tmp_path):
    answer = imported(tmp_path, command="sglang serve org/model --admin-api-key sk-topsecret1", sglang_version="0.5.23")
    assert "api_key" not in yaml.safe_load(answer.text)
    assert "topsecret" not in str(answer.as_json())
    assert any("admin_api_key" in note for note in answer.notes)


def test_a_command_without_a_model_makes_no_profile(tmp_path):
    with pytest.raises(UsageError, match="--model-path"):
        imported(tmp_path, command="sglang serve --tp 2", sglang_version="0.5.23")
    assert not (tmp_path / "inventories").exists()


def test_a_profile_that_is_there_is_kept_unless_forced(tmp_path):
    imported(tmp_path)
    with pytest.raises(UsageError, match="--force"):
        imported(tmp_path)
    assert imported(tmp_path, force=True).name == "mine"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"command": None}, UsageError, "--command"),
        ({"command": "vllm serve X"}, UsageError, "no SGLang server"),
        ({"name": "../evil"}, UsageError, "cannot name a profile"),
        ({"sglang_version": "newest"}, UsageError, "--sglang-version"),
        ({"sglang_version": "0.5.23"}, PlanRefused, "mamba-radix-cache-strategy"),
    ],
)
def test_what_cannot_be_imported_leaves_no_file(tmp_path, options, error, words):
    with pytest.raises(error, match=words):
        imported(tmp_path, **options)
    assert not list(tmp_path.rglob("*.yml"))
