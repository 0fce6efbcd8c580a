"""Tensor-, data- and expert-parallel groups of this process, and the expert-parallel communicator."""
