"""The shape of atom.utils.envs; see shape/README.md."""

ATOM_MORI_V2 = False
ATOM_MORI_FP4_DISPATCH = False
ATOM_MORI_COMBINE_QUANT = "none"
