"""Submission of a job in the browser."""

from __future__ import annotations

from penstock.api.pages.shell import Page
from penstock.view.markup import element, join

EXAMPLE = """\
apiVersion: penstock.dev/v1alpha1
kind: PipelineJob
metadata: {name: stdlib-llama}
spec:
  model: {family: llama, layers: 8, hidden: 256, heads: 8, kvHeads: 4}
  data:
    source: python-stdlib
    tokenizer: {train: bpe, vocab: 4096}
    sequenceLength: 1024
  training:
    globalBatch: 2
    steps: 100
    optimizer: {learningRate: 1.0e-3}
  resources: {ranks: 2, memoryPerRank: 4Gi}
  parallelism: {}   # empty: the planner decides
"""


def submit_page() -> Page:
    """Return the page with a manifest to edit and submit."""
    form = element(
        "form",
        element("textarea", EXAMPLE, name="manifest", spellcheck="false", aria_label="manifest"),
        element("p", element("button", "Submit", class_="strong")),
        data_call="/v1/jobs",
    )
    head = element("div", element("h1", "Submit a job"), class_="head")
    hint = "A PipelineJob in YAML, as for penstock run, penstock submit and kubectl apply."
    problem = element("div", id="problem", class_="card", role="alert", hidden="")
    return Page(title="Submit", here="/submit", body=join((head, element("p", hint, class_="under"), problem, form)))
