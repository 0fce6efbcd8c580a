"""Turns the error record that kernels write into exceptions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ep_a2a import clock
from ep_a2a.errors import (
    AlternationError,
    CapacityError,
    ConfigMismatchError,
    EpA2AError,
    ForeignIndicesError,
    RankTimeoutError,
)
from ep_a2a.kernels.layout import FailureCode, Record, StepPhase
from ep_a2a.memory.agreement import agree
from ep_a2a.memory.verdict import RESET, GivenUp, Verdict
from ep_a2a.ops.wire_word import disagreement

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ep_a2a.ops.memory import BoundMemory, Timeouts
    from ep_a2a.ops.op import EpDispatchCombineOp

DISPATCH_PHASE, COMBINE_PHASE = StepPhase.DISPATCH, StepPhase.COMBINE
PHASES: dict[int, str] = {DISPATCH_PHASE: "dispatch", COMBINE_PHASE: "combine"}
UINT32_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Failure:
    """The first failure of an op as its kernels saw it; the codes are FailureCode's.

    Attributes:
        code: the kind of failure.
        accused: rank that another rank's or this rank's kernel holds responsible, 0xFFFF for none.
        phase: a StepPhase; 0 if a peer has reported the failure, who tells no more than code and accused.
        epoch: step of the op, counted from 1 and wrapping.
        detail: depends on the code, see layout.Record.
        per_rank: likewise; for a timeout, 1 for ranks that had not arrived here.
    """

    code: int
    accused: int
    phase: int = 0
    epoch: int = 0
    detail: int = 0
    per_rank: tuple[int, ...] = ()

    @classmethod
    def from_record(cls, words: Sequence[int], world_size: int) -> Failure:
        """Reads the words of an error record."""
        per_rank = tuple(words[Record.RANKS : Record.RANKS + world_size])
        code, accused, phase = words[Record.CODE], words[Record.ACCUSED], words[Record.PHASE]
        return cls(code, accused, phase, words[Record.EPOCH], words[Record.DETAIL], per_rank)

    @property
    def absent(self) -> tuple[int, ...]:
        """Ranks whose flags had not arrived when a kernel of this rank timed out."""
        return tuple(rank for rank, is_late in enumerate(self.per_rank) if is_late)

    def awaited(self, rank: int) -> tuple[int, ...]:
        """Ranks that a timed-out kernel of `rank` waited for, including one whose flag, but not row, had arrived."""
        hint = {self.accused} & set(range(len(self.per_rank)))
        return tuple(sorted((hint | set(self.absent)) - {rank}))

    def call(self, memory: BoundMemory) -> str:
        """The call that failed, for readers on all ranks."""
        config = memory.config
        name = f"{PHASES[self.phase]} {self.epoch & UINT32_MASK}" if self.phase in PHASES else "a call"
        return f"{name} of {memory.name} with hidden size {config.hidden_dim} and top-{config.topk}"

    def exception(
        self,
        rank: int,
        timeouts: Timeouts,
        seen: Mapping[str, tuple[int, ...]] | None = None,
        verdict: Verdict | None = None,
        *,
        max_tokens: int,
    ) -> EpA2AError:
        """The error to raise on this rank.

        Args:
            rank: this one.
            timeouts: the op's.
            seen: where each rank's flags stand here (BoundMemory.epochs_seen); None where that is not known.
            verdict: of a timeout: who is gone or late, as the survivors agree; None where nobody has judged.
            max_tokens: M of the op.
        """
        where = self._where(rank)
        if self.code == FailureCode.TIMEOUT:
            return self._timeout(rank, where, timeouts, seen or {}, verdict or Verdict())
        if self.code == FailureCode.STEP_TOKENS_MISMATCH:
            return self._disagreement(where, max_tokens)
        errors: dict[int, Callable[[str], EpA2AError]] = {
            FailureCode.ALTERNATION: self._alternation,
            FailureCode.CAPACITY: self._too_many_rows,
            FailureCode.WEIGHTS_MISSING: self._weights_missing,
        }
        return errors.get(self.code, self._foreign_indices)(where)

    def _where(self, rank: int) -> str:
        if self.phase:
            return f"{PHASES.get(self.phase, 'a kernel')} {self.epoch & UINT32_MASK} on rank {rank}"
        return f"a call on another rank, which reported it to rank {rank}"

    def _alternation(self, where: str) -> AlternationError:
        return AlternationError(
            "dispatch and combine to alternate on the device",
            f"two in a row, or a combine that does not fit its dispatch, at {where} (first seen by rank "
            f"{self.accused}); a graph may have been replayed that holds one without the other, or a combine of "
            "another number of tokens or step_tokens",
            f"{AlternationError.remedy} {RESET}",
        )

    def _disagreement(self, where: str, max_tokens: int) -> ConfigMismatchError:
        if not self.detail:
            # reported by a peer: per_rank holds the ranks that were late here, not their choices
            found = f"another rank reported a difference before {where}"
            remedy = f"That rank's error says what differs. {RESET}"
            return ConfigMismatchError("all ranks to agree on each step", found, remedy)
        expected, found, remedy = disagreement(self.per_rank, max_tokens)
        return ConfigMismatchError(expected, f"{found} at {where}", f"{remedy} {RESET}")

    def _too_many_rows(self, where: str) -> CapacityError:
        # a peer's report holds no number
        rows = f", {self.detail} rows" if self.detail else ""
        return CapacityError(
            "max_total_recv_tokens rows at most", f"more on rank {self.accused} (seen at {where}{rows})"
        )

    def _weights_missing(self, where: str) -> ConfigMismatchError:
        without = [rank for rank, missing in enumerate(self.per_rank) if missing]
        named = f"ranks {without}" if self.detail else "a rank that another rank has seen"
        return ConfigMismatchError(
            "combine to be given weights on all ranks or on none",
            f"none on {named}, {where}",
            f"Pass weights to combine on every rank or on none. {RESET}",
        )

    def _foreign_indices(self, where: str) -> ForeignIndicesError:
        token = f"token {self.detail}, " if self.phase else ""
        return ForeignIndicesError(
            "combine's indices to be those given to this rank's dispatch",
            f"others at {token}{where}",
            f"{ForeignIndicesError.remedy} {RESET}",
        )

    def _timeout(
        self, rank: int, where: str, timeouts: Timeouts, seen: Mapping[str, tuple[int, ...]], verdict: Verdict
    ) -> RankTimeoutError:
        others = [other for other in self.absent if other != rank]
        if not self.phase:
            here = f"a failure in {where}"
        elif others:
            here = f"ranks {others} had not come when {where} gave up"
        elif self.absent:
            here = f"{where} began when others had given up, and left at once"
        else:
            here = f"all ranks' flags had come when {where} gave up: a row was missing, or a peer had given up"
        wanted = self.epoch & UINT32_MASK
        facts = [here]
        if seen:
            by_kind = [f"{kind} at {by_value(epochs)}" for kind, epochs in seen.items()]
            facts.append(f"epochs here now, {wanted} wanted: {', '.join(by_kind)}")
            for other in self.awaited(rank):
                if all(epochs[other] == wanted for epochs in seen.values()):
                    # read after the wait has given up
                    facts.append(f"rank {other} has begun this call by now, late or without sending all of its rows")
        expected = f"every rank within {timeouts.named(self.epoch)}"
        return verdict.error(rank, expected, "; ".join(facts), wanted=wanted, epochs=seen)


def by_value(epochs: Sequence[int]) -> str:
    """Each epoch with the ranks whose flag stands there, the common one first."""
    common_first = [epoch for epoch, _ in Counter(epochs).most_common()]
    ranks_at = {epoch: [rank for rank, other in enumerate(epochs) if other == epoch] for epoch in common_first}
    return " and ".join(f"{epoch} from ranks {ranks}" for epoch, ranks in ranks_at.items())


def error_of(failure: Failure, memory: BoundMemory, seen: Mapping[str, tuple[int, ...]] | None = None) -> EpA2AError:
    """The error to raise for a failure. For a time-out the survivors first agree on who is gone (`agree`).

    Args:
        failure: recorded by a kernel of this rank, or reported by a peer in one word.
        memory: of the op.
        seen: each rank's epochs (BoundMemory.epochs_seen); None for a peer's report, empty while a graph is captured.
    """
    if failure.code in (FailureCode.STEP_TOKENS_MISMATCH, FailureCode.WEIGHTS_MISSING) and not failure.detail:
        # a peer's report, which is one word, does not say how ranks disagree
        choices = memory.choices_of_step(failure.code)
        if len(set(choices)) > 1:
            failure = replace(failure, detail=1, per_rank=tuple(choices))
    rank, verdict = memory.config.rank, None
    if failure.code == FailureCode.TIMEOUT:
        own_flags = [epochs[rank] for epochs in (seen or {}).values()]
        # combine weights are awaited before flags are posted: there the kernel counts this rank among those that came
        posted = failure.epoch & UINT32_MASK in own_flags or (bool(failure.absent) and rank not in failure.absent)
        waited = seen is not None and (not seen or posted)
        given_up = GivenUp(memory.failure_key, failure.call(memory), failure.awaited(rank), waited, clock.now())
        verdict = agree(memory.peers, given_up, memory.timeouts.of_step(failure.epoch))
    max_tokens = memory.config.max_num_inp_token_per_rank
    return failure.exception(rank, memory.timeouts, seen, verdict, max_tokens=max_tokens)


def check_peers(op: EpDispatchCombineOp) -> None:
    """Raise the first failure of an op that any rank has reported, for a rank that uses results of others.

    `op.check` raises what kernels of this rank have met. Where the last kernel of a step fails on another rank only,
    this one learns of it by its next kernel. That is too late if it has used results of the other rank's step. A report
    is here before the failed kernel of its rank ends.

    Raises:
        RankTimeoutError, AlternationError, ConfigMismatchError, CapacityError, ForeignIndicesError: as found.
    """
    if failure := op.memory.poison.read():
        # this rank's own kernels know more
        op.check()
        raise error_of(failure, op.memory)
