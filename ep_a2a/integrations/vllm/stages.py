"""Lets the last pipeline stage learn of the failures of earlier ones: it alone hands out tokens.

An earlier stage sends its hidden states while its kernels still run, and vLLM asks nobody but the last stage whether a
step has failed. So a word goes with the hidden states, on the stream behind the kernels. A stage that raises before it
has sent them sends the error's text in their place.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ep_a2a.errors import RankTimeoutError, StateError

WORD = "ep_a2a.failure"
"""The word's name among the tensors that stages send each other."""
ERROR = "ep_a2a.error"
"""The name of the text of a stage that has no tensors to send."""
EXPECTED = "earlier pipeline stages to finish their steps"
REMEDY = "The log of this engine's workers of that stage has the error itself. Start the engine again."

live_stages: weakref.WeakSet[Stage] = weakref.WeakSet()
"""Those of this process; a worker has one."""


def link_stages(group: Any, words: Callable[[], Iterable[torch.Tensor]]) -> None:
    """Patch `stage-failures`: puts a Stage in front of the group's methods. Idempotent.

    Args:
        group: vLLM's GroupCoordinator of the pipeline.
        words: returns the poison words of this stage's ops, int32 [1] each.
    """
    if "isend_tensor_dict" not in vars(group):
        Stage(group, words)  # the group's new methods hold it


class Stage:
    """This worker's pipeline stage: it sends the failures of its own kernels and of earlier stages to the next one.

    See `link_stages`. A failure stays in the words, so those of later steps say it again.
    """

    def __init__(self, group: Any, words: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._words = words
        on_gpu = group.device.type == "cuda"
        self._came = torch.zeros(1, dtype=torch.int32, device=group.device)
        self._seen = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._send = None if group.is_last_rank else group.isend_tensor_dict
        group.isend_tensor_dict = self._sending(group.isend_tensor_dict)
        group.irecv_tensor_dict = self._receiving(group.irecv_tensor_dict)
        live_stages.add(self)

    def check(self) -> None:
        """Raises a failure of earlier stages that has come with the hidden states of a finished step.

        Raises:
            RankTimeoutError, StateError: by the kind of failure.
        """
        if not self._seen:
            return
        # Triton is loaded when the first op is made
        from ep_a2a.kernels.layout import FailureCode
        from ep_a2a.kernels.primitives import NOBODY
        from ep_a2a.ops.memory import failure_of

        if failure := failure_of(int(self._seen)):
            what = FailureCode(failure.code).name
            if failure.accused != NOBODY.value:
                what += f", for which rank {failure.accused} of that stage is accused"
            if failure.code == FailureCode.TIMEOUT:
                raise RankTimeoutError("every rank of an earlier pipeline stage in time", what, REMEDY)
            raise StateError(EXPECTED, what, REMEDY)

    def tell(self, error: Exception) -> None:
        """Sends this stage's first error to the next one, which waits for hidden states; nothing where it cannot."""
        if self._send is not None:
            send, self._send = self._send, None
            with contextlib.suppress(Exception):
                # held until all is sent
                self._handles = send({ERROR: f"{type(error).__name__}: {error}"})

    def _sending(self, send: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(send)
        def isend_tensor_dict(tensor_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            word = torch.cat([self._came, *self._words()]).amax(0, keepdim=True)
            return send({**tensor_dict, WORD: word}, *args, **kwargs)

        return isend_tensor_dict

    def _receiving(self, receive: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(receive)
        def irecv_tensor_dict(*args: Any, **kwargs: Any) -> Any:
            tensor_dict, handles, postprocess = receive(*args, **kwargs)
            if ERROR in tensor_dict:
                raise StateError(EXPECTED, tensor_dict[ERROR], REMEDY)

            def keep() -> None:
                # when all has come, and before the forward pass that the step's tokens come from
                word = tensor_dict.pop(WORD)
                self._came.copy_(word)
                self._seen.copy_(word, non_blocking=True)

            return tensor_dict, handles, [*postprocess, keep]

        return irecv_tensor_dict
