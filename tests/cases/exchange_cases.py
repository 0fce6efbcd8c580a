"""Exchanges with checked data, for processes of one host and of several."""

import torch

from ep_a2a.memory.node_transport import NodeAllToAll

GUARD_BYTES = 64
POISON = 0xA5


def block(source: int, target: int, step: int, num_bytes: int) -> torch.Tensor:
    """What rank `source` sends to rank `target` in a step: bytes that no other pair or step has."""
    generator = torch.Generator().manual_seed((step * 997 + source) * 997 + target)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def exchange_and_check(transport: NodeAllToAll, rank: int, step: int, num_bytes: int, device: torch.device) -> None:
    """One exchange into poisoned memory, between guards, checked bit for bit; what was sent must be as before."""
    peers = transport.grid.partners
    sent = torch.stack([block(rank, peer, step, num_bytes) for peer in peers]).to(device)
    before = sent.clone()
    memory = torch.full((GUARD_BYTES + sent.numel() + GUARD_BYTES,), POISON, dtype=torch.uint8, device=device)
    transport.exchange(memory[GUARD_BYTES:-GUARD_BYTES].view(sent.shape), sent)
    check(transport, rank, step, num_bytes, memory)
    assert torch.equal(sent, before)


def check(transport: NodeAllToAll, rank: int, step: int, num_bytes: int, memory: torch.Tensor) -> None:
    """Whether `memory` holds what the peers sent in this step, between two guards."""
    wanted = torch.stack([block(peer, rank, step, num_bytes) for peer in transport.grid.partners])
    received = memory.cpu()
    assert torch.equal(received[GUARD_BYTES:-GUARD_BYTES].view(wanted.shape), wanted)
    for guard in (received[:GUARD_BYTES], received[-GUARD_BYTES:]):
        assert guard.eq(POISON).all()
