"""SyncBatchNorm: batch normalization with the statistics of all ranks' batches together.

Words: C channels; a rank's *count* is its number of values per channel (rows times positions); M2
is the sum of squared deviations from a mean. In the forward pass each rank contributes count, mean
and M2 of its batch, which combine exactly, whatever the counts are (Chan, Golub and LeVeque,
"Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979):

    mean = sum_r count_r mean_r / sum_r count_r
    M2   = sum_r M2_r + count_r (mean_r - mean)^2

In the backward pass each rank contributes, per channel, the sums of dy and of dy (x - mean). One
collective each way, unnamed, so all ranks must run their SyncBatchNorm layers in the same order. A
rank with an empty batch takes part like any other; one that has joined is left out.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .operation import ALLGATHER, ALLREDUCE, SUM, Operation, check_member
from .process_sets import ProcessSet, global_process_set

_LABEL = "sync_batch_norm"
_Module = TypeVar("_Module", bound=nn.Module)


class SyncBatchNorm(_BatchNorm):
    """Batch normalization over the batches of all ranks of a process set.

    On every rank output, running statistics and gradients are those of a `torch.nn.BatchNorm*d`
    that is given the ranks' batches concatenated. Batches may differ in size and be empty, also on
    all ranks. Inputs of 16 bits have statistics in float32. With one rank, and in evaluation with
    running statistics, it is plain batch normalization.

    Gradients of `weight` and `bias` are those of this rank's part of the batch:
    `hvd.DistributedOptimizer` averages them with the others.

    All ranks of the set must run their SyncBatchNorm layers in the same order, and the backward
    passes too. There is no second derivative.

    Parameters
    ----------
    num_features : int
        C, the length of dim 1 of the input, which has shape (N, C) or (N, C, ...).
    eps : float
        Added to the variance.
    momentum : float or None
        Weight of the new value in the running statistics; None makes them the average over all
        batches so far.
    affine : bool
        Whether there are `weight` and `bias`.
    track_running_stats : bool
        Whether there are running statistics. Without them, evaluation uses the statistics of the
        batches as well, of all ranks.
    process_set : ProcessSet
        The ranks whose batches belong together.

    Raises
    ------
    ValueError
        In the forward pass: the input has less than 2 dims, or not `num_features` channels; all
        ranks together have a single value per channel; this rank is not in the process set.
    TypeError
        In the forward pass: the input is not of a real floating point dtype, or the process set is
        not registered.
    HorovodInternalError
        In the forward pass, if statistics have to be exchanged: hvdtorch is not initialized, or
        the exchange failed.
    """

    process_set: ProcessSet

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    @classmethod
    def convert_sync_batchnorm(
        cls, module: _Module, process_set: ProcessSet = global_process_set
    ) -> _Module:
        """Replace every batch normalization in `module` by a SyncBatchNorm.

        Parameters, buffers, their device and dtype, and the training flag are kept: they are the
        same tensors. A layer that is used in several places stays one layer.

        Parameters
        ----------
        module : torch.nn.Module
            Changed in place. `torch.nn.SyncBatchNorm` layers are converted as well.
        process_set : ProcessSet
            The ranks whose batches belong together.

        Returns
        -------
        torch.nn.Module
            `module`, or the new layer if `module` is a batch normalization itself.

        Raises
        ------
        ValueError
            A lazy layer whose number of features is not known yet: run one forward pass first.
        """
        return cast(_Module, cls._converted(module, process_set, {}))

    @classmethod
    def _converted(
        cls, module: nn.Module, process_set: ProcessSet, known: dict[nn.Module, nn.Module]
    ) -> nn.Module:
        if module not in known:
            known[module] = (
                cls._layer_like(module, process_set) if isinstance(module, _BatchNorm) else module
            )
            for name, child in module._modules.items():
                if child is not None:
                    module._modules[name] = cls._converted(child, process_set, known)
        return known[module]

    @classmethod
    def _layer_like(cls, module: _BatchNorm, process_set: ProcessSet) -> SyncBatchNorm:
        if isinstance(module, nn.modules.lazy.LazyModuleMixin):
            raise ValueError(
                f"convert_sync_batchnorm: {type(module).__name__} does not know its number of "
                "features yet; run one forward pass, then convert"
            )
        layer = cls(
            module.num_features, module.eps, module.momentum, False, False, process_set=process_set
        )
        layer.affine, layer.track_running_stats = module.affine, module.track_running_stats
        layer._parameters.update(module._parameters)
        layer._buffers.update(module._buffers)
        layer.training = module.training
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input` of shape (N, C, ...); the result has its shape, dtype and layout."""
        self._check_input(input)
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        check_member(self.process_set, "SyncBatchNorm")
        if self.process_set.size() == 1:
            return super().forward(input)
        with torch.no_grad():
            total, mean, variance = _joint_statistics(input, self.process_set)
            if self.training and self.track_running_stats and self.running_mean is not None:
                self._update_running_statistics(total, mean, variance)
        return cast(
            Tensor,
            _Normalization.apply(
                input, self.weight, self.bias, mean, variance, total, self.eps, self.process_set
            ),
        )

    def _check_input_dim(self, input: Tensor) -> None:
        """The base class's check; `forward` has checked already."""

    def _check_input(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"SyncBatchNorm: the input has shape {list(input.shape)}, needs at least two dims: "
                "batch and channels"
            )
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm({self.num_features}): the input has shape {list(input.shape)}, "
                f"that is {input.shape[1]} channels"
            )
        if not input.is_floating_point():
            raise TypeError(
                f"SyncBatchNorm: the input is {input.dtype}; pass a floating point tensor"
            )

    def _update_running_statistics(self, total: Tensor, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = self.momentum
        if factor is None:
            factor = 1.0 / float(self.num_batches_tracked)
        weight = factor * (total > 0).double()  # nothing is learnt from no values
        for running, new in (
            (self.running_mean, mean),
            (self.running_var, variance * (total / (total - 1))),
        ):
            running.copy_(running.double() * (1 - weight) + new * weight)

    # A process set belongs to the job: a copy of the layer has the same one, and a layer loaded
    # from a file has one of the job that loads it.

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        memo[id(self.process_set)] = self.process_set
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        copy.__dict__.update(deepcopy(self.__dict__, memo))
        return copy

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        everyone = self.process_set is global_process_set
        state["process_set"] = None if everyone else self.process_set.ranks
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        ranks = state["process_set"]
        process_set = global_process_set if ranks is None else ProcessSet(ranks)
        super().__setstate__(state | {"process_set": process_set})


def _joint_statistics(input: Tensor, process_set: ProcessSet) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and biased variance of all ranks' batches: float64, shapes (), (C), (C)."""
    channels = input.shape[1]
    count = input.numel() // channels if channels else 0
    own_count = torch.tensor([count], dtype=torch.float64, device=input.device)
    row = torch.cat([own_count, *_local_statistics(input, count)])
    gather = Operation(kind=ALLGATHER, label=f"{_LABEL}.statistics", process_set=process_set)
    (table,) = gather.run_detached([row.unsqueeze(0)])
    counts, means, squares = table.split([1, channels, channels], dim=1)
    total = counts.sum()
    if count < 2 and total.item() == 1:
        raise ValueError(
            "SyncBatchNorm: all ranks together have a single value per channel, which has no "
            "variance; use a larger batch, or eval()"
        )
    at_least_one = total.clamp(min=1)
    mean = (counts * means).sum(0) / at_least_one
    variance = (squares + counts * (means - mean) ** 2).sum(0) / at_least_one
    return total, mean, variance


def _local_statistics(input: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Mean and M2 of this rank's batch, in the dtype of statistics: shapes (C), (C)."""
    mean = torch.zeros(input.shape[1], dtype=_statistics_dtype(input), device=input.device)
    if count == 0:
        return mean, mean
    # The kernel of batch_norm reads the input once or twice and copies none of it, where var_mean
    # takes several times as long; with a momentum of 1 the running statistics are the batch's.
    unbiased = torch.zeros_like(mean)
    torch.batch_norm(
        input,
        weight=None,
        bias=None,
        running_mean=mean,
        running_var=unbiased,
        training=True,
        momentum=1.0,
        eps=1.0,
        cudnn_enabled=False,
    )
    return mean, unbiased * (count - 1) if count > 1 else torch.zeros_like(mean)


def _statistics_dtype(input: Tensor) -> torch.dtype:
    return torch.float64 if input.dtype is torch.float64 else torch.float32


class _Normalization(torch.autograd.Function):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, with x also inside mean and variance.

    Ioffe and Szegedy, "Batch Normalization", 2015, with the sums of the gradient over all ranks:
    dx = weight / sigma (dy - sum(dy) / n - (x - mean) / sigma^2 sum(dy (x - mean)) / n).
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        total: Tensor,
        eps: float,
        process_set: ProcessSet,
    ) -> Tensor:
        dtype = _statistics_dtype(input)
        ctx.save_for_backward(
            input, weight, mean.to(dtype), torch.rsqrt(variance + eps).to(dtype), total
        )
        ctx.process_set = process_set
        ctx.bias_dtype = None if bias is None else bias.dtype
        return torch.batch_norm(
            input,
            weight=None if weight is None else weight.to(dtype),
            bias=None if bias is None else bias.to(dtype),
            running_mean=mean.to(dtype),
            running_var=variance.to(dtype),
            training=False,
            momentum=0.0,
            eps=eps,
            cudnn_enabled=False,
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            results = _Normalization._first_derivative(ctx, gradient)
        if torch.is_grad_enabled():  # create_graph=True
            sources = [gradient, *(saved for saved in ctx.saved_tensors[:2] if saved is not None)]
            wanted = [result for result in results if result is not None]
            marked = iter(_NoSecondDerivative.apply(len(sources), *sources, *wanted))
            results = [None if result is None else next(marked) for result in results]
        return (*results, *(None,) * 5)

    @staticmethod
    def _first_derivative(ctx: Any, gradient: Tensor) -> list[Tensor | None]:
        input, weight, mean, inverse, total = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        shape = [1, -1] + [1] * (input.dim() - 2)
        others = [dim for dim in range(input.dim()) if dim != 1]
        deviation = input - mean.view(shape)
        sums = torch.stack(
            [
                gradient.sum(others, dtype=mean.dtype),  # of dy
                (gradient * deviation).sum(others),  # of dy (x - mean)
            ]
        )
        grad_input = grad_weight = grad_bias = None
        if needs_weight and weight is not None:
            grad_weight = (sums[1] * inverse).to(weight.dtype)
        if needs_bias and ctx.bias_dtype is not None:
            grad_bias = sums[0].to(ctx.bias_dtype)
        if needs_input:
            reduction = Operation(
                kind=ALLREDUCE,
                label=f"{_LABEL}.gradients",
                process_set=ctx.process_set,
                reduce_op=SUM,
            )
            (joint,) = reduction.run_detached([sums])
            mean_dy, mean_dy_deviation = joint / total.clamp(min=1).to(joint.dtype)
            slope = inverse if weight is None else inverse * weight.to(inverse.dtype)
            result = gradient - mean_dy.view(shape)
            result.addcmul_(deviation, (mean_dy_deviation * inverse**2).view(shape), value=-1)
            grad_input = result.mul_(slope.view(shape)).to(input.dtype)
        return [grad_input, grad_weight, grad_bias]


class _NoSecondDerivative(torch.autograd.Function):
    """The gradients as they are, with an error in place of their own gradient."""

    @staticmethod
    def forward(ctx: Any, sources: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.view_as(gradient) for gradient in tensors[sources:])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(
            "SyncBatchNorm has no second derivative: leave it out of what is differentiated twice "
            "(a gradient penalty, for example), or use a layer without batch statistics there"
        )
