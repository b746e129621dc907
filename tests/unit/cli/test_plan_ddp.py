"""``thinwire plan`` for those who stay with DDP: the argument that it prints, and in JSON."""

import json

import pytest

from thinwire.adapters.ddp_buckets import bucket_arguments, has_bucket_list
from thinwire.core.pricing.profiles import builtin
from thinwire.core.program import Plan
from thinwire.tools.cli.main import app
from thinwire.tools.cli.plan_tables import ddp_sentence
from verbs import CliRunner

runner = CliRunner()


def run(*words):
    result = runner.invoke(app, ["plan", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_list_is_the_plan_that_out_writes(tmp_path):
    words = ["resnet50", "--no-lossy", "--methods", "ssgd", "--link", "10gbit", "--out", tmp_path / "plan.json"]
    answer = json.loads(run(*words, "--json"))
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    size = {tensor.name: tensor.size * 4 for tensor in builtin("resnet50").tensors}
    assert answer["ddp"] == {"label": answer["ranking"]["best"], "arguments": bucket_arguments(plan, size)}
    if has_bucket_list():
        caps = answer["ddp"]["arguments"]["bucket_cap_mb_list"]
        assert sum(caps) * 2**20 == sum(size.values())
        assert len(caps) == len(plan.buckets())


@pytest.mark.slow
def test_what_ddp_cannot_run_is_passed_over():
    """Decoupled methods, and plans that keep vectors apart."""
    text = " ".join(run("resnet50", "--methods", "dear,topk:density=0.001").split())
    assert "or with DDP: bucket_cap_mb" in text
    assert "*tw.ddp_hook(" in text
    assert 'ddp_hook("dear"' not in text
    assert 'ddp_hook("topk"' not in text


def test_a_line_to_paste():
    answer = {"label": "acp:rank=4", "arguments": {"bucket_cap_mb_list": [0.5, 12.25]}}
    assert ddp_sentence(answer) == (
        'or with DDP: bucket_cap_mb_list=[0.5, 12.25], and model.register_comm_hook(*tw.ddp_hook("acp", rank=4))'
    )
    assert "bucket_cap_mb=7.5, and" in ddp_sentence({"label": "ssgd", "arguments": {"bucket_cap_mb": 7.5}})


def test_a_long_list_is_cut_on_screen_alone():
    text = ddp_sentence({"label": "ssgd", "arguments": {"bucket_cap_mb_list": [1.0] * 40}})
    assert "[" + "1, " * 12 + "... 28 more in --json]" in text
