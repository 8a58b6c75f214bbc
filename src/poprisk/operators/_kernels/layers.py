r"""Layers whose weight Jacobian is a sum of outer products, found in a module and proved to be used once.

A layer that maps every position t of an example by :math:`h_t = A a_t + c` has the Jacobian
:math:`\partial F_j/\partial A = \sum_t \delta_{jt} a_t^\top` with :math:`\delta_{jt} = \partial F_j/\partial h_t`, so
its part of the kernel needs neither A nor the Jacobian itself. This holds only where the weights act through that one
call. So a layer counts when it is exactly ``nn.Linear``, ``nn.Conv2d`` or ``nn.Embedding``, without hooks, is called
once, and in the autograd graph every path from the outputs to its weights leads through what it gave. Everything else
is differentiated plainly.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from poprisk._core.autodiff import FlatModel, Inputs, call_module, exact_kernels, plain_operations, probe, take_examples


@dataclass(frozen=True, eq=False)
class Layer:
    """One call of a layer, for one example."""

    name: str
    """Path of the layer in the module."""
    module: nn.Linear | nn.Conv2d | nn.Embedding
    weight: str
    """Name of the weight among the model's parameters."""
    bias: str | None
    """Name of the bias, where it is trained."""
    output_shape: tuple[int, ...]
    """Of the call for one example."""
    positions: int
    """T, the places at which the weights act: 1 in a plain MLP, the pixels of a convolution, the tokens of a text."""
    inputs: int
    """Numbers that come in at one position: the columns of the weight as a matrix."""
    outputs: int
    """Numbers that go out at one position: its rows."""

    @property
    def size(self) -> int:
        """Trained weights of the layer."""
        return self.inputs * self.outputs + (self.outputs if self.bias else 0)


@dataclass(frozen=True, eq=False)
class Structure:
    """What one example tells about a model: sizes, cost of a forward pass, and the layers with outer products."""

    p: int
    """Outputs of an example."""
    layers: tuple[Layer, ...]
    plain: tuple[str, ...]
    """Parameters outside these layers, in the model's order."""
    plain_size: int
    forward_flops: int
    held: int
    """Numbers that the forward pass computes for one example: a bound on what a backward pass keeps or makes."""

    def without_layers(self, model: FlatModel) -> "Structure":
        """The same model with every parameter differentiated plainly."""
        return Structure(self.p, (), tuple(model.parameters), model.size, self.forward_flops, self.held)


def find_structure(model: FlatModel, w: Tensor, inputs: Inputs) -> Structure:
    """Runs the first example once and reads off what the kernel's algorithms need.

    Raises:
        DataError: from the model, for what its outputs refuse.

    >>> model = FlatModel(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), "squared")
    >>> [layer.name for layer in find_structure(model, model.weights, torch.zeros(4, 3)).layers]
    ['0', '2']
    """
    one = take_examples(inputs, slice(0, 1))
    p = model.outputs(w, one).shape[1]
    calls: dict[str, list[_Call]] = {}
    candidates = _candidates(model)
    leaves = {name: piece.detach().clone().requires_grad_() for name, piece in model.unflatten(w).items()}

    def note(name: str, signal: Tensor, out: Tensor) -> Tensor | None:
        calls.setdefault(name, []).append(_Call(signal, signal._version, out.grad_fn, tuple(out.shape)))
        return None

    with exact_kernels(), torch.enable_grad(), listening(candidates, note):
        out = call_example(model, leaves, one)
    consumers = _consumers(out)
    layers = []
    for name, module in candidates.items():
        weight, bias = _trained_names(model, name)
        made = calls.get(name, [])
        if weight is None or len(made) != 1 or not made[0].is_plain:
            continue
        weights = [leaves[each] for each in (weight, bias) if each]
        if all(_reached_through(made[0].node, leaf, consumers) for leaf in weights):
            layers.append(_describe(name, module, weight, bias, made[0]))
    covered = {each for layer in layers for each in (layer.weight, layer.bias)}
    plain = tuple(name for name in model.parameters if name not in covered)
    plain_size = sum(model.parameters[name].numel() for name in plain)
    return Structure(p, tuple(layers), plain, plain_size, *_forward_cost(model, w, one))


@contextmanager
def listening(layers: Mapping[str, nn.Module], note: Callable[[str, Tensor, Tensor], Tensor | None]) -> Iterator[None]:
    """Calls ``note(name, input, output)`` for every call of these layers; what it returns replaces the output."""
    with ExitStack() as stack:
        for name, module in layers.items():

            def hook(_module: nn.Module, args: tuple, out: Tensor, name: str = name) -> Tensor | None:
                return note(name, args[0], out)

            stack.callback(module.register_forward_hook(hook).remove)
        yield


def call_example(model: FlatModel, parameters: Mapping[str, Tensor], one: Inputs) -> Tensor:
    """The module on a batch of one, with these weights and copies of its buffers."""
    buffers = {name: buffer.clone() for name, buffer in model.module.named_buffers()}
    with plain_operations(model.recurrent):
        return call_module(model.module, (dict(parameters), buffers), one if isinstance(one, tuple) else (one,))


def _candidates(model: FlatModel) -> dict[str, nn.Linear | nn.Conv2d | nn.Embedding]:
    """Layers of the three kinds with their own forward, as PyTorch wrote it."""
    found: dict[str, nn.Linear | nn.Conv2d | nn.Embedding] = {}
    for name, module in model.module.named_modules():
        touched = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        if touched or _trained_names(model, name)[0] is None:
            continue
        if type(module) is nn.Linear or (type(module) is nn.Conv2d and _plain_convolution(module)):
            found[name] = module
        if type(module) is nn.Embedding and module.max_norm is None and not module.scale_grad_by_freq:
            found[name] = module
    return found


def _plain_convolution(module: nn.Conv2d) -> bool:
    return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)


def _trained_names(model: FlatModel, name: str) -> tuple[str | None, str | None]:
    prefix = f"{name}." if name else ""
    weight, bias = f"{prefix}weight", f"{prefix}bias"
    return (weight if weight in model.parameters else None), (bias if bias in model.parameters else None)


@dataclass(frozen=True, eq=False)
class _Call:
    signal: Tensor
    version: int
    node: Any
    shape: tuple[int, ...]

    @property
    def is_plain(self) -> bool:
        """Not inside a derivative that the forward itself takes, and the input not overwritten after the call."""
        wrapped = is_functorch_wrapped_tensor(self.signal)
        return self.node is not None and not wrapped and self.signal._version == self.version


def _describe(
    name: str, module: nn.Linear | nn.Conv2d | nn.Embedding, weight: str, bias: str | None, call: _Call
) -> Layer:
    shape = call.shape
    if isinstance(module, nn.Linear):
        sizes = (prod(shape[:-1]), module.in_features, module.out_features)
    elif isinstance(module, nn.Conv2d):
        columns = module.in_channels * prod(module.kernel_size)
        sizes = (prod(shape[:-3]) * shape[-2] * shape[-1], columns, module.out_channels)
    else:
        sizes = (call.signal.numel(), module.num_embeddings, module.embedding_dim)
    return Layer(name, module, weight, bias, shape, *sizes)


def _consumers(out: Tensor) -> dict[Any, list[Any]]:
    """For every node of the autograd graph, and every leaf by its id, the nodes that use it; the outputs use None."""
    consumers: dict[Any, list[Any]] = {out.grad_fn: [None]}
    left = [out.grad_fn]
    while left:
        node = left.pop()
        for following, _ in node.next_functions if node is not None else ():
            leaf = getattr(following, "variable", None)
            key = following if leaf is None else id(leaf)
            if key is not None and key not in consumers and leaf is None:
                left.append(following)
            consumers.setdefault(key, []).append(node)
    return consumers


def _reached_through(gate: Any, leaf: Tensor, consumers: Mapping[Any, list[Any]]) -> bool:
    """Whether the leaf is used, and every path from the outputs to it passes the gate."""
    left, seen = [id(leaf)], set()
    while left:
        for node in consumers.get(left.pop(), ()):
            if node is None:
                return False
            if node is not gate and node not in seen:
                seen.add(node)
                left.append(node)
    return id(leaf) in consumers


def _forward_cost(model: FlatModel, w: Tensor, one: Inputs) -> tuple[int, int]:
    """Operations and new numbers of one example's forward pass."""
    parameters = model.unflatten(w)
    with exact_kernels(), torch.no_grad():
        with _CountOperations() as counter:
            call_example(model, parameters, one)
        held = probe(lambda _: call_example(model, parameters, one), examples=1).held
    return max(1, counter.operations), held


class _CountOperations(TorchDispatchMode):
    """Operations of matrix products and convolutions, by PyTorch's own table."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.utils.flop_counter import flop_registry

        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.operations += count(*args, **(kwargs or {}), out_val=result)
        return result
