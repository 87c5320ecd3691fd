"""ouzel.transformers.accelerate: what it replaces and restores, and what it leaves alone."""

import copy
import io
import pathlib
import pickle
import warnings

import pytest

import ouzel

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

import ouzel.transformers  # noqa: E402
from transformers_models import (  # noqa: E402
    close, every_model, logits, mixer, model, one_thread, some_models, tokens, without,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")


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
    with pytest.raises(TypeError, match="accelerate: context is of type int, not ouzel.Context"):
        ouzel.transformers.accelerate(torch.nn.Linear(2, 2), context=3)
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


def test_no_warning_where_all_is_known():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ouzel.transformers.accelerate(model("qwen3_next")).undo()
