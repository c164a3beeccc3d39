"""The zoo of hand-written GPT-2s, mutations of their source, and models that are not GPT-2."""

from __future__ import annotations

from tests.adaptation.catalogue import (
    mutations_activation,
    mutations_embeddings_and_head,
    mutations_heads,
    mutations_norms,
    mutations_scores,
    mutations_sizes,
    mutations_tokens,
    mutations_wiring,
)
from tests.adaptation.catalogue.entries import ZOO, Model, Mutation, composed, load_class
from tests.adaptation.catalogue.models import FOREIGN, MODELS

MUTATIONS: list[Mutation] = [
    *mutations_activation.MUTATIONS,
    *mutations_norms.MUTATIONS,
    *mutations_scores.MUTATIONS,
    *mutations_heads.MUTATIONS,
    *mutations_wiring.MUTATIONS,
    *mutations_embeddings_and_head.MUTATIONS,
    *mutations_sizes.MUTATIONS,
    *mutations_tokens.MUTATIONS,
]


__all__ = [
    "FOREIGN",
    "MODELS",
    "MUTATIONS",
    "ZOO",
    "Model",
    "Mutation",
    "composed",
    "load_class",
]
