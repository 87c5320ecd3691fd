"""Models of every architecture of ouzel.transformers' table, tiny and random, and how they are compared."""

import contextlib
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")
transformers.logging.set_verbosity_error()

import ouzel.transformers  # noqa: E402


@contextlib.contextmanager
def without(package):
    """transformers looks for faster kernels when a model's module is imported: these need a GPU."""
    before = sys.modules.get(package)
    sys.modules[package] = None
    try:
        yield
    finally:
        sys.modules.pop(package)
        if before is not None:
            sys.modules[package] = before


LINEAR_AND_FULL = ["linear_attention", "full_attention"]
COMMON = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    tie_word_embeddings=False,
)
GATED_DELTA = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=16,
    layer_types=LINEAR_AND_FULL,
)
EXPERTS = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)
LATENT = dict(
    num_key_value_heads=4, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
)
MAMBA2 = dict(
    mamba_n_heads=8, mamba_d_head=8, mamba_d_state=16, mamba_n_groups=2, mamba_chunk_size=8
)
MODELS = {
    "bailing_hybrid": dict(
        LATENT,
        **EXPERTS,
        layer_types=LINEAR_AND_FULL,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        num_mtp_layers=0,
    ),
    "bamba": dict(MAMBA2, attn_layer_indices=[1]),
    "falcon_h1": dict(MAMBA2, mamba_d_ssm=64, mamba_rms_norm=True),
    "falcon_mamba": dict(state_size=8, time_step_rank=4),
    "granitemoehybrid": dict(
        MAMBA2,
        layer_types=LINEAR_AND_FULL,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
    ),
    "jamba": dict(mamba_d_state=8, mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1, num_experts=2),
    "kimi_linear": dict(
        LATENT,
        linear_head_dim=8,
        linear_num_heads=4,
        layer_types=LINEAR_AND_FULL,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        q_lora_rank=None,
    ),
    "lara_mini": GATED_DELTA,
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "lfm2_moe": dict(EXPERTS, layer_types=["conv", "full_attention"], num_dense_layers=1),
    "lfm3": dict(EXPERTS, layer_types=["conv", "full_attention"], num_dense_layers=1),
    "mamba": dict(state_size=8, time_step_rank=4),
    "mamba2": dict(num_heads=8, head_dim=8, state_size=16, n_groups=2, chunk_size=8),
    "nemotron_h": dict(
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=8,
        layers_block_type=["mamba", "attention"],
    ),
    "olmo_hybrid": {**GATED_DELTA, "linear_num_key_heads": 4},
    "qwen3_5_moe_text": {**GATED_DELTA, **EXPERTS},
    "qwen3_5_text": GATED_DELTA,
    "qwen3_next": {**GATED_DELTA, **EXPERTS},
    "qwen4_exp_text": dict(
        GATED_DELTA,
        **EXPERTS,
        hc_lowrank=8,
        hc_count=2,
        indexer_n_heads=4,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=16,
        indexer_compress_ratio=2,
        ple_layer_ids=[],
    ),
    "recurrent_gemma": dict(
        lru_width=32, block_types=["recurrent", "attention"], attention_window_size=16
    ),
    "rwkv": dict(attention_hidden_size=32, context_length=64),
    "zamba": dict(mamba_d_state=8, mamba_dt_rank=4, layers_block_type=["mamba", "hybrid"]),
    "zamba2": dict(
        mamba_headdim=8,
        mamba_d_state=16,
        mamba_ngroups=2,
        n_mamba_heads=8,
        chunk_size=8,
        layers_block_type=["mamba", "hybrid"],
        num_mem_blocks=1,
    ),
}
every_model = pytest.mark.parametrize("name", MODELS)
some_models = pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear", "mamba2", "mamba"])


def model(name, dtype=torch.float32):
    """With weights large enough for answers to differ."""
    with without("fla"), without("mamba_ssm"), without("causal_conv1d"):
        try:
            config = transformers.AutoConfig.for_model(name, **{**COMMON, **MODELS[name]})
        except ValueError:
            pytest.skip(f"transformers {transformers.__version__} has no {name}")
        torch.manual_seed(0)
        made = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in made.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return made.to(dtype)


def tokens(*shape, seed=1):
    return torch.randint(2, 96, shape, generator=torch.Generator().manual_seed(seed))


def logits(m, ids, **options):
    with torch.no_grad():
        return m(ids, **options).logits


def both(m, compute):
    """What a model computes by itself and with Ouzel."""
    expected = compute()
    with ouzel.transformers.accelerate(m):
        return expected, compute()


def close(got, expected, bound=1e-4):
    torch.testing.assert_close(got, expected, rtol=0, atol=bound * max(1, expected.abs().max().item()))


def mixer(m):
    """The first layer that Ouzel knows, without its norm."""
    return next(
        module
        for module in m.modules()
        if type(module).__name__ in ouzel.transformers.LAYERS and any(module.children())
    )


@pytest.fixture(scope="module")
def one_thread():
    """Threads that take turns cost small models more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
