"""What DeepEP's contenders say they cannot run."""

from __future__ import annotations

import sys
import types
from unittest import mock

import pytest
import torch

from ep_a2a.commands.bench import deepep
from ep_a2a.commands.measure.workload import Workload


@pytest.mark.parametrize(("num_tokens", "is_taken"), [(511, True), (512, False)])
def test_low_latency_mode_takes_as_many_tokens_as_its_queues_hold(
    num_tokens: int, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", types.ModuleType("deep_ep"))
    monkeypatch.setattr(deepep, "unavailable_on", mock.Mock(return_value=None))
    monkeypatch.setattr(deepep, "BUFFER", mock.Mock(stand_in_problem=mock.Mock(return_value=None)))
    moved = Workload(
        world_size=4,
        num_tokens=num_tokens,
        max_num_tokens=num_tokens,
        hidden_dim=7168,
        topk=8,
        num_experts=256,
        quant_type="fp8_per_1x128",
        layout="rank_major",
    )
    reason = deepep.unavailable(moved, torch.device("cuda"), low_latency=True)
    assert reason == (None if is_taken else "V1's low-latency mode takes at most 511 tokens")
