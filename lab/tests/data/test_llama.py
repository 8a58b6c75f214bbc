"""The stacked Llama: members as if alone, log-probabilities and their derivative, folders that do not fit."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close

from poprisk.errors import DataError, HyperparameterError
from poprisk_lab.data.llama import Lora, StackedLlama, completion_log_probability
from poprisk_lab.data.llama_weights import TARGETS, LlamaShape, load_llama, random_llama, read_shape

SHAPE = LlamaShape(vocabulary=40, width=24, hidden=32, layers=2, heads=6, key_heads=2, head_width=4, rope_theta=500.0)
LORA = Lora(rank=3, alpha=6.0)
MEMBERS, BATCH, TIME = 3, 4, 9


def model(dtype=torch.float64, **options):
    return StackedLlama(random_llama(SHAPE, seed=1).to(dtype=dtype), LORA, **options)


def adapters(members=MEMBERS, dtype=torch.float64):
    """As after some steps: B is not zero."""
    start = LORA.initial(SHAPE, torch.Generator().manual_seed(2))
    generator = torch.Generator().manual_seed(3)
    drawn = {k: torch.randn(members, *w.shape, generator=generator, dtype=torch.float64) for k, w in start.items()}
    return {name: (0.3 * w).to(dtype).requires_grad_() for name, w in drawn.items()}


def text(members=MEMBERS):
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(SHAPE.vocabulary, (members, BATCH, TIME), generator=generator)
    ends = torch.randint(5, TIME + 1, (members, BATCH, 1), generator=generator)
    place = torch.arange(TIME)
    return tokens, (place >= 3) & (place < ends)


def test_members_compute_as_if_alone():
    stacked, (tokens, mask) = adapters(), text()
    together = model().log_probability(stacked, tokens, mask)
    for i in range(MEMBERS):
        own = {name: w[i : i + 1] for name, w in stacked.items()}
        alone = model().log_probability(own, tokens[i : i + 1], mask[i : i + 1])
        assert_close(together[i : i + 1], alone, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(together[0], together[1], atol=1e-3)


def test_an_adapter_is_an_addition_to_its_weight():
    """W + (α/r) B A in the place of W gives what the adapters give, projection by projection."""
    stacked, (tokens, mask) = adapters(members=1), text(members=1)
    base = random_llama(SHAPE, seed=1).to(dtype=torch.float64)
    for index, layer in enumerate(base.layers):
        for target in TARGETS:
            a, b = (stacked[f"layer{index}.{target}.{side}"][0].detach() for side in "AB")
            getattr(layer, target).add_(LORA.alpha / LORA.rank * b @ a)
    merged = StackedLlama(base).log_probability(None, tokens, mask)
    assert_close(model().log_probability(stacked, tokens, mask), merged, rtol=1e-11, atol=1e-11)


def test_members_do_not_mix():
    stacked, (tokens, mask) = adapters(), text()
    value = model().log_probability(stacked, tokens, mask)[1].sum()
    for name, gradient in zip(stacked, torch.autograd.grad(value, list(stacked.values())), strict=True):
        assert gradient[1].abs().max() > 0, name
        assert gradient[[0, 2]].abs().max() == 0, name


def test_adapters_at_the_start_change_nothing():
    tokens, mask = text(members=1)
    start = LORA.initial(SHAPE, torch.Generator().manual_seed(5))
    moved = {name: w.double()[None] for name, w in start.items()}
    assert_close(
        model().log_probability(moved, tokens, mask), model().log_probability(None, tokens, mask), rtol=0, atol=0
    )
    a = start["layer0.down.A"]
    bound = 1 / math.sqrt(SHAPE.hidden)
    assert 0.9 * bound < a.abs().max() <= bound, "peft's kaiming_uniform_(a=√5)"
    assert_close(a.square().mean().item(), bound**2 / 3, rtol=0.2, atol=0)


def test_log_probability_is_that_of_the_logits_and_so_is_its_gradient():
    stacked, (tokens, mask) = adapters(), text()
    network = model()
    fast = network.log_probability(stacked, tokens, mask)
    logits = network.hidden(stacked, tokens) @ network.llama.head.T
    each = logits[:, :, :-1].log_softmax(-1).gather(-1, tokens[:, :, 1:, None]).squeeze(-1)
    slow = (each * mask[:, :, 1:]).sum(-1)
    assert_close(fast, slow, rtol=1e-12, atol=1e-12)
    weight = torch.linspace(-1, 2, fast.numel(), dtype=torch.float64).view_as(fast)
    for got, wanted in zip(
        torch.autograd.grad((fast * weight).sum(), list(stacked.values())),
        torch.autograd.grad((slow * weight).sum(), list(stacked.values())),
        strict=True,
    ):
        assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
def test_chunks_of_any_size_give_the_same(chunk):
    tokens, mask = text()
    hidden = torch.randn(MEMBERS, BATCH, TIME, SHAPE.width, dtype=torch.float64, requires_grad=True)
    head = random_llama(SHAPE, seed=1).head.double()
    whole = completion_log_probability(hidden, tokens, mask, head)
    parts = completion_log_probability(hidden, tokens, mask, head, chunk)
    assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    wanted, got = (torch.autograd.grad(value.square().sum(), hidden)[0] for value in (whole, parts))
    assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_without_gradients_only_the_masked_tokens_are_looked_at():
    stacked, (tokens, mask) = adapters(), text()
    with_gradients = model().log_probability(stacked, tokens, mask)
    with torch.no_grad():
        assert_close(model().log_probability(stacked, tokens, mask), with_gradients, rtol=1e-12, atol=1e-12)
        assert model().log_probability(stacked, tokens, torch.zeros_like(mask)).abs().max() == 0


def test_padding_does_not_matter():
    stacked, (tokens, mask) = adapters(), text()
    place = torch.arange(TIME)
    ends = (mask * (place + 1)).amax(-1, keepdim=True)
    other = torch.where(place >= ends, (tokens + 7) % SHAPE.vocabulary, tokens)
    assert not other.equal(tokens)
    assert_close(model().log_probability(stacked, other, mask), model().log_probability(stacked, tokens, mask))


def test_targets_may_differ_from_what_is_read():
    stacked, (tokens, mask) = adapters(), text()
    asked = (tokens + 1) % SHAPE.vocabulary
    network = model()
    logits = network.hidden(stacked, tokens) @ network.llama.head.T
    each = logits[:, :, :-1].log_softmax(-1).gather(-1, asked[:, :, 1:, None]).squeeze(-1)
    wanted = (each * mask[:, :, 1:]).sum(-1)
    assert_close(network.log_probability(stacked, tokens, mask, asked), wanted, rtol=1e-12, atol=1e-12)


def test_recomputation_changes_no_gradient():
    stacked, (tokens, mask) = adapters(), text()
    kept, again = (
        torch.autograd.grad(model(recompute=flag).log_probability(stacked, tokens, mask).sum(), list(stacked.values()))
        for flag in (False, True)
    )
    assert_close(again, kept, rtol=1e-12, atol=1e-12)


def test_adapters_may_be_views_of_one_matrix():
    """The engine keeps a member's weights in one row: contiguous within a member, not across."""
    stacked, (tokens, mask) = adapters(), text()
    rows = torch.cat([w.detach().flatten(1) for w in stacked.values()], 1)
    views, at = {}, 0
    for name, w in stacked.items():
        views[name] = rows[:, at : at + w[0].numel()].unflatten(1, w.shape[1:])
        at += w[0].numel()
    with torch.no_grad():
        assert_close(model().log_probability(views, tokens, mask), model().log_probability(stacked, tokens, mask))


def test_bfloat16_is_near():
    tokens, mask = text()
    exact = model().log_probability(adapters(), tokens, mask)
    near = model(torch.bfloat16).log_probability(adapters(dtype=torch.float32), tokens, mask)
    assert near.dtype == torch.float32
    assert_close(near.double(), exact, rtol=0.05, atol=0.3)


CONFIG = {
    "model_type": "llama",
    "vocab_size": SHAPE.vocabulary,
    "hidden_size": SHAPE.width,
    "intermediate_size": SHAPE.hidden,
    "num_hidden_layers": SHAPE.layers,
    "num_attention_heads": SHAPE.heads,
    "num_key_value_heads": SHAPE.key_heads,
    "rms_norm_eps": SHAPE.norm_eps,
    "rope_theta": 500.0,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "qwen2"}, "model_type must be 'llama'"),
        ({"attention_bias": True}, "attention_bias must be False"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type must be 'default'"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 4}, "multiple of key_heads"),
    ],
)
def test_other_networks_are_refused(tmp_path, change, words):
    config = {name: value for name, value in (CONFIG | change).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=words) as caught:
        read_shape(tmp_path)
    assert "\n" not in str(caught.value)


def test_old_and_new_configurations_say_the_same(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert read_shape(tmp_path) == SHAPE
    new = {k: v for k, v in CONFIG.items() if k != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    (tmp_path / "config.json").write_text(json.dumps(new))
    assert read_shape(tmp_path) == SHAPE


def test_missing_and_damaged_folders_are_named(tmp_path):
    with pytest.raises(DataError, match=r"config\.json is missing"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match="should be JSON"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(DataError, match=r"model\.safetensors is missing"):
        load_llama(tmp_path)
    save_file({"model.embed_tokens.weight": torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"embed_tokens\.weight should have shape \(40, 24\), got shape \(3, 3\)"):
        load_llama(tmp_path)
    save_file({"model.embed_tokens.weight": torch.zeros(40, 24)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match="got nothing"):
        load_llama(tmp_path)


def test_adapters_are_checked():
    with pytest.raises(HyperparameterError, match="rank"):
        Lora(rank=0)
    with pytest.raises(HyperparameterError, match="targets"):
        Lora(targets=("q", "embedding"))


# Dynamo looks at .grad of everything it is given, adapters in bfloat16 among it, and hides the warning of that; where
# warnings are errors it cannot.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32 matrix multiplication available")
@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_step_equals_one_that_is_not(compiled):
    stacked = {name: w.detach().cuda().requires_grad_() for name, w in adapters(dtype=torch.float32).items()}
    tokens, mask = (x.cuda() for x in text())
    base = random_llama(SHAPE, seed=1).to("cuda", torch.bfloat16)
    network = StackedLlama(base, LORA, compiled=compiled)

    def step():
        return torch.autograd.grad(network.log_probability(stacked, tokens, mask).sum(), list(stacked.values()))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert_close([g.clone() for g in captured], list(step()), rtol=1e-2, atol=1e-2)
