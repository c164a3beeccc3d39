"""Known results of the real weights; these tests download half a gigabyte from the hub."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from compat import check_parity, generate, load_pretrained, load_tokenizer
from compat.dialects import DIALECTS, Model

pytestmark = pytest.mark.network

DOG = [
    464, 3290, 373, 1043, 287, 257, 2214, 1474, 262, 16246,
    286, 2688, 290, 2688, 27262, 13, 198, 198, 464, 3290,
]  # fmt: skip


@pytest.fixture(scope="module", params=DIALECTS)
def gpt2(request: pytest.FixtureRequest) -> Model:
    return load_pretrained("gpt2", request.param)


def test_greedy_ids_of_the_real_weights_are_known(gpt2: Model) -> None:
    ids = generate(gpt2, torch.tensor([DOG[:2]]), max_new_tokens=18, temperature=0)
    assert ids.tolist() == [DOG]


@pytest.mark.parametrize(
    ("prompt", "continuation"),
    [
        ("Hello, my dog is a little", " bit of a mess. I'm not sure if he's going"),
        ("Today, I", "'m going to be doing a lot of research on this. I"),
        ("Every effort moves", " forward, but it's not enough."),
    ],
)
def test_greedy_text_of_the_real_weights_is_known(
    gpt2: Model, prompt: str, continuation: str
) -> None:
    tokenizer = load_tokenizer("gpt2")
    new = len(tokenizer.encode(continuation))
    ids = generate(
        gpt2, torch.tensor([tokenizer.encode(prompt)]), max_new_tokens=new, temperature=0
    )
    assert tokenizer.decode(ids[0].tolist()) == prompt + continuation


def test_the_loss_of_the_real_weights_is_known(gpt2: Model) -> None:
    tokenizer = load_tokenizer("gpt2")
    ids = torch.tensor([50256, *tokenizer.encode("Hello world!")])
    loss = F.cross_entropy(gpt2(ids[None])[0, :-1], ids[1:])
    assert loss.item() == pytest.approx(5.3319, abs=1e-4)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_real_weights_have_parity(dialect: str) -> None:
    assert check_parity(dialect, "gpt2", text="The dog was found in a field near the river.").passed
