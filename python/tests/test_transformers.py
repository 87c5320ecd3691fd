"""ouzel.transformers: what accelerated models compute, against the same models by themselves."""

import gc

import pytest

import ouzel

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

import ouzel.transformers  # noqa: E402
from transformers_models import (  # noqa: E402
    MODELS, both, close, every_model, logits, mixer, model, one_thread, some_models, tokens,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")


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


def nodes():
    """The operators' calls that wait for a backward pass."""
    gc.collect()
    return sum(type(x).__name__ == "DifferentiableBackward" for x in gc.get_objects())


@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear", "lfm2"])
def test_gradients_through_decoding(name):
    """Through a cache, token by token, as in one pass; and a graph that is dropped is gone."""
    m, ids = model(name), tokens(2, 9)

    def gradients(outputs):
        m.zero_grad()
        torch.cat(outputs, dim=1).square().mean().backward()
        return {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}

    def decode():
        cache = m(ids[:, :6], use_cache=True).cache
        return [m(ids[:, t : t + 1], use_cache=True, cache=cache).logits for t in range(6, 9)]

    expected = gradients([m(ids, use_cache=False).logits[:, 6:]])
    before = nodes()
    with ouzel.transformers.accelerate(m):
        got = gradients(decode())
        decode()
    assert nodes() == before
    assert got.keys() == expected.keys()
    for n, gradient in got.items():
        bound = 1e-3 * expected[n].abs().max().item() + 1e-7
        torch.testing.assert_close(gradient, expected[n], rtol=0, atol=bound, msg=n)


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
