"""Tiny models with the names of Megatron-Core's layers, which the systems that drive them build for real."""

from __future__ import annotations

from shardproof.models import GroupSpec, ModelSpec, ModuleSpec, ParamSpec

HALVES = (("_w", 1), ("_v", 1))

GDN_IN_PROJ = ((".query", 4), (".key", 4), (".value", 6), (".z", 6), (".beta", 2), (".alpha", 2))
"""What a gated delta net's input projection is fused of; its convolution has the first three."""


def _gated(layer: int, shape: tuple[int, ...]) -> ModuleSpec:
    """The fused projection of a SwiGLU layer: gate and up in one weight, each half of which tensor parallelism
    shards."""
    name = "weight" if len(shape) > 2 else "bias"
    param = ParamSpec(name, shape, tp_dim=1, sections=HALVES, stacked=True)
    return ModuleSpec(f"decoder.layers.{layer}.mlp.linear_fc1", (param,))


def _gpt_layer(path: str, hidden: int, ffn: int) -> tuple[ModuleSpec, ...]:
    """One transformer layer as Megatron-Core's local spec names and orders it: column-parallel weights are sharded over
    their rows, row-parallel ones over their columns; biases and norms are not decayed (group 1)."""

    def norm(name: str) -> ModuleSpec:
        params = (ParamSpec("weight", (hidden,), group=1), ParamSpec("bias", (hidden,), group=1))
        return ModuleSpec(f"{path}.{name}", params)

    def linear(name: str, out: int, inp: int, tp_dim: int) -> ModuleSpec:
        bias = ParamSpec("bias", (out,), group=1, tp_dim=0 if tp_dim == 0 else None)
        return ModuleSpec(f"{path}.{name}", (ParamSpec("weight", (out, inp), tp_dim=tp_dim), bias))

    return (
        norm("input_layernorm"),
        linear("self_attention.linear_proj", hidden, hidden, 1),
        linear("self_attention.linear_qkv", 3 * hidden, hidden, 0),
        norm("pre_mlp_layernorm"),
        linear("mlp.linear_fc1", ffn, hidden, 0),
        linear("mlp.linear_fc2", hidden, ffn, 1),
    )


MODELS = (
    ModelSpec(
        "gated",
        "Fused gate/up projections, named as Megatron-Core's: a rank's shard ends inside a half, or is just one.",
        (
            _gated(0, (2, 6, 3)),
            _gated(1, (2, 10, 2)),
            _gated(2, (2, 4)),
        ),
        bugs=("MLM-4423",),
    ),
    ModelSpec(
        "gdn",
        "A gated delta net's fused projections, of sections of several sizes, named as Megatron-Core's.",
        (
            ModuleSpec(
                "decoder.layers.0.self_attention.in_proj",
                (ParamSpec("weight", (24, 3), tp_dim=0, sections=GDN_IN_PROJ),),
            ),
            ModuleSpec(
                "decoder.layers.0.self_attention.conv1d",
                (
                    ParamSpec("weight", (14, 1, 2), tp_dim=0, sections=GDN_IN_PROJ[:3]),
                    ParamSpec("bias", (14,), tp_dim=0, sections=GDN_IN_PROJ[:3]),
                ),
            ),
        ),
        bugs=("MLM-4423",),
    ),
    ModelSpec(
        "gpt",
        "A transformer with tied embeddings, named as Megatron-Core's GPTModel, which that system really builds.",
        (
            ModuleSpec("embedding.word_embeddings", (ParamSpec("weight", (16, 8), tp_dim=0),)),
            ModuleSpec("embedding.position_embeddings", (ParamSpec("weight", (4, 8)),)),
            *_gpt_layer("decoder.layers.0", hidden=8, ffn=16),
            ModuleSpec(
                "decoder.final_layernorm", (ParamSpec("weight", (8,), group=1), ParamSpec("bias", (8,), group=1))
            ),
        ),
        (GroupSpec(), GroupSpec(1.0, 0.0)),
        bugs=("MLM-2777", "MLM-5835a"),
    ),
)
