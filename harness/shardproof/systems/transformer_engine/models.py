"""Tiny models made of TransformerEngine's own layers, which this system builds for real."""

from __future__ import annotations

from shardproof.models import GroupSpec, ModelSpec, ModuleSpec, ParamSpec


def _te(path: str, norm: bool, *weights: tuple[str, int, int, int], bias: bool = True, unit: bool = True) -> ModuleSpec:
    """The parameters of one layer of TransformerEngine, in its order.

    With `norm` its layer norm's come first, as wide as the first weight; then each weight (name, out, in, tp_dim), with
    or without its bias. Biases and norms are in group 1, which does not decay.
    """
    params: list[ParamSpec] = []
    if norm:
        params += [ParamSpec(f"layer_norm_{name}", (weights[0][2],), group=1) for name in ("weight", "bias")]
    for name, out, inp, tp_dim in weights:
        params.append(ParamSpec(name, (out, inp), tp_dim=tp_dim))
        if bias:
            bias_dim = 0 if tp_dim == 0 else None
            params.append(ParamSpec(name.replace("weight", "bias"), (out,), group=1, tp_dim=bias_dim))
    return ModuleSpec(path, tuple(params), unit=unit)


MODELS = (
    ModelSpec(
        "te_layers",
        "TransformerEngine's Linear, LayerNormLinear, LayerNormMLP, LayerNorm and RMSNorm, which that system builds.",
        (
            ModuleSpec("norm", (ParamSpec("weight", (6,), group=1), ParamSpec("bias", (6,), group=1))),
            _te("qkv", True, ("weight", 12, 6, 0)),
            _te("proj", False, ("weight", 6, 4, 1)),
            ModuleSpec("rms", (ParamSpec("weight", (6,), group=1),)),
            _te("mlp", True, ("fc1_weight", 10, 6, 0), ("fc2_weight", 6, 10, 1)),
        ),
        (GroupSpec(), GroupSpec(1.0, 0.0)),
        bugs=("TE-2713e", "TE-2713f"),
    ),
    ModelSpec(
        "te_no_bias",
        "The same without biases, which TransformerEngine stands empty tensors in for.",
        (
            _te("qkv", True, ("weight", 12, 6, 0), bias=False),
            _te("proj", False, ("weight", 6, 4, 1), bias=False),
            _te("mlp", True, ("fc1_weight", 10, 6, 0), ("fc2_weight", 6, 10, 1), bias=False),
        ),
        (GroupSpec(), GroupSpec(1.0, 0.0)),
        bugs=("TE-2713b", "TE-2713c"),
    ),
    ModelSpec(
        "te_attention",
        "DotProductAttention with a learnable softmax offset a head, between two linear layers.",
        (
            _te("qkv", True, ("weight", 12, 4, 0)),
            ModuleSpec("attention", (ParamSpec("softmax_offset", (2,), tp_dim=0),)),
            _te("proj", False, ("weight", 4, 4, 1)),
        ),
        (GroupSpec(), GroupSpec(1.0, 0.0)),
        bugs=("TE-2713e",),
    ),
    ModelSpec(
        "te_grouped",
        "GroupedLinear, which TransformerEngine keeps as one weight an expert, behind a Linear.",
        (
            ModuleSpec("router", (ParamSpec("weight", (3, 5)),)),
            _te("experts", False, *((f"weight{i}", 8, 5, 0) for i in range(3)), bias=False),
        ),
        bugs=("TE-2713a",),
    ),
    ModelSpec(
        "te_transformer",
        "A TransformerLayer of TransformerEngine, one unit, with query, key and value as weights of their own.",
        (
            ModuleSpec("layers.0"),
            _te(
                "layers.0.self_attention.layernorm_qkv",
                True,
                ("query_weight", 8, 8, 0),
                ("key_weight", 8, 8, 0),
                ("value_weight", 8, 8, 0),
                unit=False,
            ),
            _te("layers.0.self_attention.proj", False, ("weight", 8, 8, 1), unit=False),
            _te("layers.0.layernorm_mlp", True, ("fc1_weight", 16, 8, 0), ("fc2_weight", 8, 16, 1), unit=False),
        ),
        (GroupSpec(), GroupSpec(1.0, 0.0)),
        bugs=("TE-2713e", "TE-2713f"),
    ),
)
