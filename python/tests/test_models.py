"""Models, states and generation."""

import copy
import itertools
import json
import os
import shutil
import threading
import warnings

import numpy as np
import pytest

import ouzel

CONFIG = {
    "model_type": "retnet", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2,
    "num_heads": 2, "intermediate_size": 32, "initializer_range": 0.3,
    "attn": {"layers": [1], "num_heads": 4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    ouzel.Model.random(CONFIG, seed=7).save(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return ouzel.Model.load(folder)


def test_a_model_is_what_was_saved(model):
    again = ouzel.Model.random(CONFIG, seed=7)
    assert model.fingerprint == again.fingerprint
    assert model.fingerprint != ouzel.Model.random(CONFIG, seed=8).fingerprint
    assert model.vocab_size == 256 and model.config["hidden_size"] == 32
    assert model.parameter_count > 10000
    assert repr(model).startswith("<ouzel.Model of ")


def test_files_that_are_no_model(tmp_path):
    with pytest.raises(ouzel.FileAccessError, match="nowhere") as caught:
        ouzel.Model.load(tmp_path / "nowhere")
    assert isinstance(caught.value, OSError)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ouzel.BadFileError):
        ouzel.Model.load(tmp_path)
    with pytest.raises(ouzel.Error, match="abacus"):
        ouzel.Model.random({"model_type": "abacus"})


def test_keywords_that_are_unknown(model, folder, tmp_path):
    state = model.new_state()
    for call, sentence in (
        (lambda: model.generate("a", tempature=1), r"Model.generate\(\) .* 'tempature'; did you mean 'temperature'"),
        (lambda: model.generate("a", zzzzzzzzz=1), "'zzzzzzzzz'; it takes prompt, tokens, state, temperature"),
        (lambda: model.forward([1], states=state), r"Model.forward\(\) .* 'states'; did you mean 'state'"),
        (lambda: model.forward(token=[1]), "'token'; did you mean 'tokens'"),
        (lambda: model.save(tmp_path / "m", overwrite=True), r"Model.save\(\) .* 'overwrite'; it takes folder"),
        (lambda: model.load_state(tmp_path / "s", capacity=3), r"Model.load_state\(\) .* 'capacity'"),
        (lambda: ouzel.Model.load(folder, contxt=None), r"Model.load\(\) .* 'contxt'; did you mean 'context'"),
        (lambda: ouzel.Model.random(CONFIG, sead=1), r"Model.random\(\) .* 'sead'; did you mean 'seed'"),
        (lambda: state.save(tmp_path / "s", zzzzz=1), r"State.save\(\) .* 'zzzzz'; it takes path"),
    ):
        with pytest.raises(TypeError, match=sentence):
            call()
    with pytest.raises(TypeError, match="needs tokens"):
        model.forward()
    assert not list(tmp_path.iterdir()) and state.position == 0


def test_classes_say_what_makes_them(folder):
    for make, sentence in (
        (lambda: ouzel.Model(folder), r"made by Model.load\(folder\) or Model.random"),
        (lambda: ouzel.State(), "made by Model.new_state"),
        (lambda: ouzel.Generation(prompt="a"), "made by Model.generate"),
    ):
        with pytest.raises(TypeError, match=sentence):
            make()


def test_keys_that_look_misspelt(model, folder, tmp_path):
    with pytest.raises(ouzel.BadFileError, match="no key 'attention'; leave it out"):
        ouzel.Model.random({**model.config, "attention": {}})
    with pytest.raises(ouzel.BadFileError, match="no key 'norm_esp'; did you mean 'norm_eps'"):
        ouzel.Model.random({**CONFIG, "norm_esp": 1e-5})
    copied = tmp_path / "copy"
    shutil.copytree(folder, copied)
    config = json.loads((copied / "config.json").read_text())
    config["norm_esp"] = config.pop("norm_eps")
    (copied / "config.json").write_text(json.dumps({**config, "transformers_version": "5"}))
    with pytest.warns(UserWarning, match="config.json: there is no key 'norm_esp'.*It is ignored"):
        assert ouzel.Model.load(copied).fingerprint == model.fingerprint
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ouzel.Model.load(folder)
        with pytest.raises(UserWarning):
            warnings.warn("as an error", stacklevel=1)
        with pytest.raises(UserWarning, match="norm_esp"):
            ouzel.Model.load(copied)


def test_forward_continues_states(model):
    text = b"Hello, hello"
    every = model.forward(text, every_token=True)
    assert every.shape == (12, 256) and every.dtype == np.float32
    assert np.array_equal(model.forward(text), every[-1])
    for tokens in (text.decode(), list(text), np.frombuffer(text, np.uint8),
                   np.array(list(text), np.int32), np.array(list(text))[::1]):
        assert np.array_equal(model.forward(tokens), every[-1])
    state = model.new_state()
    for i, token in enumerate(text):
        logits = model.forward([token], state)
        assert np.abs(logits - every[i]).max() < 1e-4
    assert state.position == 12 and state.capacity >= 12

    # Rows of a batch, each with a state of its own.
    rows = np.frombuffer(text, np.uint8).reshape(2, 6).astype(np.int64)
    states = [model.new_state(), model.new_state()]
    logits = model.forward(rows, states)
    assert logits.shape == (2, 256)
    assert np.array_equal(logits[0], every[5])
    assert [s.position for s in states] == [6, 6]
    assert model.forward(rows, every_token=True).shape == (2, 6, 256)


def test_states_of_an_iterator_live_through_the_call(model):
    ids = np.array([[104, 105, 106], [1, 2, 3], [7, 8, 9]], np.int32)
    others = []

    def states():
        for _ in ids:
            state = model.new_state()
            yield state
            del state
            others.extend(model.new_state() for _ in range(3))  # into memory that was freed, if any was

    expected = model.forward(ids)
    assert np.array_equal(model.forward(ids, state=states()), expected)
    assert all(state.position == 0 for state in others)
    state = model.new_state()
    with pytest.raises(ouzel.InvalidArgumentError, match="sequences 0 and 2 were given the same state"):
        model.forward(ids, state=[state, model.new_state(), state])
    assert state.position == 0


def test_forward_refuses(model):
    for tokens, error in (
        ([256], ouzel.InvalidArgumentError), ([-1], ouzel.InvalidArgumentError),
        (np.zeros(3, np.float32), ouzel.InvalidArgumentError),
        (np.zeros((1, 1, 1), np.int32), ouzel.InvalidArgumentError),
        (["a"], TypeError), ([1 << 70], OverflowError), (object(), TypeError),
    ):
        with pytest.raises(error):
            model.forward(tokens)
    for tokens, state in (([1], 3), ([1], [model.new_state()]), (np.zeros((1, 1), np.int32), [None])):
        with pytest.raises(TypeError, match="state must be an ouzel.State"):
            model.forward(tokens, state)
    with pytest.raises(TypeError):
        model.generate("a", 3, context=3)
    with pytest.raises(ouzel.InvalidArgumentError, match="2 sequences were given 1 states"):
        model.forward(np.zeros((2, 3), np.int32), [model.new_state()])
    with pytest.raises(ouzel.Error):
        model.forward([1], ouzel.Model.random(CONFIG, seed=9).new_state())


def test_arguments_of_another_type_are_named(model, tmp_path):
    numbers = ("temperature", "top_p", "min_p", "repetition_penalty")
    counts = ("tokens", "top_k", "repetition_window", "seed")
    calls = [(lambda n=n, v=v: model.generate("a", **{n: v}), f"generate: {n} was not given a value of type {t}")
             for names, t, wrong in ((numbers, "float", ("hot", [1.0], object())),
                                     (counts, "int", ("3", 1.5, [1], object())))
             for n in names for v in wrong]
    calls += [
        (lambda: model.generate("a", stop=3), "generate: stop was not given a value of type str or a sequence"),
        (lambda: model.generate("a", stop=["a", b"b"]), "generate: stop was not given a value of type str"),
        (lambda: model.generate("a", state=3), "generate: state is of type int, not ouzel.State"),
        (lambda: model.generate("a", context=3), "generate: context is of type int, not ouzel.Context"),
        (lambda: model.forward("a", context=3), "forward: context is of type int, not ouzel.Context"),
        (lambda: model.forward("a", every_token="yes"), "forward: every_token is of type str, not bool"),
        (lambda: model.save(3), "Model.save: folder was not given a value of type str or os.PathLike"),
        (lambda: model.load_state(3), "Model.load_state: path was not given a value of type str"),
        (lambda: model.new_state().save(3), "State.save: path was not given a value of type str"),
        (lambda: ouzel.Model.load(3), "Model.load: folder was not given a value of type str"),
        (lambda: ouzel.Model.load(tmp_path, context=3), "Model.load: context is of type int, not ouzel.Context"),
        (lambda: ouzel.Model.random(CONFIG, seed="x"), "Model.random: seed was not given a value of type int"),
        (lambda: ouzel.Context("two"), "Context: threads was not given a value of type int"),
        (lambda: ouzel.Context(isa=2), "Context: isa was not given a value of type str"),
        (lambda: ouzel.explain(3), "explain: law was not given a value of type str"),
        (lambda: ouzel.explain("gla", T="long"), "explain: T was not given a value of type int"),
        (lambda: ouzel.draw_orthogonal_projection("x", 2, 2),
         "draw_orthogonal_projection: seed was not given a value of type int"),
    ]  # fmt: skip
    calls += [
        (lambda: model.generate(None), "generate: the prompt must be str or bytes"),
        (lambda: model.forward("a", every_token=None), "forward: every_token is of type NoneType, not bool"),
        (lambda: model.forward("a", every_token="\ud800"), "forward: every_token is of type str, not bool"),
        (lambda: ouzel.Model.load("\ud800"), "Model.load: folder was not given a value of type str"),
        (lambda: ouzel.Model.load("a\0b"), "Model.load: folder was not given a value of type str"),
        (lambda: model.save("a\0b"), "Model.save: folder was not given a value of type str"),
        (lambda: model.load_state("a\0b"), "Model.load_state: path was not given a value of type str"),
        (lambda: model.new_state().save("\ud800"), "State.save: path was not given a value of type str"),
        (lambda: model.save(None), "Model.save: folder was not given a value of type str or os.PathLike"),
        (lambda: ouzel.Model.load(None), "Model.load: folder was not given a value of type str"),
        (lambda: ouzel.Model.random(None), "Model.random: config is of type NoneType; a dict was expected"),
        (lambda: ouzel.Model.random(CONFIG, None), "Model.random: seed was not given a value of type int"),
        (lambda: model.load_state(None), "Model.load_state: path was not given a value of type str"),
        (lambda: model.new_state().save(None), "State.save: path was not given a value of type str"),
        (lambda: ouzel.Context(None), "Context: threads was not given a value of type int"),
        (lambda: ouzel.explain(None), "explain: law was not given a value of type str"),
        (lambda: ouzel.explain("gla", None), "explain: T was not given a value of type int"),
        (lambda: ouzel.draw_orthogonal_projection(1, None, 2),
         "draw_orthogonal_projection: rows was not given a value of type int"),
    ]  # fmt: skip
    for call, sentence in calls:
        with pytest.raises(TypeError, match=f"^{sentence}"):
            call()
    for given in ({"seed": -1}, {"seed": 2**64}, {"top_k": 2**63}, {"tokens": -(10**5000)}):
        with pytest.raises(ouzel.InvalidArgumentError, match=f"generate: {next(iter(given))} is not within"):
            model.generate("a", **given)
    given = {"temperature": np.float32(1), "top_k": np.int64(3), "seed": True, "stop": ("x",)}
    assert len("".join(model.generate("a", np.uint8(3), **given))) <= 3


def test_a_configuration_that_is_a_name_gets_an_example_that_works():
    with pytest.raises(TypeError, match="Model.random: config is of type str; a dict was expected") as error:
        ouzel.Model.random("retnet")
    sentence = str(error.value)
    assert ouzel.Model.random(json.loads(sentence[sentence.index("{"):])).vocab_size == 256


def test_a_call_without_tokens_has_no_last_one(model):
    for tokens in ([], "", b"", (), np.zeros(0, np.int32), np.zeros((2, 0), np.int64)):
        with pytest.raises(ouzel.InvalidArgumentError, match="forward: there are no tokens"):
            model.forward(tokens)
        every = model.forward(tokens, every_token=True)
        assert every.shape[-2:] == (0, 256)


def test_the_folder_of_a_training_run_is_not_saved_into(model, tmp_path):
    """Resuming the run would put its own weights back."""
    checkpoint = tmp_path / "training.safetensors"
    checkpoint.write_bytes(b"of a run")
    with pytest.raises(ouzel.InvalidArgumentError, match="holds a training run.*another folder, or remove that"):
        model.save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["training.safetensors"]
    checkpoint.unlink()
    model.save(tmp_path)
    assert ouzel.Model.load(tmp_path).fingerprint == model.fingerprint


def test_states_are_values(model, tmp_path):
    state = model.new_state()
    model.forward(b"abc", state)
    twins = [state.copy(), copy.copy(state), copy.deepcopy(state)]
    assert all(twin == state for twin in twins)
    model.forward(b"d", twins[0])
    assert twins[0] != state and twins[1] == state and state != 3
    path = tmp_path / "a.state"
    state.save(path)
    assert model.load_state(path) == state
    assert model.load_state(os.fspath(path)).fingerprint == state.fingerprint
    with pytest.raises(ouzel.BadFileError, match="another model|fingerprint"):
        ouzel.Model.random(CONFIG, seed=9).load_state(path)
    assert repr(state) == f"<ouzel.State after 3 tokens, {state.nbytes} bytes>"
    generation = model.generate(b"abc", 5)
    list(generation)  # the last token waits for what comes next
    assert "after 8 tokens (7 processed, 1 waiting)" in repr(generation.state)
    assert generation.position == 8 and generation.state.position == 7
    state.clear()
    assert state == model.new_state()


def test_generation_is_an_iterator(model):
    options = {"temperature": 0.9, "seed": 3}
    pieces = list(model.generate("In the ", 40, **options))
    assert all(isinstance(piece, str) and piece for piece in pieces)
    as_bytes = b"".join(model.generate(b"In the ", 40, **options))
    assert len(as_bytes) == 40
    assert "".join(pieces) == as_bytes.decode(errors="replace")
    endless = model.generate(b"In the ", **options, context=ouzel.Context(threads=1))
    assert b"".join(itertools.islice(endless, 40)) == as_bytes
    assert endless.finish is None and endless.position == 47


def test_generation_goes_on_from_its_state(model, tmp_path):
    whole = b"".join(model.generate(b"In the ", 40, temperature=0.9, seed=3))
    generation = model.generate(b"In the ", 15, temperature=0.9, seed=3)
    first = b"".join(generation)
    assert generation.finish == "length"
    generation.state.save(tmp_path / "s")
    # The sampling options are in the state.
    second = b"".join(model.generate(b"", 25, state=model.load_state(tmp_path / "s")))
    assert first + second == whole


def test_generation_stops(model):
    text = b"".join(model.generate(b"In the ", 60, seed=4))
    end, byte = next((i, c) for i, c in enumerate(text) if i >= 10 and c < 128)
    for stop in ([chr(byte)], chr(byte)):
        generation = model.generate(b"In the ", 60, seed=4, stop=stop)
        assert b"".join(generation) == text[: text.index(byte)] and generation.finish == "stop"
    assert text.index(byte) <= end
    with pytest.raises(TypeError, match="prompt must be str or bytes"):
        model.generate(3)
    with pytest.raises(ouzel.InvalidArgumentError, match="top-p"):
        model.generate("a", 3, top_p=-1)
    with pytest.raises(ouzel.InvalidArgumentError, match="at least 0"):
        model.generate("a", -3)


def test_a_model_serves_threads_and_a_state_one_at_a_time(model):
    expected = model.forward(b"threads")
    state, results, errors = model.new_state(), [], []

    def alone():
        context = ouzel.Context(threads=1)
        results.extend(model.forward(b"threads", context=context) for _ in range(10))

    def together():
        for _ in range(50):
            try:
                model.forward(b"threads", state, context=ouzel.Context(threads=1))
            except ouzel.InvalidArgumentError as error:
                errors.append(str(error))

    threads = [threading.Thread(target=f) for f in (alone, alone, together, together)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20 and all(np.array_equal(r, expected) for r in results)
    assert set(errors) <= {"this state is being used by another thread"}
    assert state.position == 7 * (100 - len(errors))
