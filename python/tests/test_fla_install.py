"""ouzel.fla.install: stand-ins, overlays, and their undoing."""

import importlib
import importlib.util
import sys
import warnings

import pytest

torch = pytest.importorskip("torch")

import ouzel.fla  # noqa: E402
from fla_cases import close  # noqa: E402
from ouzel.fla import _install, _table  # noqa: E402


@pytest.fixture(autouse=True)
def clean():
    """`fla` as before, whatever a test does."""
    before = _install._loaded()
    yield
    ouzel.fla.uninstall()
    _install._restore(before)


@pytest.fixture
def nowhere(monkeypatch):
    """flash-linear-attention is not installed."""
    monkeypatch.setattr(_install, "_imported", lambda names: {})


@pytest.fixture
def package(monkeypatch, tmp_path):
    """An installed flash-linear-attention: a function of ours, one of its own, a layer."""
    files = {
        "fla/__init__.py": "__version__ = '9.9'",
        "fla/ops/__init__.py": "from .gla import chunk_gla\nfrom .own import own",
        "fla/ops/gla/__init__.py": "from .chunk import chunk_gla, helper",
        "fla/ops/gla/chunk.py": "def chunk_gla(): return 'theirs'\ndef helper(): return chunk_gla",
        "fla/ops/own.py": "def own(): return 'own'",
        "fla/layers.py": "from fla.ops.gla import chunk_gla",
        "fla/models.py": "from fla.ops import chunk_gla",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    _install._restore({})
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_install_stands_in_for_what_is_not_there(nowhere):
    finders, modules = list(sys.meta_path), set(sys.modules)
    with ouzel.fla.install() as installation:
        assert installation.active
        import fla.ops
        from fla.ops import chunk_gla
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
        from fla.ops.generalized_delta_rule.dplr.chunk import chunk_dplr_delta_rule
        from fla.modules import FusedRMSNormGated, RMSNorm, ShortConvolution
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.modules.fused_norm_gate import FusedRMSNormGated as older
        from fla.ops.kda.gate import fused_kda_gate

        assert older is FusedRMSNormGated is ouzel.fla.modules.FusedRMSNormGated
        for thing in (RMSNorm, ShortConvolution, causal_conv1d):
            assert thing is getattr(ouzel.fla.modules, thing.__name__)
        assert fla.__version__ == _table.PUBLISHED
        assert fla.ops.chunk_retention is ouzel.fla.chunk_retention
        for function in (chunk_gla, chunk_gated_delta_rule, fused_recurrent_gated_delta_rule,
                         chunk_dplr_delta_rule, fused_kda_gate):
            assert function is getattr(ouzel.fla, function.__name__)
        with pytest.raises(ImportError):
            from fla.ops import chunk_mesa_net  # noqa: F401
        with pytest.raises(ImportError):
            import fla.layers  # noqa: F401
    assert not installation.active
    assert list(sys.meta_path) == finders
    assert not {n for n in set(sys.modules) - modules if n.split(".")[0] == "fla"}


def test_install_twice_and_undo_once(nowhere):
    first = ouzel.fla.install()
    with ouzel.fla.install() as second:
        assert not second.active
    assert first.active
    ouzel.fla.uninstall()
    assert not first.active
    ouzel.fla.uninstall()
    first.uninstall()


def test_install_overlays_a_package_without_a_gpu(package, monkeypatch):
    monkeypatch.setattr(_install, "_has_gpu", lambda: False)
    layers, theirs = importlib.import_module("fla.layers"), importlib.import_module("fla.ops").chunk_gla
    with ouzel.fla.install():
        import fla.ops
        from fla.models import chunk_gla
        from fla.ops.gla import helper

        assert fla.__version__ == "9.9"
        assert all(f is ouzel.fla.chunk_gla for f in (chunk_gla, helper(), layers.chunk_gla, fla.ops.chunk_gla))
        assert fla.ops.own() == "own"
    models = importlib.import_module("fla.models")
    assert all(f is theirs for f in (fla.ops.chunk_gla, helper(), layers.chunk_gla, models.chunk_gla))


def test_install_stands_in_for_a_package_that_cannot_be_imported(package, monkeypatch):
    (package / "fla" / "ops" / "gla" / "chunk.py").write_text("import triton_of_no_machine")
    for gpu in (False, True):
        monkeypatch.setattr(_install, "_has_gpu", lambda: gpu)
        with ouzel.fla.install() as installation:
            from fla.ops.gla import chunk_gla

            assert installation.active and chunk_gla is ouzel.fla.chunk_gla
        assert not _install._loaded()


def test_install_leaves_a_package_with_a_gpu_alone(package, monkeypatch):
    monkeypatch.setattr(_install, "_has_gpu", lambda: True)
    with pytest.warns(UserWarning, match="left alone.*force=True"):
        installation = ouzel.fla.install()
    assert not installation.active
    import fla.ops

    assert fla.ops.chunk_gla() == "theirs"
    with ouzel.fla.install(force=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fla.ops.chunk_gla is ouzel.fla.chunk_gla


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs flash-linear-attention")
@pytest.mark.parametrize("name", ["GLA", "GatedDeltaNet", "KDA"])
def test_published_models_run_on_cpus(name, monkeypatch):
    """Logits of all tokens at once are those of some, then one at a time; a loss has gradients."""
    pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    # Where fla.models enters its own "mamba" in the place of transformers'.
    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", dict(CONFIG_MAPPING._extra_content))
    if _install._has_gpu():
        pytest.skip("there is a GPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ouzel.fla.install()
        models = importlib.import_module("fla.models")
        torch.manual_seed(0)
        size = {} if name == "GLA" else {"head_dim": 16}
        config = getattr(models, name + "Config")(hidden_size=32, num_hidden_layers=2, num_heads=2, vocab_size=50,
                                                  fuse_cross_entropy=False, **size)
        model = getattr(models, name + "ForCausalLM")(config)
        tokens = torch.randint(0, 50, (2, 70))
        whole = model(tokens, labels=tokens)
        whole.loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        with torch.no_grad():
            result = model(tokens[:, :66], use_cache=True)
            logits = [result.logits]
            for t in range(66, 70):
                result = model(tokens[:, t : t + 1], past_key_values=result.past_key_values, use_cache=True)
                logits.append(result.logits)
        close(torch.cat(logits, 1), whole.logits, 1e-5)
