"""For language models that are not a GPT-2, findings are reported and the weights are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compat import adapt
from tests.adaptation.catalogue import FOREIGN, ZOO
from tests.adaptation.common import build


def test_the_differences_of_llama_are_reported_with_their_lines(tiny: Path) -> None:
    model = build(FOREIGN["llama"], ZOO / FOREIGN["llama"].file, tiny)
    adaptation = adapt(model, tiny)
    assert not adaptation
    found = {finding.code: finding for finding in adaptation.findings}
    assert {"rmsnorm", "rope", "gated_mlp", "no_pos"} - found.keys() <= {"no_pos"}
    for code in ("rmsnorm", "rope", "gated_mlp"):
        assert found[code].severity == "breaks" and found[code].line is not None


def test_the_differences_of_an_encoder_are_reported(tiny: Path) -> None:
    model = build(FOREIGN["encoder"], ZOO / FOREIGN["encoder"].file, tiny)
    found = {finding.code: finding for finding in adapt(model, tiny).findings}
    for code in ("post_ln", "erf_gelu", "no_mask", "extra_projection", "eps_value"):
        assert found[code].severity == "breaks" and found[code].line is not None


def test_additions_to_values_and_to_the_residual_stream_do_not_hide_other_differences(
    tiny: Path,
) -> None:
    path = ZOO / FOREIGN["chat"].file
    findings = adapt(build(FOREIGN["chat"], path, tiny), tiny).findings
    text = path.read_text().splitlines()
    code_at = {f.code: text[f.line - 1].strip() for f in findings if f.line is not None}
    for code, words in {
        "rmsnorm": "F.rms_norm(",
        "rope": "torch.cat([a * cos",
        "qk_norm": "F.rms_norm(",
        "no_qkv_bias": "self.q = nn.Linear(",
        "no_proj_bias": "self.proj = nn.Linear(",
        "no_mlp_bias": "self.up = nn.Linear(",
        "other_activation": ".square()",
        "extra_ln": "x = norm(self.wte(idx))",
        "changed_logits": "torch.tanh(logits",
    }.items():
        assert words in code_at[code], code
    unknown = [f for f in findings if f.code == "extra_operation" and f.line is not None]
    lines = {text[f.line - 1].strip().split(" = ")[0]: f.message for f in unknown if f.line}
    assert lines.keys() == {"x", "v"}
    assert "is added to the projection of v" in lines["v"] and "mul and add" in lines["x"]
    [others] = [f for f in findings if f.code == "random_parameters"]
    assert "h.0.attn.gate.weight" in others.message
    assert "resid" not in others.message  # a part of the operations on x


@pytest.mark.parametrize("name", ["rnn", "mlp"])
def test_a_model_without_attention_keeps_its_weights(tiny: Path, name: str) -> None:
    model = build(FOREIGN[name], ZOO / FOREIGN[name].file, tiny)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    adaptation = adapt(model, tiny)
    assert not adaptation and len(adaptation.unmatched) == adaptation.tensors
    found = adaptation.findings[0]
    assert found.code == "no_attention" and found.line is not None
    for words in ("no attention", "not a GPT-2"):
        assert words in found.message
    assert "Place(" not in found.message  # no representation of internal objects
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())


class OnHyperboloid(nn.Module):
    """Attends by distances of points with one more coordinate than the embedding has."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(97, 24), nn.Embedding(32, 24)
        self.qkv, self.head = nn.Linear(25, 72), nn.Linear(25, 97)

    def lifted(self, x: Tensor) -> Tensor:
        return torch.cat([(1 + x.square().sum(-1, keepdim=True)).sqrt(), x], -1)

    def forward(self, ids: Tensor) -> Tensor:
        T = ids.shape[1]
        x = self.lifted(self.wte(ids) + self.wpe(torch.arange(T)))
        q, k, v = map(self.lifted, self.qkv(x).chunk(3, -1))
        scores = -(q[:, :, None] - k[:, None]).square().sum(-1)
        probs = scores.masked_fill(~torch.ones(T, T).tril().bool(), -torch.inf).softmax(-1)
        mean = (probs[..., None] * v[:, None]).sum(2)
        return self.head(mean / mean.square().sum(-1, keepdim=True).sqrt())


def test_the_line_of_attention_with_other_scores_is_shown(tiny: Path) -> None:
    found = adapt(OnHyperboloid(), tiny).findings[0]
    assert found.code == "no_attention" and ".softmax(-1)" in (found.source_line or "")
