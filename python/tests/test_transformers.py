"""ouzel.transformers: models of every architecture of the table, tiny and random, against themselves."""

import contextlib
import copy
import io
import pathlib
import pickle
import sys
import warnings

import pytest

import ouzel

torch = pytest.importorskip("torch")


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


transformers = pytest.importorskip("transformers", minversion="5.0")
transformers.logging.set_verbosity_error()

import ouzel.transformers  # noqa: E402

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


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads that take turns cost small models more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def test_every_row_of_the_table_is_tested():
    """But for norms, which come with their layers."""
    tested = set()
    for name in MODELS:
        tested |= {type(module).__name__ for module in model(name).modules()}
    assert set(ouzel.transformers.LAYERS) <= tested


@every_model
def test_logits_and_gradients(name):
    m, ids = model(name), tokens(2, 37)

    def step(training):
        m.train(training)
        m.zero_grad()
        out = m(ids, labels=ids, use_cache=False)
        out.loss.backward()
        return out.logits.detach(), {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}

    for training in (False, True):
        (expected, expected_gradients), (got, gradients) = both(m, lambda: step(training))
        close(got, expected)
        assert gradients.keys() == expected_gradients.keys()
        for n, gradient in gradients.items():
            largest = expected_gradients[n].abs().max().item()
            torch.testing.assert_close(
                gradient, expected_gradients[n], rtol=0, atol=1e-3 * largest + 1e-7, msg=n
            )


@every_model
def test_generation(name):
    """Greedy tokens of a batch with left padding, with the cache and without."""
    m, ids = model(name), tokens(1 if name == "rwkv" else 2, 11)
    mask = torch.ones_like(ids)
    if name != "rwkv":  # which takes no mask, and mixes up the rows of a batch with a state
        ids[0, :4], mask[0, :4] = 0, 0

    def generate(use_cache):
        options = dict(max_new_tokens=7, do_sample=False, use_cache=use_cache)
        return m.generate(ids, attention_mask=mask, **options)

    for use_cache in (True, False):
        expected, got = both(m, lambda: generate(use_cache))
        assert got.shape[1] == 18
        assert torch.equal(got, expected)
    if name != "recurrent_gemma":  # there padding is not masked
        with ouzel.transformers.accelerate(m):
            assert torch.equal(generate(True), generate(False))


@every_model
def test_prefill_decode_prefill(name):
    """Through the model's own cache; recurrent_gemma keeps its states in the modules."""
    m, ids = model(name), tokens(1 if name == "rwkv" else 2, 30)
    pieces = [ids[:, a:b] for a, b in [(0, 9), (9, 10), (10, 11), (11, 17), (17, 18), (18, 30)]]

    def run():
        kept, results = {}, []
        for piece in pieces:
            with torch.no_grad():
                out = m(piece, use_cache=True, **kept)
            kept = {k: out[k] for k in ("cache", "state") if k in out}
            results.append(out.logits)
        return torch.cat(results, dim=1)

    if name == "recurrent_gemma":
        pieces = pieces[:3]
    expected, got = both(m, run)
    close(got, expected)
    begin_anew = ["falcon_mamba", "jamba", "mamba", "zamba", "recurrent_gemma"]
    if name not in [*begin_anew, "bamba"]:  # whose attention counts positions from 0 in each call
        close(got, logits(m, ids))


@some_models
def test_decoding_where_gradients_are_enabled(name):
    m, ids = model(name), tokens(1, 6)

    def run():
        cache = m(ids[:, :5], use_cache=True).cache
        return m(ids[:, 5:], use_cache=True, cache=cache).logits

    expected, got = both(m, run)
    assert got.requires_grad
    close(got, expected)


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "falcon_h1", "lfm2"])
def test_static_cache(name):
    m, ids = model(name), tokens(2, 11)
    expected, got = both(
        m,
        lambda: m.generate(
            ids, max_new_tokens=7, do_sample=False, cache_implementation="static", disable_compile=True
        ),
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear", "mamba2", "mamba", "lfm2"])
def test_left_padding_changes_nothing(name):
    m, ids = model(name), tokens(1, 13)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], dim=1)
    mask = (padded != 0).long()
    with ouzel.transformers.accelerate(m):
        close(logits(m, padded, attention_mask=mask)[:, 5:], logits(m, ids))


def mixer(m):
    """The first layer that Ouzel knows, without its norm."""
    return next(
        module
        for module in m.modules()
        if type(module).__name__ in ouzel.transformers.LAYERS and any(module.children())
    )


@pytest.mark.parametrize("how", ["cu_seqlens", "seq_idx", "batch"])
@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear", "mamba2", "falcon_h1", "lfm2"])
def test_packed_rows_are_as_alone(name, how):
    m = model(name).train()
    layer, lengths = mixer(m), [4, 1, 9]
    x = torch.randn(2 if how == "batch" else 1, 14, 32, generator=torch.Generator().manual_seed(3))
    bounds = torch.tensor([0, 4, 5, 14], dtype=torch.int32)
    index = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(lengths))
    if how == "cu_seqlens":
        options = dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=9, max_length_k=9)
    elif how == "seq_idx":
        options = dict(seq_idx=index[None])
    else:
        options = dict(seq_idx=torch.stack([index, index.flip(0)]))
    with ouzel.transformers.accelerate(m):
        packed = layer(x, **options)
        for row in range(len(x)):
            sizes = lengths if row == 0 else lengths[::-1]
            alone = torch.cat([layer(piece) for piece in x[row : row + 1].split(sizes, dim=1)], dim=1)
            close(packed[row : row + 1], alone, 1e-5)


def test_documents_begin_where_positions_do():
    m, ids = model("recurrent_gemma"), tokens(2, 14)
    positions = torch.tensor([[*range(5), *range(9)], [*range(14)]])
    expected, got = both(m, lambda: logits(m, ids, position_ids=positions, use_cache=False))
    close(got, expected)
    assert not torch.equal(expected[0], logits(m, ids, use_cache=False)[0])


@pytest.mark.parametrize("name", ["mamba", "jamba"])
def test_mamba1_refuses_packed_rows(name):
    m = model(name)
    with ouzel.transformers.accelerate(m), pytest.raises(ValueError, match="keep packed sequences apart"):
        mixer(m)(torch.randn(1, 5, 32), seq_idx=torch.tensor([[0, 0, 1, 1, 1]]))


def test_packed_rows_do_not_continue_a_cache():
    m = model("qwen3_5_text")
    with ouzel.transformers.accelerate(m), torch.no_grad():
        out = m(tokens(1, 6), use_cache=True)
        with pytest.raises(ValueError, match="cu_seqlens ends at 5 .* do not continue a cache"):
            mixer(m)(torch.randn(1, 5, 32), cache=out.cache, cu_seq_lens_q=torch.tensor([0, 2, 5]))


@every_model
def test_undo_restores(name):
    m, ids = model(name), tokens(2, 19)
    before, keys = logits(m, ids), [set(module.__dict__) for module in m.modules()]
    handle = ouzel.transformers.accelerate(m)
    assert handle.layers and "Acceleration(" in repr(handle)
    assert [set(module.__dict__) for module in m.modules()] != keys
    with pytest.warns(UserWarning, match="accelerated already.*undo") as seen:
        again = ouzel.transformers.accelerate(m, context=ouzel.Context(threads=1))
    assert len(seen) == 1 and all(kind in str(seen[0].message) for kind in handle.layers)
    assert not again.layers
    again.undo()
    assert handle.layers
    handle.undo()
    assert [set(module.__dict__) for module in m.modules()] == keys
    assert torch.equal(logits(m, ids), before)
    handle.undo()  # once more does nothing


def test_context_manager_undoes_after_errors_too():
    m = model("mamba2")
    with pytest.raises(KeyError), ouzel.transformers.accelerate(m) as handle:
        assert handle.layers == {"Mamba2Mixer": 2, "MambaRMSNormGated": 2}
        raise KeyError
    assert not any("forward" in module.__dict__ for module in m.modules())


def test_unknown_models_are_left_alone_with_one_message():
    m = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9))
    with pytest.warns(UserWarning, match="^GPT2LMHeadModel has no layer.*docs/transformers.md") as seen:
        handle = ouzel.transformers.accelerate(m)
    assert len(seen) == 1 and not handle.layers
    with pytest.raises(TypeError, match="model is of type str"):
        ouzel.transformers.accelerate("gpt2")


def test_unknown_layers_are_left_alone_with_one_message():
    m = model("mamba2")
    layer = mixer(m)
    kind = type(layer)

    def forward(self, hidden_states, **_):
        return mamba2_chunk_scan(hidden_states)  # noqa: F821

    other = type("OtherMixer", (kind,), {"forward": forward})
    changed = type(kind.__name__, (torch.nn.Module,), {"forward": lambda self, x: x})
    layer.__class__ = other
    m.extra = changed()
    wrapped = [module for module in m.modules() if type(module) is kind][0]
    wrapped.forward = lambda *args, **kwargs: None
    with pytest.warns(UserWarning, match="leaves these layers as they are") as seen:
        handle = ouzel.transformers.accelerate(m)
    assert len(seen) == 1
    message = str(seen[0].message)
    assert "OtherMixer (a class that Ouzel does not know)" in message
    assert "Mamba2Mixer" in message
    assert handle.layers == {"MambaRMSNormGated": 2}


def test_undo_leaves_what_others_wrapped():
    m = model("mamba2")
    handle = ouzel.transformers.accelerate(m)
    layer = mixer(m)
    ours = layer.forward
    layer.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    with pytest.warns(UserWarning, match="Mamba2Mixer.forward was replaced again"):
        handle.undo()
    assert "forward" in layer.__dict__


@some_models
def test_copies_files_and_pickles(name, tmp_path):
    m, ids = model(name), tokens(1, 9)
    before = logits(m, ids)
    with ouzel.transformers.accelerate(m) as handle:
        got = logits(m, ids)
        assert torch.equal(logits(copy.deepcopy(m), ids), got)  # is accelerated too
        m.save_pretrained(tmp_path)
        pickled = pickle.loads(pickle.dumps(m))
        torch.save(m, buffer := io.BytesIO())
        assert handle.layers
    assert torch.equal(logits(pickled, ids), before)  # is as the class says
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert torch.equal(logits(loaded, ids), before)
    with without("fla"):
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again, ids), before)


@some_models
def test_bfloat16(name):
    m, ids = model(name, torch.bfloat16), tokens(2, 21)
    expected, got = both(m, lambda: logits(m, ids))
    assert got.dtype == expected.dtype
    exact = logits(model(name), ids)
    error, theirs = (got - exact).abs().mean(), (expected - exact).abs().mean()
    assert error < 1.2 * theirs + 1e-3


@pytest.mark.parametrize("how", ["bfloat16", "float16", "autocast"])
@every_model
def test_generation_in_16_bits(name, how):
    """Logits of decoding, whose caches may have 16 bits, against those of one pass in torch."""
    dtype = torch.float16 if how == "float16" else torch.bfloat16
    m = model(name, torch.float32 if how == "autocast" else dtype)
    with torch.autocast("cpu", dtype, enabled=how == "autocast"):
        with ouzel.transformers.accelerate(m):
            out = m.generate(
                tokens(1, 9),
                max_new_tokens=7,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        ids, got = out.sequences[:, :-1], torch.stack(out.logits, dim=1).float()
        expected = logits(m, ids, use_cache=False)[:, 8:].float()
    assert got.shape == (1, 7, 96)
    close(got, expected, 10 * torch.finfo(dtype).eps)
    exact = logits(model(name), ids, use_cache=False)[:, 8:]
    error, theirs = (got - exact).abs().mean(), (expected - exact).abs().mean()
    assert error < 1.5 * theirs


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2", "mamba", "rwkv", "recurrent_gemma"])
def test_float64_takes_the_own_path(name):
    m, ids = model(name, torch.float64), tokens(2, 21)
    expected, got = both(m, lambda: logits(m, ids))
    assert torch.equal(got, expected)


def test_other_devices_take_the_own_path():
    layer = mixer(model("mamba2"))
    with ouzel.transformers.accelerate(layer):
        y = layer.to("meta")(torch.randn(1, 5, 32, device="meta"))
    assert y.is_meta and y.shape == (1, 5, 32)


def test_compiled():
    m, ids = model("qwen3_5_text"), tokens(1, 19)
    expected = logits(m, ids)
    with ouzel.transformers.accelerate(m):
        compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
        close(logits(compiled, ids, use_cache=False), expected)
    torch._dynamo.reset()


def test_documented_example(capsys):
    text = (pathlib.Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    with without("fla"):
        exec(text.split("```python")[1].split("```")[0], {})
    assert "3 Qwen3_5GatedDeltaNet, 3 Qwen3_5RMSNormGated" in capsys.readouterr().out


def test_context_and_checkpointing():
    m, ids = model("qwen3_5_text").train(), tokens(1, 21)
    with ouzel.transformers.accelerate(m, context=ouzel.Context(threads=1)):
        m(ids, labels=ids).loss.backward()
        expected = {n: p.grad.clone() for n, p in m.named_parameters()}
        m.zero_grad()
        m.gradient_checkpointing_enable()
        m(ids, labels=ids).loss.backward()
    for n, p in m.named_parameters():
        close(p.grad, expected[n], 1e-6)


def test_no_warning_where_all_is_known():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ouzel.transformers.accelerate(model("qwen3_next")).undo()
