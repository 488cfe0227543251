"""Tiny models with the names of Hugging Face's: what NeMo Automodel loads, beside the zoo of `harness.models`.

Layers lie in module lists, as its parallelizer wants them; islands are what checkpoints keep in fp32 (`A_log`,
`dt_bias`), in a module of their own as Automodel's models hold them, or beside half-precision siblings.
"""

from __future__ import annotations

from harness.models import ZOO, BufferSpec, ModelSpec, ModuleSpec, ParamSpec


def _weight(path: str, *shape: int, trainable: str = "yes") -> ModuleSpec:
    return ModuleSpec(path, (ParamSpec("weight", shape, trainable=trainable, layer=".layers." in path),), unit=False)


def _layer(path: str) -> tuple[ModuleSpec, ...]:
    """A decoder layer's first and last modules."""
    return (
        _weight(f"{path}.input_layernorm", 5),
        _weight(f"{path}.self_attn.q_proj", 6, 5),
        _weight(f"{path}.self_attn.o_proj", 5, 6),
        _weight(f"{path}.mlp.up_proj", 7, 5),
        _weight(f"{path}.mlp.down_proj", 5, 7),
    )


def _gates(trainable: str = "yes") -> tuple[ParamSpec, ...]:
    """What a gated delta net or a state-space layer keeps in fp32."""
    return (
        ParamSpec("A_log", (6,), island=True, trainable=trainable, layer=True),
        ParamSpec("dt_bias", (6,), island=True, trainable=trainable, layer=True),
    )


def _delta_layer(path: str) -> tuple[ModuleSpec, ...]:
    return (
        _weight(f"{path}.input_layernorm", 5),
        _weight(f"{path}.linear_attn.in_proj", 6, 5),
        ModuleSpec(f"{path}.linear_attn._fp32_params", _gates(), unit=False),
        _weight(f"{path}.linear_attn.out_proj", 5, 6),
    )


def _tower(path: str) -> tuple[ModuleSpec, ...]:
    """A frozen vision tower: buffers in fp32, one of them not in the checkpoint, and an island inside."""
    frozen = "no"
    return (
        ModuleSpec(
            f"{path}.patch_embed",
            (ParamSpec("weight", (6, 4), trainable=frozen), ParamSpec("bias", (6,), trainable=frozen)),
            (BufferSpec("std", (4,)), BufferSpec("inv_freq", (3,), persistent=False), BufferSpec("seen", (), "int64")),
            unit=False,
        ),
        _weight(f"{path}.layers.0.proj", 6, 6, trainable=frozen),
        ModuleSpec(f"{path}.layers.0.gate", _gates(frozen), unit=False),
    )


HIDDEN, HEADS, FEED_FORWARD, VOCABULARY, LAYERS = 8, 2, 12, 11, 2
"""Of the real Llama."""


def _real_layer(path: str) -> tuple[ModuleSpec, ...]:
    """A layer of transformers' LlamaForCausalLM."""
    square, wide = (HIDDEN, HIDDEN), (FEED_FORWARD, HIDDEN)
    return (
        *(_weight(f"{path}.self_attn.{name}_proj", *square) for name in ("q", "k", "v", "o")),
        *(_weight(f"{path}.mlp.{name}_proj", *wide) for name in ("gate", "up")),
        _weight(f"{path}.mlp.down_proj", HIDDEN, FEED_FORWARD),
        _weight(f"{path}.input_layernorm", HIDDEN),
        _weight(f"{path}.post_attention_layernorm", HIDDEN),
    )


REAL_LLAMA = "llama"

HF_SPECS = (
    ModelSpec(
        REAL_LLAMA,
        "transformers' own LlamaForCausalLM, built from its config; the probe stands in for its forward.",
        (
            _weight("model.embed_tokens", VOCABULARY, HIDDEN),
            *(module for index in range(LAYERS) for module in _real_layer(f"model.layers.{index}")),
            _weight("model.norm", HIDDEN),
            _weight("lm_head", VOCABULARY, HIDDEN),
        ),
        bugs=("AM-2419a",),
    ),
    ModelSpec(
        "hf_llama",
        "A decoder with the names of a Llama: every parameter in the bulk's dtype.",
        (
            _weight("model.embed_tokens", 11, 5),
            *_layer("model.layers.0"),
            *_layer("model.layers.1"),
            _weight("model.norm", 5),
            _weight("lm_head", 11, 5),
        ),
        bugs=("AM-2419a",),
    ),
    ModelSpec(
        "hf_delta",
        "Gated delta nets whose A_log and dt_bias are in fp32, in a module of their own, beside a plain layer.",
        (
            _weight("model.embed_tokens", 11, 5),
            *_delta_layer("model.layers.0"),
            *_layer("model.layers.1"),
            _weight("model.norm", 5),
            _weight("lm_head", 11, 5),
        ),
        bugs=("AM-2419a", "AM-2419b", "AM-2419c", "AM-2484"),
    ),
    ModelSpec(
        "hf_vision",
        "A frozen vision tower below the model, with buffers and islands of its own, that feeds trained layers.",
        (
            *_tower("model.vision_tower"),
            _weight("model.multi_modal_projector", 5, 6),
            *_delta_layer("model.language_model.layers.0"),
            _weight("lm_head", 11, 5),
        ),
        bugs=("AM-2419d", "AM-2549"),
    ),
)

ZOO.update({spec.name: spec for spec in HF_SPECS})
