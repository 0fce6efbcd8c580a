"""The shape of atom.model_ops.moe; see shape/README.md."""

import importlib.util
from dataclasses import dataclass


@dataclass
class FusedMoEParallelConfig:
    dp_size: int
    use_ep: bool
    local_ep_size: int
    dp_logical_ratio: int = 1

    @property
    def use_all2all_kernels(self):
        can = importlib.util.find_spec("mori") is not None
        return self.dp_size > 1 and self.use_ep and self.dp_logical_ratio == 1 and can


class FusedMoEMethodBase:
    def __init__(self, moe, moe_quant_config=None):
        self.moe = moe
        self.moe_quant_config = moe_quant_config

    @staticmethod
    def _maybe_make_prepare_finalize(moe, quant_config):
        raise NotImplementedError("ATOM would make MORI's here")

    def maybe_make_prepare_finalize(self):
        if not self.moe.moe_parallel_config.use_all2all_kernels:
            return None
        return FusedMoEMethodBase._maybe_make_prepare_finalize(self.moe, self.moe_quant_config)
