"""EpDispatchCombineConfig: what is refused, what ranks must agree on, what is derived."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

from ep_a2a import env
from ep_a2a.config import EpDispatchCombineConfig, Layout, QuantType, ScaleFormat, num_owned_experts, parse_enum
from ep_a2a.errors import ConfigError, UnknownNameError
from tests.cases.configs import deepseek_v3
from tests.cases.tables import read_table

FP8 = torch.float8_e4m3fn
TABLES = read_table("configs")
MAY_BE_ZERO = {
    "rank",
    "scale_dim",
    "scale_type_size",
    "num_experts_per_rank",
    "max_total_recv_tokens",
    "rdma_block_num",
    "num_experts",
    "flagged_max_tokens",
    "max_sms",
}
INTEGER_MINIMUM = {
    each.name: 0 if each.name in MAY_BE_ZERO else 1
    for each in dataclasses.fields(EpDispatchCombineConfig)
    if each.type == "int"
}
assert INTEGER_MINIMUM.keys() >= MAY_BE_ZERO


config_of = functools.partial(
    deepseek_v3, rank=1, hidden_dim=512, max_num_inp_token_per_rank=128, num_experts_per_rank=4, num_experts_per_token=2
)


def test_a_config_is_a_value():
    assert config_of() == config_of()
    assert hash(config_of()) == hash(config_of())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config_of().rank = 2  # type: ignore[misc]


# --- what is refused ---


@pytest.mark.parametrize("name", INTEGER_MINIMUM)
def test_integers(name):
    minimum = INTEGER_MINIMUM[name]
    for value in (minimum - 1, 2.0, "2", True, None, np.True_, torch.tensor(True)):
        with pytest.raises(ConfigError, match=f"expected {name} to be an integer >= {minimum}") as caught:
            config_of(**{name: value})
        assert caught.value.got == repr(value)


IMPOSSIBLE = TABLES["impossible"]


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_values_are_named(name):
    changes, message = IMPOSSIBLE[name]
    with pytest.raises(ConfigError, match=message):
        config_of(**changes)


@pytest.mark.parametrize("name", ["timeout_secs", "first_timeout_secs"])
@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), "30", 1e10, True, torch.tensor(5.0), np.True_])
def test_timeouts_are_positive_numbers_that_fit(name, value):
    with pytest.raises(ConfigError, match=f"{name} to be a number of seconds above 0") as caught:
        config_of(**{name: value})
    assert caught.value.got == repr(value)


def test_the_first_step_may_take_at_least_as_long_as_any():
    assert config_of().first_timeout == env.FIRST_TIMEOUT_SECS.default > config_of().timeout
    assert config_of(timeout_secs=900.0).first_timeout == 900.0
    assert config_of(timeout_secs=5.0, first_timeout_secs=7.0).first_timeout == 7.0
    assert config_of(first_timeout_secs=1.0).first_timeout == config_of().timeout


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("layout", "'compact', 'rank_major', 'expert_major'"),
        ("quant_type", "'none', 'fp8_per_token', 'fp8_per_1x128', 'mxfp8', 'fp8_static', 'fp8_direct_cast', 'fp8_bl"),
        ("dispatch_quant_type", "'none', 'fp8_per_token'"),
        ("scale_format", "'float32', 'ue8m0'"),
        ("launch", "'auto' or 'manual'"),
        ("internode_transport", "'torch.distributed', 'peer_memory', 'nvshmem'"),
    ],
)
def test_unknown_names_list_the_known_ones(field, words):
    with pytest.raises(UnknownNameError) as caught:
        config_of(**{field: "sideways"})
    assert words in caught.value.expected
    assert caught.value.expected.startswith(field)
    assert caught.value.got == "'sideways'"


def test_names_may_be_enumeration_members():
    config = config_of(layout=Layout.RANK_MAJOR, quant_type=QuantType.FP8_PER_1X128, scale_format=ScaleFormat.UE8M0)
    assert config == config_of(layout="rank_major", quant_type="fp8_per_1x128", scale_format="ue8m0")
    assert config.digest() == config_of(layout="rank_major", quant_type="fp8_per_1x128", scale_format="ue8m0").digest()
    assert parse_enum(Layout, "compact", "layout") is Layout.COMPACT


def test_numpy_integers_become_plain_ones():
    """Engines compute sizes with numpy; a numpy integer would be written into JSON and digests differently."""
    names = [name for name in INTEGER_MINIMUM if name not in ("num_experts", "max_total_recv_tokens")]
    plain = config_of()
    for kind in (np.int64, np.int32, np.uint8):
        values = {name: kind(getattr(plain, name)) for name in names if getattr(plain, name) <= np.iinfo(kind).max}
        config = config_of(**values)
        assert config == plain
        assert config.digest() == plain.digest()
        assert all(type(getattr(config, name)) is int for name in INTEGER_MINIMUM)
    assert config_of(hidden_dim=torch.tensor(512)).hidden_dim == 512


# --- what ranks must agree on ---

OWN = {"rank", "num_experts_per_rank"}
SHARED = [field.name for field in dataclasses.fields(EpDispatchCombineConfig) if field.name not in OWN]


def test_every_field_is_shared_or_this_ranks_own():
    shared = config_of().shared_fields()
    assert set(shared) == {*SHARED, "wire_format_version"}
    assert all(isinstance(value, str) for value in shared.values())


# the total of experts is worked out when a config is made: test_the_total_of_experts_is_shared_not_the_ranks_share
@pytest.mark.parametrize("name", [name for name in SHARED if name != "num_experts"])
def test_digests_differ_where_one_shared_field_does(name):
    one, other = config_of(), config_of()
    # past the checks of what goes together: no field has this value by default
    object.__setattr__(other, name, 77)
    assert one.digest() != other.digest()
    different = {key for key, value in one.shared_fields().items() if other.shared_fields()[key] != value}
    assert different == {name}


def test_digests_are_equal_on_all_ranks():
    configs = [
        config_of(rank=rank, num_experts=60, num_experts_per_rank=num_owned_experts(60, 8, rank)) for rank in range(8)
    ]
    assert len({config.digest() for config in configs}) == 1
    assert len(set(configs)) == 8
    digest = configs[0].digest()
    assert len(digest) == 16
    assert int(digest, 16) >= 0


def test_what_is_left_out_equals_what_it_stands_for(monkeypatch):
    assert config_of(num_experts=32).digest() == config_of().digest()
    assert config_of(timeout_secs=env.TIMEOUT_SECS.default).digest() == config_of().digest()
    monkeypatch.setenv("EP_A2A_TIMEOUT_SECS", "4.5")
    assert config_of().timeout == 4.5
    assert config_of().shared_fields()["timeout_secs"] == "4.5"
    assert config_of(timeout_secs=4.5).digest() == config_of().digest()
    monkeypatch.setenv("EP_A2A_FIRST_TIMEOUT_SECS", "45")
    assert config_of(first_timeout_secs=45.0).digest() == config_of().digest()
    assert config_of(timeout_secs=30.0).digest() != config_of().digest()


def test_the_total_of_experts_is_shared_not_the_ranks_share():
    assert config_of(num_experts=60, num_experts_per_rank=8).digest() != config_of(num_experts_per_rank=8).digest()
    assert config_of(num_experts_per_rank=5).shared_fields()["num_experts"] == "40"


# --- what is derived ---


def test_sixty_experts_on_eight_ranks():
    own = [num_owned_experts(60, 8, rank) for rank in range(8)]
    assert own == [8, 8, 8, 8, 7, 7, 7, 7]
    for rank, number in enumerate(own):
        config = config_of(rank=rank, num_experts=60, num_experts_per_rank=number)
        assert (config.num_local_experts, config.total_experts) == (number, 60)
        # vLLM passes the largest number everywhere
        assert config_of(rank=rank, num_experts=60, num_experts_per_rank=8).num_local_experts == number
    with pytest.raises(ConfigError, match="num_experts_per_rank"):
        config_of(rank=0, num_experts=60, num_experts_per_rank=7)


def test_fewer_experts_than_ranks():
    for rank, number in enumerate([1, 1, 1, 0, 0, 0, 0, 0]):
        assert config_of(rank=rank, num_experts=3, num_experts_per_rank=number).num_local_experts == number


@pytest.mark.parametrize(
    ("world_size", "cap", "per_rank", "rows"),
    [
        (8, 0, 128, 1024),
        (8, 1, 1, 8),
        (8, 8, 1, 8),
        (8, 9, 2, 16),
        (8, 1000, 125, 1000),
        (8, 1001, 126, 1008),
        (8, 1024, 128, 1024),
        (8, 5000, 128, 1024),
        (3, 100, 34, 102),
        (1, 7, 7, 7),
    ],
)
def test_caps_are_rounded_as_mori_rounds_them(world_size, cap, per_rank, rows):
    config = config_of(world_size=world_size, rank=0, max_total_recv_tokens=cap)
    assert (config.max_num_recv_tokens_per_rank, config.max_num_recv_tokens) == (per_rank, rows)


@pytest.mark.parametrize(("changes", "wire_dtype", "combined_dtype", "scales"), TABLES["travels"])
def test_what_travels(changes, wire_dtype, combined_dtype, scales):
    config = config_of(**changes)
    assert (config.wire_dtype, config.combined_dtype) == (wire_dtype, combined_dtype)
    assert (config.num_scales, config.scale_bytes) == scales
    assert config.casts_in_dispatch == (wire_dtype == FP8 and config.data_type != FP8)
    assert config.dispatch_quant.value == (changes.get("dispatch_quant_type") or _dispatch_part(config.quant_type))
    assert config.combine_quant.value == (config.quant_type if "fp8_per" not in config.quant_type else "none")


def _dispatch_part(quant_type: str) -> str:
    return quant_type if quant_type.startswith("fp8_per_") else "none"
