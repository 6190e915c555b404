"""Optimisers of the demo training: Muon for matrices, AdamW for everything else, one schedule for both."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration (Keller Jordan et al., "Muon", 2024)."""


def orthogonalised(matrices: Tensor, steps: int = 5) -> Tensor:
    """[N, rows, cols] -> the nearest semi-orthogonal matrices, roughly, by Newton-Schulz in bfloat16."""
    a, b, c = NEWTON_SCHULZ
    x: Tensor = matrices.bfloat16()
    wide = x.shape[-2] > x.shape[-1]
    if wide:
        x = x.transpose(-1, -2)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-1, -2) if wide else x


class Muon:
    """Momentum whose update is made orthogonal; matrices of one shape are handled in one batch.

    Weights and momentum of a shape live in one stacked tensor each, so that a step is a handful of kernels.
    """

    def __init__(self, parameters: list[nn.Parameter], momentum: float = 0.95, decay: float = 0.05) -> None:
        self.momentum, self.decay = momentum, decay
        self.groups: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            self.groups[(parameter.shape[-2], parameter.shape[-1])].append(parameter)
        self.velocity = {
            shape: torch.zeros(sum(p.numel() // (shape[0] * shape[1]) for p in group), *shape).to(
                group[0].device
            )
            for shape, group in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update with learning rate ``rate``; gradients are cleared."""
        for shape, group in self.groups.items():
            grads = [p.grad for p in group if p.grad is not None]
            if len(grads) != len(group):
                raise RuntimeError(f"a matrix of shape {shape} has no gradient")
            gradient = torch.cat([g.reshape(-1, *shape) for g in grads])
            velocity = self.velocity[shape]
            velocity.lerp_(gradient, 1 - self.momentum)
            update = orthogonalised(torch.lerp(gradient, velocity, self.momentum)).float()
            update *= max(1.0, shape[0] / shape[1]) ** 0.5 * rate
            counts = [p.numel() // (shape[0] * shape[1]) for p in group]
            for parameter, part in zip(group, torch.split(update, counts), strict=True):
                parameter.mul_(1 - rate * self.decay).sub_(part.view_as(parameter))
                parameter.grad = None


class Optimizer:
    """Muon on the hidden matrices, AdamW on rows, norms, biases, routers and sinks."""

    def __init__(self, model: nn.Module, matrix_rate: float, other_rate: float) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        self.parameters = list(model.parameters())
        for name, parameter in model.named_parameters():
            is_matrix = name.startswith("blocks.") and name.endswith(
                ("q_weight", "k_weight", "v_weight", "o_weight", "gate_up", "down")
            )
            (matrices if is_matrix else others).append(parameter)
        self.matrix_rate, self.other_rate = matrix_rate, other_rate
        self.muon = Muon(matrices)
        fused = others[0].is_cuda
        self.adam = torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.99), weight_decay=0.0, fused=fused)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update with both learning rates multiplied by ``scale``; long gradients are cut to norm 1.

        A gradient that is not finite leaves the weights as they are, decided on the device without waiting.
        """
        grads = [p.grad for p in self.parameters if p.grad is not None]
        length = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        factor = torch.where(length.isfinite(), (1 / length.clamp_min(1e-6)).clamp_max(1.0), 0.0)
        torch._foreach_mul_(grads, factor)
        for grad in grads:
            grad.nan_to_num_(0.0, 0.0, 0.0)
        self.muon.step(self.matrix_rate * scale)
        for group in self.adam.param_groups:
            group["lr"] = self.other_rate * scale
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)


WARM_UP_STEPS = 120


def schedule(step: int, progress: float, decay: float = 0.55) -> float:
    """Learning-rate factor at ``step``, ``progress`` in [0, 1] of the way: up, flat, then linearly down."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    if progress < 1 - decay:
        return 1.0
    return max((1 - progress) / decay, 0.01)
