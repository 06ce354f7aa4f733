"""Tiny random models of the decoder families that labkit promises to run, and of those that it must refuse.

    model = tiny("gemma2", layers=6)          # any name of FAMILIES or VARIANTS
    model = REFUSED["mamba"]()                # Backbone(model) raises LabkitError

Every model has a vocabulary of 61, a width of 32 (a multiple of its heads), four heads (two of keys and values
where the family shares them) and no special tokens, so that generation never stops early. Weights are large and
no bias, norm or sink is trivial: leave out one small thing and the text changes. Nothing is downloaded.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, cycle, islice
from typing import Any

import torch
import transformers as hf
from torch import nn

WINDOW = 5
"""Sliding window of every family that has one: shorter than the tests' prompts, so that it always matters."""

GAIN = 2.0
"""Standard deviation of a matrix's output for a unit-variance input; 1 gives dull text, 3 gives chaos."""


@dataclass(frozen=True)
class Family:
    """A config class and what its tiny model sets beyond `COMMON`.

    `cycled` are settings of one value a layer, given as a pattern that is repeated to the number of layers.
    `sdpa` is whether sdpa computes what the model means: it has no soft-cap and no sinks, so the families that
    need one get eager attention instead (transformers itself refuses, but only from 5.24 on for Gemma 2).
    `strict` is whether cached decoding in float64 repeats a full forward to about 1e-13; the others hold a
    float32 product or softmax whose rounding depends on the number of rows, and agree to about 1e-6.
    """

    config: type[hf.PreTrainedConfig]
    settings: Mapping[str, Any] = field(default_factory=dict)
    cycled: Mapping[str, Sequence] = field(default_factory=dict)
    sdpa: bool = True
    strict: bool = True

    def __call__(
        self, *, dtype=torch.float64, layers: int = 4, seed: int = 0, vocab: int = 61, attention: str = "sdpa"
    ) -> hf.PreTrainedModel:
        """The tiny model; see `tiny`."""
        settings = COMMON | {"num_hidden_layers": layers, "vocab_size": vocab} | dict(self.settings)
        settings |= {key: list(islice(cycle(pattern), layers)) for key, pattern in self.cycled.items()}
        if attention == "sdpa" and not self.sdpa:
            attention = "eager"
        return build(self.config, settings, seed, dtype=dtype, attn_implementation=attention)


COMMON = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "max_position_embeddings": 128}
GROUPED = {"num_key_value_heads": 2}
HEAD_DIM = {**GROUPED, "head_dim": 8}
MIXED = {"layer_types": ("sliding_attention", "full_attention")}
SLIDING = {"sliding_window": WINDOW}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
"""The default, grouped_mm, has no float64 kernel."""
UNTIED = {"tie_word_embeddings": False}
GEMMA = {**HEAD_DIM, **UNTIED, "query_pre_attn_scalar": 6}
"""Untied, since Gemma scales its embeddings up: a tied head would repeat one token for ever."""
GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 0.7, "residual_multiplier": 0.8, "attention_multiplier": 0.5}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
DEEPSEEK = {
    **MLA,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "experts_implementation": "batched_mm",
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OPT = {"ffn_dim": 48, "dropout": 0.0}
FALCON = {"num_kv_heads": 2, "new_decoder_architecture": True, "ffn_hidden_size": 48}
ORIGINAL = 32
"""Positions before the two rope kinds that depend on the length rescale."""
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}

FAMILIES: dict[str, Family] = {
    "llama": Family(hf.LlamaConfig, GROUPED),
    "mistral": Family(hf.MistralConfig, HEAD_DIM | SLIDING),
    "ministral": Family(hf.MinistralConfig, HEAD_DIM | SLIDING),
    "qwen2": Family(hf.Qwen2Config, GROUPED),
    "qwen3": Family(hf.Qwen3Config, HEAD_DIM),
    "phi3": Family(hf.Phi3Config, GROUPED),
    "gemma": Family(hf.GemmaConfig, HEAD_DIM | UNTIED),
    "gemma2": Family(
        hf.Gemma2Config,
        GEMMA | SLIDING | {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 12.0},
        MIXED,
        sdpa=False,
        strict=False,
    ),
    "gemma3": Family(hf.Gemma3TextConfig, GEMMA | SLIDING, MIXED),
    "granite": Family(hf.GraniteConfig, GROUPED | GRANITE),
    "cohere": Family(hf.CohereConfig, GROUPED | {"logit_scale": 0.6, "use_qk_norm": True}),
    "cohere2": Family(hf.Cohere2Config, GROUPED | SLIDING | {"logit_scale": 0.6}, MIXED),
    "olmo2": Family(hf.Olmo2Config, GROUPED),
    "smollm3": Family(hf.SmolLM3Config, GROUPED, {"no_rope_layers": (1, 0)}),
    "starcoder2": Family(hf.Starcoder2Config, GROUPED | {"residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "stablelm": Family(hf.StableLmConfig, GROUPED | {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "gpt_neox": Family(hf.GPTNeoXConfig, {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "gpt2": Family(hf.GPT2Config, {"n_inner": 48, **NO_DROPOUT}),
    "opt": Family(hf.OPTConfig, OPT | {"word_embed_proj_dim": 24}),
    "glm4": Family(hf.Glm4Config, HEAD_DIM),
    "exaone4": Family(hf.Exaone4Config, GROUPED | SLIDING, MIXED),
    "gpt_oss": Family(hf.GptOssConfig, HEAD_DIM | SLIDING | EXPERTS, MIXED, sdpa=False),
    "mixtral": Family(hf.MixtralConfig, HEAD_DIM | EXPERTS),
    "deepseek_v3": Family(hf.DeepseekV3Config, DEEPSEEK, strict=False),
}

VARIANTS: dict[str, Family] = {
    "falcon": Family(hf.FalconConfig, FALCON | {"alibi": False}),
    "opt_unprojected": Family(hf.OPTConfig, OPT),
    "llama_tied": Family(hf.LlamaConfig, GROUPED | {"tie_word_embeddings": True}),
    "llama_group3": Family(hf.LlamaConfig, {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "llama_dynamic": Family(
        hf.LlamaConfig, GROUPED | {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL}
    ),
    "phi3_longrope": Family(
        hf.Phi3Config, GROUPED | {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL}
    ),
}


def tiny(name: str, **kwargs) -> hf.PreTrainedModel:
    """A tiny causal LM of a family or variant, in eval mode; the same weights (up to rounding) in every dtype.

    Keywords: dtype=torch.float64, layers=4, seed=0, vocab=61, attention="sdpa" (eager where sdpa is wrong).
    """
    return (FAMILIES.get(name) or VARIANTS[name])(**kwargs)


def tolerance(name: str) -> float:
    """How far two float64 computations of the same logits may differ in this family or variant."""
    return 1e-9 if (FAMILIES.get(name) or VARIANTS[name]).strict else 1e-5


def prompts(count: int, vocab: int = 61, seed: int = 0) -> list[list[int]]:
    """Random prompts of 1 to 12 tokens; the first two are the shortest and the longest."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 12, *torch.randint(1, 13, (max(count - 2, 0),), generator=generator).tolist()][:count]
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]


def build(config: type, settings: Mapping[str, Any], seed: int = 0, auto: type = hf.AutoModelForCausalLM, **kwargs):
    """The model that `auto` makes, with `redraw`n weights and no special tokens; the global RNG is left alone."""
    made = config(**copy.deepcopy(dict(settings)))
    for token in {"bos_token_id", "eos_token_id", "pad_token_id"} - set(settings):
        setattr(made, token, None)  # not as an argument: Glm4Config takes None for "use my default"
    with torch.random.fork_rng(devices=[]):
        model = auto.from_config(made, **kwargs).eval()
    redraw(model, torch.Generator().manual_seed(seed))
    return model


@torch.no_grad()
def redraw(model: nn.Module, generator: torch.Generator) -> None:
    """Give every matrix entries of variance GAIN² over its smaller side, and every vector and norm a shake of 0.2.

    The smaller side is the fan-in of nearly all of them; GPT-2 and gpt-oss store matrices the other way round.
    Norms keep their first value, which is 1 or, in Gemma, 0; nothing else of the first weights is left.
    """
    biases = ((name, x) for name, x in model.named_buffers() if name.endswith("bias"))
    for name, x in chain(model.named_parameters(), biases):
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        if "norm" in name or ".ln_" in name:
            x += 0.2 * noise
        elif x.ndim < 2 or name.endswith("bias"):
            x.copy_(0.2 * noise)
        else:
            x.copy_(GAIN / min(x.shape[-2:]) ** 0.5 * noise)


SMALL = COMMON | {"vocab_size": 61, "num_hidden_layers": 4}
STATE = {"mamba_d_state": 4, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "experts_implementation": "batched_mm",
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
HYBRID = {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "experts_implementation": "batched_mm"}
BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
BART_HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 128}
SEQ2SEQ = {"vocab_size": 61, "pad_token_id": 0, "decoder_start_token_id": 0}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}

REFUSED: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "mamba": partial(build, hf.MambaConfig, {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}),
    "qwen3_next": partial(build, hf.Qwen3NextConfig, SMALL | HEAD_DIM | DELTA),
    "jamba": partial(build, hf.JambaConfig, SMALL | GROUPED | STATE | HYBRID),
    "recurrent_gemma": partial(build, hf.RecurrentGemmaConfig, SMALL | GROUPED | {"attention_window_size": WINDOW}),
    "bloom": partial(build, hf.BloomConfig, {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon_alibi": partial(build, hf.FalconConfig, SMALL | {"alibi": True, "ffn_hidden_size": 48}),
    "t5": partial(build, hf.T5Config, SEQ2SEQ | T5, auto=hf.AutoModelForSeq2SeqLM),
    "bart": partial(build, hf.BartConfig, SEQ2SEQ | BART | BART_HEADS, auto=hf.AutoModelForSeq2SeqLM),
}
"""Builders of models that labkit must refuse: recurrent states, alibi biases, encoder-decoders."""
