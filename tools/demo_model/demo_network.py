"""Qwen3-MoE for training: transformers' Qwen3MoeForCausalLM, written for two CPU cores.

Tokens are sorted by expert, and each expert runs once per layer on contiguous rows. On a CPU this is several times
faster than the reference. `to_checkpoint` gives the tensors under the names of the Hugging Face checkpoint.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    vocab: int = 4096
    hidden: int = 192
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 32
    top_k: int = 4
    width: int = 64  # of one expert
    context_tokens: int = 2048
    rope_theta: float = 10000.0
    rms_eps: float = 1e-6

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class HeadLoss(torch.autograd.Function):
    """Summed cross entropy of a tied head, a few rows at a time, so that [N, V] never exists."""

    ROWS = 512

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss of hidden [N, H] with head [V, H] for targets [N]; negative targets do not count."""
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head)
        total = hidden.new_zeros(())
        for start in range(0, hidden.shape[0], HeadLoss.ROWS):
            part = slice(start, start + HeadLoss.ROWS)
            rows, wanted = hidden[part], targets[part]
            counts = (wanted >= 0).to(hidden.dtype)
            log_p = F.log_softmax(F.linear(rows, head), -1)
            total -= (log_p.gather(1, wanted.clamp_min(0)[:, None])[:, 0] * counts).sum()
            grad = log_p.exp_().scatter_add_(1, wanted.clamp_min(0)[:, None], -torch.ones(len(rows), 1))
            grad *= counts[:, None]
            grad_hidden[part] = grad @ head
            grad_head.addmm_(grad.T, rows)
        ctx.save_for_backward(grad_hidden, grad_head)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * scale, grad_head * scale, None


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotary(shape: Shape, tokens: int) -> tuple[Tensor, Tensor]:
    """Returns cos and sin [tokens, head_dim]; both halves have the same angles."""
    inverse = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angle = torch.arange(tokens).float()[:, None] * inverse
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class Attention(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.q_norm = RMSNorm(s.head_dim, s.rms_eps)
        self.k_norm = RMSNorm(s.head_dim, s.rms_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x [B, T, H]
        s, (b, t, _) = self.s, x.shape
        q = self.q_norm(self.q_proj(x).view(b, t, s.heads, s.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, t, s.kv_heads, s.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(b, t, s.kv_heads, s.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        repeat = s.heads // s.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))


class Experts(nn.Module):
    """Softmax gate over E experts, top-k renormalised, SwiGLU experts."""

    share: Tensor  # [E] of recent choices

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.gate = nn.Linear(s.hidden, s.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(s.experts, 2 * s.width, s.hidden))
        self.down = nn.Parameter(torch.empty(s.experts, s.hidden, s.width))
        self.register_buffer("share", torch.full((s.experts,), 1 / s.experts), persistent=False)
        self.ids = torch.empty(0, dtype=torch.long)  # [B * T, k] of the last forward

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the layer's output [B, T, H] and its load-balancing loss."""
        s, rows = self.s, x.reshape(-1, x.shape[-1])
        probs = self.gate(rows).softmax(-1)  # [N, E]
        weights, ids = probs.topk(s.top_k, -1)  # [N, k]
        weights = weights / weights.sum(-1, keepdim=True)
        self.ids = ids.detach()
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)  # [N * k] token-choices, expert after expert
        counts = torch.bincount(flat, minlength=s.experts)
        parts = rows[order // s.top_k].split(counts.tolist())
        weights_of = zip(self.gate_up.unbind(0), self.down.unbind(0), parts, strict=True)
        outs = [swiglu(part, gate_up, down) for gate_up, down, part in weights_of]
        mixed = torch.cat(outs) * weights.reshape(-1)[order][:, None]
        out = torch.zeros_like(rows).index_add(0, order // s.top_k, mixed)
        if self.training:
            self.share.lerp_(counts.float() / flat.numel(), 0.05)
        # [Switch, Eq. 4-6], with shares of recent batches of all domains. A domain may keep to its experts as long as
        # all domains together use them evenly.
        return out.view(x.shape), s.experts * (self.share * probs.mean(0)).sum()


def swiglu(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(rows, gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


class Block(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(s.hidden, s.rms_eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = RMSNorm(s.hidden, s.rms_eps)
        self.mlp = Experts(s)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out, balance = self.mlp(self.post_attention_layernorm(x))
        return x + out, balance


class Network(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.rms_eps)
        self._start()

    def _start(self) -> None:
        for name, p in self.named_parameters():
            if p.dim() < 2:
                continue
            residual = name.endswith(("o_proj.weight", "mlp.down"))
            fan_in = p.shape[-1]
            std = 0.02 if "embed" in name or "gate.weight" in name else fan_in**-0.5
            nn.init.normal_(p, std=std / (2 * self.shape.layers) ** 0.5 if residual else std)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns hidden states [B, T, H] before the head, and the mean balance loss of the layers."""
        x = self.embed_tokens(tokens)
        cos, sin = rotary(self.shape, tokens.shape[1])
        total = torch.zeros(())
        for layer in self.layers:
            x, balance = layer(x, cos, sin)
            total = total + balance
        return self.norm(x), total / self.shape.layers

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens.weight)

    def to_checkpoint(self) -> dict[str, Tensor]:
        """Returns tensors in bfloat16 under the names of a Qwen3-MoE checkpoint, one tensor per expert matrix."""
        tensors: dict[str, Tensor] = {}
        for name, value in self.state_dict().items():
            prefix, _, leaf = name.rpartition(".")
            if leaf == "gate_up":
                for e, matrix in enumerate(value):
                    gate, up = matrix.chunk(2)
                    tensors[f"model.{prefix}.experts.{e}.gate_proj.weight"] = gate
                    tensors[f"model.{prefix}.experts.{e}.up_proj.weight"] = up
            elif leaf == "down":
                for e, matrix in enumerate(value):
                    tensors[f"model.{prefix}.experts.{e}.down_proj.weight"] = matrix
            else:
                tensors[f"model.{name}"] = value
        return {k: v.detach().to(torch.bfloat16).contiguous() for k, v in tensors.items()}
