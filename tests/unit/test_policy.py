"""Launch numbers on CPU, on one H200 and on devices made up."""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ep_a2a import policy
from ep_a2a.kernels.target import REGISTERS_PER_SM
from ep_a2a.ops.intra_node import fitted_launch
from tests.cases.configs import deepseek_v3

H200_SMS = 132
WITH_ROLES = [policy.Phase.LOW_LATENCY_DISPATCH, policy.Phase.COMBINE]


config_of = functools.partial(deepseek_v3, max_token_type_size=2)


def numbers(launch: policy.Launch) -> tuple[int, int]:
    return launch.num_programs, launch.num_warps


def threads(launch: policy.Launch) -> int:
    return 32 * launch.num_warps * launch.num_programs


def least(phase: policy.Phase, *, by_all: bool = False) -> int:
    """Where there are roles: those that speak with the peers, one that sends, one that receives."""
    return policy.FLAG_PROGRAMS[phase] + 2 if phase in WITH_ROLES and not by_all else 1


def most(phase: policy.Phase, num_warps: int, num_sms: int = H200_SMS) -> int:
    """Programs that a device is given at most."""
    return num_sms * max(1, policy.THREADS_PER_SM[phase] // (32 * num_warps))


def check_roles(launch: policy.Launch, phase: policy.Phase) -> None:
    if launch.by_all:
        assert phase is policy.Phase.COMBINE
        assert launch.num_senders == launch.num_programs <= policy.MAX_DISPATCH_PROGRAMS
        return
    if phase in WITH_ROLES:
        assert launch.num_programs == policy.FLAG_PROGRAMS[phase] + launch.num_senders + launch.num_receivers
    assert min(launch.num_senders, launch.num_receivers) >= 1


@pytest.mark.parametrize("phase", policy.Phase)
@pytest.mark.parametrize(
    ("block_num", "programs"), [(-1, policy.INTERPRETED_PROGRAMS), (80, policy.INTERPRETED_PROGRAMS), (4, 4)]
)
def test_interpreted_launches_are_few_programs_and_the_callers_if_it_asks_for_few(phase, block_num, programs):
    # more than one, so that what programs share is exercised; MORI's example asks for 80
    assert policy.INTERPRETED_PROGRAMS > 1
    for tokens, step_tokens in ((0, 4096), (4096, 4096), (16, 16)):
        for launch in ("auto", "manual"):
            found = policy.choose_launch(config_of(launch=launch), phase, tokens, step_tokens, 0, block_num, 8)
            assert found == policy.Launch(programs, 1, programs, programs)


@pytest.mark.parametrize(
    ("num_tokens", "num_programs"),
    [
        *((number, number + 1) for number in (0, 1, 16, 131)),
        *((527, H200_SMS), (528, 133), (1023, 256), (4096, 2 * H200_SMS)),
    ],
)
def test_a_dispatch_has_a_program_per_token_and_one_that_receives(num_tokens, num_programs):
    """A second one on a multiprocessor takes four tokens a program."""
    launch = policy.choose_launch(config_of(), policy.Phase.BULK_DISPATCH, num_tokens, 4096, H200_SMS)
    assert launch.num_programs == num_programs


@pytest.mark.parametrize("phase", policy.Phase)
@pytest.mark.parametrize("world_size", [8, 72])
def test_many_tokens_fill_the_device_and_one_token_has_no_program_without_work(phase, world_size):
    config = config_of(world_size=world_size, num_experts_per_rank=4, gpu_per_node=world_size)
    full = policy.THREADS_PER_SM[phase] * H200_SMS
    assert full * 0.9 <= threads(policy.choose_launch(config, phase, 4096, 4096, H200_SMS)) <= full
    one = policy.choose_launch(config, phase, 1, 1, H200_SMS)
    assert one.num_senders == 1 or phase is policy.Phase.COMBINE
    assert one.num_receivers == -(-7168 // one.add_elements) or phase is not policy.Phase.COMBINE


@pytest.mark.parametrize(("world_size", "step_tokens"), [(8, 1023), (8, 1024), (72, 129)])
def test_without_a_bound_tokens_are_sent_one_by_one(world_size, step_tokens):
    config = config_of(world_size=world_size)
    assert policy.choose_launch(config, policy.Phase.BULK_DISPATCH, 100, step_tokens, H200_SMS).send_rows == 1


@pytest.mark.parametrize("layout", ["compact", "rank_major", "expert_major"])
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_few_low_latency_tokens_have_a_program_for_every_row_that_travels(world_size, layout):
    """A rank's own rows travel in layout compact only; there is a receiver all the same."""
    config = config_of(world_size=world_size, layout=layout)
    launch = policy.choose_launch(config, policy.Phase.LOW_LATENCY_DISPATCH, 4, 5, H200_SMS)
    sources = world_size if layout == "compact" else world_size - 1
    assert (launch.num_senders, launch.num_receivers) == (4, max(1, 5 * sources))
    check_roles(launch, policy.Phase.LOW_LATENCY_DISPATCH)


@pytest.mark.parametrize("phase", policy.Phase)
@pytest.mark.parametrize(
    ("step_tokens", "world_size", "few"),
    [
        (1, 8, True),
        (policy.FEW_TOKENS - 1, 8, True),
        # as many are few where dispatch is a low-latency one
        (policy.FEW_TOKENS, 8, False),
        (policy.FEW_TOKENS, 4, True),
        (policy.FEW_TOKENS + 1, 4, False),
        (128, 2, False),
        (4096, 8, False),
    ],
)
def test_receivers_of_few_tokens_look_at_everything_at_once(phase, step_tokens, world_size, few):
    """Later ones leave the bandwidth to what they wait for. All ranks agree on step_tokens; their own T differs."""
    for num_tokens in (0, step_tokens):
        launch = policy.choose_launch(config_of(world_size=world_size), phase, num_tokens, step_tokens, H200_SMS)
        assert launch.sparse_polls == (not few and phase is policy.Phase.LOW_LATENCY_DISPATCH)


@pytest.mark.parametrize("phase", policy.Phase)
def test_the_callers_numbers_come_before_the_configs_and_those_only_where_it_says_so(phase):
    def chosen(*call: int, **changes: Any) -> policy.Launch:
        return policy.choose_launch(config_of(**changes), phase, 4096, 4096, H200_SMS, *call)

    default, own = chosen(), {"block_num": 64, "warp_num_per_block": 16}
    for launch in ("auto", "manual"):
        assert numbers(chosen(80, 8, launch=launch, **own)) == (80, 8)
        assert numbers(chosen(20, launch=launch)) == (20, default.num_warps if launch == "auto" else 8)
        assert chosen(-1, 4, launch=launch).num_warps == 4
    assert chosen(**own) == default
    # MORI's 80 blocks of 16 warps: one program of 16 warps fits on a multiprocessor
    for num_warps in (4, 16):
        assert numbers(chosen(launch="manual", block_num=80, warp_num_per_block=num_warps)) == (80, num_warps)
    # what a launch looks at is not the caller's
    assert chosen(launch="manual", **own).sparse_polls == (phase is policy.Phase.LOW_LATENCY_DISPATCH)


@pytest.mark.parametrize(
    ("asked", "given_"), [(1, 1), (2, 2), (3, 2), (7, 4), (8, 8), (12, 8), (16, 16), (24, 16), (32, 32), (64, 32)]
)
@pytest.mark.parametrize("phase", policy.Phase)
def test_warps_are_a_power_of_two_up_to_a_thousand_threads(phase, asked, given_):
    assert policy.choose_launch(config_of(), phase, 64, 64, H200_SMS, warp_per_block=asked).num_warps == given_


@pytest.mark.parametrize("phase", policy.Phase)
@pytest.mark.parametrize("max_sms", [1, 4, 20, 64])
@pytest.mark.parametrize(("quant_type", "most"), [("none", 16), ("fp8_blockwise", 32)])
def test_max_sms_bounds_programs(phase, max_sms, quant_type, most):
    """The GPU spreads programs over all multiprocessors, so a bound on those is a bound on programs."""
    given = {"max_sms": max_sms, "quant_type": quant_type}
    for config in (config_of(**given), config_of(**given, launch="manual", block_num=1000)):
        for block_num in (-1, 1000):
            launch = policy.choose_launch(config, phase, 4096, 4096, H200_SMS, block_num)
            by_all = phase is policy.Phase.COMBINE and max_sms <= most
            assert launch.by_all == by_all
            assert launch.num_programs == max(least(phase, by_all=by_all), max_sms)
            called = policy.choose_launch(
                replace(config, max_sms=0), phase, 4096, 4096, H200_SMS, block_num, max_sms=max_sms
            )
            assert called.num_programs == max(least(phase, by_all=called.by_all), max_sms)


@pytest.mark.parametrize(("world_size", "least", "roles"), [(2, 904, (65, 66)), (4, 501, (52, 79)), (8, 343, (45, 86))])
def test_programs_that_cast_many_rows_are_wide(world_size, least, roles):
    """With all multiprocessors; more of them send where more of the rows stay. Without a cast, none are."""
    casts = config_of(world_size=world_size, quant_type="fp8_blockwise")
    for tokens in (policy.FEW_TOKENS, least - 1):
        launch = policy.choose_launch(casts, policy.Phase.COMBINE, tokens, tokens, H200_SMS)
        assert (launch.num_warps, launch.send_rows, launch.add_elements, launch.read_ahead) == (4, 1, 1024, False)
    for tokens in (least, 4096):
        launch = policy.choose_launch(casts, policy.Phase.COMBINE, tokens, tokens, H200_SMS)
        assert (launch.num_warps, launch.send_rows, launch.read_ahead) == (16, policy.WIDE_CASTER_ROWS, True)
        assert (launch.num_senders, launch.num_receivers) == roles
        assert launch.send_elements == launch.add_elements == policy.SEND_ROW_ELEMENTS
        check_roles(launch, policy.Phase.COMBINE)
        # of the caller's warps nobody knows whether they hold whole rows
        own = policy.choose_launch(casts, policy.Phase.COMBINE, tokens, tokens, H200_SMS, warp_per_block=8)
        assert (own.num_warps, own.send_rows, own.read_ahead) == (8, 1, False)
        plain = policy.choose_launch(config_of(world_size=world_size), policy.Phase.COMBINE, tokens, tokens, H200_SMS)
        assert (plain.num_warps, plain.send_rows, plain.read_ahead) == (4, 1, False)


@pytest.mark.parametrize("phase", policy.Phase)
@pytest.mark.parametrize("max_sms", [1, 4, 20, 64])
@pytest.mark.parametrize(
    ("quant_type", "num_rows"), [("none", policy.WIDE_ROWS), ("fp8_blockwise", policy.WIDE_CASTER_ROWS)]
)
def test_programs_are_wide_where_they_are_bounded(phase, max_sms, quant_type, num_rows):
    """A multiprocessor has one program then, which brings its threads; of a combine it takes whole rows."""
    config = config_of(max_sms=max_sms, quant_type=quant_type)
    launch = policy.choose_launch(config, phase, 4096, 4096, H200_SMS)
    unbounded = policy.choose_launch(config_of(quant_type=quant_type), phase, 4096, 4096, H200_SMS)
    assert launch.num_warps == policy.WIDE_WARPS >= unbounded.num_warps
    if phase is policy.Phase.COMBINE:
        assert launch.send_elements == launch.add_elements == policy.SEND_ROW_ELEMENTS
        assert (launch.send_rows, launch.read_ahead) == (num_rows, True)
        # the caller's warps are the caller's, whatever is bounded
        own = policy.choose_launch(config, phase, 4096, 4096, H200_SMS, warp_per_block=4)
        assert own == replace(launch, num_warps=4)
    else:
        assert (launch.send_elements, launch.add_elements) == (unbounded.send_elements, unbounded.add_elements)
    if phase is policy.Phase.BULK_DISPATCH:
        assert (launch.send_rows, unbounded.send_rows) == (policy.TILE_TOKENS, 1)
    # the config's own numbers are not made wide
    manual = config_of(max_sms=max_sms, launch="manual", block_num=1000, warp_num_per_block=4)
    assert policy.choose_launch(manual, phase, 4096, 4096, H200_SMS).num_warps == 4


@pytest.mark.parametrize("quant_type", ["none", "fp8_blockwise"])
@pytest.mark.parametrize("world_size", [2, 4, 8, 72])
@pytest.mark.parametrize("num_tokens", [512, 4096])
@pytest.mark.parametrize("max_sms", [1, 2, 3, 8, 12, 16, 24, 64])
def test_programs_that_send_and_programs_that_add_end_together(quant_type, world_size, num_tokens, max_sms):
    """By what the policy takes rows and tokens to cost: soon after equal shares of all work would, or the links."""
    config = config_of(quant_type=quant_type, world_size=world_size, num_experts_per_rank=4)
    launch = policy.choose_launch(config, policy.Phase.COMBINE, num_tokens, num_tokens, H200_SMS, max_sms=max_sms)
    row_ns, sent_ns, added_ns = policy._combine_ns(config, num_tokens, num_tokens)
    wire_ns = sent_ns / row_ns * config.hidden_dim * config.combine_wire_dtype.itemsize / policy.WIRE_BYTES_PER_NS
    end_ns = max(sent_ns / launch.num_senders, wire_ns)
    if launch.by_all:
        end_ns += added_ns / max_sms
    else:
        end_ns = max(end_ns, added_ns / launch.num_receivers)
    assert end_ns <= 1.2 * max((sent_ns + added_ns) / max_sms, wire_ns)


@pytest.mark.parametrize("phase", policy.Phase)
@pytest.mark.parametrize("max_sms", [0, H200_SMS, 500])
def test_a_bound_that_is_none_changes_nothing(phase, max_sms):
    launch = policy.choose_launch(config_of(max_sms=max_sms), phase, 4096, 4096, H200_SMS)
    assert launch == policy.choose_launch(config_of(), phase, 4096, 4096, H200_SMS)
    assert launch == policy.choose_launch(
        config_of(max_sms=policy.MOST_ADDING_ARRIVED + 1), phase, 4096, 4096, H200_SMS, max_sms=0
    )


@pytest.mark.parametrize("max_sms", [0, 2, 24])
def test_programs_that_leave_room_for_products(max_sms):
    """One for each multiprocessor, and they fit beside 256 threads with 208 registers."""
    for phase in (policy.Phase.BULK_DISPATCH, policy.Phase.COMBINE):
        launch = policy.choose_launch(config_of(max_sms=max_sms), phase, 4096, 4096, H200_SMS, shares_sm=True)
        check_roles(launch, phase)
        assert launch.num_programs == max(least(phase, by_all=launch.by_all), max_sms or H200_SMS)
        assert 32 * launch.num_warps * policy.SHARED_REGISTERS + 256 * 208 <= REGISTERS_PER_SM
        for launch, block_num in (("manual", -1), ("auto", 20)):
            arguments = config_of(max_sms=max_sms, launch=launch), phase, 4096, 4096, H200_SMS, block_num
            assert policy.choose_launch(*arguments, shares_sm=True) == policy.choose_launch(*arguments), (
                "given numbers count"
            )
    arguments = config_of(max_sms=max_sms), policy.Phase.LOW_LATENCY_DISPATCH, 8, 8, H200_SMS
    assert policy.choose_launch(*arguments, shares_sm=True) == policy.choose_launch(*arguments)


@settings(max_examples=300, derandomize=True, database=None)
@given(
    phase=st.sampled_from(policy.Phase),
    step_tokens=st.integers(1, 1 << 20),
    share=st.floats(0, 1),
    num_sms=st.integers(1, 200) | st.just(10_000),
    max_sms=st.sampled_from([0, 1, 7, 64, 300]),
    launch=st.sampled_from(["auto", "manual"]),
    config_numbers=st.tuples(st.integers(1, 5000), st.integers(1, 64)),
    call_numbers=st.tuples(st.integers(-1, 5000), st.integers(-1, 64)),
    world_size=st.sampled_from([1, 3, 8, 72]),
    hidden_dim=st.sampled_from([8, 256, 7168]),
)
@example(policy.Phase.COMBINE, 4096, 1.0, 2, 1, "auto", (1, 1), (-1, -1), 8, 7168)
def test_no_grid_exceeds_what_fits(
    phase, step_tokens, share, num_sms, max_sms, launch, config_numbers, call_numbers, world_size, hidden_dim
):
    """Programs wait for other ranks: those that are not resident must not be needed to let the others go on."""
    config = config_of(
        world_size=world_size,
        max_sms=max_sms,
        launch=launch,
        hidden_dim=hidden_dim,
        block_num=config_numbers[0],
        warp_num_per_block=config_numbers[1],
    )
    arguments = (phase, int(step_tokens * share), step_tokens, num_sms, *call_numbers)
    chosen = policy.choose_launch(config, *arguments)
    sms = min(num_sms, max_sms or num_sms)
    assert chosen.num_warps in (1, 2, 4, 8, 16, 32)
    check_roles(chosen, phase)
    allowed = sms if sms < num_sms else most(phase, chosen.num_warps, num_sms)
    assert 1 <= chosen.num_programs <= max(least(phase, by_all=chosen.by_all), allowed)
    if phase is policy.Phase.BULK_DISPATCH:
        assert chosen.num_programs <= policy.MAX_DISPATCH_PROGRAMS
    assert min(chosen.send_elements, chosen.add_elements) >= 1
    # the same question has the same answer: ranks and replays must not differ
    assert chosen == policy.choose_launch(config, *arguments)


@settings(max_examples=300, derandomize=True, database=None)
@given(
    phase=st.sampled_from(policy.Phase),
    bound=st.integers(1, 2000),
    work=st.tuples(st.integers(1, 1 << 20), st.integers(1, 1 << 20)),
    num_programs=st.none() | st.integers(1, 5000),
)
def test_a_launch_is_cut_down_to_what_fits(phase, bound, work, num_programs):
    """Also a second time, by the registers of a kernel that has been compiled; a wish that fits stays as it is."""
    senders, receivers = work
    wished = policy.FLAG_PROGRAMS.get(phase, 0) + senders + receivers if num_programs is None else num_programs
    wish = policy.Launch(wished, 4, senders, receivers)
    fitted = policy.fit(wish, phase, bound)
    check_roles(fitted, phase)
    assert least(phase) <= fitted.num_programs <= max(least(phase), bound)
    assert fitted.num_programs <= max(least(phase), wished)
    assert policy.fit(fitted, phase, bound) == fitted
    if phase in WITH_ROLES:
        # no program without work
        assert fitted.num_senders <= senders
        assert fitted.num_receivers <= receivers
        if num_programs is None and wished <= bound:
            assert fitted == wish


def test_a_bound_of_all_multiprocessors_bounds_nothing():
    """A compiled launch is cut to what its registers leave room for, not to one program for each multiprocessor."""
    variant = SimpleNamespace(programs_per_sm=4)
    launch = policy.Launch(528, 4, 200, 327)
    for max_sms, most in ((0, 528), (H200_SMS, 528), (H200_SMS + 9, 528), (24, 24)):
        kernels = SimpleNamespace(num_sms=H200_SMS, max_sms=max_sms)
        fitted = fitted_launch(kernels, launch, policy.Phase.COMBINE, variant)
        assert fitted.num_programs == most
