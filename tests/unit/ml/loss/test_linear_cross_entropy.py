"""Linear cross-entropy: next-token loss from hidden states, compared with the plain loss of their logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forgather.ml.loss import CausalLoss, LinearCrossEntropyLoss
from forgather.ml.loss.linear_cross_entropy import _LinearCrossEntropy
from forgather.ml.trainer.step_loss.token_weighting import StepLoss
from tests.support.memory import peak_bytes

HIDDEN, VOCABULARY = 16, 53
Gradients = dict[str, Tensor]


def make_batch(*shape: int, hidden: int = HIDDEN, vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor]:
    """Return hidden states and labels, with some ignored labels."""
    torch.manual_seed(0)
    labels = torch.randint(0, vocabulary, shape)
    labels[torch.rand(shape) < 0.3] = -100
    return torch.randn(*shape, hidden), labels


def make_head(bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(HIDDEN, VOCABULARY, bias=bias).to(dtype)


def plain_loss(head: nn.Module, ignore_index: int = -100) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda hidden_states, labels: CausalLoss(ignore_index)(head(hidden_states), labels)


def loss_of_torch(head: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a next-token loss of sequences computed by torch only."""

    def loss_fn(hidden_states: Tensor, labels: Tensor) -> Tensor:
        logits = head(hidden_states)[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())

    return loss_fn


def loss_and_gradients(
    loss_fn: Callable[[Tensor, Tensor], Tensor], head: nn.Module, hidden_states: Tensor, labels: Tensor
) -> tuple[Tensor, Gradients]:
    head.zero_grad()
    hidden_states = hidden_states.detach().requires_grad_()
    loss = loss_fn(hidden_states, labels)
    loss.backward()
    gradients = {name: one.grad for name, one in head.named_parameters() if one.grad is not None}
    assert hidden_states.grad is not None
    return loss.detach(), {"hidden_states": hidden_states.grad, **gradients}


def assert_same(
    head: nn.Module, hidden_states: Tensor, labels: Tensor, tolerance: float = 1e-5, **options: Any
) -> None:
    plain = plain_loss(head, options.get("ignore_index", -100))
    expected = loss_and_gradients(plain, head, hidden_states, labels)
    given = loss_and_gradients(LinearCrossEntropyLoss(head, **options), head, hidden_states, labels)
    torch.testing.assert_close(given, expected, rtol=tolerance, atol=tolerance * 0.1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(11,), (3, 9), (2, 2, 5)], ids=str)
@pytest.mark.parametrize("chunk_size", [1, 12, 4096])
def test_linear_cross_entropy_equals_the_plain_loss_of_the_logits(
    bias: bool, shape: tuple[int, ...], chunk_size: int
) -> None:
    """With a chunk size of 12, the last chunk has fewer targets than the others."""
    assert_same(make_head(bias), *make_batch(*shape), chunk_size=chunk_size)


@pytest.mark.parametrize("shape", [(3, 9), (4, 300)], ids=str)
def test_linear_cross_entropy_equals_torch_cross_entropy(shape: tuple[int, ...]) -> None:
    head, batch = make_head(), make_batch(*shape)
    expected = loss_and_gradients(loss_of_torch(head), head, *batch)
    given = loss_and_gradients(LinearCrossEntropyLoss(head, chunk_size=12), head, *batch)
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-6)


def test_float64_loss_equals_the_plain_loss_to_the_last_digits() -> None:
    hidden_states, labels = make_batch(3, 9)
    assert_same(make_head(dtype=torch.float64), hidden_states.double(), labels, tolerance=1e-12, chunk_size=7)


def test_very_unlikely_targets_have_a_finite_loss() -> None:
    hidden_states, labels = make_batch(3, 9)
    assert_same(make_head(), hidden_states * 1000, labels, tolerance=1e-4, chunk_size=7)


def relative_errors(given: tuple[Tensor, Gradients], reference: tuple[Tensor, Gradients]) -> Gradients:
    given, reference = ({"loss": loss, **gradients} for loss, gradients in (given, reference))
    return {name: (given[name].float() - one).norm() / one.norm() for name, one in reference.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_loss_is_as_accurate_as_the_plain_loss(dtype: torch.dtype) -> None:
    hidden_states, labels = make_batch(8, 64)
    head = make_head(dtype=dtype)
    hidden_states = hidden_states.to(dtype)
    plain = loss_and_gradients(plain_loss(head), head, hidden_states, labels)
    given = loss_and_gradients(LinearCrossEntropyLoss(head, chunk_size=7), head, hidden_states, labels)
    assert given[0].dtype == torch.float32 and {one.dtype for one in given[1].values()} == {dtype}
    exact = head.float()
    reference = loss_and_gradients(plain_loss(exact), exact, hidden_states.float(), labels)
    allowed, errors = relative_errors(plain, reference), relative_errors(given, reference)
    for name, error in errors.items():
        assert error < torch.finfo(dtype).eps, name
        assert error <= 1.25 * allowed[name] + 1e-6, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_precision_equals_a_linear_layer(dtype: torch.dtype) -> None:
    hidden_states, labels = make_batch(8, 64)
    hidden_states, head = hidden_states * 10, make_head()
    reference = loss_and_gradients(plain_loss(head), head, hidden_states, labels)
    with torch.autocast("cpu", dtype=dtype):
        plain = loss_and_gradients(plain_loss(head), head, hidden_states, labels)
        given = loss_and_gradients(LinearCrossEntropyLoss(head, chunk_size=7), head, hidden_states, labels)
    assert {one.dtype for one in (given[0], *given[1].values())} == {torch.float32}
    torch.testing.assert_close(given[0], plain[0], rtol=1e-6, atol=0)
    assert abs(reference[0] - plain[0]) > 5e-6 * plain[0], "the loss does not depend on the precision"
    allowed, errors = relative_errors(plain, reference), relative_errors(given, reference)
    assert all(errors[name] <= 1.25 * allowed[name] + 1e-6 for name in errors)


def test_autocast_hidden_states_work_with_float32_weights() -> None:
    hidden_states, labels = make_batch(3, 9)
    head = make_head()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, gradients = loss_and_gradients(LinearCrossEntropyLoss(head), head, hidden_states.bfloat16(), labels)
    assert gradients["hidden_states"].dtype == torch.bfloat16 and gradients["weight"].dtype == torch.float32


@pytest.mark.parametrize("length", [1, 4])
def test_without_targets_loss_and_gradients_are_zero(length: int) -> None:
    head = make_head()
    labels = torch.full((2, length), -100)
    loss_fn = LinearCrossEntropyLoss(head, chunk_size=7)
    loss, gradients = loss_and_gradients(loss_fn, head, torch.randn(2, length, HIDDEN), labels)
    assert loss.item() == 0.0 and loss_fn.num_targets(labels) == 0
    assert gradients.keys() == {"hidden_states", "weight", "bias"}
    assert not any(one.any() for one in gradients.values())


def test_ignore_index_can_be_changed() -> None:
    hidden_states, labels = make_batch(3, 9)
    assert_same(make_head(), hidden_states, labels.masked_fill(labels == -100, 0), ignore_index=0, chunk_size=12)


def test_sums_and_means_over_targets_equal_the_plain_loss() -> None:
    hidden_states, labels = make_batch(3, 9)
    head = make_head()
    plain, given = CausalLoss(), LinearCrossEntropyLoss(head, chunk_size=7)
    assert given.num_targets(labels) == plain.num_targets(labels) > 0
    for reduction in ("sum", "mean"):
        expected = plain.sum_over_targets(head(hidden_states), labels, reduction)
        torch.testing.assert_close(given.sum_over_targets(hidden_states, labels, reduction), expected)
    assert given.sum_over_targets(hidden_states, torch.full_like(labels, -100), "mean").isnan()


def test_step_weighs_micro_batches_by_their_targets() -> None:
    hidden_states, labels = make_batch(4, 9)
    loss_fn = LinearCrossEntropyLoss(make_head())
    step_loss = StepLoss(loss_fn)
    total = step_loss.count(labels)
    halves = list(zip(hidden_states.split(2), labels.split(2), strict=True))
    shares = [step_loss.share(one, some, step_loss.count(some), total, 2) for one, some in halves]
    torch.testing.assert_close(sum(shares), loss_fn(hidden_states, labels))
    torch.testing.assert_close(step_loss.share(hidden_states, labels, total, total, 1), loss_fn(hidden_states, labels))


@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias")], ids=str)
def test_frozen_parameters_get_no_gradient(frozen: tuple[str, ...]) -> None:
    head = make_head()
    for name in frozen:
        getattr(head, name).requires_grad_(False)
    assert_same(head, *make_batch(3, 9), chunk_size=7)
    assert all(getattr(head, name).grad is None for name in frozen)


def test_hidden_states_without_gradient_are_accepted() -> None:
    hidden_states, labels = make_batch(3, 9)
    head = make_head()
    gradients = []
    for loss_fn in (plain_loss(head), LinearCrossEntropyLoss(head, chunk_size=7)):
        gradients.append(torch.autograd.grad(loss_fn(hidden_states, labels), list(head.parameters())))
    torch.testing.assert_close(gradients[1], gradients[0])


def test_no_grad_gives_the_same_loss_in_less_memory() -> None:
    hidden_states, labels = make_batch(4, 256, hidden=64, vocabulary=4000)
    head = nn.Linear(64, 4000)
    loss_fn = LinearCrossEntropyLoss(head, chunk_size=100)
    expected = loss_fn(hidden_states, labels)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            given = loss_fn(hidden_states, labels)
            assert not given.requires_grad and torch.equal(given, expected)
            assert peak_bytes(lambda: loss_fn(hidden_states, labels)) < head.weight.nbytes


def test_tied_embeddings_get_the_sum_of_both_gradients() -> None:
    _, labels = make_batch(3, 9)
    tokens = labels.clamp(min=0)
    embedding = nn.Embedding(VOCABULARY, HIDDEN)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    head.weight = embedding.weight
    gradients = []
    for loss_fn in (plain_loss(head), LinearCrossEntropyLoss(head, chunk_size=7)):
        gradients.append(torch.autograd.grad(loss_fn(embedding(tokens), labels), embedding.weight)[0])
    torch.testing.assert_close(gradients[1], gradients[0])


def test_replaced_head_weight_is_used() -> None:
    hidden_states, labels = make_batch(3, 9)
    head = make_head()
    loss_fn = LinearCrossEntropyLoss(head)
    head.weight = nn.Parameter(torch.randn(2 * VOCABULARY, HIDDEN))
    head.bias = None  # type: ignore[assignment]
    torch.testing.assert_close(loss_fn(hidden_states, labels), plain_loss(head)(hidden_states, labels))


def test_scaled_loss_has_scaled_gradients() -> None:
    hidden_states, labels = make_batch(3, 9)
    head = make_head()
    loss_fn = LinearCrossEntropyLoss(head)
    _, gradients = loss_and_gradients(loss_fn, head, hidden_states, labels)
    _, scaled = loss_and_gradients(lambda *batch: loss_fn(*batch) * 3, head, hidden_states, labels)
    torch.testing.assert_close(scaled, {name: one * 3 for name, one in gradients.items()})


def test_gradients_accumulate_over_backward_passes() -> None:
    hidden_states, labels = make_batch(4, 9)
    head = make_head()
    gradients = []
    for loss_fn in (plain_loss(head), LinearCrossEntropyLoss(head, chunk_size=7)):
        head.zero_grad()
        for one, some in zip(hidden_states.split(2), labels.split(2), strict=True):
            loss_fn(one, some).backward()
        gradients.append([one.grad for one in head.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])


def test_second_backward_pass_is_rejected() -> None:
    hidden_states, labels = make_batch(3, 9)
    loss = LinearCrossEntropyLoss(make_head())(hidden_states, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_linear_cross_entropy_works_after_a_compiled_model() -> None:
    hidden_states, labels = make_batch(3, 9)
    body = nn.Linear(HIDDEN, HIDDEN)
    head = make_head()
    compiled = torch.compile(body, backend="aot_eager")
    gradients = []
    for loss in (
        plain_loss(head)(body(hidden_states), labels),
        LinearCrossEntropyLoss(head)(compiled(hidden_states), labels),
    ):
        gradients.append(torch.autograd.grad(loss, [*body.parameters(), *head.parameters()]))
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("ignore_index", [-100, 0])
def test_chunks_may_contain_tokens_without_targets(ignore_index: int) -> None:
    """This happens on accelerators: removing these tokens would require a device synchronisation."""
    hidden_states, labels = make_batch(20)
    labels = labels.masked_fill(labels == -100, ignore_index)
    head = make_head()
    inputs = (hidden_states.requires_grad_(), head.weight, head.bias)
    parts = [slice(start, start + 6) for start in range(0, 20, 6)]
    given = _LinearCrossEntropy.apply(*inputs, labels, parts, ignore_index)
    logits = head(hidden_states)
    expected = nn.functional.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
    torch.testing.assert_close(given, expected)
    torch.testing.assert_close(*(torch.autograd.grad(one, inputs) for one in (given, expected)))


def test_peak_memory_is_at_most_a_quarter_of_the_plain_loss() -> None:
    vocabulary, hidden = 32_768, 64
    hidden_states, labels = make_batch(4, 1024, hidden=hidden, vocabulary=vocabulary)
    head = nn.Linear(hidden, vocabulary, bias=False)
    plain, given = (
        peak_bytes(lambda loss_fn=loss_fn: loss_and_gradients(loss_fn, head, hidden_states, labels))
        for loss_fn in (plain_loss(head), LinearCrossEntropyLoss(head))
    )
    part, gradients = 4096 * labels.numel() * 4, head.weight.nbytes + hidden_states.nbytes
    assert given * 4 < plain
    assert given < 1.1 * part + 1.1 * gradients, "held more than one chunk of logits, or a second gradient"


def test_auto_implementation_on_the_cpu_is_pytorch() -> None:
    hidden_states, _ = make_batch(3, 9)
    assert LinearCrossEntropyLoss(make_head()).implementation_for(hidden_states) == "pytorch"
    assert LinearCrossEntropyLoss(make_head(), impl="pytorch").implementation_for(hidden_states) == "pytorch"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"impl": "triton"}, r"impl='triton' .* is unknown: use 'auto', 'cce', 'liger' or 'pytorch'"),
        ({"chunk_size": 0}, r"chunk_size=0 .* must be at least 1"),
        ({"output_embeddings": nn.Identity()}, r"Identity has no weight\. Pass the linear layer"),
        ({"output_embeddings": nn.LayerNorm(4)}, r"the weight of LayerNorm has shape \[4\]\. Pass the linear layer"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_invalid_settings_are_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearCrossEntropyLoss(**{"output_embeddings": make_head(), **options})


@pytest.mark.parametrize(("impl", "package"), [("cce", "cut_cross_entropy"), ("liger", "liger_kernel")])
def test_unavailable_implementation_is_explained(impl: str, package: str) -> None:
    try:
        __import__(package)
    except ImportError:
        with pytest.raises(ValueError, match=rf"impl='{impl}'.*not installed: pip install .*'pytorch'"):
            LinearCrossEntropyLoss(make_head(), impl=impl)
    else:
        with pytest.raises(ValueError, match=r"runs on CUDA only"):
            LinearCrossEntropyLoss(make_head(), impl=impl)(*make_batch(3, 9))


def test_inputs_of_wrong_shape_or_type_are_explained() -> None:
    hidden_states, labels = make_batch(3, 9)
    loss_fn = LinearCrossEntropyLoss(make_head())
    with pytest.raises(ValueError, match=r"width 8, but its output embeddings take 16"):
        loss_fn(hidden_states[..., :8], labels)
    with pytest.raises(ValueError, match=r"\[3, 9\] positions .* \[3, 8\] labels"):
        loss_fn(hidden_states, labels[:, 1:])
    with pytest.raises(ValueError, match=r"hidden states of torch.bfloat16, .* torch.float32\. Use one dtype for"):
        loss_fn(hidden_states.bfloat16(), labels)
    with pytest.raises(ValueError, match=r"reduction='none' is unknown"):
        loss_fn.sum_over_targets(hidden_states, labels, "none")
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        loss_fn(hidden_states, labels.clamp(min=VOCABULARY))
