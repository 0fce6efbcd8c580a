"""The tensor-, data- and expert-parallel groups of this process, and the communicator of the last."""
