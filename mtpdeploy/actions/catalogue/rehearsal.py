"""Verbs that join the others: the rehearsal on this machine, and the whole story on a real host."""

from __future__ import annotations

from mtpdeploy.actions.verbs import Verb

DEMO = Verb(
    name="demo",
    summary="The main job on a simulated host on this machine, in about a minute: deploy, bench, compare, report.",
    action="mtpdeploy.actions.demo:demo",
    text="mtpdeploy.report.demo:text",
    examples=("mtpdeploy demo", "mtpdeploy demo --json | jq .comparison.verdict"),
    details=(
        "Deploys the baseline profile and the MTP profile one after the other on an embedded rehearsal host, measures both, "
        "compares them and writes an HTML report. SGLang, its GPU and the clock are simulated and labelled so. "
        "Nothing is left behind but the run."
    ),
)

VERBS = (DEMO,)
