"""Tiny models with the names of Hugging Face's: what NeMo Automodel loads, beside the zoo of `shardproof.models`.

Layers lie in module lists, as its parallelizer wants them; islands are what checkpoints keep in fp32 (`A_log`,
`dt_bias`), in a module of their own as Automodel's models hold them, or beside half-precision siblings.
"""

from __future__ import annotations

from dataclasses import replace

from shardproof.models import BufferSpec, GroupSpec, ModelSpec, ModuleSpec, ParamSpec


def _weight(path: str, *shape: int, trainable: str = "yes", group: int = 0) -> ModuleSpec:
    cut = {"q_proj": 0, "in_proj": 0, "up_proj": 0, "o_proj": 1, "out_proj": 1, "down_proj": 1, "lm_head": 0}
    dim = cut.get(path.rpartition(".")[2])
    weight = ParamSpec("weight", shape, trainable=trainable, group=group, tp_dim=dim, layer=".layers." in path)
    return ModuleSpec(path, (weight,), unit=False)


def _layer(path: str) -> tuple[ModuleSpec, ...]:
    """A decoder layer's first and last modules."""
    return (
        _weight(f"{path}.input_layernorm", 5),
        _weight(f"{path}.self_attn.q_proj", 6, 5),
        _weight(f"{path}.self_attn.o_proj", 5, 6),
        _weight(f"{path}.mlp.up_proj", 7, 5),
        _weight(f"{path}.mlp.down_proj", 5, 7),
    )


def _gates(trainable: str = "yes", heads: int = 6) -> tuple[ParamSpec, ...]:
    """What a gated delta net or a state-space layer keeps in fp32: `A_log` and `dt_bias`."""
    return (
        ParamSpec("A_log", (heads,), island=True, trainable=trainable, layer=True),
        ParamSpec("dt_bias", (heads,), island=True, trainable=trainable, layer=True),
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


HIDDEN, HEADS, FEED_FORWARD, VOCABULARY, LAYERS, KERNEL, STATE = 8, 2, 12, 11, 2, 4, 4
"""Of the real models."""


def _real_layer(path: str) -> tuple[ModuleSpec, ...]:
    """A layer of transformers' LlamaForCausalLM."""
    return (
        *(_weight(f"{path}.self_attn.{name}_proj", HIDDEN, HIDDEN) for name in "qkvo"),
        *_real_mlp(path),
    )


def _real_mlp(path: str) -> tuple[ModuleSpec, ...]:
    return (
        *(_weight(f"{path}.mlp.{name}_proj", FEED_FORWARD, HIDDEN) for name in ("gate", "up")),
        _weight(f"{path}.mlp.down_proj", HIDDEN, FEED_FORWARD),
        _weight(f"{path}.input_layernorm", HIDDEN),
        _weight(f"{path}.post_attention_layernorm", HIDDEN),
    )


def _real_delta(path: str) -> tuple[ModuleSpec, ...]:
    """The linear attention of Automodel's Qwen3.5."""
    return (
        _weight(f"{path}.conv1d", 3 * HIDDEN, 1, KERNEL),
        _weight(f"{path}.norm", HIDDEN // HEADS),
        _weight(f"{path}.out_proj", HIDDEN, HIDDEN),
        _weight(f"{path}.in_proj_qkv", 3 * HIDDEN, HIDDEN),
        _weight(f"{path}.in_proj_z", HIDDEN, HIDDEN),
        *(_weight(f"{path}.in_proj_{name}", HEADS, HIDDEN) for name in "ba"),
        ModuleSpec(f"{path}._fp32_params", _gates(heads=HEADS), unit=False),
    )


def _real_attention(path: str) -> tuple[ModuleSpec, ...]:
    """The gated attention of Qwen3.5: its queries come with their gate."""
    return (
        _weight(f"{path}.q_proj", 2 * HIDDEN, HIDDEN),
        *(_weight(f"{path}.{name}_proj", HIDDEN, HIDDEN) for name in "kvo"),
        *(_weight(f"{path}.{name}_norm", HIDDEN // HEADS) for name in "qk"),
    )


def _real_mamba(path: str) -> tuple[ModuleSpec, ...]:
    """The state-space mixer of Automodel's Nemotron-H."""
    return (
        _weight(f"{path}.in_proj", 2 * HIDDEN + 2 * STATE + HEADS, HIDDEN),
        ModuleSpec(f"{path}.conv1d", _biased(HIDDEN + 2 * STATE, 1, KERNEL), unit=False),
        ModuleSpec(
            f"{path}._fp32_params",
            (*_gates(heads=HEADS), ParamSpec("D", (HEADS,), island=True, layer=True)),
            unit=False,
        ),
        _weight(f"{path}.norm", HIDDEN),
        _weight(f"{path}.out_proj", HIDDEN, HIDDEN),
    )


def _biased(*shape: int) -> tuple[ParamSpec, ...]:
    return ParamSpec("weight", shape, layer=True), ParamSpec("bias", shape[:1], layer=True)


REAL_LLAMA, REAL_QWEN, REAL_NEMOTRON = "llama", "qwen3_5", "nemotron_h"
REAL = (REAL_LLAMA, REAL_QWEN, REAL_NEMOTRON)

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
        REAL_QWEN,
        "Automodel's own Qwen3_5ForCausalLM: a gated delta net and attention; the probe stands in for its forward.",
        (
            _weight("model.embed_tokens", VOCABULARY, HIDDEN),
            *_real_delta("model.layers.0.linear_attn"),
            *_real_mlp("model.layers.0"),
            *_real_attention("model.layers.1.self_attn"),
            *_real_mlp("model.layers.1"),
            _weight("model.norm", HIDDEN),
            _weight("lm_head", VOCABULARY, HIDDEN),
        ),
        bugs=("AM-2419c", "AM-2484"),
    ),
    ModelSpec(
        REAL_NEMOTRON,
        "Automodel's own NemotronHForCausalLM: a state-space mixer and attention; the probe stands in for its forward.",
        (
            _weight("model.embed_tokens", VOCABULARY, HIDDEN),
            _weight("model.layers.0.norm", HIDDEN),
            *_real_mamba("model.layers.0.mixer"),
            _weight("model.layers.1.norm", HIDDEN),
            *(_weight(f"model.layers.1.mixer.{name}_proj", HIDDEN, HIDDEN) for name in "qkvo"),
            _weight("model.norm", HIDDEN),
            _weight("lm_head", VOCABULARY, HIDDEN),
        ),
        bugs=("AM-2419c",),
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
        "hf_dropout",
        "A decoder with dropout behind its embeddings and behind its last norm.",
        (
            replace(_weight("model.embed_tokens", 11, 5), draws="replicated"),
            *_layer("model.layers.0"),
            replace(_weight("model.norm", 5), draws="replicated"),
            _weight("lm_head", 11, 5),
        ),
        bugs=("AM-3437",),
    ),
    ModelSpec(
        "hf_groups",
        "A decoder of three param groups: the last norm has no weight decay, the head a quarter of the learning rate.",
        (
            _weight("model.embed_tokens", 11, 5),
            *_layer("model.layers.0"),
            *_layer("model.layers.1"),
            _weight("model.norm", 5, group=1),
            _weight("lm_head", 11, 5, group=2),
        ),
        (GroupSpec(), GroupSpec(1.0, 0.0), GroupSpec(0.25)),
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

MODELS = HF_SPECS
