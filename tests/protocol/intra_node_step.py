"""What one rank does in one step of IntraNode's protocol: a launch of programs for each launch of a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.protocol.machine import OVERWRITTEN, STALE_READ, Action, Launch, Program, Turn, Violation
from tests.protocol.rules import EMPTY, FULL, READ, Calls, Choice, Path

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.protocol.intra_node import IntraNode


class Step:
    """The launches of one rank in one step."""

    def __init__(self, model: IntraNode, rank: int, step: int, choice: Choice) -> None:
        self.model, self.rules, self.rank, self.step = model, model.rules, rank, step
        self.path, self.is_split, self.routes = choice.path, choice.calls is Calls.SPLIT, choice.routes
        self.peers = [peer for peer in range(model.num_ranks) if peer != rank]
        self.others = [peer for peer in choice.routes if peer != rank]
        self.epoch, self.data, self.op = model.epoch(step), model.row(step, rank), step % self.rules.num_ops
        self.copy = step % (self.rules.num_ops * self.rules.num_copies)

    def launches(self) -> tuple[Launch, ...]:
        """All launches of the step, in order."""
        dispatch = self.counted_dispatch() if self.path is Path.COUNTED else self.low_latency_dispatch()
        experts: Launch = ((self.experts_read(),),)
        if not self.rules.flag_behind_experts:
            experts = (*experts, (self.posts_flags(self.model.combine_flags),))
        return (*dispatch, experts, *self.combine())

    def sources(self, turn: Turn) -> dict[int, int] | None:
        """What the COUNTS tell that this rank sees: masks of destinations by source; None if some are late."""
        return self.model.sources(turn.memory, self.copy, self.rank, self.step)

    def received_at(self, turn: Turn, destination: int, source: int) -> int:
        """The word in which a destination's experts read the row of a source."""
        if self.rules.shared_staging and self.path is Path.COUNTED:
            return self.model.flagged_rows(self.copy, destination, source)
        if not self.rules.compact:
            return self.model.tokens(destination, source)
        # rows_before: dense, behind the rows of lower ranks
        masks = self.sources(turn)
        assert masks is not None
        lower = sum(mask >> destination & 1 for peer, mask in masks.items() if peer < source)
        return self.model.tokens(destination, lower)

    def must_be(self, turn: Turn, word: int, data: int) -> None:
        """Reads a word of data for the last time."""
        if turn.memory[word] != data:
            raise Violation(f"{STALE_READ}: {self.model.words.names[word]}")
        turn.memory[word] = READ

    # --- actions ---

    def does(self, name: str, act: Callable[[Turn], None]) -> Action:
        """Hands over stores or changes own words: nobody else can tell when."""

        def take(turn: Turn) -> bool:
            act(turn)
            return True

        return Action(f"{name} (step {self.step})", take, is_local=True)

    def waits(self, name: str, take: Callable[[Turn], bool], *, is_stable: bool = False) -> Action:
        return Action(f"{name} (step {self.step})", take, is_stable=is_stable)

    def fence(self, *, of_all_programs: bool) -> Program:
        """What a release waits for; of_all_programs: arrive_last."""
        name = f"passes a fence (step {self.step})"
        fence = Action(name, lambda turn: turn.has_drained(of_all_programs=of_all_programs), is_local=True)
        return (fence,) if self.rules.releases else ()

    def posts_flags(self, flags: Callable[..., int]) -> Action:
        """post_all."""

        def act(turn: Turn) -> None:
            for peer in self.peers:
                turn.signal(flags(self.op, peer, self.rank), self.epoch)

        return self.does(f"posts {self.name_of(flags)}", act)

    def awaits_flags(self, flags: Callable[..., int], *, of_partners: bool = False) -> Action:
        """wait_all; of_partners: only of ranks with which this one has exchanged rows, which is a mutant."""

        def take(turn: Turn) -> bool:
            peers = {*turn.known, *self.routes} - {self.rank} if of_partners else self.peers
            words = (flags(self.op, self.rank, peer) for peer in peers)
            return not any(self.rules.late(turn.memory[word], self.epoch) for word in words)

        return self.waits(f"sees all {self.name_of(flags)}", take, is_stable=True)

    def name_of(self, flags: Callable[..., int]) -> str:
        return self.model.words.names[flags(0, 0, 0)].split("[")[0]

    def posts_counts(self, *, awaited: bool) -> Action:
        """post_counts; awaited: no reader looks at them before they are there."""

        def act(turn: Turn) -> None:
            for peer in self.peers:
                word = self.model.counts(self.copy, peer, self.rank)
                (turn.signal if awaited else turn.store)(word, self.model.counts_of(self.step, self.others))

        return self.does("posts COUNTS", act)

    def awaits_counts(self) -> Action:
        """wait_counts."""
        return self.waits("sees all COUNTS", lambda turn: self.sources(turn) is not None, is_stable=True)

    def accepts_rows(self, *, waits: bool) -> Action:
        """accept_rows publishes RECV_COUNTS: behind acquired flags the counts must be there, else they are awaited."""

        def take(turn: Turn) -> bool:
            masks = self.sources(turn)
            if masks is None:
                if waits:
                    return False
                raise Violation(f"{STALE_READ}: COUNTS")
            turn.known = tuple(source for source, mask in masks.items() if mask >> self.rank & 1)
            if self.rules.pads:
                self.pad_unused_rows(turn)
            return True

        return self.waits("publishes RECV_COUNTS", take, is_stable=True)

    def pad_unused_rows(self, turn: Turn) -> None:
        filled = {self.received_at(turn, self.rank, source) for source in turn.known}
        for source in self.peers:
            # rows of layout compact are dense, and here none is this rank's own
            row = self.model.tokens(self.rank, source - (self.rules.compact and source > self.rank))
            if row not in filled:
                turn.store(row, READ)

    # --- dispatch ---

    def counted_dispatch(self) -> list[Launch]:
        """bulk_dispatch_kernel."""

        def write_rows(turn: Turn) -> None:
            for peer in self.others:
                turn.store(self.received_at(turn, peer, self.rank), self.data)

        counts = (self.posts_counts(awaited=self.rules.compact),)
        counts += (self.awaits_counts(),) if self.rules.compact else ()
        rows = (self.does("writes TOKENS", write_rows),) if self.others else ()
        send = (*counts, *rows, *self.fence(of_all_programs=True), self.posts_flags(self.model.dispatch_flags))
        waits = (self.awaits_flags(self.model.dispatch_flags),) if self.rules.dispatch_waits else ()
        receive = (*waits, self.accepts_rows(waits=False))
        return [(send,), (receive,)] if self.is_split else [((*send, *receive),)]

    def low_latency_dispatch(self) -> list[Launch]:
        """ll_dispatch_kernel: count publisher, flag poster, senders, receivers."""
        send = (
            (self.posts_counts(awaited=True),),
            (self.posts_flags(self.model.dispatch_flags),),
            (self.pushes_rows(), *self.pushes_sides()) if self.others else (),
        )
        before = (self.awaits_counts(),) if self.rules.compact else ()
        receive = (
            (self.accepts_rows(waits=True),),
            (self.awaits_flags(self.model.dispatch_flags),) if self.rules.poster_waits else (),
            *((*before, self.moves_row(peer)) for peer in self.peers),
        )
        if self.is_split:
            return [send, receive]
        return [(*(post + wait for post, wait in zip(send[:2], receive[:2])), send[2], *receive[2:])]

    def pushes_rows(self) -> Action:
        def act(turn: Turn) -> None:
            # a row that is written in full is not its own flag
            push = turn.store if self.rules.written_in_full else turn.signal
            for peer in self.others:
                push(self.model.flagged_rows(self.copy, peer, self.rank), self.data)

        return self.does("pushes LOW_LATENCY_ROWS", act)

    def pushes_sides(self) -> Program:
        """push_position: released when the row cannot be its own flag."""
        full = FULL if self.rules.written_in_full else 0

        def act(turn: Turn) -> None:
            for peer in self.others:
                turn.signal(self.model.sides(self.copy, peer, self.rank), self.data + full)

        fence = self.fence(of_all_programs=False) if full else ()
        return (*fence, self.does("pushes LOW_LATENCY_SIDES", act))

    def moves_row(self, peer: int) -> Action:
        """take_row_block and what follows: waits for the row or the count that there is none; leaves EMPTY."""
        row, side = (region(self.copy, self.rank, peer) for region in (self.model.flagged_rows, self.model.sides))
        count, data = self.model.counts(self.copy, self.rank, peer), self.model.row(self.step, peer)

        def take(turn: Turn) -> bool:
            memory = turn.memory
            mask = memory[count] - 1
            told = not self.model.is_late(memory[count], mask >> self.model.num_ranks, self.step)
            if told and not mask >> self.rank & 1:
                return True
            is_full = memory[side] != READ and bool(memory[side] & FULL)
            beside = memory[side] - (FULL if is_full else 0)
            if self.model.is_late(beside, (beside - 1) // self.model.num_ranks, self.step):
                return False
            if memory[row] == EMPTY and not is_full:
                return False
            memory[side] = beside
            self.must_be(turn, side, data)
            self.must_be(turn, row, data)
            target = self.received_at(turn, self.rank, peer)
            if memory[target] not in (EMPTY, READ):
                raise Violation(f"{OVERWRITTEN}: {self.model.words.names[target]}")
            turn.write(target, data)
            if self.rules.readers_empty:
                turn.store(row, EMPTY)
            return True

        return self.waits(f"takes the row of rank {peer}, or hears of none", take)

    def experts_read(self) -> Action:
        """The experts' launch: reads all received rows, and the counts again where steps are counted."""

        def take(turn: Turn) -> bool:
            if self.sources(turn) is None:
                raise Violation(f"{STALE_READ}: COUNTS")
            for peer in turn.known:
                self.must_be(turn, self.received_at(turn, self.rank, peer), self.model.row(self.step, peer))
            for peer in self.peers:
                turn.memory[self.model.counts(self.copy, self.rank, peer)] = READ
            return True

        return self.waits("experts read TOKENS", take)

    # --- combine ---

    def combine(self) -> list[Launch]:
        """combine_kernel: flag program, senders, receivers."""
        flags = self.model.combine_flags
        tells: Program = (self.posts_flags(flags),) if self.rules.flag_behind_experts else ()
        hears: Program = ()
        if self.rules.combine_waits:
            hears = (self.awaits_flags(flags, of_partners=not self.rules.waits_for_all),)
        if self.rules.weights:
            tells = (self.tells_weights(), *self.fence(of_all_programs=False), *tells)
            hears = (*hears, self.checks_weights())
        if self.is_split:
            return [(tells, (self.pushes_results(),)), (hears, (self.adds_results(),))]
        return [((*tells, *hears), (self.pushes_results(),), (self.adds_results(),))]

    def tells_weights(self) -> Action:
        def act(turn: Turn) -> None:
            for peer in self.peers:
                turn.store(self.model.weight_epochs(self.op, peer, self.rank), self.epoch)

        return self.does("writes WEIGHT_EPOCHS", act)

    def checks_weights(self) -> Action:
        def take(turn: Turn) -> bool:
            for peer in self.peers:
                word = self.model.weight_epochs(self.op, self.rank, peer)
                if turn.memory[word] != self.epoch:
                    raise Violation(f"{STALE_READ}: {self.model.words.names[word]}")
            return True

        return self.waits("sees that all bring weights", take)

    def pushes_results(self) -> Action:
        """push_results; own rows only in halves (OWN_IN_PLACE)."""

        def act(turn: Turn) -> None:
            own = (self.rank,) if self.is_split and self.rank in self.routes else ()
            for peer in (*turn.known, *own):
                turn.signal(self.model.combine_rows(peer, self.rank), self.data)

        return self.does("pushes COMBINE_ROWS", act)

    def adds_results(self) -> Action:
        """add_results: waits for the rows of the routes that dispatch has recorded; leaves EMPTY."""
        peers = self.routes if self.is_split else self.others
        words = {self.model.combine_rows(self.rank, peer): self.model.row(self.step, peer) for peer in peers}

        def take(turn: Turn) -> bool:
            if any(turn.memory[word] == EMPTY for word in words):
                return False
            for word, data in words.items():
                self.must_be(turn, word, data)
                if self.rules.readers_empty:
                    turn.store(word, EMPTY)
            return True

        return self.waits("adds COMBINE_ROWS", take)
